"""From a call to a run: arrays become constant HBM, the kernel runs on one core or two, its results come back."""

import functools
import itertools
import sys
import threading
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from threadpoolctl import ThreadpoolController

from ringtide.kernels.nki.simulator import capacity, machine
from ringtide.kernels.nki.simulator.errors import BufferError, HazardError, NkiSimError, UninitializedError
from ringtide.kernels.nki.simulator.language import held, shared_hbm
from ringtide.kernels.nki.simulator.tensor import NkiTensor

_BLAS = ThreadpoolController()  # tiles are so small that threads only get in their way


class Kernel:
    """What `nki.jit` makes of a function: call it with arrays, or kernel[cores] first. In a kernel, a plain call."""

    def __init__(self, function, cores=None):
        functools.update_wrapper(self, function)
        self.function, self.cores = function, cores

    def __getitem__(self, cores):
        cores = cores[0] if isinstance(cores, tuple) and len(cores) == 1 else cores
        if cores not in (1, 2) or isinstance(cores, bool):
            raise NkiSimError(f"{self.__name__}[{cores}]: a logical core of Trainium2 is 1 or 2 physical ones")
        return Kernel(self.function, cores)

    def __call__(self, *args, **kwargs):
        if machine.running():
            return self.function(*args, **kwargs)
        return simulate(self)(*args, **kwargs)


def jit(fn=None, **kwargs):
    """Decorator of a kernel, with or without arguments (those of the real compiler: they change nothing here)."""
    return Kernel(fn) if fn is not None else Kernel


@dataclass
class Run:
    """What a call did. machines: a core each, with its instructions. outputs: what the kernel returned, as tensors.
    capacity: what each core's memory held (capacity.Capacity)."""

    machines: list
    outputs: object = None
    capacity: list | None = None

    def report(self) -> dict:
        """schedule.times, and the most memory of a core: sbuf_bytes (a partition), psum_banks. Estimates."""
        from ringtide.kernels.nki.simulator.schedule import times

        most = {name: max(getattr(x, name) for x in self.capacity) for name in ("sbuf_bytes", "psum_banks")}
        return {"kind": "estimate", "cores": len(self.machines), **times(self), **most}


class simulate:
    """The kernel as a function of arrays on this CPU; after each call `last` is its Run.

    kernel: made by `nki.jit`, or a plain function; kernel[2] runs on two cores. options: those of machine.Options.
    NumPy arrays (bfloat16 and float8 by ml_dtypes), torch tensors or jax arrays in, the same kind out. Raises the
    errors of errors.py; an output that is not wholly written is an UninitializedError.
    """

    def __init__(self, kernel, **options):
        self.kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
        self.options = replace(machine.Options(), **options)
        self.last = None

    def __call__(self, *args, **kwargs):
        if machine.running():
            raise NkiSimError("simulate: not from inside a kernel")
        cores = self.kernel.cores or 1
        shared = Shared(cores) if cores > 1 else None
        machines = [machine.Machine(core, cores, self.options, shared) for core in range(cores)]
        for core in machines:
            core.grid = self.kernel.cores is not None
        self.last = Run(machines)
        kinds = []
        call = functools.partial(_run, self.kernel.function, args, kwargs, kinds)
        with _BLAS.limit(limits=1, user_api="blas"):
            made = [call(machines[0])] if shared is None else shared.run(call, machines)
        self.last.outputs = made[0]
        if shared is not None:
            shared.check_outputs(made)
            shared.check_races(machines)
        self.last.capacity = [capacity.check(core) for core in machines]
        return _map(made[0], NkiTensor, functools.partial(_result, kind=kinds[0] if kinds else None))


def _run(function, args, kwargs, kinds, core):
    """Runs the kernel on a core; what it returned. Notes the kinds of arrays in `kinds`."""
    before = machine.enter(core)
    try:
        args = [_arguments(f"argument {i}", x, kinds) for i, x in enumerate(args)]
        kwargs = {name: _arguments(name, x, kinds) for name, x in kwargs.items()}
        return function(*args, **kwargs)
    finally:
        machine.enter(before)


# --- arrays in, arrays out ------------------------------------------------------------------------------------------


