"""GLA for PyTorch by the kernels for Trainium2, in the simulator on the host."""

import ml_dtypes
import torch

from ringtide.kernels.nki import ops


def forward(q, k, v, g, h0, *, scale, cu_seqlens=None):
    return _call(ops.forward, q, k, v, g, h0, scale=scale)


def backward(q, k, v, g, h0, do, dhT, *, scale, cu_seqlens=None):
    return _call(ops.backward, q, k, v, g, h0, do, dhT, scale=scale)


def decode_step_(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    out, new = _call(ops.decode_step, q, k, v, g, state, slot_ids, has_initial_state, scale=scale)
    state.copy_(new)
    return out


def _call(function, *args, **options):
    return tuple(_tensor(x) for x in function(*map(_array, args), **options))


def _array(x):
    if x is None:
        return None
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def _tensor(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(x)
