"""The registers in which the scalar and the vector engine each keep one float32 a partition between instructions.

They are memory as any other: an instruction that goes on with them depends on the one before. So the record shows it,
and they are what they were when an instruction is done again.
"""

import numpy as np

from ringtide.kernels.nki.simulator import alu, machine, memory
from ringtide.kernels.nki.simulator.errors import UninitializedError
from ringtide.kernels.nki.simulator.isa import checks
from ringtide.kernels.nki.simulator.isa.enums import reduce_cmd
from ringtide.kernels.nki.simulator.tensor import NkiTensor

START = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


class Accumulators:
    """The registers of the lanes of one operand."""

    def __init__(self, view, ins):
        self.view, self.ins = view, ins

    def get(self):
        """float32 [P, 1]."""
        if not self.view.state().all():
            raise UninitializedError(
                f"{self.ins}: the engine's registers hold nothing known: start with reduce_cmd.reset_reduce"
            )
        return self.view.array().copy()

    def set(self, values):
        self.view.write(np.broadcast_to(np.float32(values), self.view.shape))

    def forget(self):
        self.view.state()[...] = memory.NEVER

    def add(self, operator, values, restart=False, exact=False):
        """Reduces float32 values [P, ...] onto the registers."""
        from ringtide.kernels.nki.simulator.isa.vector import reduced

        found = reduced(operator, values.reshape(len(values), -1), (1,), exact)[:, None]
        self.set(found if restart else alu.REDUCE[operator](self.get(), found))

    def take(self, column, negate=False):
        values = self.get()
        checks.store(column, -values if negate else values)


def use(ins, engine, data, cmd, result):
    """(Accumulators of data's partitions, tensors read, tensors written), by what `cmd` and `result` do to them."""
    core = machine.current()
    if engine not in core.registers:
        core.registers[engine] = memory.Storage(f"{engine} registers", "register", memory.PARTITIONS, 4)
    first, count = data.partitions()
    view = NkiTensor((count, 1), "float32", core.registers[engine], None, f"{engine} registers", offset=first)
    reads, writes = (), ()
    if result is not None:
        checks.column(ins, "reduce_res", result, data)
        writes += (result,)
    if cmd is reduce_cmd.reduce or (result is not None and cmd is reduce_cmd.idle):
        reads += (view,)
    if cmd is not reduce_cmd.idle:
        writes += (view,)
    return Accumulators(view, ins), reads, writes
