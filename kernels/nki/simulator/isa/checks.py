"""What every instruction asks of its operands, and how they are read and written."""

import numpy as np

from ringtide.kernels.nki.simulator import dtypes, memory
from ringtide.kernels.nki.simulator.cost import STRIDE
from ringtide.kernels.nki.simulator.errors import (
    BufferError,
    DtypeError,
    EngineError,
    ShapeError,
    UnsupportedError,
)
from ringtide.kernels.nki.simulator.isa.enums import SHORT, engine, member
from ringtide.kernels.nki.simulator.tensor import NkiTensor

ON_CHIP, SBUF, PSUM = ("sbuf", "psum"), ("sbuf",), ("psum",)
QUIET = dict(invalid="ignore", over="ignore", divide="ignore", under="ignore")  # infinities and NaN, as on the engines
_TINY = np.float32(np.finfo(np.float32).tiny)
_RANK = 5  # partition and four free axes


def tile(op, argument, x, spaces=ON_CHIP) -> NkiTensor:
    """An operand of an engine: a tensor in one of `spaces`, of legal partitions. Raises on anything else."""
    if not isinstance(x, NkiTensor):
        raise ShapeError(f"{op}: {argument} is {type(x).__name__} {x!r}, it must be a tensor on chip")
    if x.storage.space not in spaces:
        cure = "copy it to SBUF by dma_copy" if not x.on_chip else "copy it by tensor_copy"
        raise BufferError(f"{op}: {argument} {x!r}, it must be in {' or '.join(spaces)}: {cure}")
    if len(x.shape) > _RANK:
        raise ShapeError(f"{op}: {argument} {x!r} has {len(x.shape)} axes, at most {_RANK}: flatten some")
    x.partitions()
    return x


def alike(op, dst, *others):
    """The same partitions and as many elements in each, under whatever free shape."""
    for name, x in others:
        if x.shape != dst.shape and (x.shape[0] != dst.shape[0] or x.free != dst.free):
            raise ShapeError(
                f"{op}: {name} {x!r} and dst {dst!r}: partitions and elements a partition must be equal; "
                f"nothing broadcasts by itself: .broadcast(dim, n), or pass a [P, 1] operand where one is taken"
            )


def vector(op, argument, x, data, dtype="float32"):
    """An operand that is a number or [P, 1] (of `dtype`, if not None): the tensors it reads, () or (x,)."""
    if not isinstance(x, NkiTensor):
        if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
            raise ShapeError(f"{op}: {argument} is {type(x).__name__} {x!r}, it must be a number or a [P, 1] tensor")
        return ()
    tile(op, argument, x)
    if x.shape[0] != data.shape[0] or x.free != 1:
        raise ShapeError(
            f"{op}: {argument} {x!r}, it must be a number or [{data.shape[0]}, 1]: one element a partition"
        )
    if dtype is not None and x.dtype != dtype:
        raise DtypeError(f"{op}: {argument} {x!r}, a vector operand is {dtype}: copy it into one")
    return (x,)


def column(op, argument, x, data):
    """A [P, 1] tensor that takes one result of each partition of `data`."""
    tile(op, argument, x)
    if x.shape[0] != data.shape[0] or x.free != 1:
        raise ShapeError(f"{op}: {argument} {x!r}, it must be [{data.shape[0]}, 1]: one element a partition")
    return x


def not_both_psum(op, a, x, b, y):
    if x.storage.space == "psum" == y.storage.space:
        raise BufferError(f"{op}: {a} and {b} are both in PSUM, one at most: copy one to SBUF by tensor_copy")


def chosen(op, given, default, allowed, tensors) -> str:
    """The engine ("DVE", ...) that runs it: `given`, or `default` for unknown. GpSimd does not reach PSUM."""
    member(op, "engine", given, (engine.unknown, *allowed))
    taken = default if given is engine.unknown else given
    if taken is engine.gpsimd:
        for x in tensors:
            if x.storage.space == "psum":
                raise BufferError(f"{op}: {x!r}: the GpSimd engine does not reach PSUM: use engine.vector")
    return SHORT[taken]


def unsupported(op, argument, value, default, why):
    if value is not default:
        raise UnsupportedError(f"{op}: {argument}={value!r}: {why}")


