"""The DMA engines: between HBM and SBUF, never PSUM."""

from ringtide.kernels.nki.simulator import alu, dtypes, machine
from ringtide.kernels.nki.simulator.cost import DMA_TRANSPOSE
from ringtide.kernels.nki.simulator.errors import (
    BufferError,
    DtypeError,
    EngineError,
    HazardError,
    ShapeError,
    UnsupportedError,
)
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.enums import member
from ringtide.kernels.nki.simulator.tensor import NkiTensor

_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}  # of a transpose, by rank


def _end(op, argument, x):
    if not isinstance(x, NkiTensor):
        raise ShapeError(f"{op}: {argument} is {type(x).__name__} {x!r}, it must be a tensor")
    if x.storage.space == "psum":
        raise BufferError(f"{op}: {argument} {x!r}: DMA does not reach PSUM: tensor_copy to SBUF first")
    return x


def _options(op, priority, oob, dge):
    """dge as a member of the enum, all checked."""
    checks.unsupported(op, "priority", priority, None, "needs Trainium4")
    member(op, "oob_mode", oob, tuple(enums.oob_mode))
    return enums.dge_mode(member(op, "dge_mode", dge, tuple(enums.dge_mode)))


def row(x) -> int:
    """Bytes that lie one after another: in HBM anywhere, on chip within a partition."""
    length, axes = 1, list(zip(x.shape, x.strides, strict=True))
    for n, step in reversed(axes[1:] if x.on_chip else axes):
        if n > 1 and step != length:
            break
        length *= n
    return length * dtypes.size(x.dtype)


def moved(dst, *srcs) -> dict:
    """Facts for the price of a transfer."""
    nbytes = max(x.size * dtypes.size(x.dtype) for x in (dst, *srcs))
    return {"nbytes": nbytes, "row": min(row(x) for x in (dst, *srcs)), "shape": dst.shape, "dtype": dst.dtype}


def dma_copy(
    dst,
    src,
    priority=None,
    oob_mode=enums.oob_mode.error,
    dge_mode=enums.dge_mode.unknown,
    engine=enums.engine.unknown,
    name=None,
):
    """dst = src in HBM or SBUF, of as many elements; equal dtypes bit by bit, others through float32."""
    op, which = "dma_copy", enums.engine
    _end(op, "dst", dst)
    _end(op, "src", src)
    dge_mode = _options(op, priority, oob_mode, dge_mode)
    member(op, "engine", engine, (which.unknown, which.sync, which.scalar))
    if engine is not which.unknown and dge_mode != enums.dge_mode.hwdge:
        raise EngineError(f"{op}: engine={engine} goes with dge_mode.hwdge only, got {dge_mode}")
    if dge_mode == enums.dge_mode.hwdge and dst.dtype != src.dtype:
        raise DtypeError(f"{op}: {src.dtype} to {dst.dtype} with dge_mode.hwdge, which does not cast: leave it out")
    if dst.size != src.size:
        raise ShapeError(f"{op}: dst {dst!r} and src {src!r}: as many elements in both, got {dst.size} and {src.size}")
    alike = (dst.shape, dst.strides, dst.offset) == (src.shape, src.strides, src.offset)
    if dst.storage is src.storage and not alike and dst.region().overlaps(src.region()):
        raise HazardError(f"{op}: dst {dst!r} overlaps src, and what is read first is not known: through another tile")
    same = dst.dtype == src.dtype

    def run():
        if same:
            checks.copy_bits(dst, src)
        else:
            checks.store(dst, checks.fp32(src))

    return machine.current().issue(op, "DMA", run, (src,), (dst,), **moved(dst, src), name=name)


