"""Fresh tensors, in any memory."""

import numpy as np

from ringtide.kernels.nki.simulator import dtypes, machine, memory
from ringtide.kernels.nki.simulator.errors import CapacityError, PartitionError, ShapeError
from ringtide.kernels.nki.simulator.tensor import NkiTensor, integer


def allocate(shape, dtype, space, buffer, name="", *, shared=False, address=None):
    """A fresh tensor on the current machine; see `nl.ndarray`."""
    dtype, shape = dtypes.check(dtype), tuple(integer(None, n) for n in shape)
    if not shape or min(shape) < 1:
        raise ShapeError(f"{name or 'tensor'}: every axis must have at least 1, got shape {shape}")
    if space == "hbm":
        rows, row = 1, int(np.prod(shape, dtype=np.int64)) * dtypes.size(dtype)
    else:
        if len(shape) < 2:
            raise ShapeError(f"{name or 'tensor'}: on chip a tensor has a partition and a free axis, got shape {shape}")
        if shape[0] > memory.PARTITIONS:
            raise PartitionError(
                f"{name or 'tensor'}: {shape[0]} partitions, there are {memory.PARTITIONS}: tile axis 0"
            )
        rows, row = shape[0], int(np.prod(shape[1:], dtype=np.int64)) * dtypes.size(dtype)
    core = machine.current()
    if address is not None:
        _check_address(name or "tensor", space, rows, row, address)
    storage = core.allocate(name or f"{space}{len(core.storages)}", space, rows, row, shared=shared, address=address)
    return NkiTensor(shape, dtype, storage, buffer, name or storage.name)


def _check_address(name, space, rows, row, address):
    """Checks a place that the kernel chose; what SBUF holds is counted with the rest, see capacity.py."""
    partition, byte = address
    if partition < 0 or partition + rows > memory.PARTITIONS:
        raise PartitionError(f"{name}: {rows} partitions from {partition} on, there are {memory.PARTITIONS}")
    if byte < 0 or (space == "psum" and (byte % 4 or byte + row > memory.PSUM_BANK * memory.PSUM_BANKS)):
        raise CapacityError(
            f"{name}: {row} bytes a partition from {byte} on: an address is at least 0, in PSUM a multiple of 4, and "
            f"what lies there ends at {memory.PSUM_BANK * memory.PSUM_BANKS}"
        )
