"""Memory as it lies: bytes, what wrote each of them, and which bytes an access touches.

An on-chip allocation is [partitions, bytes a partition], one in HBM a single row. Beside the data lies one byte of
state for each: 0 never written (or by an instruction that has several elements there, of which any may come last), 1
written, 2 written by a matmul (PSUM accumulates only onto what a matmul wrote).
Fresh memory is full of 0xFF, which is NaN in every float; reads go by the state, because NaN can hide (times 0 in a
select, or as an integer).
"""

from dataclasses import dataclass, field

import numpy as np

NEVER, WRITTEN, MATMUL = 0, 1, 2
SBUF_BYTES = 192 * 1024  # a partition; the lower of the documented figures, so that what fits here fits there
PSUM_BANK, PSUM_BANKS = 2048, 8  # bytes a partition
PARTITIONS = 128
_RUNS = 4096  # an access of more separate runs counts as all between its first and its last byte


class Storage:
    """One allocation. space: "sbuf", "psum" or "hbm"."""

    __slots__ = ("_regions", "address", "constant", "data", "first", "initial", "last", "name", "number", "reads",
                 "row_bytes", "rows", "scope", "shared", "space", "state", "writes")  # fmt: skip

    def __init__(self, name, space, rows, row_bytes, scope=None, number=0, shared=False, address=None):
        self.name, self.space, self.rows, self.row_bytes = name, space, rows, row_bytes
        self.scope, self.number = scope, number  # the turn of a loop that made it, and which of its allocations it is
        self.shared, self.address = shared, address
        self.constant = False  # an input: written before the kernel, not by it so far
        self.initial = None  # the bytes of an input that the kernel writes
        self.data = np.empty(rows * row_bytes, np.uint8)
        self.state = np.empty(rows * row_bytes, np.uint8)
        self.reads, self.writes = [], []  # [(Region, index of the instruction)] that a later one may depend on
        self.first = self.last = None  # first and last instruction that touches it
        self._regions = {}
        self.forget()

    def forget(self):
        """As freshly allocated; an input as it was given."""
        self.data[:] = 0xFF if self.initial is None else self.initial
        self.state[:] = NEVER if self.initial is None else WRITTEN

    def fill(self, x):
        """Holds the bytes of x [rows, ...], all written."""
        self.data[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        self.state[:] = WRITTEN

    def region(self, shape, strides, offset, itemsize):
        """The Region of a view; strides and offset in elements of `itemsize` bytes."""
        key = shape, strides, offset, itemsize
        found = self._regions.get(key)
        if found is None:
            found = self._regions[key] = _region(self, *key)
        return found


@dataclass(frozen=True)
class Region:
    """Bytes of partitions [p0, p1): runs [start, end) of each, sorted."""

    p0: int
    p1: int
    starts: np.ndarray = field(compare=False)
    ends: np.ndarray = field(compare=False)
    low: int = 0
    high: int = 0
    twice: bool = False  # some byte is that of more than one element; may say True of dimensions that interlace

    def overlaps(self, other) -> bool:
        if self.p0 >= other.p1 or other.p0 >= self.p1 or self.low >= other.high or other.low >= self.high:
            return False
        if len(self.starts) == 1 == len(other.starts):
            return True
        a, b = (self, other) if len(self.starts) <= len(other.starts) else (other, self)
        begun = np.searchsorted(b.starts, a.ends, "left")  # runs of b that begin before each run of a ends
        over = np.searchsorted(b.ends, a.starts, "right")  # and those that end before it begins
        return bool((begun > over).any())

    def covers(self, other) -> bool:
        """All of `other`; may say False of regions of several runs."""
        if self.p0 > other.p0 or self.p1 < other.p1 or self.low > other.low or self.high < other.high:
            return False
        same = lambda x, y: len(x) == len(y) and bool((x == y).all())
        return len(self.starts) == 1 or (same(self.starts, other.starts) and same(self.ends, other.ends))


def _region(storage, shape, strides, offset, itemsize):
    if storage.space == "hbm":
        p0, p1, dims, start = 0, 1, list(zip(shape, strides, strict=True)), offset
    else:
        row = storage.row_bytes // itemsize
        p0, start = divmod(offset, row)
        p1, dims = p0 + (shape[0] if strides[0] else 1), list(zip(shape[1:], strides[1:], strict=True))
    start += sum(s * (n - 1) for n, s in dims if s < 0)
    dims = sorted(((n, abs(s)) for n, s in dims if n > 1), key=lambda x: x[1])
    twice, extent = False, 1
    for n, step in dims:
        twice, extent = twice or step < extent, extent + step * (n - 1)
    dims = [x for x in dims if x[1]]
    length = 1
    while dims and dims[0][1] <= length:  # contiguous with, or within, what is there
        n, step = dims.pop(0)
        length = (n - 1) * step + length
    starts = np.zeros(1, np.int64)
    for n, step in dims:
        starts = (starts[None, :] + step * np.arange(n, dtype=np.int64)[:, None]).reshape(-1)
        if len(starts) > _RUNS:
            span = sum((n - 1) * step for n, step in dims)
            starts, length = np.zeros(1, np.int64), span + length
            break
    starts = np.sort((start + starts) * itemsize)
    ends = starts + length * itemsize
    return Region(p0, p1, starts, ends, int(starts[0]), int(ends[-1]), twice)
