"""What the operators compute. Instructions take them as objects of the language (nl.add, nl.exp); the NumPy here goes
by their names, on float32, or on int64 for bits and for exact integers.

NaN in maximum and minimum, shifts by the whole width and more, and the accuracy of the activation functions are not
documented: here NaN stays NaN, such a shift gives 0, and the functions are exact to float32.
"""

import math

import numpy as np

from ringtide.kernels.nki.simulator.errors import EngineError

_MODULE = __name__.rsplit(".", 1)[0]
_ERF = np.frompyfunc(math.erf, 1, 1)
f32 = np.float32


def erf(x):
    return _ERF(x).astype(x.dtype)


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def _phi(x):
    """Density of the normal distribution."""
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _bool(x):
    return x.astype(f32)


BITS = {  # on int64; the results are cut to the width of the operands when stored
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": lambda x, n: np.where(n < 63, x << np.minimum(n, 62), 0),
    "right_shift": lambda x, n: x >> np.minimum(n, 63),  # of operands cut to their width: logical
    "invert": np.invert,
}
ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "abs_max": lambda x, y: np.maximum(np.abs(x), np.abs(y)),
    "abs_min": lambda x, y: np.minimum(np.abs(x), np.abs(y)),
    "equal": lambda x, y: _bool(np.equal(x, y)),
    "not_equal": lambda x, y: _bool(np.not_equal(x, y)),
    "less": lambda x, y: _bool(np.less(x, y)),
    "less_equal": lambda x, y: _bool(np.less_equal(x, y)),
    "greater": lambda x, y: _bool(np.greater(x, y)),
    "greater_equal": lambda x, y: _bool(np.greater_equal(x, y)),
    "logical_and": lambda x, y: _bool(np.logical_and(x, y)),
    "logical_or": lambda x, y: _bool(np.logical_or(x, y)),
    "logical_xor": lambda x, y: _bool(np.logical_xor(x, y)),
}
UNARY = {
    "abs": np.abs,
    "square": np.square,
    "relu": lambda x: np.maximum(x, f32(0)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
}
COMPARE = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
REDUCE = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
_C = math.sqrt(2 / math.pi)


def _mish(x):
    return x * np.tanh(np.logaddexp(x, 0))


def _silu_dx(x):
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_apprx_sigmoid_dx(x):
    s = _sigmoid(1.702 * x)
    return s + 1.702 * x * s * (1 - s)


ACTIVATIONS = {  # on float64, so that rounding to float32 is the only error
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_dx": lambda x: 0.5 * (1 + erf(x / math.sqrt(2))) + x * _phi(x),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": _gelu_apprx_sigmoid_dx,
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(x, 0),
    "mish": _mish,
    "erf": erf,
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "arctan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sign": np.sign,
    "abs": np.abs,
}
VALID = {  # activation -> least and greatest |argument| that the tables of the engine cover (documented)
    "log": (2.0**-64, 2.0**64),
    "sin": (0.0, math.pi),
    "arctan": (0.0, math.pi / 2),
    "sqrt": (2.0**-116, 2.0**118),
    "rsqrt": (2.0**-87, 2.0**97),
    "reciprocal": (2.0**-42, 2.0**42),
}
_ALIAS = {"max": "maximum", "min": "minimum"}  # nl.max and nl.min stand for the operators, too


def name(op, tables, instruction, argument="op") -> str:
    """An operator's name, if it is one of the language's and in one of `tables`. Raises EngineError."""
    found = getattr(op, "__name__", None)
    found = _ALIAS.get(found, found)
    if not str(getattr(op, "__module__", "")).startswith(_MODULE):
        raise EngineError(f"{instruction}: {argument}={op!r} is no operator of nki.language: pass an object, as nl.add")
    if not any(found in table for table in tables):
        known = ", ".join(key for table in tables for key in table)
        raise EngineError(f"{instruction}: {argument}=nl.{found} is not one of its operators: {known}")
    return found


def equal(x, y, dtype=None):
    """The default of comparisons, by name the same as nl.equal."""


def maximum(x, y, dtype=None):
    """The default of reductions, by name the same as nl.maximum."""
