"""What the splash kernels share: a call cut into tiles, and the arithmetic that says which of them to visit.

A tile is a query block against a key block. A query block is `stack` query heads of one kv head at the same `span`
positions, as `stack * span` rows of one matrix product: K and V are read once for all of them, and the diagonal of a
causal mask crosses fewer columns. A key block is `keys` keys in a row, cut into chunks.

    q   [B, T, N, H]     ->  [B * stacks, q blocks, stack * span, H]       stacks = N / stack
    k   [B, S, N_kv, H]  ->  [B * N_kv, S, H]

Which tiles hold something visible, and which are visible throughout, follows from the least and the greatest position
and segment id of a block (`Mask.block`). Without given positions these are arithmetic on the block's index; with given
ones they are two ints a block in scalar memory. So is, for each block of the outer loop, the range of inner blocks that
it visits. Nothing in scalar memory grows with T * S, nor does what is traced; the ranges are found on the device, by a
reduction over pairs of blocks.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.masks import Interval, same_segment, same_segment_block

LANES = 128
LOG2E = math.log2(math.e)
INTERPRET = "interpret"  # in place of a chip's name: the kernel runs elsewhere


class Tiles(NamedTuple):
    """The sizes of a kernel's tiles. All but rows are multiples of 128, and each divides the one before it."""

    rows: int  # of a query block, over all heads in its stack
    keys: int  # of a key block: what one DMA brings
    chunk: int  # keys that are tested, masked or skipped together where a block is not visible throughout
    piece: int  # keys of one matrix product where it is
    fold: bool = False  # subtractions go into products whose contraction half fills a 256-wide matrix unit: `with_ones`


class Ranges(NamedTuple):
    """(least, greatest) position and segment id of a block. Segment None: there is one."""

    position: Any
    segment: Any = None


