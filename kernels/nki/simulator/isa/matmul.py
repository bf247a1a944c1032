"""The tensor engine: matmul and transpose."""

import numpy as np

from ringtide.kernels.nki.simulator import dtypes, machine, memory
from ringtide.kernels.nki.simulator.errors import (
    BankError,
    DtypeError,
    PsumHazardError,
    RangeError,
    ShapeError,
    UnsupportedError,
)
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.enums import matmul_perf_mode, member

_INPUTS = ("float8_e4m3", "float8_e5m2", "bfloat16", "float16", "tfloat32", "float32")
_FP32 = ("float32", "tfloat32")
_FP8 = ("float8_e4m3", "float8_e5m2")
_COLUMNS = 512


def _bank(op, dst):
    region, base = dst.region(), dst.storage.address[1] if dst.storage.address else 0
    low, high = base + region.low, base + region.high
    if low // memory.PSUM_BANK != (high - 1) // memory.PSUM_BANK:
        raise BankError(
            f"{op}: dst {dst!r} takes bytes {low} to {high} of a partition, "
            f"it must stay inside one bank of {memory.PSUM_BANK}: tile it"
        )


def _tiling(op, position, size, rows):
    """Row tiles of the array change nothing but which rows work."""
    if not position and not size:
        return
    if not (position and size):
        raise ShapeError(f"{op}: tile_position={position}, tile_size={size}: give both or none")
    (row, column), (high, wide) = position, size
    if column != 0 or wide != 128:
        raise UnsupportedError(
            f"{op}: tile_position={position}, tile_size={size}: tiling by columns is documented in contradicting ways: "
            f"start at column 0 with 128 columns"
        )
    if high not in (32, 64, 128) or row % high or row >= 128 or rows > high:
        raise ShapeError(
            f"{op}: tile_position={position}, tile_size={size} with {rows} rows: a row tile has 32, 64 or 128 rows, "
            f"starts at a multiple of them, and holds the operand"
        )


def _zero_one(op, argument, values):
    if not ((values == 0) | (values == 1)).all():
        raise RangeError(f"{op}: is_{argument}_onezero is set and {argument} holds other values: do not set it")


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=matmul_perf_mode.none,
    name=None,
):
    """dst [M, N] in PSUM = (or +=) stationary [K, M].T @ moving [K, N], both in SBUF; float32 sums.

    accumulate: False overwrites, True adds onto what a matmul wrote, None overwrites what was never written and adds to
    the rest. is_transpose: moving is an identity and dst, of stationary's dtype, its exact transpose.
    """
    op = "nc_matmul"
    checks.tile(op, "dst", dst, checks.PSUM)
    checks.tile(op, "stationary", stationary, checks.SBUF)
    checks.tile(op, "moving", moving, checks.SBUF)
    member(op, "perf_mode", perf_mode, tuple(matmul_perf_mode))
    member(op, "accumulate", accumulate, (None, False, True))
    accumulate = accumulate if accumulate is None else bool(accumulate)
    double = perf_mode is matmul_perf_mode.double_row
    k, m, n = stationary.shape[0], stationary.free, moving.free
    for argument, x in (("stationary", stationary), ("moving", moving)):
        if x.dtype not in (_FP8 if double else _INPUTS) and not is_transpose:
            raise DtypeError(f"{op}: {argument} {x!r}: not one of {', '.join(_FP8 if double else _INPUTS)}")
        if double and (len(x.shape) < 3 or x.shape[1] != 2):
            raise ShapeError(f"{op}: {argument} {x!r}: with double_row its first free axis has 2")
    if double:
        m, n = m // 2, n // 2
    if moving.shape[0] != k:
        raise ShapeError(f"{op}: stationary {stationary!r} and moving {moving!r}: both need the same partitions")
    if m > 128:
        raise ShapeError(f"{op}: stationary {stationary!r} has {m} columns, at most 128: tile it")
    if n > _COLUMNS:
        raise ShapeError(f"{op}: moving {moving!r} has {n} columns, at most {_COLUMNS}: tile it")
    if dst.shape[0] != m or dst.free != n:
        raise ShapeError(f"{op}: dst {dst!r}, the product of {stationary!r} and {moving!r} is [{m}, {n}]")
    if (stationary.dtype in _FP32) != (moving.dtype in _FP32) and not is_transpose:
        raise DtypeError(
            f"{op}: stationary {stationary.dtype} and moving {moving.dtype}: float32 only goes with float32"
        )
    _tiling(op, tuple(tile_position or ()), tuple(tile_size or ()), k)
    _bank(op, dst)
    if is_transpose and double:
        raise UnsupportedError(f"{op}: is_transpose does not go with double_row")
    if is_transpose:
        return _transpose(op, dst, stationary, moving, name, accumulate)
    if dst.dtype != "float32":
        raise DtypeError(f"{op}: dst {dst!r}: PSUM takes sums as float32 on Trainium2")
    core = machine.current()
    exact, flush = core.options.exact, core.options.flush

    def run():
        a, b = checks.fp32(stationary, flush), checks.fp32(moving, flush)
        if is_stationary_onezero:
            _zero_one(op, "stationary", a)
        if is_moving_onezero:
            _zero_one(op, "moving", b)
        a, b = a.reshape(-1, m), b.reshape(-1, n)
        with np.errstate(invalid="ignore", over="ignore"):
            product = a.astype(np.float64).T @ b.astype(np.float64) if exact else a.T @ b
        product = product.reshape(dst.shape)
        held = dst.state()
        if accumulate is not False:
            least, most = held.min(), held.max()
            if accumulate and least != memory.MATMUL:
                was = "never written" if least == memory.NEVER else "last written by something else than a matmul"
                raise PsumHazardError(
                    f"{op}: accumulate=True onto dst {dst!r}, part of which was {was}: start with accumulate=False"
                )
            other = held[..., 0] == memory.WRITTEN
            if dst.array()[other].any():  # onto zeros, as public kernels do, both readings of the rule agree
                raise PsumHazardError(
                    f"{op}: accumulate=None onto dst {dst!r}, part of which something else than a matmul wrote last, "
                    f"which is undefined on Trainium2: pass accumulate=False"
                )
            if most == memory.MATMUL:
                before = dst.array()
                onto = product + before
                product = onto if least == memory.MATMUL else np.where(held[..., 0] == memory.MATMUL, onto, product)
        dst.write(product.astype(np.float32), memory.MATMUL)

    reads = (stationary, moving) if accumulate is False else (stationary, moving, dst)
    return core.issue(
        op,
        "PE",
        run,
        reads,
        (dst,),
        stationary=m,
        moving=n,
        rows=k,
        fp32="float32" in (stationary.dtype, moving.dtype),
        onezero=(is_stationary_onezero and stationary.dtype == "float32")
        or (is_moving_onezero and moving.dtype == "float32"),
        fresh=accumulate is None and not (dst.state() == memory.MATMUL).any(),  # it overwrites, the first time
        dtype=stationary.dtype,
        shape=dst.shape,
        name=name,
    )


