"""`ringtide train`."""

import importlib.util
import json
import math
import os
import re
from pathlib import Path

import click


class _Group(click.Group):
    """A recipe says which model: `train --recipe NAME` is `train llama --recipe NAME`."""

    def parse_args(self, ctx, args):
        options = args and args[0].startswith("--") and args[0] != "--help"
        return super().parse_args(ctx, ["llama", *args] if options else args)


@click.group("train", cls=_Group)
def command():
    """Train a model, or run a recipe: `ringtide train --recipe NAME`."""


# As in models/, which would start jax: a test holds them to it.
_AXES = "data", "fsdp", "ulysses", "context"
_STRATEGIES = "all_gather", "ring", "ulysses", "usp", "auto"
_REMAT = "none", "full", "attention", "offload", "offload-all"
_PRESETS = "llama-tiny", "llama-micro", "llama3.1-8b", "llama3.1-8b-hd256"
_PATH = click.Path(path_type=Path, resolve_path=True)
_COUNT = click.IntRange(min=1)
# Some of it is needed only at the end of a run, which is no time to learn that it is missing.
_NEEDED = "optax", "orbax.checkpoint", "safetensors", "rich", "matplotlib"
# Sequence 8,192 over a ring; the shape and the rate that learn most in four minutes on two cores.
_DEMO = {"seq": 8192, "steps": 50, "lr": 2e-3, "warmup": 5, "val_every": 25, "ckpt_every": 25}


