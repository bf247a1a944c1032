"""Ring attention in one kernel: keys and values go around the ring by remote DMA, under the tiles of splash."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.pallas import platforms, splash, splash_bwd, tiles
from ringtide.kernels.pallas.tiles import LANES, Cut, Ranges, Schedule

SLOTS = 3  # of what is carried from hop to hop: one is read ahead, one summed into, one written back


class Circle(NamedTuple):
    """The devices that a ring goes around, along one axis of a mesh."""

    axis: str
    axes: tuple[str, ...]  # all of the mesh
    hops: int  # as many as devices; in the first, each has its own keys

    @classmethod
    def along(cls, axis):
        return cls(axis, jax.sharding.get_abstract_mesh().axis_names, lax.axis_size(axis))

    @property
    def barrier(self):
        """A number for each axis: rings along two axes do not hear each other's barriers."""
        return self.axes.index(self.axis)

    def devices(self, places):
        """The devices before and after this one, for a kernel that holds `_places`."""
        here = {name: places[2 + x] for x, name in enumerate(self.axes)}
        return here | {self.axis: places[0]}, here | {self.axis: places[1]}


SCALARS = 960 << 10  # bytes of tables, of the 1 MiB of scalar memory


def serves(q, k, v, where, *args, axis, mask, **options):
    """Can this kernel serve the call, on the chip that is compiled for, and better than a ring of permutes?

    args, options: those of `forward` or `backward`.
    """
    chip, cores = platforms.chip()
    mesh = jax.sharding.get_abstract_mesh()
    if cores > 1 or chip == "unknown" or where.q_pos is None or set(mesh.manual_axes) != set(mesh.axis_names):
        return False
    table, by_query = (splash_bwd.TILES, False) if args else (splash.TILES, True)
    sizes = tiles.choose(table, chip, max(q.shape[3], v.shape[3]), tiles.widen(q.dtype))

    def tables(q, k, v, where, far):
        return _tables(Cut(q, k, v, where, mask, sizes), far.shape[1], far, by_query)

    found = jax.tree.leaves(jax.eval_shape(tables, q, k, v, where, _far_ranges(where, axis)))
    return sum(x.size * x.dtype.itemsize for x in found) <= SCALARS


def forward(q, k, v, where, *, axis, mask, scale, soft_cap=None, out_dtype=None, sizes=None, interpret=True):
    """Attention of the shard's q [B, T, N, H] over the k [B, S, N_kv, H], v [B, S, N_kv, H_v] of all shards on `axis`.

    Called inside shard_map, by all devices along the axis (at least 2). where: positions of the shard's tokens, and
    segment ids or not. Returns (out [B, T, N, H_v] in out_dtype or q's, lse [B, T, N] float32).

    sizes, interpret: as in `splash.forward`; only pltpu.InterpretParams knows remote copies.
    """
    out_dtype = out_dtype or q.dtype
    q, k, v = (tiles.widen(x) for x in (q, k, v))
    circle = Circle.along(axis)

    def call(interpret, chip, cores, q, k, v, where, places, far):
        chosen = sizes or tiles.choose(splash.TILES, chip, max(q.shape[3], v.shape[3]), q.dtype)
        cut = Cut(q, k, v, where, mask, chosen)
        return _forward_call(cut, circle, scale, soft_cap, out_dtype, interpret, q, k, v, places, far)

    shapes = ((*q.shape[:3], v.shape[3]), out_dtype), (q.shape[:3], jnp.float32)
    return platforms.run(call, interpret, shapes, q, k, v, where, _places(axis), _far_ranges(where, axis))


