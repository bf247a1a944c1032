"""The registers in which the scalar and the vector engine each keep one float32 a partition between instructions.

They are memory as any other: an instruction that goes on with them depends on the one before. So the record shows it,
and they are what they were when an instruction is done again.
"""

import numpy as np

from ringtide.kernels.nki.simulator import alu, machine, memory
from ringtide.kernels.nki.simulator.errors import EngineError, UninitializedError
from ringtide.kernels.nki.simulator.isa import checks
from ringtide.kernels.nki.simulator.isa.enums import member, reduce_cmd
from ringtide.kernels.nki.simulator.tensor import NkiTensor

START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
_ACT = (reduce_cmd.idle, reduce_cmd.reset, reduce_cmd.reduce, reduce_cmd.reset_reduce)
_DVE = (reduce_cmd.idle, reduce_cmd.reduce, reduce_cmd.reset_reduce, reduce_cmd.load_reduce)


class Accumulators:
    """The registers of the partitions of `data`, and what an instruction with `cmd` and `result` does to them.

    reads, writes: the tensors that it reads and writes because of that. On the vector engine an instruction that does
    not reduce leaves them unknown.
    """

    def __init__(self, ins, engine, data, cmd, result, idle=True):
        member(ins, "reduce_cmd", cmd, (_ACT if engine == "ACT" else _DVE)[0 if idle else 1 :])
        core = machine.current()
        if engine not in core.registers:
            core.registers[engine] = memory.Storage(f"{engine} registers", "register", memory.PARTITIONS, 4)
        first, count = data.partitions()
        self.view = NkiTensor((count, 1), "float32", core.registers[engine], None, f"{engine} registers", offset=first)
        self.ins, self.cmd, self.result = ins, cmd, result
        self.exact = core.options.exact
        self.keeps = engine == "ACT"
        goes_on = cmd is reduce_cmd.reduce
        if result is not None:
            checks.column(ins, "reduce_res", result, data)
            if cmd is reduce_cmd.idle and not self.keeps:
                raise EngineError(f"{ins}: reduce_res with reduce_cmd.idle: nothing is reduced: pass reset_reduce")
            goes_on = goes_on or (self.keeps and cmd is reduce_cmd.idle)
        self.reads = (self.view,) if goes_on else ()
        changes = cmd is not reduce_cmd.idle or not self.keeps
        self.writes = (*((self.view,) if changes else ()), *((result,) if result is not None else ()))

    def get(self):
        """float32 [P, 1]. Raises UninitializedError."""
        if not self.view.state().all():
            raise UninitializedError(
                f"{self.ins}: the engine's registers hold nothing known: start with reduce_cmd.reset_reduce"
            )
        return self.view.array().copy()

    def start(self, operator, loaded=None):
        """What this instruction reduces onto: float32 [P, 1]. loaded: the operand of load_reduce."""
        if self.cmd is reduce_cmd.reduce:
            return self.get()
        value = checks.scalar(loaded, 2) if self.cmd is reduce_cmd.load_reduce else np.float32(START[operator])
        return np.broadcast_to(value, self.view.shape)

    def put(self, values):
        """Sets them; reduce_res takes them out."""
        self.view.write(values)

    def take(self, negate=False):
        if self.result is not None:
            values = self.get()
            checks.store(self.result, -values if negate else values)

    def reduce(self, operator, values, loaded=None, negate=False):
        """All that `cmd` asks for, with float32 values [P, ...]."""
        if self.cmd is reduce_cmd.idle:
            if not self.keeps:
                self.view.state()[...] = memory.NEVER
        elif self.cmd is reduce_cmd.reset:
            self.put(np.zeros(self.view.shape, np.float32))
        else:
            found = reduced(operator, values.reshape(len(values), -1), (1,), self.exact)[:, None]
            self.put(alu.REDUCE[operator](self.start(operator, loaded), found))
        self.take(negate)


def reduced(operator, x, axes, exact=False):
    """float32 x reduced over `axes`."""
    if operator == "add" and exact:
        return x.sum(axis=axes, dtype=np.float64).astype(np.float32)
    return alu.REDUCE[operator].reduce(x, axis=axes).astype(np.float32)
