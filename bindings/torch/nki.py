"""GLA for PyTorch by the kernels for Trainium2, in the simulator on the host."""

from ringtide.kernels.nki import ops
from ringtide.torch.arrays import to_numpy, to_torch


def forward(q, k, v, g, h0, *, scale, cu_seqlens=None):
    return _call(ops.forward, q, k, v, g, h0, scale=scale)


def backward(q, k, v, g, h0, do, dhT, *, scale, cu_seqlens=None):
    return _call(ops.backward, q, k, v, g, h0, do, dhT, scale=scale)


def decode_step_(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    out, new = _call(ops.decode_step, q, k, v, g, state, slot_ids, has_initial_state, scale=scale)
    state.copy_(new)
    return out


def _call(function, *args, **options):
    results = function(*(None if x is None else to_numpy(x) for x in args), **options)
    return tuple(map(to_torch, results))