def _forward_call(cut, circle, scale, soft_cap, out_dtype, interpret, q, k, v, places, far):
    hops = circle.hops
    q = tiles.pad(cut.queries(q).reshape(cut.b * cut.stacks, cut.nq, cut.rows, cut.h), 3, LANES)
    k = cut.keys_first(k)
    v = tiles.pad(tiles.pad(v, 1, cut.keys).transpose(0, 2, 3, 1).reshape(len(k), cut.h_v, k.shape[1]), 1, 16)
    (lo, hi), q_ranges, k_ranges = _tables(cut, hops, far, by_query=True)
    unit = tiles.unit_of(scale, soft_cap)
    h, h_v, rows, keys, stacks = k.shape[2], v.shape[1], cut.rows, cut.keys, cut.b * cut.stacks
    hbm, dma = pl.BlockSpec(memory_space=pl.ANY), pltpu.SemaphoreType.DMA
    travelling = [_two(x) for x in (k, v, cut.k_at)]
    sums = [(h_v, rows), (1, rows), (1, rows)]  # O^T, m, l
    block = lambda hop, head, i, *_: (head, i, 0, 0)
    at_last = lambda hop, head, i, *_: (jnp.where(hop == hops - 1, head, 0), jnp.where(hop == hops - 1, i, 0), 0, 0)
    scratch = {
        "k_buf": pltpu.VMEM((2, keys, h), k.dtype),
        "v_buf": pltpu.VMEM((2, h_v, keys), v.dtype),
        "at_buf": pltpu.VMEM((2, 8, keys), jnp.int32),
        "sums": [pltpu.VMEM((SLOTS, *x), jnp.float32) for x in sums],
        "kept": [pltpu.VMEM(x, jnp.float32) for x in sums],
        "bad": pltpu.VMEM((1, rows), jnp.float32),
        "state": pltpu.SMEM((2,), jnp.int32),
        "leaving": pltpu.SMEM((SLOTS,), jnp.int32),
        "ready": pltpu.SMEM((1,), jnp.int32),
        "stale": pltpu.SMEM((1,), jnp.int32),
        "arrived": dma((3, 2)),
        "sums_arrived": dma((3, SLOTS)),
        "sums_left": dma((3, SLOTS)),
        "link": _link(3),
    }
    if cut.fold and soft_cap is None and tiles.half_fills(q) and unit:
        scratch["q_less_m"] = pltpu.VMEM((rows, 2 * h), q.dtype)
    out, lse, *_ = pl.pallas_call(
        tiles.named(functools.partial(_forward_kernel, cut, circle, unit, soft_cap), scratch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(hops, stacks, cut.nq),
            in_specs=[
                pl.BlockSpec((1, 1, rows, h), block),
                pl.BlockSpec((1, 8, cut.span), lambda hop, head, i, *_: (cut.sequence(head), 0, i)),
                hbm, hbm, hbm,
            ],
            out_specs=[pl.BlockSpec((1, 1, h_v, rows), at_last), pl.BlockSpec((1, 1, 1, rows), at_last)] + 6 * [hbm],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            tiles.shape((stacks, cut.nq, h_v, rows), tiles.widen(out_dtype), q),
            tiles.shape((stacks, cut.nq, 1, rows), jnp.float32, q),
            *(tiles.shape(x.shape, x.dtype, q) for x in travelling),
            *(tiles.shape((stacks, cut.nq, *x), jnp.float32, q) for x in sums),
        ],
        input_output_aliases={7: 2, 8: 3, 9: 4},
        compiler_params=_compiler_params(circle),
        interpret=interpret,
        name="ring_forward",
    )(lo, hi, q_ranges, k_ranges, places[0], q, cut.q_at, *travelling)  # fmt: skip
    out = out[:, :, : cut.h_v].reshape(stacks, cut.nq, cut.h_v, cut.stack, cut.span)
    lse = lse.reshape(stacks, cut.nq, cut.stack, cut.span)
    return cut.unqueries(jnp.moveaxis(out, 2, 4)).astype(out_dtype), cut.unqueries(lse)


