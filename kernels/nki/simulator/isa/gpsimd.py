"""The GpSimd engine: patterns over partition and position, gathers. It does not reach PSUM."""

import math
from functools import lru_cache

import numpy as np

from ringtide.kernels.nki.simulator import alu, dtypes, machine
from ringtide.kernels.nki.simulator.errors import DtypeError, OutOfBoundsError, ShapeError
from ringtide.kernels.nki.simulator.isa import checks
from ringtide.kernels.nki.simulator.isa.accumulators import reduced


def _pattern(op, dst, pattern, offset, channel_multiplier) -> np.ndarray:
    """int64 [P, elements a partition]: offset + p * channel_multiplier + the sum of each step times its index."""
    pairs = tuple((int(step), int(count)) for step, count in pattern)
    if not 1 <= len(pairs) <= 4:
        raise ShapeError(f"{op}: pattern={pattern}: one to four pairs [step, count]")
    n = math.prod(count for _, count in pairs)
    if n != dst.free:
        raise ShapeError(f"{op}: pattern={pattern} has {n} elements, dst {dst!r} has {dst.free} a partition")
    return _affine(dst.shape[0], pairs, int(offset), int(channel_multiplier))


@lru_cache(32)
def _affine(rows, pairs, offset, channel_multiplier):
    values = np.full(1, offset, np.int64)
    for step, count in pairs:
        values = (values[:, None] + step * np.arange(count)).reshape(-1)
    values = channel_multiplier * np.arange(rows)[:, None] + values
    return values.astype(np.int32).astype(np.int64)  # 32-bit arithmetic


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    """dst[p, i...] = offset + p * channel_multiplier + sum of step * i over the pairs [step, count] of pattern."""
    op = "iota"
    checks.tile(op, "dst", dst, checks.SBUF)
    values = _pattern(op, dst, pattern, offset, channel_multiplier)

    def run():
        checks.store(dst, values)

    return machine.current().issue(op, "POOL", run, (), (dst,), **checks.facts(dst), name=name)


def affine_select(
    dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=alu.equal, offset=0, name=None
):
    """dst = on_true_tile where (offset + p * channel_multiplier + sum of step * i) cmp_op 0, else on_false_value."""
    op = "affine_select"
    checks.tile(op, "dst", dst, checks.SBUF)
    checks.tile(op, "on_true_tile", on_true_tile, checks.SBUF)
    checks.alike(op, dst, ("on_true_tile", on_true_tile))
    compare = alu.name(cmp_op, (alu.COMPARE,), op, "cmp_op")
    if isinstance(on_false_value, bool) or not isinstance(on_false_value, int | float | np.number):
        raise DtypeError(f"{op}: on_false_value is {on_false_value!r}, it must be a number")
    chosen = alu.ARITHMETIC[compare](_pattern(op, dst, pattern, offset, channel_multiplier), 0).astype(bool)
    chosen = chosen.reshape(dst.shape)
    same = dst.dtype == on_true_tile.dtype
    other = np.float32(on_false_value)

    def run():
        if same:
            on_true_tile.check_written()
            kept = on_true_tile.array().reshape(dst.shape)
            filled = dtypes.narrow(np.full(1, other), dst.dtype)
            checks.store(dst, np.where(chosen, kept, filled[0]).astype(kept.dtype))
        else:
            checks.store(dst, np.where(chosen, checks.fp32(on_true_tile).reshape(dst.shape), other))

    reads = (on_true_tile,)
    return machine.current().issue(
        op, "POOL", run, reads, (dst,), **checks.facts(dst, on_true_tile), operator=compare, name=name
    )


def tensor_partition_reduce(dst, op, data, name=None):
    """dst [1, ...] = op over the partitions of data: add, average, maximum, bitwise_or, bitwise_and. Slow: a matmul
    with ones sums faster."""
    ins = "tensor_partition_reduce"
    checks.tile(ins, "dst", dst, checks.SBUF)
    checks.tile(ins, "data", data, checks.SBUF)
    operator = alu.name(op, (("add", "average", "maximum", "bitwise_or", "bitwise_and"),), ins)
    if dst.shape[0] != 1 or dst.free != data.free:
        raise ShapeError(f"{ins}: dst {dst!r}, it must have 1 partition and the {data.free} elements of data")
    if operator in alu.BITS:
        checks.integers(ins, ("data", data), ("dst", dst))
        checks.same_width(ins, ("data", data), ("dst", dst))
    core = machine.current()
    width = 8 * dtypes.size(data.dtype)

    def run():
        if operator in alu.BITS:
            checks.store_bits(dst, alu.REDUCE[operator].reduce(checks.bits(data, width), axis=0, keepdims=True))
        else:
            x = reduced("add" if operator == "average" else operator, checks.fp32(data), (0,), core.options.exact)
            checks.store(dst, x / np.float32(data.shape[0]) if operator == "average" else x)

    facts = checks.facts(dst, data) | {"partitions": data.shape[0]}
    return core.issue(ins, "POOL", run, (data,), (dst,), **facts, operator=operator, name=name)


def _indices(ins, argument, index, data, dtype):
    checks.tile(ins, argument, index, checks.SBUF)
    if index.dtype != dtype:
        raise DtypeError(f"{ins}: {argument} {index!r}: it must be {dtype}")
    if index.shape[0] != data.shape[0]:
        raise ShapeError(f"{ins}: {argument} {index!r} and data {data!r}: the same partitions in both")


def _inside(ins, at, data):
    if at.size and at.max() >= data.free:
        raise OutOfBoundsError(f"{ins}: index {at.max()} of {data!r}, which has {data.free} elements a partition")


