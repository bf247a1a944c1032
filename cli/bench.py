"""`ringtide bench`: what the kernels cost."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import click

_CHIPS = ("v5p", "v6e", "tpu7x")
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


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


@command.command()
@click.option("--chip", "chips", multiple=True, type=click.Choice(_CHIPS), help="Repeat for more.  [default: all]")
@click.option("--op", type=click.Choice(["splash", "ring"]), default="splash", show_default=True)
@click.option("--shape", "shapes", multiple=True, metavar="KEY=VALUE,...", help="Instead of the table; see above.")
@click.option("--peers", is_flag=True, help="jax's and tokamax's kernels too, all compiled in one environment.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the shares into this file.")
def schedule(chips, op, shapes, peers, as_json, plot):
    """What the TPU compiler's own schedule says of a kernel. No TPU needed; predicted, not measured.

    Without --shape: causal calls at 32K, and a full, a windowed and a packed one; with --plot, three head_dims on each
    chip. docs/schedule.md says what is counted. A shape names what differs
    from head_dim=128,heads=32,kv_heads=8,seq=32768,mask=causal and may say pass=forward or pass=backward; masks are
    full, causal, local:4096 (keys each query sees) and packed:8 (documents).

    --op ring: around the devices of the smallest slice, by permutes and inside one kernel; seq is a device's share, and
    all is visible.
    """
    from ringtide.bench import table

    if op == "ring":
        if peers or plot:
            raise click.UsageError(f"--op ring: has no {'--peers' if peers else '--plot'}")
        _ring(chips or ("tpu7x", "v5p"), shapes, as_json)
        return
    chips = chips or _CHIPS
    cases = table.FIGURE if plot else table.TABLE
    cases = _shapes(shapes, chips) if shapes else [case for case in cases if case.chip in chips]
    if plot and (not plot.parent.is_dir() or plot.suffix not in (".png", ".svg", ".pdf")):
        raise click.UsageError(f"--plot {plot}: expected a .png, .svg or .pdf in a folder that exists")
    if plot and find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install 'ringtide[bench]'")
    python = _interpreter(peers)
    if not as_json:
        click.echo(table.heading(chips))
    rows, failed = [], 0
    for row, error in table.prices(cases, table.IMPLS if peers else table.IMPLS[:1], python=python, log=_say):
        if error:
            failed += 1
            _say(error)
            continue
        rows.append(row)
        click.echo(json.dumps(row) if as_json else table.line(row))
    if plot and rows:
        from ringtide.bench.plot import shares

        shares(plot, rows)
        _say(f"drawn: {plot}")
    if failed:
        raise click.ClickException(f"{failed} of {failed + len(rows)} rows could not be priced")


def _ring(chips, shapes, as_json):
    from ringtide.bench import ring
    from ringtide.bench.compile import CompileError

    cases = _shapes(shapes or ["mask=full,seq=65536", "mask=full,seq=65536,head_dim=256,heads=16,kv_heads=4"], chips)
    if hidden := [case.mask for case in cases if case.mask != "full"]:
        raise click.UsageError(
            f"--shape: mask={hidden[0]}, but --op ring prices a ring that sees everything: mask=full"
        )
    _interpreter(peers=False)
    if not as_json:
        click.echo(ring.HEADING)
    for case in cases:
        try:
            for row in ring.prices(case):
                click.echo(json.dumps(row) if as_json else ring.line(row))
        except CompileError as error:
            raise click.ClickException(f"{case.chip}, {case.pass_}: {error}") from None


@command.command()
@click.argument("op", type=click.Choice(["splash"]))
@click.option("--chip", type=click.Choice(_CHIPS), default="tpu7x", show_default=True)
@click.option("--shape", default="", metavar="KEY=VALUE,...", help="As `ringtide bench schedule` takes it.")
@click.option("--impl", type=click.Choice(["ringtide", "tokamax", "jax"]), default="ringtide", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
def tune(op, chip, shape, impl, as_json):
    """Compiles OP with all block sizes that may do, and ranks them by the schedule: share of peak of a whole call."""
    from ringtide.bench import table

    cases = _shapes([shape], [chip])
    python = _interpreter(peers=impl != "ringtide")
    for case in cases:
        rows = []
        for row, error in table.prices([case], [impl], table.candidates(case, impl), python, _say):
            rows.append(row) if row else _say(error)
        if not rows:
            raise click.ClickException(f"{case.pass_}: none of the block sizes compiles")
        if not as_json:
            click.echo(table.heading([chip]))
        for row in sorted(rows, key=lambda row: -row["call_share"]):
            click.echo(json.dumps(row) if as_json else table.line(row))


@command.command()
@click.option("--peers", is_flag=True, help="tokamax's splash too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
def error(peers, as_json):
    """How exact attention is in bfloat16: errors against float64, beside the plain formula's. Measured on the CPU."""
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"
    from ringtide.bench import error as bench

    python = _interpreter(peers) if peers else None
    plain = None
    if not as_json:
        click.echo("root mean square error (times the plain formula's), and the largest error (the same)")
    for row in bench.rows(["plain", "ringtide", *(["tokamax"] if peers else [])], python):
        plain = row if row["impl"] == "plain" else plain
        click.echo(json.dumps(row) if as_json else bench.line(row, plain))


