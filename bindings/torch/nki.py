"""GLA for PyTorch by the kernels for Trainium2: on the device where the packages nki and torch_neuronx are, else in the
simulator on the host, slowly, for correctness.

A launch is an operator of its own: torch_neuronx's nki_op puts the kernel into the graph that torch.compile(backend=
"neuron") compiles. What surrounds it is plain torch, as kernels/nki/ops.py has it for arrays: heads wider than a kernel
takes become several, T is padded to a bucket, so that lengths of a bucket share one compiled kernel. That has not been
run on a device here.
"""

import os

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtide.kernels.nki import backend, ops
from ringtide.kernels.nki.gla import gla_forward
from ringtide.kernels.nki.gla_bwd import gla_backward
from ringtide.kernels.nki.gla_decode import SPARE, gla_decode
from ringtide.torch.arrays import to_numpy, to_torch

SIMULATED = getattr(backend.nki, "__is_simulator__", False)
LNC = 1 if SIMULATED else int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2"))  # physical cores that share a call
CHUNK = 128  # tokens of a chunk of the kernels

if SIMULATED:
    from torch.library import custom_op
else:
    from torch_neuronx import nki_op as custom_op


def gla(q, k, v, g, h0, scale):
    """As kernels/eager/gla.py's forward: (o [B, T, N, V] in v.dtype, the final state [B, N, K, V]), differentiable."""
    T, tiles, dtype = q.shape[1], Tiles(q, v), v.dtype
    q, k, v, g = (pad(x, (0, 0, 0, 0, 0, bucket(T) - T)) for x in (q, k, v, g))
    o, hT = _gla(tiles.keys(q), tiles.keys(k), tiles.values(v), tiles.keys(g), tiles.states(h0), scale)
    return tiles.join_values(o)[:, :T].to(dtype), tiles.join_states(hT)


def decode_step_(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    """As kernels/eager/gla.py: out [B, N, V] in v.dtype. The whole pool is turned round and back."""
    tiles, slots = Tiles(q, v), len(state)
    pool = tiles.states(state).transpose(1, 2)  # [slots, k, heads, v]
    pool = torch.cat((pool, pool.new_zeros(SPARE, *pool.shape[1:])))
    zeros, nowhere = slots, slots + 1
    write = torch.arange(len(q), device=q.device) if slot_ids is None else slot_ids
    read = write if has_initial_state is None else torch.where(has_initial_state, write, zeros)
    ids = torch.stack((torch.where(write < 0, zeros, read), torch.where(write < 0, nowhere, write)), 1).int()
    o = _decode(tiles.keys(q), tiles.keys(k), tiles.values(v), tiles.keys(g), pool, ids, scale)
    state.copy_(tiles.join_states(pool[:slots].transpose(1, 2)))
    return tiles.join_values(o).to(v.dtype)


def bucket(T):
    """T rounded up so that there are four buckets an octave, of whole chunks: a quarter more at the most."""
    chunks = max(-(-T // CHUNK), 1)
    step = 1 << max(chunks.bit_length() - 3, 0)
    return -(-chunks // step) * step * CHUNK


# --- launches: shapes as the kernels take them ------------------------------------------------------------------------


@custom_op("ringtide::nki_gla", mutates_args=())
def _gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    o, hT = _launch(gla_forward, q, k, v, g, h0, scale, False)
    return _once(o, 2, q), _once(hT, 1, q)


@custom_op("ringtide::nki_gla_backward", mutates_args=())
def _gla_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor, do: Tensor, dhT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if scale == 0:  # the kernel divides by it, and then do does not matter
        do, scale = torch.zeros_like(do), 1.0
    *grads, dh0 = _launch(gla_backward, q, k, v, g, h0, do, dhT, scale)
    dq, dk, dv, dg = (_once(x, 2, q) for x in grads)
    return dq, dk, dv, dg, _once(dh0, 1, q)


@custom_op("ringtide::nki_gla_decode", mutates_args=("pool",))
def _decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    o, changed = _launch(gla_decode, q, k, v, g, pool, slots, scale)
    if SIMULATED:  # on the device the kernel has changed the pool itself
        pool.copy_(changed)
    return _once(o, 1, q)


def _keep(ctx, inputs, output):
    *arrays, ctx.scale = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, dhT):
    return *_gla_backward(*ctx.saved_tensors, do, dhT, ctx.scale), None


_gla.register_autograd(_backward, setup_context=_keep)
if SIMULATED:  # torch_neuronx reads the shapes off the kernel
    _gla.register_fake(lambda q, k, v, g, h0, scale: (v.new_empty(v.shape), h0.new_empty(h0.shape)))
    _gla_backward.register_fake(lambda *x: tuple(a.new_empty(a.shape) for a in x[:5]))
    _decode.register_fake(lambda q, k, v, *x: v.new_empty(v.shape))


def _launch(kernel, *args):
    if not SIMULATED:
        return ops.launch(kernel, LNC, *(x.contiguous() if isinstance(x, Tensor) else x for x in args))
    return map(to_torch, ops.launch(kernel, LNC, *(to_numpy(x) if isinstance(x, Tensor) else x for x in args)))


def _once(x, axis, q):
    """x without the second copy of the middle head, which two cores give of an odd number."""
    half, heads = x.shape[axis] // 2, q.shape[-2]
    if x.shape[axis] == heads:
        return x
    return torch.cat((x.narrow(axis, 0, half), x.narrow(axis, half + 1, half - 1)), axis)


class Tiles:
    """kernels/nki/ops.py's Tiling on tensors, differentiable: a head of K x V as parts_k x parts_v heads of k x v."""

    def __init__(self, q, v):
        self.of = ops.Tiling(q.shape, v.shape, ops.VALUES_BACKWARD)

    def keys(self, x):
        """[..., N, K] -> [..., heads, k]"""
        return self._split(x, self.of.parts_k, self.of.k, -2)

    def values(self, x):
        """[..., N, V] -> [..., heads, v]"""
        return self._split(x, self.of.parts_v, self.of.v, -3)

    def states(self, x):
        """[..., N, K, V] -> [..., heads, k, v]"""
        of = self.of
        x = pad(x, (0, of.parts_v * of.v - of.V, 0, of.parts_k * of.k - of.K))
        x = x.unflatten(-1, (of.parts_v, of.v)).unflatten(-3, (of.parts_k, of.k))
        return x.movedim(-2, -3).flatten(-5, -3)

    def join_values(self, x):
        """[..., heads, v] -> [..., N, V], the sum over parts of K, in float32."""
        of = self.of
        x = x.unflatten(-2, (of.N, of.parts_k, of.parts_v))
        x = x.sum(-3, dtype=torch.float32) if of.parts_k > 1 else x.squeeze(-3)
        return x.flatten(-2)[..., : of.V]

    def join_states(self, x):
        """[..., heads, k, v] -> [..., N, K, V]"""
        of = self.of
        x = x.unflatten(-3, (of.N, of.parts_k, of.parts_v)).movedim(-3, -2)
        return x.flatten(-2).flatten(-3, -2)[..., : of.K, : of.V]

    def _split(self, x, parts, width, axis):
        """Splits channels into parts, and gives each part of the other side a copy, along `axis` from the end."""
        of = self.of
        x = x.float() if x.dtype == torch.float16 else x
        x = pad(x, (0, parts * width - x.shape[-1])).unflatten(-1, (parts, width)).unsqueeze(axis)
        return x.expand(*x.shape[:-3], of.parts_k, of.parts_v, width).flatten(-4, -2)
