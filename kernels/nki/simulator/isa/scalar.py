"""The scalar engine: activation functions, and sums of their results in the engine's registers."""

import numpy as np

from ringtide.kernels.nki.simulator import alu, machine
from ringtide.kernels.nki.simulator.errors import DtypeError, EngineError, RangeError
from ringtide.kernels.nki.simulator.isa import checks, enums
from ringtide.kernels.nki.simulator.isa.accumulators import Accumulators
from ringtide.kernels.nki.simulator.tensor import NkiTensor


def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=enums.reduce_cmd.idle,
    name=None,
):
    """dst = op(data * scale + bias) in float32; bias and scale are numbers or [P, 1] (scale of float32).

    reduce_cmd: with reduce (or reset_reduce) the row sums of the result go onto the engine's registers (after setting
    them to 0), reset only does the latter; reduce_res [P, 1] takes the registers out.
    """
    return _activation("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd, name)


def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None):
    """activation with reset_reduce; reduce_res [P, 1] = the row sums of the result."""
    cmd = enums.reduce_cmd.reset_reduce
    return _activation("activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, cmd, name)


def _activation(ins, dst, op, data, bias, scale, reduce_op, reduce_res, cmd, name):
    checks.tile(ins, "dst", dst)
    checks.tile(ins, "data", data)
    checks.alike(ins, dst, ("data", data))
    function = alu.name(op, (alu.ACTIVATIONS,), ins)
    reads = checks.vector(ins, "scale", scale, data)
    bias = 0.0 if bias is None else bias
    reads += checks.vector(ins, "bias", bias, data, dtype=None)
    if isinstance(bias, NkiTensor) and bias.dtype == "tfloat32":
        raise DtypeError(f"{ins}: bias {bias!r}: any dtype but tfloat32: make it float32")
    sums = Accumulators(ins, "ACT", data, cmd, reduce_res)
    reducing = cmd in (enums.reduce_cmd.reduce, enums.reduce_cmd.reset_reduce)
    if reducing and (reduce_op is None or alu.name(reduce_op, (alu.ARITHMETIC,), ins, "reduce_op") != "add"):
        raise EngineError(f"{ins}: reduce_op={reduce_op!r} with {cmd}: the scalar engine sums: pass nl.add")
    core = machine.current()
    options, index = core.options, len(core.instructions)
    plain = not reads and scale == 1.0 and bias == 0.0

    def run():
        x = checks.fp32(data, options.flush)
        if not plain:
            with np.errstate(**checks.QUIET):
                x = x * checks.scalar(scale, x.ndim) + checks.scalar(bias, x.ndim)
        y = evaluate(core, ins, function, x, index)
        sums.reduce("add", y)
        checks.store(dst, y, options.flush)

    facts = checks.facts(dst, data)
    return core.issue(
        ins,
        "ACT",
        run,
        (data, *reads, *sums.reads),
        (dst, *sums.writes),
        **facts,
        operator=function,
        readout=int(reduce_res is not None),
        name=name,
    )


def evaluate(core, ins, function, x, index):
    """The activation function of float32 x; keeps its range, and refuses arguments that the engine's tables miss."""
    options = core.options
    low, high = float(np.fmin.reduce(x, axis=None)), float(np.fmax.reduce(x, axis=None))
    was = core.ranges.get(function, (low, high))
    core.ranges[function] = (min(was[0], low), max(was[1], high))
    if function == "exp" and options.exp_limit is not None and high > options.exp_limit:
        raise RangeError(f"{ins}: exp of {high:g}, the limit that was set is {options.exp_limit:g}")
    if function in alu.VALID:
        least, most = alu.VALID[function]
        size = x if function in ("log", "sqrt", "rsqrt") else np.abs(x)
        wrong = (size < least) | (size > most)
        if wrong.any():
            raise RangeError(
                f"{ins}: {function} of {x[wrong].flat[0]:g}: the scalar engine takes {least:g} to {most:g}: clamp it"
            )
    if function == "copy":
        return x
    with np.errstate(**checks.QUIET):
        if function == "exp":
            y = np.exp(x)
        else:
            y = alu.ACTIVATIONS[function](x.astype(np.float64)).astype(np.float32)
        if options.perturb:
            noise = np.random.default_rng((options.seed, index)).uniform(-1, 1, y.shape)
            y = (y * (1 + options.perturb * noise)).astype(np.float32)
    return y
