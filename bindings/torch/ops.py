"""torch.ops.ringtide: gated linear attention as custom operators, so that torch.compile, export, autograd and FSDP see
one node each, whose shapes do not depend on values. Which kernel serves is the last argument, a name of KERNELS.

A kernel module has the functions of kernels/eager/gla.py.
"""

from importlib import import_module

import torch

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
    if not autocast(q.device.type):
        return kernel(q, *args, **options)
    with torch.autocast(q.device.type, enabled=False):  # float32 stays float32
        return kernel(q, *args, **options)


def autocast(device_type) -> bool:
    """Is autocast on for the device?"""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


# --- the operators ----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("ringtide", "FRAGMENT")
_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g"
_SLOTS = "Tensor? slot_ids, Tensor? has_initial_state"
_LAST = "float scale, str implementation"


def _operator(schema, like):
    """Makes a function the operator torch.ops.ringtide.X of a schema "X(...) -> ...". like: the arguments that the
    results look like. What torch.library.custom_op does, at 6 us a call instead of 70."""

    def made(function):
        name = schema.split("(")[0]

        def fake(*args):
            results = tuple(args[i].new_empty(args[i].shape) for i in like)
            return results if len(results) > 1 else results[0]

        _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ringtide::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.ringtide, name).default

    return made


def _differentiable(operator, backward, setup_context=None):
    torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=_LIBRARY)


def _once(ctx, *grads):
    raise NotImplementedError("gla: there are first derivatives only")


@_operator(f"gla({_TOKENS}, Tensor h0, Tensor? cu_seqlens, {_LAST}) -> (Tensor, Tensor)", like=(2, 4))
def gla(q, k, v, g, h0, cu_seqlens, scale, implementation):
    checks.gates(g)
    if cu_seqlens is not None:
        checks.sequences(cu_seqlens, q.shape[1])
    return _call(implementation, "forward", q, k, v, g, h0, scale=scale, cu_seqlens=cu_seqlens)


@_operator(
    f"gla_backward({_TOKENS}, Tensor h0, Tensor? cu_seqlens, Tensor do, Tensor dhT, {_LAST}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    like=(0, 1, 2, 3, 4),
)
def gla_backward(q, k, v, g, h0, cu_seqlens, do, dhT, scale, implementation):
    return _call(implementation, "backward", q, k, v, g, h0, do, dhT, scale=scale, cu_seqlens=cu_seqlens)


def _keep(ctx, inputs, output):
    *arrays, ctx.scale, ctx.implementation = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, dhT):
    return *gla_backward(*ctx.saved_tensors, do, dhT, ctx.scale, ctx.implementation), None, None, None


_differentiable(gla, _backward, _keep)
_differentiable(gla_backward, _once)


@_operator(f"gla_decode({_TOKENS}, Tensor state, {_SLOTS}, {_LAST}) -> (Tensor, Tensor)", like=(2, 4))
def gla_decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    state = state.clone()
    return _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation), state


@_operator(f"gla_decode_({_TOKENS}, Tensor(a!) state, {_SLOTS}, {_LAST}) -> Tensor", like=(2,))
def gla_decode_(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    with torch.no_grad():
        return _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation)


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


@_operator(
    f"gla_decode_backward({_TOKENS}, Tensor state, {_SLOTS}, Tensor dout, Tensor dstate, {_LAST}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    like=(0, 1, 2, 3, 4),
)
def gla_decode_backward(q, k, v, g, state, slot_ids, has_initial_state, dout, dstate, scale, implementation):
    args = q, k, v, g, state, slot_ids, has_initial_state, dout, dstate
    return _call(PORTABLE, "decode_step_backward", *args, scale=scale)


def _decode_backward(ctx, dout, dstate):
    grads = gla_decode_backward(*ctx.saved_tensors, dout, dstate, ctx.scale, ctx.implementation)
    return *grads, None, None, None, None


_differentiable(gla_decode, _decode_backward, _keep)
_differentiable(gla_decode_backward, _once)
