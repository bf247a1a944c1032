"""What the commands of `ringtide train` have in common: options, a recipe, a progress bar, the last words."""

import importlib.util
import json
import re
from pathlib import Path

import click

_PATH = click.Path(path_type=Path, resolve_path=True)
COUNT = click.IntRange(min=1)


def options(model, presets, *own, weights, rate, schedule):
    """The options of a command: those of every model, and its own. weights: what --init takes; rate: that of --lr."""
    common = [
        click.option("--out", type=_PATH, required=True, help="folder of the run"),
        click.option("--recipe", metavar="NAME", help="the options of a file in recipes/, less those given here"),
        click.option("--scale-down", is_flag=True, help="rehearse --recipe: a tiny model, few tokens, this machine"),
        click.option("--resume", is_flag=True, help="go on with the run in --out, from its last whole checkpoint"),
        click.option("--data", type=_PATH, help="text file, folder of text, or .npy of tokens [Python's library]"),
        click.option("--tokenizer", type=_PATH, help="tokenizer.json of the tokenizers library [bytes are the tokens]"),
        click.option("--init", type=_PATH, help=f"start from {weights}: a folder with config.json"),
        click.option("--preset", type=click.Choice(presets), help=f"shape [{model}-tiny]"),
        *own,
        click.option("--seq", type=COUNT, help="tokens a sequence [1024]"),
        click.option("--batch", type=COUNT, help="sequences a step [1]"),
        click.option("--steps", type=COUNT, help="steps of the whole run [1000]"),
        click.option("--lr", type=click.FloatRange(min=0, min_open=True), help=f"peak learning rate [{rate}]"),
        click.option("--warmup", type=click.IntRange(min=0), help=f"steps of linear warmup before {schedule} [20]"),
        click.option("--seed", type=click.IntRange(min=0), help="of the initial weights and the order of the data [0]"),
        click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="of the activations [float32]"),
        click.option("--val-every", type=COUNT, help="steps between validations [100]"),
        click.option("--val-windows", type=COUNT, help="held-out sequences a validation [4]"),
        click.option("--ckpt-every", type=COUNT, help="steps between checkpoints [100]"),
        click.option(
            "--demo", is_flag=True, default=None, help="a few minutes on two cores; checks itself and what it learnt"
        ),
    ]

    def wrap(function):
        for option in reversed(common):
            function = option(function)
        return function

    return wrap


def require(extra, *modules):
    """Some of it is needed only at the end of a run, which is no time to learn that it is missing."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package that it is in
            found = None
        if found is None:
            raise click.ClickException(f"{name} is not installed: pip install 'ringtide[{extra}]'")


def of_recipe(name, family, scale_down, given):
    """The options, those that were not given taken from the recipe of that name, if there is one."""
    if not name:
        if scale_down:
            raise click.UsageError("--scale-down: say which --recipe to rehearse")
        return given
    from ringtide import recipes

    if name not in recipes.NAMES:
        raise click.UsageError(f"--recipe {name}: expected one of {', '.join(recipes.NAMES)}")
    recipe = recipes.load(name)
    if recipe.family != family:
        raise click.UsageError(f"--recipe {name}: is for `ringtide train {recipe.family}`")
    if not recipe.train:
        raise click.UsageError(f"--recipe {name}: is not one of training")
    if scale_down:
        recipe = recipe.scaled_down()
    elif recipe.finetune and given["init"] is None:
        raise click.UsageError(
            f"--recipe {name}: fine-tunes; --init names a folder of weights in Hugging Face's format"
        )
    mesh = ",".join(f"{axis}={size}" for axis, size in recipe.mesh.items())
    known = recipe.train | {"preset": recipe.model, "mesh": mesh or None}
    if given["init"]:
        del known["preset"]  # the weights have a shape of their own
    if given.get("devices"):
        del known["mesh"]
    return {option: known.get(option) if value is None else value for option, value in given.items()}


def saved(out, axes, **names):
    """What the run in `out` was last on, of axes and {name: choices}; read again, with care, by the trainer."""
    try:
        parallel = dict(json.loads((out / "run.json").read_bytes())["parallel"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    sizes = {axis: size for axis in axes if type(size := parallel.get(axis)) is int and size > 0}
    return sizes | {name: parallel[name] for name, known in names.items() if parallel.get(name) in known}


def axes_of(mesh, axes):
    """{"fsdp": 2, "context": 4} of "fsdp=2,context=4"."""
    parts = [re.fullmatch(rf"\s*({'|'.join(axes)})=([1-9][0-9]{{0,6}})\s*", part) for part in mesh.split(",")]
    sizes = {part[1]: int(part[2]) for part in parts if part}
    if len(sizes) < len(parts):
        raise click.ClickException(f"--mesh {mesh}: expected sizes of {', '.join(axes)}, such as fsdp=2,context=4")
    return sizes


def settings(options, demo, resume):
    """What a run is made of, from options: without those that were not given, with those of a demo if it is one."""
    given = {name: str(v) if isinstance(v, Path) else v for name, v in options.items() if v is not None}
    return demo | given if given.get("demo") and not resume else given


def run(model, out, demo, quiet, join, train):
    """Runs train(say, progress, link) after link = join(), and says how it ended, in exit codes too."""
    from ringtide.models import BadInput, line
    from ringtide.models.processes import Alone

    link = Alone()
    with _bar(quiet) as (say, progress):
        try:
            link = join() or link
            summary = train(say, progress, link)
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
        click.echo(f"saved at step {summary['stopped']}; go on with: ringtide train {model} --out {out} --resume")
        raise SystemExit(130)
    click.echo("nats a token, held out: first {first:.4f}, last {last:.4f}; entropy of the same text: "
               "unigram {unigram:.4f}, bigram {bigram:.4f}".format(**summary))  # fmt: skip
    click.echo(f"picture: {summary['picture']}   text: ringtide generate {model} --ckpt {out} --prompt 'def '")
    if demo and not summary["last"] < summary["unigram"]:
        raise click.ClickException("the model has learnt no more than the frequencies of single tokens")


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
