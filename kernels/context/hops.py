"""Which hops a ring makes: arithmetic on the layout and the mask, before anything is traced.

At offset o of a ring of P devices, device d attends to the keys of device d - o (mod P). An offset at which no device
sees anything is not travelled to; what is travelled to goes in streams, each a number of hops in one direction:

    all offsets (causal, full)             one stream, P - 1 hops     or a half of K and V each way, P - 1 hops
    contiguous, window of W keys           one stream, ceil((W - 1) / (T / P)) hops
    zigzag, the same                       two streams, to either side: a shard's two pieces have different neighbours

Striped shards hold positions from everywhere, so that a window skips nothing there.
"""

from typing import NamedTuple

import jax
import numpy as np

from ringtide.kernels import layouts


class Stream(NamedTuple):
    """Keys and values that travel `hops` hops: to the next device (step 1), or to the one before (step -1)."""

    step: int
    hops: int
    half: int | None = None  # of the tokens of a shard, 0 or 1; None: all of them

    def part(self, length: int) -> tuple[int, int]:
        """(first, past the last) of a shard's `length` tokens that travel."""
        middle = length // 2
        return (0, length) if self.half is None else (0, middle) if self.half == 0 else (middle, length)


def spans(layout: str, length: int, shards: int, ulysses: int = 1):
    """(least, greatest) positions [R, pieces] of the stretches that each of R = shards / ulysses ring members holds.

    A member of usp's ring holds the shards r, R + r, 2 R + r, ... of all `ulysses` devices.
    """
    pieces = layouts.PIECES[layout]
    at = np.arange(shards * pieces)
    size = length // (shards * pieces)
    ends = (layouts.position_of(index, layout, length, shards) for index in (at * size, at * size + size - 1))
    in_ring = lambda x: x.reshape(ulysses, shards // ulysses, pieces).swapaxes(0, 1).reshape(shards // ulysses, -1)
    return tuple(in_ring(x) for x in ends)


def visible(mask, queries, keys):
    """bool [R, R]: may member d (rows) see something of the keys of the member at offset o (columns)?

    queries, keys: `spans`.
    """
    (q_min, q_max), (k_min, k_max) = queries, keys
    rows, columns = (x[:, None, :, None] for x in (q_min, q_max)), (x[None, :, None, :] for x in (k_min, k_max))
    with jax.ensure_compile_time_eval():  # a user's mask may be written in JAX
        some, _ = mask.block(*rows, *columns)
    size = len(q_min)
    some = np.broadcast_to(np.asarray(some), (size, size, q_min.shape[1], k_min.shape[1])).any((2, 3))
    d = np.arange(size)
    return some[d[:, None], (d[:, None] - d) % size]


def streams(needed, bidirectional: bool = False) -> tuple[Stream, ...]:
    """The streams that reach all `needed` offsets (bool, one an offset) in the fewest hops.

    bidirectional: so that the busier direction of a link carries the least, at the cost of more and smaller kernels.
    """
    size = len(needed)
    down = lambda up: max((size - o for o in range(up + 1, size) if needed[o]), default=0)
    up = min(range(size), key=lambda up: (up + down(up), down(up)))
    ways = up, down(up)
    if bidirectional and 2 * max(ways) > size - 1:
        return Stream(1, size - 1, 0), Stream(-1, size - 1, 1)
    return tuple(Stream(step, hops) for step, hops in zip((1, -1), ways, strict=True) if hops)
