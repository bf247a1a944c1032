"""Wrong kernels, each refused with the right error; and rules turned off or round, each missed by a kernel.

The first table plants a fault each. The second turns a rule of the simulator off and sees that the planted fault then
goes unnoticed, so it is that rule that finds it. The third has kernels whose result hangs on what an instruction
computes, and turns that round.
"""

import ast
import importlib.util
import inspect
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ringtide.kernels.nki.simulator import alu, dtypes, errors, launch, machine, memory, tensor
from ringtide.kernels.nki.simulator import isa as nisa
from ringtide.kernels.nki.simulator import language as nl
from ringtide.kernels.nki.simulator.isa import checks, dma, gpsimd, matmul
from ringtide.kernels.nki.simulator.launch import jit, simulate

HERE, ROOT = Path(__file__).parent, Path(errors.__file__).parent
FAULTS = {}  # name -> (error, pattern of its message, cores, options, kernel)


def fault(error, pattern, cores=1, **options):
    def add(kernel):
        assert kernel.__name__ not in FAULTS
        FAULTS[kernel.__name__] = error, pattern, cores, options, kernel
        return kernel

    return add


def sbuf(*shape, dtype="float32", value=1.0, name="t"):
    """A tile that holds `value`."""
    made = nl.ndarray(shape, dtype, name=name)
    nisa.memset(made, value)
    return made


def psum(*shape, dtype="float32", value=1.0, name="p"):
    """A PSUM tile that holds `value`, written by no matmul."""
    made = nl.ndarray(shape, dtype, buffer=nl.psum, name=name)
    nisa.memset(made, value)
    return made


def empty(*shape, dtype="float32", buffer=nl.sbuf, name="empty"):
    return nl.ndarray(shape, dtype, buffer=buffer, name=name)


def output(*shape, dtype="float32"):
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm, name="out")


# --- partitions -----------------------------------------------------------------------------------------------------


@fault(errors.PartitionError, "wide: 200 partitions, there are 128: tile axis 0")
def more_than_128_partitions(x):
    empty(200, 4, name="wide")


@fault(errors.PartitionError, r"t float32\[32, 4\].*start at 16.*0 or 32 or 64 or 96: move the data with a DMA")
def starts_at_16(x):
    t = sbuf(128, 4)
    nisa.tensor_copy(empty(32, 4), t[16:48])


@fault(errors.PartitionError, r"64 partitions start at 32.*starts at 0 or 64")
def half_starts_at_32(x):
    nisa.memset(empty(128, 4)[32:96], 0.0)


@fault(errors.PartitionError, "100 partitions start at 28")
def most_start_late(x):
    nisa.memset(empty(128, 4)[28:], 0.0)


@fault(errors.PartitionError, "partitions cannot be strided, got a step of 2")
def every_other_partition(x):
    sbuf(128, 4)[::2]


@fault(errors.PartitionError, "the partition axis stays first")
def partition_permuted(x):
    sbuf(4, 4).permute((1, 0))


@fault(errors.PartitionError, "not over partitions: multiply by ones on the tensor engine")
def broadcast_over_partitions(x):
    sbuf(1, 4).broadcast(0, 128)


@fault(errors.PartitionError, "the first pair is the partition, its step is the 8 elements of one, got 4")
def access_pattern_steps_within_the_partition(x):
    sbuf(4, 8).ap([[4, 4], [1, 4]])


# --- shapes ---------------------------------------------------------------------------------------------------------


@fault(errors.ShapeError, r"tensor_tensor: data2.*\[8, 1\].*nothing broadcasts by itself: \.broadcast\(dim, n\)")
def column_onto_tile(x):
    nisa.tensor_tensor(empty(8, 4), sbuf(8, 4), sbuf(8, 1), nl.add)


@fault(errors.ShapeError, r"tensor_copy: src.*\[1, 4\].*partitions and elements a partition must be equal")
def row_onto_tile(x):
    nisa.tensor_copy(empty(8, 4), sbuf(1, 4))


@fault(errors.ShapeError, r"nc_matmul: stationary.*\[64, 8\].*moving.*\[32, 8\].*both need the same partitions")
def contraction_differs(x):
    nisa.nc_matmul(empty(8, 8, buffer=nl.psum), sbuf(64, 8), sbuf(32, 8))


@fault(errors.ShapeError, "nc_matmul: moving.* has 600 columns, at most 512: tile it")
def moving_too_wide(x):
    nisa.nc_matmul(empty(8, 600, buffer=nl.psum), sbuf(8, 8), sbuf(8, 600))


@fault(errors.ShapeError, "nc_matmul: stationary.* has 130 columns, at most 128: tile it")
def stationary_too_wide(x):
    nisa.nc_matmul(empty(128, 8, buffer=nl.psum), sbuf(8, 130), sbuf(8, 8))


@fault(errors.ShapeError, r"nc_matmul: dst.*\[4, 8\].*the product of.* is \[8, 4\]")
def product_the_wrong_way_round(x):
    nisa.nc_matmul(empty(4, 8, buffer=nl.psum), sbuf(16, 8), sbuf(16, 4))


@fault(errors.ShapeError, r"nc_transpose: dst.*the transpose of.* is \[4, 8\]")
def transpose_into_its_own_shape(x):
    nisa.nc_transpose(empty(8, 4), sbuf(8, 4))


@fault(errors.ShapeError, r"nc_transpose.*the vector engine transposes up to \[32, 32\]: use PSUM and engine.tensor")
def transpose_too_large_for_the_vector_engine(x):
    nisa.nc_transpose(empty(64, 64), sbuf(64, 64), engine=nisa.engine.vector)


