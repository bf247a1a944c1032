"""What else instructions, tensors and the language refuse: (error, pattern of its message, kernel)."""

from functools import partial

import numpy as np

from ringtide.kernels.nki.simulator import errors
from ringtide.kernels.nki.simulator import isa as nisa
from ringtide.kernels.nki.simulator import language as nl
from ringtide.kernels.nki.simulator.launch import jit, simulate

SHAPE, DTYPE, ENGINE, BUFFER = errors.ShapeError, errors.DtypeError, errors.EngineError, errors.BufferError
PARTITION, BOUNDS, UNSUPPORTED = errors.PartitionError, errors.OutOfBoundsError, errors.UnsupportedError
LOAD = nisa.reduce_cmd.load_reduce


def tables(sbuf, psum, empty):
    """{what refuses: [(error, pattern, kernel of x float32 [8, 8] in HBM)]}, made with the given helpers."""
    i32, u8, bf16 = partial(sbuf, dtype="int32", value=1), partial(sbuf, dtype="uint8", value=1), "bfloat16"
    u16, u32 = partial(sbuf, dtype="uint16", value=1), partial(sbuf, dtype="uint32", value=1)
    narrow = partial(sbuf, dtype=bf16)
    out = lambda *shape, **kw: empty(*shape, buffer=nl.psum, **kw)

    return {
        "tensors": [
            (SHAPE, "every axis must have at least 1", lambda x: empty(8, 0)),
            (SHAPE, r"one \.\.\. at most", lambda x: x[..., ...]),
            (SHAPE, "3 indices for 2 axes", lambda x: x[0, 0, 0]),
            (SHAPE, "steps by 0, it must step forward", lambda x: x[::0]),
            (SHAPE, "no axis 2", lambda x: x.slice(2, 0, 1)),
            (SHAPE, "cannot be iterated over: index it", lambda x: list(x)),
            (SHAPE, r"64 elements cannot take the shape \(3, 8\)", lambda x: x.reshape((3, 8))),
            (SHAPE, r"permute: \(0, 0\) is no order of its 2 axes", lambda x: x.permute((0, 0))),
            (SHAPE, "squeeze_dim: axis 1 must have 1", lambda x: x.squeeze_dim(1)),
            (SHAPE, "flatten_dims: axes 0 and 1 do not lie one after another", lambda x: x[:, :4].flatten_dims(0, 1)),
            (SHAPE, "reshape before slicing", lambda x: x[:, :4].reshape((32,))),
            (
                SHAPE,
                r"the sizes of \('a', 'b'\) do not follow",
                lambda x: x.rearrange((("a", "b"), "c"), ("a", "b", "c")),
            ),
            (SHAPE, "c is 4, the axis has 8", lambda x: x.rearrange(("a", "c"), ("c", "a"), {"c": 4})),
            (SHAPE, "does not have the axes of", lambda x: x.rearrange(("a", "c"), ("c", "d"))),
            (SHAPE, "the last axis must be contiguous", lambda x: x[:, ::2].view("uint8")),
            (SHAPE, "rows do not begin at a multiple of 4 bytes", lambda x: u8(8, 9)[:, :8].view("int32")),
            (SHAPE, "counts must be at least 1", lambda x: x.ap([[8, 0], [1, 8]])),
            (SHAPE, "an address is one integer", lambda x: x.select(0, sbuf(1, 1))),
            (BUFFER, "an address is read from SBUF", lambda x: x.select(0, psum(1, 1, dtype="int32", value=1))),
            (
                errors.UninitializedError,
                "an address from a register that holds nothing",
                lambda x: x.select(0, nisa.register_alloc()),
            ),
            (
                BOUNDS,
                "scalar_offset is -1, an index begins at 0",
                lambda x: x[4:].ap([[8, 1], [1, 8]], scalar_offset=i32(1, 1, value=-1)),
            ),
            (
                BOUNDS,
                "reaches element -2 of a partition of 8",
                lambda x: sbuf(128, 8)[32:64].ap([[8, 32], [-1, 8]], offset=32 * 8 + 5),
            ),
            (BOUNDS, "reaches element -2, the tensor has 64", lambda x: x.ap([[8, 1], [-1, 8]], offset=5)),
            (
                SHAPE,
                "cannot be indexed by another one",
                lambda x: nl.fori_loop(0, 1, lambda i: x.reshape((2, 4, 8)).select(0, i).select(0, i)),
            ),
            (SHAPE, "has no truth value", lambda x: sbuf(8, 4) == 0),
            (
                SHAPE,
                "cannot be indexed by another one",
                lambda x: x.reshape((2, 4, 8)).select(0, i32(1, 1)).select(0, i32(1, 1)),
            ),
            (
                DTYPE,
                "does not begin at a multiple of 4 bytes",
                lambda x: u8(8, 8)[:, 1:5].ap([[2, 8], [1, 1]], dtype="int32"),
            ),
            (BOUNDS, "select: index 8 of axis 0, which has 8", lambda x: x.select(0, 8)),
            (PARTITION, "select: the partition axis cannot be dropped", lambda x: sbuf(8, 4).select(0, 1)),
            (PARTITION, "expand_dim: the partition axis stays first", lambda x: sbuf(8, 4).expand_dim(0)),
            (PARTITION, "reshape_dim: the partition axis cannot be split", lambda x: sbuf(8, 4).reshape_dim(0, (2, 4))),
            (PARTITION, "flatten_dims: the partition axis cannot be merged", lambda x: sbuf(8, 4).flatten_dims(0, 1)),
            (PARTITION, "reshape: the partition axis stays", lambda x: sbuf(8, 4).reshape((4, 8))),
            (
                UNSUPPORTED,
                "vector_select: not simulated: take one access a row",
                lambda x: x.vector_select(0, i32(8, 1)),
            ),
            (UNSUPPORTED, "indirect: needs Trainium3", lambda x: x.indirect(i32(8, 1))),
            (UNSUPPORTED, "vector_offset is not simulated", lambda x: x.ap([[8, 8], [1, 8]], vector_offset=i32(8, 1))),
        ],
        "any instruction": [
            (
                SHAPE,
                "src is list .*must be a tensor on chip",
                lambda x: nisa.tensor_copy(empty(8, 4), [1.0]),
            ),
            (SHAPE, "has 6 axes, at most 5: flatten some", lambda x: nisa.memset(empty(8, 1, 1, 1, 1, 1), 0)),
            (
                SHAPE,
                "operand0 is str 'x', it must be a number or",
                lambda x: nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.add, "x"),
            ),
            (
                SHAPE,
                r"reduce_res .*must be \[8, 1\]: one element a partition",
                lambda x: nisa.activation_reduce(empty(8, 4), nl.exp, sbuf(8, 4), nl.add, empty(8, 4)),
            ),
            (UNSUPPORTED, "priority=1: needs Trainium4", lambda x: nisa.dma_copy(empty(8, 8), x, priority=1)),
            (
                DTYPE,
                "bits are not cast, it must be as wide as int32",
                lambda x: nisa.tensor_tensor(empty(8, 4, dtype="int32"), i32(8, 4), u8(8, 4), nl.bitwise_or),
            ),
            (
                ENGINE,
                "reduce_res with reduce_cmd.idle: nothing is reduced: pass reset_reduce",
                lambda x: nisa.select_reduce(empty(8, 4), u8(8, 4), sbuf(8, 4), 0.0, empty(8, 1)),
            ),
            (
                DTYPE,
                "bias .*any dtype but tfloat32: make it float32",
                lambda x: nisa.activation(empty(8, 4), nl.exp, sbuf(8, 4), bias=sbuf(8, 1, dtype="tfloat32")),
            ),
            (UNSUPPORTED, "exponential: needs Trainium3: use activation", lambda x: nisa.exponential(x, x)),
            (UNSUPPORTED, "dropout: the random numbers .*pass them", lambda x: nisa.dropout(x, x, 0.5)),
        ],
        "matmul": [
            (
                SHAPE,
                r"tile_position=\(0, 0\), tile_size=\(\): give both or none",
                lambda x: nisa.nc_matmul(out(4, 4), sbuf(8, 4), sbuf(8, 4), tile_position=(0, 0)),
            ),
            (
                UNSUPPORTED,
                "tiling by columns is documented in contradicting ways",
                lambda x: nisa.nc_matmul(out(4, 4), sbuf(8, 4), sbuf(8, 4), tile_position=(0, 32), tile_size=(32, 32)),
            ),
            (
                SHAPE,
                "a row tile has 32, 64 or 128 rows",
                lambda x: nisa.nc_matmul(out(4, 4), sbuf(8, 4), sbuf(8, 4), tile_position=(0, 0), tile_size=(16, 128)),
            ),
            (
                SHAPE,
                "with double_row its first free axis has 2",
                lambda x: nisa.nc_matmul(
                    out(4, 4),
                    sbuf(8, 4, dtype="float8_e4m3"),
                    sbuf(8, 4, dtype="float8_e4m3"),
                    perf_mode=nisa.matmul_perf_mode.double_row,
                ),
            ),
            (
                UNSUPPORTED,
                "is_transpose does not go with double_row",
                lambda x: nisa.nc_matmul(
                    out(4, 4),
                    sbuf(8, 2, 4, dtype="float8_e4m3"),
                    sbuf(8, 2, 4, dtype="float8_e4m3"),
                    is_transpose=True,
                    perf_mode=nisa.matmul_perf_mode.double_row,
                ),
            ),
            (
                UNSUPPORTED,
                "is_transpose with accumulate=True: what it adds is not documented",
                lambda x: nisa.nc_matmul(out(4, 8), sbuf(8, 4), sbuf(8, 8), is_transpose=True, accumulate=True),
            ),
            (
                UNSUPPORTED,
                "of 8 bits it comes out in 16, which is not simulated: cast it first",
                lambda x: nisa.nc_transpose(out(4, 8, dtype="uint8"), u8(8, 4), engine=nisa.engine.tensor),
            ),
            (
                DTYPE,
                "a transpose keeps the dtype of its data, bfloat16",
                lambda x: nisa.nc_matmul(out(4, 8), narrow(8, 4), narrow(8, 8), is_transpose=True),
            ),
            (
                SHAPE,
                "with is_transpose it is the identity of 8",
                lambda x: nisa.nc_matmul(out(4, 4), sbuf(8, 4), sbuf(8, 4), is_transpose=True),
            ),
            (
                errors.RangeError,
                "with is_transpose it must hold the identity",
                lambda x: nisa.nc_matmul(out(4, 8), sbuf(8, 4), sbuf(8, 8), is_transpose=True),
            ),
            (
                errors.PsumHazardError,
                "is_transpose with accumulate=None onto dst .*pass accumulate=False",
                lambda x: nisa.nc_matmul(
                    psum(4, 8), sbuf(8, 4), nl.shared_identity_matrix(8, "float32"), is_transpose=True
                ),
            ),
        ],
        "vector": [
            (DTYPE, "value is str 'x', it must be a number", lambda x: nisa.memset(empty(8, 4), "x")),
            (
                ENGINE,
                "op=nl.invert takes one operand: use tensor_scalar",
                lambda x: nisa.tensor_tensor(i32(8, 4), i32(8, 4), i32(8, 4), nl.invert),
            ),
            (
                ENGINE,
                "op=nl.power does not run on engine.vector: leave engine out",
                lambda x: nisa.tensor_tensor(empty(8, 4), sbuf(8, 4), sbuf(8, 4), nl.power, engine=nisa.engine.vector),
            ),
            (
                ENGINE,
                "op0=nl.power: only tensor_tensor has it",
                lambda x: nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.power, 2.0),
            ),
            (
                ENGINE,
                "scalar_tensor_tensor: nl.power: only tensor_tensor has it",
                lambda x: nisa.scalar_tensor_tensor(empty(8, 4), sbuf(8, 4), nl.add, 2.0, nl.power, sbuf(8, 4)),
            ),
            (
                ENGINE,
                "op0=nl.square takes no operand0: pass None or 0, got 2.0",
                lambda x: nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.square, 2.0),
            ),
            (
                DTYPE,
                "operand0=1.5: an operator on bits takes an integer",
                lambda x: nisa.tensor_scalar(empty(8, 4, dtype="int32"), i32(8, 4), nl.bitwise_and, 1.5),
            ),
            (
                ENGINE,
                "operand1=2.0 without op1: give both or none",
                lambda x: nisa.tensor_scalar(empty(8, 4), sbuf(8, 4), nl.add, 1.0, operand1=2.0),
            ),
            (
                SHAPE,
                r"reducing axis 2 of .* leaves \[8, 4\]",
                lambda x: nisa.tensor_reduce(empty(8, 1), nl.add, sbuf(8, 4, 2), axis=2),
            ),
            (
                ENGINE,
                "negate goes with an arithmetic operator, not with bitwise_or",
                lambda x: nisa.tensor_reduce(empty(8, 1, dtype="int32"), nl.bitwise_or, i32(8, 4), axis=1, negate=True),
            ),
            (
                UNSUPPORTED,
                "op=nl.subtract: what a reduction by it gives is not documented",
                lambda x: nisa.tensor_reduce(empty(8, 1), nl.subtract, sbuf(8, 4), axis=1),
            ),
        ],
        "rows": [
            (
                ENGINE,
                "reduce_init=.* goes with reduce_cmd.load_reduce",
                lambda x: nisa.tensor_scalar_reduce(
                    empty(8, 4), sbuf(8, 4), nl.add, 1.0, nl.add, empty(8, 1), reduce_init=1.0
                ),
            ),
            (
                UNSUPPORTED,
                "reverse0: documented as not supported yet",
                lambda x: nisa.tensor_scalar_reduce(
                    empty(8, 4), sbuf(8, 4), nl.add, 1.0, nl.add, empty(8, 1), reverse0=True
                ),
            ),
            (
                DTYPE,
                "dst .*it takes integers of up to 16 bits: cast it",
                lambda x: nisa.tensor_scalar_cumulative(empty(8, 4, dtype="int32"), i32(8, 4), nl.add, nl.add, 1.0),
            ),
            (
                DTYPE,
                "predicate .*it must be one of uint8, uint16, uint32",
                lambda x: nisa.tensor_copy_predicated(sbuf(8, 4), sbuf(8, 4), sbuf(8, 4)),
            ),
            (
                DTYPE,
                "the same dtype in both: cast first",
                lambda x: nisa.tensor_copy_predicated(sbuf(8, 4), narrow(8, 4), u8(8, 4)),
            ),
            (
                DTYPE,
                "on_true .*any dtype but tfloat32, int32 and uint32",
                lambda x: nisa.select_reduce(empty(8, 4), u8(8, 4), i32(8, 4), 0.0),
            ),
            (
                ENGINE,
                "select_reduce: reduce_cmd.load_reduce: it has no operand to load: use reset_reduce",
                lambda x: nisa.select_reduce(empty(8, 4), u8(8, 4), sbuf(8, 4), 0.0, empty(8, 1), reduce_cmd=LOAD),
            ),
            (
                DTYPE,
                "reduce_res .*it must be of floats",
                lambda x: nisa.select_reduce(
                    empty(8, 4), u8(8, 4), sbuf(8, 4), 0.0, empty(8, 1, dtype="int32"), nisa.reduce_cmd.reset_reduce
                ),
            ),
            (
                DTYPE,
                "on_true_tile .*it must be of floats",
                lambda x: nisa.range_select(empty(8, 4), i32(8, 4), nl.less, nl.less, sbuf(8, 1), sbuf(8, 1)),
            ),
            (
                SHAPE,
                r"bound0=0.0: it must be a float32 \[8, 1\] tensor",
                lambda x: nisa.range_select(empty(8, 4), sbuf(8, 4), nl.less, nl.less, 0.0, sbuf(8, 1)),
            ),
            (
                ENGINE,
                "on_false_value=0.0: the engine has .* only",
                lambda x: nisa.range_select(
                    empty(8, 4), sbuf(8, 4), nl.less, nl.less, sbuf(8, 1), sbuf(8, 1), on_false_value=0.0
                ),
            ),
            (
                SHAPE,
                "range_start=1.5: it must be an int known to the compiler",
                lambda x: nisa.range_select(
                    empty(8, 4), sbuf(8, 4), nl.less, nl.less, sbuf(8, 1), sbuf(8, 1), range_start=1.5
                ),
            ),
            (
                SHAPE,
                r"range_start=16777216: positions must stay within 2\*\*24",
                lambda x: nisa.range_select(
                    empty(8, 4), sbuf(8, 4), nl.less, nl.less, sbuf(8, 1), sbuf(8, 1), range_start=1 << 24
                ),
            ),
            (
                ENGINE,
                "range_select: reduce_cmd.load_reduce",
                lambda x: nisa.range_select(
                    empty(8, 4), sbuf(8, 4), nl.less, nl.less, sbuf(8, 1), sbuf(8, 1), reduce_cmd=LOAD
                ),
            ),
            (SHAPE, "32 integers of 0 to 31", lambda x: nisa.nc_stream_shuffle(sbuf(32, 4), sbuf(32, 4), [0] * 31)),
            (DTYPE, "shuffle.*cast first", lambda x: nisa.nc_stream_shuffle(sbuf(32, 4), narrow(32, 4), [0] * 32)),
            (
                SHAPE,
                "shuffle.*as many elements a partition in both",
                lambda x: nisa.nc_stream_shuffle(sbuf(32, 4), sbuf(32, 8), [0] * 32),
            ),
            (
                SHAPE,
                "shuffle_mask takes partition 31 of src",
                lambda x: nisa.nc_stream_shuffle(sbuf(32, 4), sbuf(8, 4), [31] * 32),
            ),
            (
                PARTITION,
                "starts at partition 32, not allowed with 64 active",
                lambda x: nisa.nc_stream_shuffle(sbuf(64, 4), sbuf(64, 4)[32:64], [0] * 32),
            ),
            (SHAPE, "at most 512 elements a partition: tile it", lambda x: nisa.bn_stats(empty(8, 6), sbuf(8, 513))),
            (SHAPE, r"bn_stats: dst .*it must be \[8, 6\]", lambda x: nisa.bn_stats(empty(8, 5), sbuf(8, 16))),
            (SHAPE, "must be a multiple of three", lambda x: nisa.bn_aggr(empty(8, 2), sbuf(8, 4))),
            (SHAPE, "it takes 8 to 16384 elements a partition", lambda x: nisa.max8(empty(8, 8), sbuf(8, 4))),
            (SHAPE, r"dst .*it must be \[8, 8\]", lambda x: nisa.max8(empty(8, 4), sbuf(8, 16))),
            (
                DTYPE,
                "dst .*it must be uint16 or uint32",
                lambda x: nisa.nc_find_index8(empty(8, 8, dtype="int32"), sbuf(8, 16), sbuf(8, 8)),
            ),
            (
                SHAPE,
                "imm .*it must be a number",
                lambda x: nisa.nc_match_replace8(empty(8, 16), sbuf(8, 16), sbuf(8, 8), sbuf(8, 1)),
            ),
            (
                UNSUPPORTED,
                "a value of vals .* is not in data: its index is not documented",
                lambda x: nisa.nc_match_replace8(
                    empty(8, 16), sbuf(8, 16), sbuf(8, 8, value=2.0), 0.0, empty(8, 8, dtype="uint32")
                ),
            ),
        ],
        "gpsimd": [
            (SHAPE, "pattern=.*one to four pairs", lambda x: nisa.iota(empty(8, 4), [])),
            (
                DTYPE,
                "on_false_value is 'x', it must be a number",
                lambda x: nisa.affine_select(empty(8, 4), [[1, 4]], 1, sbuf(8, 4), "x"),
            ),
            (
                SHAPE,
                "it must have 1 partition and the 4 elements of data",
                lambda x: nisa.tensor_partition_reduce(empty(8, 4), nl.add, sbuf(8, 4)),
            ),
            (DTYPE, "indices .*must be uint32", lambda x: nisa.nc_n_gather(empty(8, 4), sbuf(8, 4), i32(8, 4))),
            (SHAPE, "the same partitions in both", lambda x: nisa.nc_n_gather(empty(4, 4), sbuf(8, 4), u32(4, 4))),
            (
                DTYPE,
                "nc_n_gather: dst .*the same dtype in both",
                lambda x: nisa.nc_n_gather(empty(8, 4, dtype=bf16), sbuf(8, 4), u32(8, 4)),
            ),
            (
                BOUNDS,
                "index 9 of .*which has 4 elements a partition",
                lambda x: nisa.nc_n_gather(empty(8, 4), sbuf(8, 4), sbuf(8, 4, dtype="uint32", value=9)),
            ),
            (SHAPE, "must be a multiple of 16", lambda x: nisa.local_gather(empty(8, 16), sbuf(8, 4), u16(8, 1))),
            (
                SHAPE,
                "num_elem_per_idx=3: it must be 1, 2",
                lambda x: nisa.local_gather(empty(16, 48), sbuf(16, 4), u16(16, 1), num_elem_per_idx=3),
            ),
            (
                SHAPE,
                "17 indices: at least 1, at most those of index",
                lambda x: nisa.local_gather(empty(16, 17), sbuf(16, 4), u16(16, 1), num_valid_indices=17),
            ),
            (
                SHAPE,
                r"it must be float32\[16, 16\]",
                lambda x: nisa.local_gather(empty(16, 8), sbuf(16, 4), u16(16, 1)),
            ),
            (SHAPE, r"segment_ids .* is \[1, n\]", lambda x: nisa.sequence_bounds(empty(1, 4), sbuf(1, 4))),
            (
                DTYPE,
                "segment_ids .*must be float32 or int32",
                lambda x: nisa.sequence_bounds(empty(1, 2, 4), narrow(1, 4)),
            ),
            (DTYPE, "dst .* int32", lambda x: nisa.nonzero_with_count(empty(16, 5), sbuf(16, 4))),
            (
                SHAPE,
                r"it must be \[16, 5\]",
                lambda x: nisa.nonzero_with_count(empty(16, 4, dtype="int32"), sbuf(16, 4)),
            ),
        ],
        "DMA": [
            (SHAPE, "src is list .*it must be a tensor", lambda x: nisa.dma_copy(empty(8, 8), [1.0])),
            (
                ENGINE,
                "unknown or hwdge; others are for indirect transposes",
                lambda x: nisa.dma_transpose(empty(8, 8), x, dge_mode=nisa.dge_mode.swdge),
            ),
            (
                ENGINE,
                "goes with an indirect src only",
                lambda x: nisa.dma_transpose(empty(8, 8), x, oob_mode=nisa.oob_mode.skip),
            ),
            (SHAPE, r"axes=\(0, 1\) of src", lambda x: nisa.dma_transpose(empty(8, 8), x, axes=(0, 1))),
            (
                DTYPE,
                "the same dtype of 2 or 4 bytes in both",
                lambda x: nisa.dma_transpose(empty(8, 8, dtype=bf16), x),
            ),
            (SHAPE, r"the transpose is \[4, 8\]", lambda x: nisa.dma_transpose(empty(8, 4), x[:, :4])),
            (
                SHAPE,
                "with dge_mode.hwdge: 16 rows",
                lambda x: nisa.dma_transpose(empty(8, 8), x, dge_mode=nisa.dge_mode.hwdge),
            ),
            (SHAPE, "a list of 1 to 16 tensors", lambda x: nisa.dma_compute(empty(8, 8), [], nl.add)),
            (
                SHAPE,
                r"srcs\[1\] .*as many elements in both",
                lambda x: nisa.dma_compute(empty(8, 8), [x, x[:4]], nl.add),
            ),
            (
                UNSUPPORTED,
                r"scales=\[2.0\]: documented as 1.0",
                lambda x: nisa.dma_compute(empty(8, 8), [x], nl.add, scales=[2.0]),
            ),
            (
                UNSUPPORTED,
                "unique_indices=False: documented as True only",
                lambda x: nisa.dma_compute(empty(8, 8), [x], nl.add, unique_indices=False),
            ),
        ],
        "registers": [
            (SHAPE, "src .*must be a tensor of one element", lambda x: nisa.register_load(nisa.register_alloc(), x)),
            (
                BUFFER,
                "src .*must be in HBM or SBUF",
                lambda x: nisa.register_load(nisa.register_alloc(), psum(1, 1, dtype="int32", value=1)),
            ),
            (
                DTYPE,
                "a register holds an integer of up to 32 bits",
                lambda x: nisa.register_load(nisa.register_alloc(), sbuf(1, 1)),
            ),
            (SHAPE, "must be a register, of register_alloc", lambda x: nisa.register_move(3, 4)),
            (
                SHAPE,
                "the register of a loop is not written",
                lambda x: nl.fori_loop(0, 1, lambda i: nisa.register_move(i, 4)),
            ),
            (
                errors.UninitializedError,
                "the register holds nothing: register_move or register_load first",
                lambda x: nisa.register_store(i32(1, 1), nisa.register_alloc()),
            ),
        ],
        "language": [
            (TypeError, "nl.bypass is an operator: pass it as op=nl.bypass", lambda x: nl.bypass(x)),
            (TypeError, "nl.add: one operand at least is a tile", lambda x: nl.add(1, 2)),
            (BUFFER, "nl.add: works on tiles in SBUF or PSUM: load first", lambda x: nl.add(x, x)),
            (BUFFER, "nl.exp: works on a tile .*: load first", lambda x: nl.exp(x)),
            (UNSUPPORTED, "nl.mod: .*no documented instruction does it", lambda x: nl.mod(sbuf(8, 4), sbuf(8, 4))),
            (UNSUPPORTED, "nl.floor: .*no documented instruction does it", lambda x: nl.floor(sbuf(8, 4))),
            (SHAPE, "nl.add: .*broadcast the other", lambda x: nl.add(sbuf(8, 4), sbuf(1, 4))),
            (SHAPE, "axis 0: reductions go over the last free axes", lambda x: nl.sum(sbuf(8, 4), axis=0)),
            (UNSUPPORTED, "nl.softmax: .*two axes: reshape it", lambda x: nl.softmax(sbuf(8, 4, 2))),
            (SHAPE, "broadcast_to: .*each equal or 1", lambda x: nl.broadcast_to(sbuf(8, 4), (8, 8))),
            (PARTITION, "broadcast_to: .*tile axis 0", lambda x: nl.broadcast_to(sbuf(1, 4), (129, 4))),
            (BUFFER, "nl.load: .*it is on chip already", lambda x: nl.load(sbuf(8, 4))),
            (BUFFER, "nl.store: .*copy on chip with nisa.tensor_copy", lambda x: nl.store(sbuf(8, 4), sbuf(8, 4))),
            (
                BUFFER,
                "address is for on-chip memory, got private_hbm",
                lambda x: nl.ndarray((8, 4), nl.float32, buffer=nl.hbm, address=(0, 0)),
            ),
            (
                PARTITION,
                "64 partitions from 96 on, there are 128",
                lambda x: nl.ndarray((64, 4), nl.float32, address=(96, 0)),
            ),
            *(
                (
                    errors.CapacityError,
                    f"2048 bytes a partition from {at} on: an address is at least 0",
                    lambda x, at=at: nl.ndarray((8, 512), nl.float32, buffer=nl.psum, address=(0, at)),
                )
                for at in (-2048, 6, 16384)
            ),
            (DTYPE, "memset: int32 has no value nan", lambda x: nisa.memset(empty(8, 4, dtype="int32"), float("nan"))),
            (DTYPE, "the device has no such dtype: cast it first", lambda x: nl.shared_constant(np.ones(4))),
            (SHAPE, "fori_loop: step must be a positive int, got 0", lambda x: nl.fori_loop(0, 4, lambda i: None, 0)),
            (errors.NkiSimError, "the condition is a register", lambda x: nl.while_loop(1, lambda i: i)),
            (errors.NkiSimError, "no_reorder: already inside one", _nested),
            (errors.NkiSimError, "simulate: not from inside a kernel", lambda x: simulate(_nested)(np.ones(1))),
            (errors.NkiSimError, r"\[3\]: a logical core of Trainium2 is 1 or 2", lambda x: jit(_nested)[3]),
            (AttributeError, "nl.arange is no longer part of NKI: index with slices", lambda x: nl.arange),
            (AttributeError, "nl.nothing: the simulator knows no such name", lambda x: nl.nothing),
            (errors.HazardError, "depends_on memset .*it must come before", _depends),
        ],
        "one core": [
            (errors.HazardError, r"runs on one core: launch it as kernel\[2\]", lambda x: nisa.core_barrier(x, (0, 1))),
        ],
        "two cores": [
            (
                BUFFER,
                "core_barrier: data .*must be a tensor in nl.shared_hbm",
                lambda x: nisa.core_barrier(sbuf(8, 4), (0, 1)),
            ),
            (ENGINE, r"core_barrier: cores=\(0,\): only \(0, 1\)", lambda x: nisa.core_barrier(x, (0,))),
            (ENGINE, "send_to_rank=5", lambda x: nisa.sendrecv(sbuf(8, 4), empty(8, 4), 5, 5, 0)),
            (DTYPE, "sendrecv: .*the same dtype in both", lambda x: _exchange(sbuf(8, 4), empty(8, 4, dtype=bf16))),
            (SHAPE, "sendrecv: .*the same shape in both", lambda x: _exchange(sbuf(8, 4), empty(8, 8))),
            (
                SHAPE,
                "gpsimd_dma: at most 256 elements a partition, got 300",
                lambda x: _exchange(sbuf(8, 300), empty(8, 300), dma_engine=nisa.dma_engine.gpsimd_dma),
            ),
            (
                SHAPE,
                "the other core sends float32",
                lambda x: _exchange(sbuf(8, 4 + nl.program_id(0)), empty(8, 4 + nl.program_id(0))),
            ),
            (
                errors.HazardError,
                "core [01] waits at barrier 1 for ever: core [01] has ended",
                lambda x: nisa.core_barrier(x, (0, 1)) if nl.program_id(0) else None,
            ),
            (
                errors.HazardError,
                "core [01] waits at .* for ever: core [01] waits at",
                lambda x: nisa.core_barrier(x, (0, 1)) if nl.program_id(0) else _exchange(sbuf(8, 4), empty(8, 4)),
            ),
        ],
    }


def _nested(x):
    with nl.no_reorder(), nl.no_reorder():
        pass


def _depends(x):
    tile = nl.ndarray((8, 4), nl.float32)
    first = nisa.memset(tile, 0.0)
    first.depends_on(first)


def _exchange(src, dst, **options):
    other = 1 - nl.program_id(0)
    nisa.sendrecv(src, dst, other, other, 0, **options)
