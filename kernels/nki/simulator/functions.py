"""The part of `nl` that works on tiles. An operator names an operation for an instruction (op=nl.add); called with
tiles, it is that instruction into a new tile of SBUF. All of these are built from instructions, which check and cost;
which instructions the real library takes is not documented (nor, for most, on which engine they run).
"""

from ringtide.kernels.nki.simulator import dtypes
from ringtide.kernels.nki.simulator.errors import BufferError, PartitionError, ShapeError, UnsupportedError
from ringtide.kernels.nki.simulator.tensor import NkiTensor

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
_NO_INSTRUCTION = frozenset(("cos", "tan", "ceil", "floor", "trunc", "fmod", "mod"))
_REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply", "all": "logical_and"}


def _define(name, call, what):
    call.__name__ = call.__qualname__ = name
    call.__doc__ = what
    globals()[name] = call
    return call


_on_tiles = "`nl.{}`: an operator of instructions; elementwise on tiles (or a number), x.dtype unless said otherwise."
OPERATORS = {
    **{n: _define(n, lambda x, y, dtype=None, n=n: _binary(n, x, y, dtype), _on_tiles.format(n)) for n in _BINARY},
    **{n: _define(n, lambda x, dtype=None, n=n: _unary(n, x, dtype), _on_tiles.format(n)) for n in _UNARY},
    **{n: _define(n, lambda *_, n=n: _only_a_name(n), f"`nl.{n}`: an operator of instructions.") for n in _ONLY_NAMES},
}
for _n in _REDUCTIONS:
    _call = lambda x, axis, dtype=None, keepdims=False, n=_n: _reduce(n, x, axis, dtype, keepdims)
    _define(_n, _call, f"`nl.{_n}`: over the last free axes of a tile; x.dtype unless said otherwise.")


def _only_a_name(name):
    raise TypeError(f"nl.{name} is an operator: pass it as op=nl.{name}")


def _isa():
    from ringtide.kernels.nki.simulator import isa

    return isa


def _new(shape, dtype, buffer="sbuf"):
    from ringtide.kernels.nki.simulator import language

    return language.ndarray(shape, dtype, getattr(language, buffer))


def _binary(name, x, y, dtype):
    tiles = [v for v in (x, y) if isinstance(v, NkiTensor)]
    if not tiles:
        raise TypeError(f"nl.{name}: one operand at least is a tile")
    if not _on_chip(tiles):
        raise BufferError(f"nl.{name}: works on tiles in SBUF or PSUM: load first (nl.load, nisa.dma_copy)")
    if name in _NO_INSTRUCTION:
        raise UnsupportedError(f"nl.{name}: on tiles it is not simulated: no documented instruction does it")
    dtype, op = dtype or _common(tiles), OPERATORS[name]
    if name == "divide":  # no instruction divides
        inverse = _unary("reciprocal", y, "float32") if isinstance(y, NkiTensor) else 1.0 / y
        return _binary("multiply", x, inverse, dtype)
    if len(tiles) == 2 and x.shape == y.shape:
        made = _new(x.shape, dtype)
        _isa().tensor_tensor(made, x, y, op)
        return made
    tile, scalar, reverse = (x, y, False) if _is_tile_of(x, y) else (y, x, True)
    if not _is_tile_of(tile, scalar):
        raise ShapeError(f"nl.{name}: {x!r} and {y!r}: equal shapes, or one a number or [P, 1]: broadcast the other")
    if isinstance(scalar, NkiTensor) and scalar.dtype != "float32":
        scalar = copy(scalar, "float32")  # noqa: F821  # scalars of instructions are float32
    made = _new(tile.shape, dtype)
    _isa().tensor_scalar(made, tile, op, scalar, reverse)
    return made


def _on_chip(tiles) -> bool:
    return not [x for x in tiles if not x.on_chip]


def _is_tile_of(tile, scalar):
    """Whether `scalar` is a number, or one value for each partition of `tile`."""
    if not isinstance(tile, NkiTensor):
        return False
    return not isinstance(scalar, NkiTensor) or (scalar.free == 1 and scalar.shape[0] == tile.shape[0])