class Cut:
    """A call cut into tiles: its static sizes, its arrays in blocks, and its schedule."""

    def __init__(self, q, k, v, where, mask, tiles, cores=1):
        (self.b, self.t, self.n, self.h), self.s, self.n_kv, self.h_v = q.shape, k.shape[1], k.shape[2], v.shape[3]
        self.mask, self.given = mask, where.q_pos is not None or where.k_pos is not None
        self.segments = where.q_seg is not None
        short_t, short_s = up(self.t, LANES), up(self.s, LANES)
        self.chunk = min(tiles.chunk, short_s)
        self.keys = min(tiles.keys, up(short_s, self.chunk))
        self.piece, self.fold = min(tiles.piece, self.keys), tiles.fold
        self.stack = _stack(self.n // self.n_kv, self.b * self.n_kv, tiles.rows // min(256, short_t), cores)
        self.span = min(max(tiles.rows // self.stack // LANES, 1) * LANES, short_t)
        self.rows, self.stacks = self.stack * self.span, self.n // self.stack
        self.nq, self.nk = -(-self.t // self.span), -(-self.s // self.keys)
        self.chunks = self.keys // self.chunk  # in a key block
        self.padded = self.s % self.keys != 0
        self.q_at = self._at(where.q_pos, where.q_seg, self.t, self.span)
        self.k_at = self._at(where.k_pos, where.k_seg, self.s, self.keys)
        if self.q_at is not None:  # given a sequence on one side, shared on the other
            batch = max(self.q_at.shape[0], self.k_at.shape[0])
            self.q_at, self.k_at = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (self.q_at, self.k_at))

    # Arrays in blocks, padded with zeros.

    def queries(self, x, fill=0):  # [B, T, N, ...] -> [B * stacks, nq, stack, span, ...]
        x = pad(x, 1, self.span, constant_values=fill)
        x = x.reshape(self.b, self.nq, self.span, self.stacks, self.stack, *x.shape[3:])
        x = jnp.moveaxis(x, (3, 4), (1, 3))
        return x.reshape(self.b * self.stacks, *x.shape[2:])

    def unqueries(self, x):  # the inverse
        x = x.reshape(self.b, self.stacks, *x.shape[1:])
        x = jnp.moveaxis(x, (1, 3), (3, 4))
        return x.reshape(self.b, self.nq * self.span, self.n, *x.shape[5:])[:, : self.t]

    def keys_first(self, x):  # [B, S, N_kv, H] -> [B * N_kv, S', H']
        x = pad(pad(x, 1, self.keys), 3, LANES).swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def kv_head(self, stack):  # of the B * N_kv, in a kernel
        return lax.div(jnp.int32(stack), jnp.int32(self.stacks // self.n_kv))

    def sequence(self, stack):  # of the batch in q_at and k_at, in a kernel
        if self.q_at is None or self.q_at.shape[0] == 1:
            return 0
        return lax.div(jnp.int32(stack), jnp.int32(self.stacks))

    def _at(self, position, segment, length, block):
        """[B | 1, 8, T'] int32: row 0 the positions, row 1 the segment ids; None where both follow from the index.

        The last token's are repeated: that widens no block's range. What the padding would see is thrown away, and
        padded keys are told by their index.
        """
        if not (self.given or self.segments):
            return None
        position = jnp.arange(length, dtype=jnp.int32)[None] if position is None else position
        segment = jnp.zeros((1, length), jnp.int32) if segment is None else segment
        position, segment = jnp.broadcast_arrays(position, segment)
        return pad(jnp.stack([pad(x, 1, block, mode="edge") for x in (position, segment)], axis=1), 1, 8)

    # The schedule.

    def classify(self, q: Ranges, k: Ranges, first, last):
        """(some, every) of a tile; first, last: the indices of its keys."""
        some, every = self.mask.block(*q.position, *k.position)
        if self.segments:
            seg_some, seg_every = same_segment_block(*q.segment, *k.segment)
            some, every = some & seg_some, every & seg_every
        if self.padded:
            some, every = some & (first < self.s), every & (last < self.s)
        return some, every

    def visible(self, q_at, k_at, k_index):
        """bool [rows, keys] or [keys, rows] of a mixed tile.

        q_at, k_at: (position, segment) along the rows, and along the other axis; k_index: the keys' indices.
        """
        (q, q_segment), (k, k_segment) = q_at, k_at
        if not isinstance(self.mask, Interval):  # whose function may use one argument only
            q, k = jnp.broadcast_arrays(q, k)
        see = self.mask(q, k)
        if self.segments:
            see = see & same_segment(q_segment, k_segment)
        return see & (k_index < self.s) if self.padded else see

    def tables(self):
        """int32 vectors for scalar memory: ((lo, hi) by query block, (lo, hi) by key block, q ranges, k ranges).

        Query block i of sequence b visits key blocks lo[b * nq + i] up to, not including, hi[b * nq + i], at least one;
        and the other way round. Ranges that follow from the index are left out: one zero.
        """
        q = self.ranges(self.q_at, self.span, self.nq)
        k = self.ranges(self.k_at, self.keys, self.nk)
        j = jnp.arange(self.nk) * self.keys
        across = lambda ranges, axis: jax.tree.map(lambda x: jnp.expand_dims(x, axis), ranges)
        some, _ = self.classify(across(q, 2), across(k, 1), j, j + self.keys - 1)
        some = jnp.broadcast_to(some, (some.shape[0], self.nq, self.nk))
        fine = self.ranges(self.k_at, self.chunk, self.nk * self.chunks)
        return visits(some), visits(some.swapaxes(1, 2)), self.flat(q), self.flat(fine)

    def ranges(self, at, block, count):  # Ranges of [B | 1, count]
        if at is None:
            first = (jnp.arange(count, dtype=jnp.int32) * block)[None]
            return Ranges((first, first + block - 1))
        blocks = at[:, :2].reshape(at.shape[0], 2, count, block)
        least, most = blocks.min(-1), blocks.max(-1)
        return Ranges((least[:, 0], most[:, 0]), (least[:, 1], most[:, 1]) if self.segments else None)

    def flat(self, ranges):
        if self.q_at is None:
            return jnp.zeros(1, jnp.int32)
        return jnp.stack(jax.tree.leaves(ranges), 1).reshape(-1)


class Schedule(NamedTuple):
    """Inside a kernel: the schedule of one sequence, read from scalar memory."""

    cut: Cut
    b: Any  # the sequence, 0 where all share their positions and segment ids
    q_ranges: Any
    k_ranges: Any
    k_b: Any = None  # the row of k_ranges, where that is not b

    def tile(self, i, j):
        """(some, every) of query block i and key block j."""
        return self._classify(i, j * self.cut.chunks, self.cut.chunks)

    def chunk(self, i, j, x):
        """(some, every) of query block i and chunk x of key block j."""
        return self._classify(i, j * self.cut.chunks + x, 1)

    def _classify(self, i, c, count):
        cut = self.cut
        first, last = c * cut.chunk, (c + count) * cut.chunk - 1
        if cut.q_at is None:
            q, k = Ranges((i * cut.span, i * cut.span + cut.span - 1)), Ranges((first, last))
        else:
            q = self._read(self.q_ranges, self.b, cut.nq, i, 1)
            k = self._read(self.k_ranges, self.b if self.k_b is None else self.k_b, cut.nk * cut.chunks, c, count)
        return cut.classify(q, k, first, last)

    def _read(self, ref, b, blocks, first, count):
        kinds = 4 if self.cut.segments else 2
        at = lambda kind: [ref[(b * kinds + kind) * blocks + first + x] for x in range(count)]
        pair = lambda kind: (functools.reduce(jnp.minimum, at(kind)), functools.reduce(jnp.maximum, at(kind + 1)))
        return Ranges(pair(0), pair(2) if self.cut.segments else None)


def visits(some, least=1):  # [..., outer, inner]
    """(lo, hi) for each outer block: the inner blocks from the first to the last that it sees something of.

    At least `least`, 0 or 1, of them (an array where blocks differ).
    """
    n = some.shape[-1]
    lo = jnp.argmax(some, axis=-1)
    hi = jnp.where(jnp.any(some, axis=-1), n - jnp.argmax(some[..., ::-1], axis=-1), lo + least)
    return lo.astype(jnp.int32).reshape(-1), hi.astype(jnp.int32).reshape(-1)


def _stack(group, kv_heads, most, cores):
    """How many of the `group` query heads of a kv head share a tile: all cores must have one."""
    fits = [x for x in range(1, group + 1) if group % x == 0 and x <= max(most, 1)]
    even = [x for x in fits if kv_heads * group // x % cores == 0]
    return max(even or fits)


def up(n, multiple):
    """n rounded up to a multiple."""
    return -(-n // multiple) * multiple


def pad(x, axis, multiple, **how):
    """x, its axis padded to a multiple, of at least one; with zeros unless `how` says otherwise."""
    short = up(max(x.shape[axis], 1), multiple) - x.shape[axis]
    if not short:
        return x
    if how.get("mode") == "edge":
        return jnp.concatenate([x, jnp.repeat(lax.slice_in_dim(x, -1, None, axis=axis), short, axis)], axis)
    return jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)], **how)


def widen(x):
    """An array, or a dtype, with float16, which the matrix unit does not know, as float32."""
    if isinstance(x, jax.Array):
        return x.astype(widen(x.dtype))
    return jnp.dtype(jnp.float32 if x == jnp.float16 else x)


def dot(a, b, contract):
    """Product of two tiles over axes `contract` of a and b, in their dtype (float32 in float32), summed in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def unit_of(scale, soft_cap):
    """What q k^T is multiplied by: then it is a score in powers of two, or with a soft cap the argument of tanh."""
    return scale * LOG2E if soft_cap is None else scale / soft_cap


def half_fills(x):
    """Is x [..., H] such that its products half fill a contraction that is 256 wide?"""
    return x.dtype == jnp.bfloat16 and x.shape[-1] == LANES


def pieces(row):
    """float32 [..., rows], negated, as [..., 8, rows]: three numbers that bfloat16 holds, of that sum, and zeros."""
    high = _truncated(row)
    middle = _truncated(row - high)
    parts = [-high, -middle, middle + high - row]
    place = lax.broadcasted_iota(jnp.int32, (8, row.shape[-1]), 0)
    return sum(jnp.where(place == i, part[..., None, :], 0.0) for i, part in enumerate(parts))


def less(x, row):
    """[..., rows, 128] bfloat16 and [..., rows] float32 -> [..., rows, 256]: what subtracts row, times `with_ones`."""
    lanes = jnp.swapaxes(pieces(row), -1, -2).astype(x.dtype)
    return jnp.concatenate([x, pad(lanes, -1, LANES)], axis=-1)


def frexp2(x):
    """(e, f), float32, of positive normal float32 x = 2^e f, 1 <= f < 2."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = lax.shift_right_logical(bits, jnp.int32(23)) - 127
    fraction = lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
    return exponent.astype(jnp.float32), fraction


def _truncated(x):  # to bfloat16's 8 bits, by hand: compilers like to leave a conversion there and back out
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & ~0xFFFF, jnp.float32)


def with_ones(x):
    """[keys, 128] -> [keys, 256]: less(q, row) with_ones(x)^T is q x^T - row, summed in float32.

    Where 128 fills half of a contraction that is 256 wide, the subtraction of a number a row costs nothing there, and
    the vector unit is left with less. It is as exact as the subtraction in float32.
    """
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.concatenate([x, jnp.where(lane < 3, 1.0, 0.0).astype(x.dtype)], axis=1)


def choose(table, name, head_dim, dtype):
    """The tiles of a chip for a head_dim, from table {chip: {head_dim up to: Tiles}}; halved for float32."""
    row = table.get(name, table["unknown"])
    tiles = row[min((x for x in row if x >= head_dim), default=max(row))]
    if name == INTERPRET:
        return tiles
    if dtype != jnp.bfloat16 or head_dim > max(row):
        half = lambda x: max(x // 2, LANES)
        tiles = Tiles(half(tiles.rows), *(min(x, half(tiles.keys)) for x in tiles[1:4]))
    return tiles


def shape(dims, dtype, like):
    """The shape of a pallas_call's output that varies over the mesh axes that `like` varies over."""
    return jax.ShapeDtypeStruct(dims, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def named(kernel, scratch):
    """The kernel, which takes its scratch by the names in `scratch`."""

    def run(*refs):
        return kernel(*refs[: -len(scratch)], **dict(zip(scratch, refs[-len(scratch) :], strict=True)))

    return run


def compiler_params(semantics=("parallel", "arbitrary"), **more):
    """Heads go to the cores of a chip; VMEM is what the smallest chip has, less a little for the compiler."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics, vmem_limit_bytes=60 << 20, disable_bounds_checks=True, **more
    )


def captures(mask):
    """Does the mask close over arrays, which a kernel cannot take?"""
    if isinstance(mask, Interval):
        return False
    position = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return bool(jax.make_jaxpr(mask)(position, position).consts)
