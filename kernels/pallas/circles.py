"""What the ring kernels share: who the neighbours are, how a hop opens, and which blocks it visits.

Credits. A device has two places for keys and values: what it holds, and what arrives. A place is written by the device
before; its owner reads it, and sends on from it. So that nothing is overwritten, a device sends in hop h only after the
next one has entered hop h: that has then sent on what it held in hop h - 1, and has received all that was sent in hop
h - 1. One free place, one credit. A barrier with both neighbours comes before the first hop; they are at most one hop
apart. Whatever else is sent in a hop, into places that were read in the hop before the last, is covered by that credit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide.kernels.pallas import tiles
from ringtide.kernels.pallas.tiles import LANES, Ranges


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
        """The devices before and after this one, for a kernel that holds `places`."""
        here = {name: places[2 + x] for x, name in enumerate(self.axes)}
        return here | {self.axis: places[0]}, here | {self.axis: places[1]}


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
            yield remote(source, target, sent.at[x], received.at[x], right)

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


def start_all(copies):
    for copy in copies:
        copy.start()


def remote(source, target, sent, received, device):
    return pltpu.make_async_remote_copy(
        source, target, sent, received, device_id=device, device_id_type=pl.DeviceIdType.MESH
    )


def link(arrays):
    """Semaphores of `turn`."""
    dma = pltpu.SemaphoreType.DMA
    return [dma((arrays,)), dma((arrays,)), pltpu.SemaphoreType.REGULAR]


def two(x):
    """[2, ...]: room for what is at hand, and for what arrives."""
    return jnp.stack([x, jnp.zeros_like(x)])


def places(axis):
    """int32 [1, 2 + axes of the mesh]: before and after this device's place along the axis; its places along each."""
    here, size = lax.axis_index(axis), lax.axis_size(axis)
    along = [lax.axis_index(name) for name in jax.sharding.get_abstract_mesh().axis_names]
    return jnp.stack([(here - 1) % size, (here + 1) % size, *along])[None]


def far_ranges(where, axis):
    """int32 [B | 1, P, kinds, S / 128]: least and greatest position (segment id) of 128 keys, of each hop's shard."""
    xs = [where.k_pos] if where.k_seg is None else jnp.broadcast_arrays(where.k_pos, where.k_seg)
    blocks = [tiles.pad(x, 1, LANES, mode="edge").reshape(len(x), -1, LANES) for x in xs]
    mine = jnp.stack([f(x, 2) for x in blocks for f in (jnp.min, jnp.max)], 1)
    hops = lax.axis_size(axis)
    source = (lax.axis_index(axis) - jnp.arange(hops)) % hops
    return jnp.take(lax.all_gather(mine, axis, axis=1), source, axis=1)


def tables(cut, hops, far, by_query):
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


def compiler_params(circle):
    return tiles.compiler_params(("arbitrary", "arbitrary", "arbitrary"), collective_id=circle.barrier)
