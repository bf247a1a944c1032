"""On-chip memory over time: what is alive when, where PSUM tiles lie, and which instructions wait for memory.

A storage is alive from the first instruction that touches it to the last, in recorded order; one made outside a
`fori_loop` and touched inside, through all turns of it. SBUF is counted in bytes a partition, whatever partitions a
storage has, and as if free bytes were always side by side: an allocator that fragments needs more. A PSUM storage takes
whole banks, several of them side by side if it has more than 2 KiB a partition. Storages with an `address` lie where it
says; the span of memory that they lie in is theirs from the first to the last of them.

Memory that is used again makes the new user wait for the old one. These edges belong to a schedule as much as those of
the data: a fresh PSUM storage takes the bank free for longest, and SBUF, once all storages together exceed it, the
bytes free for longest.
"""

from collections import deque
from dataclasses import dataclass

from ringtide.kernels.nki.simulator import memory
from ringtide.kernels.nki.simulator.errors import CapacityError, HazardError


@dataclass
class Capacity:
    """What a core's memory held. *_total: without any reuse, but that turns of a loop use the same."""

    sbuf_bytes: int  # the most alive at once, a partition
    sbuf_total: int
    psum_banks: int
    psum_total: int
    sbuf_line: str  # where in the kernel the most was alive
    psum_line: str
    banks: dict  # PSUM Storage -> (first bank, banks)
    edges: dict  # index of an instruction -> indices of those whose memory it takes over


def check(machine) -> Capacity:
    """A core's record. Raises CapacityError if it needs more than `options.sbuf_bytes` a partition or 8 PSUM banks,
    HazardError if storages with an address overlap while both are alive."""
    lives, edges = _lives(machine), {}
    _addressed(machine, lives, edges)
    sbuf, psum = _spans(lives, "sbuf", None), _spans(lives, "psum", memory.PSUM_BANK)
    room = machine.options.sbuf_bytes
    most, line = _peak(machine, sbuf, room, "bytes a partition of SBUF", "smaller tiles, or fewer in flight")
    cure = "copy results to SBUF earlier, or put small ones into one tile of 2 KiB"
    most_psum, psum_line = _peak(machine, psum, memory.PSUM_BANKS, "banks of PSUM", cure)
    banks = _banks(machine, psum, edges)
    total, psum_total = (sum(x.amount for x in spans if not x.later_turn) for spans in (sbuf, psum))
    if total > room:
        _reuse(sbuf, room, edges)
    edges = {index: tuple(sorted(befores)) for index, befores in edges.items()}
    return Capacity(most, total, most_psum, psum_total, line, psum_line, banks, edges)


@dataclass(slots=True)
class _Life:
    storage: object
    amount: int  # bytes a partition, or banks
    first: int  # instructions
    last: int
    sources: tuple  # of those that touch it the ones that wait for no other of them
    sinks: tuple  # and those that no other waits for
    at: int | None = None  # where it must lie

    @property
    def later_turn(self) -> bool:
        return self.storage.scope is not None and self.storage.scope[1] > 0


def _lives(machine):
    """_Life of every on-chip storage that is touched, by its first instruction."""
    users, loops, through = {}, {}, {}
    for made in machine.instructions:
        for depth in range(len(made.loop)):
            key = made.loop[:depth], made.loop[depth][0]
            first, _ = loops.get(key, (made.index, made.index))
            loops[key] = first, made.index
        for storage, _ in (*made.reads, *made.writes):
            if storage.space not in ("sbuf", "psum"):
                continue
            seen = users.setdefault(storage, [])
            if not seen or seen[-1] != made.index:
                seen.append(made.index)
            depth = made.loop.index(storage.scope) + 1 if storage.scope in made.loop else 0
            if depth < len(made.loop):
                through.setdefault(storage, set()).add((made.loop[:depth], made.loop[depth][0]))
    lives = []
    for storage, seen in users.items():
        spans = [loops[key] for key in through.get(storage, ())]
        first, last = min([seen[0], *(a for a, _ in spans)]), max([seen[-1], *(b for _, b in spans)])
        within, waits, waited = set(seen), set(), set()
        for index in seen:
            befores = within.intersection(machine.instructions[index].after)
            if befores:
                waits.add(index)
                waited |= befores
        sources, sinks = (tuple(i for i in seen if i not in x) for x in (waits, waited))
        lives.append(_Life(storage, storage.row_bytes, first, last, sources, sinks))
    return sorted(lives, key=lambda x: x.first)


def _addressed(machine, lives, edges):
    """The edges between storages that lie on the same bytes by their address."""
    there = {"sbuf": [], "psum": []}
    for x in lives:
        if x.storage.address is None:
            continue
        (p, byte), held = x.storage.address, there[x.storage.space]
        box = p, p + x.storage.rows, byte, byte + x.amount
        for other, (p0, p1, low, high) in held:
            if p0 < box[1] and box[0] < p1 and low < box[3] and box[2] < high:
                if other.last >= x.first:
                    made = machine.instructions[x.first]
                    raise HazardError(
                        f"{made.op} at {made.line}: {x.storage.name} lies at {x.storage.address}, on bytes of "
                        f"{other.storage.name} at {other.storage.address}, which is used later: another address"
                    )
                _wait(edges, other, x)
        inside = lambda b, box=box: box[0] <= b[0] and b[1] <= box[1] and box[2] <= b[2] and b[3] <= box[3]
        held[:] = [*(h for h in held if not inside(h[1])), (x, box)]


