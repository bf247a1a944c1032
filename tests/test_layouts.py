"""Layouts: exact inverses, what each shard holds, balance, and lengths that do not divide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtide.kernels import layouts


@given(st.sampled_from(layouts.LAYOUTS), st.integers(1, 9), st.integers(0, 7))
def test_inverse(layout, shards, times):
    length = times * layouts.multiple(layout, shards)
    index = np.arange(length)
    position = layouts.position_of(index, layout, length, shards)
    assert sorted(position) == list(index)
    assert (layouts.index_of(position, layout, length, shards) == index).all()
    for i in range(length):  # Python ints too
        assert layouts.index_of(layouts.position_of(i, layout, length, shards), layout, length, shards) == i


def test_what_a_shard_holds():
    def held(layout):
        return layouts.position_of(np.arange(12), layout, 12, 3).reshape(3, 4).tolist()

    assert held("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert held("zigzag") == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert held("striped") == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_zigzag_balances_causal_work():
    position = layouts.position_of(np.arange(64), "zigzag", 64, 4)
    assert len(set((position + 1).reshape(4, 16).sum(1))) == 1


def test_refusals_name_the_cure():
    with pytest.raises(ValueError, match="pad it to 104"):
        layouts.check_length("zigzag", 100, 4)
    with pytest.raises(ValueError, match="layout: expected one of"):
        layouts.position_of(0, "spiral", 8, 2)
