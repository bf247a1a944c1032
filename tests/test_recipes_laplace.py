"""The recipes for Trainium2: what they say is known to the commands, and their rehearsals run."""

import dataclasses
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from ringtide import recipes  # noqa: E402
from ringtide.bench import plan_laplace, serve  # noqa: E402
from ringtide.cli import main  # noqa: E402
from ringtide.models import BadInput, laplace, laplace_train, ranks  # noqa: E402

TRN2 = [name for name in recipes.NAMES if recipes.load(name).chip == "trn2"]
TRAIN, SERVE = "trn2-laplace-3b-train", "trn2-laplace-3b-serve"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", TRN2)
def test_a_recipe_is_whole(name):
    recipe = recipes.load(name)
    assert recipe.model in laplace.PRESETS
    assert bool(recipe.train) != bool(recipe.serve)
    if recipe.train:
        parallel = ranks.Parallel(**recipe.mesh, remat=recipe.train["remat"])
        known = {field.name for field in dataclasses.fields(laplace_train.Settings)} | {"remat"}
        assert recipe.train.keys() <= known
        seq, batch = recipe.train["seq"], recipe.train["batch"]
        setup = plan_laplace.Setup(recipe.model, recipe.instances, seq, batch, tuple(recipe.mesh.items()))
        plan_laplace.check(setup)
        assert (setup.axes["data"], setup.axes["fsdp"]) == (parallel.data, parallel.fsdp)
    else:
        assert recipe.serve["sequences"] % plan_laplace.ranks(recipe.instances) == 0
    small = recipe.scaled_down()
    assert small.model == "laplace-micro"
    assert small.mesh.keys() == recipe.mesh.keys()
    assert {**small.train, **small.serve}["dtype"] == {**recipe.train, **recipe.serve}["dtype"]


@pytest.mark.parametrize("mesh", ["data=1", pytest.param(None, marks=pytest.mark.slow)])
def test_rehearsal_of_training(mesh, tmp_path):
    """On one rank, and on the four that the recipe's two axes come down to."""
    (tmp_path / "text.txt").write_text("the tide turns, and the ring turns with it. " * 2000)
    arguments = [
        "--recipe",
        TRAIN,
        "--scale-down",
        "--data",
        str(tmp_path / "text.txt"),
        "--out",
        str(tmp_path / "run"),
    ]
    arguments += ["--mesh", mesh] if mesh else []
    command = [sys.executable, "-m", "ringtide.cli", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    over = {axis: size for axis, size in run["parallel"].items() if type(size) is int and size > 1}
    assert over == ({} if mesh else {"data": 2, "fsdp": 2})
    assert run["parallel"]["remat"] == "full"
    assert run["settings"]["dtype"] == "bfloat16"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]


def test_rehearsal_of_serving():
    done = CliRunner().invoke(main, ["bench", "serve", "--recipe", SERVE, "--scale-down", "--json"])
    assert done.exit_code == 0, done.output
    row, config = json.loads(done.stdout), laplace.PRESETS["laplace-micro"]
    assert row["kind"] == "measured"
    assert row["most"] == row["slots"] == recipes.load(SERVE).scaled_down().serve["sequences"]
    assert row["state_bytes"] == laplace.state_bytes(config)
    assert row["pool_bytes"] == row["slots"] * row["state_bytes"]
    assert row["requests"] == 2 * row["slots"]
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])


def test_serving_gives_every_request_its_tokens():
    model = serve.make("laplace-micro", "float32", 3)
    row = serve.run(model, 3, prompt=5, tokens=4, chunk=4, rows=2, requests=7)
    assert 7 <= row["tokens"] <= 28
    assert row["tokens"] == serve.run(model, 3, prompt=5, tokens=4, chunk=2, rows=1, requests=7)["tokens"]
    assert row["most"] == 3
    assert "measured: 7 requests through 3 slots" in serve.text(row)


def test_ranks_share_the_sequences(monkeypatch):
    for count in (1, 3, 64):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        shares = []
        for rank in range(count):
            monkeypatch.setenv("RANK", str(rank))
            shares.append(serve.share(1280))
        assert sum(slots for slots, _ in shares) == 1280
        assert max(shares)[0] - min(shares)[0] <= 1
        assert {ranks for _, ranks in shares} == {count}


def test_what_does_not_fit_is_refused_before_it_is_made():
    with pytest.raises(BadInput, match=r"laplace-3b with 1000000 states takes .* GiB, here are .*: --scale-down"):
        serve.make("laplace-3b", "bfloat16", 10**6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--recipe", SERVE, "--out", "nowhere"], f"--recipe {SERVE}: is not one of training"),
        (
            ["train", "llama", "--recipe", TRAIN, "--out", "nowhere"],
            f"--recipe {TRAIN}: is for `ringtide train laplace`",
        ),
        (["bench", "serve", "--recipe", TRAIN], f"--recipe {TRAIN}: expected one that serves: {SERVE}"),
        (["bench", "serve", "--recipe", "nope"], "--recipe nope: expected one that serves"),
        (["bench", "serve", "--ckpt", "nowhere", "--scale-down"], "--ckpt nowhere"),
    ],
)
def test_bad_input_gets_one_line(arguments, message):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.split())
