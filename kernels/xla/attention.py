"""Streaming attention in plain JAX: any backend, memory O(T), the default on a CPU.

    S = scale Q K^T,  optionally cap tanh(S / cap),  -inf where masked
    lse = log sum_k exp S,   P = exp(S - lse),   O = P V

Forward, for each block of queries:                  Backward, for each block of keys:
    m, l, acc = -inf, 0, 0                               dk, dv = 0, 0
    for each block of keys it sees:                      for each block of queries that sees it:
        S = Q K^T;  m' = max(m, rowmax S)                    P  = exp(S - lse)
        P = exp(S - m');  c = exp(m - m')                    dS = P (dO V^T - delta),  delta = rowsum(dO O) - dlse
        l = c l + rowsum P;  acc = c acc + P V               dv += P^T dO;  dk += dS^T Q;  dq[block] += dS K
    O = acc / l;  lse = m + log l

Which blocks see each other is arithmetic on the least and greatest position (and segment id) of a block, so nothing
grows with T^2: each outer step sorts its blocks into full tiles, mixed tiles, and those that are never visited, and
runs one loop over the full ones without a mask and one over the mixed ones.

Memory: inputs and outputs, their copies in blocks, dq in float32, and a few tiles of [B, N, block, block].

How it got here (forward + backward, causal T = 16,384, one head of 64, two CPU cores, share of the matmul rate):
    dk += dS^T Q, the tile transposed for the product       23 %
    dk^T += Q^T dS, a block of Q transposed instead         50 %   a transposed tile costs more than its product
    tiles of 256, 512, 1024 on a side                       35, 45, 50 %   small products run on one core
"""

import jax.numpy as jnp
from jax import lax

from ringtide.kernels.masks import Mask, Where, same_segment, same_segment_block

_TILE = 1 << 21  # scores a tile: small enough for a cache, large enough to keep the cores busy


def forward(q, k, v, where: Where, *, mask: Mask, scale, soft_cap=None, out_dtype=None, block=None):
    """Attention of q [B, T, N, H] over k [B, S, N_kv, H] and v [B, S, N_kv, H_v].

    Returns (out [B, T, N, H_v] in out_dtype or q's, lse [B, T, N] float32). A row that sees nothing: 0 and -inf.
    """
    tiles = _Tiles(q, k, where, mask, soft_cap, scale, block)
    qs, ks, vs = tiles.split_q(q), tiles.split_k(k), tiles.split_k(v)

    def rows(i):
        def tile(j, carry, masked):
            m, l, acc = carry
            s = tiles.scores(qs[i], ks[j], i, j, masked)
            m_new = jnp.maximum(m, jnp.max(s, axis=-1))
            m_ref = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new  # no row is empty in a full tile
            p = jnp.exp(s - m_ref[..., None])
            c = jnp.exp(m - m_ref)
            pv = _dot("bngqk,bnkh->bngqh", p.astype(v.dtype), vs[j])
            return m_new, l * c + jnp.sum(p, axis=-1), acc * c[..., None] + pv

        row = qs[i][..., 0]
        empty = _like(row, -jnp.inf), _like(row), jnp.broadcast_to(_like(row)[..., None], (*row.shape, v.shape[-1]))
        m, l, acc = tiles.visit(i, tiles.of_queries, tile, empty)
        out = jnp.where(l[..., None] == 0, 0.0, acc / l[..., None])
        return out.astype(out_dtype or q.dtype), m + jnp.log(l)

    out, lse = lax.map(rows, jnp.arange(len(qs)))
    return tiles.join_q(out), tiles.join_q(lse)


