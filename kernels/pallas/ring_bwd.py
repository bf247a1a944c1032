"""Ring attention in one kernel, backward: dK and dV follow the keys, block by block, one hop behind. See ring.py.

    for each hop, for each key block (grid):          K, V and dK^T, dV^T of the devices before arrive, the next block's
        as in splash_bwd.py                           during this one; dQ is summed in HBM over all hops
        send dK^T, dV^T                               the next device comes to that block one hop later

Memory, bytes in VMEM beside splash_bwd's (bfloat16, H = H_v = 128, rows 2048, keys 2048), and in HBM a device:
    dK^T, dV^T float32, three times     4.0 M more     dK^T, dV^T float32, twice: read, and arriving
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.pallas import circles, platforms, splash_bwd, tiles
from ringtide.kernels.pallas.tiles import Cut, Schedule

SLOTS = 3  # of dK and dV: one is read ahead, one summed into, one sent


def backward(
    q, k, v, where, dout, lse, delta, *, axis, mask, scale, soft_cap=None, out_dtype=None, sizes=None, interpret=True
):
    """Gradients (dq, dk, dv) of the shard, given lse and delta over the keys of all shards; see splash_bwd.backward."""
    dtypes = [out_dtype or x.dtype for x in (q, k, v)]
    q, k, v, dout = (tiles.widen(x) for x in (q, k, v, dout.astype(q.dtype)))
    circle = circles.Circle.along(axis)

    def call(interpret, chip, cores, q, k, v, where, dout, lse, delta, places, far):
        chosen = sizes or tiles.choose(splash_bwd.TILES, chip, max(q.shape[3], v.shape[3]), q.dtype)
        cut = Cut(q, k, v, where, mask, chosen)
        call = functools.partial(_backward_call, cut, circle, scale, soft_cap, dtypes, interpret)
        return call(q, k, v, dout, lse, delta, places, far)

    shapes = [(x.shape, dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    args = q, k, v, where, dout, lse, delta, circles.places(axis), circles.far_ranges(where, axis)
    return platforms.run(call, interpret, shapes, *args)


def _backward_call(
    cut, circle, scale, soft_cap, dtypes, interpret, q, k, v, dout, lse, delta, places, far
):  # fmt: skip
    unit, hops = tiles.unit_of(scale, soft_cap), circle.hops
    q, k, v, streams, fold = splash_bwd.prepared(cut, unit, soft_cap, q, k, v, dout, lse, delta)
    (lo, hi), q_ranges, k_ranges = circles.tables(cut, hops, far, by_query=False)
    (stacks, nq, rows, h), h_v, keys = q.shape, v.shape[2], cut.keys
    hbm, dma = pl.BlockSpec(memory_space=pl.ANY), pltpu.SemaphoreType.DMA
    in_place = [jnp.zeros_like(q, jnp.float32), *(circles.two(x) for x in (k, v, cut.k_at))]
    scratch = {
        "buffers": [pltpu.VMEM((2, *x.shape[2:]), x.dtype) for x in streams],
        "dq_buf": pltpu.VMEM((splash_bwd.SLOTS, rows, h), jnp.float32),
        "column": pltpu.VMEM((rows, 8), jnp.int32),
        "k_buf": pltpu.VMEM((2, keys, h), k.dtype),
        "v_buf": pltpu.VMEM((2, keys, h_v), v.dtype),
        "at_buf": pltpu.VMEM((2, 8, keys), jnp.int32),
        "dkv": pltpu.VMEM((SLOTS, h + h_v, keys), jnp.float32),
        "place": pltpu.SMEM((2,), jnp.int32),
        "leaving": pltpu.SMEM((SLOTS,), jnp.int32),
        "k_arrived": dma((3, 2)),
        "dkv_arrived": dma((SLOTS,)),
        "dkv_sent": dma((SLOTS,)),
        "dkv_received": dma,
        "walk": [
            pltpu.SMEM((3,), jnp.int32),
            pltpu.SMEM((splash_bwd.SLOTS,), jnp.int32),
            dma((len(streams), 2)),
            dma((splash_bwd.SLOTS,)),
            dma((splash_bwd.SLOTS,)),
        ],
        "link": circles.link(3),
    }
    first = 5 + len(streams)
    dq, *_, dkv = pl.pallas_call(
        tiles.named(functools.partial(_backward_kernel, cut, circle, unit, soft_cap, fold), scratch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(hops, stacks, cut.nk),
            in_specs=[hbm] * (len(streams) + 4),
            out_specs=[hbm] * 5,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            *(tiles.shape(x.shape, x.dtype, q) for x in in_place),
            tiles.shape((2, stacks, h + h_v, cut.nk * keys), jnp.float32, q),
        ],
        input_output_aliases={first + x: x for x in range(4)},
        compiler_params=circles.compiler_params(circle),
        interpret=interpret,
        name="ring_backward",
    )(lo, hi, q_ranges, k_ranges, places[0], *streams, *in_place)
    dq = (dq[..., : cut.h] * scale).astype(dtypes[0]).reshape(stacks, nq, cut.stack, cut.span, cut.h)
    dkv = dkv[(hops - 1) % 2]
    dk, dv = splash_bwd.unkeys(cut, dkv[:, :h], cut.h), splash_bwd.unkeys(cut, dkv[:, h:], cut.h_v)
    return cut.unqueries(dq), (dk * scale).astype(dtypes[1]), dv.astype(dtypes[2])


def _backward_kernel(
    cut, circle, unit, soft_cap, fold, lo, hi, q_ranges, k_ranges, places, *refs,
    buffers, dq_buf, column, k_buf, v_buf, at_buf, dkv, place, leaving, k_arrived, dkv_arrived, dkv_sent, dkv_received,
    walk, link,
):  # fmt: skip
    """One key block in one hop."""
    hops = circle.hops
    streams, (dq_hbm, k_hbm, v_hbm, at_hbm, dkv_hbm) = refs[: len(buffers)], refs[-5:]
    hop, head, j = (pl.program_id(x) for x in range(3))
    heads, here = pl.num_programs(1), lax.rem(hop, 2)
    h = k_buf.shape[2]
    opens, ends = (head == 0) & (j == 0), (head == heads - 1) & (j == cut.nk - 1)
    b = cut.sequence(head)
    b_hop = b * hops + hop
    row = b_hop * cut.nk + j
    some = lambda row: hi[row] > lo[row]

    # The key blocks of a hop, in the order of the grid: K and V come, dK and dV of the hops before come and leave.

    def keys_in(head, j, to):
        keys, kv_head, b = pl.ds(j * cut.keys, cut.keys), cut.kv_head(head), cut.sequence(head)
        yield pltpu.make_async_copy(k_hbm.at[here, kv_head, keys], k_buf.at[to], k_arrived.at[0, to])
        yield pltpu.make_async_copy(v_hbm.at[here, kv_head, keys], v_buf.at[to], k_arrived.at[1, to])
        yield pltpu.make_async_copy(at_hbm.at[here, b, :, keys], at_buf.at[to], k_arrived.at[2, to])

    def dkv_in(head, j, to):
        keys = pl.ds(j * cut.keys, cut.keys)
        return pltpu.make_async_copy(dkv_hbm.at[1 - here, head, :, keys], dkv.at[to], dkv_arrived.at[to])

    def dkv_out(head, j, to):
        """To the next device, which reads it in its next hop."""
        target = dkv_hbm.at[here, head, :, pl.ds(j * cut.keys, cut.keys)]
        return circles.remote(dkv.at[to], target, dkv_sent.at[to], dkv_received, circle.devices(places)[1])

    def settle(to):
        @pl.when(leaving[to] == 1)
        def _():
            dkv_out(0, 0, to).wait_send()
            leaving[to] = 0

    def all_received():
        def one(_, carry):
            dkv_out(0, 0, 0).wait_recv()
            return carry

        lax.fori_loop(0, heads * cut.nk, one, None)

    def fetch(head, j, row, at, at_dkv):
        pl.when(some(row))(lambda: circles.start_all(keys_in(head, j, at)))
        pl.when(hop > 0)(lambda: dkv_in(head, j, at_dkv).start())

    circles.turn(hop, circle, hops, opens, places, (k_hbm, v_hbm, at_hbm), link, all_received)

    @pl.when(opens & (hop == 0))
    def _():
        place[0], place[1] = 0, 0  # slot of K and V, slot of dK and dV
        for x in range(SLOTS):
            leaving[x] = 0

    at, at_dkv = place[0], place[1]
    next_dkv = jnp.where(at_dkv == SLOTS - 1, 0, at_dkv + 1)
    pl.when(opens)(lambda: fetch(head, j, row, at, at_dkv))
    settle(next_dkv)

    @pl.when(~ends)
    def _():
        more = j + 1 < cut.nk
        next_head, next_j = jnp.where(more, head, head + 1), jnp.where(more, j + 1, 0)
        fetch(next_head, next_j, (cut.sequence(next_head) * hops + hop) * cut.nk + next_j, 1 - at, next_dkv)

    @pl.when(hop == 0)
    def _():
        dkv[at_dkv] = jnp.zeros(dkv.shape[1:], dkv.dtype)

    pl.when(hop > 0)(lambda: dkv_in(head, j, at_dkv).wait())

    @pl.when(some(row))
    def _():
        for copy in keys_in(head, j, at):
            copy.wait()
        state, dq_leaving, arrived, dq_arrived, dq_left = walk
        query_block = splash_bwd.tile_code(
            cut, unit, soft_cap, fold, Schedule(cut, b, q_ranges, k_ranges, b_hop), j, k_buf.at[at], v_buf.at[at],
            at_buf.at[at], buffers=buffers, dq_buf=dq_buf, column=column,
            dk=dkv.at[at_dkv, pl.ds(0, h)], dv=dkv.at[at_dkv, pl.ds(h, v_buf.shape[2])],
        )  # fmt: skip
        begin, run, dq_settle = splash_bwd.query_walk(
            cut, head, streams, dq_hbm, query_block, buffers=buffers, dq_buf=dq_buf, state=state, leaving=dq_leaving,
            arrived=arrived, dq_arrived=dq_arrived, dq_left=dq_left,
        )  # fmt: skip
        after = jnp.minimum(row + 1, b_hop * cut.nk + cut.nk - 1)
        more = (j + 1 < cut.nk) & some(after)
        pl.when((j == 0) | ~some(jnp.maximum(row - 1, 0)))(lambda: begin(lo[row]))
        run(lo[row], hi[row] - 1, lo[after], more)
        pl.when(~more)(dq_settle)

    dkv_out(head, j, at_dkv).start()
    leaving[at_dkv] = 1
    place[0], place[1] = 1 - at, next_dkv

    @pl.when(ends & (hop == hops - 1))
    def _():
        for x in range(SLOTS):
            settle(x)
        all_received()
