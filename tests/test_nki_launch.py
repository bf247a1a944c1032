"""Launches of kernels in the simulator: arrays in and out, two cores, `import nki`, the lint, `ringtide simulate`."""

import importlib
import json
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ringtide import nki
from ringtide.cli import main
from ringtide.kernels.nki import backend
from ringtide.kernels.nki.simulator import errors, isa, lint, machine
from ringtide.kernels.nki.simulator import language as nl

BF16 = ml_dtypes.bfloat16


def _normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# --- launches -------------------------------------------------------------------------------------------------------


@nki.jit
def _double(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.add(nl.load(x), nl.load(x)))
    return out


def test_arrays_come_back_in_kind():
    jnp, torch = pytest.importorskip("jax.numpy"), pytest.importorskip("torch")
    x = _normal(128, 8, dtype=BF16)
    truth = (x + x).astype(np.float32)
    assert (_double(x) == x + x).all()
    out = _double(torch.from_numpy(x.astype(np.float32)).bfloat16())
    assert out.dtype is torch.bfloat16
    assert (out.float().numpy() == truth).all()
    out = _double(jnp.asarray(x))
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out, np.float32) == truth).all()


def test_jit_takes_arguments_and_kernels_call_kernels():
    @nki.jit(mode="trace")
    def quadruple(x):
        return _double(_double(x))

    x = _normal(128, 8)
    assert quadruple.__name__ == "quadruple"
    assert (quadruple(x) == 4 * x).all()
    assert (nki.simulate(lambda x: _double(x))(x) == 2 * x).all()


def test_structures():
    def kernel(pair, named, scale):
        return {"a": _double(pair[0])}, [_double(pair[1]), _double(named["x"])], scale

    x, y, z = (_normal(8, 8, seed=i) for i in range(3))
    made, (b, c), scale = nki.simulate(kernel)((x, y), {"x": z}, 3)
    assert (made["a"] == 2 * x).all()
    assert (b == 2 * y).all()
    assert (c == 2 * z).all()
    assert scale == 3


def test_outputs_are_written_and_shared():
    with pytest.raises(errors.UninitializedError, match="output"):
        nki.simulate(lambda: nl.ndarray((8, 8), nl.float32, buffer=nl.shared_hbm))()
    with pytest.raises(errors.BufferError, match="shared_hbm"):
        nki.simulate(lambda: nl.zeros((8, 8), nl.float32))()
    with pytest.raises(errors.DtypeError, match=r"argument 0: float64\[8, 8\]"):
        _double(np.ones((8, 8)))


def test_an_input_may_be_written():
    x = _normal(8, 8)
    given = x.copy()

    def kernel(x):
        isa.dma_copy(x, nl.add(nl.load(x), 1.0))
        return x, _double(x)

    run = nki.simulate(kernel)
    out, doubled = run(x)
    assert (out == given + 1).all()
    assert (doubled == 2 * (given + 1)).all()
    assert (x == given).all()
    assert 0 in run.last.machines[0].instructions[2].after  # the write waits for the first read
    nki.shuffled(run.last, seed=1)


def test_nothing_runs_outside():
    with pytest.raises(errors.NkiSimError, match="inside a kernel"):
        nl.ndarray((8, 8), nl.float32)
    with pytest.raises(errors.NkiSimError, match="1 or 2"):
        _double[3]
    assert not machine.running()


# --- two cores ------------------------------------------------------------------------------------------------------


def _halves(x, barrier=True):
    """Each core doubles its half, then gives the other's half minus 1."""
    middle, out = (nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm) for _ in range(2))
    rows, me, n = x.shape[0] // 2, nl.program_id(0), nl.num_programs(0)
    mine, other = nl.ds(me * rows, rows), nl.ds((n - 1 - me) * rows, rows)
    tile = nl.load(x[mine])
    nl.store(middle[mine], nl.add(tile, tile))
    if barrier:
        isa.core_barrier(middle, (0, 1))
    nl.store(out[other], nl.subtract(nl.load(middle[other]), 1.0))
    return out


def test_two_cores_meet():
    x = _normal(16, 8)
    run = nki.simulate(nki.jit(_halves)[2])
    assert (run(x) == 2 * x - 1).all()
    assert [core.core for core in run.last.machines] == [0, 1]


def test_a_race():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out[nl.ds(4 * nl.program_id(), 8)], nl.load(x[0:8]))
        return out

    with pytest.raises(errors.HazardError, match=r"race on .*core_barrier"):
        nki.simulate(nki.jit(kernel)[2])(_normal(12, 8))


