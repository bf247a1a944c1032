"""Which kernel serves an op: one line a backend.

A kernel module has the functions of its op (`forward` and `backward`; the contract stands in the portable ones) and
may have `refuses(*args, **options) -> str | None`, a reason why it cannot serve a call, and what would.
"""

import functools
from importlib import import_module

from jax import lax

KERNELS = {
    "attention": {"xla": "ringtide.kernels.xla.attention"},
    "gla": {"xla": "ringtide.kernels.xla.gla"},
}
PORTABLE = "xla"
PREFERRED = {"attention": {}, "gla": {}}  # op -> {platform that is compiled for: implementation}, elsewhere PORTABLE


def call(op: str, function: str, implementation, *args, **options):
    """Calls `function` of the kernel that serves `op`.

    implementation: a name, a sequence of names (the first that serves), or None: by the platform that is compiled for.
    Raises ValueError for an unknown name, NotImplementedError when none of the names can serve.
    """
    if implementation is None:
        table = {PORTABLE: PORTABLE, **PREFERRED[op]}
        serving = {platform: name for platform, name in table.items() if not _reason(op, name, args, options)}
        portable = functools.partial(getattr(load(op, serving.pop(PORTABLE)), function), **options)
        branches = {p: functools.partial(getattr(load(op, n), function), **options) for p, n in serving.items()}
        return lax.platform_dependent(*args, default=portable, **branches) if branches else portable(*args)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    reasons = []
    for name in names:
        reason = _reason(op, name, args, options)
        if not reason:
            return getattr(load(op, name), function)(*args, **options)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op}: no implementation can serve this call. {'; '.join(reasons)}")


def names(implementation):
    """`implementation` in a hashable form."""
    return tuple(implementation) if isinstance(implementation, list) else implementation


def load(op: str, name: str):
    """The kernel module `name` of `op`."""
    if name not in KERNELS[op]:
        raise ValueError(f"implementation: {op} has {', '.join(KERNELS[op])}, got {name!r}")
    return import_module(KERNELS[op][name])


def _reason(op, name, args, options):
    refuses = getattr(load(op, name), "refuses", None)
    return refuses(*args, **options) if refuses else None
