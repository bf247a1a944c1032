"""Minimal full models and what they need to be trained: each file readable in one sitting."""

import sys
from numbers import Real


class BadInput(ValueError):
    """What the user handed in cannot serve. The message is one line: what it is, and the cure."""


def line(error: Exception) -> str:
    """An error as a part of one line: the system's words without the path, or the first line of its own."""
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_number(owner: str, name: str, value, least=None) -> None:
    """Raises ValueError unless `value` is a finite number above 0 (or of at least `least`)."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    # Against the largest float, not math.isfinite: that overflows on a long int.
    if not (number and 0 < value <= sys.float_info.max and value >= (least or 0)):
        want = f"of at least {least}" if least else "above 0"
        raise ValueError(f"{owner}: {name} must be a finite number {want}, got {value!r}")