def test_reading_what_the_other_core_has_not_written():
    with pytest.raises(errors.UninitializedError):
        nki.simulate(nki.jit(lambda x: _halves(x, barrier=False))[2])(_normal(16, 8))


@pytest.mark.parametrize("waits", [0, 1])
def test_a_barrier_that_one_core_never_reaches(waits):
    def kernel(x):
        if nl.program_id() == waits:
            isa.core_barrier(x, (0, 1))
        return x

    with pytest.raises(errors.HazardError, match=f"core {waits} waits at barrier 1 for ever"):
        nki.simulate(nki.jit(kernel)[2])(_normal(8, 8))


def test_cores_allocate_alike():
    def kernel():
        return nl.ndarray((8, 8 + nl.program_id()), nl.float32, buffer=nl.shared_hbm)

    with pytest.raises(errors.HazardError, match="both must allocate alike"):
        nki.simulate(nki.jit(kernel)[2])()


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_one_core_ends_both(bad):
    def kernel(x):
        if nl.program_id() == bad:
            raise KeyError("mine")
        isa.core_barrier(x, (0, 1))

    with pytest.raises(KeyError, match="mine"):
        nki.simulate(nki.jit(kernel)[2])(_normal(8, 8))


def test_the_grid():
    seen = []
    see = lambda: seen.append((nl.program_ndim(), nl.num_programs(0), nl.program_id(0)))
    for kernel in (nki.jit(see), nki.jit(see)[1], nki.jit(see)[2]):
        nki.simulate(kernel)()
    assert seen == [(0, 1, 0), (1, 1, 0), (1, 2, 0), (1, 2, 1)]


# --- where the simulator comes from ---------------------------------------------------------------------------------


_KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl
from nki.isa.constants import dge_mode
from nki.typing import tensor


@nki.jit
def scaled(x, scale=1.0, bad=False):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x, dge_mode=dge_mode.none)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)
    if scale == 3.0:
        raise RuntimeError("of two\\nlines")
    if bad is x:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=out, src=tile)
    return out
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "scaled.py").write_text(_KERNEL)
    return tmp_path / "scaled.py"


def test_external(file):
    x, scope = _normal(128, 8), {"__name__": "scaled"}
    before = {name for name in sys.modules if name.split(".")[0] == "nki"}
    with nki.external() as package:
        assert package.__is_simulator__
        exec(file.read_text(), scope)
    assert {name for name in sys.modules if name.split(".")[0] == "nki"} == before
    assert (scope["scaled"](x, scale=2.0) == 2 * x).all()
    with nki.external(), pytest.raises(NotImplementedError, match="collectives"):
        __import__("nki.collectives").collectives.all_reduce()


def test_external_leaves_the_real_one_alone(monkeypatch):
    monkeypatch.setattr(backend, "real", lambda: (1, 2, 3))
    with pytest.raises(RuntimeError, match="its own"), nki.external():
        pass


def test_backend(monkeypatch):
    monkeypatch.setattr(backend, "real", lambda: None)
    monkeypatch.setenv("RINGTIDE_NKI", "real")
    with pytest.raises(ImportError, match="not installed"):
        backend._choose()
    monkeypatch.setenv("RINGTIDE_NKI", "fake")
    with pytest.raises(ValueError, match="'real' or 'simulator'"):
        backend._choose()
    monkeypatch.setenv("RINGTIDE_NKI", "simulator")
    assert backend._choose()[2] is nl
    monkeypatch.setenv("RINGTIDE_NKI", "")
    monkeypatch.setattr(backend, "real", lambda: (1, 2, 3))
    assert backend._choose() == (1, 2, 3)


