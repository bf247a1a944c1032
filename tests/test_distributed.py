"""Several processes as one run: the numbers of one process, and one clear line when something goes wrong."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ringtide.models import BadInput, processes

TEXT = "".join(f"def f{i}(x):\n    return x * {i * i} + {i % 7}\n\n" for i in range(2000))
MODEL = ["--preset", "llama-micro", "--seq", 64, "--batch", 2]
RUN = [*MODEL, "--ckpt-every", 2, "--val-every", 3, "--mesh", "fsdp=2,context=4"]
SHORT, ENDLESS = ["--steps", 6], ["--steps", 5000]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Without the devices of this process, and with a place to keep what was compiled."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | cache


def port():
    """A port that is free, and the next one too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as a:
            number = a.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", number + 1)).close()
                return number
            except (OSError, OverflowError):
                continue


@pytest.fixture
def start(environment):
    """Starts `ringtide train llama` as one process, or as several; ends what is left of them."""
    started = []

    def start(out, *options, count=1):
        where, code = f"127.0.0.1:{port()}", "from ringtide.cli import main; main()"
        command = [sys.executable, "-c", code, "train", "llama", "--out", str(out), *map(str, options)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        for i in range(count):
            several = ["--coordinator", where, "--processes", str(count), "--process-id", str(i)] if count > 1 else []
            started.append(subprocess.Popen(command + several, **pipes))
        return started[-count:]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def curve(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return np.array([[line.get(name, 0) for name in ("loss", "val_loss", "grad_norm")] for line in lines])


@pytest.fixture(scope="module")
def alone(text, environment, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    command = [sys.executable, "-c", "from ringtide.cli import main; main()", "train", "llama", "--out", str(out)]
    subprocess.run(
        [*map(str, [*command, "--data", text, *RUN, *SHORT])],
        check=True,
        env=environment,
        capture_output=True,
        timeout=150,
    )
    return out


def test_two_processes_learn_what_one_learns_and_resume_as_one(alone, text, start, tmp_path):
    out = tmp_path / "run"
    ends = [finish(process) for process in start(out, "--data", text, *RUN, *SHORT, count=2)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "unigram" in ends[0][1]
    assert "unigram" not in ends[1][1]  # the first one speaks for all
    np.testing.assert_allclose(curve(out), curve(alone), rtol=1e-5)
    assert (out / "model" / "model.safetensors").stat().st_size == (
        alone / "model" / "model.safetensors"
    ).stat().st_size

    for step in (4, 6):  # as if it had been killed after step 2
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(out / "model")
    [process] = start(out, "--resume", "--mesh", "ulysses=2", "--strategy", "ulysses", "--remat", "attention")
    code, _, err = finish(process)
    assert code == 0, err
    assert "resumed with fsdp 1, ulysses 2, context 1, strategy ulysses, remat attention, before fsdp 2" in err
    np.testing.assert_allclose(curve(out), curve(alone), rtol=1e-5)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_other_says_so_and_ends_and_the_run_goes_on(text, start, tmp_path, victim):
    out = tmp_path / "run"
    both = start(out, "--data", text, *RUN, *ENDLESS, count=2)
    while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < 5:
        assert [process.poll() for process in both] == [None, None], [process.communicate() for process in both]
        time.sleep(0.01)
    both[victim].send_signal(signal.SIGKILL)
    code, _, err = finish(both[1 - victim])
    assert code == 1
    errors = [line for line in err.splitlines() if "rror" in line]
    assert errors == [f"Error: process {victim} has ended; start all again with --resume"]
    assert "Traceback" not in err

    if victim == 1:
        return
    saved = json.loads((out / "run.json").read_text())  # a shorter run, so that the test ends
    saved["settings"]["steps"] = done = len(curve(out)) + 3
    (out / "run.json").write_text(json.dumps(saved))
    first, second = (finish(process) for process in start(out, "--resume", "--mesh", "context=2", count=2))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert len(curve(out)) == done + 1


def test_what_ends_one_ends_all_and_each_says_why(text, start, tmp_path):
    """The folder is in use, which only process 0 can see; and a Ctrl-C that only process 1 gets saves."""
    out = tmp_path / "run"
    (out / "x").mkdir(parents=True)
    ends = [finish(process) for process in start(out, "--data", text, *RUN, count=2)]
    assert [code for code, _, _ in ends] == [1, 1]
    for _, _, err in ends:
        assert err.split("Error: ")[1:] == [f"--out {out}: already holds something; choose another folder\n"]
        assert "Traceback" not in err

    out = tmp_path / "other"
    both = start(out, "--data", text, *MODEL, *ENDLESS, "--mesh", "context=2", count=2)
    while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < 5:
        assert [process.poll() for process in both] == [None, None], [process.communicate() for process in both]
        time.sleep(0.01)
    both[1].send_signal(signal.SIGINT)
    ends = [finish(process) for process in both]
    assert [code for code, _, _ in ends] == [130, 130], ends
    assert "saved at step" in ends[0][1]


# The roll call, with threads for processes.


def call(count, *others, patience=20):
    """What each says, process 0 first: an error's line or None. others: (id, options) each, in order."""
    number, said = port(), {}

    def attend(i, f, *args):
        try:
            f(*args)
            said[i] = None
        except BadInput as error:
            said[i] = str(error)

    calls = [(processes._call_roll, "127.0.0.1", number, count, {"seq": 64})]
    calls += [(processes.answer, "127.0.0.1", number, i, options) for i, options in others]
    threads = [threading.Thread(target=attend, args=(i, *x)) for i, x in enumerate(calls)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(patience)
    return [said[i] for i in range(len(calls))]


def test_all_are_there():
    assert call(3, (2, {"seq": 64}), (1, {"seq": 64})) == [None] * 3


def test_another_option_is_said_on_all():
    message = "process 2 has seq 32, process 0 has 64: start all processes alike"
    assert call(3, (1, {"seq": 64}), (2, {"seq": 32})) == [message] * 3


def test_an_id_twice_is_said_to_the_second_only():
    said = call(3, (1, {"seq": 64}), (1, {"seq": 64}), (2, {"seq": 64}))
    assert said == [None, None, "--process-id 1: is taken, or not below 3", None]


def test_one_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 1)
    message = "--processes 3: process 2 has not come within 1 s"
    assert call(3, (1, {"seq": 64})) == [message] * 2


def test_a_stranger_is_no_process(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 2)
    number = port()

    def stranger():
        time.sleep(0.3)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff\xfe\n", b'{"process": "1", "options": {}}\n'):
            with socket.create_connection(("127.0.0.1", number)) as connection:
                connection.sendall(words)

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(BadInput, match="process 1 has not come within 2 s"):
        processes._call_roll("127.0.0.1", number, 2, {})
    thread.join()


def test_no_coordinator_is_one_line(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    with pytest.raises(BadInput, match=r"process 0 cannot be reached within 0.5 s \(Connection refused\)"):
        processes.answer("127.0.0.1", port(), 1, {})


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(BadInput, match="is another one running"):
        processes._call_roll("127.0.0.1", server.getsockname()[1], 2, {})


@pytest.mark.parametrize(
    ("where", "me", "message"),
    [
        ("localhost", 0, "--coordinator localhost: expected HOST:PORT"),
        ("localhost:0", 0, "--coordinator localhost:0: expected HOST:PORT"),
        ("localhost:65535", 0, "a port below 65535"),
        (":7000", 2, "--process-id 2: must be from 0 to 1"),
    ],
)
def test_what_cannot_be_is_one_line(where, me, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        processes.join(where, 2, me, {})


def test_without_a_host_it_is_loopback():
    assert processes._address(":7000") == ("127.0.0.1", 7000)
    assert processes._address("[::1]:7000") == ("::1", 7000)
