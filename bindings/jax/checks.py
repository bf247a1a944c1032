"""What the ops check of their arguments: shapes and dtypes always, values in checked mode.

Every message is one line that names the argument, what was expected, what came, and the cure.

Checked mode, RINGTIDE_CHECK=1 in the environment when an op is called or traced, also looks at values: at once where
they are concrete, by a debug callback under `jax.jit` (the error then surfaces from the computation).
"""

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "bfloat16", "float16")


def array(name, x, axes, sizes, dtypes=FLOATS):
    """x as a JAX array of the given axes, e.g. "B T N K", and one of `dtypes`.

    sizes: {axis: size} known from the arguments before; axes met for the first time are added to it.
    Raises ValueError for a wrong shape, TypeError for a wrong dtype.
    """
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}") from None
    axes = axes.split()
    if not _fits(x.shape, axes, sizes):
        want = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
        raise ValueError(f"{name}: expected shape [{want}], got {list(x.shape)}{_layout(name, x.shape, axes, sizes)}")
    if x.dtype.name not in dtypes:
        want = " or ".join(dtypes)
        raise TypeError(f"{name}: expected {want}, got {x.dtype}: cast it, {name}.astype('{dtypes[0]}')")
    sizes.update(zip(axes, x.shape, strict=True))
    return x


def integers(name, x, axes, sizes, limit=1 << 31):
    """x as int32 of the given axes, from integers of any dtype; |values| must be below `limit`.

    Raises as `array`, and as `in_range` for values out of range, which would otherwise wrap.
    """
    x = in_range(name, x, limit)
    if isinstance(x, jax.Array) and not np.can_cast(x.dtype, np.int32):
        x = jnp.clip(x, max(np.iinfo(x.dtype).min, -(1 << 31)), (1 << 31) - 1)  # what was not looked at stays far out
    return array(name, jnp.asarray(x.astype(np.int32)), axes, sizes, ("int32",))


def in_range(name, x, limit=1 << 31):
    """x as a NumPy or JAX array of integers of any dtype, |values| below `limit`.

    What the host holds is looked at here; of arrays on a device, those that int32 cannot hold, in checked mode all.
    Raises TypeError for another dtype, ValueError for values out of range.
    """
    if not isinstance(x, jax.Array):  # looked at before JAX cuts 64 bits to 32
        x = np.asarray(x)
        x = x.astype(np.int32) if x.size == 0 else x
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {x.dtype}: cast it, {name}.astype('int32')")
    held = np.can_cast(x.dtype, np.int32)
    fits = held and limit == 1 << 31
    seen = not isinstance(x, jax.Array) or not (held or isinstance(x, jax.core.Tracer))
    if x.size and not fits and (seen or enabled()):
        message = f"{name}: expected values below 2**{limit.bit_length() - 1} in size, found larger: renumber from 0"
        refuse((x.max() >= limit) | (x.min() < -limit), message)
    return x


def number(name, x, instead):
    """x as a finite Python float: it is compiled into the kernels. instead: what to do with an array."""
    if isinstance(x, bool | str | bytes | jax.core.Tracer) or getattr(x, "ndim", 0):
        raise TypeError(f"{name}: expected a finite number, got {type(x).__name__}: {instead}")
    try:
        value = float(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a finite number, got {type(x).__name__}: {instead}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return value


def enabled():
    """Is checked mode on?"""
    return os.environ.get("RINGTIDE_CHECK", "") not in ("", "0")


def refuse(bad, message):
    """Raises ValueError(message) if the bool scalar `bad` holds; call it in checked mode only."""
    if isinstance(bad, jax.core.Tracer):
        jax.debug.callback(functools.partial(_raise_if, message), bad)
    else:
        _raise_if(message, bad)


def _raise_if(message, bad):
    if bad:
        raise ValueError(message)


def _fits(shape, axes, sizes):
    return len(shape) == len(axes) and all(sizes.get(a, n) == n for a, n in zip(axes, shape, strict=True))


def _layout(name, shape, axes, sizes):
    """The commonest mistake: heads before time, in this argument or in the ones that it is held against."""
    swapped = sizes | {"T": sizes.get("N"), "N": sizes.get("T")}
    itself = len(shape) == 4 and "N" in axes and _fits((shape[0], shape[2], shape[1], shape[3]), axes, sizes)
    others = "T" in sizes and "N" in sizes and _fits(shape, axes, swapped)
    if itself or others:
        return ": time comes before heads, so pass a head-first [B, N, T, ...] argument as x.swapaxes(1, 2)"
    return ""
