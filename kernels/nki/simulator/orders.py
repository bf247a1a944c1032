"""The recorded program in other orders: the engines run at once, so any order that keeps the graph may happen.

All that an instruction waits for is in the record, which the simulator made from the bytes that each of them reads and
writes; a program that comes out otherwise in another order shows that an instruction touches more than it says, or that
it is not the same function of the same memory. `drop` takes one dependency away, to see that the outcome hangs on it.
"""

import random

import numpy as np

from ringtide.kernels.nki.simulator.errors import HazardError, NkiSimError


def shuffled(run, seed=0, drop=False):
    """Does a run's instructions again, in a random order that keeps all dependencies, and compares what is in HBM.

    Instructions of a no_reorder block keep their order on each engine (transfers do not: they have many queues). Two
    cores run between one another, from barrier to barrier.

    drop: one dependency, drawn from those that follow from no others, is broken: the two run the other way round.
    Returns what ran, [(core, index)]. Raises HazardError that names the first output that differs, or the instruction
    that could no longer run. Memory of the outputs is afterwards as it was.
    """
    draw = random.Random(seed)
    befores = {at: b for core in run.machines for at, b in _befores(core).items()}
    stretches, broken = _stretches(run), ""
    if drop:
        broken = _drop(run, stretches, befores, draw)
    outputs = [s for core in run.machines for s in core.storages if s.space == "hbm" and not s.constant]
    recorded = [(s.data.copy(), s.state.copy()) for s in outputs]
    for core in run.machines:
        for storage in (*core.storages, *core.registers.values()):
            if not storage.constant:
                storage.forget()
    order = [at for stretch in stretches for at in _order(stretch, befores, draw)]
    machines = {core.core: core for core in run.machines}
    try:
        for core, index in order:
            x = machines[core].instructions[index]
            try:
                x.run()
            except NkiSimError as error:
                raise HazardError(f"{x.op} at {x.line}, in another order{broken}: {error}") from error
        for storage, (data, state) in zip(outputs, recorded, strict=True):
            other = (storage.data != data) | (storage.state != state)
            if other.any():
                raise HazardError(
                    f"{storage.name!r} comes out otherwise in another order{broken}: "
                    f"{np.count_nonzero(other):,} of its {len(other):,} bytes, the first is number {np.argmax(other)}"
                )
    finally:
        for storage, (data, state) in zip(outputs, recorded, strict=True):
            storage.data[:], storage.state[:] = data, state
    return order


def _befores(core):
    """{(core, index): those of the same core that it must follow}."""
    found, ahead = {}, {}
    for x in core.instructions:
        befores = {(core.core, b) for b in x.after}
        if x.ordered and x.engine != "DMA":
            if (x.ordered, x.engine) in ahead:
                befores.add(ahead[x.ordered, x.engine])
            ahead[x.ordered, x.engine] = core.core, x.index
        found[core.core, x.index] = befores
    return found


def _stretches(run):
    """[[(core, index)]], from barrier to barrier."""
    stretches = []
    for core in run.machines:
        barriers = core.shared.barriers[core.core] if core.shared is not None else ()
        ends = [*(done for done, _ in barriers), len(core.instructions)]
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if len(stretches) <= i:
                stretches.append([])
            stretches[i] += [(core.core, index) for index in range(start, end)]
    return stretches


def _drop(run, stretches, befores, draw):
    """Turns one dependency in `befores` round; says which."""
    inside = {at: i for i, stretch in enumerate(stretches) for at in stretch}
    edges = [(b, at) for at, mine in befores.items() for b in sorted(mine) if inside[b] == inside[at]]
    draw.shuffle(edges)
    for b, at in edges:
        if not _leads(befores, at, b):
            befores[at] = befores[at] - {b}
            befores[b] = befores[b] | {at}
            first, second = (run.machines[core].instructions[index] for core, index in (b, at))
            return f" ({second.op} at {second.line} before {first.op} at {first.line})"
    raise ValueError("drop: the run has no dependency")


def _leads(befores, at, b):
    """Whether `at` must follow `b` also by others."""
    todo, seen = [x for x in befores[at] if x != b], set()
    while todo:
        x = todo.pop()
        if x == b:
            return True
        if x not in seen and x > b:
            seen.add(x)
            todo += befores[x]
    return False


def _order(stretch, befores, draw):
    """A random order of a stretch that keeps its dependencies."""
    inside, followers = set(stretch), {at: [] for at in stretch}
    waiting = {}
    for at in stretch:
        mine = befores[at] & inside
        waiting[at] = len(mine)
        for b in mine:
            followers[b].append(at)
    ready, order = [at for at in stretch if not waiting[at]], []
    while ready:
        i = draw.randrange(len(ready))
        ready[i], ready[-1] = ready[-1], ready[i]
        order.append(at := ready.pop())
        for x in sorted(followers[at]):
            waiting[x] -= 1
            if not waiting[x]:
                ready.append(x)
    return order
