"""Which kernel serves an op: one line a backend.

A kernel module has the functions of its op (`forward` and `backward`; the contract stands in the portable ones) and
may have `refuses(*args, **options) -> str | None`, a reason why it cannot serve a call, and what would.
"""

import functools
from importlib import import_module

from jax import lax

KERNELS = {
    "attention": {"xla": "ringtide.kernels.xla.attention", "pallas": "ringtide.kernels.pallas.splash"},
    "gla": {"xla": "ringtide.kernels.xla.gla", "nki": "ringtide.jax.nki"},
}
RINGS = {"attention": {"pallas": "ringtide.kernels.pallas.ring"}, "gla": {}}  # kernels that send K and V themselves
PORTABLE = "xla"
KNOWN = ("xla", "pallas", "nki", "triton", "eager")  # of some release or op: a name that code may carry everywhere
PREFERRED = {
    "attention": {"tpu": "pallas"},
    "gla": {},
}  # op -> {platform that is compiled for: implementation}, elsewhere PORTABLE


def call(op: str, function: str, implementation, *args, **options):
    """Calls `function` of the kernel that serves `op`.

    implementation: what `names` gives: a name, names (the first that serves), or None: by the platform compiled for.
    Raises NotImplementedError when none of the names can serve.
    """
    if implementation is None:
        table = {PORTABLE: PORTABLE, **PREFERRED[op]}
        serving = {platform: name for platform, name in table.items() if not _reason(op, name, args, options)}
        portable = functools.partial(getattr(load(op, serving.pop(PORTABLE)), function), **options)
        branches = {p: functools.partial(getattr(load(op, n), function), **options) for p, n in serving.items()}
        return lax.platform_dependent(*args, default=portable, **branches) if branches else portable(*args)
    reasons = []
    for name in (implementation,) if isinstance(implementation, str) else implementation:
        reason = _reason(op, name, args, options)
        if not reason:
            return getattr(load(op, name), function)(*args, **options)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op}: no implementation can serve this call. {'; '.join(reasons)}")


def around(op: str, function: str, implementation, otherwise, *args, **options):
    """`function` of a kernel that goes around a ring of devices by itself, if the one that serves on a TPU has a ring
    that says so (`serves`); else, and elsewhere, otherwise(*args)."""
    candidates = (PREFERRED[op].get("tpu"),) if implementation is None else implementation
    candidates = (candidates,) if isinstance(candidates, str) else candidates
    local = {name: value for name, value in options.items() if name != "axis"}
    name = next((name for name in candidates if not _reason(op, name, args, local)), None)
    if name not in RINGS[op]:
        return otherwise(*args)
    ring = import_module(RINGS[op][name])
    if not ring.serves(*args, **options):
        return otherwise(*args)
    return lax.platform_dependent(*args, tpu=functools.partial(getattr(ring, function), **options), default=otherwise)


def names(op: str, implementation):
    """`implementation` checked, and hashable as a static argument must be: None, a name, or a tuple of names."""
    if implementation is None or isinstance(implementation, str):
        known = (implementation,) if implementation else ()
    elif isinstance(implementation, list | tuple) and implementation:
        known = implementation = tuple(implementation)
    else:
        raise TypeError(f"implementation: expected a name, a sequence of names or None, got {implementation!r}")
    for name in known:
        if name not in (*KERNELS[op], *KNOWN):
            raise ValueError(f"implementation: {op} has {', '.join(KERNELS[op])}, got {name!r}")
    return implementation


def load(op: str, name: str):
    """The kernel module `name` of `op`."""
    return import_module(KERNELS[op][name])


def _reason(op, name, args, options):
    if name not in KERNELS[op]:
        return f"not in this release, which has {', '.join(KERNELS[op])}"
    refuses = getattr(load(op, name), "refuses", None)
    return refuses(*args, **options) if refuses else None
