"""`nki`, `nl`, `nisa`: the real package where it is installed, else the simulator.

RINGTIDE_NKI=simulator or =real chooses. A package of that name without the parts that kernels need, a placeholder, is
not taken for the real one.
"""

import importlib
import os
from types import SimpleNamespace


def real():
    """(nki, nki.isa, nki.language) of the real package, or None."""
    try:
        nki, nisa, nl = (importlib.import_module(name) for name in ("nki", "nki.isa", "nki.language"))
    except ImportError:
        return None
    whole = hasattr(nki, "jit") and hasattr(nisa, "nc_matmul") and hasattr(nl, "ndarray")
    return (nki, nisa, nl) if whole and not getattr(nki, "__is_simulator__", False) else None


def _choose():
    wanted = os.environ.get("RINGTIDE_NKI", "")
    if wanted not in ("", "real", "simulator"):
        raise ValueError(f"RINGTIDE_NKI={wanted!r}: it is 'real' or 'simulator'")
    found = None if wanted == "simulator" else real()
    if found is None and wanted == "real":
        raise ImportError("RINGTIDE_NKI=real, but the package nki of the Neuron SDK is not installed")
    if found is not None:
        return found
    from ringtide.kernels.nki.simulator import isa, language, launch

    return SimpleNamespace(jit=launch.jit, simulate=launch.simulate, __is_simulator__=True), isa, language


nki, nisa, nl = _choose()
