"""`ringtide train`, and `ringtide train llama`."""

import math
import os

import click

from ringtide.cli import training
from ringtide.cli.train_laplace import laplace
from ringtide.cli.training import COUNT


class _Group(click.Group):
    """A recipe says which model: `train --recipe NAME` is `train llama --recipe NAME`, or laplace."""

    def parse_args(self, ctx, args):
        ctx.meta["ringtide.arguments"] = ["train", *args]  # for ranks that are to make the same call
        options = args and args[0].startswith("--") and args[0] != "--help"
        return super().parse_args(ctx, [self._family(args), *args] if options else args)

    def _family(self, args):
        from ringtide import recipes

        words = [word for arg in args for word in arg.split("=", 1)]
        name = words[words.index("--recipe") + 1 :][:1] if "--recipe" in words else []
        return recipes.load(name[0]).family if name and name[0] in recipes.NAMES else "llama"


@click.group("train", cls=_Group)
def command():
    """Train a model, or run a recipe: `ringtide train --recipe NAME`."""


# As in models/, which would start jax: a test holds them to it.
_AXES = "data", "fsdp", "ulysses", "context"
_STRATEGIES = "all_gather", "ring", "ulysses", "usp", "auto"
_REMAT = "none", "full", "attention", "offload", "offload-all"
_PRESETS = "llama-tiny", "llama-micro", "llama3.1-8b", "llama3.1-8b-hd256"
_NEEDED = "optax", "orbax.checkpoint", "safetensors", "rich", "matplotlib"
# Sequence 8,192 over a ring; the shape and the rate that learn most in four minutes on two cores.
_DEMO = {"seq": 8192, "steps": 50, "lr": 2e-3, "warmup": 5, "val_every": 25, "ckpt_every": 25}
_OWN = (
    click.option("--devices", type=COUNT, help="--mesh context=N, simulated on a CPU [1; with --resume, as before]"),
    click.option(
        "--mesh", help="such as fsdp=2,context=4: axes data and fsdp split the batch, ulysses and context sequences"
    ),
    click.option(
        "--strategy", type=click.Choice(_STRATEGIES), help="of attention over the mesh [ring, or usp over two axes]"
    ),
    click.option(
        "--remat",
        type=click.Choice(_REMAT),
        help="what the backward pass keeps of a layer, see docs/training.md [none]",
    ),
    click.option(
        "--coordinator", metavar="HOST:PORT", help="several processes: process 0 listens there and at the next port"
    ),
    click.option("--processes", type=COUNT, help="how many, each started with the same command but for its id"),
    click.option("--process-id", type=click.IntRange(min=0), help="of this one, from 0"),
)


@command.command()
@training.options(
    "llama", _PRESETS, *_OWN, weights="a Llama in Hugging Face's format", rate="0.003", schedule="the cosine"
)
def llama(out, recipe, scale_down, resume, coordinator, processes, process_id, **options):
    """Train a Llama with its sequence over a mesh of devices.

    Writes metrics.jsonl, checkpoints, loss.png and, at the end, model/ in Hugging Face's format into --out. Ctrl-C
    saves; a run that was killed at any moment goes on with --resume, bitwise as if it had not been. --devices, --mesh,
    --strategy, --remat and --processes may then be others.
    """
    training.require("models", *_NEEDED, *(["tokenizers"] if options["tokenizer"] else []))
    options = training.of_recipe(recipe, "llama", scale_down, options)
    over = [options.pop(name) for name in ("devices", "mesh", "strategy", "remat")]
    given = training.settings(options, _DEMO, resume)
    saved = training.saved(out, _AXES, strategy=_STRATEGIES, remat=_REMAT) if resume else {}
    parallel = _parallel(saved, *over)
    total = math.prod(parallel.get(axis, 1) for axis in _AXES)
    if coordinator and given.get("demo"):
        raise click.ClickException("--demo: is for one process; leave it or --coordinator out")
    several = {"--coordinator": coordinator, "--processes": processes, "--process-id": process_id}
    missing = [name for name, value in several.items() if value is None]
    if 0 < len(missing) < 3:
        raise click.ClickException(f"{' and '.join(missing)}: missing; several processes need all three")
    if total % (processes or 1):
        raise click.ClickException(f"--processes {processes}: must divide the {total} devices of the mesh")
    if scale_down or not recipe:
        _simulate(total // (processes or 1))

    def join():
        from ringtide.models import processes as all_of_them

        same = {"out": str(out), "resume": resume, **given, **parallel}
        return all_of_them.join(coordinator, processes, process_id, same) if coordinator else None

    def train(say, progress, link):
        from ringtide.models import sharding, train

        return train.run(out, given, sharding.Parallel(**parallel), resume, say, progress, link)

    training.run("llama", out, options["demo"], bool(process_id), join, train)


command.add_command(laplace)


def _parallel(saved, devices, mesh, strategy, remat):
    """The fields of a Parallel: what was saved, less what the user chose otherwise."""
    chosen = strategy is not None
    if devices and mesh is not None:
        raise click.ClickException(f"--devices {devices}: leave it out, --mesh {mesh} says how many")
    axes = {axis: saved[axis] for axis in _AXES if axis in saved}
    if mesh is not None:
        axes = axes_of(mesh)
    elif devices:
        axes = {"context": devices}
    both = axes.get("ulysses", 1) > 1 and axes.get("context", 1) > 1
    strategy = strategy or saved.get("strategy", "ring")
    if both and not chosen and strategy not in ("usp", "auto"):  # what it was on one axis
        strategy = "usp"
    return {**axes, "strategy": strategy, "remat": remat or saved.get("remat", "none")}


def axes_of(mesh):
    """{"fsdp": 2, "context": 4} of "fsdp=2,context=4"."""
    return training.axes_of(mesh, _AXES)


def _simulate(devices):
    """On a CPU, makes it look like so many devices, unless XLA_FLAGS says already; must come before jax starts."""
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={devices}"
