"""torch.ops.ringtide: gated linear attention as custom operators, so that torch.compile, export, autograd and FSDP see
one node each, whose shapes do not depend on values; and which kernel serves.

"eager" has the operators of this file; "nki" those of nki.py, around single launches.
"""

import torch

from ringtide.kernels.eager import gla as eager
from ringtide.torch import checks

NAMES = ("eager", "nki")
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
        if name not in (*NAMES, *KNOWN):
            raise ValueError(f"implementation: gla has {', '.join(NAMES)}, got {name!r}")
    reasons = []
    for name in names:
        reason = _reason(name, q, cu_seqlens)
        if not reason:
            return name
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"gla: no implementation can serve this call. {'; '.join(reasons)}")


def _reason(name, q, cu_seqlens):
    if name not in NAMES:
        return f"not in this release, which has {', '.join(NAMES)}"
    if name == "nki" and q.dtype == torch.float64:
        return "computes in float32, got float64: cast q, k, v, g and the states, or take 'eager'"
    if name == "nki" and cu_seqlens is not None:
        return "has one state a row: take 'eager' for cu_seqlens"
    return None


def gla(q, k, v, g, h0, cu_seqlens, scale, implementation):
    """(o, final state), as kernels/eager/gla.py's forward, differentiable."""
    if implementation != "nki" or 0 in (*q.shape, *v.shape):  # NKI's kernels never see an empty array
        return _gla(q, k, v, g, h0, cu_seqlens, scale)
    from ringtide.torch import nki

    checks.gates(g)
    return nki.gla(q, k, v, g, h0, scale)


def gla_decode_(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    """out, as kernels/eager/gla.py's decode_step_ but slots and rows may be anything; not differentiable."""
    args = q, k, v, g, state, slot_ids, has_initial_state, scale, implementation
    if implementation != "nki" or q.device.type == "cpu":
        return _gla_decode_(*args)
    with torch.no_grad():  # the launch is an operator itself
        return _decode(*args)


def autocast(device_type) -> bool:
    """Is autocast on for the device?"""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _call(function, q, *args, **options):
    if not autocast(q.device.type):
        return function(q, *args, **options)
    with torch.autocast(q.device.type, enabled=False):  # float32 stays float32
        return function(q, *args, **options)


# --- the operators ----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("ringtide", "FRAGMENT")
_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g"
_SLOTS = "Tensor? slot_ids, Tensor? has_initial_state"
_GRADS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


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


@_operator(f"gla({_TOKENS}, Tensor h0, Tensor? cu_seqlens, float scale) -> (Tensor, Tensor)", like=(2, 4))
def _gla(q, k, v, g, h0, cu_seqlens, scale):
    checks.gates(g)
    if cu_seqlens is not None:
        checks.sequences(cu_seqlens, q.shape[1])
    return _call(eager.forward, q, k, v, g, h0, scale=scale, cu_seqlens=cu_seqlens)


@_operator(
    f"gla_backward({_TOKENS}, Tensor h0, Tensor? cu_seqlens, Tensor do, Tensor dhT, float scale) -> {_GRADS}",
    like=(0, 1, 2, 3, 4),
)
def _gla_backward(q, k, v, g, h0, cu_seqlens, do, dhT, scale):
    return _call(eager.backward, q, k, v, g, h0, do, dhT, scale=scale, cu_seqlens=cu_seqlens)


def _keep(ctx, inputs, output):
    *arrays, ctx.scale = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, dhT):
    return *_gla_backward(*ctx.saved_tensors, do, dhT, ctx.scale), None, None


_differentiable(_gla, _backward, _keep)
_differentiable(_gla_backward, _once)


@_operator(
    f"gla_decode({_TOKENS}, Tensor state, {_SLOTS}, float scale, str implementation) -> (Tensor, Tensor)", like=(2, 4)
)
def gla_decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    state = state.clone()
    return _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation), state


@_operator(f"gla_decode_({_TOKENS}, Tensor(a!) state, {_SLOTS}, float scale, str implementation) -> Tensor", like=(2,))
def _gla_decode_(*args):
    with torch.no_grad():
        return _decode(*args)


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
    if 0 in (*state.shape, *q.shape):  # kernels never see an empty pool
        return v.new_zeros(v.shape)
    step = eager.decode_step_
    if implementation == "nki":
        from ringtide.torch.nki import decode_step_ as step
    return _call(step, q, k, v, g, state, slot_ids, has_initial_state, scale=scale)


@_operator(
    f"gla_decode_backward({_TOKENS}, Tensor state, {_SLOTS}, Tensor dout, Tensor dstate, float scale) -> {_GRADS}",
    like=(0, 1, 2, 3, 4),
)
def _gla_decode_backward(q, k, v, g, state, slot_ids, has_initial_state, dout, dstate, scale):
    args = q, k, v, g, state, slot_ids, has_initial_state, dout, dstate
    return _call(eager.decode_step_backward, *args, scale=scale)


def _keep_decode(ctx, inputs, output):
    _keep(ctx, inputs[:-1], output)


def _decode_backward(ctx, dout, dstate):
    return *_gla_decode_backward(*ctx.saved_tensors, dout, dstate, ctx.scale), None, None, None, None


_differentiable(gla_decode, _decode_backward, _keep_decode)
_differentiable(_gla_decode_backward, _once)
