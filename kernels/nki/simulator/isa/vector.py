"""Elementwise instructions, reductions and scans: the vector engine, and what other engines share of them."""

import numpy as np

from ringtide.kernels.nki.simulator import alu, dtypes, machine
from ringtide.kernels.nki.simulator.errors import DtypeError, EngineError, ShapeError, UnsupportedError
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.accumulators import reduced
from ringtide.kernels.nki.simulator.tensor import NkiTensor

_INT32 = ("int32", "uint32")


def tensor_copy(dst, src, engine=enums.engine.unknown, name=None):
    """dst = src, bit by bit if of equal dtypes, else through float32."""
    op, which = "tensor_copy", enums.engine
    checks.tile(op, "dst", dst)
    checks.tile(op, "src", src)
    checks.alike(op, dst, ("src", src))
    on = checks.chosen(op, engine, which.vector, (which.vector, which.scalar, which.gpsimd), (dst, src))
    core = machine.current()
    exact = dst.dtype == src.dtype and not (core.options.flush and dst.dtype in dtypes.FLOATS)

    def run():
        if exact:
            checks.copy_bits(dst, src)
        else:
            checks.store(dst, checks.fp32(src, core.options.flush))

    mode = checks.copy_mode(dst, src) if on == "DVE" else 1
    return core.issue(op, on, run, (src,), (dst,), **checks.facts(dst, src), mode=mode, name=name)


def memset(dst, value, engine=enums.engine.unknown, name=None):
    """dst = value everywhere; the value must be one that dst's dtype has (floats may round)."""
    op, which = "memset", enums.engine
    checks.tile(op, "dst", dst)
    on = checks.chosen(op, engine, which.vector, (which.vector, which.gpsimd), (dst,))
    if isinstance(value, NkiTensor) or not isinstance(value, int | float | np.number | np.bool_):
        raise DtypeError(f"{op}: value is {type(value).__name__} {value!r}, it must be a number")
    stored = dtypes.NUMPY[dst.dtype]
    if dst.dtype in dtypes.INTEGERS:
        low, high = (0, 1) if dst.dtype == "bool" else (np.iinfo(stored).min, np.iinfo(stored).max)
        if not np.isfinite(value) or value != int(value) or not low <= value <= high:
            raise DtypeError(f"{op}: {dst.dtype} has no value {value!r}")
        filled = np.int64(value)
    else:
        with np.errstate(over="ignore"):
            filled = np.float32(value)
        if np.isfinite(value) and not np.isfinite(float(dtypes.narrow(filled.reshape(1), dst.dtype)[0])):
            raise DtypeError(f"{op}: {dst.dtype} cannot hold {value!r}")

    def run():
        checks.store(dst, np.full(dst.shape, filled))

    mode = 2 if on == "DVE" and value == 0 and checks.narrow(dst) else 1
    return machine.current().issue(op, on, run, (), (dst,), **checks.facts(dst), mode=mode, name=name)


def _exact_ints(operator, tensors):
    """Whether GpSimd takes it by default: 32-bit integers throughout, none in PSUM."""
    return (
        operator not in alu.BITS
        and all(x.dtype in _INT32 for x in tensors)
        and not any(x.storage.space == "psum" for x in tensors)
    )


