"""`ringtide train`."""

import importlib.util
import json
import os
from pathlib import Path

import click


@click.group("train")
def command():
    """Train a model."""


_PATH = click.Path(path_type=Path, resolve_path=True)
_COUNT = click.IntRange(min=1)
# Some of it is needed only at the end of a run, which is no time to learn that it is missing.
_NEEDED = "optax", "orbax.checkpoint", "safetensors", "rich", "matplotlib"
# Sequence 8,192 over a ring; the shape and the rate that learn most in four minutes on two cores.
_DEMO = {"seq": 8192, "steps": 50, "lr": 2e-3, "warmup": 5, "val_every": 25, "ckpt_every": 25}


@command.command()
@click.option("--out", type=_PATH, required=True, help="folder of the run")
@click.option("--resume", is_flag=True, help="go on with the run in --out, from its last whole checkpoint")
@click.option("--data", type=_PATH, help="text file, folder of text, or .npy of tokens [Python's standard library]")
@click.option("--tokenizer", type=_PATH, help="tokenizer.json of the tokenizers library [bytes are the tokens]")
@click.option("--init", type=_PATH, help="start from a Llama in Hugging Face's format: a folder with config.json")
@click.option("--preset", type=click.Choice(["llama-tiny", "llama-micro", "llama3.1-8b"]), help="shape [llama-tiny]")
@click.option("--devices", type=_COUNT, help="ring size, simulated on a CPU [1; with --resume, as before]")
@click.option("--seq", type=_COUNT, help="tokens a sequence [1024]")
@click.option("--batch", type=_COUNT, help="sequences a step [1]")
@click.option("--steps", type=_COUNT, help="steps of the whole run [1000]")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="peak learning rate [0.003]")
@click.option("--warmup", type=click.IntRange(min=0), help="steps of linear warmup before the cosine [20]")
@click.option("--seed", type=click.IntRange(min=0), help="of the initial weights and the order of the data [0]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="of the activations [float32]")
@click.option("--remat", is_flag=True, default=None, help="recompute layers in the backward pass: less memory")
@click.option("--val-every", type=_COUNT, help="steps between validations [100]")
@click.option("--val-windows", type=_COUNT, help="held-out sequences a validation [4]")
@click.option("--ckpt-every", type=_COUNT, help="steps between checkpoints [100]")
@click.option(
    "--demo", is_flag=True, default=None, help="a few minutes on two cores; checks the ring and what it learnt"
)
def llama(out, resume, devices, **options):
    """Train a Llama with its sequence over a ring of devices.

    Writes metrics.jsonl, checkpoints, loss.png and, at the end, model/ in Hugging Face's format into --out. Ctrl-C
    saves; a run that was killed at any moment goes on with --resume, bitwise as if it had not been.
    """
    _require(*_NEEDED, *(["tokenizers"] if options["tokenizer"] else []))
    given = {name: str(v) if isinstance(v, Path) else v for name, v in options.items() if v is not None}
    if given.get("demo") and not resume:
        given = _DEMO | given
    devices = devices or (_devices_of(out) if resume else 1)
    _simulate(devices)
    from ringtide.models import BadInput, train

    with _bar() as (say, progress):
        try:
            summary = train.run(out, given, devices, resume, say, progress)
        except BadInput as error:
            raise click.ClickException(str(error)) from None
    if "stopped" in summary:
        click.echo(f"saved at step {summary['stopped']}; go on with: ringtide train llama --out {out} --resume")
        raise SystemExit(130)
    click.echo("nats a token, held out: first {first:.4f}, last {last:.4f}; entropy of the same text: "
               "unigram {unigram:.4f}, bigram {bigram:.4f}".format(**summary))  # fmt: skip
    click.echo(f"picture: {summary['picture']}   text: ringtide generate llama --ckpt {out} --prompt 'def '")
    if options["demo"] and not summary["last"] < summary["unigram"]:
        raise click.ClickException("the model has learnt no more than the frequencies of single tokens")


def _require(*modules):
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package that it is in
            found = None
        if found is None:
            raise click.ClickException(f"{name} is not installed: pip install 'ringtide[models]'")


def _devices_of(out):
    """How many devices a run was begun on; it is read again, with care, once jax may start."""
    try:
        devices = json.loads((out / "run.json").read_bytes())["machine"]["devices"]
    except (OSError, ValueError, KeyError, TypeError):
        return 1
    return devices if type(devices) is int and devices > 0 else 1


def _simulate(devices):
    """On a CPU, makes it look like so many devices, unless XLA_FLAGS says already; must come before jax starts."""
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}={devices}"


class _bar:
    """A progress bar on a terminal, a line at each validation elsewhere. Gives (say, progress)."""

    def __enter__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
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