def nc_n_gather(dst, data, indices, name=None):
    """dst[p, i] = data[p, indices[p, i]], rows flattened; indices are uint32 and inside."""
    ins = "nc_n_gather"
    checks.tile(ins, "dst", dst, checks.SBUF)
    checks.tile(ins, "data", data, checks.SBUF)
    _indices(ins, "indices", indices, data, "uint32")
    checks.alike(ins, dst, ("indices", indices))
    if dst.dtype != data.dtype:
        raise DtypeError(f"{ins}: dst {dst!r} and data {data!r}: the same dtype in both")
    p = data.shape[0]

    def run():
        at = indices.read().reshape(p, -1)
        _inside(ins, at, data)
        data.check_written()
        checks.store(dst, np.take_along_axis(data.array().reshape(p, -1), at, axis=1))

    reads = (data, indices)
    return machine.current().issue(ins, "POOL", run, reads, (dst,), **checks.facts(dst, data, indices), name=name)


def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    """In every 16 partitions: dst[:, i] = the num_elem_per_idx elements of src_buffer[:, from the i-th index on].

    index [P, n] of uint16 holds places in a partition; the i-th index is that of partition i % 16 and column i // 16.
    """
    ins = "local_gather"
    checks.tile(ins, "dst", dst, checks.SBUF)
    checks.tile(ins, "src_buffer", src_buffer, checks.SBUF)
    _indices(ins, "index", index, src_buffer, "uint16")
    p, each = src_buffer.shape[0], num_elem_per_idx
    if p % 16:
        raise ShapeError(f"{ins}: src_buffer {src_buffer!r}: partitions must be a multiple of 16")
    if each not in (1, 2, 4, 8, 16, 32):
        raise ShapeError(f"{ins}: num_elem_per_idx={each}: it must be 1, 2, 4, 8, 16 or 32")
    most = 16 * index.free
    valid = most if num_valid_indices is None else num_valid_indices
    if not 1 <= valid <= min(most, 4096):
        raise ShapeError(f"{ins}: {valid} indices: at least 1, at most those of index ({most}), and 4096")
    if dst.shape[0] != p or dst.free != valid * each or dst.dtype != src_buffer.dtype:
        raise ShapeError(f"{ins}: dst {dst!r}, it must be {src_buffer.dtype}[{p}, {valid * each}]")

    def run():
        flat = index.read().reshape(p // 16, 16, -1).transpose(0, 2, 1).reshape(p // 16, -1)[:, :valid]
        at = (flat[:, :, None] + np.arange(each)).reshape(p // 16, -1)
        _inside(ins, at, src_buffer)
        src_buffer.check_written()
        of = src_buffer.array().reshape(p, -1)
        checks.store(dst, np.take_along_axis(of, np.repeat(at, 16, axis=0), axis=1))

    facts = {"n": valid * each, "each": each, "bytes": dtypes.size(dst.dtype), "shape": dst.shape, "dtype": dst.dtype}
    return machine.current().issue(ins, "POOL", run, (src_buffer, index), (dst,), **facts, name=name)


def sequence_bounds(dst, segment_ids, name=None):
    """dst [1, 2, n] = where the segment of each element begins and ends (one past), of segment_ids [1, n]; segment 0 is
    padding and gets n and -1."""
    ins = "sequence_bounds"
    checks.tile(ins, "dst", dst, checks.SBUF)
    checks.tile(ins, "segment_ids", segment_ids, checks.SBUF)
    n = segment_ids.free
    if segment_ids.shape[0] != 1 or dst.shape[0] != 1 or dst.free != 2 * n:
        raise ShapeError(f"{ins}: segment_ids {segment_ids!r} is [1, n] and dst {dst!r} [1, 2, n]")
    for argument, x in (("segment_ids", segment_ids), ("dst", dst)):
        if x.dtype not in ("float32", "int32"):
            raise DtypeError(f"{ins}: {argument} {x!r}: it must be float32 or int32")

    def run():
        ids = segment_ids.read().reshape(-1)
        edges = np.flatnonzero(np.diff(ids)) + 1
        starts, ends = np.concatenate(([0], edges)), np.concatenate((edges, [n]))
        made = np.repeat(np.stack((starts, ends)), ends - starts, axis=1)
        made[:, ids == 0] = [[n], [-1]]
        checks.store(dst, made)

    facts = checks.facts(dst, segment_ids)
    return machine.current().issue(ins, "POOL", run, (segment_ids,), (dst,), **facts, name=name)


def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None):
    """On partitions 0, 16, 32, ...: dst [P, n + 1] = the places of src [P, n] that are not 0, plus index_offset, then
    padding_val, and last how many there are. The other partitions stay."""
    ins = "nonzero_with_count"
    checks.tile(ins, "dst", dst, checks.SBUF)
    checks.tile(ins, "src", src, checks.SBUF)
    if src.dtype not in ("float32", "int32") or dst.dtype != "int32":
        raise DtypeError(f"{ins}: src {src!r} must be float32 or int32, dst {dst!r} int32")
    if dst.shape[0] != src.shape[0] or dst.free != src.free + 1:
        raise ShapeError(f"{ins}: dst {dst!r}, it must be [{src.shape[0]}, {src.free + 1}]")

    def run():
        for p in range(0, src.shape[0], 16):
            src[p : p + 1].check_written()
            at = np.flatnonzero(src.array()[p])
            row = np.full(src.free + 1, padding_val, np.int32)
            row[: len(at)] = at + index_offset
            row[-1] = len(at)
            dst[p : p + 1].write(row.reshape(1, *dst.shape[1:]))

    return machine.current().issue(ins, "POOL", run, (src,), (dst,), **checks.facts(dst, src), name=name)