def tensor_tensor(dst, data1, data2, op, engine=enums.engine.unknown, name=None):
    """dst = data1 op data2, in float32; on bits for operators on bits; exact for 32-bit integers on GpSimd."""
    ins, which = "tensor_tensor", enums.engine
    for argument, x in (("dst", dst), ("data1", data1), ("data2", data2)):
        checks.tile(ins, argument, x)
    checks.alike(ins, dst, ("data1", data1), ("data2", data2))
    checks.not_both_psum(ins, "data1", data1, "data2", data2)
    operator = alu.name(op, (alu.BITS, alu.ARITHMETIC), ins)
    if operator == "invert":
        raise EngineError(f"{ins}: op=nl.invert takes one operand: use tensor_scalar")
    tensors = (dst, data1, data2)
    default = which.gpsimd if operator == "power" or _exact_ints(operator, tensors) else which.vector
    on = checks.chosen(ins, engine, default, (which.vector, which.gpsimd), tensors)
    if (operator == "power" and on != "POOL") or (operator in alu.BITS and on != "DVE"):
        raise EngineError(f"{ins}: op=nl.{operator} does not run on {engine}: leave engine out")
    core = machine.current()
    shape, flush = data1.shape, core.options.flush

    if operator in alu.BITS:
        named = (("data1", data1), ("data2", data2), ("dst", dst))
        checks.integers(ins, *named)
        checks.same_width(ins, *named)
        width, f = 8 * dtypes.size(dst.dtype), alu.BITS[operator]

        def run():
            checks.store_bits(dst, f(checks.bits(data1, width), checks.bits(data2, width).reshape(shape)))
    elif on == "POOL" and operator != "power" and all(x.dtype in _INT32 for x in tensors):
        f = alu.ARITHMETIC[operator]

        def run():
            with np.errstate(**checks.QUIET):
                found = f(data1.read(), data2.read().reshape(shape))
            checks.store(dst, found)
    else:
        f = alu.ARITHMETIC[operator]

        def run():
            x, y = checks.fp32(data1, flush), checks.fp32(data2, flush)
            with np.errstate(**checks.QUIET):
                found = f(x, y if y.shape == shape else y.reshape(shape))
            checks.store(dst, found, flush)

    facts, psum = checks.facts(dst, data1, data2), checks.in_psum(data1, data2)
    if on == "DVE":
        narrow = checks.narrow(*tensors)
        plain = narrow and operator in ("add", "subtract", "multiply") and checks.packed(data1, data2)
        facts |= {"light": bool(psum or plain), "mode": 2 if narrow and not psum else 1}
    return core.issue(ins, on, run, (data1, data2), (dst,), **facts, operator=operator, name=name)


def stage(ins, number, op, operand, data, bits_too=True, argument=None):
    """(operator, tensors it reads) of one `op, operand` pair, checked."""
    tables = (alu.BITS, alu.ARITHMETIC, alu.UNARY) if bits_too else (alu.ARITHMETIC, alu.UNARY)
    operator = alu.name(op, tables, ins, f"op{number}")
    argument = argument or f"operand{number}"
    if operator == "power":
        raise EngineError(f"{ins}: op{number}=nl.power: only tensor_tensor has it, on the GpSimd engine")
    if operator in alu.UNARY or operator == "invert":
        if isinstance(operand, NkiTensor) or operand not in (None, 0):
            raise EngineError(f"{ins}: op{number}=nl.{operator} takes no {argument}: pass None or 0, got {operand!r}")
        return operator, ()
    if operator in alu.BITS:
        read = checks.vector(ins, argument, operand, data, dtype=None)
        if read:
            checks.integers(ins, (argument, operand))
        elif operand != int(operand):
            raise DtypeError(f"{ins}: {argument}={operand!r}: an operator on bits takes an integer")
        return operator, read
    return operator, checks.vector(ins, argument, operand, data)


def apply(operator, x, operand, reverse):
    """One arithmetic stage on float32 x [P, ...]."""
    if operator in alu.UNARY:
        return alu.UNARY[operator](x)
    y = checks.scalar(operand, x.ndim)
    return alu.ARITHMETIC[operator](y, x) if reverse else alu.ARITHMETIC[operator](x, y)


