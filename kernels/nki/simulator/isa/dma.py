"""The DMA engines: between HBM and SBUF, never PSUM."""

from ringtide.kernels.nki.simulator import dtypes, machine
from ringtide.kernels.nki.simulator.errors import BufferError, DtypeError, EngineError, ShapeError
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.enums import member
from ringtide.kernels.nki.simulator.tensor import NkiTensor


def _end(op, argument, x):
    if not isinstance(x, NkiTensor):
        raise ShapeError(f"{op}: {argument} is {type(x).__name__} {x!r}, it must be a tensor")
    if x.storage.space == "psum":
        raise BufferError(f"{op}: {argument} {x!r}: DMA does not reach PSUM: tensor_copy to SBUF first")
    return x


def _options(op, priority, oob, dge):
    checks.unsupported(op, "priority", priority, None, "needs Trainium4")
    member(op, "oob_mode", oob, tuple(enums.oob_mode))
    member(op, "dge_mode", dge, tuple(enums.dge_mode))


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
    _options(op, priority, oob_mode, dge_mode)
    member(op, "engine", engine, (which.unknown, which.sync, which.scalar))
    if engine is not which.unknown and dge_mode != enums.dge_mode.hwdge:
        raise EngineError(f"{op}: engine={engine} goes with dge_mode.hwdge only, got {dge_mode}")
    if dge_mode == enums.dge_mode.hwdge and dst.dtype != src.dtype:
        raise DtypeError(f"{op}: {src.dtype} to {dst.dtype} with dge_mode.hwdge, which does not cast: leave it out")
    if dst.size != src.size:
        raise ShapeError(f"{op}: dst {dst!r} and src {src!r}: as many elements in both, got {dst.size} and {src.size}")
    same = dst.dtype == src.dtype

    def run():
        if same:
            checks.copy_bits(dst, src)
        else:
            checks.store(dst, checks.fp32(src))

    return machine.current().issue(op, "DMA", run, (src,), (dst,), **moved(dst, src), name=name)
