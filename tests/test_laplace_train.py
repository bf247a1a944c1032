"""Training a Laplace: one curve whatever the ranks, killed, resumed, damaged, refused."""

import json
import os
import shutil
import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from ringtide.models import checkpoint, laplace, laplace_train, laplace_weights, ranks  # noqa: E402

RUN = {"preset": "laplace-micro", "seq": 48, "batch": 4, "steps": 12, "warmup": 3, "lr": 0.01}
RUN |= {"val_every": 6, "val_windows": 5, "ckpt_every": 4}
OPTIONS = [word for name, value in RUN.items() for word in (f"--{name.replace('_', '-')}", str(value))]
MESHES = {"data=4": {"data": 4}, "fsdp=4": {"fsdp": 4}, "context=4": {"context": 4}}
MESHES |= {"data=2,fsdp=2": {"data": 2, "fsdp": 2}, "fsdp=2,context=2": {"fsdp": 2, "context": 2}}


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
def alone(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    laplace_train.run(out, {**RUN, "data": str(text)}, ranks.Parallel(), say=lambda line: None)
    return out


def lines(out):
    """Everything of each line that is not a time, as it was written."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in found]


def curve(out):
    return np.array([[line.get(name, 0.0) for name in ("loss", "val_loss", "grad_norm")] for line in lines(out)])


def masters(out):
    """{key: tensor} of all that the last checkpoint holds."""
    checkpoints = out / "checkpoints"
    step = checkpoint.steps(checkpoints)[-1]
    read = laplace_train.reader(checkpoints, step)
    return {name: read(f"{name}.master") for name in dict(laplace.LaplaceForCausalLM(config()).named_parameters())}


def config():
    return laplace.PRESETS["laplace-micro"]


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
    """Each mesh; then the last again, from its checkpoint of step 4: bitwise the same; then as the first."""
    dist.destroy_process_group()  # joins as `ringtide train` does
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    link = ranks.join({})
    from pathlib import Path

    out = lambda mesh: Path(folder) / mesh
    for mesh, axes in meshes.items():
        laplace_train.run(out(mesh), given, ranks.Parallel(**axes), link=link)
    before = lines(out(mesh))
    for axes in (meshes[mesh], next(iter(meshes.values()))):
        link.tell()
        if rank == 0:
            go_back(out(mesh), 4)
        link.tell()
        laplace_train.run(out(mesh), {}, ranks.Parallel(**axes), resume=True, link=link)
        if axes == meshes[mesh] and rank == 0:
            assert lines(out(mesh)) == before
    link.leave()


def check_curves(alone, folder, meshes):
    want = curve(alone)
    assert len(want) == len(lines(alone))
    for mesh in meshes:
        np.testing.assert_allclose(curve(folder / mesh), want, rtol=0, atol=1e-5, err_msg=mesh)
        for name, master in masters(folder / mesh).items():
            torch.testing.assert_close(master, masters(alone)[name], rtol=0, atol=2e-4, msg=f"{mesh}: {name}")
        assert laplace_weights.load(folder / mesh / "model").config == config()


def test_four_ranks_learn_what_one_learns_and_resume_bitwise(ranks, alone, text, tmp_path):
    """Replicated, FSDP2, context parallel and mixtures, one curve to 1e-5; resumed on the same ranks bitwise, on
    another mesh to rounding."""
    ranks("train_over", 4, free_port(), str(tmp_path), {**RUN, "data": str(text)}, MESHES)
    check_curves(alone, tmp_path, MESHES)
