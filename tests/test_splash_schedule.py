"""The schedule of the splash kernels against the dense mask, and that it grows like T / block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringtide import Causal, Chunked, Full, Local
from ringtide.kernels import layouts
from ringtide.kernels.masks import Where
from ringtide.kernels.pallas.tiles import Cut, Schedule, Tiles
from ringtide.reference.attention import visibility

T, SIZES = 4500, Tiles(256, 512, 128, 512)
LAST = T - 1


def arrays(t, s):
    return [jax.ShapeDtypeStruct((1, n, 1, 64), jnp.bfloat16) for n in (t, s, s)]


def packed(length, documents=8):
    """Documents in order, of random lengths; the last fifth is padding."""
    ends = np.sort(np.random.default_rng(1).integers(0, length, documents))
    ids = np.searchsorted(ends, np.arange(length))
    return np.where(np.arange(length) < length * 4 // 5, ids, documents + 1).astype(np.int32)[None]


def in_order(layout, length):
    return layouts.position_of(np.arange(length), layout, length, 4).astype(np.int32)[None]


# (mask, lengths of queries and keys, positions, segment ids, whether the visits are to be as few as can be)
CALLS = {
    "full": (Full(), T, T, {}, True),
    "causal": (Causal(), T, T, {}, True),
    "causal, more keys": (Causal(), 1000, T, {}, True),
    "causal, more queries": (Causal(), T, 1000, {}, True),
    "window": (Local(700, 100), T, T, {}, True),
    "narrow": (Local(20, 0), T, T, {}, True),
    "chunked": (Chunked(900) & Causal(), T, T, {}, True),
    "anti-causal": (Local(0, None), T, T, {}, True),
    "packed": (Causal(), T, T, {"seg": packed(T)}, True),
    "packed, both ways": (Full(), T, T, {"seg": packed(T)}, True),
    "packed, window": (Local(300, 0), T, T, {"seg": packed(T)}, True),
    "offset": (Causal(), T, T, {"pos": np.arange(T, dtype=np.int32)[None] + 77}, True),
    "zigzag": (Causal(), 4096, 4096, {"pos": in_order("zigzag", 4096)}, True),
    "striped": (Causal(), 4096, 4096, {"pos": in_order("striped", 4096)}, False),
    "zigzag, window": (Local(300, 0), 4096, 4096, {"pos": in_order("zigzag", 4096)}, True),
    "scattered": (Full(), T, T, {"seg": np.random.default_rng(2).integers(-1, 3, (1, T), np.int32)}, False),
    "either": (Causal() | Local(3, 50), T, T, {}, False),
    "not": (~Causal(), T, T, {}, False),
}


@pytest.fixture(params=CALLS)
def call(request):
    """(the cut, its tables as NumPy, the dense mask [T, S], whether it is to be tight)"""
    mask, t, s, at, tight = CALLS[request.param]
    pos, seg = at.get("pos"), at.get("seg")
    cut = Cut(*arrays(t, s), Where(pos, pos, seg, seg), mask, SIZES)
    tables = jax.tree.map(
        np.asarray, jax.jit(lambda: Cut(*arrays(t, s), Where(pos, pos, seg, seg), mask, SIZES).tables())()
    )
    options = {"mask": mask, "segment_ids": seg, "q_positions": pos, "kv_positions": pos}
    dense = visibility(*(np.empty((1, n, 1, 1)) for n in (t, s)), **options)[0, 0]
    return cut, tables, dense, tight


def blocks(dense, q, k, nq, nk):
    """(holds a visible pair, holds a hidden pair or padding of the keys), bool [nq, nk], of the q x k tiles."""
    t, s = dense.shape
    tiles = lambda fill: np.pad(dense, ((0, nq * q - t), (0, nk * k - s)), constant_values=fill).reshape(nq, q, nk, k)
    hidden = np.pad(~dense, ((0, nq * q - t), (0, 0)))  # padded queries do not matter, padded keys do
    hidden = np.pad(hidden, ((0, 0), (0, nk * k - s)), constant_values=True).reshape(nq, q, nk, k)
    return tiles(False).any((1, 3)), hidden.any((1, 3))


def test_chunks_are_what_the_dense_mask_says(call):
    cut, (_, _, q_ranges, k_ranges), dense, _ = call
    schedule = Schedule(cut, 0, q_ranges, k_ranges)
    i = np.arange(cut.nq)[:, None]
    some, every = schedule.chunk(i, 0, np.arange(cut.nk * cut.chunks)[None])
    some, every = (np.broadcast_to(x, (cut.nq, cut.nk * cut.chunks)) for x in (some, every))
    seen, hidden = blocks(dense, cut.span, cut.chunk, cut.nq, cut.nk * cut.chunks)
    assert not (seen & ~some).any(), "a visible pair in a chunk that is skipped"
    assert not (hidden & every).any(), "a hidden pair in a chunk that is not masked"
    some, every = (np.broadcast_to(x, (cut.nq, cut.nk)) for x in schedule.tile(i, np.arange(cut.nk)[None]))
    seen, hidden = blocks(dense, cut.span, cut.keys, cut.nq, cut.nk)
    assert not (seen & ~some).any()
    assert not (hidden & every).any()


@pytest.mark.parametrize("call", [name for name, (*_, tight) in CALLS.items() if tight], indirect=True)
def test_visits_are_few(call):
    cut, ((lo, hi), _, q_ranges, k_ranges), dense, _ = call
    chunks = cut.nk * cut.chunks
    i, c = np.arange(cut.nq)[:, None], np.arange(chunks)[None]
    some, _ = Schedule(cut, 0, q_ranges, k_ranges).chunk(i, 0, c)
    visited = (
        np.broadcast_to(some, (cut.nq, chunks)) & (c // cut.chunks >= lo[:, None]) & (c // cut.chunks < hi[:, None])
    )
    seen, _ = blocks(dense, cut.span, cut.chunk, cut.nq, chunks)
    assert seen.sum() <= visited.sum() <= 1.05 * seen.sum()


def test_ranges_of_visits(call):
    """From the first to the last tile that is seen, at least one, by query block and by key block."""
    cut, (by_query, by_key, *_), dense, tight = call
    seen, _ = blocks(dense, cut.span, cut.keys, cut.nq, cut.nk)
    for (lo, hi), rows in ((by_query, seen), (by_key, seen.T)):
        inner = np.arange(rows.shape[1])
        assert lo.shape == hi.shape == rows.shape[:1]
        assert (lo >= 0).all()
        assert (lo < hi).all()
        assert (hi <= rows.shape[1]).all()
        assert not (rows & ((inner < lo[:, None]) | (inner >= hi[:, None]))).any()
        if tight:
            ends = [(row.nonzero()[0][0], row.nonzero()[0][-1] + 1) for row in rows if row.any()]
            np.testing.assert_array_equal(np.stack([lo, hi], 1)[rows.any(1)], ends)


def elements(length, given):
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32) if given else None

    def tables(ids):
        shapes = [jax.ShapeDtypeStruct((2, length, 1, 64), jnp.bfloat16)] * 3
        return Cut(*shapes, Where(ids, ids, ids, ids), Causal(), Tiles(2048, 2048, 512, 512)).tables()

    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(tables, ids)))


@pytest.mark.parametrize("given", [False, True])
def test_scalar_memory_grows_with_the_blocks(given):
    short, long = elements(1 << 20, given), elements(1 << 21, given)
    assert long - 2 <= 2 * (short - 2) + 4
    assert short < 2 * (1 << 20) / 512 * (12 if given else 2)


def test_sequences_of_a_batch_have_schedules_of_their_own():
    ids = np.concatenate([packed(T), packed(T, 3)])
    cut = Cut(*[jax.ShapeDtypeStruct((2, T, 1, 64), jnp.bfloat16)] * 3, Where(q_seg=ids, k_seg=ids), Causal(), SIZES)
    (lo, hi), _, q_ranges, k_ranges = jax.tree.map(np.asarray, cut.tables())
    for b in range(2):
        alone = Cut(*arrays(T, T), Where(q_seg=ids[b : b + 1], k_seg=ids[b : b + 1]), Causal(), SIZES)
        (lo_b, hi_b), _, *ranges = jax.tree.map(np.asarray, alone.tables())
        np.testing.assert_array_equal(lo[b * cut.nq : (b + 1) * cut.nq], lo_b)
        np.testing.assert_array_equal(hi[b * cut.nq : (b + 1) * cut.nq], hi_b)
        i, c = np.arange(cut.nq)[:, None], np.arange(cut.nk * cut.chunks)[None]
        both = Schedule(cut, b, q_ranges, k_ranges).chunk(i, 0, c), Schedule(alone, 0, *ranges).chunk(i, 0, c)
        np.testing.assert_array_equal(*both)
