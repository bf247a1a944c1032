"""The splash kernels through the real TPU compiler, for chips that are not there: pairs of features in few kernels."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import ringtide
from ringtide import Causal, Chunked, Full, Local
from ringtide.bench.compile import compile_for
from ringtide.kernels.masks import Where, as_mask
from ringtide.kernels.pallas import splash

pytestmark = pytest.mark.usefixtures("tpu_compiler")

MASKS = {
    "causal": Causal(),
    "full": Full(),
    "local": Local(700, 30),
    "chunked": Chunked(900) & Causal(),
    "either": Causal() | Local(3, 50),
    "not": ~Local(100, 100),
    "function": as_mask(lambda q, k: (q + 2 * k) % 3 == 0),
}
COLUMNS = {
    "chip": ("v5e", "v5p", "v6e", "tpu7x"),
    "pass": ("forward", "backward"),
    "dtype": ("bfloat16", "float32", "float16"),
    "heads": ((4, 4), (6, 2), (5, 1)),
    "width": (32, 64, 80, 96, 128, (192, 128), 256),
    "mask": tuple(MASKS),
    "at": ("none", "positions", "segments", "both"),
    "cap": (None, 30.0),
    "length": ((5000, 5000), (32768, 32768), (1, 129), (127, 1), (129, 5000)),
}


WIDE = ("width", "mask", "length")  # columns of many values, which need not meet one another


def pairs(row):
    """Pairs of (column, value) that meet in a row."""
    return {
        (x, y) for x, y in itertools.combinations(row.items(), 2) if x[0] not in WIDE or y[0] not in WIDE
    }  # fmt: skip


def cover():
    """Rows, one compile of one kernel each, in which all pairs meet: each row starts from a pair that is missing, and
    takes, column by column, what meets the most that is missing."""
    left, rows = set(), []
    for a, b in itertools.combinations(COLUMNS, 2):
        for x, y in itertools.product(COLUMNS[a], COLUMNS[b]):
            left |= pairs({a: x, b: y})
    while left:
        rows.append(fill(dict(min(left, key=repr)), left))
        left -= pairs(rows[-1])
    return rows


def fill(row, left):
    for name in sorted(COLUMNS.keys() - row, key=lambda name: (-len(COLUMNS[name]), name)):
        row[name] = max(COLUMNS[name], key=lambda value: len(pairs(in_order({**row, name: value})) & left))
    return in_order(row)


def in_order(row):
    return {name: row[name] for name in COLUMNS if name in row}


TABLE = cover()


def test_every_pair_is_in_the_table():
    met = set().union(*map(pairs, TABLE))
    for a, b in itertools.combinations(COLUMNS, 2):
        if not (a in WIDE and b in WIDE):
            assert all(((a, x), (b, y)) in met for x, y in itertools.product(COLUMNS[a], COLUMNS[b])), (a, b)
    for name in WIDE:
        assert {row[name] for row in TABLE} == set(COLUMNS[name])
    assert len(TABLE) <= 32


def compile_row(row):
    (t, s), (n, n_kv), width, dtype = row["length"], row["heads"], row["width"], jnp.dtype(row["dtype"])
    h, h_v = width if isinstance(width, tuple) else (width, width)
    b = 2 if t < 10000 else 1
    shape = lambda *dims, dtype=dtype: jax.ShapeDtypeStruct(dims, dtype)
    ids = lambda batch, length: shape(batch, length, dtype=jnp.int32)
    positions, segments = row["at"] in ("positions", "both"), row["at"] in ("segments", "both")
    where = Where(
        ids(1, t) if positions else None,
        ids(1, s) if positions else None,
        ids(b, t) if segments else None,
        ids(b, s) if segments else None,
    )
    options = {"mask": MASKS[row["mask"]], "scale": h**-0.5, "soft_cap": row["cap"]}
    q, k, v = shape(b, t, n, h), shape(b, s, n_kv, h), shape(b, s, n_kv, h_v)
    statistic = shape(b, t, n, dtype=jnp.float32)
    if row["pass"] == "forward":
        return compile_for(row["chip"], lambda *x: splash.forward(*x, **options), q, k, v, where)
    args = q, k, v, where, shape(b, t, n, h_v), statistic, statistic
    return compile_for(row["chip"], lambda *x: splash.backward(*x, **options), *args)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(str(x).replace(" ", "") for x in row.values()))
def test_compiles(row):
    kernel = compile_row(row).as_text()
    assert f"splash_{row['pass']}" in kernel


def step(q, k, v):
    out, vjp = jax.vjp(lambda *x: ringtide.attention(*x, mask=Causal(), implementation="pallas"), q, k, v)
    return vjp(out)


def arguments(length):
    return [jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16) for n in (4, 1, 1)]


@pytest.mark.parametrize("chip", ["tpu7x", pytest.param("v5p", marks=pytest.mark.slow)])
def test_four_million_tokens(chip):
    """Forward and backward; stored is a few times q: 9 times on v5p, 11 with `fold` (q and dout twice as wide)."""
    length = 1 << 22
    memory = compile_for(chip, step, *arguments(length)).memory_analysis()
    q = length * 4 * 128 * 2
    assert memory.temp_size_in_bytes < 12 * q


def test_programs_do_not_grow_with_the_length():
    def text(length):
        traced = jax.jit(step).trace(*arguments(length))
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    short, long = (len(text(length)) for length in (1 << 16, 1 << 22))
    assert long <= 1.02 * short  # a few digits