def _forward_kernel(
    cut, circle, unit, soft_cap, lo, hi, q_ranges, k_ranges, places, q_ref, q_at_ref, *refs,
    k_buf, v_buf, at_buf, sums, kept, bad, state, leaving, ready, stale, arrived, sums_arrived, sums_left, link,
    q_less_m=None,
):  # fmt: skip
    """One query block in one hop."""
    hops = circle.hops
    *_, out_ref, lse_ref, k_hbm, v_hbm, at_hbm, acc_hbm, m_hbm, l_hbm = refs
    hop, head, i = (pl.program_id(x) for x in range(3))
    final, here = hop == hops - 1, lax.rem(hop, 2)
    b = cut.sequence(head)
    b_hop = b * hops + hop
    row = b_hop * cut.nq + i
    some = lambda row: hi[row] > lo[row]
    first, last = lo[row], hi[row] - 1
    kv_head = cut.kv_head(head)

    turn(hop, circle, hops - 1, (head == 0) & (i == 0), places, (k_hbm, v_hbm, at_hbm), link)

    @pl.when((hop == 0) & (head == 0) & (i == 0))
    def _():
        state[0], state[1] = 0, 0  # slot of K and V, slot of the sums
        for x in range(SLOTS):
            leaving[x] = 0
        if q_less_m is not None:
            q_less_m[...] = jnp.zeros_like(q_less_m)

    # Load: key blocks, and the sums of the hops before; those of this hop leave.

    streams = [
        (k_hbm.at[here, kv_head], k_buf, 0),
        (v_hbm.at[here, kv_head], v_buf, 1),
        (at_hbm.at[here, b], at_buf, 1),
    ]
    copies, start = splash.loads(cut, streams, arrived)

    def sums_in(i, to):
        for x, (hbm, buffer) in enumerate(zip((acc_hbm, m_hbm, l_hbm), sums, strict=True)):
            yield pltpu.make_async_copy(hbm.at[head, i], buffer.at[to], sums_arrived.at[x, to])

    def sums_out(i, to):
        for x, (hbm, buffer) in enumerate(zip((acc_hbm, m_hbm, l_hbm), sums, strict=True)):
            yield pltpu.make_async_copy(buffer.at[to], hbm.at[head, i], sums_left.at[x, to])

    def settle(to):
        @pl.when(leaving[to] == 1)
        def _():
            for copy in sums_out(0, to):
                copy.wait()
            leaving[to] = 0

    def query_block():
        at_sums = state[1]
        next_sums = jnp.where(at_sums == SLOTS - 1, 0, at_sums + 1)
        following = (i + 1 < cut.nq) & some(jnp.minimum(row + 1, b_hop * cut.nq + cut.nq - 1))
        acc, m, l = (x.at[at_sums] for x in sums)
        key_block = splash.tile_code(
            cut, unit, soft_cap, Schedule(cut, b, q_ranges, k_ranges, b_hop), i, q_ref, q_at_ref,
            k_buf=k_buf, v_buf=v_buf, m=m, l=l, acc=acc, ready=ready, stale=stale, q_less_m=q_less_m, at_buf=at_buf,
        )  # fmt: skip

        @pl.when((i == 0) | ~some(jnp.maximum(row - 1, 0)))  # nothing was started by the block before
        def _():
            start(last, state[0])
            pl.when(hop > 0)(lambda: start_all(sums_in(i, at_sums)))

        @pl.when(hop > 0)
        def _():
            for copy in sums_in(i, at_sums):
                copy.wait()

        settle(next_sums)
        pl.when(following & (hop > 0))(lambda: start_all(sums_in(i + 1, next_sums)))

        def attempt(careful):
            """As in splash, from the sums of the hops before."""

            @pl.when(hop == 0)
            def _():
                m[...] = jnp.full_like(m, -jnp.inf)
                l[...] = jnp.zeros_like(l)
                acc[...] = jnp.zeros_like(acc)

            @pl.when((hop > 0) & careful)
            def _():
                for copy in sums_in(i, at_sums):
                    copy.start()
                    copy.wait()

            ready[0] = (jnp.min(m[...]) > -jnp.inf).astype(jnp.int32)
            stale[0] = 1

            def step(x, at):
                j = last - x
                pl.when(careful)(lambda: start(j, at))
                for copy in copies(j, at):
                    copy.wait()
                pl.when(~careful & (j > first))(lambda: start(j - 1, 1 - at))
                pl.when(~careful & (j == first) & following)(lambda: start(hi[row + 1] - 1, 1 - at))
                key_block(at, j, careful)
                return jnp.where(careful, at, 1 - at)

            after = lax.fori_loop(0, last - first + 1, step, jnp.where(careful, 1 - state[0], state[0]))
            state[0] = jnp.where(careful, 1 - after, after)

            @pl.when(~careful)
            def _():
                fine = (l[...] < splash.OVERFLOW) & (jnp.max(jnp.abs(acc[...]), axis=0, keepdims=True) < jnp.inf)
                bad[...] = jnp.where(fine, 0.0, 1.0)

            again = ~careful & (jnp.max(bad[...]) > 0)

            @pl.when(again)
            def _():
                for x, now in zip(kept, (acc, m, l), strict=True):
                    x[...] = now[...]

            @pl.when(careful)
            def _():
                for x, now in zip(kept, (acc, m, l), strict=True):
                    now[...] = jnp.where(bad[...] > 0, now[...], x[...])

            return jnp.where(again, 1, 2)

        lax.while_loop(lambda tries: tries < 2, lambda tries: attempt(tries == 1), 0)

        @pl.when(final)
        def _():
            out, lse = splash.result(m, l, acc)
            out_ref[0, 0] = out.astype(out_ref.dtype)
            lse_ref[0, 0] = lse

        @pl.when(~final)
        def _():
            start_all(sums_out(i, at_sums))
            leaving[at_sums] = 1

        state[1] = next_sums

    pl.when(some(row))(query_block)

    @pl.when((head == pl.num_programs(1) - 1) & (i == cut.nq - 1))
    def _():
        for x in range(SLOTS):
            settle(x)


