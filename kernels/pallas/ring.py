"""Ring attention in one kernel: keys and values go around the ring by remote DMA, under the tiles of splash.

    for each hop (grid):                              device d holds the keys of device d - hop (mod P)
        wait for its K, V;  send them on              into the other of the next device's two places, see circles.py
        for each query block (grid):                  splash.py, with one difference: m, l and O^T are not new
            m, l, O^T of the hops before come from HBM, the next block's during this one; those of this hop leave
            key blocks as in splash                   m is a maximum of scores that were seen: all can be streamed
    in the last hop: out = O / l, lse

Sums are merged by going on with them, in float32: nothing is normalised before the end, and no pass over HBM merges.
A query block that sees nothing of a hop's keys is passed over, with its sums (not in the first and the last hop, which
make and finish them). A second attempt starts from the sums of the hops before; l stays below 2^100, so it is exact.

Memory, bytes in VMEM beside splash's (bfloat16, H = H_v = 128, rows 2048, keys 2048), and in HBM a device:
    O^T float32: three instead of one, one kept     3.0 M more     K, V twice: at hand, and arriving
    m, l, and positions                             0.1 M          O^T float32, m, l

Which ring a chip takes (`serves`). Predicted by `ringtide bench schedule --op ring`, for 65,536 tokens a device, all
visible: milliseconds of a round in kernels + in all else, and GiB in HBM beside arguments and results.
                                                by permutes               in one kernel
    tpu7x, 8 devices, head_dim 128, forward      982 + 25 ms, 5.0 GiB       976 +  2 ms, 2.5 GiB
                                    backward    2563 + 131 ms, 8.8 GiB     2565 + 16 ms, 6.1 GiB
    v5p, 4 devices, head_dim 128, forward        653 +  31 ms, 5.0 GiB      1300 +  8 ms, 2.0 GiB
                                  backward      1636 +  90 ms, 7.0 GiB      3272 + 21 ms, 4.0 GiB
A TPU with one core a device takes this kernel: a tile costs the same, hops start with a reference, and what XLA does in
each hop (transposes of K and V, float32 results out of their blocks, the merge, dk and dv) is gone. On v5p a device has
two cores, between which splash splits the heads; this kernel runs on one, and which of two would send, and how they
would wait for each other at a hop, cannot be shown without the device: v5p takes the permutes. So does a call that is
not once all the way around: a window, whose ring is short; two directions; positions that are not given; tables beyond
the scalar memory. Not run on a TPU so far: values and races are the interpreter's, all else is the compiler's.

Limits: those of splash; 2 devices or more; a shard_map over the whole mesh. Tables of all hops lie in scalar memory,
enough for some 30M tokens in all, or 20M with segment ids, at batch 1. Off a TPU the permutes serve: only
pltpu.InterpretParams knows remote copies.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.pallas import circles, platforms, splash, splash_bwd, tiles
from ringtide.kernels.pallas.ring_bwd import backward  # noqa: F401  the other half of the op's contract
from ringtide.kernels.pallas.tiles import LANES, Cut, Schedule

SLOTS = 3  # of the sums: one is read ahead, one summed into, one written back
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

    def tables(q, k, v, where):
        return circles.tables(
            Cut(q, k, v, where, mask, sizes), lax.axis_size(axis), circles.far_ranges(where, axis), by_query
        )

    found = jax.tree.leaves(jax.eval_shape(tables, q, k, v, where))
    return sum(x.size * x.dtype.itemsize for x in found) <= SCALARS


def forward(q, k, v, where, *, axis, mask, scale, soft_cap=None, out_dtype=None, sizes=None, interpret=True):
    """Attention of the shard's q [B, T, N, H] over the k [B, S, N_kv, H], v [B, S, N_kv, H_v] of all shards on `axis`.

    Called inside shard_map, by all devices along the axis (at least 2). where: positions of the shard's tokens, and
    segment ids or not. Returns (out [B, T, N, H_v] in out_dtype or q's, lse [B, T, N] float32).

    sizes, interpret: as in `splash.forward`; only pltpu.InterpretParams knows remote copies.
    """
    out_dtype = out_dtype or q.dtype
    q, k, v = (tiles.widen(x) for x in (q, k, v))
    circle = circles.Circle.along(axis)

    def call(interpret, chip, cores, q, k, v, where, places, far):
        chosen = sizes or tiles.choose(splash.TILES, chip, max(q.shape[3], v.shape[3]), q.dtype)
        cut = Cut(q, k, v, where, mask, chosen)
        return _forward_call(cut, circle, scale, soft_cap, out_dtype, interpret, q, k, v, places, far)

    shapes = ((*q.shape[:3], v.shape[3]), out_dtype), (q.shape[:3], jnp.float32)
    return platforms.run(call, interpret, shapes, q, k, v, where, circles.places(axis), circles.far_ranges(where, axis))


def _forward_call(cut, circle, scale, soft_cap, out_dtype, interpret, q, k, v, places, far):
    hops = circle.hops
    q = tiles.pad(cut.queries(q).reshape(cut.b * cut.stacks, cut.nq, cut.rows, cut.h), 3, LANES)
    k = cut.keys_first(k)
    v = tiles.pad(tiles.pad(v, 1, cut.keys).transpose(0, 2, 3, 1).reshape(len(k), cut.h_v, k.shape[1]), 1, 16)
    (lo, hi), q_ranges, k_ranges = circles.tables(cut, hops, far, by_query=True)
    unit = tiles.unit_of(scale, soft_cap)
    h, h_v, rows, keys, stacks = k.shape[2], v.shape[1], cut.rows, cut.keys, cut.b * cut.stacks
    hbm, dma = pl.BlockSpec(memory_space=pl.ANY), pltpu.SemaphoreType.DMA
    travelling = [circles.two(x) for x in (k, v, cut.k_at)]
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
        "link": circles.link(3),
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
        compiler_params=circles.compiler_params(circle),
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

    circles.turn(hop, circle, hops - 1, (head == 0) & (i == 0), places, (k_hbm, v_hbm, at_hbm), link)

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
            pl.when(hop > 0)(lambda: circles.start_all(sums_in(i, at_sums)))

        @pl.when(hop > 0)
        def _():
            for copy in sums_in(i, at_sums):
                copy.wait()

        settle(next_sums)
        pl.when(following & (hop > 0))(lambda: circles.start_all(sums_in(i + 1, next_sums)))

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

            splash.walk(first, last, careful, following, lambda: hi[row + 1] - 1, state, copies, start, key_block)

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
            circles.start_all(sums_out(i, at_sums))
            leaving[at_sums] = 1

        state[1] = next_sums

    pl.when(some(row))(query_block)

    @pl.when((head == pl.num_programs(1) - 1) & (i == cut.nq - 1))
    def _():
        for x in range(SLOTS):
            settle(x)
