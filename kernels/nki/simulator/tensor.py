"""NkiTensor: a view of memory, shape and strides over bytes, with the algebra that kernels use.

On-chip memory has a partition axis, always axis 0, never dropped; what lies in a partition is free. Strides count
elements of the view's dtype over the whole allocation, so a step of one partition is the elements that a partition
holds, which is how `.ap` counts, too.
"""

import math

import numpy as np

from ringtide.kernels.nki.simulator import dtypes, memory
from ringtide.kernels.nki.simulator.errors import (
    BufferError,
    DtypeError,
    OutOfBoundsError,
    PartitionError,
    ShapeError,
    UninitializedError,
    UnsupportedError,
)

_STARTS = ((128, (0,)), (64, (0, 64)), (32, (0, 32, 64, 96)))  # partitions -> where an access may start


class DynamicSlice:
    """`nl.ds(start, size)`."""

    def __init__(self, start, size):
        self.start, self.size = start, size


class NkiTensor:
    """A view: shape, strides and offset in elements, over a Storage. `buffer` is the MemoryRegion it lives in."""

    __slots__ = ("buffer", "dtype", "dynamic", "moved", "name", "offset", "shape", "storage", "strides")

    def __init__(self, shape, dtype, storage, buffer, name="", strides=None, offset=0, dynamic=(), moved=False):
        self.shape, self.dtype, self.storage, self.buffer, self.name = tuple(shape), dtype, storage, buffer, name
        self.strides = tuple(strides) if strides is not None else _row_major(self.shape)
        self.offset = offset
        self.dynamic = dynamic  # tensors that an address was read from: the access depends on them
        self.moved = moved  # the offset is one that only the device knows: of a register, or from memory

    # --- what instructions do with it -------------------------------------------------------------------------------

    def array(self) -> np.ndarray:
        """The elements, as stored, over the memory itself."""
        size = dtypes.size(self.dtype)
        return np.ndarray(
            self.shape,
            dtypes.NUMPY[self.dtype],
            self.storage.data,
            self.offset * size,
            [s * size for s in self.strides],
        )

    def state(self) -> np.ndarray:
        """uint8 [..., bytes an element]: what wrote each byte, see memory.py."""
        size = dtypes.size(self.dtype)
        strides = [*(s * size for s in self.strides), 1]
        return np.ndarray((*self.shape, size), np.uint8, self.storage.state, self.offset * size, strides)

    def read(self) -> np.ndarray:
        """The elements as float32 or int64. Raises UninitializedError."""
        self.check_written()
        return dtypes.wide(self.array(), self.dtype)

    def check_written(self):
        state = self.state()
        if not state.all():
            first = tuple(int(i) for i in np.argwhere(state == memory.NEVER)[0][:-1])
            raise UninitializedError(
                f"{self!r}: element {first} is read and was never written: write it first, or slice (what an "
                f"instruction writes twice, in no known order, counts as not written)"
            )

    def write(self, x, by=memory.WRITTEN):
        """Stores x, which has the same shape, rounded to the dtype."""
        self.array()[...] = dtypes.narrow(np.asarray(x), self.dtype)
        self.state()[...] = by

    def region(self) -> memory.Region:
        return self.storage.region(self.shape, self.strides, self.offset, dtypes.size(self.dtype))

    @property
    def on_chip(self) -> bool:
        return self.storage.space != "hbm"

    @property
    def free(self) -> int:
        """Elements a partition."""
        return math.prod(self.shape[1:])

    def partitions(self):
        """(first, count), checked against the rule of starts: 128 at 0, up to 64 at 0 or 64, up to 32 at any 32."""
        count, first = self.shape[0], self.offset * dtypes.size(self.dtype) // self.storage.row_bytes
        first += self.storage.address[0] if self.storage.address else 0
        if count > memory.PARTITIONS:
            raise PartitionError(f"{self!r}: {count} partitions, there are {memory.PARTITIONS}: tile axis 0")
        allowed = next(starts for most, starts in reversed(_STARTS) if count <= most)
        if first not in allowed:
            raise PartitionError(
                f"{self!r}: {count} partitions start at {first}, an access of so many starts at "
                f"{' or '.join(map(str, allowed))}: move the data with a DMA"
            )
        return first, count

    # --- views ------------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        if sum(k is Ellipsis for k in key) > 1:
            raise ShapeError(f"{self!r}[{key}]: one ... at most")
        if Ellipsis in [k if k is Ellipsis else None for k in key]:
            at = next(i for i, k in enumerate(key) if k is Ellipsis)
            key = (*key[:at], *(slice(None),) * (self.ndim - len(key) + 1), *key[at + 1 :])
        if len(key) > self.ndim:
            raise ShapeError(f"{self!r}: {len(key)} indices for {self.ndim} axes")
        key = (*key, *(slice(None),) * (self.ndim - len(key)))
        least = 2 if self.on_chip else 1
        shape, strides, offset, dropped = [], [], self.offset, []
        for axis, (k, n, step) in enumerate(zip(key, self.shape, self.strides, strict=True)):
            start, count, by, single = self._index(axis, k, n)
            offset += start * step
            shape.append(count)
            strides.append(step * by)
            if single and not (self.on_chip and axis == 0):
                dropped.append(axis)
        keep = [axis for axis in range(self.ndim) if axis not in dropped]
        for axis in reversed(dropped):  # as many dropped as leave `least` axes, the first ones first
            if len(keep) < least:
                keep = sorted([*keep, axis])
        return self._view([shape[a] for a in keep], [strides[a] for a in keep], offset)

    def __setitem__(self, key, value):
        """A copy into the view: of a number, or of a tensor of the same shape."""
        from ringtide.kernels.nki.simulator.functions import assign

        assign(self[key], value)

    def _index(self, axis, k, n):
        """(start, count, step, is it a single index) of one index."""
        if isinstance(k, DynamicSlice):
            k = slice(integer(self, k.start), integer(self, k.start) + integer(self, k.size))
        if isinstance(k, slice):
            start, stop, step = k.start, k.stop, k.step
            step = 1 if step is None else integer(self, step)
            start = 0 if start is None else integer(self, start)
            stop = n if stop is None else integer(self, stop)
            start, stop = start + n * (start < 0), stop + n * (stop < 0)
            if step < 1:
                raise ShapeError(f"{self!r}: the slice of axis {axis} steps by {step}, it must step forward")
            if not 0 <= start < stop <= n:
                raise OutOfBoundsError(
                    f"{self!r}: slice {start}:{stop} of axis {axis}, which has {n}, is not inside it"
                )
            if self.on_chip and axis == 0 and step > 1:
                raise PartitionError(f"{self!r}: partitions cannot be strided, got a step of {step}")
            return start, -(-(stop - start) // step), step, False
        k = integer(self, k)
        if not -n <= k < n:
            raise OutOfBoundsError(f"{self!r}: index {k} of axis {axis}, which has {n}")
        return k + n * (k < 0), 1, 1, True

    def slice(self, dim, start, end, step=1):
        """As t[..., start:end:step, ...] on axis `dim`."""
        return self[(*(slice(None),) * self._axis(dim), slice(start, end, step))]

    def select(self, dim, index):
        """One index of axis `dim`, which goes. An index in memory (int32, one element) is read when the access is."""
        dim = self._axis(dim)
        if self.on_chip and dim == 0:
            raise PartitionError(f"{self!r}.select: the partition axis cannot be dropped")
        index, *device = address_of(index)
        if not 0 <= index < self.shape[dim]:
            raise OutOfBoundsError(f"{self!r}.select: index {index} of axis {dim}, which has {self.shape[dim]}")
        drop = lambda x: [v for i, v in enumerate(x) if i != dim]
        offset = self.offset + index * self.strides[dim]
        return self._view(drop(self.shape), drop(self.strides), offset, None, *device)

    def permute(self, dims):
        """Axes in another order; on chip the partition stays first."""
        if sorted(dims) != list(range(self.ndim)):
            raise ShapeError(f"{self!r}.permute: {dims} is no order of its {self.ndim} axes")
        if self.on_chip and dims[0] != 0:
            raise PartitionError(f"{self!r}.permute: the partition axis stays first, got {dims}")
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims], self.offset)

    def broadcast(self, dim, size):
        """An axis of 1 as `size` of the same (stride 0)."""
        dim = self._axis(dim)
        if self.shape[dim] != 1:
            raise ShapeError(f"{self!r}.broadcast: axis {dim} has {self.shape[dim]}, it must have 1")
        if self.on_chip and dim == 0:
            raise PartitionError(f"{self!r}.broadcast: not over partitions: multiply by ones on the tensor engine")
        put = lambda x, v: [*x[:dim], v, *x[dim + 1 :]]
        return self._view(put(self.shape, size), put(self.strides, 0), self.offset)

    def expand_dim(self, dim):
        """A new axis of 1 at `dim`; on chip not before the partition."""
        if self.on_chip and dim == 0:
            raise PartitionError(f"{self!r}.expand_dim: the partition axis stays first")
        at = lambda x, v: [*x[:dim], v, *x[dim:]]
        return self._view(at(self.shape, 1), at(self.strides, 0), self.offset)

    def squeeze_dim(self, dim):
        """Without axis `dim`, which has 1."""
        dim = self._axis(dim)
        if self.shape[dim] != 1 or (self.on_chip and dim == 0):
            raise ShapeError(f"{self!r}.squeeze_dim: axis {dim} must have 1 and not be the partition")
        drop = lambda x: [v for i, v in enumerate(x) if i != dim]
        return self._view(drop(self.shape), drop(self.strides), self.offset)

    def reshape_dim(self, dim, shape):
        """Axis `dim` as several; one of them may be -1."""
        dim = self._axis(dim)
        sizes = _fill(self, tuple(shape), self.shape[dim])
        if self.on_chip and dim == 0:
            raise PartitionError(f"{self!r}.reshape_dim: the partition axis cannot be split")
        step = self.strides[dim]
        strides = [step * s for s in _row_major(sizes)]
        at = lambda x, v: [*x[:dim], *v, *x[dim + 1 :]]
        return self._view(at(self.shape, sizes), at(self.strides, strides), self.offset)

    def flatten_dims(self, start_dim, end_dim):
        """Axes start_dim to end_dim (included) as one; they must lie one after another."""
        a, b = self._axis(start_dim), self._axis(end_dim)
        if self.on_chip and a == 0 and b > 0:
            raise PartitionError(f"{self!r}.flatten_dims: the partition axis cannot be merged")
        for i in range(a, b):
            if self.shape[i] > 1 and self.strides[i] != self.strides[i + 1] * self.shape[i + 1]:
                raise ShapeError(f"{self!r}.flatten_dims: axes {i} and {i + 1} do not lie one after another")
        n = int(np.prod(self.shape[a : b + 1], dtype=np.int64))
        at = lambda x, v: [*x[:a], v, *x[b + 1 :]]
        return self._view(at(self.shape, n), at(self.strides, self.strides[b]), self.offset)

    def reshape(self, shape):
        """Another shape over the same elements, which must lie one after another; on chip axis 0 stays."""
        shape = _fill(self, tuple(shape), self.size)
        if self.on_chip and (shape[0] != self.shape[0]):
            raise PartitionError(f"{self!r}.reshape: the partition axis stays, got {shape}")
        if not self.is_contiguous():
            raise ShapeError(f"{self!r}.reshape: its elements do not lie one after another: reshape before slicing")
        strides = list(_row_major(shape))
        if self.on_chip:
            strides[0] = self.strides[0]
        return self._view(shape, strides, self.offset)

    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None):
        """By names, as einops: (("p", ("a", "b")), ("p", "b", "a"), {"a": 4})."""
        sizes, view, names = dict(fixed_sizes or {}), self, []
        for pattern in src_pattern:
            group = pattern if isinstance(pattern, tuple) else (pattern,)
            at = len(names)
            unknown = [name for name in group if name not in sizes]
            known = int(np.prod([sizes[name] for name in group if name in sizes], dtype=np.int64))
            if len(unknown) > 1 or view.shape[at] % known:
                raise ShapeError(f"{self!r}.rearrange: the sizes of {group} do not follow from fixed_sizes")
            sizes.update((name, view.shape[at] // known) for name in unknown)
            if len(group) > 1:
                view = view.reshape_dim(at, tuple(sizes[name] for name in group))
            elif view.shape[at] != sizes[group[0]]:
                raise ShapeError(f"{self!r}.rearrange: {group[0]} is {sizes[group[0]]}, the axis has {view.shape[at]}")
            names += group
        order = [name for pattern in dst_pattern for name in (pattern if isinstance(pattern, tuple) else (pattern,))]
        if sorted(order) != sorted(names):
            raise ShapeError(f"{self!r}.rearrange: {dst_pattern} does not have the axes of {src_pattern}")
        view = view.permute(tuple(names.index(name) for name in order))
        for at, pattern in enumerate(dst_pattern):
            if isinstance(pattern, tuple) and len(pattern) > 1:
                view = view.flatten_dims(at, at + len(pattern) - 1)
        return view

    def view(self, dtype):
        """The same bytes as another dtype; the last axis must lie contiguous and grows or shrinks with it."""
        dtype = dtypes.check(dtype)
        a, b = dtypes.size(self.dtype), dtypes.size(dtype)
        *head, last = self.shape
        if self.strides[-1] != 1 or (last * a) % b or (self.offset * a) % b:
            raise ShapeError(
                f"{self!r}.view({dtype}): the last axis must be contiguous and divide by the ratio of sizes"
            )
        if any((s * a) % b for s in self.strides[:-1]):
            raise ShapeError(f"{self!r}.view({dtype}): its rows do not begin at a multiple of {b} bytes")
        strides = [s * a // b for s in self.strides[:-1]] + [1]
        return self._view([*head, last * a // b], strides, self.offset * a // b, dtype=dtype)

    reinterpret_cast = view

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        """A raw access pattern [[step, count], ...] over the storage, whatever the view shows of it: from its element
        `offset` on, or from where the view starts.

        scalar_offset: a register or an integer in SBUF; times the stride of `indirect_dim` it moves the start.
        """
        base = self if dtype is None else self._retyped(dtypes.check(dtype))
        start, device = base.offset if offset is None else offset, ()
        if vector_offset is not None:
            raise UnsupportedError(
                f"{self!r}.ap: vector_offset is not simulated: take one access a row, by scalar_offset"
            )
        if scalar_offset is not None:
            index, *device = address_of(scalar_offset)
            if index < 0:
                raise OutOfBoundsError(f"{self!r}.ap: scalar_offset is {index}, an index begins at 0")
            start += index * base.strides[indirect_dim]
        steps, counts = [int(s) for s, _ in pattern], [int(n) for _, n in pattern]
        if min(counts) < 1:
            raise ShapeError(f"{self!r}.ap: counts must be at least 1, got {pattern}")
        if self.on_chip:
            row = self.storage.row_bytes // dtypes.size(base.dtype)
            if steps[0] != row and counts[0] > 1:
                raise PartitionError(
                    f"{self!r}.ap: the first pair is the partition, its step is the {row} elements of one, "
                    f"got {steps[0]}"
                )
            first, last = (start % row + x for x in _reach(counts[1:], steps[1:]))
            if first < 0 or last >= row:
                reached = first if first < 0 else last
                raise OutOfBoundsError(f"{self!r}.ap({pattern}): reaches element {reached} of a partition of {row}")
        return base._view(counts, steps, start, None, *device)

    def _retyped(self, dtype):
        a, b = dtypes.size(self.dtype), dtypes.size(dtype)
        if (self.offset * a) % b:
            raise DtypeError(f"{self!r}: does not begin at a multiple of {b} bytes, as {dtype} must")
        return self._view(
            self.shape, [s * a // b for s in self.strides], self.offset * a // b, dtype=dtype, check=False
        )

    def vector_select(self, dim, vector_offset):
        raise UnsupportedError(
            f"{self!r}.vector_select: not simulated: take one access a row, by select or scalar_offset"
        )

    def indirect(self, index, num_elem=None):
        raise UnsupportedError(f"{self!r}.indirect: needs Trainium3")

    def is_contiguous(self) -> bool:
        """Whether the elements (on chip: those of a partition) lie one after another."""
        shape, strides = (self.shape[1:], self.strides[1:]) if self.on_chip else (self.shape, self.strides)
        return all(n == 1 or s == want for n, s, want in zip(shape, strides, _row_major(shape), strict=True))

    def get_pattern(self) -> list:
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        return self.moved

    def _axis(self, dim):
        if not -self.ndim <= dim < self.ndim:
            raise ShapeError(f"{self!r}: no axis {dim}")
        return dim % self.ndim

    def _view(self, shape, strides, offset, dtype=None, dynamic=(), moved=False, check=True):
        dtype, shape, strides = dtype or self.dtype, tuple(map(int, shape)), tuple(map(int, strides))
        if self.moved and moved:
            raise ShapeError(f"{self!r}: an address that is known on the device only cannot be indexed by another one")
        first, last = (offset + x for x in _reach(shape, strides))
        held = len(self.storage.data) // dtypes.size(dtype)
        if check and (first < 0 or last >= held):
            reached = first if first < 0 else last
            raise OutOfBoundsError(f"{self!r}: an access of {shape} reaches element {reached}, the tensor has {held}")
        made = self.dynamic + dynamic, self.moved or moved
        return NkiTensor(shape, dtype, self.storage, self.buffer, self.name, strides, int(offset), *made)

    def __repr__(self):
        return f"{self.name or 'tensor'} {self.dtype}{list(self.shape)} in {self.storage.space}"

    def __iter__(self):
        raise ShapeError(f"{self!r}: cannot be iterated over: index it")

    def __bool__(self):
        raise ShapeError(f"{self!r}: has no truth value: its content is not known when the kernel is compiled")

    def __eq__(self, other):
        if isinstance(other, int | float | VirtualRegister):
            self.__bool__()
        return self is other

    __hash__ = object.__hash__


class VirtualRegister:
    """A register of an engine: its value is not known to the kernel, only to the instructions that take it."""

    def __init__(self, value=0, frozen=False):
        self.value, self.frozen, self.sources = value, frozen, ()

    def _refuse(self, *_):
        raise TypeError("a register's value is not known when the kernel is compiled: pass it as scalar_offset")

    __bool__ = __int__ = __index__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other if other is None or isinstance(other, VirtualRegister) else self._refuse()


def address_of(index):
    """(value, tensors it was read from, whether only the device knows it) of an int, a register, a tensor of one
    integer."""
    if isinstance(index, VirtualRegister):
        if index.value is None:
            raise UninitializedError("an address from a register that holds nothing: register_move or register_load")
        return index.value, index.sources, True
    if isinstance(index, NkiTensor):
        if index.size != 1 or index.dtype not in dtypes.INTEGERS:
            raise ShapeError(f"{index!r}: an address is one integer")
        if index.storage.space != "sbuf":
            raise BufferError(f"{index!r}: an address is read from SBUF: copy it there")
        return int(index.read().reshape(())), (index,), True
    return integer(None, index), (), False


def integer(tensor, x):
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise ShapeError(f"{tensor!r}: an index must be an int known to the compiler, got {type(x).__name__} {x!r}")
    return int(x)


def _fill(tensor, shape, size):
    if shape.count(-1) == 1:
        rest = -int(np.prod(shape, dtype=np.int64))
        shape = tuple(size // rest if n == -1 and rest else n for n in shape)
    if min(shape) < 1 or int(np.prod(shape, dtype=np.int64)) != size:
        raise ShapeError(f"{tensor!r}: {size} elements cannot take the shape {shape}")
    return shape


def _reach(shape, strides):
    """The least and the greatest element that a view reaches, from its first one."""
    ends = [s * (n - 1) for s, n in zip(strides, shape, strict=True)]
    return sum(min(x, 0) for x in ends), sum(max(x, 0) for x in ends)


def _row_major(shape):
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