def test_imports_no_framework():
    code = "import sys, ringtide.nki; print([m for m in ('jax', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- lint -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("def kernel(x, *, scale): pass", "keyword-only"),
        ("def kernel(x, y):\n    return x is y", "is"),
        ("def kernel(x):\n    try:\n        return x\n    except ValueError:\n        return 0", "try"),
        ("def kernel(x):\n    yield x", "generator"),
        ("def kernel(x):\n    return sum(y for y in x)", "generator"),
        ("def kernel(x):\n    global seen\n    seen = x", "global"),
        ("seen = {}\ndef kernel(x):\n    seen['x'] = x", "mutation"),
        ("seen = []\ndef kernel(x):\n    seen.append(x)", "mutation"),
        ("def kernel(x):\n    made = []\n    def body(i):\n        made.append(i)\n    body(x)", "mutation"),
        ("def kernel(x):\n    r = nisa.register_alloc()\n    while r:\n        pass", "while"),
        ("def kernel(x):\n    t = nl.load(x)\n    if t > 0:\n        pass", "branch"),
        ("def kernel(x):\n    t = nl.load(x)\n    return 1 if t[0] and x else 2", "branch"),
        (
            "def kernel(x):\n    fs = [0]\n    for i in range(3):\n        fs[0] = lambda: i\n    return fs",
            "late-binding",
        ),
        ("def kernel(x):\n    return helper(x)\ndef helper(x, *, y=1):\n    return x", "keyword-only"),
        ("def helper(x, *, y=1): pass\nTABLE = (helper,)\ndef kernel(x):\n    TABLE[0](x)", "keyword-only"),
    ],
)
def test_lint_finds(tmp_path, body, rule):
    assert [x.rule for x in _lint(tmp_path, body)] == [rule]


@pytest.mark.parametrize(
    "body",
    [
        "def kernel(x, scale=1.0):\n    assert x.shape[0] == 128\n    return None if scale is None else x",
        "def kernel(x):\n    made = []\n    for i in range(3):\n        made.append(lambda i=i: i)\n    return made",
        "def kernel(x):\n    t = nl.load(x)\n    if t.shape[0] > 2 and t != None:\n        t[0:2] = 0",
        "def kernel(x):\n    n = 4\n    while n > 1:\n        n //= 2\n    return n",
        "def kernel(x):\n    return x\ndef unused(x, *, y):\n    return y",
    ],
)
def test_lint_passes(tmp_path, body):
    assert _lint(tmp_path, body) == []


@pytest.mark.parametrize(
    ("file", "name"), [("gla", "gla_forward"), ("gla_bwd", "gla_backward"), ("gla_decode", "gla_decode")]
)
def test_our_kernels_pass(file, name):
    kernel = getattr(importlib.import_module(f"ringtide.kernels.nki.{file}"), name)
    assert [str(x) for x in lint.check(kernel)] == []


def _lint(folder, body):
    (folder / "linted.py").write_text(textwrap.dedent(body))
    scope = {}
    exec(compile(body, folder / "linted.py", "exec"), scope)
    return lint.check(nki.jit(scope["kernel"]))


# --- the command ----------------------------------------------------------------------------------------------------


def _simulate(file, given, *options):
    arguments = file.parent / "args.json"
    arguments.write_text(json.dumps(given))
    return CliRunner().invoke(main, ["simulate", f"{file}:scaled", "--args", str(arguments), *options])


_X = {"shape": [128, 64], "dtype": "bfloat16", "fill": "negative"}


def test_simulate_reports(file, monkeypatch):
    monkeypatch.setenv("RINGTIDE_NKI", "")
    done = _simulate(file, {"x": _X, "scale": 2.0}, "--json", "--trace", str(file.parent / "trace.json"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["outputs"] == [{"shape": [128, 64], "dtype": "bfloat16"}]
    assert report["kind"] == "estimate"
    assert report["sbuf_bytes"] == 128
    assert report["instructions"] == 3
    assert 0 < report["t_max_us"] <= report["t_list_us"] <= report["t_sched_us"]
    assert [x.split(": ")[1] for x in report["lint"]] == ["is"]
    assert len(json.loads((file.parent / "trace.json").read_text())["traceEvents"]) == 3
    text = _simulate(file, [_X, 2.0], "--lnc", "1", "--no-lint").output
    assert "estimates" in text
    assert "lint" not in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": {"shape": [128, 64], "dtype": "float64"}}, "dtype bool, int8"),
        ({"x": {"shape": [128, 0]}}, "positive integers"),
        ({"x": {"shape": [128, True]}}, "positive integers"),
        ({"x": {"shape": [128, 4], "dtype": []}}, "dtype bool, int8"),
        ({"x": {"shape": [256, 64]}}, "scaled.py:12: PartitionError: "),
        ({"x": _X, "scale": 3.0}, "scaled.py:16: RuntimeError: of two lines"),
        ({"y": _X}, "scaled: missing a required argument: 'x'"),
        ([_X, 1.0, None, 4], "scaled: too many positional arguments"),
        ("x", "expected an object or a list"),
    ],
)
def test_simulate_refuses(file, monkeypatch, given, says):
    monkeypatch.setenv("RINGTIDE_NKI", "")
    done = _simulate(file, given)
    assert done.exit_code != 0
    assert says in done.output