def _common(tiles):
    """The dtype of the result of several: floats before integers, the wider before the narrower."""
    rank = lambda dtype: (dtype in dtypes.FLOATS, dtypes.size(dtype))
    found = sorted({x.dtype for x in tiles}, key=rank)
    return found[-1] if len(found) < 2 or rank(found[-1]) != rank(found[-2]) else "float32"


def _unary(name, x, dtype):
    if not isinstance(x, NkiTensor) or not x.on_chip:
        raise BufferError(f"nl.{name}: works on a tile in SBUF or PSUM, got {x!r}: load first (nl.load, nisa.dma_copy)")
    if name in _NO_INSTRUCTION:
        raise UnsupportedError(f"nl.{name}: on tiles it is not simulated: no documented instruction does it")
    isa, made = _isa(), _new(x.shape, dtype or x.dtype)
    if name == "copy":
        isa.tensor_copy(made, x)
    elif name == "reciprocal":
        isa.reciprocal(made, x)
    elif name == "negative":
        isa.tensor_scalar(made, x, OPERATORS["multiply"], -1.0)
    elif name == "logical_not":
        isa.tensor_scalar(made, x, OPERATORS["equal"], 0.0)
    elif name == "invert":
        ones = -1 if x.dtype.startswith("int") else 2 ** (8 * dtypes.size(x.dtype)) - 1
        isa.tensor_scalar(made, x, OPERATORS["bitwise_xor"], ones)
    else:
        isa.activation(made, OPERATORS[name], x)
    return made


def _axes(x, axis):
    """Sorted, checked to be the last ones."""
    axes = sorted(a % x.ndim for a in (axis if isinstance(axis, list | tuple) else (axis,)))
    if axes != list(range(x.ndim - len(axes), x.ndim)) or 0 in axes:
        raise ShapeError(f"{x!r}: axis {axis}: reductions go over the last free axes, as axis={x.ndim - 1}")
    return axes


def _reduced(x, axes, keepdims):
    kept = x.shape[: axes[0]]
    return (*kept, *(1,) * len(axes)) if keepdims or len(kept) < 2 else kept


def _reduce(name, x, axis, dtype, keepdims):
    axes = _axes(x, axis)
    made = _new(_reduced(x, axes, True), dtype or x.dtype)
    _isa().tensor_reduce(made, OPERATORS[_REDUCTIONS[name]], x, axes, keepdims=True)
    return made if keepdims else made.reshape(_reduced(x, axes, False))


def mean(x, axis, dtype=None, keepdims=False):
    """The mean over the last free axes, summed in float32; x.dtype unless said otherwise."""
    total = _reduce("sum", x, axis, "float32", keepdims)
    count = x.size // total.size
    return _binary("multiply", total, 1.0 / count, dtype or x.dtype)


def softmax(x, axis=-1, dtype=None):
    """Softmax over the last free axis, in float32."""
    isa, (axis,) = _isa(), _axes(x, axis)
    rows = (*x.shape[:axis], 1)
    if x.ndim != 2:
        raise UnsupportedError(f"nl.softmax: {x!r}: simulated for tiles of two axes: reshape it")
    least, total, inverse = (_new(rows, "float32") for _ in range(3))
    isa.tensor_reduce(least, OPERATORS["maximum"], x, axis, negate=True)
    exps = _new(x.shape, "float32")
    isa.activation_reduce(exps, OPERATORS["exp"], x, OPERATORS["add"], total, bias=least)
    isa.reciprocal(inverse, total)
    return _binary("multiply", exps, inverse, dtype or x.dtype)


def where(condition, x, y, dtype=None):
    """x where the condition is not 0, y elsewhere; numbers may stand for x or y."""
    tiles = [v for v in (x, y) if isinstance(v, NkiTensor)]
    dtype, isa = dtype or _common(tiles or [condition]), _isa()
    mask, made = _new(condition.shape, "uint8"), _new(condition.shape, dtype)
    isa.tensor_scalar(mask, condition, OPERATORS["not_equal"], 0.0)
    if isinstance(y, NkiTensor):
        isa.tensor_copy(made, y)
    else:
        isa.memset(made, y)
    if isinstance(x, NkiTensor) and x.dtype != dtype:
        x = _unary("copy", x, dtype)
    isa.tensor_copy_predicated(made, x, mask)
    return made


