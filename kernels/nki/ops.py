"""The contract of kernels/xla/gla.py by the kernels for Trainium2: any T, K and V, on one core or two.

Key channels beyond 128 and value channels beyond what a kernel takes become further heads: a head of K x V is
parts_k x parts_v heads of at most 128 x 512, side by side. Both are exact: the state falls into tiles that do not know
of each other, o and dv are sums over key tiles, dq, dk and dg over value tiles, taken in float32.

Arrays are NumPy's or JAX's, and so are the results; the kernels run where backend.py says. float16 is computed as
float32. lnc: how many physical cores share a call, 1 or 2, as the device is set up.
"""

import numpy as np

from ringtide.kernels.nki.gla import gla_forward
from ringtide.kernels.nki.gla_bwd import gla_backward
from ringtide.kernels.nki.gla_decode import SPARE, gla_decode

KEYS, VALUES, VALUES_BACKWARD = 128, 512, 256  # channels that a kernel takes


def forward(q, k, v, g, h0, *, scale, lnc=1, fast=False):
    """(o [B, T, N, V] in v.dtype, final state [B, N, K, V] float32).

    q, k [B, T, N, K], v [B, T, N, V], g [B, T, N, K] float32 in [-128, 0], h0 [B, N, K, V] float32. fast: for gates of
    which fifteen in a row stay above -88, see kernels/nki/gla.py.
    """
    xp, tiles = q.__array_namespace__(), Tiling(q.shape, v.shape, VALUES)
    if not (q.size and v.size):
        return xp.zeros(v.shape, v.dtype), h0
    heads = (*tiles.keys(xp, q, k), *tiles.values(xp, v), *tiles.keys(xp, g), *tiles.states(xp, h0))
    o, hT = launch(gla_forward, lnc, *heads, float(scale), fast)
    return tiles.join_values(xp, o, v.dtype), tiles.join_states(xp, hT)


def backward(q, k, v, g, h0, do, dhT, *, scale, lnc=1):
    """Gradients of `forward`: do [B, T, N, V] in v.dtype, dhT [B, N, K, V] float32 -> (dq, dk, dv, dg, dh0)."""
    xp, tiles = q.__array_namespace__(), Tiling(q.shape, v.shape, VALUES_BACKWARD)
    if not (q.size and v.size):
        return *(xp.zeros(x.shape, x.dtype) for x in (q, k, v, g)), dhT
    if scale == 0:  # the kernel divides by it, and then do does not matter
        do, scale = xp.zeros_like(do), 1.0
    heads = (*tiles.keys(xp, q, k), *tiles.values(xp, v), *tiles.keys(xp, g), *tiles.states(xp, h0))
    grads = (*tiles.values(xp, do), *tiles.states(xp, dhT))
    dq, dk, dv, dg, dh0 = launch(gla_backward, lnc, *heads, *grads, float(scale))
    dq, dk, dg = (tiles.join_keys(xp, x, like.dtype) for x, like in ((dq, q), (dk, k), (dg, g)))
    return dq, dk, tiles.join_values(xp, dv, v.dtype), dg, tiles.join_states(xp, dh0)


def decode_step(q, k, v, g, state, slot_ids, has_initial_state, *, scale, lnc=1):
    """One token for each of B sequences, as kernels/xla/gla.py: state [slots, N, K, V] -> (out [B, N, V], state).

    The whole pool is turned round twice, which a serving stack spares itself by `decode_pool`.
    """
    out, pool = decode_pool(q, k, v, g, to_pool(state), slot_ids, has_initial_state, scale=scale, lnc=lnc)
    return out, from_pool(pool, *state.shape[1:])


def decode_pool(q, k, v, g, pool, slot_ids, has_initial_state, *, scale, lnc=1):
    """As decode_step, on a pool of `to_pool`: (out [B, N, V] in v.dtype, pool), which the device changes in place.

    q, k, g: [B, N, K], v: [B, N, V]. slot_ids: [B] int32, distinct; a row of a negative one is all zeros, touches
    nothing and returns 0; None: row b is slot b. has_initial_state: [B] bool, False reads the slot as zeros; None: all
    True.
    """
    xp, tiles = q.__array_namespace__(), Tiling(q.shape, v.shape, VALUES)
    zeros, nowhere = (pool.shape[0] - SPARE + i for i in range(SPARE))
    ids = xp.arange(q.shape[0], dtype=np.int32) if slot_ids is None else slot_ids
    read = ids if has_initial_state is None else xp.where(has_initial_state, ids, zeros)
    slots = xp.stack([xp.where(ids < 0, zeros, read), xp.where(ids < 0, nowhere, ids)], 1).astype(np.int32)
    heads = (*tiles.keys(xp, q, k), *tiles.values(xp, v), *tiles.keys(xp, g))
    o, pool = launch(gla_decode, lnc, *heads, pool, slots, float(scale))
    return tiles.join_values(xp, o, v.dtype), pool


