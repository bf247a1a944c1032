"""Ring attention: every device keeps its queries, the keys and values travel around the mesh axis.

    for hop in range(P):                         forward: partial results of the hops merge in float32
        send K, V on to the next device              lse = logaddexp(lse_a, lse_b)
        attend to the K, V at hand                   out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse)

Backward makes the same round with the final lse, so each hop gives its share of the true gradients: dq stays and is
summed; dk and dv travel with the K and V that they belong to, one hop behind the kernel, and come home after P hops.
Sends are issued before the hop's kernel and needed only after it, so that they overlap.

A hop is an ordinary call of the local kernel: positions and segment ids travel along, and the kernel skips whatever
they hide. Memory a device: its share of q, k, v and out, one further K and V in flight, dk and dv in float32.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Ring(NamedTuple):
    """A (forward, backward) pair on shards along `axis`, of a pair `local` on whole arrays.

    Called inside shard_map with the shards of q, k, v and of a Where that gives positions; `where.dense` is sharded by
    queries and holds all keys, in the order in which the devices hold them.
    """

    local: Any
    axis: str

    def forward(self, q, k, v, where, *, out_dtype=None):
        """(out [B, T, N, H_v], lse [B, T, N] float32) of the shard's queries over the keys of all shards."""

        def attend(x, done, hop):
            k, v, *at = x
            return merge(done, self.local.forward(q, k, v, self._where(where, at, hop), out_dtype=jnp.float32))

        def step(carry, hop):
            x, done = carry
            return (self._send(x), attend(x, done, hop)), None

        travelling = (k, v, where.k_pos, where.k_seg)
        zero = q[..., :1].astype(jnp.float32) * 0
        start = jnp.broadcast_to(zero, (*q.shape[:-1], v.shape[-1])), zero[..., 0] - jnp.inf
        last = lax.axis_size(self.axis) - 1
        (travelling, done), _ = lax.scan(step, (travelling, start), jnp.arange(last))
        out, lse = attend(travelling, done, last)
        return out.astype(out_dtype or q.dtype), lse

    def backward(self, q, k, v, where, dout, lse, delta, *, out_dtype=None):
        """(dq, dk, dv) of the shard, given lse and delta over the keys of all shards."""

        def attend(x, grads, hop):
            (k, v, *at), (dq, *dkv) = x, grads
            dkv = self._send(dkv)
            here = self.local.backward(q, k, v, self._where(where, at, hop), dout, lse, delta, out_dtype=jnp.float32)
            return jax.tree.map(jnp.add, (dq, *dkv), here)

        def step(carry, hop):
            x, grads = carry
            return (self._send(x), attend(x, grads, hop)), None

        travelling = (k, v, where.k_pos, where.k_seg)
        start = tuple(x.astype(jnp.float32) * 0 for x in (q, k, v))
        last = lax.axis_size(self.axis) - 1
        (travelling, grads), _ = lax.scan(step, (travelling, start), jnp.arange(last))
        dq, *dkv = attend(travelling, grads, last)
        dk, dv = self._send(dkv)
        return tuple(dx.astype(out_dtype or x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v)))

    def _send(self, xs):
        size = lax.axis_size(self.axis)
        around = [(i, (i + 1) % size) for i in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, around), xs)

    def _where(self, where, at, hop):
        k_pos, k_seg = at
        if where.dense is not None:
            keys = k_pos.shape[1]
            source = (lax.axis_index(self.axis) - hop) % lax.axis_size(self.axis)
            where = where._replace(dense=lax.dynamic_slice_in_dim(where.dense, source * keys, keys, 3))
        return where._replace(k_pos=k_pos, k_seg=k_seg)


def merge(a, b):
    """(out, lse) over the keys of both a and b, given each: out [..., H] float32, lse [...] float32."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    base = jnp.where(lse == -jnp.inf, 0.0, lse)  # nothing visible in either
    return out_a * jnp.exp(lse_a - base)[..., None] + out_b * jnp.exp(lse_b - base)[..., None], lse