@command.command()
@click.option("--shape", "shapes", multiple=True, metavar="KEY=VALUE,...", help="Instead of the table; see above.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The first row's schedule, for Perfetto.",
)
def nki(shapes, as_json, trace_file):
    """What the kernels for Trainium2 would cost, in the simulator. No device needed; estimated, not measured.

    A shape names what differs from kernel=forward,d_k=128,d_v=128,heads=4,dtype=bfloat16; kernels are forward,
    forward-fast (gates bounded), backward and decode.
    """
    import os

    os.environ["RINGTIDE_NKI"] = "simulator"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: threads only wait for one another
    from ringtide.bench import nki as bench
    from ringtide.kernels.nki.simulator.schedule import trace

    try:
        cases = bench.parse(shapes) or bench.TABLE
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if trace_file is not None and not trace_file.parent.is_dir():
        raise click.UsageError(f"--trace {trace_file}: its folder does not exist")
    if not as_json:
        click.echo(bench.HEADING)
    for i, case in enumerate(cases):
        row, run = bench.row(case)
        click.echo(json.dumps(row) if as_json else bench.line(row))
        if trace_file is not None and i == 0:
            trace_file.write_text(json.dumps(trace(run)), encoding="utf-8")


@command.command()
@click.option("--run", "runs", multiple=True, type=_FOLDER, help="Folder of a run or of a model; repeat for more.")
@click.option("--corpus", type=click.Path(dir_okay=False, path_type=Path), help="Write a text to train on, and stop.")
@click.option("--megabytes", default=8, show_default=True, type=click.IntRange(1, 4096), help="Of --corpus.")
@click.option("--distances", default="16,32,64,128,256,512,1024,2048,4096", show_default=True, metavar="N,N,...")
@click.option("--count", default=64, show_default=True, type=click.IntRange(1), help="Questions a distance.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw them into this file.")
def recall(runs, corpus, megabytes, distances, count, seed, as_json, plot):
    """Whether a model still knows what it read N bytes ago: a needle in a text, asked for again. Measured.

    Train on the text of --corpus, each model by `ringtide train`, then name both by --run.
    """
    from ringtide.bench import recall as bench
    from ringtide.models import BadInput

    if bool(runs) == bool(corpus):
        raise click.UsageError("--run or --corpus: give one of the two")
    if plot and (not plot.parent.is_dir() or plot.suffix not in (".png", ".svg", ".pdf")):
        raise click.UsageError(f"--plot {plot}: expected a .png, .svg or .pdf in a folder that exists")
    try:
        wanted = [int(part) for part in distances.split(",")]
        if not all(8 <= d <= 1 << 20 for d in wanted):
            raise ValueError
    except ValueError:
        raise click.UsageError(f"--distances {distances}: expected bytes from 8 to 2^20, as 64,512,4096") from None
    train, asked = bench.lines()
    if corpus:
        try:
            corpus.write_bytes(bench.corpus(train, megabytes << 20, seed))
        except OSError as error:
            raise click.ClickException(f"--corpus {corpus}: {error.strerror}") from None
        return
    rows = []
    try:
        for folder in runs:
            name, predict = bench.predictor(folder)
            for row in bench.probe(predict, asked, wanted, count, seed):
                rows.append({"model": name, "run": folder.name, **row, "questions": count, "measured": True})
                click.echo(json.dumps(rows[-1]) if as_json else bench.line(rows[-1]))
    except BadInput as error:
        raise click.ClickException(str(error)) from None
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed: pip install 'ringtide[models,torch]'") from None
    if plot:
        from ringtide.bench.plot import recalled

        recalled(plot, rows)
        _say(f"drawn: {plot}")