# --- values -------------------------------------------------------------------------------------------------------


def fp32(x, flush=False) -> np.ndarray:
    """A tensor's elements as float32, in its own shape (the memory itself, if it holds them); subnormals as 0 if
    `flush`. Raises UninitializedError."""
    x.check_written()
    values = x.array()
    values = values if values.dtype == np.float32 else values.astype(np.float32)
    return flushed(values) if flush else values


def flushed(values):
    return np.where(np.abs(values) < _TINY, np.float32(0), values)


def scalar(x, ndim):
    """A vector operand's value: float32, of shape [P, 1, ...] with `ndim` axes, or a float32."""
    if isinstance(x, NkiTensor):
        return fp32(x).reshape(x.shape[0], *(1,) * (ndim - 1))
    return np.float32(x)


def bits(x, width) -> np.ndarray:
    """An integer operand (or number) as its bit pattern: int64 of 0 to 2**width - 1."""
    values = x.read() if isinstance(x, NkiTensor) else np.int64(int(x))
    return values & ((1 << width) - 1)


def store(dst, values, flush=False, by=memory.WRITTEN):
    """Writes values of dst's shape, or of as many elements a partition."""
    if flush and values.dtype == np.float32:
        values = flushed(values)
    dst.write(values if values.shape == dst.shape else values.reshape(dst.shape), by)


def store_bits(dst, values):
    """Writes bit patterns into an integer tensor, cut to its width."""
    store(dst, values.astype(np.uint64).astype(dtypes.NUMPY[dst.dtype]))


def copy_bits(dst, src):
    """Writes src's elements as they are, of equal dtypes."""
    src.check_written()
    values = src.array()
    dst.array()[...] = values if src.shape == dst.shape else values.reshape(dst.shape)
    dst.state()[...] = memory.WRITTEN


def integers(op, *named):
    for name, x in named:
        if x.dtype not in dtypes.INTEGERS:
            raise DtypeError(
                f"{op}: {name} {x!r}: an operator on bits takes integers: .view() it as integers of its size"
            )


def same_width(op, *named):
    (_, first), *rest = named
    for name, x in rest:
        if dtypes.size(x.dtype) != dtypes.size(first.dtype):
            raise DtypeError(f"{op}: {name} {x!r}: bits are not cast, it must be as wide as {first.dtype}")


def kinds(op, *tables):
    """Whether the operators are all on bits (True) or all arithmetic (False). Raises EngineError."""
    if len(set(tables)) > 1:
        raise EngineError(f"{op}: op0 and op1 are one on bits and one arithmetic: both must be of one kind")
    return tables[0]


# --- facts for the cost table -------------------------------------------------------------------------------------


def _step(x):
    """Bytes between neighbours of the innermost axis that has more than one element."""
    return next((s for n, s in zip(x.shape[:0:-1], x.strides[:0:-1], strict=True) if n > 1), 1) * dtypes.size(x.dtype)


def packed(*tensors) -> bool:
    """Whether neighbours of the innermost axis lie side by side."""
    return all(_step(x) == dtypes.size(x.dtype) for x in tensors)


def narrow(*tensors) -> bool:
    """Whether all are bfloat16 or float16."""
    return all(x.dtype in dtypes.SIXTEEN_BIT for x in tensors)


def in_psum(*tensors) -> int:
    return sum(x.storage.space == "psum" for x in tensors)


def facts(dst, *reads) -> dict:
    """n (elements a partition), strided, dynamic, and shape and dtype for the trace."""
    tensors = (*reads, dst)
    found = {"n": max(x.free for x in tensors), "shape": dst.shape, "dtype": dst.dtype}
    if any(_step(x) > STRIDE for x in tensors):
        found["strided"] = True
    if any(x.dynamic for x in tensors):
        found["dynamic"] = True
    return found


def copy_mode(dst, src) -> int:
    """Elements a cycle of a copy on the vector engine."""
    if not narrow(dst, src):
        return 1
    near, side_by_side = not in_psum(dst, src), packed(dst, src)
    return 4 if near and side_by_side else 2 if near or (side_by_side and in_psum(dst, src) == 1) else 1