def backward(q, k, v, where: Where, dout, lse, delta, *, mask: Mask, scale, soft_cap=None, out_dtype=None, block=None):
    """Gradients (dq, dk, dv) in out_dtype or the dtypes of q, k and v.

    dout [B, T, N, H_v]; lse [B, T, N] float32, +inf in rows that see nothing;
    delta = rowsum(dout * out) - dlse [B, T, N] float32. The reference need not be this call's own forward: with the
    lse of a longer row of keys these are that row's gradients with respect to the keys at hand.
    """
    tiles = _Tiles(q, k, where, mask, soft_cap, scale, block)
    qs, ks, vs, dos = tiles.split_q(q), tiles.split_k(k), tiles.split_k(v), tiles.split_q(dout)
    lses, deltas = tiles.split_q(lse, fill=jnp.inf), tiles.split_q(delta)

    def columns(dq, j):
        def tile(i, carry, masked):
            dq, dk, dv = carry
            s = tiles.scores(qs[i], ks[j], i, j, masked)
            p = jnp.exp(s - lses[i][..., None])
            ds = p * (_dot("bngqh,bnkh->bngqk", dos[i], vs[j]) - deltas[i][..., None]) * scale
            if soft_cap is not None:
                ds *= 1 - jnp.square(jnp.where(p > 0, s, 0.0) / soft_cap)  # d cap tanh(x / cap) / dx
            p = p.astype(dout.dtype)
            if q.dtype != jnp.float16:  # whose range dS may leave
                ds = ds.astype(q.dtype)
            dv += _dot("bngqh,bngqk->bnhk", dos[i], p)
            dk += _dot("bngqh,bngqk->bnhk", qs[i], ds)
            dq = dq.at[i].add(_dot("bngqk,bnkh->bngqh", ds, ks[j]))
            return dq, dk, dv

        # dk and dv are summed transposed: what is transposed for the product is then a block of Q or dO, not a tile.
        dq, dk, dv = tiles.visit(j, tiles.of_keys, tile, (dq, _like(ks[j].mT), _like(vs[j].mT)))
        return dq, (dk.mT.astype(out_dtype or k.dtype), dv.mT.astype(out_dtype or v.dtype))

    dq, (dk, dv) = lax.scan(columns, _like(qs), jnp.arange(len(ks)))
    return tiles.join_q(dq).astype(out_dtype or q.dtype), tiles.join_k(dk), tiles.join_k(dv)


def _dot(equation, a, b):
    """Products in the operands' dtype (float32 in float32, on every backend), sums in float32."""
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _like(x, value=0.0):
    """A float32 carry that lies over a mesh as x does, which loops insist on."""
    return jnp.full_like(x, value, jnp.float32)


def _side(heads: int, length: int, span: int | None) -> int:
    """The side of a tile for B * N = `heads` at once, `length` tokens and a mask that shows `span` keys at most."""
    side = 1024
    while side > 128 and (heads * side * side > _TILE or side >= 2 * length or (span and side > span)):
        side //= 2
    return side