@command.command()
@click.option("--recipe", default="trn2-laplace-3b-serve", show_default=True, metavar="NAME", help="Of recipes/.")
@click.option("--scale-down", is_flag=True, help="A tiny model and few sequences, for this machine.")
@click.option("--ckpt", type=click.Path(path_type=Path), help="A run or a model to serve.  [random weights]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def serve(recipe, scale_down, ckpt, as_json):
    """Sequences of random lengths that come and go in a pool of states: the machine's speed, measured.

    Under torchrun each rank serves its share with a copy of the weights. `ringtide plan --recipe` predicts the step.
    """
    if find_spec("torch") is None:
        raise click.ClickException("torch is not installed: pip install 'ringtide[torch]'")
    from ringtide import recipes
    from ringtide.models import BadInput

    serving = [name for name in recipes.NAMES if recipes.load(name).serve]
    if recipe not in serving:
        raise click.UsageError(f"--recipe {recipe}: expected one that serves: {', '.join(serving)}")
    found = recipes.load(recipe)
    found = found.scaled_down() if scale_down else found
    options = dict(found.serve)
    sequences, dtype = options.pop("sequences"), options.pop("dtype")
    try:
        from ringtide.bench import serve as bench
        from ringtide.models import laplace_generate
        from ringtide.models.ranks import device

        slots, ranks = bench.share(sequences)
        if ckpt:
            model = laplace_generate.load(ckpt, warn=_say)[0].to(device())
        else:
            model = bench.make(found.model, dtype, slots, device())
        row = {"recipe": recipe, "ranks": ranks, "device": device().type, **bench.run(model, slots, **options)}
    except BadInput as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(row) if as_json else bench.text(row))


@command.command()
@click.option("--preset", default="laplace-tiny", show_default=True, help="Of a Laplace, with random weights.")
@click.option("--prompt", "prompts", multiple=True, type=click.IntRange(1), help="Repeat.  [512, 2048, 8192, 32768]")
@click.option("--rows", default=1, show_default=True, type=click.IntRange(1), help="Sequences that a step decodes.")
@click.option("--tokens", default=500, show_default=True, type=click.IntRange(1), help="Steps timed after each prompt.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--compile", is_flag=True, help="The step by torch.compile; needs a C++ compiler.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
def decode(preset, prompts, as_json, **options):
    """What a token costs a Laplace after prompts of several lengths, on this machine's CPU, measured.

    One step after each prompt in turn; medians, and their ratio to that of the first prompt.
    """
    try:
        from ringtide.bench import decode as bench
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed: pip install 'ringtide[torch]'") from None
    if preset not in bench.PRESETS:
        raise click.UsageError(f"--preset {preset}: expected {' or '.join(bench.PRESETS)}")
    rows = bench.run(preset, prompts or bench.PROMPTS, **options, log=_say)
    if not as_json:
        first = rows[0]
        click.echo(
            f"measured on this machine's CPU: {preset}, {first['rows']} sequence(s), {first['threads']} thread(s), "
            f"medians of {first['steps']} interleaved steps"
        )
        click.echo(bench.HEADING)
    for row in rows:
        click.echo(json.dumps(row) if as_json else bench.line(row))


def _say(text):
    click.echo(text, err=True)


def _shapes(texts, chips):
    from ringtide.bench import table

    try:
        return table.parse(texts, chips)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _interpreter(peers):
    """The Python that compiles: with peers, that of the environment that holds them all."""
    if not peers:
        if find_spec("libtpu") is None:
            raise click.ClickException("libtpu, the TPU compiler, is not installed: pip install 'ringtide[tpu]'")
        return sys.executable
    from ringtide.bench.peers import python

    try:
        return python(log=_say)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
