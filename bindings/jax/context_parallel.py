"""Attention over a sequence that is sharded along a mesh axis: global arrays in, global arrays out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ringtide.jax import dispatch, meshes
from ringtide.jax.attention import Kernel, check, differentiable, numbers
from ringtide.kernels import layouts
from ringtide.kernels.context import hops
from ringtide.kernels.context.all_gather import AllGather
from ringtide.kernels.context.ring import Ring
from ringtide.kernels.context.ulysses import Ulysses, heads_over
from ringtide.kernels.context.usp import USP
from ringtide.kernels.masks import Full, Where

STRATEGIES = ("all_gather", "ring", "ulysses", "usp")  # usp over two mesh axes, the others over one
RINGS = ("ring", "usp")
COVERED = 16384  # FLOP a byte: what a TPU's matrix units do while its interconnect moves one, with room to spare


def context_parallel_attention(
    query,
    key,
    value,
    *,
    mesh,
    seq_axis,
    head_axis=None,
    batch_axis=None,
    strategy="auto",
    bidirectional=False,
    layout="contiguous",
    mask=None,
    segment_ids=None,
    q_positions=None,
    kv_positions=None,
    scale=None,
    logits_soft_cap=None,
    sinks=None,
    return_lse=False,
    implementation=None,
):
    """`attention` with time sharded over a mesh axis: the same values and gradients, each device holding T / P tokens.

    Takes and returns global arrays whose time axes are in layout order (`shard_sequence` brings them there) and applies
    `jax.shard_map` itself. Works under jit and grad.

    Args:
      mesh: a jax.sharding.Mesh.
      seq_axis: the name of the mesh axis that time is sharded over, P devices; for usp the names of two, (ulysses,
        ring), P in all. T and S must divide by P (zigzag: 2 P).
      head_axis, batch_axis: the mesh axes that heads and batch are sharded over: a name, a tuple of names, or None.
      strategy: "all_gather" (of K and V), "ring" (K and V travel around the axis), "ulysses" (an all-to-all shards the
        heads instead), "usp" (both, over two axes), or "auto": usp for two axes; for one, the ring where a hop's
        arithmetic hides its transfer, T / P * N / N_kv >= 16,384, where the mask needs no more than one hop to a side,
        or where it is to be bidirectional; else ulysses if the heads fit without padding; else all_gather. `explain`
        prints the numbers.
      bidirectional: whether the rings of ring and usp send half of K and V each way around where they would go all the
        way around: half the bytes for a link to carry in a direction, two smaller kernels a hop.
      layout: "contiguous", "zigzag" (balances causal work) or "striped": the order of the time axes of all arrays.
        Positions count in the original order, unless q_positions and kv_positions (in layout order) say otherwise.
      The rest is as in `attention`.

    Raises: as `attention`; ValueError also for lengths, heads or batch that do not divide by their mesh axes.
    """
    query, key, value, where, mask, sinks = check(
        query, key, value, mask, segment_ids, q_positions, kv_positions, sinks
    )
    call = Call(mesh, seq_axis, head_axis, batch_axis, strategy, bidirectional, layout, query, key, mask, where)
    axes, where = call.axes, call.place()
    local = Kernel(dispatch.names("attention", implementation), mask, *numbers(query, scale, logits_soft_cap))
    if call.strategy in RINGS:
        kernel = Ring(local, axes[-1], *call.rings())
        kernel = USP(kernel, axes[0]) if call.strategy == "usp" else kernel
    else:
        kernel = {"all_gather": AllGather, "ulysses": Ulysses}[call.strategy](local, axes[0])

    tokens = P(batch_axis, axes, head_axis, None)
    specs = (
        tokens,
        tokens,
        tokens,
        _where_specs(where, axes, head_axis, batch_axis),
        sinks if sinks is None else P(head_axis),
    )
    args = query, key, value, where, sinks
    if meshes.is_explicit(mesh):
        args = jax.tree.map(lambda x, spec: meshes.place(x, mesh, spec), args, specs)
    run = jax.shard_map(
        lambda *args: differentiable(kernel, *args, return_lse=True),
        mesh=mesh,
        in_specs=specs,
        out_specs=(tokens, P(batch_axis, axes, head_axis)),
    )
    out, lse = run(*args)
    return (out, lse) if return_lse else out


def shard_sequence(x, mesh, seq_axis, layout="contiguous"):
    """Brings x [B, T, ...] from the original order into layout order, sharded over `seq_axis`."""
    return _reorder(x, mesh, seq_axis, layout, layouts.position_of, P(None, _axes(mesh, seq_axis)[0]))


def unshard_sequence(x, mesh, seq_axis, layout="contiguous"):
    """Brings x [B, T, ...] from layout order back into the original order, on every device."""
    return _reorder(x, mesh, seq_axis, layout, layouts.index_of, P())


def _reorder(x, mesh, seq_axis, layout, source, spec):
    x = jnp.asarray(x)
    if x.ndim < 2:
        raise ValueError(f"x: expected [B, T, ...], got shape {list(x.shape)}: add a batch axis")
    order = source(np.arange(x.shape[1]), layout, x.shape[1], _axes(mesh, seq_axis)[1])
    if layout != "contiguous":
        if meshes.is_explicit(mesh):
            x = meshes.place(x, mesh, P())  # a gather along a sharded axis has no sharding of its own
        x = jnp.take(x, order, axis=1)
    return meshes.place(x, mesh, spec)


class Call:
    """A call over a mesh, its arguments checked against that, and what follows from their shapes."""

    def __init__(self, mesh, seq_axis, head_axis, batch_axis, strategy, bidirectional, layout, query, key, mask, where):
        self.axes, self.shards = _axes(mesh, seq_axis)
        self.layout, self.bidirectional, self.mask, self.where = layout, bidirectional, mask, where
        if strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy: expected auto, {', '.join(STRATEGIES)}, got {strategy!r}")
        if strategy != "auto" and (reason := self.refuses(strategy)):
            raise ValueError(reason)
        self.ring = mesh.shape[self.axes[-1]]  # devices along the axis that a ring goes around
        self.heads, self.batch = _extent("head_axis", mesh, head_axis), _extent("batch_axis", mesh, batch_axis)
        used = [*self.axes, *_names(head_axis), *_names(batch_axis)]
        if twice := [axis for axis in used if used.count(axis) > 1]:
            raise ValueError(
                f"seq_axis, head_axis, batch_axis: {twice[0]!r} is named twice: each axis shards one thing"
            )
        for name, axis, size, what, lengths in (
            ("head_axis", head_axis, self.heads, "heads of query and key", (query.shape[2], key.shape[2])),
            ("batch_axis", batch_axis, self.batch, "batch", (query.shape[0],)),
        ):
            if any(x % size for x in lengths):
                got = " and ".join(map(str, lengths))
                cure = "pad or repeat them"
                raise ValueError(f"{name}: {what}, {got}, must divide by {size}, the size of {axis!r}: {cure}")
        self.lengths = query.shape[1], key.shape[1]
        for length in self.lengths:
            layouts.check_length(layout, length, self.shards)
        self.n, self.n_kv = query.shape[2] // self.heads, key.shape[2] // self.heads
        self.strategy = self._rule() if strategy == "auto" else strategy

    def refuses(self, strategy):
        """Why a strategy cannot serve the call, and the cure; None if it can."""
        if (strategy == "usp") != (len(self.axes) == 2):
            over, cure = ("two", "name one") if len(self.axes) == 2 else ("one", "name two, (ulysses, ring)")
            return f"seq_axis: {strategy} does not work over {over}, got {self.axes!r}: {cure}"
        if self.bidirectional and strategy not in RINGS:
            return f"bidirectional: {strategy} has no ring, {' and '.join(RINGS)} do: leave it out"
        return None

    def _rule(self):
        """What "auto" stands for."""
        if len(self.axes) == 2:
            return "usp"
        streams, _ = self.rings()
        if self.bidirectional or self.covers() >= COVERED or max((x.hops for x in streams), default=0) <= 1:
            return "ring"
        heads = heads_over(self.n, self.n_kv, self.shards)
        return "ulysses" if heads.kv_heads * heads.group == self.n else "all_gather"

    def covers(self):
        """FLOP a hop of the ring does, all visible, for each byte of bfloat16 K and V that it sends."""
        return self.lengths[0] // self.shards * (self.n // self.n_kv)

    def sees(self):
        """`hops.visible` of the ring's members; all of it where positions were given."""
        mask = Full() if self.given else self.mask
        ulysses = self.shards // self.ring
        return hops.visible(mask, *(hops.spans(self.layout, x, self.shards, ulysses) for x in self.lengths))

    @property
    def given(self):
        return self.where.q_pos is not None or self.where.k_pos is not None

    def rings(self):
        """(streams, pieces) of the rings along the last axis: the hops that are made, and how to tell an empty one."""
        see = self.sees()
        streams = hops.streams(see.any(0), self.bidirectional and self.lengths[1] > self.ring)  # one key has no halves
        made = [x.step * hop % self.ring for x in streams for hop in range(1, x.hops + 1)]
        known = self.where.q_seg is None and not (self.given and self.mask != Full())
        pieces = self.shards // self.ring * layouts.PIECES[self.layout]
        return streams, 0 if known and see[:, made].all() else pieces

    def place(self):
        """`where`, with the positions of the layout where none were given; none for a mask that looks at none."""
        if self.mask == Full():
            return self.where._replace(q_pos=None, k_pos=None)

        def positions(given, length):
            if given is not None:
                return given
            return layouts.position_of(jnp.arange(length, dtype=jnp.int32), self.layout, length, self.shards)[None]

        q_pos, k_pos = map(positions, self.where[:2], self.lengths)
        return self.where._replace(q_pos=q_pos, k_pos=k_pos)


