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
        arithmetic hides its transfer, T / P * N / N_kv >= 16,384; else ulysses if the heads fit without padding; else
        all_gather.
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
    axes, shards = _axes(mesh, seq_axis)
    _check_strategy(strategy, axes, bidirectional)
    for name, axis, what, sizes in (
        ("head_axis", head_axis, "heads of query and key", (query.shape[2], key.shape[2])),
        ("batch_axis", batch_axis, "batch", (query.shape[0],)),
    ):
        size = _extent(name, mesh, axis)
        if any(x % size for x in sizes):
            got = " and ".join(map(str, sizes))
            raise ValueError(f"{name}: {what}, {got}, must divide by {size}, the size of {axis!r}: pad or repeat them")
    given = where.q_pos is not None or where.k_pos is not None
    for length in (query.shape[1], key.shape[1]):
        layouts.check_length(layout, length, shards)
    if mask == Full():  # which looks at no positions
        q_pos = k_pos = None
    else:
        q_pos, k_pos = (
            _positions(given, x.shape[1], layout, shards) for given, x in ((where.q_pos, query), (where.k_pos, key))
        )
    where = where._replace(q_pos=q_pos, k_pos=k_pos)
    if strategy == "auto":
        strategy = _choose(axes, query, key, shards, _extent("head_axis", mesh, head_axis))
    local = Kernel(dispatch.names("attention", implementation), mask, *numbers(query, scale, logits_soft_cap))
    if strategy in RINGS:
        lengths, segments = (query.shape[1], key.shape[1]), where.q_seg is not None
        kernel = Ring(local, axes[-1], *_rings(axes, mesh, layout, lengths, mask, given, segments, bidirectional))
        kernel = USP(kernel, axes[0]) if strategy == "usp" else kernel
    else:
        kernel = {"all_gather": AllGather, "ulysses": Ulysses}[strategy](local, axes[0])

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


def _axes(mesh, seq_axis):
    """(seq_axis as a tuple of names, the devices along them)."""
    axes = tuple(seq_axis) if isinstance(seq_axis, tuple | list) else (seq_axis,)
    if len(axes) not in (1, 2):
        raise ValueError(f"seq_axis: expected the name of a mesh axis, or two, (ulysses, ring), got {seq_axis!r}")
    return axes, math.prod(_axis_size("seq_axis", mesh, axis) for axis in axes)


def _rings(axes, mesh, layout, lengths, mask, given, segments, bidirectional):
    """(streams, pieces) of the rings along the last of `axes`: the hops that are made, and how to tell an empty one.

    lengths: of queries and keys. given: positions were, so that nothing is known of them. segments: ids were.
    """
    ring = mesh.shape[axes[-1]]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    queries, keys = (hops.spans(layout, length, shards, shards // ring) for length in lengths)
    see = hops.visible(Full() if given else mask, queries, keys)
    streams = hops.streams(see.any(0), bidirectional)
    made = [x.step * hop % ring for x in streams for hop in range(1, x.hops + 1)]
    never_empty = see[:, made].all() and not segments and not (given and mask != Full())
    return streams, 0 if never_empty else queries[0].shape[1]


def _check_strategy(name, axes, bidirectional):
    if name not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy: expected auto, {', '.join(STRATEGIES)}, got {name!r}")
    if name != "auto" and (name == "usp") != (len(axes) == 2):
        cure = "name one" if len(axes) == 2 else "name two, (ulysses, ring)"
        raise ValueError(f"seq_axis: {name} does not work over {len(axes)} mesh axes, got {axes!r}: {cure}")
    if bidirectional and name not in ("auto", *RINGS):
        raise ValueError(f"bidirectional: {name} has no ring, {' and '.join(RINGS)} do: leave it out")


def _choose(axes, query, key, shards, head_shards):
    """The strategy that "auto" stands for."""
    if len(axes) == 2:
        return "usp"
    n, n_kv = query.shape[2] // head_shards, key.shape[2] // head_shards
    if query.shape[1] // shards * (n // n_kv) >= COVERED:
        return "ring"
    heads = heads_over(n, n_kv, shards)
    return "ulysses" if heads.kv_heads * heads.group == n else "all_gather"


def _positions(given, length, layout, shards):
    if given is not None:
        return given
    return layouts.position_of(jnp.arange(length, dtype=jnp.int32), layout, length, shards)[None]


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
    names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return math.prod(_axis_size(name, mesh, axis) for axis in names)


def _axis_size(name, mesh, axis):
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}: jax.make_mesh makes one")
    if not isinstance(axis, str) or axis not in mesh.shape:
        raise ValueError(f"{name}: expected one of the mesh's axes, {', '.join(map(str, mesh.shape))}, got {axis!r}")
    return mesh.shape[axis]
