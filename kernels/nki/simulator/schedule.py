"""How long the recorded program takes, estimated: four times, of which the third and the fourth mean to be near.

    T_max    the busiest engine: all else hidden behind it. Never reached
    T_sum    the compute engines one after another: nothing overlaps
    T_sched  each engine takes its instructions in recorded order; one starts when its engine is free and all that it
             must follow are done, SYNC later than those that ran on another engine
    T_list   the same, each engine free to take any instruction that is ready, the one with the longest chain behind it
             first; or T_sched if that is less

DMA is one engine of the full bandwidth behind 16 queues. A transfer waits DMA_LATENCY, which takes up no bandwidth, and
then for the bandwidth; in T_sched it may overtake those that are not ready, but waits for the 16th before it.
Instructions must follow what `after` says (data, and memory used again by the kernel itself) and what capacity.py adds.
The end of a loop's turn is a barrier of all engines. Two cores do not wait for each other here, each counts by itself.
Instructions cost what cost.py says; all of it is an estimate, see docs/simulator.md.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from types import SimpleNamespace

from ringtide.kernels.nki.simulator import capacity
from ringtide.kernels.nki.simulator.cost import DMA_LATENCY, SYNC

ENGINES = ("PE", "ACT", "DVE", "POOL", "DMA")
DMA_QUEUES = 16
HBM_BYTES_US = 362e3  # a core's share of the chip's 2.9 TB/s


def times(run) -> dict:
    """The four times, in us, and what stands behind them.

    run: a Run, a Machine, or a list of Instructions. Of several cores the slowest one.

    Returns t_max_us, t_sum_us, t_sched_us, t_list_us; engines {engine: us busy}; critical, the busiest engine;
    chain_us, the longest chain of dependent instructions on engines without end; dma_bytes, those to or from HBM;
    hbm_floor_us, the time of these at full bandwidth; instructions, how many.
    """
    return _slowest([_times(core, _befores(core)) for core in _cores(run)])


def of_turn(run, units=1) -> dict:
    """`times` of the second turn of each loop of the run, one after another, from barrier to barrier: what loops repeat
    for long.

    units: how many (chunk, head)s or (sequence, head)s a turn does; all figures are a unit's. Raises ValueError if the
    run has no loop of two turns.
    """
    parts = []
    for core in _cores(run):
        there = [made.index for made in core.instructions if made.loop and made.loop[0][1] == 1]
        if not there:
            raise ValueError("of_turn: the run has no loop of two turns or more")
        befores, place = _befores(core), {index: i for i, index in enumerate(there)}
        part = SimpleNamespace(core=core.core, instructions=[core.instructions[index] for index in there])
        found = _times(part, [{place[b] for b in befores[index] if b in place} for index in there])
        parts.append(found | {name: found[name] + SYNC for name in ("t_sched_us", "t_list_us", "chain_us")})
    return _each(_slowest(parts), units)


def per_unit(short, long, units) -> dict:
    """Times of the steady state of a run without loops: (T(long) - T(short)) / units, of every figure of `times`.

    short, long: two runs (or dicts of `times`) of the same kernel, `long` with `units` more of what it repeats, (chunk,
    head)s or (sequence, head)s. Start and end of the program, which both have, cancel.
    """
    short, long = (x if isinstance(x, dict) else times(x) for x in (short, long))
    more = {k: v - short[k] for k, v in long.items() if k not in ("engines", "critical")}
    engines = {e: us - short["engines"][e] for e, us in long["engines"].items()}
    return _each(more | {"engines": engines, "critical": max(engines, key=engines.get)}, units)


def _each(found, units):
    """`found` a unit."""
    each = {k: v / units for k, v in found.items() if k not in ("engines", "critical")}
    engines = {e: us / units for e, us in found["engines"].items()}
    return each | {"engines": engines, "critical": found["critical"]}


def trace(run) -> dict:
    """T_sched as a Chrome trace, for Perfetto (ui.perfetto.dev): a process a core, a thread an engine, times in us."""
    events = []
    for core in _cores(run):
        for made, start in zip(core.instructions, _place(core).starts, strict=True):
            args = {"op": made.op, "cycles": made.cycles, "bytes": made.nbytes, "line": made.line, "index": made.index}
            args["facts"] = {k: str(v) for k, v in made.facts.items()}
            event = {"name": made.op, "ph": "X", "pid": core.core, "tid": made.engine, "ts": start, "dur": made.us}
            events.append(event | {"args": args})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"kind": "estimate, T_sched"}}


def critical_path(run) -> dict:
    """What T_sched waits for, to tune a kernel by.

    Returns path, the chain of instructions that ends last, each [{"op", "engine", "line", "start_us", "us", "waits"}]:
    waits is "engine" if it starts when its engine comes free, "data" if when one that it must follow is done, "start"
    at the beginning or after a barrier; path_us, the chain's time {engine: us, "latency": us}; idle_us, {engine: us}
    that each engine idles. Of several cores the slowest.
    """
    placed = [(core, _place(core)) for core in _cores(run)]
    core, plan = max(placed, key=lambda x: x[1].end)
    path, spent = [], dict.fromkeys((*ENGINES, "latency"), 0.0)
    index = max(range(len(plan.starts)), key=plan.ends.__getitem__) if plan.starts else None
    while index is not None:
        made, (waits, before) = core.instructions[index], plan.because[index]
        begun = 0.0 if before is None else plan.ends[before]
        spent[made.engine] += made.us
        spent["latency"] += plan.starts[index] - begun
        path.append(
            {"op": made.op, "engine": made.engine, "line": made.line, "start_us": plan.starts[index], "us": made.us}
            | {"waits": waits}
        )
        index = before
    busy = _busy(core)
    return {
        "path": path[::-1],
        "path_us": {k: v for k, v in spent.items() if v},
        "idle_us": {e: plan.end - us for e, us in busy.items()},
    }


def _cores(run):
    """Machines, or what looks like one."""
    if isinstance(run, list | tuple):
        return [SimpleNamespace(core=0, instructions=list(run))]
    return list(run.machines) if hasattr(run, "machines") else [run]


def _busy(core):
    busy = dict.fromkeys(ENGINES, 0.0)
    for made in core.instructions:
        busy[made.engine] += made.us
    return busy


def _slowest(rows):
    """Of cores' times those of the slowest one; T_max to T_list each the greatest of any."""
    slowest = max(rows, key=lambda row: row["t_sched_us"])
    return {k: max(row[k] for row in rows) if k.startswith("t_") else v for k, v in slowest.items()}


