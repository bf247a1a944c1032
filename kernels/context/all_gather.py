"""All-gather attention: every device gathers all keys and values once, and attends with its own queries.

    forward      K, V = all_gather(K, V);  out, lse = local(Q, K, V)
    backward     K, V = all_gather(K, V);  dq, dk, dv = local(Q, K, V, ...);  dk, dv = reduce_scatter(dk, dv)

One collective before the kernel instead of P behind each other: the least latency, and the right choice while K and V
of the whole sequence fit. Memory a device: K and V of all P shards, and in backward dk and dv of all in float32.

Source: Llama 3's context parallelism (Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, 3.3.2).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class AllGather(NamedTuple):
    """A (forward, backward) pair on shards along `axis`, of a pair `local` on whole arrays; called as `Ring` is."""

    local: Any
    axis: str

    def forward(self, q, k, v, where, *, out_dtype=None):
        """(out [B, T, N, H_v], lse [B, T, N] float32) of the shard's queries over the keys of all shards."""
        return self.local.forward(q, *self._gather(k, v, where), out_dtype=out_dtype)

    def backward(self, q, k, v, where, dout, lse, delta, *, out_dtype=None):
        """(dq, dk, dv) of the shard, given lse and delta over the keys of all shards."""
        grads = self.local.backward(q, *self._gather(k, v, where), dout, lse, delta, out_dtype=jnp.float32)
        dq, *dkv = grads
        if k.size:  # which XLA insists on
            dkv = (lax.psum_scatter(dx, self.axis, scatter_dimension=1, tiled=True) for dx in dkv)
        return tuple(dx.astype(out_dtype or x.dtype) for dx, x in zip((dq, *dkv), (q, k, v), strict=True))

    def _gather(self, k, v, where):
        whole = lambda x: x if x is None else lax.all_gather(x, self.axis, axis=1, tiled=True)
        return whole(k), whole(v), where._replace(k_pos=whole(where.k_pos), k_seg=whole(where.k_seg))