def _arguments(name, x, kinds):
    """x with each array in it as a tensor in HBM."""
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(_arguments(f"{name}[{i}]", v, kinds) for i, v in enumerate(x))
    if isinstance(x, dict):
        return {k: _arguments(f"{name}[{k!r}]", v, kinds) for k, v in x.items()}
    kind = _kind(x)
    if kind is None:
        return x
    kinds.append(kind)
    return held(_numpy(x, kind), name)


def _kind(x):
    """ "numpy", "torch", "jax" or None. Only frameworks that are imported already can have made x."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if isinstance(x, np.ndarray):
        return "numpy"
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return None


def _numpy(x, kind):
    if kind != "torch":
        return np.asarray(x)
    torch = sys.modules["torch"]
    x = x.detach().cpu().contiguous()
    through = _torch_only(torch).get(x.dtype)
    return x.numpy() if through is None else x.view(through[0]).numpy().view(through[1])


def _torch_only(torch):
    """dtypes that torch and NumPy share only as bits: torch's -> (integers of the same size, ml_dtypes')."""
    return {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
        torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    }


def _result(tensor, kind):
    if tensor.buffer is not shared_hbm:
        raise BufferError(f"{tensor!r}: returned, so it must be in nl.shared_hbm, not {tensor.buffer.name}")
    try:
        tensor.check_written()
    except UninitializedError as error:
        raise UninitializedError(f"output {error}") from None
    x = np.array(tensor.array())
    if kind == "torch":
        torch = sys.modules["torch"]
        for whole, (integer, narrow) in _torch_only(torch).items():
            if x.dtype == narrow:
                return torch.from_numpy(x.view(f"i{x.itemsize}")).view(integer).view(whole)
        return torch.from_numpy(x)
    return sys.modules["jax"].numpy.asarray(x) if kind == "jax" else x


def _map(x, kind, f):
    """f of every `kind` in nested tuples, lists and dicts."""
    if isinstance(x, list | tuple):
        return type(x)(_map(v, kind, f) for v in x)
    if isinstance(x, dict):
        return {k: _map(v, kind, f) for k, v in x.items()}
    return f(x) if isinstance(x, kind) else x


# --- two cores ------------------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends a core's thread after the other one failed."""


