"""What a context-parallel call would do, by arithmetic on its shapes: nothing is computed, no device is needed."""

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from ringtide.jax import checks, dispatch
from ringtide.jax.attention import LIMITS, check, numbers
from ringtide.jax.context_parallel import COVERED, STRATEGIES, Call
from ringtide.kernels.context.hops import Stream
from ringtide.kernels.context.ulysses import heads_over
from ringtide.kernels.masks import Full


class Passes(NamedTuple):
    """Bytes of the forward and of the backward pass."""

    forward: int
    backward: int


NOTHING = Passes(0, 0)


@dataclass(frozen=True)
class Plan:
    """What a strategy would do. Bytes are of one device; `str` gives the plan, with the other strategies beside it."""

    strategy: str
    refused: str | None = None  # why it cannot serve this call, and the cure; the rest is then empty
    hops: int = 0  # one behind the other, after the keys at home
    streams: tuple[Stream, ...] = ()  # of the ring
    skipped: int = 0  # (device, keys of a device) pairs of the ring that hold nothing visible, by positions
    pairs: int = 0  # of all of them
    sent_bytes: Passes = NOTHING  # over the interconnect; a gather or scatter as on a ring, P - 1 shards
    memory_bytes: Passes = NOTHING  # beside inputs, outputs and the local kernel's own
    notes: tuple[str, ...] = ()  # what is padded, replicated or tested
    rule: str = field(default="", compare=False)  # of the plan that `explain` gives: why this strategy
    others: tuple["Plan", ...] = field(default=(), compare=False)

    def __str__(self):
        lines = [f"{self.strategy}: {self.rule}"]
        columns = "", "hops", "sent forward", "backward", "memory forward", "backward"
        rows = [columns, *(plan._row() for plan in (self, *self.others))]
        widths = [max(len(row[i]) for row in rows if i == 0 or len(row) > 2) for i in range(len(columns))]
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [row[1]] if len(row) == 2 else [x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("  " + "   ".join(cells).rstrip())
        lines += [f"  {plan.strategy}: {note}" for plan in (self, *self.others) for note in plan.notes]
        lines.append("  bytes of a device; memory, an estimate, beside inputs, outputs and the local kernel's own")
        return "\n".join(lines)

    def _row(self):
        if self.refused:
            return self.strategy, f"refused: {self.refused}"
        return self.strategy, str(self.hops), *map(_bytes, (*self.sent_bytes, *self.memory_bytes))


def explain(
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
    """The plan of `context_parallel_attention` for the same arguments; arrays may be jax.ShapeDtypeStructs.

    mesh: may be a jax.sharding.AbstractMesh. scale, logits_soft_cap, return_lse and implementation change no plan.

    Returns a Plan: its fields are data, its str a table of all strategies. sent_bytes is what the lowered program
    sends, to the byte: collectives of attention itself, not what brings inputs to where they are expected. Of a ring it
    is the ring of permutes, also where the chip compiled for is better off with one kernel that sends by itself.
    Raises: as `context_parallel_attention` for what no strategy can serve, and for a strategy that is named and cannot.
    """
    ids = {"segment_ids": segment_ids, "q_positions": q_positions, "kv_positions": kv_positions}
    arrays = query, key, value, ids, sinks, mask if hasattr(mask, "shape") else None
    query, key, value, ids, sinks, dense = jax.tree.map(
        lambda x: x if hasattr(x, "shape") else np.asarray(x), arrays, is_leaf=lambda x: type(x) is list
    )
    for name in ids:
        ids[name] = jax.tree.map(functools.partial(_in_range, name), ids[name])
    checked = []

    def look(query, key, value, ids, sinks, dense):
        see = mask if dense is None else dense
        *shapes, function, _ = check(query, key, value, see, sinks=sinks, **ids)
        checked.append(function)
        return shapes

    query, key, value, where = jax.eval_shape(look, query, key, value, ids, sinks, dense)
    how = strategy, bidirectional, layout, query, key, checked[0], where
    call = Call(mesh, seq_axis, head_axis, batch_axis, *how)
    numbers(query, scale, logits_soft_cap)
    dispatch.names("attention", implementation)
    plans = {name: _plan(call, name, query, key, value) for name in STRATEGIES}
    chosen = plans.pop(call.strategy)
    rule = _rule(call) if strategy == "auto" else "as asked for"
    return replace(chosen, rule=rule, others=tuple(plans.values()))


def _in_range(name, x):
    """x, its values checked as the op checks them, where it has values: what is traced shows none."""
    return checks.in_range(name, x, LIMITS[name]) if hasattr(x, "__array__") else x


def _rule(call):
    if call.strategy == "usp":
        return "chosen, for there are two axes"
    hops = max((stream.hops for stream in call.rings()[0]), default=0)
    heads = heads_over(call.n, call.n_kv, call.shards)
    fit = "fit" if heads.kv_heads * heads.group == call.n else f"are padded to {heads.kv_heads * heads.group}"
    return (
        f"chosen; a hop does {call.covers():,} FLOP for a byte it sends (ring from {COVERED:,}), "
        f"hops a side {hops} (ring up to 1{', or if bidirectional' if call.bidirectional else ''}), "
        f"{call.n} query and {call.n_kv} key heads {fit} over {call.shards} devices (ulysses if they fit)"
    )


class _Shard(NamedTuple):
    """What a device holds: sizes of query [b, t, n, h], key [b, s, n_kv, h] and value, and rows of int32 a token."""

    b: int
    t: int
    s: int
    n: int
    n_kv: int
    h: int
    h_v: int
    itemsize: int
    q_ids: int  # positions and segment ids: [1 | b, t] each
    k_ids: int

    @property
    def kv(self):
        """Numbers in K and V."""
        return self.b * self.s * self.n_kv * (self.h + self.h_v)


def _plan(call, name, query, key, value):
    if reason := call.refuses(name):
        return Plan(name, reason)
    b = query.shape[0] // call.batch
    rows = lambda x: 0 if x is None else b if x.shape[0] > 1 else 1
    positions = lambda x: 0 if call.mask == Full() else 1 if x is None else rows(x)
    shard = _Shard(
        b,
        *(length // call.shards for length in call.lengths),
        call.n,
        call.n_kv,
        query.shape[3],
        value.shape[3],
        query.dtype.itemsize,
        positions(call.where.q_pos) + rows(call.where.q_seg),
        positions(call.where.k_pos) + rows(call.where.k_seg),
    )
    if name == "all_gather":
        return _all_gather(shard, call.shards)
    if name == "ulysses":
        return _ulysses(shard, call.shards)[0]
    if name == "ring":
        return _ring(shard, call, shard.itemsize)
    there, inside = _ulysses(shard, call.shards // call.ring)
    ring = _ring(inside, call, home=4)
    add = lambda a, b: Passes(*(x + y for x, y in zip(a, b, strict=True)))
    return replace(
        ring,
        strategy="usp",
        sent_bytes=add(there.sent_bytes, ring.sent_bytes),
        memory_bytes=add(there.memory_bytes, ring.memory_bytes),
        notes=there.notes + ring.notes,
    )


def _all_gather(x, devices):
    kv, ids, grads = x.kv * x.itemsize, x.s * x.k_ids * 4, x.kv * 4
    gather = lambda times: Passes(times * (kv + ids), times * (kv + ids + grads))
    return Plan("all_gather", sent_bytes=gather(devices - 1), memory_bytes=gather(devices))


def _ulysses(x, devices):
    """(plan, what a device then holds)."""
    heads = heads_over(x.n, x.n_kv, devices)
    n, n_kv = heads.kv_heads * heads.group, heads.kv_heads * heads.copies
    q, out, row, kv = x.b * x.t * n * x.h, x.b * x.t * n * x.h_v, x.b * x.t * n, x.b * x.s * n_kv * (x.h + x.h_v)
    ids = (x.t * x.q_ids + x.s * x.k_ids) * 4
    forward = (q + kv + out) * x.itemsize + row * 4  # with lse
    backward = forward + (row + q + kv) * 4  # out stands for its gradient; delta, dq, dk, dv
    send = lambda moved: moved * (devices - 1) // devices + ids * (devices - 1)
    notes = []
    if heads.copies > 1:
        notes.append(f"each of {x.n_kv} key heads goes to {heads.copies} of {devices} devices; gradients are summed")
    if n > x.n:
        notes.append(f"{x.n} query heads are padded to {n}, of {heads.kv_heads} key heads, to divide by {devices}")
    plan = Plan(
        "ulysses",
        sent_bytes=Passes(send(forward), send(backward)),
        memory_bytes=Passes(*(moved + ids * devices for moved in (forward, backward))),
        notes=tuple(notes),
    )
    return plan, x._replace(t=x.t * devices, s=x.s * devices, n=n // devices, n_kv=n_kv // devices)


def _ring(x, call, home):
    """home: bytes of a number in which dk and dv go home, unless two streams bring them, to be summed in float32."""
    (streams, tested), see = call.rings(), call.sees()
    apart = len(streams) == 2 and streams[0].half is None
    parts = [x.kv // max(x.s, 1) * (end - first) for first, end in (stream.part(x.s) for stream in streams)]
    grads = [stream.hops for stream in streams]
    if apart and min(grads) == 1:
        grads[1] -= 1  # the second stream has nothing to send at its first hop
    ids = x.s * x.k_ids * 4 if streams else 0
    forward = sum(stream.hops * part * x.itemsize for stream, part in zip(streams, parts, strict=True))
    backward = forward + sum(part * (4 * n + (4 if apart else home)) for n, part in zip(grads, parts, strict=True))
    keys, results = 2 * sum(parts), 2 * x.b * x.t * x.n * bool(streams)  # at hand and arriving; two partial results
    notes = [
        f"K and V{'' if stream.half is None else f', half {stream.half},'} make {stream.hops} of {call.ring - 1} hops, "
        f"to the {'next' if stream.step > 0 else 'previous'} device"
        for stream in streams
    ]
    empty = int((~see).sum())
    if empty or tested:
        more = "; more may, which is seen when it runs" if call.given or call.where.q_seg is not None else ""
        notes.append(f"{empty} of {see.size} pairs of devices see nothing of each other, and call no kernel{more}")
    return Plan(
        "ring",
        hops=max((stream.hops for stream in streams), default=0),
        streams=streams,
        skipped=empty,
        pairs=see.size,
        sent_bytes=Passes(*(sent + ids * (call.ring - 1) for sent in (forward, backward))),
        memory_bytes=Passes(
            keys * x.itemsize + results * (x.h_v + 1) * 4 + ids * call.ring,
            keys * x.itemsize + 3 * sum(parts) * 4 + results * x.h * 4 + ids * call.ring,
        ),
        notes=tuple(notes),
    )


def _bytes(n):
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"
