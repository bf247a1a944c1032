"""`ringtide simulate`: a Trainium2 kernel on this CPU, and an estimate of what it would cost there."""

import contextlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path

import click

_FILLS = "normal", "uniform", "negative", "zeros", "ones"


@click.command("simulate")
@click.argument("kernel", metavar="FILE.py:KERNEL")
@click.option("--args", "args_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="JSON: an object of arguments by name, or a list.")  # fmt: skip
@click.option("--lnc", type=click.Choice(["1", "2"]), help="Run on a grid of so many cores.  [no grid]")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the arrays.  [0]")
@click.option("--sbuf", type=click.IntRange(1), help="What SBUF holds, KiB a partition.  [192]")
@click.option("--no-lint", is_flag=True, help="Do not look for Python that a front end of the compiler does not take.")
@click.option("--trace", "trace_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome trace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(kernel, args_file, lnc, seed, sbuf, no_lint, trace_file, as_json):
    """Runs a kernel of the public NKI API in the simulator, strictly, and estimates its time on a Trainium2.

    An array is {"shape": [128, 512], "dtype": "bfloat16", "fill": "normal"}; fill is normal, uniform (0 to 1), negative
    (-1 to 0), zeros or ones. Anything else is passed as it is. The file may say `import nki`; it is run, so trust it.
    """
    os.environ["RINGTIDE_NKI"] = "simulator"  # before anything asks which nki there is
    from ringtide import nki
    from ringtide.kernels.nki import backend

    if trace_file is not None and not trace_file.parent.is_dir():
        raise click.UsageError(f"--trace {trace_file}: its folder does not exist")
    with contextlib.nullcontext() if backend.real() else nki.external():
        found = _load(kernel)
        args, kwargs = _arguments(args_file, seed)
        try:
            inspect.signature(found).bind(*args, **kwargs)
        except TypeError as error:
            raise click.UsageError(f"--args {args_file}: {kernel}: {error}") from None
        options = {} if sbuf is None else {"sbuf_bytes": sbuf * 1024}
        run = nki.simulate(found if lnc is None else nki.jit(found)[int(lnc)], **options)
        try:
            findings = [] if no_lint else nki.lint(found)
            out = run(*args, **kwargs)
        except Exception as error:
            raise click.ClickException(_one_line(error)) from None
    report = _report(run.last, out, findings)
    if trace_file is not None:
        trace_file.write_text(json.dumps(nki.trace(run.last)), encoding="utf-8")
    click.echo(json.dumps(report) if as_json else _text(report))


def _load(spec):
    """The kernel of FILE.py:KERNEL."""
    file, _, name = spec.rpartition(":")
    if not file or not Path(file).is_file():
        raise click.UsageError(f"{spec}: expected FILE.py:KERNEL, a file that exists and a kernel in it")
    sys.path.insert(0, str(Path(file).parent))  # for its neighbours
    made = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(made)
    sys.modules[made.name] = module  # dataclasses look there
    try:
        made.loader.exec_module(module)
    except Exception as error:
        raise click.ClickException(_one_line(error)) from None
    if not callable(getattr(module, name, None)):
        raise click.UsageError(f"{spec}: {file} has no kernel {name!r}")
    return getattr(module, name)


def _one_line(error):
    """The error, and where in the kernel it came up: the innermost line outside the simulator."""
    from ringtide.kernels.nki import simulator

    ours, frames = (str(Path(simulator.__file__).parent), __file__, "<"), traceback.extract_tb(error.__traceback__)
    theirs = [x for x in frames if not x.filename.startswith(ours)]
    place = f"{theirs[-1].filename}:{theirs[-1].lineno}: " if theirs else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())}"


def _arguments(file, seed):
    """(positional, by name) of the JSON file."""
    import numpy as np

    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.UsageError(f"--args {file}: not JSON: {error}") from None
    if not isinstance(given, dict | list):
        raise click.UsageError(f"--args {file}: expected an object or a list, got {type(given).__name__}")
    rng = np.random.default_rng(seed)
    if isinstance(given, list):
        return [_array(rng, f"argument {i}", x) for i, x in enumerate(given)], {}
    return [], {name: _array(rng, name, x) for name, x in given.items()}


def _array(rng, name, x):
    from ringtide.kernels.nki.simulator import dtypes

    if not isinstance(x, dict) or "shape" not in x:
        return x
    shape, dtype, fill = x["shape"], x.get("dtype", "float32"), x.get("fill", "normal")
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise click.UsageError(f"--args: {name}: shape is a list of positive integers, got {shape}")
    if dtype not in [*dtypes.NUMPY] or fill not in _FILLS or set(x) - {"shape", "dtype", "fill"}:
        raise click.UsageError(f"--args: {name}: {x}: dtype {', '.join(dtypes.NUMPY)}; fill {', '.join(_FILLS)}")
    made = {
        "normal": lambda: rng.standard_normal(shape) * (10 if dtype in dtypes.INTEGERS else 1),
        "uniform": lambda: rng.random(shape),
        "negative": lambda: -rng.random(shape),
        "zeros": lambda: rng.random(shape) * 0,
        "ones": lambda: rng.random(shape) * 0 + 1,
    }[fill]()
    return dtypes.narrow(made, dtype)


def _report(run, out, findings):
    outputs = [out] if hasattr(out, "shape") else list(out.values()) if isinstance(out, dict) else list(out or ())
    return {
        "outputs": [{"shape": list(x.shape), "dtype": str(x.dtype)} for x in outputs if hasattr(x, "shape")],
        **run.report(),
        "lint": [str(x) for x in findings],
    }


def _text(report):
    lines = ["outputs  " + ", ".join(f"{x['dtype']}{x['shape']}" for x in report["outputs"])]
    lines.append(
        f"memory   SBUF {report['sbuf_bytes'] / 1024:.1f} KiB a partition, PSUM {report['psum_banks']} banks of 8, "
        f"{report['dma_bytes'] / 1e6:.2f} MB to and from HBM"
    )
    busy = ", ".join(f"{engine} {us:.2f}" for engine, us in report["engines"].items())
    lines.append(f"engines  {busy} us busy; {report['instructions']} instructions, {report['critical']} the busiest")
    lines.append(
        "times    "
        + ", ".join(f"{t} {report[t.lower() + '_us']:.2f}" for t in ("T_max", "T_sum", "T_sched", "T_list"))
        + " us: estimates, from the documented costs of instructions; T_sched and T_list mean to be near"
    )
    lines += [f"lint     {x}" for x in report["lint"]]
    return "\n".join(lines)