def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=enums.engine.unknown,
    name=None,
):
    """dst = (data op0 operand0) op1 operand1; operands are numbers or float32 [P, 1]; reverse swaps the two sides."""
    ins, which = "tensor_scalar", enums.engine
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "data", data)
    checks.alike(ins, dst, ("data", data))
    first, reads = stage(ins, 0, op0, operand0, data)
    stages = [(first, operand0, reverse0)]
    if op1 is not None:
        second, more = stage(ins, 1, op1, operand1, data)
        stages.append((second, operand1, reverse1))
        reads += more
    elif operand1 is not None:
        raise EngineError(f"{ins}: operand1={operand1!r} without op1: give both or none")
    on_bits = checks.kinds(ins, *(operator in alu.BITS for operator, _, _ in stages))
    operators = [operator for operator, _, _ in stages]
    default = which.gpsimd if operators == ["rsqrt"] else which.vector
    on = checks.chosen(ins, engine, default, (which.vector, which.scalar, which.gpsimd), (dst, data, *reads))
    if (on == "POOL") != ("rsqrt" in operators):
        raise EngineError(f"{ins}: {operators} on {on}: rsqrt runs on the GpSimd engine, and only that does there")
    if on == "ACT" and operators not in (["multiply", "add"], ["multiply"], ["add"]):
        raise EngineError(
            f"{ins}: {operators} on the scalar engine: it has multiply-add, multiply, and add: use vector"
        )
    core = machine.current()
    flush = core.options.flush

    if on_bits:
        checks.integers(ins, ("data", data), ("dst", dst))
        checks.same_width(ins, ("data", data), ("dst", dst))
        width = 8 * dtypes.size(data.dtype)

        def run():
            x = checks.bits(data, width)
            for operator, operand, reverse in stages:
                if operator == "invert":
                    x = ~x
                else:
                    y = checks.bits(operand, width)
                    y = y.reshape(-1, *(1,) * (x.ndim - 1)) if y.ndim else y
                    x = alu.BITS[operator](y, x) if reverse else alu.BITS[operator](x, y)
                x = x & ((1 << width) - 1)
            checks.store_bits(dst, x)
    else:

        def run():
            x = checks.fp32(data, flush)
            with np.errstate(**checks.QUIET):
                for operator, operand, reverse in stages:
                    x = apply(operator, x, operand, reverse)
            checks.store(dst, x, flush)

    facts = checks.facts(dst, data) | {"mode": checks.copy_mode(dst, data) if on == "DVE" else 1}
    return core.issue(ins, on, run, (data, *reads), (dst,), **facts, operator="/".join(operators), name=name)


def _binary(ins, operator):
    """The NumPy function of an arithmetic operator of the vector engine."""
    if operator == "power":
        raise EngineError(f"{ins}: nl.power: only tensor_tensor has it, on the GpSimd engine")
    return alu.ARITHMETIC[operator]


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    """dst = (data op0 operand0) op1 operand1: operand0 a number or float32 [P, 1], operand1 as large as data."""
    ins = "scalar_tensor_tensor"
    for argument, x in (("dst", dst), ("data", data), ("operand1", operand1)):
        checks.tile(ins, argument, x)
    checks.alike(ins, dst, ("data", data), ("operand1", operand1))
    checks.not_both_psum(ins, "data", data, "operand1", operand1)
    first, reads = stage(ins, 0, op0, operand0, data, bits_too=False)
    second = alu.name(op1, (alu.ARITHMETIC,), ins, "op1")
    f, core = _binary(ins, second), machine.current()
    flush = core.options.flush

    def run():
        x, y = checks.fp32(data, flush), checks.fp32(operand1, flush)
        y = y if y.shape == x.shape else y.reshape(x.shape)
        with np.errstate(**checks.QUIET):
            x = apply(first, x, operand0, reverse0)
            x = f(y, x) if reverse1 else f(x, y)
        checks.store(dst, x, flush)

    facts = checks.facts(dst, data, operand1)
    facts["light"] = (
        (first, second) == ("subtract", "multiply") and checks.narrow(data, operand1) and data.free % 2 == 0
    )
    return core.issue(
        ins, "DVE", run, (data, operand1, *reads), (dst,), **facts, operator=f"{first}/{second}", name=name
    )


def tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None):
    """state = (data0[:, i] op0 state) op1 data1[:, i], from `initial`; dst [P, N] holds every state.

    `reverse0` computes state op0 data0, `reverse1` data1 op1 (...). The state is float32.
    """
    ins = "tensor_tensor_scan"
    for argument, x in (("dst", dst), ("data0", data0), ("data1", data1)):
        checks.tile(ins, argument, x)
    checks.alike(ins, dst, ("data0", data0), ("data1", data1))
    checks.not_both_psum(ins, "data0", data0, "data1", data1)
    reads = checks.vector(ins, "initial", initial, data0, dtype=None)
    first, second = (alu.name(op, (alu.ARITHMETIC,), ins, f"op{i}") for i, op in enumerate((op0, op1)))
    f, g, core = _binary(ins, first), _binary(ins, second), machine.current()
    flush, p = core.options.flush, dst.shape[0]

    def run():
        a, b = (list(np.ascontiguousarray(checks.fp32(x, flush).reshape(p, -1).T)) for x in (data0, data1))
        states, state = [], np.broadcast_to(checks.scalar(initial, 1), (p,))
        with np.errstate(**checks.QUIET):
            for x, y in zip(a, b, strict=True):
                state = f(state, x) if reverse0 else f(x, state)
                state = g(y, state) if reverse1 else g(state, y)
                states.append(state)
        checks.store(dst, np.stack(states, axis=1), flush)

    facts = checks.facts(dst, data0, data1)
    return core.issue(ins, "DVE", run, (data0, data1, *reads), (dst,), **facts, operator=f"{first}/{second}", name=name)


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    """dst = op over the last free axes of data, named by `axis`; `negate` times -1."""
    ins = "tensor_reduce"
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "data", data)
    operator = reducer(ins, op)
    axes = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    axes = tuple(sorted(a + data.ndim * (a < 0) for a in axes))
    if not axes or axes != tuple(range(axes[0], data.ndim)) or axes[0] < 1:
        raise ShapeError(f"{ins}: axis={axis} of data {data!r}: it must be the last axes, without the partition's")
    kept = data.shape[: axes[0]]
    if dst.shape[0] != kept[0] or dst.free != int(np.prod(kept[1:])):
        raise ShapeError(f"{ins}: dst {dst!r}, reducing axis {axis} of {data!r} leaves {list(kept)}")
    on_bits = operator in alu.BITS
    if on_bits:
        checks.integers(ins, ("data", data), ("dst", dst))
        checks.same_width(ins, ("data", data), ("dst", dst))
        if negate:
            raise EngineError(f"{ins}: negate goes with an arithmetic operator, not with {operator}")
    core = machine.current()
    flush, width = core.options.flush, 8 * dtypes.size(data.dtype)

    def run():
        if on_bits:
            checks.store_bits(dst, alu.REDUCE[operator].reduce(checks.bits(data, width), axis=axes))
        else:
            with np.errstate(**checks.QUIET):
                x = reduced(operator, checks.fp32(data, flush), axes, core.options.exact)
            checks.store(dst, -x if negate else x, flush)

    half = checks.narrow(dst, data) and dst.dtype == data.dtype == "bfloat16" and operator in ("add", "maximum")
    facts = checks.facts(dst, data) | {"mode": 2 if half else 1}
    return core.issue(ins, "DVE", run, (data,), (dst,), **facts, operator=operator, name=name)


def reducer(ins, op, argument="op"):
    """The name of an operator that reduces."""
    if getattr(op, "__name__", None) == "subtract":
        raise UnsupportedError(f"{ins}: {argument}=nl.subtract: what a reduction by it gives is not documented")
    return alu.name(op, (alu.REDUCE,), ins, argument)


def reciprocal(dst, data, name=None):
    """dst = 1 / data."""
    op = "reciprocal"
    checks.tile(op, "dst", dst)
    checks.tile(op, "data", data)
    checks.alike(op, dst, ("data", data))
    core = machine.current()
    flush = core.options.flush

    def run():
        with np.errstate(**checks.QUIET):
            checks.store(dst, 1 / checks.fp32(data, flush), flush)

    return core.issue(op, "DVE", run, (data,), (dst,), **checks.facts(dst, data), name=name)