@command.command()
@click.option("--out", type=_PATH, required=True, help="folder of the run")
@click.option("--recipe", metavar="NAME", help="the options of a file in recipes/, less those given here")
@click.option("--scale-down", is_flag=True, help="rehearse --recipe: a tiny model, few tokens, simulated devices")
@click.option("--resume", is_flag=True, help="go on with the run in --out, from its last whole checkpoint")
@click.option("--data", type=_PATH, help="text file, folder of text, or .npy of tokens [Python's standard library]")
@click.option("--tokenizer", type=_PATH, help="tokenizer.json of the tokenizers library [bytes are the tokens]")
@click.option("--init", type=_PATH, help="start from a Llama in Hugging Face's format: a folder with config.json")
@click.option("--preset", type=click.Choice(_PRESETS), help="shape [llama-tiny]")
@click.option("--devices", type=_COUNT, help="--mesh context=N, simulated on a CPU [1; with --resume, as before]")
@click.option(
    "--mesh", help="such as fsdp=2,context=4: axes data and fsdp split the batch, ulysses and context sequences"
)
@click.option(
    "--strategy", type=click.Choice(_STRATEGIES), help="of attention over the mesh [ring, or usp over two axes]"
)
@click.option(
    "--remat", type=click.Choice(_REMAT), help="what the backward pass keeps of a layer, see docs/training.md [none]"
)
@click.option(
    "--coordinator", metavar="HOST:PORT", help="several processes: process 0 listens there and at the next port"
)
@click.option("--processes", type=_COUNT, help="how many there are, each started with the same command but for its id")
@click.option("--process-id", type=click.IntRange(min=0), help="of this one, from 0")
@click.option("--seq", type=_COUNT, help="tokens a sequence [1024]")
@click.option("--batch", type=_COUNT, help="sequences a step [1]")
@click.option("--steps", type=_COUNT, help="steps of the whole run [1000]")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="peak learning rate [0.003]")
@click.option("--warmup", type=click.IntRange(min=0), help="steps of linear warmup before the cosine [20]")
@click.option("--seed", type=click.IntRange(min=0), help="of the initial weights and the order of the data [0]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="of the activations [float32]")
@click.option("--val-every", type=_COUNT, help="steps between validations [100]")
@click.option("--val-windows", type=_COUNT, help="held-out sequences a validation [4]")
@click.option("--ckpt-every", type=_COUNT, help="steps between checkpoints [100]")
@click.option(
    "--demo", is_flag=True, default=None, help="a few minutes on two cores; checks the ring and what it learnt"
)
def llama(out, recipe, scale_down, resume, coordinator, processes, process_id, **options):
    """Train a Llama with its sequence over a mesh of devices.

    Writes metrics.jsonl, checkpoints, loss.png and, at the end, model/ in Hugging Face's format into --out. Ctrl-C
    saves; a run that was killed at any moment goes on with --resume, bitwise as if it had not been. --devices, --mesh,
    --strategy, --remat and --processes may then be others.
    """
    _require(*_NEEDED, *(["tokenizers"] if options["tokenizer"] else []))
    if recipe:
        options = _recipe(recipe, scale_down, options)
    elif scale_down:
        raise click.UsageError("--scale-down: say which --recipe to rehearse")
    over = [options.pop(name) for name in ("devices", "mesh", "strategy", "remat")]
    given = {name: str(v) if isinstance(v, Path) else v for name, v in options.items() if v is not None}
    if given.get("demo") and not resume:
        given = _DEMO | given
    parallel = _parallel(_saved(out) if resume else {}, *over)
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
    from ringtide.models import BadInput, line
    from ringtide.models.processes import Alone, join

    link = Alone()
    with _bar(quiet=bool(process_id)) as (say, progress):
        try:
            if coordinator:
                link = join(
                    coordinator, processes, process_id, {"out": str(out), "resume": resume, **given, **parallel}
                )
            from ringtide.models import sharding, train

            summary = train.run(out, given, sharding.Parallel(**parallel), resume, say, progress, link)
            link.leave()
        except BadInput as error:
            link.fail(str(error))
            raise click.ClickException(str(error)) from None
        except Exception as error:
            link.fail(f"{type(error).__name__}: {line(error)}")
            raise
    if not link.first:
        raise SystemExit(130 if "stopped" in summary else 0)
    if "stopped" in summary:
        click.echo(f"saved at step {summary['stopped']}; go on with: ringtide train llama --out {out} --resume")
        raise SystemExit(130)
    click.echo("nats a token, held out: first {first:.4f}, last {last:.4f}; entropy of the same text: "
               "unigram {unigram:.4f}, bigram {bigram:.4f}".format(**summary))  # fmt: skip
    click.echo(f"picture: {summary['picture']}   text: ringtide generate llama --ckpt {out} --prompt 'def '")
    if options["demo"] and not summary["last"] < summary["unigram"]:
        raise click.ClickException("the model has learnt no more than the frequencies of single tokens")


def _recipe(name, scale_down, options):
    """The options, those that were not given taken from a recipe."""
    from ringtide import recipes

    if name not in recipes.NAMES:
        raise click.UsageError(f"--recipe {name}: expected one of {', '.join(recipes.NAMES)}")
    recipe = recipes.load(name)
    if scale_down:
        recipe = recipe.scaled_down()
    elif recipe.finetune and options["init"] is None:
        raise click.UsageError(
            f"--recipe {name}: fine-tunes; --init names a folder of weights in Hugging Face's format"
        )
    mesh = ",".join(f"{axis}={size}" for axis, size in recipe.mesh.items())
    known = recipe.train | {"preset": recipe.model, "mesh": mesh}
    if options["init"]:
        del known["preset"]  # the weights have a shape of their own
    if options["devices"]:
        del known["mesh"]
    return {name: known.get(name) if value is None else value for name, value in options.items()}


def _require(*modules):
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package that it is in
            found = None
        if found is None:
            raise click.ClickException(f"{name} is not installed: pip install 'ringtide[models]'")


def _saved(out):
    """What the run in `out` was last on; it is read again, with care, once jax may start."""
    try:
        saved = dict(json.loads((out / "run.json").read_bytes())["parallel"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    sizes = {axis: size for axis in _AXES if type(size := saved.get(axis)) is int and size > 0}
    names = {"strategy": _STRATEGIES, "remat": _REMAT}
    return sizes | {name: saved[name] for name, known in names.items() if saved.get(name) in known}


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
    parts = [re.fullmatch(rf"\s*({'|'.join(_AXES)})=([1-9][0-9]{{0,6}})\s*", part) for part in mesh.split(",")]
    axes = {part[1]: int(part[2]) for part in parts if part}
    if len(axes) < len(parts):
        raise click.ClickException(f"--mesh {mesh}: expected sizes of {', '.join(_AXES)}, such as fsdp=2,context=4")
    return axes


def _simulate(devices):
    """On a CPU, makes it look like so many devices, unless XLA_FLAGS says already; must come before jax starts."""
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={devices}"


class _bar:
    """A progress bar on a terminal, a line at each validation elsewhere. Gives (say, progress)."""

    def __init__(self, quiet):
        self.quiet = quiet

    def __enter__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=self.quiet)
        numbers = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s")
        columns = BarColumn(), MofNCompleteColumn(), numbers, TextColumn("ETA"), TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.bar.start()
        self.task = None
        return self.say, self.progress

    def __exit__(self, *_):
        self.bar.stop()

    def say(self, line):
        self.console.print(line, markup=False)

    def progress(self, line, total):
        fields = {"completed": line["step"], "loss": line["loss"], "speed": line["tokens_per_second"]}
        if self.task is None:
            self.task = self.bar.add_task("", total=total, **fields)
        self.bar.update(self.task, **fields)
        if "val_loss" in line:
            self.say(
                f"step {line['step']} of {total}: loss {line['loss']:.4f}, held out {line['val_loss']:.4f}, "
                f"{line['tokens_per_second']:,.0f} tokens/s"
            )
