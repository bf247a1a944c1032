"""Training a Laplace: one curve whatever the ranks; killed, resumed, damaged, refused."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from ringtide.cli import main, train_laplace  # noqa: E402
from ringtide.models import BadInput, checkpoint, laplace, laplace_train, laplace_weights, processes, ranks  # noqa: E402

CONFIG = laplace.PRESETS["laplace-micro"]
RUN = {"preset": "laplace-micro", "seq": 48, "batch": 4, "steps": 8, "warmup": 3, "lr": 0.01}
RUN |= {"val_every": 4, "val_windows": 5, "ckpt_every": 4}
LONG = {**RUN, "steps": 40, "lr": 0.003, "val_every": 20, "ckpt_every": 3}
MESHES = {"data=4": {"data": 4}, "context=4": {"context": 4}, "data=2,fsdp=2": {"data": 2, "fsdp": 2}}
MESHES |= {"fsdp=2,context=2": {"fsdp": 2, "context": 2}}
ONE = ranks.Parallel()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of short documents, so that several end within a window."""
    folder = tmp_path_factory.mktemp("data")
    for i in range(150):
        (folder / f"{i:03d}.py").write_text(f"def f{i}(x):\n    return x * {i * i} + {i % 7}\n" * (1 + i % 3))
    return folder


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """{"short" or "long": the folder of a run on one rank that nothing disturbed}"""
    out = tmp_path_factory.mktemp("runs")
    for name, given in (("short", RUN), ("long", LONG)):
        train(out / name, {**given, "data": str(text)})
    return {"short": out / "short", "long": out / "long"}


def train(out, given, resume=False):
    """In this process; what was said."""
    said = []
    laplace_train.run(out, given, ONE, resume, said.append)
    return said