def expand_dims(x, axis):
    """A view with an axis of 1 more."""
    return x.expand_dim(axis % (x.ndim + 1))


def broadcast_to(x, shape, dtype=None):
    """A tile of that shape that repeats x along its axes of 1; along the partitions by a matmul with ones (how the real
    library does that is not documented). x itself where nothing changes."""
    dtype, shape = dtype or x.dtype, tuple(shape)
    if x.ndim != len(shape) or [n for n, m in zip(x.shape, shape, strict=True) if n not in (1, m)]:
        raise ShapeError(f"broadcast_to: {x!r} to {list(shape)}: the same number of axes, each equal or 1")
    if x.shape == shape and x.dtype == dtype:
        return x
    for dim in range(1, x.ndim):
        if x.shape[dim] != shape[dim]:
            x = x.broadcast(dim, shape[dim])
    if x.shape[0] != shape[0]:
        return _over_partitions(x, shape, dtype)
    return _unary("copy", x, dtype)


def _over_partitions(x, shape, dtype):
    if shape[0] > 128:
        raise PartitionError(f"broadcast_to: {x!r} to {list(shape)}: there are 128 partitions: tile axis 0")
    isa, made = _isa(), _new(shape, dtype)
    if x.dtype not in dtypes.FLOATS or x.buffer.value != "sbuf":
        x = _unary("copy", x, "float32")
    x = x.reshape((1, x.free)) if x.is_contiguous() else _unary("copy", x, x.dtype).reshape((1, x.free))
    ones = _new((1, shape[0]), x.dtype)
    isa.memset(ones, 1)
    flat = made.reshape((shape[0], x.free))
    for start in range(0, x.free, 512):
        part = slice(start, start + 512 if start + 512 < x.free else x.free)
        bank = _new((shape[0], part.stop - start), "float32", "psum")
        isa.nc_matmul(bank, ones, x[:, part], is_stationary_onezero=True, accumulate=False)
        isa.tensor_copy(flat[:, part], bank)
    return made


def transpose(x, dtype=None):
    """A tile [P, F] as [F, P], in PSUM."""
    made = _new((x.free, x.shape[0]), x.dtype, "psum")
    _isa().nc_transpose(made, x)
    if dtype in (None, x.dtype):
        return made
    cast = _new(made.shape, dtype, "psum")
    _isa().tensor_copy(cast, made)
    return cast


def matmul(x, y, transpose_x=False):
    """x @ y in PSUM, of their dtype: on Trainium2 that must be float32, nisa.nc_matmul takes narrower ones.

    x: [M, K], or [K, M] with transpose_x, which saves its transpose; y: [K, N]."""
    if not transpose_x:
        turned = _new((x.free, x.shape[0]), x.dtype)
        _isa().tensor_copy(turned, transpose(x))
        x = turned
    made = _new((x.free, y.free), _common([x, y]), "psum")
    _isa().nc_matmul(made, x, y, accumulate=False)
    return made


def load(src, dtype=None):
    """A tile in SBUF with what lies in HBM."""
    if src.on_chip:
        raise BufferError(f"nl.load: {src!r}: it loads from HBM: it is on chip already")
    made = _new(src.shape, dtype or src.dtype)
    _isa().dma_copy(made, src)
    return made


def store(dst, value):
    """Writes a tile of SBUF to HBM."""
    if dst.on_chip:
        raise BufferError(f"nl.store: {dst!r}: it stores to HBM: copy on chip with nisa.tensor_copy")
    _isa().dma_copy(dst, value)


def load_transpose2d(src, dtype=None):
    """A tile in SBUF with the transpose of [F, P] in HBM."""
    made = _new(src.shape[::-1], dtype or src.dtype)
    _isa().dma_transpose(made, src)
    return made


def assign(dst, value):
    """`tile[...] = value`: a number by memset, a tile by a copy, to or from HBM by a DMA."""
    isa = _isa()
    if not isinstance(value, NkiTensor):
        isa.memset(dst, value)
    elif dst.on_chip and value.on_chip:
        isa.tensor_copy(dst, value)
    else:
        isa.dma_copy(dst, value)
