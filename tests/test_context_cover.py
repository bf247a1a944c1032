"""Context parallelism against one device: all pairs of what a call may be, and (slow) the whole product; error by size.

Values within 2e-6 and gradients within 5e-6 of the largest that `ringtide.attention` gives in float32 on one device.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from ringtide import Causal, Chunked, Local, attention, context_parallel_attention
from ringtide.kernels import layouts
from ringtide.reference import attention as reference

B, T, H, H_V = 2, 48, 8, 12
COLUMNS = {
    "strategy": ("all_gather", "ring", "ring both ways", "ulysses", "usp"),
    "layout": layouts.LAYOUTS,
    "mask": ("causal", "window", "chunked", "packed", "full"),
    "heads": ((4, 4), (4, 2), (4, 1)),
    "lse": (False, True),
    "sinks": (False, True),
    "cap": (None, 2.0),
    "devices": (1, 2, 3, 4, 8),
}
MASKS = {"causal": Causal(), "window": Local(9, 4), "chunked": Chunked(16), "packed": Causal(), "full": None}
USP = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 8: (2, 4)}  # ulysses, ring


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


def cover():
    """Rows in which all pairs of values meet: each starts from a pair that is missing, and takes, column by column, the
    value that brings the most of the others."""
    rows = map(dict, itertools.product(*([(name, x) for x in COLUMNS[name]] for name in COLUMNS)))
    left, chosen = set().union(*map(pairs, rows)), []
    while left:
        row = dict(min(left, key=repr))
        for name in sorted(COLUMNS.keys() - row, key=lambda name: (-len(COLUMNS[name]), name)):
            fill = lambda value, row=row, name=name: {
                c: {**row, name: value}[c] for c in COLUMNS if c in row or c == name
            }
            row = max(map(fill, COLUMNS[name]), key=lambda row: len(pairs(row) & left))
        chosen.append(row)
        left -= pairs(row)
    return chosen


TABLE = cover()


def test_all_pairs_meet():
    met = set().union(*map(pairs, TABLE))
    for a, b in itertools.combinations(COLUMNS, 2):
        assert all(((a, x), (b, y)) in met for x, y in itertools.product(COLUMNS[a], COLUMNS[b])), (a, b)
    assert len(TABLE) <= 40


def inputs(heads, dtype=np.float32):
    rng = np.random.default_rng(0)
    n, n_kv = heads
    shapes = (B, T, n, H), (B, T, n_kv, H), (B, T, n_kv, H_V), (n,), (B, T, n, H_V), (B, T, n)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    return *arrays, np.sort(rng.integers(-1, 3, (B, T)), axis=1).astype(np.int32)


def run(op, args, *, lse, sinks):
    """{name: array} of op(q, k, v), or of its (out, lse), with sinks or without, and of all gradients."""
    q, k, v, sink, dout, dlse = args

    def step(q, k, v, sink, dout, dlse):
        results, vjp = jax.vjp(lambda *x: op(*x[:3], sinks=x[3] if sinks else None, return_lse=lse), q, k, v, sink)
        return results, vjp((dout, dlse) if lse else dout)

    results, grads = jax.jit(step)(q, k, v, sink, dout, dlse)
    names = ("out", "lse") if lse else ("out",)
    results = dict(zip(names, results if lse else (results,), strict=True))
    return results, dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=True))


@functools.cache
def on_one_device(mask, heads, lse, sinks, cap):
    *args, ids = inputs(heads)
    how = {"mask": MASKS[mask], "logits_soft_cap": cap, "segment_ids": ids if mask == "packed" else None}
    return run(functools.partial(attention, implementation="xla", **how), args, lse=lse, sinks=sinks)


def on_many(strategy, layout, mask, heads, lse, sinks, cap, devices):
    names, sizes = ("context",), (devices,)
    how = {"strategy": strategy, "mask": MASKS[mask], "logits_soft_cap": cap, "layout": layout}
    if strategy == "usp":
        names, sizes = ("ulysses", "context"), USP[devices]
    if strategy == "ring both ways":
        how |= {"strategy": "ring", "bidirectional": True}
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    order = layouts.position_of(np.arange(T), layout, T, devices)
    *args, ids = [x if x.ndim < 2 else x[:, order] for x in inputs(heads)]
    if mask == "packed":
        how["segment_ids"] = ids
    op = functools.partial(context_parallel_attention, mesh=mesh, seq_axis=names, implementation="xla", **how)
    back = lambda tree: {name: x if x.ndim < 2 else np.asarray(x)[:, np.argsort(order)] for name, x in tree.items()}
    return map(back, run(op, args, lse=lse, sinks=sinks))


def error(x, truth):
    """The largest, relative to the largest of truth; -inf of lse must stand where it stands in truth."""
    x, truth = (np.asarray(x, np.float64) for x in (x, truth))
    np.testing.assert_array_equal(np.isneginf(x), np.isneginf(truth))
    x, truth = (np.where(np.isneginf(truth), 0, x) for x in (x, truth))
    return np.abs(x - truth).max() / max(np.abs(truth).max(), 1e-30)


def agrees(row):
    values, grads = on_many(**row)
    expected = on_one_device(**{name: row[name] for name in ("mask", "heads", "lse", "sinks", "cap")})
    for bound, got, want in zip((2e-6, 5e-6), (values, grads), expected, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            assert error(got[name], want[name]) <= bound, (row, name)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(str(x).replace(" ", "") for x in row.values()))
def test_equals_one_device(row):
    agrees(row)


@pytest.fixture
def compiled_fast():
    """What is compiled need not run fast: it runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("strategy", COLUMNS["strategy"])
@pytest.mark.parametrize("layout", COLUMNS["layout"])
@pytest.mark.parametrize("mask", COLUMNS["mask"])
@pytest.mark.parametrize("heads", COLUMNS["heads"], ids=("MHA", "GQA", "MQA"))
def test_whatever_is_combined_equals_one_device(strategy, layout, mask, heads):
    """Over eight devices, with each of lse, sinks and a soft cap."""
    row = {"strategy": strategy, "layout": layout, "mask": mask, "heads": heads}
    for feature in ({"lse": True}, {"sinks": True}, {"cap": 2.0}):
        agrees({**row, "lse": False, "sinks": False, "cap": None, **feature, "devices": 8})


def test_the_error_does_not_grow_with_the_ring():
    """Against float64, root mean square: what is merged or summed is float32, and divided once."""
    *args, _ = inputs((4, 2))
    q, k, v, _, dout, dlse = (np.asarray(x, np.float64) for x in args)
    truth = dict(zip(("out", "lse"), reference.attention(q, k, v, mask=Causal()), strict=True))
    *grads, _ = reference.attention_grad(q, k, v, dout, dlse, mask=Causal())
    truth |= dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def errors(devices):
        values, grads = on_many("ring", "zigzag", "causal", (4, 2), True, False, None, devices)
        got = values | grads
        return {name: np.sqrt(np.mean((got[name] - x) ** 2) / np.mean(x**2)) for name, x in truth.items()}

    alone = errors(1)
    for devices in (2, 3, 4, 8):
        for name, x in errors(devices).items():
            assert x <= 1.3 * alone[name], (devices, name)