class _Tiles:
    """A call cut into tiles: the arrays in blocks, the scores of a tile, and the walk over the visible ones."""

    def __init__(self, q, k, where, mask, soft_cap, scale, block):
        (self.b, self.t, self.n, _), self.s, self.n_kv = q.shape, k.shape[1], k.shape[2]
        self.mask, self.soft_cap, self.scale = mask, soft_cap, scale
        self.bq, self.bk = block or (_side(self.b * self.n, length, mask.span) for length in (self.t, self.s))
        self.nq, self.nk = -(-self.t // self.bq), -(-self.s // self.bk)
        q_pos, k_pos, q_seg, k_seg, dense = where
        q_pos = jnp.arange(self.t, dtype=jnp.int32)[None] if q_pos is None else q_pos
        k_pos = jnp.arange(self.s, dtype=jnp.int32)[None] if k_pos is None else k_pos
        # A repeated last position widens no block's range; the tokens added are hidden as padding.
        self.q_pos, self.k_pos = self._blocks(q_pos, self.bq, "edge"), self._blocks(k_pos, self.bk, "edge")
        self.q_seg = self.k_seg = None
        if q_seg is not None or self.t % self.bq or self.s % self.bk:
            q_seg = jnp.zeros((1, self.t), jnp.int32) if q_seg is None else q_seg
            k_seg = jnp.zeros((1, self.s), jnp.int32) if k_seg is None else k_seg
            self.q_seg, self.k_seg = self._blocks(q_seg, self.bq, -1), self._blocks(k_seg, self.bk, -1)
        self.dense = None
        if dense is not None:
            pad = (0, self.nq * self.bq - self.t), (0, self.nk * self.bk - self.s)
            self.dense = jnp.pad(dense, ((0, 0), (0, 0), *pad))

    # Arrays in blocks, heads before tokens so that a block is contiguous. G query heads share a kv head.

    def split_q(self, x, fill=0):  # [B, T, N, ...] -> [nq, B, N_kv, G, bq, ...]
        x = self._blocks(x, self.bq, fill)
        x = x.reshape(*x.shape[:3], self.n_kv, self.n // self.n_kv, *x.shape[4:])
        return jnp.moveaxis(x, 2, 4)

    def join_q(self, x):  # [nq, B, N_kv, G, bq, ...] -> [B, T, N, ...]
        x = jnp.moveaxis(jnp.moveaxis(x, 4, 2), 0, 1)
        return x.reshape(self.b, self.nq * self.bq, self.n, *x.shape[5:])[:, : self.t]

    def split_k(self, x):  # [B, S, N_kv, H] -> [nk, B, N_kv, bk, H]
        return jnp.moveaxis(self._blocks(x, self.bk, 0), 2, 3)

    def join_k(self, x):  # [nk, B, N_kv, bk, H] -> [B, S, N_kv, H]
        x = jnp.moveaxis(jnp.moveaxis(x, 3, 2), 0, 1)
        return x.reshape(self.b, self.nk * self.bk, *x.shape[3:])[:, : self.s]

    @staticmethod
    def _blocks(x, size, fill):  # [B, T, ...] -> [blocks, B, size, ...]
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, -x.shape[1] % size)
        x = jnp.pad(x, pad, mode="edge") if fill == "edge" else jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)

    # One tile.

    def scores(self, q, k, i, j, masked):
        """[B, N_kv, G, bq, bk] float32, -inf where `masked` and invisible."""
        s = _dot("bngqh,bnkh->bngqk", q, k) * self.scale
        if self.soft_cap is not None:
            s = self.soft_cap * jnp.tanh(s / self.soft_cap)
        if not masked:
            return s
        visible = self.mask(self.q_pos[i][:, :, None], self.k_pos[j][:, None, :])
        if self.q_seg is not None:
            visible &= same_segment(self.q_seg[i][:, :, None], self.k_seg[j][:, None, :])
        visible = visible[:, None, None]  # [B | 1, 1, 1, bq, bk]
        if self.dense is not None:
            tile = lax.dynamic_slice_in_dim(self.dense, i * self.bq, self.bq, 2)
            tile = lax.dynamic_slice_in_dim(tile, j * self.bk, self.bk, 3)
            heads = (self.n_kv, self.n // self.n_kv) if tile.shape[1] > 1 else (1, 1)
            visible &= tile.reshape(tile.shape[0], *heads, self.bq, self.bk)
        return jnp.where(visible, s, -jnp.inf)

    # The walk.

    def of_queries(self, i):
        """(some, every) [nk] for the tiles of query block i."""
        return self._classify(i, slice(None))

    def of_keys(self, j):
        """(some, every) [nq] for the tiles of key block j."""
        return self._classify(slice(None), j)

    def _classify(self, i, j):
        some, every = self.mask.block(*_range(self.q_pos[i]), *_range(self.k_pos[j]))
        if self.q_seg is not None:
            seg_some, seg_every = same_segment_block(*_range(self.q_seg[i]), *_range(self.k_seg[j]))
            some, every = some & seg_some, every & seg_every
        if self.dense is not None:
            every = jnp.zeros_like(every)
        return jnp.any(some, axis=-1), jnp.all(every, axis=-1)  # over the batch

    @staticmethod
    def visit(index, classify, tile, carry):
        """Runs tile(other_index, carry, masked) over the visible tiles of block `index`, full ones first."""
        some, every = classify(index)
        order = jnp.argsort(jnp.where(every, 0, jnp.where(some, 1, 2)), stable=True)
        full, visible = jnp.sum(every), jnp.sum(some | every)
        carry = lax.fori_loop(0, full, lambda x, c: tile(order[x], c, masked=False), carry)
        return lax.fori_loop(full, visible, lambda x, c: tile(order[x], c, masked=True), carry)


def _range(x):
    return jnp.min(x, axis=-1), jnp.max(x, axis=-1)
