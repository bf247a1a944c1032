"""Ulysses attention: an all-to-all turns shards of the sequence into shards of the heads, and back.

    Q, K, V [B, T / P, N, H]  -- all-to-all -->  [B, T, N / P, H]     every device has all tokens of its heads
    out, lse = local(Q, K, V)
    out, lse [B, T, N / P]    -- all-to-all -->  [B, T / P, N]

Backward goes the same way with q, k, v, dout, lse and delta there, and dq, dk and dv back. What a device sends does not
grow with P, and no step waits for the step before; but P is held to the heads.

Heads that P does not divide are made to fit: each kv head goes to `copies` devices, which share its query heads out and
whose gradients are summed; query heads of a group that `copies` does not divide are padded with zeros, and so are kv
heads. Of all ways the one with the fewest query heads is taken, and of these the one with the fewest copies.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Heads(NamedTuple):
    """How query and key heads are laid over devices: as kv_heads groups of `group`, each kv head `copies` times."""

    kv_heads: int
    group: int
    copies: int


def heads_over(n: int, n_kv: int, devices: int) -> Heads:
    """The layout of n query heads and n_kv key heads over `devices`."""

    def with_copies(copies):
        multiple = devices // math.gcd(copies, devices)
        return Heads(-(-n_kv // multiple) * multiple, -(-(n // n_kv) // copies) * copies, copies)

    return min(map(with_copies, range(1, n // n_kv + 1)), key=lambda x: (x.kv_heads * x.group, x.copies))


class Ulysses(NamedTuple):
    """A (forward, backward) pair on shards along `axis`, of a pair `local` on whole arrays; called as `Ring` is."""

    local: Any
    axis: str

    def forward(self, q, k, v, where, *, out_dtype=None):
        """(out [B, T, N, H_v], lse [B, T, N] float32) of the shard's queries over the keys of all shards."""
        heads = heads_over(q.shape[2], k.shape[2], lax.axis_size(self.axis))
        q_there, k_there, v_there = self._q_there(q, k, heads), *(self._kv_there(x, heads) for x in (k, v))
        out, lse = self.local.forward(q_there, k_there, v_there, self._where(where, k, heads), out_dtype=out_dtype)
        return self._q_back(out, q, k, heads), self._q_back(lse, q, k, heads)

    def backward(self, q, k, v, where, dout, lse, delta, *, out_dtype=None):
        """(dq, dk, dv) of the shard, given lse and delta over the keys of all shards."""
        heads = heads_over(q.shape[2], k.shape[2], lax.axis_size(self.axis))
        rows = [self._q_there(x, k, heads, fill) for x, fill in ((dout, 0), (lse, jnp.inf), (delta, 0))]
        qkv = self._q_there(q, k, heads), *(self._kv_there(x, heads) for x in (k, v))
        dq, dk, dv = self.local.backward(*qkv, self._where(where, k, heads), *rows, out_dtype=jnp.float32)
        grads = self._q_back(dq, q, k, heads), *(self._kv_back(dx, k, heads) for dx in (dk, dv))
        return tuple(dx.astype(out_dtype or x.dtype) for dx, x in zip(grads, (q, k, v), strict=True))

    # [B, T / P, N, ...] <-> [B, T, N / P, ...]

    def _q_there(self, x, k, heads, fill=0):
        return self._to_heads(_pad_heads(x, k.shape[2], heads, fill))

    def _q_back(self, x, q, k, heads):
        x = self._to_tokens(x)
        n, n_kv = q.shape[2], k.shape[2]
        x = x.reshape(*x.shape[:2], heads.kv_heads, heads.group, *x.shape[3:])[:, :, :n_kv, : n // n_kv]
        return x.reshape(*x.shape[:2], n, *x.shape[4:])

    def _kv_there(self, x, heads):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, heads.kv_heads - x.shape[2]), (0, 0)))
        return self._to_heads(jnp.repeat(x, heads.copies, axis=2))

    def _kv_back(self, x, k, heads):
        x = self._to_tokens(x)
        x = x.reshape(*x.shape[:2], heads.kv_heads, heads.copies, *x.shape[3:]).sum(3)
        return x[:, :, : k.shape[2]]

    def _to_heads(self, x):
        return lax.all_to_all(x, self.axis, split_axis=2, concat_axis=1, tiled=True)

    def _to_tokens(self, x):
        return lax.all_to_all(x, self.axis, split_axis=1, concat_axis=2, tiled=True)

    def _where(self, where, k, heads):
        """Where all tokens of this device's heads stand."""
        whole = lambda x, axis: x if x is None else lax.all_gather(x, self.axis, axis=axis, tiled=True)
        dense = whole(where.dense, 2)
        if dense is not None and dense.shape[1] > 1:
            dense = jnp.moveaxis(_pad_heads(jnp.moveaxis(dense, 1, 2), k.shape[2], heads, False), 2, 1)
            mine = dense.shape[1] // lax.axis_size(self.axis)
            dense = lax.dynamic_slice_in_dim(dense, lax.axis_index(self.axis) * mine, mine, 1)
        return type(where)(*(whole(x, 1) for x in where[:4]), dense)


def _pad_heads(x, n_kv, heads, fill):
    """[B, T, N, ...] -> [B, T, kv_heads * group, ...]: groups of query heads padded, and as many as are wanted."""
    x = x.reshape(*x.shape[:2], n_kv, x.shape[2] // n_kv, *x.shape[3:])
    pad = [(0, 0)] * x.ndim
    pad[2:4] = (0, heads.kv_heads - n_kv), (0, heads.group - x.shape[3])
    x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:2], heads.kv_heads * heads.group, *x.shape[4:])