def _axes(mesh, seq_axis):
    """(seq_axis as a tuple of names, the devices along them)."""
    axes = tuple(seq_axis) if isinstance(seq_axis, tuple | list) else (seq_axis,)
    if len(axes) not in (1, 2):
        raise ValueError(f"seq_axis: expected the name of a mesh axis, or two, (ulysses, ring), got {seq_axis!r}")
    return axes, math.prod(_axis_size("seq_axis", mesh, axis) for axis in axes)


def _where_specs(where, seq_axis, head_axis, batch_axis):
    """Axes of size 1 stand for all, and are not sharded."""

    def spec(x, *axes):
        if x is None:
            return None
        return P(*(axis if size > 1 else None for axis, size in zip(axes, x.shape, strict=True)))

    ids = [spec(x, batch_axis, seq_axis) for x in where[:4]]
    return Where(*ids, spec(where.dense, batch_axis, head_axis, seq_axis, None))


def _extent(name, mesh, axis):
    """The devices along `axis`: a name, a tuple of names, or None."""
    return math.prod(_axis_size(name, mesh, axis) for axis in _names(axis))


def _names(axis):
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def _axis_size(name, mesh, axis):
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}: jax.make_mesh makes one")
    if not isinstance(axis, str) or axis not in mesh.shape:
        raise ValueError(f"{name}: expected one of the mesh's axes, {', '.join(map(str, mesh.shape))}, got {axis!r}")
    return mesh.shape[axis]
