"""Rotary position embeddings, exact at any position, on devices without float64.

    angle[p, j] = p * w[j],   w[j] = theta^(-2j / head_dim)      (RoPE, arXiv:2104.09864, eq. 15)

Float32 angles are useless far out: near 2^24 neighbouring float32 numbers are one radian apart. But only the fraction
of a turn matters, and that is integer arithmetic. Let F = w / 2pi * 2^64, made on the host in float64, as two words:

    turn = p * F  mod 2^64,    and its upper word is    p * F_hi + upper_word(p * F_lo)   mod 2^32

in uint32, where overflow *is* the reduction. No float is touched before the fraction is known, so no compiler can fuse
or reorder it into an error. The rest is a turn in units of 2^-32, cut to an eighth of a turn around a quarter turn.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ringtide.models import check_number


@dataclass(frozen=True)
class Scaling:
    """Llama 3.1's stretching of the low frequencies (`rope_type: llama3` of Hugging Face's config.json)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        check_number("Scaling", "factor", self.factor, least=1)
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            check_number("Scaling", name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:  # between the two lies the blend
            raise ValueError(
                f"Scaling: high_freq_factor must be above low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Radians a position, float64 [head_dim / 2].

    With `scaling`: wavelengths above original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor stay, and in between the two are blended linearly in original / wavelength.
    """
    w = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return w
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * w / (2 * math.pi)  # of the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * w + (1 - keep) * w / scaling.factor


def rope(positions, head_dim: int, theta: float, scaling: Scaling | None = None):
    """(cos, sin) of the rotary angles, float32 [..., head_dim / 2].

    positions: int [...], each in [0, 2^31). head_dim must be even. Within 2e-7 of float64 up to position 2^24, within
    1e-6 up to 2^31.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: rope turns pairs of channels, so it must be even, got {head_dim}")
    turns = inverse_frequencies(head_dim, theta, scaling) / (2 * math.pi)  # a position, below 1
    words = [int(t * 2.0**64) for t in turns]  # scaling by a power of two is exact
    hi = np.array([word >> 32 for word in words], np.uint32)
    lo = np.array([word & 0xFFFFFFFF for word in words], np.uint32)
    p = jnp.asarray(positions).astype(jnp.uint32)[..., None]
    turn = p * hi + _upper_word(p, lo)  # [..., head_dim / 2], in units of 2^-32 turns

    quarter = (turn + np.uint32(1 << 29)) >> 30  # the nearest quarter turn, mod 4
    rest = (turn - (quarter << 30)).astype(jnp.int32)  # within an eighth of a turn of it
    angle = rest.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)  # |angle| <= pi / 4
    c, s = jnp.cos(angle), jnp.sin(angle)
    odd = quarter % 2 == 1  # by quarter: (c, s), (-s, c), (-c, -s), (s, -c)
    cos, sin = jnp.where(odd, s, c), jnp.where(odd, c, s)
    return jnp.where((quarter == 1) | (quarter == 2), -cos, cos), jnp.where(quarter >= 2, -sin, sin)


def rotate(x, cos, sin):
    """x [..., N, H] turned by (cos, sin) [..., H / 2]; channel j pairs with j + H / 2, as Hugging Face does."""
    a, b = jnp.split(x, 2, axis=-1)
    c, s = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def _upper_word(a, b):
    """The upper 32 bits of a * b, uint32 each, from 16-bit halves: no product or sum here overflows."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    cross = a1 * b0 + (a0 * b0 >> 16)
    return a1 * b1 + (cross >> 16) + ((cross & 0xFFFF) + a0 * b1 >> 16)
