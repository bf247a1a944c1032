"""The enums of nki.isa."""

from enum import Enum, IntEnum

from ringtide.kernels.nki.simulator.errors import EngineError


class engine(Enum):
    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(IntEnum):  # public kernels pass its numbers
    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):  # public kernels compare generations by <
    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    dma = 1
    gpsimd_dma = 2


tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown
SHORT = {engine.tensor: "PE", engine.vector: "DVE", engine.scalar: "ACT", engine.gpsimd: "POOL"}


def member(instruction, argument, value, allowed):
    """`value`, one of the enum members `allowed`. Raises EngineError."""
    if value not in allowed:
        raise EngineError(f"{instruction}: {argument}={value!r}, it must be one of {', '.join(map(str, allowed))}")
    return value


def get_nc_version():
    return nc_version.gen3


def get_nc_sub_version():
    return 0