@fault(errors.ShapeError, r"tensor_reduce: axis=0.*the last axes, without the partition's")
def sum_over_partitions(x):
    nisa.tensor_reduce(empty(1, 4), nl.add, sbuf(8, 4), axis=0)


@fault(errors.ShapeError, r"dma_copy: dst.*\[8, 4\].*src.*\[8, 3\].*as many elements in both, got 32 and 24")
def transfer_of_another_size(x):
    nisa.dma_copy(empty(8, 4), sbuf(8, 3))


@fault(errors.ShapeError, "an index must be an int known to the compiler, got float 1.5")
def index_by_a_float(x):
    sbuf(8, 4)[:, 1.5]


@fault(errors.ShapeError, "axis 1 has 4, it must have 1")
def broadcast_of_a_full_axis(x):
    sbuf(8, 4).broadcast(1, 8)


@fault(errors.ShapeError, r"affine_select: pattern=.* has 8 elements, dst.* has 4 a partition")
def pattern_of_another_size(x):
    nisa.affine_select(empty(8, 4), [[1, 8]], 1, sbuf(8, 4), 0.0)


@fault(errors.ShapeError, r"tensor_scalar: operand0.*\[8, 4\].*a number or \[8, 1\]: one element a partition")
def tile_as_scalar(x):
    nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.add, sbuf(8, 4))


@fault(errors.ShapeError, "on chip a tensor has a partition and a free axis")
def one_axis_on_chip(x):
    nl.ndarray((128,), nl.float32)


@fault(errors.ShapeError, "has no truth value")
def branch_on_data(x):
    if sbuf(1, 1):
        pass


# --- bounds ---------------------------------------------------------------------------------------------------------


@fault(errors.OutOfBoundsError, "slice 0:5 of axis 1, which has 4, is not inside it")
def slice_beyond(x):
    sbuf(8, 4)[:, 0:5]


@fault(errors.OutOfBoundsError, "index 8 of axis 0, which has 8")
def row_beyond(x):
    x[8]


@fault(errors.OutOfBoundsError, r"argument 0.* an access of \(2, 40\) reaches element 79, the tensor has 64")
def access_pattern_beyond_hbm(x):
    nisa.dma_copy(empty(2, 40), x.ap([[40, 2], [1, 40]]))


@fault(errors.OutOfBoundsError, "reaches element 8 of a partition of 8")
def access_pattern_beyond_the_partition(x):
    sbuf(4, 8).ap([[8, 4], [1, 8]], offset=1)


# --- memories -------------------------------------------------------------------------------------------------------


@fault(errors.BufferError, "dma_copy: src p.*DMA does not reach PSUM: tensor_copy to SBUF first")
def transfer_from_psum(x):
    nisa.dma_copy(output(8, 4), psum(8, 4))


@fault(errors.BufferError, "tensor_tensor: data1 and data2 are both in PSUM.*copy one to SBUF by tensor_copy")
def both_inputs_in_psum(x):
    nisa.tensor_tensor(empty(8, 4), psum(8, 4), psum(8, 4), nl.add)


@fault(errors.BufferError, "scalar_tensor_tensor: data and operand1 are both in PSUM")
def both_tiles_in_psum(x):
    nisa.scalar_tensor_tensor(empty(8, 4), psum(8, 4), nl.multiply, 2.0, nl.add, psum(8, 4))


@fault(errors.BufferError, "p .*the GpSimd engine does not reach PSUM: use engine.vector")
def gpsimd_reads_psum(x):
    nisa.tensor_tensor(empty(8, 4), psum(8, 4), sbuf(8, 4), nl.add, engine=nisa.engine.gpsimd)


@fault(errors.BufferError, "affine_select: on_true_tile p.*it must be in sbuf: copy it by tensor_copy")
def select_from_psum(x):
    nisa.affine_select(empty(8, 4), [[1, 4]], 1, psum(8, 4), 0.0)


@fault(errors.BufferError, "nc_matmul: moving p.*it must be in sbuf: copy it by tensor_copy")
def matmul_of_psum(x):
    nisa.nc_matmul(empty(4, 4, buffer=nl.psum), sbuf(8, 4), psum(8, 4))


@fault(errors.BufferError, "nc_matmul: dst.* it must be in psum")
def matmul_into_sbuf(x):
    nisa.nc_matmul(empty(4, 4), sbuf(8, 4), sbuf(8, 4))


@fault(errors.BufferError, "tensor_copy: src argument 0.*it must be in sbuf or psum: copy it to SBUF by dma_copy")
def engine_reads_hbm(x):
    nisa.tensor_copy(empty(8, 8), x)


@fault(errors.BufferError, "ndarray t: buffer is one of nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm, got 'sbuf'")
def buffer_by_name(x):
    nl.ndarray((8, 4), nl.float32, buffer="sbuf", name="t")


@fault(errors.BufferError, "full.*: no instruction fills HBM: fill a tile and dma_copy it")
def zeros_in_hbm(x):
    nl.zeros((8, 4), nl.float32, buffer=nl.hbm)


@fault(errors.BufferError, "returned, so it must be in nl.shared_hbm, not sbuf")
def a_tile_returned(x):
    return sbuf(8, 4)


@fault(errors.BankError, "nc_matmul: dst.*bytes 1024 to 3072.*must stay inside one bank of 2048: tile it")
def matmul_over_two_banks(x):
    wide = empty(8, 1024, buffer=nl.psum)
    nisa.nc_matmul(wide[:, 256:768], sbuf(8, 8), sbuf(8, 512))