def _transpose(op, dst, data, identity, name, accumulate=None):
    if accumulate:
        raise UnsupportedError(f"{op}: is_transpose with accumulate=True: what it adds is not documented")
    k = data.shape[0]
    if dtypes.size(data.dtype) == 1:
        raise UnsupportedError(
            f"{op}: data {data!r}: of 8 bits it comes out in 16, which is not simulated: cast it first"
        )
    if dst.dtype != data.dtype:
        raise DtypeError(f"{op}: dst {dst!r}: a transpose keeps the dtype of its data, {data.dtype}")
    if identity is not None and identity.free != k:
        raise ShapeError(f"{op}: moving {identity!r}: with is_transpose it is the identity of {k}")

    def run():
        if identity is not None:
            eye = identity.read().reshape(k, k)
            if not np.array_equal(eye, np.eye(k)):
                raise RangeError(f"{op}: moving {identity!r}: with is_transpose it must hold the identity")
        if identity is not None and accumulate is None and (dst.state() != memory.NEVER).any():
            raise PsumHazardError(
                f"{op}: is_transpose with accumulate=None onto dst {dst!r}, which holds something: what it does is not "
                f"documented: pass accumulate=False"
            )
        data.check_written()
        dst.array()[...] = data.array().reshape(k, -1).T.reshape(dst.shape)
        dst.state()[...] = memory.MATMUL

    reads = (data,) if identity is None else (data, identity)
    fp32 = data.dtype in ("float32", "int32", "uint32")
    facts = dict(stationary=data.free, moving=k, fp32=fp32, dtype=data.dtype, shape=dst.shape, name=name)
    return machine.current().issue(op, "PE", run, reads, (dst,), transpose=True, **facts)


def nc_transpose(dst, data, engine=enums.engine.unknown, name=None):
    """dst [F, P] = data [P, F] transposed, bit by bit. Tensor engine: SBUF to PSUM, up to [128, 128]; vector: [32, 32].

    Left to choose, the vector engine takes what fits it, unless it comes from SBUF and goes to PSUM.
    """
    op, which = "nc_transpose", enums.engine
    checks.tile(op, "dst", dst)
    checks.tile(op, "data", data)
    member(op, "engine", engine, (which.unknown, which.tensor, which.vector))
    p, f = data.shape[0], data.free
    if dst.shape[0] != f or dst.free != p:
        raise ShapeError(f"{op}: dst {dst!r}, the transpose of {data!r} is [{f}, {p}]")
    if dst.dtype != data.dtype:
        raise DtypeError(f"{op}: dst {dst!r} has another dtype than data {data!r}: it must be the same")
    through = data.storage.space == "sbuf" and dst.storage.space == "psum"
    if engine is which.unknown:
        engine = which.tensor if through else which.vector
    if engine is which.tensor:
        checks.tile(op, "data (on the tensor engine)", data, checks.SBUF)
        checks.tile(op, "dst (of the tensor engine)", dst, checks.PSUM)
        if max(p, f) > 128:
            raise ShapeError(f"{op}: data {data!r}: the tensor engine transposes up to [128, 128]: tile it")
        _bank(op, dst)
        return _transpose(op, dst, data, None, name)
    if max(p, f) > 32:
        raise ShapeError(
            f"{op}: data {data!r}: the vector engine transposes up to [32, 32]: use PSUM and engine.tensor"
        )

    def run():
        data.check_written()
        dst.array()[...] = data.array().reshape(p, f).T.reshape(dst.shape)
        dst.state()[...] = memory.WRITTEN

    return machine.current().issue(op, "DVE", run, (data,), (dst,), **checks.facts(dst, data), name=name)
