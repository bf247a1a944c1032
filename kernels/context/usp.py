"""USP, unified sequence parallelism: Ulysses over one mesh axis, a ring over the other.

The sequence lies over U x R devices, ulysses-major: device (u, r) holds shard u R + r. Ulysses gathers, for each r, the
shards (0, r) ... (U - 1, r), with 1 / U of the heads; the ring of R devices carries these on. Positions travel with the
tokens, so that nothing minds that they are not in order. Either axis may have size 1.

Hops cost as in a ring of R instead of U R, and U is held to the heads only as far as one wants it.

Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach", arXiv 2405.07719.
"""

from typing import NamedTuple

from jax import lax

from ringtide.kernels.context.ring import Ring
from ringtide.kernels.context.ulysses import Ulysses


class USP(NamedTuple):
    """A (forward, backward) pair on shards along the axes (`axis`, the ring's), of a pair `ring`; called as that is."""

    ring: Ring
    axis: str

    def forward(self, q, k, v, where, **options):
        """(out [B, T, N, H_v], lse [B, T, N] float32) of the shard's queries over the keys of all shards."""
        return Ulysses(self.ring, self.axis).forward(q, k, v, self._in_ring_order(where), **options)

    def backward(self, q, k, v, where, *args, **options):
        """(dq, dk, dv) of the shard, given lse and delta over the keys of all shards."""
        return Ulysses(self.ring, self.axis).backward(q, k, v, self._in_ring_order(where), *args, **options)

    def _in_ring_order(self, where):
        """A dense mask's keys stand in the order of the devices (u, r); a member of the ring holds all u of its r."""
        if where.dense is None:
            return where
        u, r = (lax.axis_size(axis) for axis in (self.axis, self.ring.axis))
        *rows, keys = where.dense.shape
        dense = where.dense.reshape(*rows, u, r, keys // (u * r)).swapaxes(-3, -2)
        return where._replace(dense=dense.reshape(*rows, keys))