@fault(
    errors.CapacityError, r"131,072.*t2 .*196,608: smaller tiles, or fewer in flight|393,216 bytes a partition of SBUF"
)
def too_much_alive(x):
    tiles = [sbuf(8, 32 * 1024, name=f"t{i}") for i in range(3)]
    for t in tiles:
        nisa.tensor_scalar(t, t, nl.add, 1.0)


@fault(errors.CapacityError, "9 banks of PSUM alive, in 9 tiles .*there are 8: copy results to SBUF earlier")
def nine_banks(x):
    for t in [psum(8, 512) for _ in range(9)]:
        nisa.tensor_copy(empty(8, 512), t)


# --- content --------------------------------------------------------------------------------------------------------


@fault(errors.UninitializedError, r"empty float32\[8, 4\].*element \(0, 0\) is read and was never written: write it")
def read_of_nothing(x):
    nisa.tensor_copy(sbuf(8, 4), empty(8, 4))


@fault(errors.UninitializedError, r"element \(0, 2\) is read and was never written")
def read_of_half_a_tile(x):
    t = empty(8, 4)
    nisa.memset(t[:, :2], 0)
    nisa.tensor_reduce(empty(8, 1), nl.maximum, t, axis=1)


@fault(errors.UninitializedError, "output out.*was never written")
def output_not_whole(x):
    out = output(8, 4)
    nisa.dma_copy(out[:4], sbuf(4, 4))
    return out


@fault(errors.UninitializedError, "activation: the engine's registers hold nothing known: start with")
def sum_onto_nothing(x):
    nisa.activation(
        empty(8, 4), nl.exp, sbuf(8, 4), reduce_op=nl.add, reduce_res=empty(8, 1), reduce_cmd=nisa.reduce_cmd.reduce
    )


@fault(errors.PsumHazardError, "accumulate=True onto dst.*never written: start with accumulate=False")
def accumulates_onto_nothing(x):
    nisa.nc_matmul(empty(4, 4, buffer=nl.psum), sbuf(8, 4), sbuf(8, 4), accumulate=True)


@fault(
    errors.PsumHazardError, "accumulate=True onto dst p.*by something else than a matmul: start with accumulate=False"
)
def accumulates_onto_memset(x):
    nisa.nc_matmul(psum(4, 4, value=0.0), sbuf(8, 4), sbuf(8, 4), accumulate=True)


@fault(errors.PsumHazardError, "accumulate=None onto dst p.*pass accumulate=False")
def left_to_choose_onto_memset(x):
    nisa.nc_matmul(psum(4, 4), sbuf(8, 4), sbuf(8, 4))


@fault(errors.RangeError, "exp of 1, the limit that was set is 0", exp_limit=0.0)
def exponent_above_the_limit(x):
    nisa.activation(empty(8, 4), nl.exp, sbuf(8, 4))


@fault(errors.RangeError, "log of 0.*clamp it")
def log_of_zero(x):
    nisa.activation(empty(8, 4), nl.log, sbuf(8, 4, value=0.0))


@fault(errors.RangeError, "is_moving_onezero is set and moving holds other values: do not set it")
def hint_that_lies(x):
    nisa.nc_matmul(empty(4, 4, buffer=nl.psum), sbuf(8, 4), sbuf(8, 4, value=2.0), is_moving_onezero=True)


# --- dtypes ---------------------------------------------------------------------------------------------------------


@fault(errors.DtypeError, "nc_matmul: stationary float32 and moving bfloat16: float32 only goes with float32")
def matmul_of_mixed_dtypes(x):
    nisa.nc_matmul(empty(4, 4, buffer=nl.psum), sbuf(8, 4), sbuf(8, 4, dtype="bfloat16"))


@fault(errors.DtypeError, "nc_matmul: dst.*PSUM takes sums as float32")
def narrow_sums(x):
    nisa.nc_matmul(empty(4, 4, dtype="bfloat16", buffer=nl.psum), sbuf(8, 4), sbuf(8, 4))


@fault(errors.DtypeError, "nc_matmul: moving.*int32.*not one of")
def matmul_of_integers(x):
    nisa.nc_matmul(empty(4, 4, buffer=nl.psum), sbuf(8, 4), sbuf(8, 4, dtype="int32", value=1))


@fault(errors.DtypeError, "tensor_scalar: operand0.*bfloat16.*a vector operand is float32: copy it into one")
def narrow_scalar(x):
    nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.multiply, sbuf(8, 1, dtype="bfloat16"))


@fault(errors.DtypeError, "activation: scale.*bfloat16.*a vector operand is float32")
def narrow_scale(x):
    nisa.activation(empty(8, 4), nl.exp, sbuf(8, 4), scale=sbuf(8, 1, dtype="bfloat16"))


@fault(errors.DtypeError, "memset: int8 has no value 300")
def value_that_int8_has_not(x):
    nisa.memset(empty(8, 4, dtype="int8"), 300)


@fault(errors.DtypeError, "memset: float16 cannot hold 1000000.0")
def value_beyond_float16(x):
    nisa.memset(empty(8, 4, dtype="float16"), 1e6)


@fault(errors.DtypeError, "nc_transpose: dst.*float32.*another dtype than data.*bfloat16.*it must be the same")
def transpose_that_casts(x):
    nisa.nc_transpose(empty(4, 8, buffer=nl.psum), sbuf(8, 4, dtype="bfloat16"))


