"""Test settings: eight CPU devices, and hypothesis profiles dev (default), ci (derandomised) and fuzz."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from hypothesis import settings

settings.register_profile("dev", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=25, derandomize=True)
settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def tpu_compiler(monkeypatch):
    """libtpu beside others of its kind, on a machine without a TPU; what needs it is skipped where it is missing."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    from ringtide.bench.compile import environment

    for name, value in environment("").items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def _pool():
    pool = _Ranks()
    yield pool
    pool.end()


@pytest.fixture
def ranks(_pool, request, tmp_path):
    """Calls a function of the test's file on ranks of torch.distributed (gloo, a thread each), in processes that all
    tests share, since to start one takes seconds.

    ranks(name, count, *arguments): each calls name(rank, count, *arguments), JSON's types. Fails with what they said.
    """
    calls = iter(range(1000))
    return lambda name, count, *arguments, timeout=300: _pool.call(
        count, [str(request.path), name, count, f"file://{tmp_path}/ranks-{next(calls)}", arguments], timeout
    )


class _Ranks:
    def __init__(self):
        self.processes, self.said = [], []

    def call(self, count, task, timeout):
        for rank in range(len(self.processes), count):
            self.said.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115  a pipe may fill up
            command = [sys.executable, str(Path(__file__).parent / "rank.py"), str(rank)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.said[-1], "text": True}
            self.processes.append(subprocess.Popen(command, **pipes))
        at_work, deadline = self.processes[:count], time.monotonic() + timeout
        for process in at_work:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        waiting = {process.stdout: process for process in at_work}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready or any(pipe.readline() != "done\n" for pipe in ready):
                time.sleep(1)  # what the others say of it
                texts = [(file.seek(0), file.read())[1][-3000:] for file in self.said]
                self.end()
                pytest.fail(f"{'failed' if ready else f'not done in {timeout} s'}\n" + "\n".join(texts))
            for pipe in ready:
                del waiting[pipe]

    def end(self):
        for process in self.processes:
            process.kill()
            process.communicate()
        self.processes, self.said = [], []
