"""RoPE against float64 (and 40 decimal digits) at positions up to 2^24 and beyond."""

import decimal
import math

import jax
import numpy as np
import pytest

from ringtide.models.rope import Scaling, inverse_frequencies, rope

POSITIONS = np.unique(
    np.concatenate(
        [
            np.random.default_rng(0).integers(0, 2**24 + 1, 4000),
            np.arange(64),
            *[np.array([2**k - 1, 2**k, 2**k + 1]) for k in range(2, 25)],
        ]
    ).clip(0, 2**24)
).astype(np.int32)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scaling", [None, Scaling(), Scaling(32.0)], ids=["plain", "8x", "32x"])
def test_every_frequency_up_to_2_24_under_jit(head_dim, scaling):
    cos, sin = jax.jit(lambda p: rope(p, head_dim, 500000.0, scaling))(POSITIONS)
    angle = POSITIONS[:, None].astype(np.float64) * inverse_frequencies(head_dim, 500000.0, scaling)
    assert cos.dtype == sin.dtype == np.float32
    assert np.abs(cos - np.cos(angle)).max() < 2e-7
    assert np.abs(sin - np.sin(angle)).max() < 2e-7


def test_inverse_frequencies_against_forty_digits():
    with decimal.localcontext(decimal.Context(prec=40)):
        truth = [decimal.Decimal(500000) ** -(decimal.Decimal(2 * j) / 128) for j in range(64)]
        error = max(abs(decimal.Decimal(float(w)) / t - 1) for w, t in zip(_w(128), truth, strict=True))
    assert error * 2**24 < 1e-7  # even the fastest frequency is off by less than 1e-7 radians at 2^24


def test_llama3_scaling_is_that_of_transformers():
    """The formula of transformers' modeling_rope_utils, written out one frequency at a time."""
    s = Scaling()
    for w, scaled in zip(_w(128), inverse_frequencies(128, 500000.0, s), strict=True):
        wavelength = 2 * math.pi / w
        if wavelength < s.original_max_position_embeddings / s.high_freq_factor:
            want = w
        elif wavelength > s.original_max_position_embeddings / s.low_freq_factor:
            want = w / s.factor
        else:
            smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
            smooth /= s.high_freq_factor - s.low_freq_factor
            want = (1 - smooth) * w / s.factor + smooth * w
        assert scaled == pytest.approx(want, rel=1e-14)


def test_largest_positions_and_other_integer_types():
    angle = np.array([2**31 - 1], np.float64)[:, None] * inverse_frequencies(64, 10000.0)
    cos, _ = rope(np.array([2**31 - 1], np.int32), 64, 10000.0)
    assert np.abs(cos - np.cos(angle)).max() < 1e-6
    assert rope(np.zeros((2, 3), np.uint32), 8, 1e4)[0].shape == (2, 3, 4)


def test_needs_no_float64_of_the_device():
    assert "f64" not in jax.jit(lambda p: rope(p, 64, 500000.0, Scaling())).lower(POSITIONS).as_text()


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match=r"head_dim: .* even, got 7"):
        rope(np.arange(3), 7, 1e4)


def _w(head_dim):
    return inverse_frequencies(head_dim, 500000.0)