@fault(errors.DtypeError, r"tensor_tensor: data1.*an operator on bits takes integers: \.view\(\) it")
def bits_of_floats(x):
    nisa.tensor_tensor(empty(8, 4), sbuf(8, 4), sbuf(8, 4), nl.bitwise_and)


@fault(errors.DtypeError, "float32 to bfloat16 with dge_mode.hwdge, which does not cast: leave it out")
def hardware_descriptors_cast(x):
    nisa.dma_copy(empty(8, 4, dtype="bfloat16"), sbuf(8, 4), dge_mode=nisa.dge_mode.hwdge)


@fault(errors.DtypeError, "dtype: 'float64' is none of")
def double_precision(x):
    nl.ndarray((8, 4), "float64")


# --- engines --------------------------------------------------------------------------------------------------------


@fault(errors.EngineError, "tensor_tensor: op='add' is no operator of nki.language: pass an object, as nl.add")
def operator_by_name(x):
    nisa.tensor_tensor(empty(8, 4), sbuf(8, 4), sbuf(8, 4), "add")


@fault(errors.EngineError, "tensor_tensor: op=.*is no operator of nki.language")
def operator_of_numpy(x):
    nisa.tensor_tensor(empty(8, 4), sbuf(8, 4), sbuf(8, 4), np.add)


@fault(errors.EngineError, "activation: op=nl.add is not one of its operators: copy, ")
def activation_by_an_operator(x):
    nisa.activation(empty(8, 4), nl.add, sbuf(8, 4))


@fault(errors.EngineError, "tensor_copy: engine='vector', it must be one of engine.unknown")
def engine_by_name(x):
    nisa.tensor_copy(empty(8, 4), sbuf(8, 4), engine="vector")


@fault(errors.EngineError, "tensor_tensor: engine=.*scalar.*must be one of .*vector, .*gpsimd")
def scalar_engine_on_two_tiles(x):
    nisa.tensor_tensor(empty(8, 4), sbuf(8, 4), sbuf(8, 4), nl.add, engine=nisa.engine.scalar)


@fault(errors.EngineError, r"\['subtract'\] on the scalar engine: it has multiply-add, multiply, and add: use vector")
def subtraction_on_the_scalar_engine(x):
    nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.subtract, 1.0, engine=nisa.engine.scalar)


@fault(errors.EngineError, r"\['add'\] on POOL: rsqrt runs on the GpSimd engine, and only that")
def addition_on_gpsimd(x):
    nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.add, 1.0, engine=nisa.engine.gpsimd)


@fault(errors.EngineError, "dma_copy: engine=.* goes with dge_mode.hwdge only")
def transfer_on_an_engine(x):
    nisa.dma_copy(empty(8, 4), sbuf(8, 4), engine=nisa.engine.scalar)


@fault(errors.EngineError, "tensor_scalar: op0 and op1 are one on bits and one arithmetic")
def bits_and_arithmetic(x):
    t = sbuf(8, 4, dtype="int32", value=1)
    nisa.tensor_scalar(t, t, nl.bitwise_and, 1, op1=nl.add, operand1=1.0)


@fault(errors.EngineError, "reduce_op=.*the scalar engine sums: pass nl.add")
def maximum_on_the_scalar_engine(x):
    nisa.activation_reduce(empty(8, 4), nl.exp, sbuf(8, 4), nl.maximum, empty(8, 1))


# --- loops, cores, Python -------------------------------------------------------------------------------------------


@fault(errors.HazardError, "tensor_copy: 'inside' was made inside a loop and is used outside it: allocate it before")
def tile_of_a_loop_outside(x):
    made = []
    nl.fori_loop(0, 2, lambda i: made.append(sbuf(8, 4, name="inside")))
    nisa.tensor_copy(empty(8, 4), made[0])


@fault(errors.HazardError, r"turn 1 of a loop: memset at .*; in turn 0 that is memset at .*the body is compiled once")
def loop_that_counts_in_python(x):
    t, turns = sbuf(8, 4), []

    def body(i):
        nisa.memset(t[:, len(turns) : len(turns) + 1], 0.0)
        turns.append(i)

    nl.fori_loop(0, 4, body)


@fault(errors.HazardError, r"turn 1 of a loop: nc_matmul at .*the body is compiled once")
def loop_that_overwrites_once(x):
    t, p = sbuf(8, 4), empty(4, 4, buffer=nl.psum)
    nl.fori_loop(0, 2, lambda i: nisa.nc_matmul(p, t, t))


@fault(errors.HazardError, "turn 1 of a loop: activation at .*the body is compiled once")
def loop_with_another_function(x):
    t, functions = sbuf(8, 4), [nl.copy, nl.exp]
    nl.fori_loop(0, 2, lambda i: nisa.activation(t, functions.pop(), t))


@fault(errors.HazardError, "turn 1 of a loop: ends; in turn 0 that is memset at")
def loop_that_begins_otherwise(x):
    t = sbuf(8, 4)
    begun = []
    nl.fori_loop(0, 4, lambda i: begun or begun.append(nisa.memset(t, 0.0)))


@fault(errors.UninitializedError, r"t float32\[8, 1\] .*was never written.*writes twice, in no known order")
def read_of_a_column_that_took_four(x):
    column = sbuf(8, 1)
    nisa.tensor_copy(column.broadcast(1, 4), sbuf(8, 4))
    nisa.tensor_copy(empty(8, 1), column)


@fault(errors.UninitializedError, "t float32.*was never written.*writes twice, in no known order")
def read_where_a_pattern_overlaps(x):
    t = sbuf(8, 8)
    nisa.memset(t.ap([[8, 8], [2, 3], [1, 4]]), 0.0)
    nisa.tensor_copy(empty(8, 1), t[:, 4:5])


