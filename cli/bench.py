"""`ringtide bench`: what the kernels cost."""

import json

import click


@click.group()
def command():
    """Measure speed and memory."""


@command.command()
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Interleaved runs of each function."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
def cpu(rounds, as_json):
    """The portable kernels on this machine's CPU, measured, beside the usual way."""
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"
    from ringtide.bench import cpu as bench

    rows = bench.run(rounds, log=lambda text: click.echo(text, err=True))
    if as_json:
        for row in rows:
            click.echo(json.dumps(row.json(rounds)))
        return
    click.echo(f"measured on this machine, {bench.cores()} cores, medians of {rounds} interleaved runs")
    for row in rows:
        took = (
            "" if row.seconds is None else f"   {row.seconds:.3f} s against {row.against_seconds:.3f} s, {row.against}"
        )
        click.echo(f"{row.name:<58} {row.value:6.3f} {row.unit:<5} (aim {row.target}){took}")
