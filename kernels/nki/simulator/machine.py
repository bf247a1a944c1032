"""One core as it runs a kernel: it does each instruction at once, in order, and writes down what it did.

The record is a graph. Each instruction keeps the bytes it read and wrote, those it must follow (it reads what they
wrote, or overwrites what they read or wrote), what it costs, and how to do it again: from that come the schedule
(schedule.py), the memory alive at each moment (capacity.py), and the same program in other orders (orders.py).
"""

import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field

from ringtide.kernels.nki.simulator import cost, memory
from ringtide.kernels.nki.simulator.errors import HazardError, NkiSimError
from ringtide.kernels.nki.simulator.memory import Storage

_here = threading.local()
_INSIDE = os.path.dirname(__file__)


@dataclass(slots=True)
class Instruction:
    """What was done. engine: "PE", "DVE", "ACT", "POOL" or "DMA"."""

    index: int
    op: str
    engine: str
    us: float  # on its engine; of a DMA the transfer, all sixteen queues together
    run: object  # does it again, on the same memory
    after: tuple  # indices of those it must follow
    reads: tuple  # (Storage, Region)
    writes: tuple
    line: str  # file:line in the kernel
    loop: tuple  # which turns of which loops it belongs to: ((loop, turn), ...)
    ordered: int  # all instructions of the same no_reorder block have its number; 0: none
    cycles: float = 0.0
    nbytes: int = 0
    facts: dict = field(default_factory=dict)  # what the cost was figured from; shapes and dtypes for the trace
    said: tuple = ()  # in a loop: what the compiler, which sees its body once, takes it for

    def depends_on(self, *producers):
        """Runs after the `producers`, too, which are earlier instructions of the same turn of a loop, or of one around
        it. Returns itself."""
        for x in producers:
            if x.index >= self.index or x.loop != self.loop[: len(x.loop)]:
                raise HazardError(
                    f"{self.op}: depends_on {x.op} at {x.line}: it must come before, in the same loop or one around it"
                )
        self.after = tuple(sorted({*self.after, *(x.index for x in producers)}))
        return self


@dataclass
class Options:
    """How to simulate. relative noise on activations (perturb), sums of matmuls in float64 (exact), subnormals flushed
    to zero (flush), the largest argument that an exp may have (exp_limit), what SBUF holds in bytes a partition."""

    perturb: float = 0.0
    exact: bool = False
    flush: bool = False
    exp_limit: float | None = None
    sbuf_bytes: int = memory.SBUF_BYTES
    seed: int = 0


class Machine:
    """The state of one core. `core` of `cores`; HBM that is `shared` belongs to all of them."""

    def __init__(self, core=0, cores=1, options=None, shared=None):
        self.core, self.cores, self.options = core, cores, options or Options()
        self.shared = shared  # launch.Shared: HBM and barriers of all cores
        self.instructions, self.storages, self.loop = [], [], ()
        self.grid = False  # launched as kernel[n]
        self.ordered = 0
        self.loops = self.orders = 0  # how many there have been
        self.made = Counter()  # turn of a loop -> how many allocations
        self.constants = {}  # what is loaded once: identity matrices
        self.ranges = {}  # activation -> (least, greatest argument)
        self.registers = {}  # engine -> Storage of its accumulators

    def allocate(self, name, space, rows, row_bytes, **options) -> Storage:
        scope = self.loop[-1] if self.loop else None
        storage = Storage(name, space, rows, row_bytes, scope=scope, number=self.made[scope], **options)
        self.made[scope] += 1
        if storage.shared and self.shared is not None:
            self.shared.join(self.core, storage)
        self.storages.append(storage)
        return storage

    def issue(self, op, engine, run, reads=(), writes=(), fence=(), **facts):
        """Does one instruction and records it.

        run: a function without arguments that reads and writes the operands' memory. reads, writes: views (with
        `storage` and `region()`). fence: views that it does not touch, but is ordered with as if it wrote them. facts:
        what the cost table needs, see cost.py.
        """
        index = len(self.instructions)
        reads = (*reads, *(source for x in (*reads, *writes) for source in x.dynamic))  # where an address came from
        said = self._said(op, engine, facts, reads, writes) if self.loop else ()
        if any(x.region().twice for x in writes):
            run = _forgetting(run, [x for x in writes if x.region().twice])
        reads, writes = tuple((x.storage, x.region()) for x in reads), tuple((x.storage, x.region()) for x in writes)
        for storage, _ in (*reads, *writes):
            self._check_scope(op, storage)
        for storage, _ in writes:
            if storage.constant:
                self._open(storage)
        run()
        after = self._order(index, reads, (*writes, *((x.storage, x.region()) for x in fence)))
        us, *more = cost.price(op, engine, facts)
        more = self.ordered, *more, facts, said
        made = Instruction(index, op, engine, us, run, after, reads, writes, where(), self.loop, *more)
        self.instructions.append(made)
        return made

    def _check_scope(self, op, storage):
        if storage.scope is not None and storage.scope not in self.loop:
            raise HazardError(
                f"{op}: {storage.name!r} was made inside a loop and is used outside it: allocate it before the loop"
            )

    def _said(self, op, engine, facts, reads, writes):
        """What of an instruction is known when the kernel is compiled: all but offsets that the device finds."""
        place = lambda storage: storage.number if storage.scope == self.loop[-1] else storage
        view = lambda x: (place(x.storage), x.dtype, x.shape, x.strides, None if x.moved else x.offset)
        return op, engine, facts, [view(x) for x in reads], [view(x) for x in writes]

    def _open(self, storage):
        """An input that is about to be written: keeps what it held, and from now on who read it matters."""
        storage.constant = False
        held = self.shared.before(storage) if storage.shared and self.shared is not None else None
        storage.initial = storage.data.copy() if held is None else held
        storage.reads = [(region, x.index) for x in self.instructions for s, region in x.reads if s is storage]

    def _order(self, index, reads, writes):
        after = set()
        for storage, region in (*reads, *writes):
            after.update(i for there, i in storage.writes if there.overlaps(region))
        for storage, region in writes:
            after.update(i for there, i in storage.reads if there.overlaps(region))
        for storage, region in writes:  # what it covers, all that comes later need not look at
            storage.reads = [x for x in storage.reads if not region.covers(x[0])]
            storage.writes = [x for x in storage.writes if not region.covers(x[0])]
            storage.writes.append((region, index))
        for storage, region in reads:
            if not storage.constant:
                storage.reads.append((region, index))
        for storage, _ in (*reads, *writes):
            storage.first = index if storage.first is None else storage.first
            storage.last = index
        after.discard(index)
        return tuple(sorted(after))


def _forgetting(run, writes):
    """run, after which nobody knows what these views hold: they have several elements in one place."""

    def both():
        run()
        for x in writes:
            x.state()[...] = memory.NEVER

    return both


def current() -> Machine:
    """The machine that this thread's kernel runs on."""
    machine = getattr(_here, "machine", None)
    if machine is None:
        raise NkiSimError("nki operations run inside a kernel: call it, or ringtide.nki.simulate(kernel)(*arrays)")
    return machine


def running() -> bool:
    """Whether this thread is inside a kernel."""
    return getattr(_here, "machine", None) is not None


def enter(machine):
    """Makes `machine` (or None) the thread's current one; returns the one before."""
    before, _here.machine = getattr(_here, "machine", None), machine
    return before


def where() -> str:
    """file:line of the innermost frame outside the simulator."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
