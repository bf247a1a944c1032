"""The GpSimd engine: patterns over partition and position. It does not reach PSUM."""

import numpy as np

from ringtide.kernels.nki.simulator import alu, machine
from ringtide.kernels.nki.simulator.errors import DtypeError, ShapeError
from ringtide.kernels.nki.simulator.isa import checks


def _pattern(op, dst, pattern, offset, channel_multiplier) -> np.ndarray:
    """int64 [P, elements a partition]: offset + p * channel_multiplier + the sum of each step times its index."""
    pairs = [tuple(pair) for pair in pattern]
    if not 1 <= len(pairs) <= 4 or any(len(pair) != 2 for pair in pairs):
        raise ShapeError(f"{op}: pattern={pattern}: one to four pairs [step, count]")
    values = np.full((1,), int(offset), np.int64)
    for step, count in pairs:
        values = (values[:, None] + int(step) * np.arange(int(count), dtype=np.int64)).reshape(-1)
    if len(values) != dst.free:
        raise ShapeError(f"{op}: pattern={pattern} has {len(values)} elements, dst {dst!r} has {dst.free} a partition")
    rows = int(channel_multiplier) * np.arange(dst.shape[0], dtype=np.int64)
    return (rows[:, None] + values).astype(np.int32).astype(np.int64)


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
            filled = checks.dtypes.narrow(np.full(1, other), dst.dtype)
            checks.store(dst, np.where(chosen, kept, filled[0]).astype(kept.dtype))
        else:
            checks.store(dst, np.where(chosen, checks.fp32(on_true_tile).reshape(dst.shape), other))

    reads = (on_true_tile,)
    return machine.current().issue(
        op, "POOL", run, reads, (dst,), **checks.facts(dst, on_true_tile), operator=compare, name=name
    )
