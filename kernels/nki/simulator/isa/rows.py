"""The vector engine's instructions on whole rows: reductions on the side, selections, statistics, the largest 8."""

import numpy as np

from ringtide.kernels.nki.simulator import alu, dtypes, machine, memory
from ringtide.kernels.nki.simulator.errors import DtypeError, EngineError, PartitionError, ShapeError, UnsupportedError
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.accumulators import Accumulators
from ringtide.kernels.nki.simulator.isa.vector import apply, stage
from ringtide.kernels.nki.simulator.tensor import NkiTensor

_REDUCES = ("add", "multiply", "maximum", "minimum")
_FP32_MIN = np.finfo(np.float32).min
_EIGHT, _LONGEST = 8, 16384


def _loaded(ins, argument, value, cmd, data):
    """The tensors that the operand of load_reduce reads; it goes with nothing else."""
    load = cmd is enums.reduce_cmd.load_reduce
    if load != (value is not None):
        raise EngineError(
            f"{ins}: {argument}={value!r} with {cmd}: it goes with reduce_cmd.load_reduce, which needs it"
        )
    return checks.vector(ins, argument, value, data) if load else ()


def tensor_scalar_reduce(
    dst,
    data,
    op0,
    operand0,
    reduce_op,
    reduce_res=None,
    reverse0=False,
    reduce_cmd=enums.reduce_cmd.reset_reduce,
    reduce_init=None,
    reduce_res_negate=False,
    name=None,
):
    """dst = data op0 operand0; reduce_res [P, 1] = reduce_op over each row of it, before rounding to dst's dtype.

    reduce_cmd: reset_reduce starts anew, reduce goes on with the engine's registers, load_reduce starts at reduce_init.
    """
    ins = "tensor_scalar_reduce"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "data", data)
    checks.alike(ins, dst, ("data", data))
    if reverse0:
        raise UnsupportedError(f"{ins}: reverse0: documented as not supported yet")
    first, reads = stage(ins, 0, op0, operand0, data, bits_too=False)
    operator = alu.name(reduce_op, (_REDUCES,), ins, "reduce_op")
    reads += _loaded(ins, "reduce_init", reduce_init, reduce_cmd, data)
    rows = Accumulators(ins, "DVE", data, reduce_cmd, reduce_res, idle=False)
    core = machine.current()
    flush = core.options.flush

    def run():
        with np.errstate(**checks.QUIET):
            x = apply(first, checks.fp32(data, flush), operand0, False)
            checks.store(dst, x, flush)
            rows.reduce(operator, x, reduce_init, reduce_res_negate)

    reads, writes = (data, *reads, *rows.reads), (dst, *rows.writes)
    return core.issue(
        ins, "DVE", run, reads, writes, **checks.facts(dst, data), operator=f"{first}/{operator}", name=name
    )


def tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None, reduce_cmd=enums.reduce_cmd.reset_reduce, name=None):
    """dst[:, i] = state = (src[:, i] op0 imm0) op1 state. reduce_cmd: where the state starts (load_reduce: at imm1)."""
    ins = "tensor_scalar_cumulative"
    for argument, x in (("dst", dst), ("src", src)):
        checks.tile(ins, argument, x)
        if x.dtype in ("int32", "uint32"):
            raise DtypeError(f"{ins}: {argument} {x!r}: it takes integers of up to 16 bits: cast it")
    checks.alike(ins, dst, ("src", src))
    first, reads = stage(ins, 0, op0, imm0, src, bits_too=False, argument="imm0")
    operator = alu.name(op1, ((*_REDUCES, "subtract"),), ins, "op1")
    reads += _loaded(ins, "imm1", imm1, reduce_cmd, src)
    state = Accumulators(ins, "DVE", src, reduce_cmd, None, idle=False)
    core = machine.current()
    flush, p = core.options.flush, src.shape[0]

    def run():
        with np.errstate(**checks.QUIET):
            x = apply(first, checks.fp32(src, flush), imm0, False).reshape(p, -1)
            begin = state.start(operator, imm1)
            if operator == "subtract":  # x - state: the sign of the state turns each time
                made, last = np.empty_like(x), begin[:, 0]
                for i in range(x.shape[1]):
                    made[:, i] = last = x[:, i] - last
            else:
                made = alu.REDUCE[operator].accumulate(np.concatenate((begin, x), axis=1), axis=1)[:, 1:]
        state.put(made[:, -1:])
        checks.store(dst, made, flush)

    reads, writes = (src, *reads, *state.reads), (dst, *state.writes)
    return core.issue(
        ins, "DVE", run, reads, writes, **checks.facts(dst, src), operator=f"{first}/{operator}", name=name
    )


