"""Masks: elementwise truth against definitions, and block answers against the elementwise truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtide import Causal, Chunked, Full, Local
from ringtide.kernels.masks import as_mask, same_segment, same_segment_block

sides = st.none() | st.integers(0, 12)
intervals = st.one_of(
    st.just(Full()), st.just(Causal()), st.builds(Local, sides, sides), st.builds(Chunked, st.integers(1, 9))
)
masks = st.recursive(
    intervals | st.just(as_mask(lambda q, k: (q + k) % 3 == 0)),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=4,
)


def test_definitions():
    q, k = np.arange(10)[:, None], np.arange(10)[None]
    assert Full()(q, k).all()
    assert (Causal()(q, k) == (k <= q)).all()
    assert (Local(2, 1)(q, k) == ((k >= q - 2) & (k <= q + 1))).all()
    assert (Chunked(4)(q, k) == (k // 4 == q // 4)).all()
    assert (Local(511, 0)(600, np.arange(700))).sum() == 512, "Local(511, 0) sees 512 keys, itself included"
    assert Local(None, 0) == Causal()
    assert Causal() & Local(3, 5) == Local(3, 0)
    assert (Causal() & Chunked(4)).span == 4
    assert Local(2, 1).span == 4
    assert Causal().span is None


@given(masks, st.data())
def test_block_answers_are_safe(mask, data):
    positions = st.lists(st.integers(0, 40), min_size=1, max_size=6)
    q, k = np.array(data.draw(positions)), np.array(data.draw(positions))
    seen = mask(q[:, None], k[None])
    assert seen.shape == (len(q), len(k))
    some, every = mask.block(q.min(), q.max(), k.min(), k.max())
    assert some or not seen.any(), "a tile called empty holds a visible pair"
    assert not every or seen.all(), "a tile called full hides a pair"


@given(intervals, st.integers(0, 40), st.integers(0, 40), st.integers(1, 8), st.integers(1, 8))
def test_an_interval_is_exact_on_ranges(mask, q0, k0, nq, nk):
    q, k = np.arange(q0, q0 + nq), np.arange(k0, k0 + nk)
    seen = mask(q[:, None], k[None])
    some, every = mask.block(q[0], q[-1], k[0], k[-1])
    assert bool(some) == seen.any()
    assert bool(every) == seen.all()


@given(st.lists(st.integers(-2, 3), min_size=1, max_size=5), st.lists(st.integers(-2, 3), min_size=1, max_size=5))
def test_segment_blocks_are_safe(q, k):
    q, k = np.array(q), np.array(k)
    seen = same_segment(q[:, None], k[None])
    some, every = same_segment_block(q.min(), q.max(), k.min(), k.max())
    assert some or not seen.any()
    assert not every or seen.all()


def test_masks_are_static_arguments():
    f = lambda q, k: q >= k
    assert hash(Causal() & Chunked(8)) == hash(Chunked(8) & Causal())
    assert as_mask(f) == as_mask(f)
    assert hash(as_mask(f) | Causal()) == hash(as_mask(f) | Causal())


@pytest.mark.parametrize(
    "make", [lambda: Local(-1, 0), lambda: Local(0, 1.5), lambda: Chunked(0), lambda: Chunked(None)]
)
def test_bad_sizes_are_refused(make):
    with pytest.raises(ValueError, match=r"left|right|size"):
        make()


def test_a_mask_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="mask: expected"):
        as_mask("causal")