@fault(errors.HazardError, "dma_copy: dst .* overlaps src, and what is read first is not known")
def transfer_onto_its_own_source(x):
    t = sbuf(8, 4)
    nisa.dma_copy(t[1:8], t[0:7])


@fault(errors.HazardError, "race on 'out': core 0 writes it at .*core 1 reads it at", cores=2)
def barrier_about_something_else(x):
    out = output(8, 4)
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, sbuf(8, 4))
    nisa.core_barrier(x, (0, 1))
    if nl.program_id(0) == 1:
        nisa.dma_copy(empty(8, 4), out)
    return out


@fault(errors.HazardError, "the cores return .* and .*: all must return the same", cores=2)
def cores_that_return_different_tensors(x):
    made = [output(8, 4), output(8, 4)]
    nisa.dma_copy(made[nl.program_id(0)], sbuf(8, 4))
    return made[nl.program_id(0)]


@fault(
    errors.HazardError, r"race on 'out': core 0 writes it at .*core 1 writes.*no barrier.*: nisa.core_barrier", cores=2
)
def both_cores_write_one_place(x):
    out = output(8, 4)
    nisa.dma_copy(out, sbuf(8, 4))
    return out


@fault(errors.HazardError, "shared_hbm allocation 1 is .* both must allocate alike", cores=2)
def cores_allocate_differently(x):
    nl.ndarray((8, 4 + nl.program_id(0)), nl.float32, buffer=nl.shared_hbm)


@fault(errors.NkiSimError, "loops of the device are not allowed inside no_reorder")
def loop_in_no_reorder(x):
    with nl.no_reorder():
        nl.fori_loop(0, 2, lambda i: None)


@fault(TypeError, "a register's value is not known when the kernel is compiled: pass it as scalar_offset")
def loop_value_as_index(x):
    nl.fori_loop(0, 2, lambda i: nl.ndarray((8, int(i) + 1), nl.float32))


@fault(TypeError, "a register's value is not known when the kernel is compiled")
def loop_value_compared(x):
    t = sbuf(8, 4)
    nl.fori_loop(0, 2, lambda i: nisa.memset(t, 0.0) if i == 0 else None)


@fault(TypeError, "unexpected keyword argument 'dtype'")
def keyword_of_an_old_release(x):
    nisa.tensor_copy(empty(8, 4), sbuf(8, 4), dtype=nl.bfloat16)


@fault(TypeError, "unexpected keyword argument 'mask'")
def mask_of_an_old_release(x):
    nisa.activation(empty(8, 4), nl.exp, sbuf(8, 4), mask=None)


@fault(errors.UnsupportedError, "dynamic_range: gone since NKI 0.7: use nl.fori_loop")
def loop_of_an_old_release(x):
    nl.dynamic_range(4)


def _more():
    """[(name, error, pattern, cores, kernel)] of tests/data/nki_refusals.py."""
    spec = importlib.util.spec_from_file_location("nki_refusals", HERE / "data" / "nki_refusals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.tables(sbuf, psum, empty).items()
    return [
        (f"{group}-{i}", *row, 2 if group == "two cores" else 1) for group, rows in made for i, row in enumerate(rows)
    ]


MORE = {name: (error, pattern, cores, {}, kernel) for name, error, pattern, kernel, cores in _more()}


def plant(name):
    """Runs a kernel of the tables."""
    _, _, cores, options, kernel = (FAULTS | MORE)[name]
    return simulate(jit(kernel)[cores], **options)(np.ones((8, 8), np.float32))


@pytest.mark.parametrize("name", [*FAULTS, *MORE])
def test_refused(name):
    error, pattern, *_ = (FAULTS | MORE)[name]
    with pytest.raises(error, match=pattern) as caught:
        plant(name)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


ELSEWHERE = {"external.py", "lint.py", "orders.py", "schedule.py", "capacity.py"}  # have tests of their own
UNREACHED = (  # pieces of source
    "_Stopped",  # ends a thread after the other one's error
    "nki operations run inside a kernel",  # see test_outside_a_kernel
    "the tensor engine transposes up to",  # second lines of defence: other rules speak first
    "{count} partitions, there are",
    "src {src!r}')",
    "does not come to it",
)


def test_every_rule_has_a_kernel_that_breaks_it():
    """Whatever the simulator can raise, some kernel of the tables makes it raise: without the rule that test fails."""
    hit = set()
    for name in (*FAULTS, *MORE):
        with pytest.raises(FAULTS.get(name, MORE.get(name))[0]) as caught:
            plant(name)
        hit |= {(Path(x.path).name, x.lineno + 1) for x in caught.traceback}
    missed = []
    for file in sorted(ROOT.rglob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text())) if file.name not in ELSEWHERE else ()
        for x in (node for node in nodes if isinstance(node, ast.Raise)):
            text, lines = ast.unparse(x), range(x.lineno, x.end_lineno + 1)
            if not any((file.name, line) in hit for line in lines) and not any(part in text for part in UNREACHED):
                missed.append(f"{file.name}:{x.lineno}: {text}")
    assert not missed, "\n".join(missed)


def test_of_each_error_there_are_some():
    planted = {error for error, *_ in FAULTS.values()}
    assert planted >= {e for e in vars(errors).values() if isinstance(e, type)} - {errors.NkiSimError, errors.LintError}


def test_outside_a_kernel():
    with pytest.raises(errors.NkiSimError, match=r"nki operations run inside a kernel: call it, or"):
        nl.ndarray((8, 4), nl.float32)