def to_pool(state):
    """The pool of states [slots, N, K, V] as decode_pool has it: key channels first, slots to spare behind; float32."""
    xp, tiles = state.__array_namespace__(), _tiling(*state.shape[1:])
    pool = xp.moveaxis(tiles.states(xp, state)[0], 2, 1)
    return xp.concat([pool, xp.zeros((SPARE, *pool.shape[1:]), pool.dtype)])


def from_pool(pool, N, K, V):
    """The inverse of `to_pool`: the states [slots, N, K, V]."""
    xp = pool.__array_namespace__()
    return _tiling(N, K, V).join_states(xp, xp.moveaxis(pool[:-SPARE], 1, 2))


def launch(kernel, lnc, *args):
    """Runs a kernel on `lnc` physical cores."""
    if lnc not in (1, 2):
        raise ValueError(f"lnc: expected 1 or 2, the physical cores of a logical one, got {lnc!r}")
    return (kernel if lnc == 1 else kernel[lnc])(*args)


class Tiling:
    """How a head of K x V becomes parts_k x parts_v heads, and what those give one again.

    keys_shape [..., N, K], values_shape [..., N, V]; values: the value channels that a kernel takes.
    """

    def __init__(self, keys_shape, values_shape, values):
        self.N, self.K, self.V = *keys_shape[-2:], values_shape[-1]
        self.parts_k, self.parts_v = max(-(-self.K // KEYS), 1), max(-(-self.V // values), 1)
        self.k, self.v = -(-self.K // self.parts_k), -(-self.V // self.parts_v)  # channels of a part
        self.heads = self.N * self.parts_k * self.parts_v

    def keys(self, xp, *arrays):
        """Each [..., N, K] -> [..., heads, k]."""
        return [self._split(xp, x, (self.parts_k, 1, self.k)) for x in arrays]

    def values(self, xp, *arrays):
        """Each [..., N, V] -> [..., heads, v]."""
        return [self._split(xp, x, (1, self.parts_v, self.v)) for x in arrays]

    def states(self, xp, *arrays):
        """Each [..., N, K, V] -> [..., heads, k, v]."""
        made = []
        for x in arrays:
            before = x.shape[:-3]
            x = _pad(xp, _pad(xp, x, -1, self.parts_v * self.v), -2, self.parts_k * self.k)
            x = x.reshape(*before, self.N, self.parts_k, self.k, self.parts_v, self.v)
            made.append(xp.moveaxis(x, -3, -2).reshape(*before, self.heads, self.k, self.v))
        return made

    def join_keys(self, xp, x, dtype):
        """[..., heads, k] -> [..., N, K], the sum over parts of V."""
        x = self._parts(xp, x)
        x = x.astype(np.float32).sum(-2) if self.parts_v > 1 else x[..., 0, :]
        return x.reshape(*x.shape[:-2], -1)[..., : self.K].astype(dtype)

    def join_values(self, xp, x, dtype):
        """[..., heads, v] -> [..., N, V], the sum over parts of K."""
        x = self._parts(xp, x)
        x = x.astype(np.float32).sum(-3) if self.parts_k > 1 else x[..., 0, :, :]
        return x.reshape(*x.shape[:-2], -1)[..., : self.V].astype(dtype)

    def join_states(self, xp, x):
        """[..., heads, k, v] -> [..., N, K, V]."""
        x = self._once(xp, x, -3)
        x = x.reshape(*x.shape[:-3], self.N, self.parts_k, self.parts_v, self.k, self.v)
        x = xp.moveaxis(x, -2, -3)
        return x.reshape(*x.shape[:-4], self.parts_k * self.k, -1)[..., : self.K, : self.V]

    def _parts(self, xp, x):
        x = self._once(xp, x, -2)
        return x.reshape(*x.shape[:-2], self.N, self.parts_k, self.parts_v, x.shape[-1])

    def _once(self, xp, x, axis):
        """x without the second copy of the middle head, which two cores give of an odd number."""
        if x.shape[axis] == self.heads:
            return x
        half = x.shape[axis] // 2
        return xp.take(x, np.delete(np.arange(2 * half), half), axis=axis)

    def _split(self, xp, x, parts):
        """[..., N, width] in these parts of K and of V -> [..., heads, part], in a dtype that the kernels take."""
        x = x.astype(np.float32) if x.dtype == np.float16 else x
        *before, N, _ = x.shape
        x = _pad(xp, x, -1, parts[0] * parts[1] * parts[2]).reshape(*before, N, *parts)
        x = xp.broadcast_to(x, (*before, N, self.parts_k, self.parts_v, parts[2]))
        return x.reshape(*before, self.heads, parts[2])


def _tiling(N, K, V):
    return Tiling((N, K), (N, V), VALUES)


def _pad(xp, x, axis, size):
    """x with zeros behind on one axis, up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, size - x.shape[axis]
    return xp.pad(x, widths)
