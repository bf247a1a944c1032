"""Splash attention for TPU, backward: one pass, dQ summed in float32 in place.

    S = c Q K^T,  P = 2^(S - lse),  dP = dO V^T,  dS = P (dP - delta)        c = scale log2 e, lse in powers of two
    dV^T += dO^T P,  dK^T += Q^T dS,  dQ += dS K                             dK and dQ times scale, once, at the end
    with `fold`: [Q -lse/c] [K 1]^T and [dO -delta] [V 1]^T, see tiles.with_ones
    with a soft cap: t = tanh(Q K^T scale / cap), S = cap log2 e t, dS = P (dP - delta) (1 - t^2)

    for each key block (grid):                        K, V, dK^T, dV^T stay in VMEM
        for each query block that sees it:            Q, Q^T, dO, dO^T, lse, delta arrive by DMA, the next block's
            visible throughout: the whole tile        during this one, and so does dQ, which leaves again
            otherwise, for each chunk of keys: skip it, take it whole, or mask it

dV^T and dK^T, [H, keys], fill a 256-wide matrix unit at any H; that costs a transposed copy of Q and dO in memory.
dQ lives in HBM once, in float32. Three slots in VMEM take turns: one is read ahead, one summed into, one written back.
A block that was written in one of the last two steps is read ahead only when that write is done (few query blocks).
Blocks are visited in a fixed order, so results are the same bit for bit.

Memory, bytes in VMEM (bfloat16, H = H_v = 128, rows 2048, keys 2048), and in HBM beside inputs and outputs:
    Q, dO [rows, H or 2 H], Q^T, dO^T, twice   6.0 M      Q, dO in blocks, Q^T, dO^T, dQ float32: 6 x Q
    lse, delta, at [8, rows], twice            0.1 M      `fold`: 2 x Q more (of the whole step: 11 x Q, else 9)
    the same as columns [rows, 8 (128)]        1.0 M      dK, dV float32 a stack of heads, where a kv head has several
    dQ [rows, H] float32, three times          3.0 M
    K, V, dK^T, dV^T, twice; float32 sums      6.0 M
    S, P, dP, dS: what the compiler keeps     ~15 M

Limits: those of the forward pass (splash.py).

How it got here (predicted by the compiler's schedule: share of a core's peak, full tile, head_dim 128):
    1024 rows, 1024 keys                                             49.5 % tpu7x, 97.4 % v5p
    lse and delta to columns once a block, not once a product        52.6 % tpu7x
    2048 rows                                                        55.0 % tpu7x: fewer starts and ends
    lse and delta subtracted in the half-empty contractions          57.8 % tpu7x; the limit is 62.5 % (dQ half fills)
    2048 keys                                                        59.9 % tpu7x; 96.0 to 97.7 % v5p
    head_dim 256, pieces of 1024, 512; 2048 keys                     85.1, 89.8; 96.2 % tpu7x
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.pallas import platforms, tiles
from ringtide.kernels.pallas.tiles import LOG2E, Cut, Schedule, Tiles, dot

TILES = {  # chip -> head_dim up to -> sizes, found by `ringtide bench tune splash`
    "v5p": {256: Tiles(rows=2048, keys=2048, chunk=512, piece=512)},
    "v6e": {128: Tiles(2048, 2048, 512, 512, fold=True), 256: Tiles(2048, 2048, 512, 512)},
    "7x": {128: Tiles(2048, 2048, 512, 2048, fold=True), 256: Tiles(2048, 2048, 512, 512)},
    "unknown": {256: Tiles(2048, 1024, 512, 512)},
    tiles.INTERPRET: {256: Tiles(256, 256, 128, 256)},
}
SLOTS = 3  # of dQ
FAR = 1e30  # an exponent that far below is 0, and bfloat16 holds it


def backward(
    q, k, v, where, dout, lse, delta, *, mask, scale, soft_cap=None, out_dtype=None, sizes=None, interpret=True
):
    """Gradients (dq, dk, dv) in out_dtype or the dtypes of q, k and v.

    dout [B, T, N, H_v]; lse [B, T, N] float32, +inf in rows that see nothing;
    delta = rowsum(dout * out) - dlse [B, T, N] float32. With the lse of a longer row of keys these are that row's
    gradients with respect to the keys at hand. sizes, interpret: as in `splash.forward`.
    """
    dtypes = [out_dtype or x.dtype for x in (q, k, v)]
    q, k, v, dout = (tiles.widen(x) for x in (q, k, v, dout.astype(q.dtype)))

    def call(interpret, chip, cores, q, k, v, where, dout, lse, delta):
        chosen = sizes or tiles.choose(TILES, chip, max(q.shape[3], v.shape[3]), q.dtype)
        cut = Cut(q, k, v, where, mask, chosen, cores)
        return _call(cut, scale, soft_cap, dtypes, interpret, q, k, v, dout, lse, delta)

    shapes = [(x.shape, dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    return platforms.run(call, interpret, shapes, q, k, v, where, dout, lse, delta)


def _call(cut, scale, soft_cap, dtypes, interpret, q, k, v, dout, lse, delta):
    unit = tiles.unit_of(scale, soft_cap)
    q, k, v, streams, fold = prepared(cut, unit, soft_cap, q, k, v, dout, lse, delta)
    _, (lo, hi), q_ranges, k_ranges = cut.tables()
    (stacks, nq, rows, h), h_v, keys = q.shape, v.shape[2], cut.keys
    per_kv_head = cut.stacks // cut.n_kv
    of_kv_head = lambda h, j, *_: (cut.kv_head(h), j, 0)
    grad = lambda h, j, *_: (h, 0, j)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    in_specs = [pl.BlockSpec((1, keys, h), of_kv_head), pl.BlockSpec((1, keys, h_v), of_kv_head)]
    in_specs += [hbm] * (len(streams) + 1)
    arrays = [k, v, *streams, jnp.zeros_like(q, jnp.float32)]
    if cut.k_at is not None:
        in_specs.insert(2, pl.BlockSpec((1, 8, keys), lambda h, j, *_: (cut.sequence(h), 0, j)))
        arrays.insert(2, cut.k_at)
    scratch = {
        "buffers": [pltpu.VMEM((2, *x.shape[2:]), x.dtype) for x in streams],
        "dq_buf": pltpu.VMEM((SLOTS, rows, h), jnp.float32),
        "column": pltpu.VMEM((rows, 8), jnp.int32),
        "dk": pltpu.VMEM((h, keys), jnp.float32),
        "dv": pltpu.VMEM((h_v, keys), jnp.float32),
        "state": pltpu.SMEM((3,), jnp.int32),
        "leaving": pltpu.SMEM((SLOTS,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((len(streams), 2)),
        "dq_arrived": pltpu.SemaphoreType.DMA((SLOTS,)),
        "dq_left": pltpu.SemaphoreType.DMA((SLOTS,)),
    }
    partial = per_kv_head > 1  # several stacks share a kv head: their dk and dv are summed in float32
    out = lambda h, dtype: tiles.shape((stacks, h, cut.nk * keys), jnp.float32 if partial else tiles.widen(dtype), q)
    dk, dv, dq = pl.pallas_call(
        tiles.named(functools.partial(_kernel, cut, scale, unit, soft_cap, fold), scratch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(stacks, cut.nk),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((1, h, keys), grad), pl.BlockSpec((1, h_v, keys), grad), hbm],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[out(h, dtypes[1]), out(h_v, dtypes[2]), tiles.shape(q.shape, jnp.float32, q)],
        input_output_aliases={4 + len(arrays) - 1: 2},
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="splash_backward",
    )(lo, hi, q_ranges, k_ranges, *arrays)
    dq = (dq[..., : cut.h] * scale).astype(dtypes[0]).reshape(stacks, nq, cut.stack, cut.span, cut.h)
    dk, dv = (unkeys(cut, x, h).astype(dtype) for x, h, dtype in ((dk, cut.h, dtypes[1]), (dv, cut.h_v, dtypes[2])))
    return cut.unqueries(dq), dk, dv


def prepared(cut, unit, soft_cap, q, k, v, dout, lse, delta):
    """(Q in blocks, K and V heads first, what streams past a key block: see the memory table, fold or not)."""
    blocks = lambda x: tiles.pad(
        cut.queries(x).reshape(cut.b * cut.stacks, cut.nq, cut.rows, x.shape[3]), 3, tiles.LANES
    )
    q, dout, k, v = blocks(q), blocks(dout), cut.keys_first(k), cut.keys_first(v)
    lse, delta = (cut.queries(x, fill).reshape(*q.shape[:3]) for x, fill in ((lse * LOG2E, jnp.inf), (delta, 0)))
    fold = cut.fold and tiles.half_fills(q) and tiles.half_fills(dout) and soft_cap is None and unit != 0
    streams = [q, dout, q.swapaxes(2, 3), dout.swapaxes(2, 3)]
    if fold:  # lse of +inf, where nothing is visible: P is 0 as well if it is only far enough out
        streams[:2] = tiles.less(q, jnp.clip(lse / unit, -FAR, FAR)), tiles.less(dout, delta)
    if not fold or cut.q_at is not None:
        streams.append(_rows(cut, lse, delta))
    return q, k, v, streams, fold


def unkeys(cut, x, h):
    """dK^T or dV^T [B * stacks, H', S'] -> [B, S, N_kv, h], summed over the stacks of a kv head."""
    x = x.reshape(cut.b, cut.n_kv, cut.stacks // cut.n_kv, *x.shape[1:]).sum(2)
    return x.transpose(0, 3, 1, 2)[:, : cut.s, :, :h]


def _rows(cut, lse, delta):
    """[B * stacks, nq, 8, rows] int32: lse in powers of two and delta (both as bits), position, segment id."""
    rows = [lax.bitcast_convert_type(x, jnp.int32) for x in (lse, delta)]
    if cut.q_at is not None:
        for at in (cut.q_at[:, 0], cut.q_at[:, 1]):
            at = at.reshape(at.shape[0], 1, cut.nq, 1, cut.span)
            at = jnp.broadcast_to(at, (cut.b, cut.stacks, cut.nq, cut.stack, cut.span))
            rows.append(at.reshape(rows[0].shape))
    return tiles.pad(jnp.stack(rows, axis=2), 2, 8)


def _kernel(
    cut, scale, unit, soft_cap, fold, lo, hi, q_ranges, k_ranges, k_ref, v_ref, *refs,
    buffers, dq_buf, column, dk, dv, state, leaving, arrived, dq_arrived, dq_left,
):  # fmt: skip
    """One key block."""
    *refs, _, dk_ref, dv_ref, dq_hbm = refs
    at, streams = refs[: -len(buffers)], refs[-len(buffers) :]
    head, j = pl.program_id(0), pl.program_id(1)
    b = cut.sequence(head)
    row = b * cut.nk + j
    query_block = tile_code(
        cut, unit, soft_cap, fold, Schedule(cut, b, q_ranges, k_ranges), j, k_ref.at[0], v_ref.at[0],
        at[0].at[0] if at else None, buffers=buffers, dq_buf=dq_buf, column=column, dk=dk, dv=dv,
    )  # fmt: skip
    begin, walk, settle = query_walk(
        cut, head, streams, dq_hbm, query_block, buffers=buffers, dq_buf=dq_buf, state=state, leaving=leaving,
        arrived=arrived, dq_arrived=dq_arrived, dq_left=dq_left,
    )  # fmt: skip
    pl.when(j == 0)(lambda: begin(lo[row]))
    dk[...] = jnp.zeros_like(dk)
    dv[...] = jnp.zeros_like(dv)
    walk(lo[row], hi[row] - 1, lo[b * cut.nk + jnp.minimum(j + 1, cut.nk - 1)], j < cut.nk - 1)

    # Finish.

    dk_ref[0] = (dk[...] * scale).astype(dk_ref.dtype)
    dv_ref[0] = dv[...].astype(dv_ref.dtype)
    pl.when(j == cut.nk - 1)(settle)


def tile_code(cut, unit, soft_cap, fold, schedule, j, k_ref, v_ref, k_at_ref, *, buffers, dq_buf, column, dk, dv):
    """query_block(i, at_q, at_dq): adds what query block i, in slot `at_q`, gives to dk, dv and dQ in slot `at_dq`."""
    q_buf, do_buf, qt_buf, dot_buf, *row_buf = buffers

    # Compute: query block i against the keys [c, c + n).

    def tile(i, at_q, at_dq, c, n, masked):
        keys = pl.ds(c, n)
        q, do, k, v = q_buf[at_q], do_buf[at_q], k_ref[keys], v_ref[keys]
        if fold:
            p = jnp.exp2(dot(q, tiles.with_ones(k), (1, 1)) * unit)
            dp = dot(do, tiles.with_ones(v), (1, 1))
        else:
            lse, delta = (lax.bitcast_convert_type(column[:, x : x + 1], jnp.float32) for x in (0, 1))
            s = dot(q, k, (1, 1)) * unit
            if soft_cap is not None:
                t = jnp.tanh(s)
                s = soft_cap * LOG2E * t
            p = jnp.exp2(s - lse)
            dp = dot(do, v, (1, 1)) - delta
        if masked:
            p = jnp.where(visible(i, c, n), p, 0.0)
        dv[:, keys] += dot(dot_buf[at_q], p.astype(do_buf.dtype), (1, 0))
        ds = p * dp
        if soft_cap is not None:
            ds *= 1 - t * t
        ds = ds.astype(qt_buf.dtype)
        dk[:, keys] += dot(qt_buf[at_q], ds, (1, 0))
        dq_buf[at_dq] += dot(ds, k, (1, 0))

    def visible(i, c, n):
        index = j * cut.keys + c + lax.broadcasted_iota(jnp.int32, (1, n), 1)
        if k_at_ref is not None:
            k_at = k_at_ref[:, pl.ds(c, n)]
            q_at, k_at = (column[:, 2:3], column[:, 3:4]), (k_at[0:1], k_at[1:2])
        else:
            q_at = i * cut.span + lax.broadcasted_iota(jnp.int32, (cut.span, 1), 0)
            q_at, k_at = (jnp.concatenate([q_at] * cut.stack, axis=0), None), (index, None)
        return cut.visible(q_at, k_at, index)

    def query_block(i, at_q, at_dq):
        if row_buf:
            column[...] = row_buf[0][at_q].T
        _, whole = schedule.tile(i, j)

        def chunk(x, _):
            some, every = schedule.chunk(i, j, x)
            c = pl.multiple_of(x * cut.chunk, cut.chunk)
            pl.when(every)(lambda: tile(i, at_q, at_dq, c, cut.chunk, masked=False))
            pl.when(some & ~every)(lambda: tile(i, at_q, at_dq, c, cut.chunk, masked=True))

        @pl.when(whole)
        def _():
            for c in range(0, cut.keys, cut.piece):
                tile(i, at_q, at_dq, c, cut.piece, masked=False)

        @pl.when(~whole)
        def _():
            lax.fori_loop(0, cut.chunks, chunk, None)

    return query_block


def query_walk(
    cut, head, streams, dq_hbm, query_block, *, buffers, dq_buf, state, leaving, arrived, dq_arrived, dq_left
):
    """What brings query blocks, and takes dQ in and out: (begin, walk, settle).

    begin(first): loads that block; nothing may be on its way. walk(first, last, after, more): blocks first to last,
    then loads `after` for the next walk, if there is more. settle(): waits until all dQ have left.
    """

    # Load: a query block into one of two slots, its dQ into one of three; dQ also leaves.

    def copies(i, to):
        for x, (hbm, buffer) in enumerate(zip(streams, buffers, strict=True)):
            yield pltpu.make_async_copy(hbm.at[head, i], buffer.at[to], arrived.at[x, to])

    def start(i, to):
        for copy in copies(i, to):
            copy.start()

    def dq_in(i, to):
        return pltpu.make_async_copy(dq_hbm.at[head, i], dq_buf.at[to], dq_arrived.at[to])

    def dq_out(i, to):
        return pltpu.make_async_copy(dq_buf.at[to], dq_hbm.at[head, i], dq_left.at[to])

    def settle(to):
        """Waits until what was written from slot `to`, if anything, has left."""

        @pl.when(leaving[to] == 1)
        def _():
            dq_out(0, to).wait()
            leaving[to] = 0

    def settle_all():
        for x in range(SLOTS):
            settle(x)

    def begin(first):
        state[0], state[1], state[2] = 0, 0, -1  # slot of Q, slot of dQ, the query block before this one
        for x in range(SLOTS):
            leaving[x] = 0
        start(first, 0)
        dq_in(first, 0).start()

    def walk(first, last, after, more_blocks):
        def step(i, _):
            at_q, at_dq, before = state[0], state[1], state[2]
            next_dq = jnp.where(at_dq == SLOTS - 1, 0, at_dq + 1)
            end = i == last
            following = jnp.where(end, after, i + 1)
            more = ~end | more_blocks
            near = (following == i) | (following == before)  # its dQ is still being summed, or written
            settle(next_dq)
            pl.when(more)(lambda: start(following, 1 - at_q))
            pl.when(more & ~near)(lambda: dq_in(following, next_dq).start())
            for copy in copies(i, at_q):
                copy.wait()
            dq_in(i, at_dq).wait()
            query_block(i, at_q, at_dq)
            dq_out(i, at_dq).start()
            leaving[at_dq] = 1

            @pl.when(more & near)
            def _():
                settle_all()
                dq_in(following, next_dq).start()

            state[0], state[1], state[2] = 1 - at_q, next_dq, i

        lax.fori_loop(first, last + 1, step, None)

    return begin, walk, settle_all
