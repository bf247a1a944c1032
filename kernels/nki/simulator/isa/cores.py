"""The two physical cores of a logical one: barriers, and tiles that they exchange."""

from ringtide.kernels.nki.simulator import dtypes, machine
from ringtide.kernels.nki.simulator.errors import BufferError, DtypeError, EngineError, HazardError, ShapeError
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.dma import moved
from ringtide.kernels.nki.simulator.isa.enums import SHORT, member
from ringtide.kernels.nki.simulator.tensor import NkiTensor


def _both(op):
    """The machine of this core. Raises HazardError if it has no other."""
    core = machine.current()
    if core.shared is None or core.cores != 2:
        raise HazardError(f"{op}: the kernel runs on one core: launch it as kernel[2]")
    return core


def core_barrier(data, cores, engine=enums.engine.gpsimd, name=None):
    """Neither core goes on before both are here; `data` in shared HBM is what it orders."""
    op = "core_barrier"
    core = _both(op)
    member(op, "engine", engine, (*SHORT, enums.engine.sync))
    if not isinstance(data, NkiTensor) or not data.storage.shared:
        raise BufferError(f"{op}: data {data!r}: it must be a tensor in nl.shared_hbm")
    if tuple(cores) != (0, 1):
        raise EngineError(f"{op}: cores={cores}: only (0, 1)")
    made = core.issue(op, SHORT.get(engine, "POOL"), lambda: None, fence=(data,), shape=data.shape, name=name)
    core.shared.barrier(core, data.storage)
    return made


def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=enums.dma_engine.dma, name=None):
    """dst = the other core's src; both cores give theirs. SBUF, of equal shape and dtype."""
    op = "sendrecv"
    core = _both(op)
    checks.tile(op, "src", src, checks.SBUF)
    checks.tile(op, "dst", dst, checks.SBUF)
    other = 1 - core.core
    if send_to_rank != other or recv_from_rank != other:
        raise EngineError(
            f"{op}: send_to_rank={send_to_rank}, recv_from_rank={recv_from_rank} on core {core.core}: {other}"
        )
    if src.dtype != dst.dtype:
        raise DtypeError(f"{op}: src {src!r} and dst {dst!r}: the same dtype in both")
    if src.shape != dst.shape:
        raise ShapeError(f"{op}: src {src!r} and dst {dst!r}: the same shape in both")
    member(op, "dma_engine", dma_engine, tuple(enums.dma_engine))
    if dma_engine is enums.dma_engine.gpsimd_dma and src.free > 256:
        raise ShapeError(f"{op}: src {src!r} with gpsimd_dma: at most 256 elements a partition, got {src.free}")
    src.check_written()
    got = core.shared.exchange(core, f"sendrecv {pipe_id}", (src.dtype, src.array().copy()))
    if got[0] != dst.dtype or got[1].shape != dst.shape:
        raise ShapeError(f"{op}: dst {dst!r}, the other core sends {got[0]}{list(got[1].shape)}: both must be alike")
    facts = moved(dst, src) | {"nbytes": src.size * dtypes.size(src.dtype)}
    return core.issue(op, "DMA", lambda: checks.store(dst, got[1]), (src,), (dst,), **facts, name=name)
