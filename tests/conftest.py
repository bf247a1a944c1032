"""Test settings: eight CPU devices, and hypothesis profiles dev (default), ci (derandomised) and fuzz."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec

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


@pytest.fixture
def ranks(request, tmp_path):
    """Calls a function of the test's file in processes of torch.distributed (gloo, one thread each).

    ranks(name, count, *arguments): each process calls name(rank, count, *arguments), JSON's types. Fails with what the
    processes said where one of them fails.
    """
    code = (
        "import datetime, json, runpy, sys, torch, torch.distributed as dist; "
        "torch.set_num_threads(1); rank, file, name, count, where, timeout, rest = map(json.loads, sys.argv[1:]); "
        "dist.init_process_group('gloo', init_method=where, rank=rank, world_size=count, "
        "timeout=datetime.timedelta(seconds=timeout)); "
        "runpy.run_path(file)[name](rank, count, *rest); dist.barrier(); dist.destroy_process_group()"
    )
    started = []

    def call(name, count, *arguments, timeout=100):
        given = [str(request.path), name, count, f"file://{tmp_path}/{len(started)}", timeout, arguments]
        command, given, said = [sys.executable, "-c", code], list(map(json.dumps, given)), []
        for i in range(count):
            said.append(open(tmp_path / f"rank-{len(started)}", "w+"))  # noqa: SIM115  a pipe may fill up
            started.append(subprocess.Popen([*command, str(i), *given], stdout=said[-1], stderr=subprocess.STDOUT))
        processes, deadline = started[-count:], time.monotonic() + timeout
        while (codes := [process.poll() for process in processes]) != [0] * count:
            if any(codes) or time.monotonic() > deadline:
                time.sleep(1)  # what the others say of it
                texts = [(file.seek(0), file.read())[1][-3000:] for file in said]
                pytest.fail(f"exit codes {codes}\n" + "\n".join(texts))
            time.sleep(0.05)

    yield call
    for process in started:
        process.kill()
        process.wait()