def dma_transpose(
    dst,
    src,
    axes=None,
    priority=None,
    dge_mode=enums.dge_mode.unknown,
    oob_mode=enums.oob_mode.error,
    name=None,
):
    """dst in SBUF = src, in HBM or SBUF, with axes (1, 0), (2, 1, 0) or (3, 1, 2, 0) by its rank; 2 or 4 bytes each."""
    op = "dma_transpose"
    checks.tile(op, "dst", dst, checks.SBUF)
    _end(op, "src", src)
    dge_mode = _options(op, priority, oob_mode, dge_mode)
    modes = enums.dge_mode
    if dge_mode not in (modes.unknown, modes.hwdge):
        raise EngineError(f"{op}: {dge_mode}: unknown or hwdge; others are for indirect transposes, not simulated")
    if oob_mode is not enums.oob_mode.error:
        raise EngineError(f"{op}: {oob_mode} goes with an indirect src only")
    order = _AXES.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise ShapeError(f"{op}: axes={axes} of src {src!r}: it takes {', '.join(map(str, _AXES.values()))}")
    if dst.dtype != src.dtype or dtypes.size(src.dtype) not in (2, 4):
        raise DtypeError(f"{op}: src {src!r} and dst {dst!r}: the same dtype of 2 or 4 bytes in both")
    if dst.shape != tuple(src.shape[axis] for axis in order):
        raise ShapeError(f"{op}: dst {dst!r}, the transpose is {[src.shape[axis] for axis in order]}")
    if dge_mode is modes.hwdge:
        first, few = src.shape[0], src.shape[0] == 16 if src.ndim == 2 else src.shape[0] in (1, 2, 4, 8, 16)
        if (
            not few
            or (src.ndim > 2 and first * src.shape[-2] % 16)
            or src.shape[-1] > 128
            or dtypes.size(src.dtype) > 2
        ):
            raise ShapeError(
                f"{op}: src {src!r} with dge_mode.hwdge: 16 rows (of 3 or 4 axes: 1 to 16, and a multiple of 16 with "
                f"the next to last), the last axis up to 128, 2 bytes: leave dge_mode out"
            )

    def run():
        src.check_written()
        checks.store(dst, src.array().transpose(order))

    nbytes = src.size * dtypes.size(src.dtype)
    facts = {"nbytes": nbytes, "row": row(src), "share": DMA_TRANSPOSE[src.storage.space]}
    return machine.current().issue(op, "DMA", run, (src,), (dst,), **facts, shape=dst.shape, dtype=dst.dtype, name=name)


def dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=enums.oob_mode.error, name=None):
    """dst = the sum of srcs, 1 to 16 tensors of as many elements in HBM or SBUF, in float32."""
    op = "dma_compute"
    _end(op, "dst", dst)
    if not isinstance(srcs, list | tuple) or not 1 <= len(srcs) <= 16:
        raise ShapeError(f"{op}: srcs must be a list of 1 to 16 tensors, got {srcs!r}")
    for i, x in enumerate(srcs):
        if _end(op, f"srcs[{i}]", x).size != dst.size:
            raise ShapeError(f"{op}: srcs[{i}] {x!r} and dst {dst!r}: as many elements in both")
    alu.name(reduce_op, (("add",),), op, "reduce_op")
    if scales is not None and (len(scales) != len(srcs) or any(scale != 1.0 for scale in scales)):
        raise UnsupportedError(f"{op}: scales={scales}: documented as 1.0 for each source only")
    if unique_indices is not True:
        raise UnsupportedError(f"{op}: unique_indices={unique_indices}: documented as True only")
    member(op, "oob_mode", oob_mode, tuple(enums.oob_mode))

    def run():
        total = checks.fp32(srcs[0]).reshape(dst.shape).copy()
        for x in srcs[1:]:
            total += checks.fp32(x).reshape(dst.shape)
        checks.store(dst, total)

    facts = moved(dst, *srcs) | {"nbytes": sum(x.size * dtypes.size(x.dtype) for x in srcs)}
    return machine.current().issue(op, "DMA", run, tuple(srcs), (dst,), **facts, name=name)