def lines(out):
    """Everything of each line that is not a time, as it was written."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in found]


def same_curve(got, want, bound=1e-5):
    for name in ("loss", "val_loss"):
        values, expected = ({line["step"]: line[name] for line in lines(out) if name in line} for out in (got, want))
        assert values.keys() == expected.keys()
        np.testing.assert_allclose(
            list(values.values()), list(expected.values()), rtol=0, atol=bound, err_msg=f"{got}: {name}"
        )


def go_back(out, step):
    """As if it had been killed after the checkpoint of that step."""
    for later in checkpoint.steps(out / "checkpoints"):
        if later > step:
            shutil.rmtree(checkpoint.place(out / "checkpoints", later))
    shutil.rmtree(out / "model", ignore_errors=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# Over ranks.


def train_over(rank, count, port, folder, given, meshes):
    """Each mesh; the last one again, from its checkpoint of step 4; the same on the first mesh; then in bfloat16."""
    dist.destroy_process_group()  # joins as `ringtide train` does
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    link, out = ranks.join({}), lambda name: Path(folder) / name
    for mesh, axes in meshes.items():
        laplace_train.run(out(mesh), given, ranks.Parallel(**axes), link=link)
    for name, axes in (("same", meshes[mesh]), ("other", next(iter(meshes.values())))):
        if rank == 0:
            shutil.copytree(out(mesh), out(name))
            go_back(out(name), 4)
        link.tell()
        laplace_train.run(out(name), {}, ranks.Parallel(**axes), resume=True, link=link)
    bfloat16 = ranks.Parallel(**meshes[mesh], remat="full")
    laplace_train.run(out("bfloat16"), {**given, "dtype": "bfloat16"}, bfloat16, link=link)
    link.leave()


def test_four_ranks_learn_what_one_learns_and_resume_bitwise(ranks, whole, text, tmp_path):
    """Replicated, FSDP2, context parallel and mixtures."""
    ranks("train_over", 4, free_port(), str(tmp_path), {**RUN, "data": str(text)}, MESHES)
    for mesh in (*MESHES, "other"):
        same_curve(tmp_path / mesh, whole["short"])
    assert lines(tmp_path / "same") == lines(tmp_path / mesh_of_the_last())
    same_curve(tmp_path / "bfloat16", whole["short"], bound=0.05)
    weights, want = (laplace_weights.load(path / "model") for path in (tmp_path / "data=4", whole["short"]))
    for (name, p), q in zip(weights.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4, msg=name)
    files = list((checkpoint.place(tmp_path / "bfloat16" / "checkpoints", 8) / "state").iterdir())
    assert sorted(file.name for file in files) == [f"rank-{i:05d}.safetensors" for i in range(4)]
    read = laplace_train.reader(tmp_path / "bfloat16" / "checkpoints", 8)
    assert read("lm_head.weight.master" if not CONFIG.tied else "model.embeddings.weight.master").dtype == torch.float32


def mesh_of_the_last():
    return list(MESHES)[-1]


WITHOUT_JAX = (
    "import sys; sys.modules |= dict.fromkeys(['jax', 'jaxlib', 'optax', 'orbax', 'orbax.checkpoint', 'flax'])"
)


def start(out, *options, count=2):
    """`ringtide train laplace` on ranks that it starts itself; rank 0 could not import jax if it wanted to."""
    code = f"{WITHOUT_JAX}; from ringtide.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "laplace", "--out", str(out), "--mesh", f"data={count}", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, **pipes, env=environment)


def children(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def options(given):
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_when_a_rank_is_killed_all_end_and_the_run_goes_on(whole, text, tmp_path):
    """kill -9 of a rank: the other one says so and ends; resumed on one rank, the curve is that of one."""
    out = tmp_path / "run"
    process = start(out, *options({**LONG, "data": text}))
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    [other] = children(process)
    os.kill(other, signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 1
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if "rror" in line]
    assert errors == ["Error: process 1 has ended; start all again with --resume"]
    assert 4 < len(lines(out)) < len(lines(whole["long"]))
    said = train(out, {}, resume=True)
    assert said[0].startswith("resumed with data 1, before data 2: the losses may differ in the last bits")
    same_curve(out, whole["long"])


# On one rank, in this process.


def test_what_was_learnt(whole, text):
    found = lines(whole["long"])
    assert [line["step"] for line in found] == list(range(41))
    assert [line["step"] for line in found if "val_loss" in line] == [0, 20, 40]
    assert found[-1]["val_loss"] < 0.6 * found[0]["val_loss"]
    assert (whole["long"] / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_damaged_checkpoint_is_named_and_resumed_before_it_bitwise(whole, text, tmp_path, dtype):
    out = tmp_path / "run"
    if dtype == "float32":
        shutil.copytree(whole["short"], out)
    else:
        train(out, {**RUN, "data": str(text), "dtype": dtype})
    before, model = lines(out), laplace_weights.load(out / "model")
    [file] = (checkpoint.place(out / "checkpoints", 8) / "state").iterdir()
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    said = train(out, {}, resume=True)
    assert "step-00000008 is damaged (state/rank-00000.safetensors has changed): using the one before" in said[0]
    assert lines(out) == before
    for p, q in zip(model.parameters(), laplace_weights.load(out / "model").parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_of_another_model_is_one_line(whole, tmp_path):
    for name, value, message in (("layers", 3, "is missing"), ("ff_dim", 32, r"has shape \[64, 32\], expected")):
        out = shutil.copytree(whole["short"], tmp_path / name)
        saved = json.loads((out / "run.json").read_text())
        saved["model"][name] = value
        (out / "run.json").write_text(json.dumps(saved))
        with pytest.raises(BadInput, match=rf"step-00000008 does not fit its run.json \(.* {message}"):
            train(out, {}, resume=True)
        with pytest.raises(BadInput, match=rf"step-00000008 does not fit its run.json \(.* {message}"):
            laplace_train.load(out)


def test_a_full_disk_is_one_line(whole, text, tmp_path, monkeypatch):
    def full(tensors, path):
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(laplace_train, "save_file", full)
    with pytest.raises(BadInput, match=r"checkpoint 4 could not be saved in .*No space left on device.*none yet"):
        train(tmp_path / "run", {**RUN, "data": str(text)})


def test_fine_tuning_begins_where_the_model_ended(whole, text, tmp_path):
    given = {name: value for name, value in RUN.items() if name != "preset"}
    train(tmp_path / "run", {**given, "data": str(text), "init": str(whole["short"] / "model")})
    assert lines(tmp_path / "run")[0]["val_loss"] == pytest.approx(lines(whole["short"])[-1]["val_loss"], rel=1e-6)
    model, settings = laplace_train.load(whole["short"])
    for p, q in zip(model.parameters(), laplace_weights.load(whole["short"] / "model").parameters(), strict=True):
        assert torch.equal(p, q)
    assert settings.seq == 48


def trainer(parallel=ONE, mesh=None, **given):
    return laplace_train.Trainer(CONFIG, laplace_train.Settings(**{**RUN, **given}), parallel, mesh, 0)


def test_a_document_begins_with_the_token_that_ends_the_one_before():
    """Each rank has its part of the rows and of the tokens; the segments are those of the whole row."""
    tokens = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    tokens[0, 2] = tokens[0, 5] = tokens[3, 7] = 0
    parts = {}
    for rows in range(2):
        for columns in range(2):
            mesh = dataclasses.make_dataclass("Mesh", ["batch_rank", "context_rank", "device"])(rows, columns, "cpu")
            parts[rows, columns] = trainer(ranks.Parallel(fsdp=2, context=2), mesh).place(tokens, tokens + 1)
    for i, want in enumerate((tokens, tokens + 1, np.cumsum(tokens == 0, axis=1))):
        got = np.block([[parts[rows, columns][i].numpy() for columns in range(2)] for rows in range(2)])
        np.testing.assert_array_equal(got, want)
    one = trainer(mesh=mesh)
    one.end = None
    assert one.place(tokens, tokens)[2] is None


def test_the_rate_goes_up_stays_and_goes_down():
    rates = [trainer(steps=20, lr=1.0, warmup=4).schedule(step) for step in range(20)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75] + [1.0] * 14 + [0.75, 0.5, 0.25])
    assert trainer(steps=1, lr=1.0, warmup=0).schedule(0) == 1.0
    assert trainer(steps=4, lr=1.0, warmup=100).schedule(2) == 1.0


@pytest.mark.parametrize(
    ("parallel", "given", "message"),
    [
        ({"context": 5}, {}, "--seq 48: must be a multiple of context of the mesh, 5"),
        (
            {"context": 16},
            {},
            "--seq 48: must be a multiple of context of the mesh, 16, and at least 4 tokens for each",
        ),
        ({"data": 3, "fsdp": 2}, {}, r"--batch 4: must be a multiple of data \* fsdp of the mesh, 6"),
        ({"data": 0}, {}, "--mesh: data must be an int of at least 1, got 0"),
        ({"remat": "some"}, {}, "--remat: expected one of none, full, got 'some'"),
        ({}, {"preset": "llama-tiny"}, "--preset: 'llama-tiny' is not possible"),
        ({}, {"lr": float("nan")}, "--lr: nan is not possible"),
        ({}, {"steps": 0}, "--steps: 0 is not possible"),
    ],
)
def test_what_cannot_be_is_one_line(parallel, given, message):
    with pytest.raises(BadInput, match=message):
        trainer(ranks.Parallel(**parallel), **given)


def test_a_mesh_that_was_not_started_is_one_line():
    with pytest.raises(BadInput, match="--mesh data=2,fsdp=1,context=3: is of 6 ranks, 1 were started"):
        ranks.Mesh(ranks.Parallel(data=2, context=3))


def test_a_rank_that_finds_no_others_is_one_line(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadInput, match="MASTER_PORT: torchrun sets them; here 'RANK'"):
        ranks.join({})
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(BadInput, match=r"MASTER_ADDR 127.0.0.1: rank 1 of 2 met no others \("):
        ranks.join({})


# The command.


def command(*arguments):
    result = CliRunner().invoke(main, ["train", "laplace", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(result):
    assert result.exit_code in (1, 2)
    return result.output.strip().splitlines()[-1]


def test_the_command_knows_what_the_models_know():
    assert train_laplace.AXES == ranks.AXES
    assert train_laplace.REMAT == ranks.REMAT
    assert set(train_laplace.PRESETS) == set(laplace.PRESETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq", 0], "Invalid value for '--seq'"),
        (["--data", "nowhere"], "nowhere: no such file or folder"),
        (["--tokenizer", "nowhere"], "nowhere: no such file"),
        (["--init", "nowhere"], "nowhere/config.json: No such file or directory"),
        (["--resume"], "--resume: no run in"),
        (["--lr", "inf"], "--lr: inf is not possible"),
        (["--init", "nowhere", "--preset", "laplace-tiny"], "leave one of the two out"),
        (["--mesh", "ulysses=2"], "--mesh ulysses=2: expected sizes of data, fsdp, context, such as"),
        (["--recipe", "nothing"], "--recipe nothing: expected one of"),
        (["--scale-down"], "--scale-down: say which --recipe to rehearse"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(tmp_path, options, message):
    assert message in refused(command("--out", tmp_path / "run", *options))
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten_nor_changed_nor_taken_for_a_llama(whole):
    out = whole["short"]
    assert "already holds something; go on with --resume" in refused(command("--out", out))
    assert "--seq 64: the run in" in refused(command("--out", out, "--resume", "--seq", 64))
    before = lines(out)
    assert command("--out", out, "--resume").exit_code == 0  # finished already: nothing to do
    assert lines(out) == before
    result = CliRunner().invoke(main, ["train", "llama", "--out", str(out), "--resume"])
    assert "is of `ringtide train laplace`, not of llama: take that, or another folder" in refused(result)


def test_the_demo_shows_that_it_generates_as_it_was_trained_and_repeats(text, tmp_path):
    demo = [*options({**LONG, "data": text}), "--demo", "--mesh", "data=1", "--out", tmp_path / "demo"]
    said = command(*demo)
    assert said.exit_code == 0, said.output
    assert "64 tokens at once, and one by one from a state: logits differ by at most" in said.output
    assert float(said.output.partition("logits differ by at most ")[2].split()[0]) < 1e-5
    said = command(*demo, "--steps", 1)
    assert "no more than the frequencies of single tokens" in refused(said)
    text = CliRunner().invoke(main, ["generate", "laplace", "--ckpt", str(tmp_path / "demo"), "--tokens", "8"])
    assert text.exit_code == 0, text.output


# At length.


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2", "context=2", "fsdp=2,context=2", "data=4"])
def test_a_hundred_steps_of_the_tiny_model_have_one_curve(mesh, tmp_path, tmp_path_factory):
    # At twice this rate the norm of the gradients jumps, and rounding grows from 5e-7 to 1e-3.
    given = {"preset": "laplace-tiny", "seq": 256, "batch": 4, "steps": 100, "lr": 2e-3, "ckpt_every": 100}
    curves = tmp_path_factory.getbasetemp() / "one-rank"
    if not curves.exists():
        train(curves, given)
    ranks_ = 4 if "," in mesh or mesh.endswith("4") else 2
    process = start(tmp_path / "run", *options(given), "--mesh", mesh, count=ranks_)
    _, err = process.communicate(timeout=3000)
    assert process.returncode == 0, err
    same_curve(tmp_path / "run", curves)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_under_torchrun_a_killed_rank_ends_all_and_the_run_goes_on(whole, text, tmp_path, victim):
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    arguments = [*torchrun, "-m", "ringtide.cli", "train", "laplace", "--out", out]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([str(x) for x in (*arguments, *options({**LONG, "data": text}))], **pipes)
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    os.kill(sorted(children(process))[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "has ended; start all again with --resume" in err
    process = subprocess.run([str(x) for x in (*arguments, "--resume")], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    same_curve(out, whole["long"])


def test_a_rate_that_breaks_the_weights_leaves_no_broken_checkpoint(text, tmp_path):
    """The loss of its second step is finite, its gradients are not: the weights after it would be saved as NaN."""
    given = {**RUN, "data": str(text), "lr": 1e30, "warmup": 0, "ckpt_every": 1}
    with pytest.raises(BadInput, match=r"the (loss|norm of the gradients) is (nan|inf) at step \d: try a lower --lr"):
        train(tmp_path / "run", given)
    model, _ = laplace_train.load(tmp_path / "run")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_more_ranks_than_a_machine_is_for_are_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(train_laplace, "_start_others", pytest.fail)
    done = CliRunner().invoke(main, ["train", "laplace", "--out", str(tmp_path / "run"), "--mesh", "data=999999"])
    assert done.exit_code == 1
    assert "--mesh: 999999 ranks are more than this machine is for" in done.output