# --- selections ---------------------------------------------------------------------------------------------------


def _predicate(ins, predicate, allowed):
    if predicate.dtype not in (*allowed, "bool"):
        raise DtypeError(f"{ins}: predicate {predicate!r}: it must be one of {', '.join(allowed)}")


def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    """dst = src (of dst's dtype, or a number) where predicate is not 0 (with reverse_pred: is 0); else dst stays."""
    ins = "tensor_copy_predicated"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "predicate", predicate)
    _predicate(ins, predicate, ("uint8", "uint16", "uint32"))
    checks.alike(ins, dst, ("predicate", predicate))
    tensor = isinstance(src, NkiTensor)
    if tensor:
        checks.tile(ins, "src", src)
        checks.alike(ins, dst, ("src", src))
        checks.not_both_psum(ins, "src", src, "predicate", predicate)
        if src.dtype != dst.dtype:
            raise DtypeError(f"{ins}: src {src!r} and dst {dst!r}: the same dtype in both: cast first")
    elif checks.vector(ins, "src", src, dst):
        raise ShapeError(f"{ins}: src {src!r}")

    def run():
        predicate.check_written()
        chosen = ((predicate.array() != 0) ^ bool(reverse_pred)).reshape(dst.shape)
        if tensor:
            src.check_written()
            values = src.array().reshape(dst.shape)[chosen]
        else:
            values = dtypes.narrow(np.full(1, src), dst.dtype)[0]
        dst.array()[chosen] = values
        dst.state()[chosen] = memory.WRITTEN

    reads = (src, predicate) if tensor else (predicate,)
    facts = checks.facts(dst, *reads) | {"light": bool(checks.in_psum(*reads))}
    return machine.current().issue(ins, "DVE", run, reads, (dst,), **facts, name=name)


def select_reduce(
    dst,
    predicate,
    on_true,
    on_false,
    reduce_res=None,
    reduce_cmd=enums.reduce_cmd.idle,
    reduce_op=alu.maximum,
    reverse_pred=False,
    name=None,
):
    """dst = on_true where predicate is not 0 (with reverse_pred: is 0), else on_false, a number or float32 [P, 1].

    With reduce_cmd reset_reduce (or reduce, to go on) reduce_res [P, 1] = the greatest of each row.
    """
    ins = "select_reduce"
    for argument, x in (("dst", dst), ("predicate", predicate), ("on_true", on_true)):
        checks.tile(ins, argument, x)
    checks.alike(ins, dst, ("predicate", predicate), ("on_true", on_true))
    checks.not_both_psum(ins, "on_true", on_true, "predicate", predicate)
    _predicate(ins, predicate, ("int8", "uint8", "int16", "uint16"))
    if on_true.dtype in ("tfloat32", "int32", "uint32"):
        raise DtypeError(f"{ins}: on_true {on_true!r}: any dtype but tfloat32, int32 and uint32")
    more = checks.vector(ins, "on_false", on_false, on_true)
    alu.name(reduce_op, (("maximum",),), ins, "reduce_op")
    if reduce_cmd is enums.reduce_cmd.load_reduce:
        raise EngineError(f"{ins}: reduce_cmd.load_reduce: it has no operand to load: use reset_reduce")
    rows = Accumulators(ins, "DVE", on_true, reduce_cmd, reduce_res)
    if reduce_res is not None and reduce_res.dtype not in dtypes.FLOATS:
        raise DtypeError(f"{ins}: reduce_res {reduce_res!r}: it must be of floats")
    core = machine.current()
    flush = core.options.flush

    def run():
        predicate.check_written()
        x = checks.fp32(on_true, flush)
        chosen = ((predicate.array() != 0) ^ bool(reverse_pred)).reshape(x.shape)
        x = np.where(chosen, x, checks.scalar(on_false, x.ndim))
        checks.store(dst, x, flush)
        rows.reduce("maximum", x)

    reads, writes = (on_true, predicate, *more, *rows.reads), (dst, *rows.writes)
    facts = checks.facts(dst, on_true, predicate) | {"light": bool(checks.in_psum(on_true, predicate))}
    return core.issue(ins, "DVE", run, reads, writes, **facts, name=name)