def backward(
    q, k, v, where, dout, lse, delta, *, axis, mask, scale, soft_cap=None, out_dtype=None, sizes=None, interpret=True
):
    """Gradients (dq, dk, dv) of the shard, given lse and delta over the keys of all shards; see splash_bwd.backward."""
    dtypes = [out_dtype or x.dtype for x in (q, k, v)]
    q, k, v, dout = (tiles.widen(x) for x in (q, k, v, dout.astype(q.dtype)))
    circle = Circle.along(axis)

    def call(interpret, chip, cores, q, k, v, where, dout, lse, delta, places, far):
        chosen = sizes or tiles.choose(splash_bwd.TILES, chip, max(q.shape[3], v.shape[3]), q.dtype)
        cut = Cut(q, k, v, where, mask, chosen)
        call = functools.partial(_backward_call, cut, circle, scale, soft_cap, dtypes, interpret)
        return call(q, k, v, dout, lse, delta, places, far)

    shapes = [(x.shape, dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    args = q, k, v, where, dout, lse, delta, _places(axis), _far_ranges(where, axis)
    return platforms.run(call, interpret, shapes, *args)


def _backward_call(
    cut, circle, scale, soft_cap, dtypes, interpret, q, k, v, dout, lse, delta, places, far
):  # fmt: skip
    unit, hops = tiles.unit_of(scale, soft_cap), circle.hops
    q, k, v, streams, fold = splash_bwd.prepared(cut, unit, soft_cap, q, k, v, dout, lse, delta)
    (lo, hi), q_ranges, k_ranges = _tables(cut, hops, far, by_query=False)
    (stacks, nq, rows, h), h_v, keys = q.shape, v.shape[2], cut.keys
    hbm, dma = pl.BlockSpec(memory_space=pl.ANY), pltpu.SemaphoreType.DMA
    in_place = [jnp.zeros_like(q, jnp.float32), *(_two(x) for x in (k, v, cut.k_at))]
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
        "link": _link(3),
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
        compiler_params=_compiler_params(circle),
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
        return _remote(dkv.at[to], target, dkv_sent.at[to], dkv_received, circle.devices(places)[1])

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
        pl.when(some(row))(lambda: start_all(keys_in(head, j, at)))
        pl.when(hop > 0)(lambda: dkv_in(head, j, at_dkv).start())

    turn(hop, circle, hops, opens, places, (k_hbm, v_hbm, at_hbm), link, all_received)

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


def turn(hop, circle, turns, now, places, arrays, link, received_too=lambda: None):
    """What opens a hop, when `now`: the arrays [2, ...] of this hop are here, and on their way to the next device.

    A device has two places for what arrives, of which one is in use; so the device before it sends by credit: once the
    barrier has been passed, and in hops 1 to turns - 1 once this device has done with the hop before. received_too:
    waits for whatever else the device before sent in that hop.
    """
    hops = circle.hops
    left, right = circle.devices(places)
    sent, received, credit = link

    def copies(hop):
        for x, ref in enumerate(arrays):
            source, target = ref.at[lax.rem(hop, 2)], ref.at[lax.rem(hop + 1, 2)]
            yield _remote(source, target, sent.at[x], received.at[x], right)

    def tell(semaphore, device):
        pl.semaphore_signal(semaphore, 1, device_id=device, device_id_type=pl.DeviceIdType.MESH)

    @pl.when(now & (hop == 0))
    def _():
        barrier = pltpu.get_barrier_semaphore()
        tell(barrier, left)
        tell(barrier, right)
        pl.semaphore_wait(barrier, 2)

    @pl.when(now & (hop > 0))
    def _():
        for copy in copies(hop - 1):
            copy.wait()
        received_too()

    @pl.when(now & (hop > 0) & (hop < turns))
    def _():
        tell(credit, left)
        pl.semaphore_wait(credit, 1)

    @pl.when(now & (hop < hops - 1))
    def _():
        start_all(copies(hop))


def _remote(source, target, sent, received, device):
    return pltpu.make_async_remote_copy(
        source, target, sent, received, device_id=device, device_id_type=pl.DeviceIdType.MESH
    )


def start_all(copies):
    for copy in copies:
        copy.start()


def _link(arrays):
    """Semaphores of `turn`."""
    dma = pltpu.SemaphoreType.DMA
    return [dma((arrays,)), dma((arrays,)), pltpu.SemaphoreType.REGULAR]


def _two(x):
    """[2, ...]: room for what is at hand, and for what arrives."""
    return jnp.stack([x, jnp.zeros_like(x)])


def _places(axis):
    """int32 [1, 2 + axes of the mesh]: before and after this device's place along the axis; its places along each."""
    here, size = lax.axis_index(axis), lax.axis_size(axis)
    places = [lax.axis_index(name) for name in jax.sharding.get_abstract_mesh().axis_names]
    return jnp.stack([(here - 1) % size, (here + 1) % size, *places])[None]


def _far_ranges(where, axis):
    """int32 [B | 1, P, kinds, S / 128]: least and greatest position (segment id) of 128 keys, of each hop's shard."""
    xs = [where.k_pos] if where.k_seg is None else jnp.broadcast_arrays(where.k_pos, where.k_seg)
    blocks = [tiles.pad(x, 1, LANES, mode="edge").reshape(len(x), -1, LANES) for x in xs]
    mine = jnp.stack([f(x, 2) for x in blocks for f in (jnp.min, jnp.max)], 1)
    hops = lax.axis_size(axis)
    source = (lax.axis_index(axis) - jnp.arange(hops)) % hops
    return jnp.take(lax.all_gather(mine, axis, axis=1), source, axis=1)


def _tables(cut, hops, far, by_query):
    """As `Cut.tables`, for each hop: row b * hops + hop. A block that sees nothing is visited in the first hop and in
    the last one only if `by_query`, else never."""
    far = tiles.pad(far, 3, cut.keys // LANES, mode="edge")

    def ranges(block):
        blocks = far.reshape(*far.shape[:3], -1, block // LANES)
        pairs = [(blocks[:, :, x].min(-1), blocks[:, :, x + 1].max(-1)) for x in range(0, far.shape[2], 2)]
        return Ranges(*pairs)

    q, k = cut.ranges(cut.q_at, cut.span, cut.nq), ranges(cut.keys)
    j = jnp.arange(cut.nk) * cut.keys
    q_across = jax.tree.map(lambda x: x[:, None, :, None], q)
    k_across = jax.tree.map(lambda x: x[:, :, None, :], k)
    some, _ = cut.classify(q_across, k_across, j, j + cut.keys - 1)
    some = jnp.broadcast_to(some, (len(cut.q_at), hops, cut.nq, cut.nk))
    if by_query:
        hop = jnp.arange(hops)[:, None]
        found = tiles.visits(some, jnp.where((hop == 0) | (hop == hops - 1), 1, 0))
    else:
        found = tiles.visits(some.swapaxes(2, 3), 0)
    fine = jnp.stack(
        [jnp.broadcast_to(x, (len(cut.q_at), *x.shape[1:])) for x in jax.tree.leaves(ranges(cut.chunk))], 2
    )
    return found, cut.flat(q), fine.reshape(-1)


def _compiler_params(circle):
    return tiles.compiler_params(("arbitrary", "arbitrary", "arbitrary"), collective_id=circle.barrier)
