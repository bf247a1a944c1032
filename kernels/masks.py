"""The vocabulary of visibility, as arithmetic on positions.

A mask says which key positions a query position sees. An `Interval` sees [lo(q), hi(q)], both nondecreasing in q:

    Full()              everything                     Causal()       k <= q
    Local(left, right)  q - left <= k <= q + right     Chunked(n)     k // n == q // n

`&` of intervals is an interval. `|`, `~` and user functions f(q_pos, k_pos) -> bool leave that family.

A mask is called with positions and answers elementwise. `block` answers for a whole tile, given only the least and
the greatest position on either side: (some, every), where `some` False means surely nothing is visible, `every` True
means surely everything is, and anything else means that the tile must be masked. All of it is plain arithmetic, so it
works on Python ints, NumPy, JAX and traced scalars inside a kernel alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, index
from typing import Any, NamedTuple

_FAR = 1 << 30  # positions and windows lie below this, so that int32 sums of two never wrap


class Mask:
    """A set of visible (query position, key position) pairs. Frozen and hashable: usable as a static argument."""

    span: int | None = None  # no query sees more keys than this, nor keys further apart; None: no such bound is known

    def __call__(self, q, k):
        """q, k: positions, int32, broadcast against each other. Returns bool: does q see k?"""
        raise NotImplementedError

    def block(self, q_min, q_max, k_min, k_max):
        """(some, every) for a tile whose positions lie in [q_min, q_max] x [k_min, k_max]; see the module."""
        raise NotImplementedError

    def __and__(self, other):
        return _Both(self, as_mask(other))

    def __or__(self, other):
        return _Either(self, as_mask(other))

    def __invert__(self):
        return _Not(self)

    def __rand__(self, other):
        return as_mask(other) & self

    def __ror__(self, other):
        return as_mask(other) | self


@dataclass(frozen=True)
class Interval(Mask):
    """Keys in [q - left, q + right] (None: unbounded) that share a chunk with q for every size in `chunks`."""

    left: int | None = None
    right: int | None = None
    chunks: tuple[int, ...] = ()

    @property
    def span(self):
        window = () if self.left is None or self.right is None else (self.left + self.right + 1,)
        return min((*window, *self.chunks), default=None)

    def bounds(self, q):
        """([lower bounds], [upper bounds]) of the visible keys of q, each nondecreasing in q. Empty: unbounded."""
        lower = [q - q % n for n in self.chunks]
        upper = [q - q % n + (n - 1) for n in self.chunks]
        if self.left is not None:
            lower.append(q - self.left)
        if self.right is not None:
            upper.append(q + self.right)
        return lower, upper

    def __call__(self, q, k):
        lower, upper = self.bounds(q)
        tests = [k >= bound for bound in lower] + [k <= bound for bound in upper]
        return reduce(and_, tests) if tests else (q == q) & (k == k)  # the latter: True, in the shape of both

    def block(self, q_min, q_max, k_min, k_max):
        # The bounds are monotone: the first query reaches furthest down, the last one furthest up.
        (lower_first, upper_first), (lower_last, upper_last) = self.bounds(q_min), self.bounds(q_max)
        some = every = (q_min <= q_max) & (k_min <= k_max)
        for first, last in zip(lower_first, lower_last, strict=True):
            some, every = some & (k_max >= first), every & (k_min >= last)
        for first, last in zip(upper_first, upper_last, strict=True):
            some, every = some & (k_min <= last), every & (k_max <= first)
        return some, every

    def __and__(self, other):
        if not isinstance(other, Interval):
            return super().__and__(other)
        return Interval(
            left=_least(self.left, other.left),
            right=_least(self.right, other.right),
            chunks=tuple(sorted({*self.chunks, *other.chunks})),
        )


def Full() -> Interval:
    """Every query sees every key."""
    return Interval()


def Causal() -> Interval:
    """A query sees the keys at its own position and before."""
    return Interval(right=0)


def Local(left: int | None, right: int | None) -> Interval:
    """A query sees `left` keys before its own position and `right` after: Local(511, 0) sees 512 keys.

    None means unbounded on that side, so Local(None, 0) is Causal().
    """
    return Interval(left=_count("left", left), right=_count("right", right))


def Chunked(size: int) -> Interval:
    """A query sees its own chunk of `size` positions, in both directions (`& Causal()` for one)."""
    return Interval(chunks=(_count("size", size, least=1, unbounded=False),))


@dataclass(frozen=True)
class _Both(Mask):
    a: Mask
    b: Mask

    def __call__(self, q, k):
        return self.a(q, k) & self.b(q, k)

    def block(self, *tile):
        (a_some, a_every), (b_some, b_every) = self.a.block(*tile), self.b.block(*tile)
        return a_some & b_some, a_every & b_every


@dataclass(frozen=True)
class _Either(Mask):
    a: Mask
    b: Mask

    def __call__(self, q, k):
        return self.a(q, k) | self.b(q, k)

    def block(self, *tile):
        (a_some, a_every), (b_some, b_every) = self.a.block(*tile), self.b.block(*tile)
        return a_some | b_some, a_every | b_every


@dataclass(frozen=True)
class _Not(Mask):
    a: Mask

    def __call__(self, q, k):
        return self.a(q, k) == False  # noqa: E712  `not` and `~` do not serve both bools and arrays

    def block(self, *tile):
        some, every = self.a.block(*tile)
        return every == False, some == False  # noqa: E712


@dataclass(frozen=True)
class _Function(Mask):
    f: Callable

    def __call__(self, q, k):
        return self.f(q, k)

    def block(self, q_min, q_max, k_min, k_max):
        some = (q_min <= q_max) & (k_min <= k_max)
        return some, some != some  # False: nothing is known about the inside: never surely full


def as_mask(mask) -> Mask:
    """None (everything visible), a Mask, or a function f(q_pos, k_pos) -> bool, as a Mask."""
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if callable(mask):
        return _Function(mask)
    raise TypeError(f"mask: expected a mask, a function f(q_pos, k_pos) -> bool or None, got {type(mask).__name__}")


class Where(NamedTuple):
    """Where the tokens of a call stand: arrays, or None for positions from 0, one segment, no dense mask."""

    q_pos: Any = None  # [B | 1, T] int32
    k_pos: Any = None  # [B | 1, S] int32
    q_seg: Any = None  # [B | 1, T] int32, negative: padding
    k_seg: Any = None  # [B | 1, S] int32; both or neither
    dense: Any = None  # [B | 1, N | 1, T, S] bool, true: visible


def same_segment(q, k):
    """q, k: segment ids, int32. Does a query in segment q see a key in segment k? Negative ids are padding."""
    return (q == k) & (q >= 0)


def same_segment_block(q_min, q_max, k_min, k_max):
    """(some, every) for a tile whose segment ids lie in [q_min, q_max] x [k_min, k_max]; as `Mask.block`."""
    some = (q_min <= k_max) & (k_min <= q_max) & (q_max >= 0) & (k_max >= 0)
    every = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
    return some, every


def _least(a, b):
    return b if a is None else a if b is None else min(a, b)


def _count(name, value, least=0, unbounded=True):
    """value as an int of at least `least`, or None where a side may be unbounded."""
    if value is None and unbounded:
        return None
    try:
        count = None if isinstance(value, bool) else index(value)
    except TypeError:
        count = None
    if count is None or not least <= count < _FAR:
        raise ValueError(f"{name}: expected an int in [{least}, 2**30){' or None' if unbounded else ''}, got {value!r}")
    return count
