"""ringtide fuzz: test an implementation against the float64 reference."""

import json
import os
import sys
from functools import partial

import click


def _jax(name):
    def of(op):
        import ringtide

        functions = {"fn": getattr(ringtide, op)}
        if op == "gla":
            functions["decode_step"] = ringtide.gla_decode_step
        return {key: partial(function, implementation=name) for key, function in functions.items()}

    return of


def _of_nki(op):
    """What `check` must know of the kernels for Trainium2: the tile, and the errors that they keep to."""
    errors = {"float32": dict.fromkeys(("o", "hT", "dq", "dk", "dv", "dg", "dh0"), 2e-6)}
    errors["bfloat16"] = {**dict.fromkeys(errors["float32"], 5e-3), "dg": 2e-2}
    return {"relative": errors, "block": 128} if op == "gla" else {}


def _nki(op):
    return {**_jax("nki")(op), **_of_nki(op)}


def _torch(name):
    def of(op):
        if op != "gla":
            raise ValueError(f"--impl torch-{name}: there is only gla: ringtide fuzz gla --impl torch-{name}")
        import ringtide.torch

        functions = {"fn": ringtide.torch.gla, "decode_step": ringtide.torch.gla_decode_step}
        tested = {key: partial(function, implementation=name) for key, function in functions.items()}
        return {**tested, **(_of_nki(op) if name == "nki" else {}), "framework": "torch"}

    return of


def _context_parallel(op):
    if op != "attention":
        raise ValueError("--impl context-parallel: there is only attention so far; `ringtide fuzz gla` has --impl xla")
    if "jax" not in sys.modules:  # a CPU shows as many devices as it is told to before it starts
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    import ringtide
    from ringtide.testing.sharded import drawn

    return {"fn": drawn(ringtide.context_parallel_attention)}


# Name -> op -> what `check` takes: the function under test, and what belongs to it.
IMPLEMENTATIONS = {
    "xla": _jax("xla"),
    "pallas": _jax("pallas"),
    "nki": _nki,
    "torch-eager": _torch("eager"),
    "torch-nki": _torch("nki"),
    "context-parallel": _context_parallel,
}


@click.command()
@click.argument("op", type=click.Choice(["attention", "gla"]))
@click.option("--impl", type=click.Choice(list(IMPLEMENTATIONS)), default="xla", show_default=True)
@click.option("--cases", type=click.IntRange(min=1), help="How many recipes to draw.  [default: 100]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Draw for so long instead.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed draws the same recipes.")
@click.option("--replay", metavar="CASE", help='Run one recipe, as a failure prints it: "GLACase(T=17, K=8)".')
@click.option("--json", "as_json", is_flag=True, help="End with one JSON line on standard output.")
def command(op, impl, cases, minutes, seed, replay, as_json):
    """Tests OP against the float64 reference: random recipes, every property on each.

    A failure prints the shrunk recipe, the slices around the worst element, and the line that replays it. Exit code 1
    if anything failed or nothing was tested, 130 after Ctrl-C. Properties, bounds and your own functions:
    `ringtide.testing.check`.
    """
    if sum(x is not None for x in (cases, minutes, replay)) > 1:
        raise click.UsageError("--cases, --minutes and --replay exclude each other: give one")
    how = {"cases": cases or 100, "minutes": minutes, "seed": seed, "replay": replay, "progress": _progress()}
    try:
        from ringtide.testing import check

        tested = IMPLEMENTATIONS[impl](op)
        report = check(op=op, **tested, **how)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        package = "'ringtide[torch]'" if error.name == "torch" else "ringtide"
        raise click.ClickException(f"{error.name} is not installed: pip install {package}") from None
    if sys.stderr.isatty():
        click.echo(err=True)
    click.echo(report)
    if report.failure:
        if way := getattr(tested["fn"], "way", None):  # drawn from the shapes
            click.echo(f"by: {', '.join(f'{key}={value!r}' for key, value in way(report.failure.case).items())}")
        click.echo(f'replay: ringtide fuzz {op} --impl {impl} --replay "{report.failure.case}"')
    elif report.cases == report.refused:
        click.echo("FAILED: nothing was tested")
    if as_json:
        click.echo(json.dumps(summary(report, impl)))
    sys.exit(130 if report.interrupted else 0 if report.ok else 1)


def summary(report, impl: str) -> dict:
    """The JSON line. A worst ratio that is not finite (a NaN, a broken exact claim) is null."""
    ratio = report.worst if report.worst < float("inf") else None
    return {
        "op": report.op,
        "impl": impl,
        "cases": report.cases,
        "failures": report.failed,
        "worst_error_over_bound": ratio,
        "worst_case": None if report.worst_case is None else repr(report.worst_case),
        "interrupted": report.interrupted,
    }


def _progress():
    """Counts on standard error: in place on a terminal, now and then in a log."""
    live = sys.stderr.isatty()

    def show(report):
        line = f"{report.op}: {report.cases} cases, {report.failed} failed, worst error / bound {report.worst:.2f}"
        if live:
            click.echo(f"\r{line}", nl=False, err=True)
        elif report.cases % 50 == 0:
            click.echo(line, err=True)

    return show
