"""`ringtide plan`: whether a training run fits a pod, and what it will take, before anyone pays for the pod."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import click

_STRATEGIES = "ring", "usp", "ulysses", "all_gather"
_REMATS = "none", "attention", "offload", "offload-all", "full"
_TOKENS = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,10})?)([KM]?)")


@click.command("plan")
@click.argument("preset", required=False)
@click.option("--recipe", metavar="NAME", help="Model, pod, mesh and tokens of a file in recipes/.")
@click.option("--chip", type=click.Choice(["v5e", "v5p", "v6e", "tpu7x"]), help="[v5p]")
@click.option("--topology", help="Chips, as in 4x4x4.  [4x4x4]")
@click.option("--tokens", help="Of a sequence: 1048576, 1M, 64K; or max: the longest that fits, by bisection.  [4M]")
@click.option("--batch", type=click.IntRange(1), help="Sequences a step.  [1]")
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(_STRATEGIES), help="Repeat for more.  [all]")
@click.option("--mesh", metavar="AXIS=SIZE,...", help="data, fsdp, ulysses, context.  [the pod, over one sequence]")
@click.option("--remat", type=click.Choice(_REMATS), help="What the backward pass keeps.  [the first that fits]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a strategy.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw terms and memory into this file.")
def command(preset, recipe, chip, topology, tokens, batch, strategies, mesh, remat, as_json, plot):
    """Compiles the training step of PRESET for a pod that need not exist, and predicts memory, step time and MFU.

    Takes minutes a strategy. Memory is the compiler's own account; time is predicted, not measured.
    docs/plan.md says how.
    """
    for module, extra in (("libtpu", "tpu"), ("optax", "models"), ("matplotlib", "bench")):
        if find_spec(module) is None and (module != "matplotlib" or plot):
            raise click.ClickException(f"{module} is not installed: pip install 'ringtide[{extra}]'")
    if plot and (not plot.parent.is_dir() or plot.suffix not in (".png", ".svg", ".pdf")):
        raise click.UsageError(f"--plot {plot}: expected a .png, .svg or .pdf in a folder that exists")
    if recipe:
        from ringtide import recipes

        if recipe not in recipes.NAMES:
            raise click.UsageError(f"--recipe {recipe}: expected one of {', '.join(recipes.NAMES)}")
        found = recipes.load(recipe)
        preset, chip, topology = preset or found.model, chip or found.chip, topology or found.topology
        tokens, batch = tokens or str(found.train["seq"]), batch or found.train["batch"]
        strategies, remat = strategies or (found.train["strategy"],), remat or found.train["remat"]
        mesh = mesh or ",".join(f"{axis}={size}" for axis, size in found.mesh.items())

    from ringtide.bench import plan
    from ringtide.bench.compile import CompileError
    from ringtide.cli.train import axes_of
    from ringtide.models import BadInput, llama, sharding

    if preset not in llama.PRESETS:
        raise click.UsageError(f"PRESET{f' {preset}' if preset else ''}: expected one of {', '.join(llama.PRESETS)}")
    try:
        pod = plan.Pod(chip or "v5p", topology or "4x4x4")
    except BadInput as error:
        raise click.UsageError(str(error)) from None
    count, remats = _tokens(tokens or "4M"), (remat,) if remat else plan.REMATS
    config, batch = llama.PRESETS[preset], batch or 1
    if not as_json:
        click.echo(plan.heading(pod, preset, config, batch))
    rows, failed = [], 0
    for strategy in strategies or _STRATEGIES:
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