# --- rules turned off -----------------------------------------------------------------------------------------------


def nothing(*args, **kwargs):
    return None


def _any_engine(patch):
    chosen = checks.chosen
    patch.setattr(
        checks, "chosen", lambda op, given, default, allowed, tensors: chosen(op, given, default, allowed, ())
    )


def _any_vector(patch):
    vector = checks.vector
    patch.setattr(checks, "vector", lambda op, argument, x, data, dtype=None: vector(op, argument, x, data, None))


def _any_writer(patch):
    write = tensor.NkiTensor.write
    patch.setattr(tensor.NkiTensor, "write", lambda self, x, by=None: write(self, x, memory.MATMUL))


def _any_view(patch):
    view = tensor.NkiTensor._view
    patch.setattr(tensor.NkiTensor, "_view", lambda *args, **kw: view(*args, **(kw | {"check": False})))


def _any_name(patch):
    name = alu.name
    patch.setattr(alu, "name", lambda op, *more: op if isinstance(op, str) else name(op, *more))


def _any_keyword(patch):
    copy = nisa.tensor_copy
    patch.setattr(nisa, "tensor_copy", lambda dst, src, **ignored: copy(dst, src))


RULES = {  # rule -> (how to turn it off, faults that only it finds)
    "128 partitions": (lambda p: p.setattr(memory, "PARTITIONS", 1000), ["more_than_128_partitions"]),
    "where partitions start": (
        lambda p: p.setattr(tensor, "_STARTS", ((128, range(128)),)),
        ["starts_at_16", "half_starts_at_32", "most_start_late"],
    ),
    "no broadcasting": (lambda p: p.setattr(checks, "alike", nothing), ["column_onto_tile", "row_onto_tile"]),
    "bounds of a view": (_any_view, ["access_pattern_beyond_hbm"]),
    "DMA does not reach PSUM": (lambda p: p.setattr(dma, "_end", lambda op, name, x: x), ["transfer_from_psum"]),
    "one input in PSUM": (
        lambda p: p.setattr(checks, "not_both_psum", nothing),
        ["both_inputs_in_psum", "both_tiles_in_psum"],
    ),
    "GpSimd does not reach PSUM": (_any_engine, ["gpsimd_reads_psum"]),
    "GpSimd selects from SBUF": (lambda p: p.setattr(checks, "SBUF", checks.ON_CHIP), ["select_from_psum"]),
    "matmul reads SBUF": (lambda p: p.setattr(checks, "SBUF", checks.ON_CHIP), ["matmul_of_psum"]),
    "matmul writes PSUM": (lambda p: p.setattr(checks, "PSUM", checks.ON_CHIP), ["matmul_into_sbuf"]),
    "a matmul stays in a bank": (lambda p: p.setattr(matmul, "_bank", nothing), ["matmul_over_two_banks"]),
    "8 banks": (lambda p: p.setattr(memory, "PSUM_BANKS", 16), ["nine_banks"]),
    "written before read": (
        lambda p: p.setattr(tensor.NkiTensor, "check_written", nothing),
        ["read_of_nothing", "read_of_half_a_tile", "output_not_whole"],
    ),
    "who wrote PSUM": (_any_writer, ["accumulates_onto_memset", "left_to_choose_onto_memset"]),
    "float32 goes with float32": (lambda p: p.setattr(matmul, "_FP32", ()), ["matmul_of_mixed_dtypes"]),
    "0 and 1": (lambda p: p.setattr(matmul, "_zero_one", nothing), ["hint_that_lies"]),
    "scalars are float32": (_any_vector, ["narrow_scalar", "narrow_scale"]),
    "what the tables cover": (lambda p: p.setattr(alu, "VALID", {}), ["log_of_zero"]),
    "operators are objects": (_any_name, ["operator_by_name"]),
    "keywords": (_any_keyword, ["keyword_of_an_old_release"]),
    "bits of integers": (lambda p: p.setattr(checks, "integers", nothing), ["bits_of_floats"]),
    "bits or arithmetic": (lambda p: p.setattr(checks, "kinds", lambda op, *x: x[0]), ["bits_and_arithmetic"]),
    "a loop's tiles stay inside": (
        lambda p: p.setattr(machine.Machine, "_check_scope", nothing),
        ["tile_of_a_loop_outside"],
    ),
    "turns of a loop are alike": (
        lambda p: p.setattr(machine.Machine, "_said", nothing),
        ["loop_that_counts_in_python"],
    ),
    "one element in a place": (
        lambda p: p.setattr(machine, "_forgetting", lambda run, writes: run),
        ["read_of_a_column_that_took_four", "read_where_a_pattern_overlaps"],
    ),
    "races": (
        lambda p: p.setattr(launch.Shared, "check_races", nothing),
        ["both_cores_write_one_place", "barrier_about_something_else"],
    ),
    "cores return the same": (
        lambda p: p.setattr(launch.Shared, "check_outputs", nothing),
        ["cores_that_return_different_tensors"],
    ),
}


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, (_, names) in RULES.items() for name in names])
def test_only_the_rule_finds_it(rule, name, monkeypatch):
    RULES[rule][0](monkeypatch)
    python = {ValueError, TypeError, IndexError, KeyError} - {FAULTS[name][0]}  # where the rule would have spoken first
    with suppress(*python):
        plant(name)


@pytest.mark.parametrize(
    ("name", "options"), [("too_much_alive", {"sbuf_bytes": 1 << 20}), ("exponent_above_the_limit", {"exp_limit": 1.0})]
)
def test_only_the_option_finds_it(name, options):
    simulate(FAULTS[name][-1], **options)(np.ones((8, 8), np.float32))