class Shared:
    """What cores have in common: HBM, in order of allocation, and barriers.

    They run in turns, one until it must wait, then the other: always the same order. What one core wrote and the other
    touched with no barrier between is found afterwards (check_races).
    """

    def __init__(self, cores):
        self.cores = cores
        self.made = [[] for _ in range(cores)]  # shared allocations of each core, in order
        # Of each core's barriers: how many instructions it had done, and the storage that the barrier is about.
        self.barriers = [[] for _ in range(cores)]
        self.posted = [{} for _ in range(cores)]  # name of an exchange -> what the core gave, one after another
        self.taken = [{} for _ in range(cores)]
        self.waits = [None] * cores  # what each core waits for: (description, function that tells whether it is there)
        self.done, self.turn, self.failure = set(), 0, None
        self.changed = threading.Condition()

    def run(self, call, machines):
        """call(machine) on each core; the results."""
        made = [None] * self.cores

        def work(core):
            try:
                self._until_turn(core)
                made[core] = call(machines[core])
            except _Stopped:
                return
            except BaseException as error:
                self.failure = self.failure or error
            finally:
                with self.changed:
                    self.done.add(core)
                    self.turn = self._other(core)
                    self.changed.notify_all()

        threads = [threading.Thread(target=work, args=(core,), daemon=True) for core in range(self.cores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return made

    def join(self, core, storage):
        """A core's fresh shared allocation lies where the other core's of the same number lies."""
        made = self.made[core]
        twin = next((x[len(made)] for i, x in enumerate(self.made) if i != core and len(x) > len(made)), None)
        made.append(storage)
        if twin is not None:
            if (twin.name, twin.row_bytes) != (storage.name, storage.row_bytes):
                raise HazardError(
                    f"core {core}: shared_hbm allocation {len(made) - 1} is {storage.name!r} of {storage.row_bytes} "
                    f"bytes, on the other core {twin.name!r} of {twin.row_bytes}: both must allocate alike"
                )
            storage.data, storage.state, storage.initial = twin.data, twin.state, twin.initial

    def before(self, storage):
        """What an input held before any core wrote it, or None if none has."""
        at = next(made.index(storage) for made in self.made if storage in made)
        return next((x[at].initial for x in self.made if len(x) > at and x[at].initial is not None), None)

    def barrier(self, core, storage):
        """`core` (its machine) waits until all have come as often."""
        mine = self.barriers[core.core]
        mine.append((len(core.instructions), storage))
        self._wait(core.core, f"barrier {len(mine)}", lambda: all(len(x) >= len(mine) for x in self.barriers))

    def exchange(self, core, name, x):
        """Gives x to the other core, which must give one under the same name, and returns that."""
        mine, other = core.core, self._other(core.core)
        self.posted[mine].setdefault(name, []).append(x)
        number = self.taken[mine].get(name, 0)
        self.taken[mine][name] = number + 1
        theirs = self.posted[other]
        self._wait(mine, f"exchange {name!r}", lambda: len(theirs.get(name, ())) > number)
        return theirs[name][number]

    def check_races(self, machines):
        """Raises HazardError where one core touches what the other writes, with no barrier about it between them."""
        first, second = (self._touches(core, made) for core, made in zip(machines, self.made, strict=True))
        does = ("reads", "writes")
        for at, part in sorted(first.keys() & second.keys()):
            ours, theirs = first[at, part], second[at, part]
            written = [touch for touch in ours if touch[2]], [touch for touch in theirs if touch[2]]
            pairs = itertools.product(written[0], theirs), itertools.product(ours, written[1])
            for (a, x, writes), (b, y, also) in itertools.chain(*pairs):
                if a.overlaps(b):
                    raise HazardError(
                        f"race on {self.made[0][at].name!r}: core 0 {does[writes]} it at {x}, core 1 {does[also]} "
                        f"it at {y}, and no barrier about it is between them: nisa.core_barrier"
                    )

    def _touches(self, core, made):
        """{(shared allocation, how many barriers about it came before): [(Region, line, is it a write)]}."""
        number, found = {id(storage): at for at, storage in enumerate(made)}, {}
        passed, barriers = [0] * len(made), self.barriers[core.core][::-1]
        for x in core.instructions:
            while barriers and barriers[-1][0] <= x.index:
                passed[number[id(barriers.pop()[1])]] += 1
            for touched, writes in ((x.reads, False), (x.writes, True)):
                for storage, region in touched:
                    if (at := number.get(id(storage))) is not None:
                        found.setdefault((at, passed[at]), []).append((region, x.line, writes))
        return found

    def check_outputs(self, outputs):
        """Raises HazardError unless all cores return the same."""
        places = [{id(storage): at for at, storage in enumerate(made)} for made in self.made]
        seen = [_map(x, NkiTensor, lambda t, of=of: (of.get(id(t.storage)), t.offset, t.shape, t.strides))
                for x, of in zip(outputs, places, strict=True)]  # fmt: skip
        if any(x != seen[0] for x in seen):
            raise HazardError(f"the cores return {' and '.join(map(str, outputs))}: all must return the same")

    def _other(self, core):
        return (core + 1) % self.cores

    def _until_turn(self, core):
        with self.changed:
            self.changed.wait_for(lambda: self.turn == core or self.failure is not None)
            if self.failure is not None:
                raise _Stopped

    def _wait(self, core, what, ready):
        """Lets the other core run until `ready()`."""
        if ready():
            return
        other, self.waits[core] = self._other(core), (what, ready)
        stuck = self.waits[other] is not None and not self.waits[other][1]()
        if other in self.done or stuck:
            does = f"waits at {self.waits[other][0]}" if stuck else "has ended"
            raise HazardError(f"core {core} waits at {what} for ever: core {other} {does}")
        with self.changed:
            self.turn = other
            self.changed.notify_all()
        self._until_turn(core)
        self.waits[core] = None
        if not ready():
            raise HazardError(f"core {core} waits at {what} for ever: core {other} does not come to it")
