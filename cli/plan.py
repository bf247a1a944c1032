"""`ringtide plan`: whether a run fits machines that nobody has paid for yet, and what it will take there."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import click

_TPUS = "v5e", "v5p", "v6e", "tpu7x"
_STRATEGIES = "ring", "usp", "ulysses", "all_gather"
_REMATS = "none", "attention", "offload", "offload-all", "full"
_TOKENS = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,10})?)([KM]?)")
_ONLY = {"trn2": ("instances", "sequences"), "tpu": ("topology", "strategy")}  # options of one of them


@click.command("plan")
@click.argument("preset", required=False)
@click.option("--recipe", metavar="NAME", help="Model, machines, mesh and tokens of a file in recipes/.")
@click.option("--chip", type=click.Choice([*_TPUS, "trn2"]), help="[v5p; trn2 for a Laplace]")
@click.option("--topology", help="TPU chips, as in 4x4x4.  [4x4x4]")
@click.option("--instances", type=click.IntRange(1, 1024), help="trn2.48xlarge, of 16 chips each.  [1]")
@click.option(
    "--tokens", help="Of a sequence: 1048576, 1M, 64K; on TPUs also max: the longest that fits.  [4M; on trn2 4K]"
)
@click.option("--batch", type=click.IntRange(1, 1 << 20), help="Sequences a training step.  [1; on trn2 128]")
@click.option("--sequences", type=click.IntRange(1, 1 << 20), help="Of a Laplace, that are generated at once.  [1280]")
@click.option("--strategy", multiple=True, type=click.Choice(_STRATEGIES), help="Repeat for more.  [all]")
@click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="data, fsdp, ulysses, context.  [a sequence over the pod; trn2: fsdp=4 a chip]",
)
@click.option("--remat", type=click.Choice(_REMATS), help="What the backward pass keeps.  [the first that fits]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (on TPUs: one a strategy).")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw terms and memory into this file.")
def command(recipe, as_json, plot, **options):
    """Predicts memory, step time and MFU of PRESET on machines that need not exist.

    A Llama on TPUs: its training step is compiled for the pod, in minutes a strategy; memory is the compiler's own
    account. A Laplace on trn2: training and generation from the simulator's estimates of the kernels and stated rates,
    in seconds. Time is predicted, not measured. docs/plan.md says how.
    """
    if plot and (not plot.parent.is_dir() or plot.suffix not in (".png", ".svg", ".pdf")):
        raise click.UsageError(f"--plot {plot}: expected a .png, .svg or .pdf in a folder that exists")
    if recipe:
        options = _of_recipe(recipe, options)
    laplace = (options["preset"] or "").startswith("laplace")
    chip = options["chip"] = options["chip"] or ("trn2" if laplace else "v5p")
    if laplace and chip != "trn2":
        raise click.UsageError(f"--chip {chip}: {options['preset']} is planned on trn2")
    if chip == "trn2" and not laplace:
        raise click.UsageError(f"{_named(options['preset'])}: on trn2 expected a Laplace, such as laplace-3b")
    for name in _ONLY["tpu" if chip == "trn2" else "trn2"]:
        if options[name] not in (None, ()):
            raise click.UsageError(f"--{name}: is not for {chip}")
    (_trainium if chip == "trn2" else _tpu)(options, as_json, plot)


def _of_recipe(name, options):
    """The options, those that were not given taken from a recipe."""
    from ringtide import recipes

    if name not in recipes.NAMES:
        raise click.UsageError(f"--recipe {name}: expected one of {', '.join(recipes.NAMES)}")
    known = recipes.load(name).planned()
    return {option: known.get(option) if value in (None, ()) else value for option, value in options.items()}


def _named(preset):
    return f"PRESET {preset}" if preset else "PRESET"


def _require(plot, **modules):
    for module, extra in modules.items():
        if find_spec(module) is None and (module != "matplotlib" or plot):
            raise click.ClickException(f"{module} is not installed: pip install 'ringtide[{extra}]'")


def _trainium(options, as_json, plot):
    _require(plot, torch="torch", matplotlib="bench")
    os.environ["RINGTIDE_NKI"] = "simulator"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: threads only wait for one another
    from ringtide.bench import plan_laplace, plan_laplace_text
    from ringtide.cli.training import axes_of
    from ringtide.models import BadInput, laplace

    preset, remat = options["preset"], options["remat"]
    if preset not in laplace.PRESETS:
        raise click.UsageError(f"PRESET {preset}: expected one of {', '.join(laplace.PRESETS)}")
    if remat not in (None, *plan_laplace.REMAT):
        raise click.UsageError(f"--remat {remat}: on trn2 expected {' or '.join(plan_laplace.REMAT)}")
    if (tokens := _tokens(options["tokens"] or "4K")) is None:
        raise click.UsageError("--tokens max: is for TPUs; on trn2 say how many, as 4K")
    mesh = tuple(axes_of(options["mesh"], plan_laplace.AXES).items()) if options["mesh"] else ()
    given = {name: options[name] for name in ("instances", "batch", "sequences") if options[name]}
    try:
        found = plan_laplace.plan(plan_laplace.Setup(preset, seq=tokens, mesh=mesh, **given), remat)
    except BadInput as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(found) if as_json else plan_laplace_text.text(found))
    if plot:
        from ringtide.bench.plot import trainium

        trainium(plot, found)
        _say(f"drawn: {plot}")


def _tpu(options, as_json, plot):
    _require(plot, libtpu="tpu", optax="models", matplotlib="bench")
    from ringtide.bench import plan
    from ringtide.bench.compile import CompileError
    from ringtide.cli.train import axes_of
    from ringtide.models import BadInput, llama, sharding

    preset, mesh, remat = options["preset"], options["mesh"], options["remat"]
    if preset not in llama.PRESETS:
        raise click.UsageError(f"{_named(preset)}: expected one of {', '.join(llama.PRESETS)}")
    try:
        pod = plan.Pod(options["chip"], options["topology"] or "4x4x4")
    except BadInput as error:
        raise click.UsageError(str(error)) from None
    count, remats = _tokens(options["tokens"] or "4M"), (remat,) if remat else plan.REMATS
    config, batch = llama.PRESETS[preset], options["batch"] or 1
    if not as_json:
        click.echo(plan.heading(pod, preset, config, batch))
    rows, failed = [], 0
    for strategy in options["strategy"] or _STRATEGIES:
        try:
            axes = axes_of(mesh) if mesh else plan.meshes(pod, config)[strategy]
            parallel = sharding.Parallel(**axes, strategy=strategy)
            plan.check(pod, count, batch, parallel)
            ask = plan.longest if count is None else plan.plan
            row = ask(pod, preset, *((count,) if count else ()), parallel, batch, remats, _say)
        except (BadInput, CompileError) as error:
            failed += 1
            _say(f"{strategy}: {error}")
            continue
        rows.append(row)
        click.echo(json.dumps(row) if as_json else plan.lines(row))
    if plot and rows:
        from ringtide.bench.plot import plans

        plans(plot, rows, f"{preset} on {pod.name}")
        _say(f"drawn: {plot}")
    if failed:
        raise click.ClickException(f"{failed} of {failed + len(rows)} strategies could not be planned")


def _tokens(text):
    """None for max."""
    if text == "max":
        return None
    found = _TOKENS.fullmatch(text)
    count = float(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]] if found else 0
    if count != int(count) or not 0 < count < 1 << 30:
        raise click.UsageError(f"--tokens {text}: expected a whole number below 2^30, as 1048576, 64K, 1M, or max")
    return int(count)


def _say(text):
    click.echo(text, err=True)