def _times(core, befores):
    busy = _busy(core)
    sched, free = _place(core, befores).end, _place(core, befores, free=True).end
    hbm = sum(
        made.nbytes * sum(any(x.space == "hbm" for x, _ in side) for side in (made.reads, made.writes))
        for made in core.instructions
        if made.engine == "DMA"
    )
    return {
        "t_max_us": max(busy.values()),
        "t_sum_us": sum(us for engine, us in busy.items() if engine != "DMA"),
        "t_sched_us": sched,
        "t_list_us": min(sched, free),
        "engines": busy,
        "critical": max(busy, key=busy.get),
        "chain_us": _chain(core, befores),
        "dma_bytes": hbm,
        "hbm_floor_us": hbm / HBM_BYTES_US,
        "instructions": len(core.instructions),
    }


def _befores(core):
    """What each instruction must follow: data, and memory used again."""
    edges = capacity.check(core).edges if hasattr(core, "storages") else {}
    return [set(made.after).union(edges.get(made.index, ())) for made in core.instructions]


@dataclass
class _Plan:
    """Where each instruction lies. because: [("engine" | "data" | "start", index of what it waited for, or None)]."""

    starts: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    because: list = field(default_factory=list)
    end: float = 0.0


def _place(core, befores=None, free=False) -> _Plan:
    """Places all instructions. free: engines take them in any order."""
    befores, n = befores or _befores(core), len(core.instructions)
    plan, at, last = _Plan([0.0] * n, [0.0] * n, [None] * n), 0, None
    for turn in _turns(core):
        _place_turn(plan, turn, befores, at, free, last)
        last = max(range(at, at + len(turn)), key=plan.ends.__getitem__)
        at += len(turn)
        plan.end = plan.ends[last] + (SYNC if at < n else 0.0)
    return plan