def range_select(
    dst,
    on_true_tile,
    comp_op0,
    comp_op1,
    bound0,
    bound1,
    reduce_cmd=enums.reduce_cmd.reset_reduce,
    reduce_res=None,
    reduce_op=alu.maximum,
    range_start=0,
    on_false_value=_FP32_MIN,
    name=None,
):
    """dst = on_true_tile where j comp_op0 bound0 and j comp_op1 bound1, else the least float32; j is range_start plus
    the place in the row. reduce_res [P, 1] = the greatest of each row. Bounds: float32 [P, 1]."""
    ins = "range_select"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "on_true_tile", on_true_tile)
    checks.alike(ins, dst, ("on_true_tile", on_true_tile))
    if on_true_tile.dtype not in dtypes.FLOATS:
        raise DtypeError(f"{ins}: on_true_tile {on_true_tile!r}: it must be of floats")
    names = ("equal", "less", "less_equal", "greater", "greater_equal")
    compares = [alu.ARITHMETIC[alu.name(op, (names,), ins, f"comp_op{i}")] for i, op in enumerate((comp_op0, comp_op1))]
    for i, bound in enumerate((bound0, bound1)):
        if not checks.vector(ins, f"bound{i}", bound, on_true_tile):
            raise ShapeError(f"{ins}: bound{i}={bound!r}: it must be a float32 [{dst.shape[0]}, 1] tensor")
    if np.float32(on_false_value) != _FP32_MIN:
        raise EngineError(f"{ins}: on_false_value={on_false_value!r}: the engine has {_FP32_MIN} only")
    if isinstance(range_start, bool) or not isinstance(range_start, int | np.integer):
        raise ShapeError(f"{ins}: range_start={range_start!r}: it must be an int known to the compiler")
    if max(abs(range_start), abs(range_start + dst.free)) > 2**24:
        raise ShapeError(f"{ins}: range_start={range_start}: positions must stay within 2**24, they are float32")
    alu.name(reduce_op, (("maximum",),), ins, "reduce_op")
    if reduce_cmd is enums.reduce_cmd.load_reduce:
        raise EngineError(f"{ins}: reduce_cmd.load_reduce: it has no operand to load: use reset_reduce")
    rows = Accumulators(ins, "DVE", on_true_tile, reduce_cmd, reduce_res)
    position = (range_start + np.arange(dst.free)).astype(np.float32)
    core = machine.current()
    flush = core.options.flush

    def run():
        x = checks.fp32(on_true_tile, flush).reshape(dst.shape[0], -1)
        inside = [f(position, checks.scalar(b, 2)) for f, b in zip(compares, (bound0, bound1), strict=True)]
        x = np.where((inside[0] != 0) & (inside[1] != 0), x, _FP32_MIN)
        checks.store(dst, x, flush)
        rows.reduce("maximum", x)

    reads, writes = (on_true_tile, bound0, bound1, *rows.reads), (dst, *rows.writes)
    return core.issue(ins, "DVE", run, reads, writes, **checks.facts(dst, on_true_tile), name=name)


