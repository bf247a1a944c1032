"""Registers of the engines' sequencers: integers for addresses and loops, known to the kernel only as registers."""

import numpy as np

from ringtide.kernels.nki.simulator import dtypes, machine
from ringtide.kernels.nki.simulator.errors import BufferError, DtypeError, ShapeError, UninitializedError
from ringtide.kernels.nki.simulator.tensor import NkiTensor, VirtualRegister


def _one(op, argument, x):
    """A tensor of one integer in HBM or SBUF."""
    if not isinstance(x, NkiTensor) or x.size != 1:
        raise ShapeError(f"{op}: {argument} {x!r}: it must be a tensor of one element")
    if x.storage.space == "psum":
        raise BufferError(f"{op}: {argument} {x!r}: it must be in HBM or SBUF")
    if x.dtype not in dtypes.INTEGERS:
        raise DtypeError(f"{op}: {argument} {x!r}: a register holds an integer of up to 32 bits")
    return x


def _register(op, argument, x, to=False):
    if not isinstance(x, VirtualRegister):
        raise ShapeError(f"{op}: {argument} {x!r}: it must be a register, of register_alloc")
    if to and x.frozen:
        raise ShapeError(f"{op}: {argument}: the register of a loop is not written")
    if not to and x.value is None:
        raise UninitializedError(f"{op}: {argument}: the register holds nothing: register_move or register_load first")
    return x


def register_alloc(x=None):
    """A register, holding the integer x or nothing."""
    register = VirtualRegister(None)
    if x is not None:
        register_move(register, x)
    return register


def register_move(dst, src):
    """dst = src, an integer or another register."""
    op = "register_move"
    _register(op, "dst", dst, to=True)
    if isinstance(src, int | np.integer) and not isinstance(src, bool):
        dst.value, dst.sources = int(src), ()
    else:
        _register(op, "src", src)
        dst.value, dst.sources = src.value, src.sources


def register_load(dst, src):
    """dst = the one integer of src, in HBM or SBUF. What is done with the register depends on src."""
    op = "register_load"
    _register(op, "dst", dst, to=True)
    dst.value, dst.sources = int(_one(op, "src", src).read().reshape(())), (src,)


def register_store(dst, src):
    """The one integer of dst, in HBM or SBUF = src."""
    op = "register_store"
    _one(op, "dst", dst)
    value, sources = _register(op, "src", src).value, src.sources
    run = lambda: dst.write(np.full(dst.shape, value, np.int64))
    return machine.current().issue(op, "POOL", run, sources, (dst,), shape=dst.shape, dtype=dst.dtype)