def _turns(core):
    """Instructions from barrier to barrier."""
    return [list(turn) for _, turn in groupby(core.instructions, key=lambda made: made.loop)]


def _place_turn(plan, turn, befores, at, free, last):
    """One turn, its first instruction number `at`, after a barrier that waits for instruction `last`.

    List scheduling: next comes whatever can start first; of what is ready on that engine, the most urgent.
    """
    waiting, followers, ahead = [0] * len(turn), [[] for _ in turn], {}
    for i, made in enumerate(turn):
        edges = [(b - at, _AFTER) for b in befores[at + i] if b >= at]
        if (before := _predecessor(ahead, i, made, free)) is not None:
            edges.append(before)
        for b, kind in edges:
            followers[b].append((i, kind))
        waiting[i] = len(edges)
    urgency = _urgency(turn, followers) if free else range(len(turn))
    ready, because = [0.0] * len(turn), [("start", last)] * len(turn)  # times from the turn's start: equal turns, equal
    soon, now = {e: [] for e in ENGINES}, {e: [] for e in ENGINES}  # heaps: (when ready, which); (urgency, which)
    idle_from, latest = dict.fromkeys(ENGINES, 0.0), {}

    def release(i):
        heappush(soon[turn[i].engine], (ready[i] + _lag(turn[i]), i))

    for i, count in enumerate(waiting):
        if not count:
            release(i)
    for _ in turn:
        start, engine = min(
            (idle_from[e] if now[e] else max(idle_from[e], soon[e][0][0]), e) for e in ENGINES if now[e] or soon[e]
        )
        while soon[engine] and soon[engine][0][0] <= start:
            i = heappop(soon[engine])[1]
            heappush(now[engine], (urgency[i], i))
        i = heappop(now[engine])[1]
        made = turn[i]
        if start > ready[i] + _lag(made):
            because[i] = "engine", latest[engine]
        end = start + made.us
        plan.starts[at + i], plan.ends[at + i], plan.because[at + i] = plan.end + start, plan.end + end, because[i]
        idle_from[engine], latest[engine] = end, at + i
        for j, kind in followers[i]:
            if kind is _IN_ORDER:
                when = start - _lag(made)
            else:
                when = end + (SYNC if turn[j].engine != engine else 0.0)
            if when > ready[j]:
                ready[j], because[j] = when, ("data" if kind is _AFTER else "engine", at + i)
            waiting[j] -= 1
            if not waiting[j]:
                release(j)


# What an instruction waits for: another's end; its start, on the same engine; its end, next on the same DMA queue.
_AFTER, _IN_ORDER, _QUEUE = "after", "in order", "queue"


def _predecessor(ahead, i, made, free):
    """(which, edge) that instruction i follows only by its engine's order, or None. ahead: state between calls."""
    if not free and made.engine == "DMA":
        queue = ahead.setdefault("DMA", [])
        queue.append(i)
        return (queue[-1 - DMA_QUEUES], _QUEUE) if len(queue) > DMA_QUEUES else None
    if free and not made.ordered:
        return None
    key = made.engine, made.ordered if free else 0
    before, ahead[key] = ahead.get(key), i
    return None if before is None else (before, _IN_ORDER)


def _lag(made):
    return DMA_LATENCY if made.engine == "DMA" else 0.0


def _urgency(turn, followers):
    """Minus the time from the start of each to the end of the longest chain behind it."""
    left = [0.0] * len(turn)
    for i in range(len(turn) - 1, -1, -1):
        made, behind = turn[i], 0.0
        for j, kind in followers[i]:
            if kind is _AFTER:
                behind = max(behind, (SYNC if turn[j].engine != made.engine else 0.0) - left[j])
        left[i] = -(behind + made.us + _lag(made))
    return left


def _chain(core, befores):
    """The longest chain of dependent instructions, us."""
    ends, at, begin = [], 0, 0.0
    for turn in _turns(core):
        for i, made in enumerate(turn, at):
            start = begin
            for b in befores[i]:
                if b >= at:
                    other = core.instructions[b].engine != made.engine
                    start = max(start, ends[b] + (SYNC if other else 0.0))
            ends.append(start + _lag(made) + made.us)
        begin, at = max(ends[at:]) + SYNC, at + len(turn)
    return max(ends, default=0.0)
