"""`nl`: what kernels know as nki.language (0.6): dtypes, memories, allocation, loops, the launch grid.

Operators and the functions on tiles are in functions.py and appear here too.
"""

import inspect
from contextlib import contextmanager
from enum import Enum
from itertools import zip_longest

import numpy as np

from ringtide.kernels.nki.simulator import dtypes, machine, memory
from ringtide.kernels.nki.simulator.allocation import allocate
from ringtide.kernels.nki.simulator.errors import (
    BufferError,
    DtypeError,
    HazardError,
    NkiSimError,
    ShapeError,
    UnsupportedError,
)
from ringtide.kernels.nki.simulator.functions import *  # noqa: F403
from ringtide.kernels.nki.simulator.tensor import DynamicSlice, NkiTensor, VirtualRegister, address_of  # noqa: F401

bool_ = "bool"
int8, int16, int32 = "int8", "int16", "int32"
uint8, uint16, uint32 = "uint8", "uint16", "uint32"
float16, float32, bfloat16, tfloat32 = "float16", "float32", "bfloat16", "tfloat32"
float8_e4m3, float8_e4m3fn, float8_e5m2 = "float8_e4m3", "float8_e4m3fn", "float8_e5m2"
float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4 = "float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"  # trn3:
float8_e8m0fnu = "float8_e8m0fnu"  # kernels may name these four, allocating one is a DtypeError


class NKIObject:
    """Base of the configuration objects of kernels, which are dataclasses, as far as the parser of 0.6 asks: public
    attributes are fields even without an annotation."""

    def __init_subclass__(cls):
        noted = inspect.get_annotations(cls)
        plain = [n for n, x in vars(cls).items() if not (n.startswith("_") or callable(x) or hasattr(x, "__get__"))]
        cls.__annotations__ = noted | {name: object for name in plain if name not in noted}

    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
hbm = private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm


def is_hbm(buffer) -> bool:
    return buffer in (private_hbm, shared_hbm)


def is_on_chip(buffer) -> bool:
    return buffer in (sbuf, psum)


def is_psum(buffer) -> bool:
    return buffer is psum


def is_sbuf(buffer) -> bool:
    return buffer is sbuf


class _TileSize:
    """Trainium2's limits. SBUF holds what the options say, 192 KiB a partition unless said otherwise."""

    pmax = memory.PARTITIONS
    psum_bank_fmax = psum_fmax = memory.PSUM_BANK // 4
    psum_bank_fmax_bytes = memory.PSUM_BANK
    psum_num_banks = memory.PSUM_BANKS
    gemm_stationary_fmax, gemm_moving_fmax = 128, 512
    bn_stats_fmax = 512
    psum_min_align, sbuf_min_align = 4, 1

    @property
    def sbuf_fmax_bytes(self) -> int:
        """A partition's."""
        return machine.current().options.sbuf_bytes if machine.running() else memory.SBUF_BYTES

    total_available_sbuf_size = sbuf_fmax_bytes

    @property
    def sbuf_fmax(self) -> int:
        """float32 elements a partition."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        """All partitions'."""
        return self.sbuf_fmax_bytes * self.pmax


tile_size = _TileSize()


# --- allocation -----------------------------------------------------------------------------------------------------


def ndarray(shape, dtype, buffer=sbuf, name="", address=None):
    """A tensor that nothing has written yet. address: (partition, byte in it), for on-chip memory.

    Raises BufferError, DtypeError, ShapeError, PartitionError."""
    if not isinstance(buffer, MemoryRegion):
        raise BufferError(f"ndarray {name}: buffer is one of nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm, got {buffer!r}")
    space = "hbm" if is_hbm(buffer) else buffer.value
    if address is not None and space == "hbm":
        raise BufferError(f"ndarray {name}: address is for on-chip memory, got {buffer.name}")
    shape = (shape,) if isinstance(shape, int) else shape
    return allocate(shape, dtype, space, buffer, name, shared=buffer is shared_hbm, address=address)


def full(shape, fill_value, dtype, buffer=sbuf, name=""):
    """An on-chip tensor of one value, by memset."""
    from ringtide.kernels.nki.simulator import isa

    if is_hbm(buffer):
        raise BufferError(f"full {name}: no instruction fills HBM: fill a tile and dma_copy it")
    made = ndarray(shape, dtype, buffer, name)
    isa.memset(made, fill_value)
    return made


def zeros(shape, dtype, buffer=sbuf, name=""):
    """An on-chip tensor of zeros, by memset."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape, dtype, buffer=sbuf, name=""):
    """An on-chip tensor of ones, by memset."""
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x, dtype=None, buffer=None, name=""):
    """Zeros of x's shape and dtype, in SBUF unless said otherwise."""
    return zeros(x.shape, dtype or x.dtype, buffer or sbuf, name)


def empty_like(x, dtype=None, buffer=None, name=""):
    """A tensor of x's shape, dtype and memory that nothing has written yet."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant):
    """A NumPy array, or a .npy file's, as a constant in shared HBM."""
    return held(np.asarray(np.load(constant) if isinstance(constant, str) else constant), "constant")


