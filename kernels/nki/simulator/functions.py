"""The part of `nl` that works on tiles. Operators name an operation in an instruction (op=nl.add), and called with
tiles they are that instruction into a new tile. All of these are built from instructions, which check and cost.
"""

from ringtide.kernels.nki.simulator.errors import UnsupportedError

_BINARY = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "abs_max", "abs_min", "power", "fmod", "mod",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "logical_and", "logical_or", "logical_xor",
)  # fmt: skip
_UNARY = (
    "abs", "square", "invert", "logical_not", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "gelu",
    "gelu_apprx_sigmoid", "gelu_apprx_tanh", "gelu_dx", "gelu_apprx_sigmoid_dx", "silu", "silu_dx", "softplus", "mish",
    "erf", "erf_dx", "reciprocal", "copy", "sin", "cos", "tan", "arctan", "ceil", "floor", "trunc", "negative", "sign",
)  # fmt: skip
_ONLY_NAMES = ("average", "prelu", "bypass")  # operators that are no functions


def _operator(name, call):
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"`{name}` as an operator of an instruction, or elementwise on tiles."
    globals()[name] = call


for _name in _BINARY:
    _operator(_name, lambda x, y, dtype=None, _name=_name: _elementwise(_name, dtype, x, y))
for _name in _UNARY:
    _operator(_name, lambda x, dtype=None, _name=_name: _elementwise(_name, dtype, x))
for _name in _ONLY_NAMES:
    _operator(_name, lambda *_, _name=_name: _only_a_name(_name))

OPERATORS = {name: globals()[name] for name in (*_BINARY, *_UNARY, *_ONLY_NAMES)}


def _only_a_name(name):
    raise TypeError(f"nl.{name} is an operator, pass it as op=nl.{name}")


def _elementwise(name, dtype, x, y=None):
    raise UnsupportedError(f"nl.{name}: on tiles it is not simulated yet: use an instruction")