def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    """In every 32 partitions, dst[i] = src[shuffle_mask[i]]; where the mask is 255 dst stays."""
    ins = "nc_stream_shuffle"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "src", src)
    mask = [int(i) for i in shuffle_mask]
    if len(mask) != 32 or not all(0 <= i < 32 or i == 255 for i in mask):
        raise ShapeError(f"{ins}: shuffle_mask={shuffle_mask}: 32 integers of 0 to 31, or 255 to leave a partition")
    if dst.dtype != src.dtype:
        raise DtypeError(f"{ins}: src {src!r} and dst {dst!r}: the same dtype in both: cast first")
    if dst.free != src.free:
        raise ShapeError(f"{ins}: src {src!r} and dst {dst!r}: as many elements a partition in both")
    active = -(-max(src.shape[0], dst.shape[0]) // 32) * 32
    for argument, x in (("src", src), ("dst", dst)):
        first = x.partitions()[0]
        if first % 32 or (active > 32 and first not in ((0, 64) if active == 64 else (0,))):
            raise PartitionError(
                f"{ins}: {argument} {x!r} starts at partition {first}, not allowed with {active} active"
            )
    to = [p for p in range(dst.shape[0]) if mask[p % 32] != 255]
    of = [p // 32 * 32 + mask[p % 32] for p in to]
    if of and max(of) >= src.shape[0]:
        raise ShapeError(f"{ins}: shuffle_mask takes partition {max(of)} of src {src!r}: give src all that it takes")

    def run():
        src.check_written()
        dst.array()[to] = src.array().reshape(src.shape[0], *dst.shape[1:])[of]
        dst.state()[to] = memory.WRITTEN

    return machine.current().issue(ins, "DVE", run, (src,), (dst,), **checks.facts(dst, src), name=name)


# --- statistics, and the largest eight ----------------------------------------------------------------------------


def bn_stats(dst, data, name=None):
    """dst [P, 6] = count, mean and count times variance of the elements at even places of a row, then at odd ones."""
    ins = "bn_stats"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "data", data)
    if data.free > 512:
        raise ShapeError(f"{ins}: data {data!r}: at most 512 elements a partition: tile it")
    _columns(ins, dst, data, 6)

    def run():
        x = checks.fp32(data).reshape(data.shape[0], -1)
        made = np.zeros((len(x), 6), np.float32)
        for at in (0, 1):
            part = x[:, at::2]
            if part.shape[1]:
                mean = part.mean(axis=1, dtype=np.float32)
                spread = np.square(part - mean[:, None]).sum(axis=1, dtype=np.float32)
                made[:, 3 * at : 3 * at + 3] = np.stack((np.full_like(mean, part.shape[1]), mean, spread), axis=1)
        checks.store(dst, made)

    return machine.current().issue(ins, "DVE", run, (data,), (dst,), **checks.facts(dst, data), name=name)


def bn_aggr(dst, data, name=None):
    """dst [P, 2] = mean and variance, from data [P, 3 n] of (count, mean, count times variance)."""
    ins = "bn_aggr"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "data", data)
    if data.free % 3:
        raise ShapeError(f"{ins}: data {data!r}: elements a partition must be a multiple of three")
    _columns(ins, dst, data, 2)

    def run():
        count, mean, spread = np.moveaxis(checks.fp32(data).reshape(data.shape[0], -1, 3), 2, 0)
        total = count.sum(axis=1)
        middle = (count * mean).sum(axis=1) / total
        variance = (spread + count * np.square(mean - middle[:, None])).sum(axis=1) / total
        checks.store(dst, np.stack((middle, variance), axis=1))

    return machine.current().issue(ins, "DVE", run, (data,), (dst,), **checks.facts(dst, data), name=name)


