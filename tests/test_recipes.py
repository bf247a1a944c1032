"""Recipes: each fits its pod on paper, and its rehearsal runs."""

import dataclasses
import json

import pytest
from click.testing import CliRunner
from jax.experimental import topologies

from ringtide import recipes
from ringtide.bench import plan
from ringtide.cli import main
from ringtide.models import llama, run_folder, sharding, weights

REHEARSED = "v5p-64k", "tpu7x-14m"  # in every test run: two axes, and one; remat to the host, and not


TPU = [name for name in recipes.NAMES if recipes.load(name).topology]  # tests/test_plan_laplace.py has the others


@pytest.mark.parametrize("name", TPU)
def test_a_recipe_is_whole(name):
    recipe = recipes.load(name)
    parallel = sharding.Parallel(
        **recipe.mesh, strategy=recipe.train["strategy"], remat=recipe.train["remat"]
    )  # which refuses what it does not know
    plan.check(plan.Pod(recipe.chip, recipe.topology), recipe.train["seq"], recipe.train["batch"], parallel)
    known = {field.name for field in dataclasses.fields(run_folder.Settings)} | {"strategy", "remat"}
    assert recipe.train.keys() <= known
    assert recipe.model in llama.PRESETS
    tokens = f"{recipe.train['seq'] // 1024}k" if recipe.train["seq"] < 1 << 20 else f"{recipe.train['seq'] >> 20}m"
    assert name == f"{recipe.chip}-{tokens}{'-finetune' if recipe.finetune else ''}"


@pytest.mark.usefixtures("tpu_compiler")
def test_every_mesh_lies_on_its_pod():
    """Eight devices on a torus of 4 x 4 x 4 chips are one and a half of its sides."""
    wanted = [(recipe.chip, recipe.topology, recipe.mesh) for recipe in map(recipes.load, TPU)]
    for chip in ("v5p", "tpu7x"):
        wanted += [(chip, "4x4x4", mesh) for mesh in plan.meshes(plan.Pod(chip, "4x4x4"), llama.Config()).values()]
        wanted += [(chip, "4x4x4", {"ulysses": 8, "context": plan.Pod(chip, "4x4x4").devices // 8})]
    for chip, topology, axes in wanted:
        parallel = sharding.Parallel(**axes, strategy="usp" if "ulysses" in axes else "ring")
        devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{topology}").devices
        mesh = sharding.make_mesh(parallel, devices)
        assert len(set(mesh.devices.flat)) == parallel.devices == len(devices)
        assert plan._load(mesh, parallel) <= 2  # neighbours on a ring of the mesh are neighbours, or nearly, in the pod


def test_every_length_is_there_for_both_chips():
    lengths = "64k", "256k", "1m", "4m", "14m"
    assert set(TPU) == {f"{chip}-{n}{tune}" for chip in ("v5p", "tpu7x") for n in lengths for tune in ("", "-finetune")}


@pytest.mark.parametrize(
    "name", [name if name in REHEARSED else pytest.param(name, marks=pytest.mark.slow) for name in TPU]
)
def test_rehearsal(name, tmp_path):
    (tmp_path / "text.txt").write_text("the tide turns, and the ring turns with it. " * 2000)
    arguments = ["train", "--recipe", name, "--scale-down", "--data", str(tmp_path / "text.txt")]
    if name.endswith("-finetune"):
        config = llama.PRESETS["llama-micro"]
        weights.save(tmp_path / "init", llama.init(0, config), config)
        arguments += ["--init", str(tmp_path / "init")]
    done = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    recipe = recipes.load(name)
    assert {axis for axis, size in run["parallel"].items() if type(size) is int and size > 1} == set(recipe.mesh)
    assert all(run["parallel"][option] == recipe.train[option] for option in ("strategy", "remat"))
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["val_loss"] < losses[0]["val_loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nope"], "--recipe nope: expected one of tpu7x-14m"),
        (["--recipe", "v5p-4m-finetune"], "--recipe v5p-4m-finetune: fine-tunes; --init names a folder"),
        (["--recipe", "v5p-4m"], "--devices 64: "),
        (["llama", "--scale-down"], "--scale-down: say which --recipe"),
    ],
)
def test_bad_input_gets_one_line(arguments, message, tmp_path):
    done = CliRunner().invoke(main, ["train", *arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()
