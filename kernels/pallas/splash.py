"""Splash attention for TPU, forward: exact softmax, streamed past a reference that is known before the tile.

    S^T = c K Q^T        c = scale log2 e; with a soft cap, S^T = cap log2 e tanh(K Q^T scale / cap)
    P^T = 2^(S^T - m)    m: a row's reference, in powers of two; with `fold`, c ([K 1] [Q -m/c]^T), see tiles.with_ones
    l   = sum_k P^T,  O^T = V^T P^T,  out = O / l,  lse = (m + log2 l) ln 2

Scores stand transposed, [keys, rows]: a row's statistics are [1, rows] vectors that meet S^T by elementwise operations
across registers, without lane reductions, and O^T [H_v, rows] fills a 256-wide matrix unit at any H_v.

    for each query block (grid):                     rows = stack heads x span positions, see tiles.py
        for each key block it sees, last to first:   K and V^T arrive by DMA, the next block's during this one
            visible throughout, m known:  stream the whole block: P^T = 2^(S^T - m), no maximum, nothing to rescale
            otherwise, for each chunk:    skip it, stream it, or take it online: mask, m' = max(m, max S^T), rescale
        out of range?  the query block again, all of it online

The reference is exact. It is the maximum of the scores a row has really seen on the online path (the diagonal, which
comes first), so l >= 1 and nothing can underflow. A score above m by more than 100 powers of two would overflow, and
shows: l passes 2^100 or O is no longer finite. Then the query block is done again online, where 2^(S - m) <= 1, and
the rows that need it take the second result (the others keep theirs: no row depends on its neighbours). That is a
branch on what happened, not on a bound: the product of norms of q and k, which bounds a score, is easily ten times
too large. Until all rows of a block have a reference (where masked tiles hid everything), tiles go online.

Memory, bytes in VMEM (bfloat16, H = H_v = 128, rows 2048, keys 2048), and in scalar memory:
    Q [rows, H], O^T [H_v, rows], twice            2.0 M      lo, hi: 2 ints a query block
    K [keys, H], V^T [H_v, keys], twice            2.0 M      given positions (or segment ids as well):
    O^T float32, m, l; [Q -m/c]                    2.1 M          2 (4) ints a query block and a chunk
    positions, segment ids [8, keys], twice        0.1 M
    S^T, P^T: what the compiler keeps of them       ~8 M

Limits: dense masks are refused (they are T x S); user functions may not capture arrays. Any T, S, H, H_v, N / N_kv;
with segment ids or positions a sequence, B S up to some 20M tokens a device, by the 1 MiB of scalar memory.

How it got here (predicted by the compiler's schedule: share of a core's peak, full tile, head_dim 128):
    online maximum, scores [rows, keys]                       37 % tpu7x
    fixed reference, 1024 rows, 4096 keys in pieces of 1024   58 %           a tile is bound by its start and its end
    m subtracted in the half-empty contraction of S           59 %           (so could the scale be, but not exactly)
    2048 rows, 2048 keys, one product                         62.5 % tpu7x, 59.6 % v6e; the limit is 66.7 %
    v5p, pieces of 2048, 1024, 512                            95.6, 96.9, 98.4 %   128-wide units want short pieces
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.masks import Mask, Where
from ringtide.kernels.pallas import platforms, tiles
from ringtide.kernels.pallas.splash_bwd import backward  # noqa: F401  the other half of the op's contract
from ringtide.kernels.pallas.tiles import Cut, Schedule, Tiles, dot

TILES = {  # chip -> head_dim up to -> sizes, found by `ringtide bench tune splash`
    "v5p": {256: Tiles(rows=2048, keys=2048, chunk=512, piece=512)},
    "v6e": {128: Tiles(2048, 2048, 512, 2048, fold=True), 256: Tiles(2048, 2048, 512, 2048)},
    "7x": {128: Tiles(2048, 2048, 512, 2048, fold=True), 256: Tiles(2048, 4096, 512, 2048)},
    "unknown": {256: Tiles(2048, 2048, 512, 512)},
    tiles.INTERPRET: {256: Tiles(256, 256, 128, 256)},  # small, so that a laptop goes through every path
}
OVERFLOW = 2.0**100  # of l: what can follow stays below float32's 2^128


def refuses(q, k, v, where: Where, *args, mask: Mask, **options):
    """Why this kernel cannot serve the call, and what would; None if it can."""
    if where.dense is not None:
        return 'a dense mask is T x S: write it as positions, segment_ids or a mask, or use implementation="xla"'
    if tiles.captures(mask):
        return 'the mask\'s function captures an array: compute it from the positions, or use implementation="xla"'
    return None


def forward(q, k, v, where, *, mask, scale, soft_cap=None, out_dtype=None, sizes=None, interpret=True):
    """Attention of q [B, T, N, H] over k [B, S, N_kv, H] and v [B, S, N_kv, H_v].

    Returns (out [B, T, N, H_v] in out_dtype or q's, lse [B, T, N] float32). A row that sees nothing: 0 and -inf.

    sizes: Tiles, instead of the chip's. interpret: how to run where there is no TPU, e.g. pltpu.InterpretParams().
    """
    out_dtype = out_dtype or q.dtype
    q, k, v = (tiles.widen(x) for x in (q, k, v))

    def call(interpret, chip, cores, q, k, v, where):
        chosen = sizes or tiles.choose(TILES, chip, max(q.shape[3], v.shape[3]), q.dtype)
        cut = Cut(q, k, v, where, mask, chosen, cores)
        return _call(cut, scale, soft_cap, out_dtype, interpret, q, k, v)

    shapes = ((*q.shape[:3], v.shape[3]), out_dtype), (q.shape[:3], jnp.float32)
    return platforms.run(call, interpret, shapes, q, k, v, where)


def _call(cut, scale, soft_cap, out_dtype, interpret, q, k, v):
    q = tiles.pad(cut.queries(q).reshape(cut.b * cut.stacks, cut.nq, cut.rows, cut.h), 3, tiles.LANES)
    k = cut.keys_first(k)
    v = tiles.pad(tiles.pad(v, 1, cut.keys).transpose(0, 2, 3, 1).reshape(len(k), cut.h_v, k.shape[1]), 1, 16)
    (lo, hi), _, q_ranges, k_ranges = cut.tables()
    unit = tiles.unit_of(scale, soft_cap)
    h, h_v, rows, keys = k.shape[2], v.shape[1], cut.rows, cut.keys
    row = lambda h, i, *_: (h, i, 0, 0)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    in_specs, arrays = [pl.BlockSpec((1, 1, *q.shape[2:]), row), hbm, hbm], [q, k, v]
    scratch = {
        "k_buf": pltpu.VMEM((2, keys, h), k.dtype),
        "v_buf": pltpu.VMEM((2, h_v, keys), v.dtype),
        "m": pltpu.VMEM((1, rows), jnp.float32),
        "l": pltpu.VMEM((1, rows), jnp.float32),
        "acc": pltpu.VMEM((h_v, rows), jnp.float32),
        "bad": pltpu.VMEM((1, rows), jnp.float32),
        "slot": pltpu.SMEM((1,), jnp.int32),
        "ready": pltpu.SMEM((1,), jnp.int32),
        "stale": pltpu.SMEM((1,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((3, 2)),
    }
    if cut.fold and soft_cap is None and tiles.half_fills(q) and unit:
        scratch["q_less_m"] = pltpu.VMEM((rows, 2 * h), q.dtype)
    if cut.q_at is not None:
        in_specs += [pl.BlockSpec((1, 8, cut.span), lambda h, i, *_: (cut.sequence(h), 0, i)), hbm]
        arrays += [cut.q_at, cut.k_at]
        scratch["at_buf"] = pltpu.VMEM((2, 8, keys), jnp.int32)
    out, lse = pl.pallas_call(
        tiles.named(functools.partial(_kernel, cut, unit, soft_cap), scratch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cut.b * cut.stacks, cut.nq),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((1, 1, h_v, rows), row), pl.BlockSpec((1, 1, 1, rows), row)],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            tiles.shape((cut.b * cut.stacks, cut.nq, h_v, rows), tiles.widen(out_dtype), q),
            tiles.shape((cut.b * cut.stacks, cut.nq, 1, rows), jnp.float32, q),
        ],
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="splash_forward",
    )(lo, hi, q_ranges, k_ranges, *arrays)
    out = out[:, :, : cut.h_v].reshape(*out.shape[:2], cut.h_v, cut.stack, cut.span)
    lse = lse.reshape(*lse.shape[:2], cut.stack, cut.span)
    return cut.unqueries(jnp.moveaxis(out, 2, 4)).astype(out_dtype), cut.unqueries(lse)


def _kernel(
    cut, unit, soft_cap, lo, hi, q_ranges, k_ranges, q_ref, k_hbm, v_hbm, *refs,
    k_buf, v_buf, m, l, acc, bad, slot, ready, stale, arrived, q_less_m=None, at_buf=None,
):  # fmt: skip
    """One query block."""
    *at, out_ref, lse_ref = refs
    head, i = pl.program_id(0), pl.program_id(1)
    b = cut.sequence(head)
    schedule = Schedule(cut, b, q_ranges, k_ranges)
    first, last = lo[b * cut.nq + i], hi[b * cut.nq + i] - 1
    kv_head = cut.kv_head(head)
    streams = [(k_hbm.at[kv_head], k_buf, 0), (v_hbm.at[kv_head], v_buf, 1)]
    if at:
        streams.append((at[1].at[b], at_buf, 1))
    copies, start = loads(cut, streams, arrived)
    key_block = tile_code(
        cut, unit, soft_cap, schedule, i, q_ref, at[0] if at else None,
        k_buf=k_buf, v_buf=v_buf, m=m, l=l, acc=acc, ready=ready, stale=stale, q_less_m=q_less_m, at_buf=at_buf,
    )  # fmt: skip

    @pl.when(i == 0)
    def _():
        slot[0] = 0
        start(last, 0)
        if q_less_m is not None:
            q_less_m[...] = jnp.zeros_like(q_less_m)

    def attempt(careful):
        """All key blocks, and the result. Returns 1 if it must be done again, `careful`: online, and fetching late."""
        m[...] = jnp.full_like(m, -jnp.inf)
        l[...] = jnp.zeros_like(l)
        acc[...] = jnp.zeros_like(acc)
        ready[0] = 0

        following = lambda: hi[b * cut.nq + jnp.minimum(i + 1, cut.nq - 1)] - 1
        walk(first, last, careful, i + 1 < cut.nq, following, slot, copies, start, key_block)
        out, lse = result(m, l, acc)

        @pl.when(~careful)
        def _():
            out_ref[0, 0] = out.astype(out_ref.dtype)
            lse_ref[0, 0] = lse
            fine = (l[...] < OVERFLOW) & (jnp.max(jnp.abs(out), axis=0, keepdims=True) < jnp.inf)
            bad[...] = jnp.where(fine, 0.0, 1.0)

        @pl.when(careful)
        def _():
            out_ref[0, 0] = jnp.where(bad[...] > 0, out.astype(out_ref.dtype), out_ref[0, 0])
            lse_ref[0, 0] = jnp.where(bad[...] > 0, lse, lse_ref[0, 0])

        return jnp.where(careful | (jnp.max(bad[...]) == 0), 2, 1)

    lax.while_loop(lambda tries: tries < 2, lambda tries: attempt(tries == 1), 0)


def loads(cut, streams, arrived):
    """(copies, start) that bring key block j of each of `streams`, (HBM, buffer of two slots, key axis), to a slot."""

    def copies(j, to):
        for x, (hbm, buffer, axis) in enumerate(streams):
            keys = pl.ds(j * cut.keys, cut.keys)
            block = hbm.at[keys] if axis == 0 else hbm.at[:, keys]
            yield pltpu.make_async_copy(block, buffer.at[to], arrived.at[x, to])

    def start(j, to):
        for copy in copies(j, to):
            copy.start()

    return copies, start


def walk(first, last, careful, more, following, slot, copies, start, key_block):
    """key_block for each of the key blocks from `last` down to `first`, each of them loaded during the one before.

    During the last one, if there are `more`, key block following() of the next query block is loaded. A `careful` walk,
    the second one of a query block, loads late, into the other slot: the one that slot[0] names, where the next query
    block's first keys now are or arrive, is not touched.
    """

    def step(x, at):
        j = last - x
        pl.when(careful)(lambda: start(j, at))
        for copy in copies(j, at):
            copy.wait()
        pl.when(~careful & (j > first))(lambda: start(j - 1, 1 - at))
        pl.when(~careful & (j == first) & more)(lambda: start(following(), 1 - at))
        key_block(at, j, careful)
        return jnp.where(careful, at, 1 - at)

    after = lax.fori_loop(0, last - first + 1, step, jnp.where(careful, 1 - slot[0], slot[0]))
    slot[0] = jnp.where(careful, 1 - after, after)


def tile_code(
    cut, unit, soft_cap, schedule, i, q_ref, q_at_ref, *, k_buf, v_buf, m, l, acc, ready, stale, q_less_m, at_buf
):
    """key_block(at, j, careful): adds what query block i sees of key block j, in slot `at`, to m, l and acc."""

    # Compute: the keys [c, c + n) of the block in slot `at`.

    def scores(at, c, n):
        s = dot(k_buf[at, pl.ds(c, n)], q_ref[0, 0], (1, 1)) * unit
        return s if soft_cap is None else soft_cap * tiles.LOG2E * jnp.tanh(s)

    def scores_less_m(at, c, n):
        if q_less_m is None:
            return scores(at, c, n) - m[...]
        pl.when(stale[0] == 1)(take_m)
        return dot(tiles.with_ones(k_buf[at, pl.ds(c, n)]), q_less_m[...], (1, 1)) * unit

    def take_m():
        h = q_ref.shape[3]
        q_less_m[:, :h] = q_ref[0, 0]
        q_less_m[:, h : h + 8] = tiles.pieces(m[0] / unit).T.astype(q_less_m.dtype)
        stale[0] = 0

    def values(at, c, n, p):
        return dot(v_buf[at, :, pl.ds(c, n)], p.astype(v_buf.dtype), (1, 0))

    def stream(at, c, n):
        p = jnp.exp2(scores_less_m(at, c, n))
        l[...] += jnp.sum(p, axis=0, keepdims=True)
        acc[...] += values(at, c, n, p)

    def online(at, j, c, n):
        s = jnp.where(visible(at, j, c, n), scores(at, c, n), -jnp.inf)
        m_new = jnp.maximum(m[...], jnp.max(s, axis=0, keepdims=True))
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p, decay = jnp.exp2(s - base), jnp.exp2(m[...] - base)
        l[...] = decay * l[...] + jnp.sum(p, axis=0, keepdims=True)
        acc[...] = decay * acc[...] + values(at, c, n, p)
        m[...] = m_new
        stale[0] = 1
        ready[0] = (jnp.min(m_new) > -jnp.inf).astype(jnp.int32)

    def visible(at, j, c, n):
        index = j * cut.keys + c + lax.broadcasted_iota(jnp.int32, (n, 1), 0)
        if q_at_ref is not None:
            q_at, k_at = q_at_ref[0], at_buf[at, :, pl.ds(c, n)].T
            q_at, k_at = (q_at[0:1], q_at[1:2]), (k_at[:, 0:1], k_at[:, 1:2])
        else:
            q_at, k_at = (i * cut.span + lax.broadcasted_iota(jnp.int32, (1, cut.span), 1), None), (index, None)
        q_at = [x if x is None else jnp.concatenate([x] * cut.stack, axis=1) for x in q_at]
        return cut.visible(q_at, k_at, index)

    def key_block(at, j, careful):
        known = lambda: (ready[0] == 1) & ~careful
        whole = schedule.tile(i, j)[1] & known()

        def chunk(x, _):
            x = cut.chunks - 1 - x
            some, every = schedule.chunk(i, j, x)
            at_once = every & known()
            c = pl.multiple_of(x * cut.chunk, cut.chunk)
            pl.when(at_once)(lambda: stream(at, c, cut.chunk))
            pl.when(some & ~at_once)(lambda: online(at, j, c, cut.chunk))

        @pl.when(whole)
        def _():
            for c in range(0, cut.keys, cut.piece):
                stream(at, c, cut.piece)

        @pl.when(~whole)
        def _():
            lax.fori_loop(0, cut.chunks, chunk, None)

    return key_block


def result(m, l, acc):
    """(out, lse) of the sums over all keys, which stand in refs."""
    out = acc[...] * jnp.where(l[...] == 0, 0.0, 1 / l[...])
    exponent, fraction = tiles.frexp2(l[...])
    lse = (m[...] + exponent + jnp.log2(fraction)) * math.log(2)  # l may be 2^100, and log2 of that inexact
    return out, jnp.where(l[...] == 0, -jnp.inf, lse)