def _columns(ins, dst, data, n):
    if dst.shape[0] != data.shape[0] or dst.free != n:
        raise ShapeError(f"{ins}: dst {dst!r}, it must be [{data.shape[0]}, {n}]")


def _eight(ins, data, *named):
    checks.tile(ins, "data", data)
    if not _EIGHT <= data.free <= _LONGEST:
        raise ShapeError(f"{ins}: {data!r}: it takes {_EIGHT} to {_LONGEST} elements a partition")
    for argument, x in named:
        checks.tile(ins, argument, x)
        if x.shape[0] != data.shape[0] or x.free != _EIGHT:
            raise ShapeError(f"{ins}: {argument} {x!r}, it must be [{data.shape[0]}, {_EIGHT}]")


def max8(dst, src, name=None):
    """dst [P, 8] = the eight largest of each row, from the largest down."""
    ins = "max8"
    _eight(ins, src, ("dst", dst))

    def run():
        x = checks.fp32(src).reshape(src.shape[0], -1)
        checks.store(dst, np.sort(x, axis=1)[:, : -_EIGHT - 1 : -1])

    return machine.current().issue(ins, "DVE", run, (src,), (dst,), **checks.facts(dst, src), name=name)


def _matches(x, values, order):
    """int64 [P, 8]: the first place of each value in its row that no value before (in `order`) took, or -1."""
    free, places = np.ones(x.shape, bool), np.full(values.shape, -1, np.int64)
    rows = np.arange(len(x))
    for i in order:
        hits = (x == values[:, i : i + 1]) & free
        found = hits.any(axis=1)
        at = hits.argmax(axis=1)
        places[found, i] = at[found]
        free[rows[found], at[found]] = False
    return places


def nc_find_index8(dst, data, vals, name=None):
    """dst [P, 8] of uint16 or uint32 = where each of vals [P, 8] first is in its row of data; all ones if it is not.

    Of equal values each takes the next place; those left over count as not there.
    """
    ins = "nc_find_index8"
    _eight(ins, data, ("dst", dst), ("vals", vals))
    if dst.dtype not in ("uint16", "uint32"):
        raise DtypeError(f"{ins}: dst {dst!r}: it must be uint16 or uint32")

    def run():
        x, y = (checks.fp32(v).reshape(v.shape[0], -1) for v in (data, vals))
        checks.store(dst, _matches(x, y, range(_EIGHT)).astype(dtypes.NUMPY[dst.dtype]))

    return machine.current().issue(ins, "DVE", run, (data, vals), (dst,), **checks.facts(dst, data), name=name)


def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    """dst = data with the first place of each of vals [P, 8] set to imm; dst_idx [P, 8] = these places.

    Of equal values the last takes the first place. A value that is not in its row is UnsupportedError if its place is
    asked for.
    """
    ins = "nc_match_replace8"
    _eight(ins, data, ("vals", vals), *((("dst_idx", dst_idx),) if dst_idx is not None else ()))
    checks.tile(ins, "dst", dst)
    checks.alike(ins, dst, ("data", data))
    if checks.vector(ins, "imm", imm, data):
        raise ShapeError(f"{ins}: imm {imm!r}: it must be a number")

    def run():
        x, y = (checks.fp32(v).reshape(v.shape[0], -1) for v in (data, vals))
        places = _matches(x, y, range(_EIGHT - 1, -1, -1))
        if dst_idx is not None:
            if (places < 0).any():
                raise UnsupportedError(f"{ins}: a value of vals {vals!r} is not in data: its index is not documented")
            checks.store(dst_idx, places)
        rows, columns = np.nonzero(places >= 0)
        x = x.copy()
        x[rows, places[rows, columns]] = imm
        checks.store(dst, x)

    writes = (dst,) if dst_idx is None else (dst, dst_idx)
    return machine.current().issue(ins, "DVE", run, (data, vals), writes, **checks.facts(dst, data), name=name)
