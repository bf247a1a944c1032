"""torch.ops.ringtide: gated linear attention as custom operators, so that torch.compile, export, autograd and FSDP see
one node each, with shapes that do not depend on values. Which kernel serves is the last argument, a name of KERNELS.

A kernel module has the functions of kernels/eager/gla.py.
"""

from importlib import import_module

import torch
from torch import Tensor

from ringtide.torch import checks

KERNELS = {"eager": "ringtide.kernels.eager.gla", "nki": "ringtide.torch.nki"}
PREFERRED = {"neuron": "nki"}  # device -> implementation, elsewhere PORTABLE
PORTABLE = "eager"
KNOWN = ("xla", "pallas", "nki", "triton", "eager")  # of some release or framework: a name that code may carry


def choose(implementation, q, cu_seqlens=None) -> str:
    """The name of the kernel that serves. implementation: a name, a sequence of names to try, None: by the device.

    Raises TypeError and ValueError for what is no name, NotImplementedError when none of the names can serve.
    """
    if implementation is None:
        preferred = PREFERRED.get(q.device.type, PORTABLE)
        return PORTABLE if _reason(preferred, q, cu_seqlens) else preferred
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not (isinstance(names, list | tuple) and names):
        raise TypeError(f"implementation: expected a name, a sequence of names or None, got {implementation!r}")
    for name in names:
        if name not in (*KERNELS, *KNOWN):
            raise ValueError(f"implementation: gla has {', '.join(KERNELS)}, got {name!r}")
    reasons = []
    for name in names:
        reason = _reason(name, q, cu_seqlens)
        if not reason:
            return name
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"gla: no implementation can serve this call. {'; '.join(reasons)}")


def _reason(name, q, cu_seqlens):
    if name not in KERNELS:
        return f"not in this release, which has {', '.join(KERNELS)}"
    if name == "nki" and q.dtype == torch.float64:
        return "computes in float32, got float64: cast q, k, v, g and the states, or take 'eager'"
    if name == "nki" and cu_seqlens is not None:
        return "has one state a row: take 'eager' for cu_seqlens"
    return None


def _call(implementation, function, q, *args, **options):
    kernel = getattr(import_module(KERNELS[implementation]), function)
    with torch.autocast(q.device.type, enabled=False):  # float32 stays float32
        return kernel(q, *args, **options)


@torch.library.custom_op("ringtide::gla", mutates_args=())
def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor, cu_seqlens: Tensor | None, scale: float, implementation: str
) -> tuple[Tensor, Tensor]:
    checks.gates(g)
    if cu_seqlens is not None:
        checks.sequences(cu_seqlens, q.shape[1])
    return _call(implementation, "forward", q, k, v, g, h0, scale=scale, cu_seqlens=cu_seqlens)


@gla.register_fake
def _(q, k, v, g, h0, cu_seqlens, scale, implementation):
    return v.new_empty(v.shape), h0.new_empty(h0.shape)


@torch.library.custom_op("ringtide::gla_backward", mutates_args=())
def gla_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    h0: Tensor,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dhT: Tensor,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _call(implementation, "backward", q, k, v, g, h0, do, dhT, scale=scale, cu_seqlens=cu_seqlens)


@gla_backward.register_fake
def _(q, k, v, g, h0, cu_seqlens, do, dhT, scale, implementation):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, h0))


def _keep(ctx, inputs, output):
    *arrays, ctx.scale, ctx.implementation = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, dhT):
    grads = gla_backward(*ctx.saved_tensors, do, dhT, ctx.scale, ctx.implementation)
    return *grads, None, None, None


gla.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("ringtide::gla_decode", mutates_args=())
def gla_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    slot_ids: Tensor | None,
    has_initial_state: Tensor | None,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    state = state.clone()
    return _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation), state


@gla_decode.register_fake
def _(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    return v.new_empty(v.shape), state.new_empty(state.shape)


@torch.library.custom_op("ringtide::gla_decode_", mutates_args=("state",))
def gla_decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    slot_ids: Tensor | None,
    has_initial_state: Tensor | None,
    scale: float,
    implementation: str,
) -> Tensor:
    return _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation)


@gla_decode_.register_fake
def _(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    return v.new_empty(v.shape)


def _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    if slot_ids is None:
        checks.gates(g)
        return _step(q, k, v, g, state, None, has_initial_state, scale, implementation)
    count = state.shape[0]
    checks.slots(slot_ids, count)
    beyond = slot_ids >= count
    slot_ids = torch.where(beyond, -1, slot_ids)
    used = (slot_ids >= 0)[:, None, None]
    q, k, v, g = (torch.where(used, x, 0) for x in (q, k, v, g))  # a row without a slot may hold anything
    checks.gates(g)
    out = _step(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation)
    return torch.where(beyond[:, None, None], torch.nan, out)


def _step(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    if not (state.numel() and q.numel()):  # kernels never see an empty pool
        return v.new_zeros(v.shape)
    return _call(implementation, "decode_step_", q, k, v, g, state, slot_ids, has_initial_state, scale=scale)


@torch.library.custom_op("ringtide::gla_decode_backward", mutates_args=())
def gla_decode_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
    slot_ids: Tensor | None,
    has_initial_state: Tensor | None,
    dout: Tensor,
    dstate: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    args = q, k, v, g, state, slot_ids, has_initial_state, dout, dstate
    return _call(PORTABLE, "decode_step_backward", *args, scale=scale)


@gla_decode_backward.register_fake
def _(q, k, v, g, state, slot_ids, has_initial_state, dout, dstate, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, state))


def _decode_backward(ctx, dout, dstate):
    grads = gla_decode_backward(*ctx.saved_tensors, dout, dstate, ctx.scale)
    return *grads, None, None, None, None


gla_decode.register_autograd(_decode_backward, setup_context=_keep)