def held(x, name):
    """A tensor in shared HBM that holds the array x before the kernel begins. Raises DtypeError."""
    if x.dtype.name not in dtypes.NUMPY:
        raise DtypeError(f"{name}: {x.dtype}{list(x.shape)}: the device has no such dtype: cast it first")
    made = allocate(x.shape, x.dtype, "hbm", shared_hbm, name, shared=True)
    if not made.storage.state.all():  # of two cores the first to come fills it
        made.storage.fill(x)
    made.storage.constant = True
    return made


def shared_identity_matrix(n, dtype=uint8, dst=None):
    """The identity [n, n] in SBUF, loaded once a core and dtype. dst: a tile to load it into instead."""
    from ringtide.kernels.nki.simulator import isa

    core, dtype = machine.current(), dtypes.check(dtype)
    key = "identity", n, dtype
    if dst is None and key in core.constants:
        return core.constants[key]
    loop, core.loop = core.loop, ()  # it belongs to no loop, whichever asks first
    try:
        made = dst if dst is not None else ndarray((n, n), dtype, sbuf, f"identity{n}")
        isa.dma_copy(made, shared_constant(np.eye(n).astype(dtypes.NUMPY[dtype])))
    finally:
        core.loop = loop
    if dst is None:
        core.constants[key] = made
    return made


def ds(start, size):
    """`size` elements from `start` on."""
    return DynamicSlice(start, size)


# --- loops ----------------------------------------------------------------------------------------------------------

affine_range = sequential_range = static_range = range


def dynamic_range(start, stop=None, step=1):
    raise UnsupportedError("dynamic_range: gone since NKI 0.7: use nl.fori_loop")


def fori_loop(lower, upper, body_fun, step=1):
    """A loop on the device: body_fun(i) for each i, a register that it can only read.

    Tensors made inside cannot be used outside (HazardError); estimates let no engine run ahead of a turn."""
    if not isinstance(step, int) or step < 1:
        raise ShapeError(f"fori_loop: step must be a positive int, got {step!r}")
    core, loop, turns = *_new_loop("fori_loop"), []
    for number, i in enumerate(range(address_of(lower)[0], address_of(upper)[0], step)):
        with _turn(core, loop, number, turns):
            body_fun(VirtualRegister(i, frozen=True))


def while_loop(init, body_fun):
    """A loop on the device while a register is not 0: body_fun(register) returns the next one."""
    core, loop, turns = *_new_loop("while_loop"), []
    register, number = init, 0
    while _register(register).value != 0:
        with _turn(core, loop, number, turns):
            register = body_fun(register)
        number += 1


def _register(x):
    if not isinstance(x, VirtualRegister):
        raise NkiSimError(f"while_loop: the condition is a register (nisa.register_alloc), got {type(x).__name__}")
    return x


def _new_loop(what):
    core = machine.current()
    if core.ordered:
        raise NkiSimError(f"{what}: loops of the device are not allowed inside no_reorder")
    core.loops += 1
    return core, core.loops


@contextmanager
def _turn(core, loop, number, turns):
    """turns: of the first turn its instructions, empty before it. The compiler takes that one for all."""
    outside, start = core.loop, len(core.instructions)
    core.loop = (*outside, (loop, number))
    try:
        yield
        here = [x for x in core.instructions[start:] if x.loop == core.loop]
    finally:
        core.loop = outside
    if not turns:
        turns.append(here)
    for first, x in zip_longest(turns[0], here):
        if first is None or x is None or first.said != x.said:
            then, now = (f"{x.op} at {x.line}" if x is not None else "ends" for x in (first, x))
            raise HazardError(
                f"turn {number} of a loop: {now}; in turn 0 that is {then}, on other memory or otherwise: the body is "
                f"compiled once, so let what differs come from memory or from the loop's register"
            )


@contextmanager
def no_reorder():
    """Instructions inside run in the order they are written."""
    core = machine.current()
    if core.ordered:
        raise NkiSimError("no_reorder: already inside one")
    core.orders += 1
    core.ordered = core.orders
    try:
        yield
    finally:
        core.ordered = 0


# --- the launch grid ------------------------------------------------------------------------------------------------


def program_id(axis=0) -> int:
    """Which of the grid's cores this is."""
    return machine.current().core


def num_programs(axes=0) -> int:
    """How many cores run the kernel."""
    return machine.current().cores


def program_ndim() -> int:
    """1 if the kernel was launched on a grid (kernel[2]), else 0."""
    return 1 if machine.current().grid else 0


_GONE = {  # since 0.2, unless said otherwise
    "par_dim": "axis 0 of an on-chip tensor is the partition without saying so",
    "mgrid": "index with slices",
    "arange": "index with slices",
    "static_cast": "tensor_copy into a tile of the dtype",
    "loop_reduce": "accumulate with nisa.tensor_tensor, or in PSUM",
    "spmd_dim": "kernel[2]",
    "nc": "kernel[2]",
    "atomic_rmw": "nisa.dma_compute",
}


def __getattr__(name):
    if name in _GONE:
        raise AttributeError(f"nl.{name} is no longer part of NKI: {_GONE[name]}")
    raise AttributeError(f"nl.{name}: the simulator knows no such name in nki.language")


def device_print(print_prefix, tensor):
    """Prints a tensor's content at once."""
    print(print_prefix, tensor.read())
