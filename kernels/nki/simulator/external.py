"""Kernels that say `import nki`, unmodified, on the simulator: it takes the place of that package for a while."""

import sys
from contextlib import contextmanager
from types import ModuleType

from ringtide.kernels.nki.simulator import dtypes, isa, language, launch


@contextmanager
def external():
    """Within it, `import nki`, `nki.isa`, `nki.language` and their like give the simulator (`nki.__is_simulator__`).

    Afterwards these names are as they were; modules imported meanwhile keep what they got. Kernels that import inside
    their functions must be called within it, too. Raises RuntimeError where the real package is installed.
    """
    from ringtide.kernels.nki import backend

    if backend.real() is not None:
        raise RuntimeError("external: the real nki is installed and would be shadowed: call its own nki.simulate")
    before = {name: x for name, x in sys.modules.items() if name.split(".")[0] == "nki"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(_modules())
    try:
        yield sys.modules["nki"]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "nki"]:
            del sys.modules[name]
        sys.modules.update(before)


def _modules():
    nki = _module("nki", jit=launch.jit, simulate=launch.simulate, __is_simulator__=True)
    nki.dtype = _module("nki.dtype", **{name: name for name in dtypes.NUMPY})
    nki.isa = _module("nki.isa", **_public(isa))
    nki.isa.constants = _module("nki.isa.constants", **_public(isa.enums))
    nki.language = _module("nki.language", **_public(language), __getattr__=language.__getattr__)
    nki.typing = _module("nki.typing", tensor=language.NkiTensor)  # for annotations
    nki.collectives = _module("nki.collectives", __getattr__=_no_collectives)
    parts = (nki.dtype, nki.isa, nki.isa.constants, nki.language, nki.typing, nki.collectives)
    return {x.__name__: x for x in (nki, *parts)}


def _module(name, **names):
    made = ModuleType(name, "Ringtide's simulator in the place of the Neuron SDK's package.")
    made.__dict__.update(names)
    made.__path__ = []
    return made


def _public(module):
    return {name: x for name, x in vars(module).items() if not name.startswith("_")}


def _no_collectives(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"nki.collectives.{name}: collectives are not simulated")

    return refuse
