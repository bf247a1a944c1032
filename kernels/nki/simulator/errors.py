"""What a kernel can do wrong. Each error is one line: the operation and its place in the kernel, the rule, the cure."""


class NkiSimError(Exception):
    """Any rule of the hardware or the API that a kernel broke."""


class PartitionError(NkiSimError):
    """More than 128 partitions, or a start that the access rules do not allow."""


class BufferError(NkiSimError):
    """An operand in a memory that the instruction cannot reach."""


class DtypeError(NkiSimError):
    """A dtype that the instruction does not take, or a value that the dtype cannot hold."""


class ShapeError(NkiSimError):
    """Shapes that do not go together: nothing broadcasts by itself."""


class EngineError(NkiSimError):
    """An instruction on an engine that does not have it, or an operation that an instruction does not know."""


class CapacityError(NkiSimError):
    """More SBUF or PSUM alive at once than there is."""


class BankError(NkiSimError):
    """A matmul that does not stay inside one PSUM bank."""


class OutOfBoundsError(NkiSimError):
    """An index or access pattern beyond its tensor."""


class UninitializedError(NkiSimError):
    """A read of memory that nothing has written."""


class PsumHazardError(NkiSimError):
    """Accumulation onto PSUM whose last writer was not a matmul."""


class HazardError(NkiSimError):
    """A race between two cores, a tensor used outside the loop that made it, turns of a loop that differ."""


class RangeError(NkiSimError):
    """An argument of an activation beyond the bound that the caller set."""


class UnsupportedError(NkiSimError):
    """Something that exists in NKI but not in this simulator, or whose meaning is not documented."""


class LintError(NkiSimError):
    """Python that one of the two front ends of the real compiler does not take."""