def _spans(lives, space, unit):
    """_Life of what takes up memory of a space, in its unit: the storages, and the span of those with an address.

    unit: bytes of a bank, whole ones are counted and those with an address each by itself; None for single bytes.
    """
    spans, fixed = [], {}
    for x in lives:
        if x.storage.space != space:
            continue
        if x.storage.address is None:
            amount = -(-x.amount // unit) if unit else x.amount
            spans.append(_Life(x.storage, amount, x.first, x.last, x.sources, x.sinks))
            continue
        low, high = x.storage.address[1], x.storage.address[1] + x.amount
        for at in range(low // unit, -(-high // unit)) if unit else (0,):
            have = fixed.setdefault(at, _Life(x.storage, 0, x.first, x.last, (), (), at))
            have.amount, have.last = 1 if unit else max(have.amount, high), max(have.last, x.last)
    return sorted([*spans, *fixed.values()], key=lambda x: x.first)


def _peak(machine, lives, room, unit, cure):
    """(the most alive at once, where)."""
    changes = {}
    for x in lives:
        changes[x.first] = changes.get(x.first, 0) + x.amount
        changes[x.last + 1] = changes.get(x.last + 1, 0) - x.amount
    alive = most = at = 0
    for index in sorted(changes):
        alive += changes[index]
        if alive > most:
            most, at = alive, index
    if not most:
        return 0, ""
    made = machine.instructions[at]
    if most > room:
        held = sorted((x for x in lives if x.first <= at <= x.last), key=lambda x: -x.amount)
        names = ", ".join(f"{x.storage.name} {x.amount:,}" for x in held[:4]) + (", ..." if len(held) > 4 else "")
        raise CapacityError(
            f"{made.op} at {made.line}: {most:,} {unit} alive, in {len(held)} tiles ({names}), and there are {room:,}: "
            f"{cure}"
        )
    return most, made.line


def _banks(machine, lives, edges):
    """{storage: (first bank, banks)}, and the edges of their reuse."""
    for longest in (True, False):  # banks free for longest; if that leaves no room side by side, the tightest hole
        placed = _place(lives, longest)
        if len(placed) == len(lives):
            break
    else:
        x = lives[len(placed)]
        made = machine.instructions[x.first]
        raise CapacityError(
            f"{made.op} at {made.line}: {x.storage.name} needs {x.amount} PSUM banks side by side, and those that are "
            "free are not: allocate it earlier, or one tile a bank"
        )
    before = [None] * memory.PSUM_BANKS  # who had the bank last
    for x, bank in zip(lives, placed, strict=True):
        for at in range(bank, bank + x.amount):
            if before[at] is not None:
                _wait(edges, before[at], x)
            before[at] = x
    return {x.storage: (bank, x.amount) for x, bank in zip(lives, placed, strict=True)}


def _place(lives, longest):
    """First bank of each, as far as they find one. Banks with an address are kept free for it."""
    until, placed = [-1] * memory.PSUM_BANKS, []  # last instruction that holds the bank
    fixed = [x for x in lives if x.at is not None]
    for x in lives:
        kept = {f.at for f in fixed if f.first <= x.last and x.first <= f.last}
        taken = [u >= x.first or bank in kept for bank, u in enumerate(until)]
        holes = [(0, x.at)] if x.at is not None else []
        for bank in range(memory.PSUM_BANKS - x.amount + 1) if x.at is None else ():
            end = bank + x.amount
            if not any(taken[bank:end]):
                low = max((i + 1 for i in range(bank) if taken[i]), default=0)
                high = min((i for i in range(end, memory.PSUM_BANKS) if taken[i]), default=memory.PSUM_BANKS)
                tight = high - low, min(bank - low, high - end)
                holes.append((max(until[bank:end]) if longest else tight, bank))
        if not holes:
            break
        bank = min(holes)[1]
        until[bank : bank + x.amount] = [x.last] * x.amount
        placed.append(bank)
    return placed


def _reuse(lives, room, edges):
    """The edges of SBUF that is used again; bytes free for longest first."""
    free, ends = deque([[room, None]]), sorted(lives, key=lambda x: x.last)
    done = 0
    for x in lives:
        while ends[done].last < x.first:
            free.append([ends[done].amount, ends[done]])
            done += 1
        need = x.amount
        while need:
            took = min(need, free[0][0])
            if free[0][1] is not None:
                _wait(edges, free[0][1], x)
            free[0][0] -= took
            need -= took
            if not free[0][0]:
                free.popleft()


def _wait(edges, old, new):
    for index in new.sources:
        edges.setdefault(index, set()).update(old.sinks)
