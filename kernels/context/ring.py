"""Ring attention: every device keeps its queries, the keys and values travel around the mesh axis.

    send K, V to the neighbour;  out, lse = local(Q, own K, V)
    for each hop:                                    forward: partial results of the hops merge in float32
        send the K, V at hand on                         m' = max(m, lse);  l = l e^(m - m') + e^(lse - m')
        attend to the K, V at hand                       acc = acc e^(m - m') + out e^(lse - m')

Backward makes the same round with the final lse, so each hop gives its share of the true gradients: dq stays and is
summed; dk and dv travel with the K and V that they belong to, one hop behind the kernel, and go home from the last.
What is sent is on its way during a hop's kernel and needed only after it: K and V for the next hop, dk and dv, to which
the kernel's own are added when both are there. The kernel and what is done with its results stand in a branch, so that
they are one instruction to the compiler, which otherwise starts to send (on v5p) when the kernel has ended.

    K, V        hop s + 1   ====>                    dk, dv of hop s - 1   ====>
    kernel             [ hop s ]                              [ hop s ]   + dk, dv of hop s

Which hops are made, in streams of one or both directions, is known before (hops.py). A hop is an ordinary call of the
local kernel, which skips what positions and segment ids hide; those of all tokens are gathered once. A device that
would see nothing of the keys at hand does not take the branch. A local kernel may go all the way around by itself
instead (kernels/pallas/ring.py says where that is better).

Memory a device: its share of q, k, v and out; a stream, K and V at hand and in flight, and dk and dv in float32 twice;
positions and segment ids of all tokens.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringtide.kernels.context.hops import Stream
from ringtide.kernels.masks import same_segment_block


class Ring(NamedTuple):
    """A (forward, backward) pair on shards along `axis`, of a pair `local`, which has a `mask`, on whole arrays.

    Called inside shard_map with the shards of q, k, v and of a Where; `where.dense` is sharded by queries and holds all
    keys, in the order in which the devices hold them. Without positions the mask must be Full.
    """

    local: Any
    axis: str
    streams: tuple[Stream, ...]  # what `hops.streams` gives
    pieces: int = 0  # stretches of a shard whose positions are looked at before a hop's kernel is called; 0: call it

    def forward(self, q, k, v, where, *, out_dtype=None):
        """(out [B, T, N, H_v], lse [B, T, N] float32) of the shard's queries over the keys of all shards."""
        return self._go("forward", self._forward, q, k, v, where, out_dtype=out_dtype)

    def backward(self, q, k, v, where, dout, lse, delta, *, out_dtype=None):
        """(dq, dk, dv) of the shard, given lse and delta over the keys of all shards."""
        return self._go("backward", self._backward, q, k, v, where, dout, lse, delta, out_dtype=out_dtype)

    def _go(self, function, by_permutes, *args, **options):
        """All the way around, where the local kernel does that by itself, and better than this one, it does."""
        by_permutes = functools.partial(by_permutes, **options)
        if self.streams != (Stream(1, lax.axis_size(self.axis) - 1),):
            return by_permutes(*args)
        return self.local.around(self.axis, function, by_permutes, *args, **options)

    def _forward(self, q, k, v, where, *, out_dtype):
        if not self.streams:
            return self.local.forward(q, k, v, where, out_dtype=out_dtype)
        attend = lambda k, v, here: self.local.forward(q, k, v, here, out_dtype=jnp.float32)

        def visit(i, keys, here, sees, done):
            more = lambda: merge(done, *attend(*self._unpack(keys, k), here))
            return lax.cond(sees, more, lambda: done)

        def at_home(here, sees):
            return begin(*lax.cond(sees, lambda: attend(k, v, here), lambda: nothing(q, v)))

        out, lse = finish(*self._round(k, v, where, at_home, visit))
        return out.astype(out_dtype or q.dtype), lse

    def _backward(self, q, k, v, where, dout, lse, delta, *, out_dtype):
        if not self.streams:
            return self.local.backward(q, k, v, where, dout, lse, delta, out_dtype=out_dtype)
        attend = lambda k, v, here: self.local.backward(q, k, v, here, dout, lse, delta, out_dtype=jnp.float32)
        apart = len(self.streams) == 2 and self.streams[0].half is None  # each carries gradients of all tokens
        at_once = min(stream.hops for stream in self.streams) == 1  # the first hop is in no scan

        def at_home(here, sees):
            dq, *dkv = lax.cond(sees, lambda: attend(k, v, here), lambda: zeros((q, k, v)))
            sums = [self._part(self._pack(*dkv), stream) for stream in self.streams]
            if apart:  # the first stream takes these along
                sums[1] = None if at_once else zeros(sums[1])
            return dq, *sums

        def visit(i, keys, here, sees, sums):
            dq, *sums = sums
            arriving = self._send(sums[i], self.streams[i].step)

            def more():
                dq_here, *dkv = attend(*self._unpack(keys, k), here)
                return dq + dq_here, self._pack(*dkv)

            dq, dkv = lax.cond(sees, more, lambda: (dq, zeros(keys)))
            sums[i] = dkv if arriving is None else jax.tree.map(jnp.add, arriving, dkv)
            return dq, *sums

        dq, *sums = self._round(k, v, where, at_home, visit)
        if not apart:  # nothing is added any more
            sums = jax.tree.map(lambda dx: dx.astype(out_dtype or k.dtype), sums)
        sums = [self._send(x, -stream.step * stream.hops) for x, stream in zip(sums, self.streams, strict=True)]
        together = lambda x, *y: x if not y else x + y[0] if apart else jnp.concatenate([x, *y], axis=1)
        dk, dv = self._unpack(jax.tree.map(together, *sums), k)
        return tuple(dx.astype(out_dtype or x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v)))

    def _round(self, k, v, where, at_home, visit):
        """at_home(where the keys stand, does a query see any of them?), then for each hop of each stream
        carry = visit(stream, keys, where they stand, does a query see any of them?, carry).

        What the next hop visits is sent before. A stream that is longer than the other goes on alone.
        """
        shard, size, here = k.shape[1], lax.axis_size(self.axis), lax.axis_index(self.axis)
        whole = where._replace(k_pos=self._gather(where.k_pos), k_seg=self._gather(where.k_seg))

        def step(hop, keys, carry, on):
            ahead = {i: self._send(keys[i], self.streams[i].step) for i in on}
            for i in keys:
                source = (here - self.streams[i].step * hop) % size
                there = self._where(whole, shard, self.streams[i], source)
                carry = visit(i, keys[i], there, self._sees(there) & (source != here), carry)
            return ahead, carry

        mine = self._pack(k, v)
        keys = {i: self._send(self._part(mine, stream), stream.step) for i, stream in enumerate(self.streams)}
        dense = self._where(whole, shard, Stream(0, 0), here).dense
        carry, first = at_home(where._replace(dense=dense), here < size), 1  # True, but not to the compiler
        for last in sorted({stream.hops for stream in self.streams}):
            if first < last:
                hops = jnp.arange(first, last)
                (keys, carry), _ = lax.scan(lambda x, hop: (step(hop, *x, on=x[0]), None), (keys, carry), hops)
            keys, carry = step(last, keys, carry, on=[i for i in keys if self.streams[i].hops > last])
            first = last + 1
        return carry

    def _send(self, xs, by):
        size = lax.axis_size(self.axis)
        around = [(i, (i + by) % size) for i in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, around), xs)

    def _gather(self, ids):
        return ids if ids is None else lax.all_gather(ids, self.axis, axis=1, tiled=True)

    # The TPU compiler keeps five permutes in flight, no more: with two streams K and V, and dk and dv, travel as one.

    def _pack(self, k, v):
        return (jnp.concatenate([k, v], axis=3),) if len(self.streams) == 2 else (k, v)

    def _unpack(self, keys, like):
        return jnp.split(keys[0], [like.shape[3]], axis=3) if len(self.streams) == 2 else keys

    def _part(self, xs, stream):
        return jax.tree.map(lambda x: lax.slice_in_dim(x, *stream.part(x.shape[1]), axis=1), xs)

    def _where(self, whole, shard, stream, source):
        """Where the tokens stand, of the keys those of `stream` from device `source`; each had `shard` of them."""
        first, end = stream.part(shard)
        there = lambda x, axis: (
            x if x is None else lax.dynamic_slice_in_dim(x, source * shard + first, end - first, axis)
        )
        return whole._replace(k_pos=there(whole.k_pos, 1), k_seg=there(whole.k_seg, 1), dense=there(whole.dense, 3))

    def _sees(self, where):
        """May a query see some key?"""
        some = jnp.bool_(True)
        if self.pieces and where.q_pos is not None:
            some &= self.local.mask.block(*self._range(where.q_pos, 2), *self._range(where.k_pos, 1))[0]
        if self.pieces and where.q_seg is not None:
            some &= same_segment_block(*self._range(where.q_seg, 2), *self._range(where.k_seg, 1))[0]
        return jnp.any(some)

    def _range(self, x, axis):
        """(least, greatest) of each piece of x [B | 1, T], along an axis of its own."""
        x = x.reshape(x.shape[0], math.gcd(self.pieces, x.shape[1]), -1)
        return tuple(jnp.expand_dims(f(x, axis=2), axis) for f in (jnp.min, jnp.max))


def begin(out, lse):
    """The results of some keys, [..., H] and [...] in float32, as (acc, m, l): out = acc / l, lse = m + log l."""
    return out, lse, (lse > -jnp.inf).astype(lse.dtype)  # 0: nothing visible


def merge(a, out, lse):
    """Those of further keys as well."""
    acc, m, l = a
    top = jnp.maximum(m, lse)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    old, new = jnp.exp(m - base), jnp.exp(lse - base)
    return acc * old[..., None] + out * new[..., None], top, l * old + new


def finish(acc, m, l):
    """(out, lse). Divided once, whatever l is made of: the error does not grow with the number of merges."""
    return acc / jnp.where(l == 0, 1.0, l)[..., None], m + jnp.log(l)


def nothing(q, v):
    """(out, lse) of no keys."""
    out = jnp.broadcast_to(jnp.full_like(q[..., :1], 0, jnp.float32), (*q.shape[:3], v.shape[3]))
    return out, jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)


def zeros(xs):
    return jax.tree.map(lambda x: jnp.full_like(x, 0, jnp.float32), xs)
