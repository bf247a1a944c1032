"""What the ops check of their arguments: shapes and dtypes always; values where that needs no waiting for a device.

Every message is one line that names the argument, what was expected, what came, and the cure.

A tensor on a CPU can be looked at for nothing, so slots and cu_seqlens there always are. On an accelerator that would
stop the host until the device is done: it happens in checked mode only, RINGTIDE_CHECK=1 in the environment when an op
runs, and so does looking at all gates.
"""

import itertools
import math
import os

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def array(name, x, axes, sizes, dtypes=FLOATS):
    """Checks that x is a tensor of the given axes, e.g. "B T N K", and of one of `dtypes`; returns it.

    sizes: {axis: size} known from the arguments before; axes met for the first time are added to it.
    Raises ValueError for a wrong shape, TypeError for a wrong dtype.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(x).__name__}")
    axes = axes.split()
    if not _fits(x.shape, axes, sizes):
        want = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
        raise ValueError(f"{name}: expected shape [{want}], got {list(x.shape)}{_layout(name, x.shape, axes, sizes)}")
    if x.dtype not in dtypes:
        want = " or ".join(map(_short, dtypes))
        raise TypeError(f"{name}: expected {want}, got {_short(x.dtype)}: cast it, {name}.to({dtypes[0]})")
    sizes.update(zip(axes, x.shape, strict=True))
    return x


def integers(name, x, axes, sizes):
    """As `array`, of integers of any dtype; returns them as int64."""
    if isinstance(x, torch.Tensor):
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise TypeError(f"{name}: expected integers, got {_short(x.dtype)}: cast it, {name}.long()")
        x = x.long()
    return array(name, x, axes, sizes, (torch.int64,))


def number(name, x, instead):
    """x as a finite Python float. instead: what to do with an array."""
    if isinstance(x, bool | str | bytes | torch.Tensor):
        raise TypeError(f"{name}: expected a finite number, got {type(x).__name__}: {instead}")
    try:
        value = float(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a finite number, got {type(x).__name__}: {instead}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return value


def no_tangents(**tensors):
    """Refuses forward-mode differentiation, of which PyTorch would make a tangent of 0 in silence."""
    if torch.compiler.is_compiling():
        return
    for name, x in tensors.items():
        if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name}: carries a tangent, but there is only reverse mode: use backward() or vjp"
            )


def enabled():
    """Is checked mode on?"""
    return os.environ.get("RINGTIDE_CHECK", "") not in ("", "0")


def gates(g):
    """In checked mode, refuses gates above 0 and NaN."""
    if enabled() and not torch.compiler.is_compiling() and not (g <= 0).all():
        raise ValueError(
            "g: expected gates in [-inf, 0], found a positive or NaN one: pass logs, as torch.nn.functional.logsigmoid"
        )


def sequences(cu_seqlens, T):
    """Refuses ends of sequences that do not run from 0 to T without stepping back, where they may be looked at."""
    if not _may_look(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens: expected to begin at 0, got {ends[0]}: prepend a 0 to the ends of the sequences")
    if ends[-1] != T:
        raise ValueError(f"cu_seqlens: expected to end at T = {T}, the tokens given, got {ends[-1]}")
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        if b < a:
            raise ValueError(f"cu_seqlens: expected ends that never decrease, got {a} and then {b} at {i + 1}")


def slots(slot_ids, count):
    """Refuses slots beyond the pool and slots named twice, where they may be looked at."""
    if not _may_look(slot_ids):
        return
    seen = set()
    for slot in slot_ids.tolist():
        if slot >= count:
            raise ValueError(f"slot_ids: expected slots below {count} (the size of the pool), got {slot}")
        if slot >= 0 and slot in seen:
            raise ValueError(f"slot_ids: two rows share slot {slot}: decode one token a slot in a step")
        seen.add(slot)


def _may_look(x):
    return (x.device.type == "cpu" or enabled()) and not torch.compiler.is_compiling()


def _fits(shape, axes, sizes):
    return len(shape) == len(axes) and all(sizes.get(a, n) == n for a, n in zip(axes, shape, strict=True))


def _layout(name, shape, axes, sizes):
    """The commonest mistake: heads before time, in this argument or in the ones that it is held against."""
    swapped = sizes | {"T": sizes.get("N"), "N": sizes.get("T")}
    itself = len(shape) == 4 and "N" in axes and _fits((shape[0], shape[2], shape[1], shape[3]), axes, sizes)
    others = "T" in sizes and "N" in sizes and _fits(shape, axes, swapped)
    if itself or others:
        return ": time comes before heads, so pass a head-first [B, N, T, ...] argument as x.transpose(1, 2)"
    return ""


def _short(dtype):
    return str(dtype).removeprefix("torch.")
