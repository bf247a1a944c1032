"""Error bounds from float64, and what a failure says.

    bound = 2 max|naive - truth| + 8 eps max|truth| + slack        and the same of the root mean square

`truth` is the float64 reference, `naive` the same equations in float32 rounded to the dtype of the result, eps that
dtype's. A looser bound could not fail; a tighter one would forbid summing in another order. `slack` is what the terms
of a sum may round by where they cancel (dq, where a query sees one key, is exactly 0), and 0 for most results.
"""

from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo

C = 8


@dataclass(frozen=True)
class Bound:
    """Largest and root-mean-square error allowed."""

    max: float
    rms: float

    @classmethod
    def of(cls, truth, naive, dtype, slack=0.0):
        """dtype: of the arithmetic;  slack: see the module."""
        finite = np.isfinite(truth)
        truth, wrong = truth[finite], naive.astype(np.float64)[finite] - truth[finite]
        eps, least = epsilon(dtype), max(float(finfo(dtype).smallest_subnormal), float(np.finfo(np.float32).tiny))
        slack += least
        return cls(
            2 * np.abs(wrong).max(initial=0) + C * eps * np.abs(truth).max(initial=0) + slack,
            2 * _rms(wrong) + C * eps * _rms(truth) + slack,
        )

    def within(self, truth, relative):
        """And a relative error, in the Frobenius norm, of at most `relative`."""
        finite = truth[np.isfinite(truth)]
        return Bound(self.max, min(self.rms, relative * _rms(finite) + float(np.finfo(np.float32).tiny)))

    def __mul__(self, factor):
        return Bound(factor * self.max, factor * self.rms)


EXACT = Bound(0.0, 0.0)


@dataclass(frozen=True)
class Claim:
    """`got` equals `want` within `bound` (EXACT: bit for bit), at `where` (bool, over the first axes; None: all)."""

    name: str
    got: np.ndarray
    want: np.ndarray
    bound: Bound = EXACT
    where: np.ndarray | None = None

    def __post_init__(self):
        assert np.shape(self.got) == np.shape(self.want), (self.name, np.shape(self.got), np.shape(self.want))

    def ratio(self) -> float:
        """Error over bound: above 1, the claim is false."""
        error = self._error()
        if not error.any():
            return 0.0
        if self.bound == EXACT or not np.isfinite(error).all():
            return float("inf")
        return float(max(error.max() / self.bound.max, _rms(error) / self.bound.rms))

    def __str__(self):
        error = self._error()
        if np.shape(error) == ():
            return f"{self.name}: got {self.got}, expected {self.want}"
        worst = np.unravel_index(np.argmax(error), error.shape)
        around = [(*worst[:-1], slice(max(worst[-1] - 3, 0), worst[-1] + 4))]
        if error.ndim > 1:  # along the last axis, and along axis 1: time
            around.append((worst[0], slice(max(worst[1] - 3, 0), worst[1] + 4), *worst[2:]))
        allowed = "bit for bit" if self.bound == EXACT else f"bound {self.bound.max:.3g}, rms {self.bound.rms:.3g}"
        lines = [
            f"{self.name}{_index(worst)}: got {_number(self.got[worst])}, expected {_number(self.want[worst])}; "
            f"error {error[worst]:.3g}, rms {_rms(error):.3g} ({allowed}), "
            f"{np.count_nonzero(error)} of {error.size} differ"
        ]
        for place in around:
            lines.append(f"  got      {self.name}{_index(place)} = {_numbers(self.got[place])}")
            lines.append(f"  expected {self.name}{_index(place)} = {_numbers(self.want[place])}")
        return "\n".join(lines)

    def _error(self):
        got, want = (np.asarray(x).astype(np.float64) for x in (self.got, self.want))
        with np.errstate(invalid="ignore"):
            error = np.where(got == want, 0, np.abs(got - want))
        if self.where is not None:
            error[~self.where] = 0
        return np.where(np.isnan(error), np.inf, error)


def epsilon(dtype) -> float:
    return float(finfo(dtype).eps)


def largest(x) -> float:
    """Largest magnitude; NaN (padding) does not count."""
    return float(np.nanmax(np.abs(x.astype(np.float64)), initial=0))


def _rms(x):
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if np.size(x) else 0.0


def _index(place):
    inside = (f"{p.start}:{p.stop}" if isinstance(p, slice) else str(p) for p in place)
    return f"[{', '.join(inside)}]"


def _number(x):
    return f"{float(x):.7g}"


def _numbers(x):
    return " ".join(map(_number, x))