# --- rules turned round ---------------------------------------------------------------------------------------------

VALUES = {}  # name -> (inputs, result, how to turn the rule round, kernel)


def value(inputs, result, flip):
    def add(kernel):
        assert kernel.__name__ not in VALUES
        VALUES[kernel.__name__] = inputs, result, flip, kernel
        return kernel

    return add


def load(x, dtype=None):
    """x in a tile of its own."""
    made = nl.ndarray(x.shape, dtype or x.dtype)
    nisa.dma_copy(made, x)
    return made


def give(tile):
    """A tile as the output."""
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out


def like(x, dtype="float32", buffer=nl.sbuf):
    return nl.ndarray(x.shape, dtype, buffer=buffer)


def to_sbuf(p):
    made = like(p, p.dtype)
    nisa.tensor_copy(made, p)
    return made


def wrapped(instruction, change):
    """Flips by changing what an instruction is given: change(keywords by name) in place."""

    def flip(patch):
        real = getattr(nisa, instruction)
        signature = inspect.signature(real)

        def other(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            change(bound.arguments)
            return real(**bound.arguments)

        patch.setattr(nisa, instruction, other)

    return flip


def narrowed(other):
    """Flips how values are stored: other(x, dtype, the real narrow)."""

    def flip(patch):
        real = dtypes.narrow
        patch.setattr(dtypes, "narrow", lambda x, dtype: other(x, dtype, real))

    return flip


def negate(*names):
    def change(given):
        for name in names:
            given[name] = not given[name]

    return change


def swap(a, b):
    def change(given):
        given[a], given[b] = given[b], given[a]

    return change


def column(*values, dtype=np.float32):
    return np.array(values, dtype)[:, None]


def row(*values, dtype=np.float32):
    return np.array(values, dtype)[None]


def _truncated(x, dtype, real):
    if dtype != "bfloat16" or x.dtype != np.float32:
        return real(x, dtype)
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(ml_dtypes.bfloat16)


def _wrapping(x, dtype, real):
    if dtype != "int8":
        return real(x, dtype)
    return np.asarray(x).astype(np.int64).astype(np.int8)


def _half_up(x, dtype, real):
    return real(np.floor(x + 0.5), dtype) if dtype == "int32" and x.dtype == np.float32 else real(x, dtype)


@value([row(1 + 3 / 256)], row(1 + 4 / 256), narrowed(_truncated))  # 1 + 1.5 steps of bfloat16: to the even one
def stores_round_to_nearest_even(x):
    return give(_through(x, "bfloat16"))


def _through(x, dtype):
    narrow, wide = like(x, dtype), like(x)
    nisa.tensor_copy(narrow, load(x))
    nisa.tensor_copy(wide, narrow)
    return wide


@value([row(300, -300, 5)], row(127, -128, 5), narrowed(_wrapping))
def floats_saturate_as_integers(x):
    return give(_through(x, "int8"))


@value([row(2.5, 3.5, -0.5)], row(2, 4, 0), narrowed(_half_up))
def halves_go_to_even(x):
    return give(_through(x, "int32"))


@value(
    [np.array([[1, 2], [3, 4]], np.float32), np.array([[1, 10], [100, 1000]], np.float32)],
    np.array([[301, 3010], [402, 4020]], np.float32),
    wrapped("nc_matmul", swap("stationary", "moving")),
)
def the_stationary_one_is_transposed(a, b):
    p = nl.ndarray((2, 2), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(p, load(a), load(b))
    return give(to_sbuf(p))


@value(
    [np.eye(2, dtype=np.float32)],
    2 * np.eye(2, dtype=np.float32),
    wrapped("nc_matmul", lambda given: given.update(accumulate=False)),
)
def left_to_choose_a_second_matmul_adds(a):
    p, t = nl.ndarray((2, 2), nl.float32, buffer=nl.psum), load(a)
    nisa.nc_matmul(p, t, t)
    nisa.nc_matmul(p, t, t)
    return give(to_sbuf(p))


@value(
    [np.eye(2, dtype=np.float32)],
    np.eye(2, dtype=np.float32),
    wrapped("nc_matmul", lambda given: given.update(accumulate=None)),
)
def without_accumulate_it_overwrites(a):
    p, t = nl.ndarray((2, 2), nl.float32, buffer=nl.psum), load(a)
    nisa.nc_matmul(p, t, t, accumulate=False)
    nisa.nc_matmul(p, t, t, accumulate=False)
    return give(to_sbuf(p))


def _sums_in_bfloat16(patch):
    write = tensor.NkiTensor.write

    def narrow(self, x, by=memory.WRITTEN):
        write(self, x.astype(ml_dtypes.bfloat16).astype(np.float32) if by == memory.MATMUL else x, by)

    patch.setattr(tensor.NkiTensor, "write", narrow)


@value(
    [np.full((128, 1), 2, ml_dtypes.bfloat16), column(*[1] * 127, 1.5, dtype=ml_dtypes.bfloat16)],
    row(257),
    _sums_in_bfloat16,
)
def sums_of_a_matmul_are_float32(a, b):
    p = nl.ndarray((1, 1), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(p, load(a), load(b))
    return give(to_sbuf(p))


@value(
    [row(0.5, 1, 2)],
    row(np.exp(2), np.exp(3), np.exp(5)),
    wrapped("activation", lambda given: given.update(scale=1.0, bias=given["bias"] / given["scale"])),
)
def activation_scales_before_it_adds(x):
    made = like(x)
    nisa.activation(made, nl.exp, load(x), scale=2.0, bias=1.0)
    return give(made)


@value([row(1, 2, 4)], row(4, 3, 1), wrapped("tensor_scalar", negate("reverse0")))
def reverse_puts_the_scalar_first(x):
    made = like(x)
    nisa.tensor_scalar(made, load(x), nl.subtract, 5.0, reverse0=True)
    return give(made)


@value([row(1, 2, 4)], row(7, 6, 4), wrapped("tensor_scalar", negate("reverse1")))
def the_second_scalar_comes_second(x):
    made = like(x)
    nisa.tensor_scalar(made, load(x), nl.multiply, -1.0, op1=nl.subtract, operand1=-8.0)
    return give(made)


@value([row(1, 2), row(10, 20)], row(-7, -14), wrapped("scalar_tensor_tensor", negate("reverse1")))
def scalar_first_then_the_tile(x, y):
    made = like(x)
    nisa.scalar_tensor_tensor(made, load(x), nl.multiply, 3.0, nl.subtract, load(y))
    return give(made)


@value([row(1, 2), row(10, 20)], row(-9, -18), wrapped("tensor_tensor", swap("data1", "data2")))
def the_first_tile_is_left_of_the_operator(x, y):
    made = like(x)
    nisa.tensor_tensor(made, load(x), load(y), nl.subtract)
    return give(made)


def _scan_from_the_right(patch):
    real = nisa.tensor_tensor_scan
    back = lambda t: t.ap([[t.free, t.shape[0]], [-1, t.free]], offset=t.free - 1)
    patch.setattr(nisa, "tensor_tensor_scan", lambda dst, a, b, *rest: real(back(dst), back(a), back(b), *rest))


@value([row(2, 3, 4), row(1, 1, 1)], row(2 * 5 + 1, 3 * 11 + 1, 4 * 34 + 1), _scan_from_the_right)
def a_scan_goes_to_the_right(a, b):
    made = like(a)
    nisa.tensor_tensor_scan(made, load(a), load(b), 5.0, nl.multiply, nl.add)
    return give(made)


@value([row(2, 3), row(1, 1)], row(2 - 5 + 1, 3 - -2 + 1), wrapped("tensor_tensor_scan", negate("reverse0")))
def a_scan_takes_the_tile_first(a, b):
    made = like(a)
    nisa.tensor_tensor_scan(made, load(a), load(b), 5.0, nl.subtract, nl.add)
    return give(made)


@value([row(2, 3), row(1, 1)], row(10 - 1, 27 - 1), wrapped("tensor_tensor_scan", negate("reverse1")))
def a_scan_takes_the_second_tile_second(a, b):
    made = like(a)
    nisa.tensor_tensor_scan(made, load(a), load(b), 5.0, nl.multiply, nl.subtract)
    return give(made)


@value([row(1, 2, 2)], row(-3), wrapped("tensor_reduce", negate("negate")))
def a_reduction_may_negate(x):
    made = nl.ndarray((1, 1), nl.float32)
    nisa.tensor_reduce(made, nl.add, load(x)[:, 1:], axis=1, negate=True)
    nisa.tensor_scalar(made, made, nl.add, 1.0)
    return give(made)


def _pattern_of_the_other_sign(patch):
    real = gpsimd._pattern
    patch.setattr(gpsimd, "_pattern", lambda op, dst, pattern, offset, by: real(op, dst, pattern, offset, -by))


@value([np.ones((3, 3), np.float32)], np.tril(np.ones((3, 3), np.float32)), _pattern_of_the_other_sign)
def affine_select_keeps_below_the_diagonal(x):  # offset + p - i >= 0
    made = like(x)
    nisa.affine_select(made, [[-1, 3]], 1, load(x), 0.0, cmp_op=nl.greater_equal)
    return give(made)


def _kept_where_false(patch):
    patch.setitem(alu.ARITHMETIC, "greater", lambda x, y: np.less_equal(x, y).astype(np.float32))


@value([np.ones((2, 2), np.float32)], np.array([[9, 1], [1, 1]], np.float32), _kept_where_false)
def affine_select_keeps_where_it_holds(x):  # p + i > 0
    made = like(x)
    nisa.affine_select(made, [[1, 2]], 1, load(x), 9.0, cmp_op=nl.greater)
    return give(made)


@value([np.ones((3, 2), np.float32)], np.array([[5, 6], [15, 16], [25, 26]], np.float32), _pattern_of_the_other_sign)
def iota_counts_partitions_up(x):
    made = like(x)
    nisa.iota(made, [[1, 2]], offset=5, channel_multiplier=10)
    return give(made)


def _first_axis_fastest(patch):
    real = gpsimd._pattern
    patch.setattr(gpsimd, "_pattern", lambda op, dst, pattern, *rest: real(op, dst, pattern[::-1], *rest))


@value([np.ones((1, 4), np.float32)], row(0, 1, 10, 11), _first_axis_fastest)
def the_last_pair_of_a_pattern_runs_fastest(x):
    made = like(x)
    nisa.iota(made, [[10, 2], [1, 2]])
    return give(made)


def run_value(name):
    inputs, _, _, kernel = VALUES[name]
    return simulate(kernel)(*inputs)


@pytest.mark.parametrize("name", VALUES)
def test_result(name, monkeypatch):
    _, result, flip, _ = VALUES[name]
    np.testing.assert_allclose(run_value(name), result, rtol=1e-6)
    flip(monkeypatch)
    assert not np.allclose(run_value(name), result, rtol=1e-6)
