"""What each instruction of the NKI simulator computes, against NumPy written out anew, and what it costs.

The cases of the documentation's own examples (signs, orders of operands and of scans, reverse flags, which partition
goes where) are here in other words: a second reading of the same texts.
"""

import inspect

import ml_dtypes
import numpy as np
import pytest

from ringtide.kernels.nki.simulator import cost, errors, launch, machine, memory
from ringtide.kernels.nki.simulator import isa as nisa
from ringtide.kernels.nki.simulator import language as nl

F32_MIN = np.finfo(np.float32).min
CMD = nisa.reduce_cmd


@pytest.fixture(autouse=True)
def core():
    made = machine.Machine()
    before = machine.enter(made)
    yield made
    machine.enter(before)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def new(*shape, dtype="float32", buffer=nl.sbuf):
    return nl.ndarray(shape, dtype, buffer)


def put(x, dtype=None, buffer=nl.sbuf):
    """A tensor that holds x, without an instruction."""
    x = np.asarray(x)
    tensor = nl.ndarray(x.shape, dtype or str(x.dtype), buffer)
    tensor.write(x)
    return tensor


def get(tensor):
    tensor.check_written()
    return np.array(tensor.array())


def noise(rng, *shape, dtype=np.float32):
    return rng.normal(size=shape).astype(np.float32).astype(dtype)


bf16 = ml_dtypes.bfloat16


# --- the API ---------------------------------------------------------------------------------------------------------

SIGNATURES = """
activate2: dst op data imm0 imm1 op0 op1 relu_param reverse0 reverse1 reduce_op reduce_res reduce_cmd name
activation: dst op data bias scale reduce_op reduce_res reduce_cmd name
activation_reduce: dst op data reduce_op reduce_res bias scale name
affine_select: dst pattern channel_multiplier on_true_tile on_false_value cmp_op offset name
bn_aggr: dst data name
bn_stats: dst data name
core_barrier: data cores engine name
dma_compute: dst srcs reduce_op scales unique_indices oob_mode name
dma_copy: dst src priority oob_mode dge_mode engine name
dma_transpose: dst src axes priority dge_mode oob_mode name
dropout: dst data prob name
exponential: dst src max_value reduce_res reduce_cmd reduce_init name
get_nc_sub_version:
get_nc_version:
iota: dst pattern offset channel_multiplier name
local_gather: dst src_buffer index num_elem_per_idx num_valid_indices name
max8: dst src name
memset: dst value engine name
nc_find_index8: dst data vals name
nc_match_replace8: dst data vals imm dst_idx name
nc_matmul: dst stationary moving is_stationary_onezero is_moving_onezero is_transpose accumulate tile_position \
tile_size perf_mode name
nc_matmul_mx: dst stationary moving stationary_scale moving_scale tile_position tile_size accumulate name
nc_n_gather: dst data indices name
nc_stream_shuffle: dst src shuffle_mask name
nc_transpose: dst data engine name
nonzero_with_count: dst src index_offset padding_val name
quantize_mx: dst src dst_scale name
rand2: dst min max name
rand_get_state: dst engine name
rand_set_state: src_seeds engine name
range_select: dst on_true_tile comp_op0 comp_op1 bound0 bound1 reduce_cmd reduce_res reduce_op range_start \
on_false_value name
reciprocal: dst data name
register_alloc: x
register_load: dst src
register_move: dst src
register_store: dst src
rng: dst engine name
scalar_tensor_tensor: dst data op0 operand0 op1 operand1 reverse0 reverse1 name
select_reduce: dst predicate on_true on_false reduce_res reduce_cmd reduce_op reverse_pred name
sendrecv: src dst send_to_rank recv_from_rank pipe_id dma_engine name
sequence_bounds: dst segment_ids name
set_rng_seed: src_seeds name
tensor_copy: dst src engine name
tensor_copy_predicated: dst src predicate reverse_pred name
tensor_partition_reduce: dst op data name
tensor_reduce: dst op data axis negate keepdims name
tensor_scalar: dst data op0 operand0 reverse0 op1 operand1 reverse1 engine name
tensor_scalar_cumulative: dst src op0 op1 imm0 imm1 reduce_cmd name
tensor_scalar_reduce: dst data op0 operand0 reduce_op reduce_res reverse0 reduce_cmd reduce_init reduce_res_negate name
tensor_tensor: dst data1 data2 op engine name
tensor_tensor_scan: dst data0 data1 initial op0 op1 reverse0 reverse1 name
topk: val_dst idx_dst src n name
""".strip()


@pytest.mark.parametrize("line", SIGNATURES.splitlines())
def test_signature(line):
    name, arguments = line.split(":")
    assert list(inspect.signature(getattr(nisa, name)).parameters) == arguments.split()


def test_all_instructions_are_listed():
    public = {n for n, f in vars(nisa).items() if inspect.isfunction(f)}
    assert public == {line.split(":")[0] for line in SIGNATURES.splitlines()}


def test_enums_and_old_engine_names():
    assert [nisa.tensor_engine, nisa.vector_engine, nisa.scalar_engine, nisa.gpsimd_engine, nisa.unknown_engine] == [
        getattr(nisa.engine, n) for n in ("tensor", "vector", "scalar", "gpsimd", "unknown")
    ]
    assert nisa.get_nc_version() is nisa.nc_version.gen3
    assert nisa.nc_version.gen2 < nisa.get_nc_version() < nisa.nc_version.gen4


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda a: nisa.quantize_mx(a, a, a), "Trainium3"),
        (lambda a: nisa.nc_matmul_mx(a, a, a, a, a), "Trainium3"),
        (lambda a: nisa.activate2(a, nl.exp, a, 1.0, 0.0, nl.multiply, nl.add), "Trainium3"),
        (lambda a: nisa.exponential(a, a), "Trainium3"),
        (lambda a: nisa.dropout(a, a, 0.5), "random"),
        (lambda a: nisa.rng(a), "random"),
        (lambda a: nisa.topk(a, a, a, 8), "contradicting"),
        (lambda a: nisa.dma_copy(a, a, priority=1), "Trainium4"),
        (lambda a: nisa.tensor_reduce(a, nl.subtract, a, 1), "subtract"),
        (lambda a: nisa.tensor_scalar_reduce(a, a, nl.add, 1.0, nl.add, reverse0=True), "reverse0"),
        (lambda a: nisa.dma_compute(a, [a, a], nl.add, scales=[1.0, 2.0]), "scales"),
        (lambda a: nisa.dma_compute(a, [a, a], nl.add, unique_indices=False), "unique_indices"),
    ],
)
def test_unsupported(call, why):
    with pytest.raises(errors.UnsupportedError, match=why):
        call(put(np.ones((4, 8), np.float32)))


# --- tensor engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_matmul(rng, dtype):
    a, b = put(noise(rng, 96, 40), dtype), put(noise(rng, 96, 200), dtype)
    p = new(40, 200, buffer=nl.psum)
    nisa.nc_matmul(p, stationary=a, moving=b, accumulate=False)
    want = get(a).astype(np.float64).T @ get(b).astype(np.float64)
    np.testing.assert_allclose(get(p), want, rtol=1e-5, atol=1e-4)


def test_matmul_of_views(rng):
    """Strided columns, three axes, two dtypes; into a part of a bank."""
    a, b = put(noise(rng, 64, 32), "bfloat16"), put(noise(rng, 64, 2, 3, 8), "float16")
    p = new(16, 2, 100, buffer=nl.psum)
    nisa.nc_matmul(p[:, 1, 10:34], a[:, 1::2], b[:, 1, :, :], accumulate=False)
    want = get(a)[:, 1::2].astype(np.float32).T @ get(b)[:, 1].reshape(64, 24).astype(np.float32)
    np.testing.assert_allclose(get(p[:, 1, 10:34]), want, rtol=1e-5, atol=1e-5)
    assert not p[:, 0].state().any()


def test_matmul_accumulates(rng):
    a, b = noise(rng, 4, 128, 32), noise(rng, 4, 128, 64)
    auto, told = new(32, 64, buffer=nl.psum), new(32, 64, buffer=nl.psum)
    for i in range(4):
        nisa.nc_matmul(auto, put(a[i]), put(b[i]))
        nisa.nc_matmul(told, put(a[i]), put(b[i]), accumulate=i > 0)
    want = np.einsum("ikm,ikn->mn", a.astype(np.float64), b)
    np.testing.assert_allclose(get(auto), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(get(auto), get(told))
    nisa.nc_matmul(told, put(a[0]), put(b[0]), accumulate=False)
    np.testing.assert_allclose(get(told), a[0].T @ b[0], rtol=1e-5, atol=1e-5)


def test_matmul_left_to_choose_overwrites_what_is_fresh_and_adds_to_the_rest():
    one = put(np.ones((8, 4), np.float32))
    p = new(4, 8, buffer=nl.psum)
    nisa.nc_matmul(p[:, 2:4], one, put(np.full((8, 2), 3, np.float32)))
    nisa.nc_matmul(p, one, put(np.ones((8, 8), np.float32)))
    np.testing.assert_array_equal(get(p), np.tile([8, 8, 32, 32, 8, 8, 8, 8], (4, 1)))


def test_matmul_onto_what_a_transpose_or_a_copy_left():
    one, p = put(np.ones((8, 8), np.float32)), new(8, 8, buffer=nl.psum)
    nisa.nc_matmul(p, one, one, accumulate=False)
    nisa.tensor_copy(p[:, :4], one[:, :4])
    for accumulate in (True, None):
        with pytest.raises(errors.PsumHazardError):
            nisa.nc_matmul(p, one, one, accumulate=accumulate)
    nisa.nc_matmul(p[:, 4:], one, one[:, 4:], accumulate=True)
    np.testing.assert_array_equal(get(p), np.repeat([[1] * 4 + [16] * 4], 8, axis=0))


def test_matmul_exact(core, rng):
    core.options.exact = True
    a, b = noise(rng, 128, 8), noise(rng, 128, 8)
    p = new(8, 8, buffer=nl.psum)
    nisa.nc_matmul(p, put(a), put(b))
    np.testing.assert_array_equal(get(p), (a.astype(np.float64).T @ b.astype(np.float64)).astype(np.float32))


def test_matmul_left_to_choose_onto_zeros(rng):
    """Overwriting and adding agree there."""
    a, p = noise(rng, 16, 8), new(8, 8, buffer=nl.psum)
    nisa.memset(p, 0.0)
    for _ in range(2):
        nisa.nc_matmul(p, put(a), put(a))
    np.testing.assert_allclose(get(p), 2 * a.T @ a, rtol=1e-5, atol=1e-5)


def test_a_given_address_counts(rng):
    """Banks and first partitions are those of the memory, not of the tensor."""
    a = put(noise(rng, 32, 32))
    across = nl.ndarray((32, 512), "float32", nl.psum, address=(0, 1024))
    nisa.nc_matmul(across[:, 256:288], a, a, accumulate=False)
    with pytest.raises(errors.BankError, match="bytes 2044 to 2172"):
        nisa.nc_matmul(across[:, 255:287], a, a, accumulate=False)
    nisa.memset(nl.ndarray((32, 4), "float32", address=(32, 0)), 0.0)
    with pytest.raises(errors.PartitionError, match="start at 32"):
        nisa.memset(nl.ndarray((64, 4), "float32", address=(32, 0)), 0.0)


def test_matmul_double_row(rng):
    a, b = put(noise(rng, 16, 2, 4), "float8_e5m2"), put(noise(rng, 16, 2, 24), "float8_e4m3")
    p = new(4, 24, buffer=nl.psum)
    made = nisa.nc_matmul(p, a, b, perf_mode=nisa.matmul_perf_mode.double_row)
    want = np.einsum("kim,kin->mn", get(a).astype(np.float32), get(b).astype(np.float32))
    np.testing.assert_allclose(get(p), want, rtol=1e-5, atol=1e-5)
    assert made.cycles == 24
    with pytest.raises(errors.DtypeError, match="float8"):
        nisa.nc_matmul(p, put(get(a), "bfloat16"), b, perf_mode=nisa.matmul_perf_mode.double_row)


def test_matmul_tiles_of_the_array(rng):
    a, b = noise(rng, 64, 32), noise(rng, 64, 16)
    p = new(32, 16, buffer=nl.psum)
    nisa.nc_matmul(p, put(a), put(b), tile_position=(64, 0), tile_size=(64, 128))
    np.testing.assert_allclose(get(p), a.T @ b, rtol=1e-5, atol=1e-5)
    with pytest.raises(errors.UnsupportedError, match="columns"):
        nisa.nc_matmul(p, put(a), put(b), tile_position=(0, 64), tile_size=(64, 64))
    for position, size in (((32, 0), (64, 128)), ((0, 0), (32, 128)), ((0, 0), ())):
        with pytest.raises(errors.ShapeError):
            nisa.nc_matmul(p, put(a), put(b), tile_position=position, tile_size=size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint16"])
def test_transpose_is_bit_exact(rng, dtype):
    bits = rng.integers(0, 2**16, (100, 40)).astype(np.uint16)
    x = put(np.zeros((100, 40), np.float32), dtype)
    x.storage.data[:] = np.resize(bits.view(np.uint8).reshape(-1), x.storage.data.shape)  # any bits: NaNs, too
    p, q = new(40, 100, dtype=dtype, buffer=nl.psum), new(30, 32, dtype=dtype)
    assert nisa.nc_transpose(p, x).engine == "PE"
    assert nisa.nc_transpose(q, x[32:64, 5:35]).engine == "DVE"
    assert get(p).tobytes() == get(x).T.tobytes()
    assert get(q).tobytes() == get(x)[32:64, 5:35].T.tobytes()


def test_transpose_by_matmul(rng):
    x = noise(rng, 64, 24)
    x[3, 4], x[5, 6] = np.nan, np.inf
    p = new(24, 64, buffer=nl.psum)
    nisa.nc_matmul(p, stationary=put(x), moving=put(np.eye(64, dtype=np.float32)), is_transpose=True)
    np.testing.assert_array_equal(get(p), x.T)
    for wrong in (2 * np.eye(64), np.ones((64, 64))):
        with pytest.raises(errors.RangeError, match="identity"):
            nisa.nc_matmul(p, put(x), put(wrong.astype(np.float32)), is_transpose=True, accumulate=False)
    with pytest.raises(errors.PsumHazardError, match="accumulate=False"):
        nisa.nc_matmul(p, put(x), put(np.eye(64, dtype=np.float32)), is_transpose=True)
    narrow = put(x, "float8_e5m2")
    with pytest.raises(errors.UnsupportedError, match="8 bits"):
        nisa.nc_transpose(new(24, 64, dtype="float8_e5m2", buffer=nl.psum), narrow)


# --- elementwise -----------------------------------------------------------------------------------------------------

BINARY = {
    nl.add: np.add,
    nl.subtract: np.subtract,
    nl.multiply: np.multiply,
    nl.maximum: np.maximum,
    nl.minimum: np.minimum,
    nl.abs_max: lambda a, b: np.where(abs(a) > abs(b), abs(a), abs(b)),
    nl.abs_min: lambda a, b: np.where(abs(a) < abs(b), abs(a), abs(b)),
    nl.equal: np.equal,
    nl.not_equal: np.not_equal,
    nl.less: np.less,
    nl.less_equal: np.less_equal,
    nl.greater: np.greater,
    nl.greater_equal: np.greater_equal,
    nl.logical_and: np.logical_and,
    nl.logical_or: np.logical_or,
    nl.logical_xor: np.logical_xor,
    nl.max: np.maximum,
    nl.min: np.minimum,
}


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    "dtypes", [("float32",) * 3, ("bfloat16", "float32", "bfloat16"), ("int8", "float16", "int16")]
)
def test_tensor_tensor(rng, op, dtypes):
    values = [np.round(2 * noise(rng, 8, 20)) for _ in range(2)]
    a, b = (put(v, dtype) for v, dtype in zip(values, dtypes, strict=False))
    out = new(8, 20, dtype=dtypes[2])
    nisa.tensor_tensor(out, a, b, op)
    np.testing.assert_array_equal(get(out).astype(np.float32), BINARY[op](*values).astype(np.float32))


def test_tensor_tensor_of_views(rng):
    """PSUM and SBUF, strides, other free shapes of as many elements, a broadcast, in place."""
    a, b = noise(rng, 32, 4, 6), noise(rng, 32, 48)
    p, t, row = put(a, buffer=nl.psum), put(b), put(noise(rng, 32, 1))
    nisa.tensor_tensor(t[:, 1::2], p, t[:, 0::2], nl.subtract)
    np.testing.assert_array_equal(get(t)[:, 1::2], a.reshape(32, 24) - b[:, 0::2])
    nisa.tensor_tensor(p[:, :, 2], p[:, :, 2], row.broadcast(1, 4), nl.multiply)
    np.testing.assert_array_equal(get(p)[:, :, 2], a[:, :, 2] * get(row))
    np.testing.assert_array_equal(get(p)[:, :, 3], a[:, :, 3])


def test_integers_are_exact_on_gpsimd_only():
    a, b = np.full((1, 2), 2**24 + 1, np.int32), np.array([[1, 2**31 - 1]], np.int32)
    out = new(1, 2, dtype="int32")
    assert nisa.tensor_tensor(out, put(a), put(b), nl.add).engine == "POOL"
    np.testing.assert_array_equal(get(out), [[2**24 + 2, 2**24 + 2**31 - 2**32]])  # wraps
    assert nisa.tensor_tensor(out, put(a), put(b), nl.subtract, engine=nisa.engine.vector).engine == "DVE"
    assert get(out)[0, 0] == 2**24 - 1  # 2**24 + 1 is no float32
    p = put(a, buffer=nl.psum)
    assert nisa.tensor_tensor(out, p, put(b), nl.add).engine == "DVE"
    assert nisa.tensor_tensor(new(1, 2), put(a), put(b), nl.power).engine == "POOL"
    nisa.tensor_tensor(out, put(np.array([[3, 2]], np.int32)), put(np.array([[4, -1]], np.int32)), nl.power)
    np.testing.assert_array_equal(get(out), [[81, 0]])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
def test_bits(rng, dtype):
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, (4, 9), endpoint=True).astype(dtype)
    b = rng.integers(0, info.bits, (4, 9)).astype(dtype)
    unsigned = f"uint{info.bits}"
    out = new(4, 9, dtype=dtype)
    want = {
        nl.bitwise_and: a & b,
        nl.bitwise_or: a | b,
        nl.bitwise_xor: a ^ b,
        nl.left_shift: a << b,
        nl.right_shift: (a.view(unsigned) >> b.view(unsigned)).view(dtype),  # logical
    }
    for op, golden in want.items():
        assert nisa.tensor_tensor(out, put(a), put(b), op).engine == "DVE"
        np.testing.assert_array_equal(get(out), golden, err_msg=op.__name__)
    nisa.tensor_scalar(out, put(a), nl.right_shift, 3, op1=nl.bitwise_and, operand1=5)
    np.testing.assert_array_equal(get(out), (a.view(unsigned) >> 3).view(dtype) & 5)
    nisa.tensor_scalar(out, put(a), nl.invert, None, op1=nl.bitwise_xor, operand1=put(b[:, :1]))
    np.testing.assert_array_equal(get(out), ~a ^ b[:, :1])
    nisa.tensor_scalar(out, put(b), nl.left_shift, 1, reverse0=True)
    np.testing.assert_array_equal(get(out), np.ones_like(b) << b)
    with pytest.raises(errors.DtypeError, match="wide"):
        nisa.tensor_tensor(new(4, 9, dtype="uint16" if dtype != "int16" else "int8"), put(a), put(b), nl.bitwise_or)


def test_tensor_scalar_orders(rng):
    a, v = noise(rng, 128, 12), noise(rng, 128, 1)
    out, x, vec = new(128, 12), put(a), put(v)
    cases = [
        (dict(op0=nl.subtract, operand0=1.0), a - 1),
        (dict(op0=nl.subtract, operand0=1.0, reverse0=True), 1 - a),
        (dict(op0=nl.multiply, operand0=vec, op1=nl.add, operand1=2.5), a * v + np.float32(2.5)),
        (dict(op0=nl.add, operand0=0.5, op1=nl.subtract, operand1=vec), (a + np.float32(0.5)) - v),
        (dict(op0=nl.add, operand0=0.5, op1=nl.subtract, operand1=vec, reverse1=True), v - (a + np.float32(0.5))),
        (dict(op0=nl.less, operand0=vec, op1=nl.multiply, operand1=3.0), np.where(a < v, 3, 0)),
        (dict(op0=nl.less, operand0=vec, reverse0=True), v < a),
        (dict(op0=nl.abs, operand0=None, op1=nl.minimum, operand1=0.25), np.minimum(abs(a), 0.25)),
        (dict(op0=nl.square, operand0=0), a * a),
        (dict(op0=nl.relu, operand0=0.0), np.maximum(a, 0)),
        (dict(op0=nl.reciprocal, operand0=None), 1 / a),
    ]
    for arguments, want in cases:
        nisa.tensor_scalar(out, x, **arguments)
        np.testing.assert_array_equal(get(out), np.asarray(want, np.float32), err_msg=str(arguments))


def test_tensor_scalar_engines(rng):
    a = abs(noise(rng, 8, 4)) + 1
    x, out = put(a), new(8, 4)
    assert nisa.tensor_scalar(out, x, nl.rsqrt, 0.0).engine == "POOL"
    np.testing.assert_allclose(get(out), a**-0.5, rtol=1e-6)
    scalar = nisa.engine.scalar
    assert nisa.tensor_scalar(out, x, nl.multiply, 2.0, op1=nl.add, operand1=1.0, engine=scalar).engine == "ACT"
    for arguments in (
        dict(op0=nl.maximum, operand0=1.0, engine=scalar),
        dict(op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=1.0, engine=scalar),
        dict(op0=nl.rsqrt, operand0=0.0, engine=nisa.engine.vector),
        dict(op0=nl.power, operand0=2.0),
        dict(op0=nl.add, operand0=1.0, operand1=1.0),
        dict(op0=nl.abs, operand0=1.0),
        dict(op0=nl.exp, operand0=None),
    ):
        with pytest.raises(errors.EngineError):
            nisa.tensor_scalar(out, x, **arguments)


def test_integers_pass_float32_in_tensor_scalar():
    out = new(1, 2, dtype="int32")
    nisa.tensor_scalar(out, put(np.array([[2**24 + 1, 7]], np.int32)), nl.add, 0.0)
    np.testing.assert_array_equal(get(out), [[2**24, 7]])


@pytest.mark.parametrize(
    ("values", "dtype", "want"),
    [
        ([0.5, 1.5, 2.5, -0.5, -1.5], "int8", [0, 2, 2, 0, -2]),  # to even
        ([300.0, -300.0, 127.4, np.inf, -np.inf], "int8", [127, -128, 127, 127, -128]),
        ([-1.0, 255.6, 1e9, 3.49, 3.51], "uint8", [0, 255, 255, 3, 4]),
        ([3e9, -3e9, 1.0, 2.5, -2.5], "int32", [2**31 - 1, -(2**31), 1, 2, -2]),
        ([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, 3.4e38, -0.0], "bfloat16", [1, 1 + 2**-6, 1 + 2**-7, np.inf, 0]),
    ],
)
def test_stores_round(values, dtype, want):
    out = new(1, 5, dtype=dtype)
    nisa.tensor_scalar(out, put(np.array([values], np.float32)), nl.multiply, 1.0)
    np.testing.assert_array_equal(get(out).astype(np.float64)[0], want)


@pytest.mark.parametrize(("reverse0", "reverse1"), [(a, b) for a in (False, True) for b in (False, True)])
def test_scalar_tensor_tensor(rng, reverse0, reverse1):
    a, v, b = noise(rng, 16, 5, 4), noise(rng, 16, 1), noise(rng, 16, 20)
    out = new(16, 20)
    nisa.scalar_tensor_tensor(
        out, put(a), nl.subtract, put(v), nl.multiply, put(b, buffer=nl.psum), reverse0=reverse0, reverse1=reverse1
    )
    a = a.reshape(16, 20)
    np.testing.assert_array_equal(get(out), ((v - a) if reverse0 else (a - v)) * b)
    nisa.scalar_tensor_tensor(out, put(a), nl.multiply, 2.0, nl.subtract, put(b), reverse1=reverse1)
    np.testing.assert_array_equal(get(out), b - 2 * a if reverse1 else 2 * a - b)


@pytest.mark.parametrize("engine", [nisa.engine.unknown, nisa.engine.vector, nisa.engine.scalar, nisa.engine.gpsimd])
def test_tensor_copy(rng, engine):
    x = put(np.array([[2**24 + 1, -7]], np.int32))
    same, cast = new(1, 2, dtype="int32"), new(1, 2)
    nisa.tensor_copy(same, x, engine=engine)
    nisa.tensor_copy(cast, x, engine=engine)
    np.testing.assert_array_equal(get(same), get(x))
    np.testing.assert_array_equal(get(cast), [[2.0**24, -7]])


def test_copy_keeps_every_bit_and_may_overlap(rng):
    x = put(np.zeros((4, 8), np.float32))
    x.view("uint32").write(rng.integers(0, 2**32, (4, 8)))
    before = get(x).tobytes()
    y = new(4, 2, 4)
    nisa.tensor_copy(y, x)
    assert get(y).tobytes() == before
    want = get(x.view("uint32"))[:, :6]
    nisa.tensor_copy(x[:, 2:], x[:, :6])
    np.testing.assert_array_equal(get(x.view("uint32"))[:, 2:], want)


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [(0.2, "float32", np.float32(0.2)), (0.2, "bfloat16", bf16(0.2)), (-3, "int8", -3), (255, "uint8", 255),
     (2**31 - 1, "int32", 2**31 - 1), (-np.inf, "float32", -np.inf), (2.0, "int32", 2), (True, "bool", 1)],
)  # fmt: skip
def test_memset(value, dtype, want):
    out = new(5, 3, dtype=dtype)
    nisa.memset(out[:, 1:], value, engine=nisa.engine.gpsimd)
    assert (out[:, 1:].array() == want).all()
    assert not out[:, :1].state().any()


def test_memset_refuses():
    for value, dtype in ((0.5, "int32"), (256, "uint8"), (1e39, "float32"), (2, "bool"), (np.ones(1), "float32")):
        with pytest.raises(errors.DtypeError):
            nisa.memset(new(1, 1, dtype=dtype), value)
    with pytest.raises(errors.EngineError):
        nisa.memset(new(1, 1), 0, engine=nisa.engine.scalar)


def test_reciprocal(rng):
    a = noise(rng, 128, 9) + 3
    out = new(128, 9, dtype="bfloat16", buffer=nl.psum)
    nisa.reciprocal(out, put(a))
    np.testing.assert_array_equal(get(out), (1 / a).astype(bf16))


def test_subnormals_flushed(core):
    core.options.flush = True
    x, out = put(np.array([[1e-39, 2.0, 1e-30]], np.float32)), new(1, 3)
    nisa.tensor_scalar(out, x, nl.multiply, 1e-9)
    np.testing.assert_array_equal(get(out), np.array([[0, 2e-9, 0]], np.float32))
    nisa.tensor_copy(out, x)
    assert get(out)[0, 0] == 0
    whole = new(1, 1, dtype="int32")
    nisa.tensor_copy(whole, put(np.array([[2**24 + 1]], np.int32)))
    assert get(whole)[0, 0] == 2**24 + 1  # integers pass as they are


# --- scans and reductions --------------------------------------------------------------------------------------------


def test_scan_in_two_pieces(rng):
    """The last state of one is the first of the next."""
    a, b = rng.random((2, 128, 40)).astype(np.float32)
    out = new(128, 40)
    nisa.tensor_tensor_scan(out[:, :20], put(a)[:, :20], put(b)[:, :20], 0.0, nl.multiply, nl.add)
    nisa.tensor_tensor_scan(out[:, 20:], put(a)[:, 20:], put(b)[:, 20:], out[:, 19], nl.multiply, nl.add)
    state, want = np.zeros(128, np.float32), []
    for i in range(40):
        state = a[:, i] * state + b[:, i]
        want.append(state)
    np.testing.assert_array_equal(get(out), np.stack(want, axis=1))


@pytest.mark.parametrize(("reverse0", "reverse1"), [(a, b) for a in (False, True) for b in (False, True)])
def test_scan_order(rng, reverse0, reverse1):
    a, b = noise(rng, 4, 6), noise(rng, 4, 6)
    out = new(4, 2, 3, dtype="bfloat16")
    nisa.tensor_tensor_scan(
        out, put(a), put(b, buffer=nl.psum), 0.5, nl.subtract, nl.subtract, reverse0=reverse0, reverse1=reverse1
    )
    state, want = np.full(4, 0.5, np.float32), []
    for i in range(6):
        between = state - a[:, i] if reverse0 else a[:, i] - state
        state = b[:, i] - between if reverse1 else between - b[:, i]
        want.append(state)  # float32: only what is stored is rounded
    np.testing.assert_array_equal(get(out).reshape(4, 6), np.stack(want, axis=1).astype(bf16))


@pytest.mark.parametrize(
    ("op", "f"),
    [(nl.add, np.sum), (nl.maximum, np.max), (nl.minimum, np.min), (nl.multiply, np.prod), (nl.max, np.max)],
)
def test_tensor_reduce(rng, op, f):
    a = noise(rng, 32, 3, 4, 5)
    x = put(a, buffer=nl.psum)
    for axis, shape in ((3, (32, 3, 4)), ([2, 3], (32, 3)), ((1, 2, 3), (32, 1))):
        out = new(*shape)
        nisa.tensor_reduce(out, op, x, axis, negate=axis == 3)
        want = f(a.astype(np.float64), axis=tuple(np.atleast_1d(axis))).reshape(shape)
        np.testing.assert_allclose(get(out), -want if axis == 3 else want, rtol=1e-4, atol=1e-5)
    kept = new(32, 3, 1, 1)
    nisa.tensor_reduce(kept, op, x, (2, 3), keepdims=True)
    np.testing.assert_array_equal(get(kept).reshape(32, 3), f(a, axis=(2, 3)).astype(np.float32))


def test_tensor_reduce_of_bits_and_truth(rng):
    a = rng.integers(-(2**31), 2**31, (8, 5)).astype(np.int32)
    out = new(8, 1, dtype="int32")
    for op, f in ((nl.bitwise_and, np.bitwise_and), (nl.bitwise_or, np.bitwise_or), (nl.bitwise_xor, np.bitwise_xor)):
        nisa.tensor_reduce(out, op, put(a), 1)
        np.testing.assert_array_equal(get(out)[:, 0], f.reduce(a, axis=1))
    b = (a % 3 == 0).astype(np.float32) * 7
    truth = new(8, 1)
    for op, f in ((nl.logical_and, np.all), (nl.logical_or, np.any)):
        nisa.tensor_reduce(truth, op, put(b), 1)
        np.testing.assert_array_equal(get(truth)[:, 0], f(b, axis=1))
    for arguments, error in (((nl.equal, put(b), 1), errors.EngineError), ((nl.add, put(b), 0), errors.ShapeError)):
        with pytest.raises(error):
            nisa.tensor_reduce(truth, *arguments)
    with pytest.raises(errors.EngineError, match="negate"):
        nisa.tensor_reduce(out, nl.bitwise_or, put(a), 1, negate=True)


def test_tensor_reduce_of_an_inner_axis_only(rng):
    with pytest.raises(errors.ShapeError, match="last axes"):
        nisa.tensor_reduce(new(4, 5), nl.add, put(noise(rng, 4, 3, 5)), 1)


def test_tensor_scalar_reduce(rng):
    a, v = noise(rng, 16, 3, 4), noise(rng, 16, 1)
    out, total = new(16, 12, dtype="bfloat16"), new(16, 1)
    nisa.tensor_scalar_reduce(out, put(a), nl.multiply, put(v), nl.add, total)
    flat = a.reshape(16, 12) * v
    np.testing.assert_array_equal(get(out), flat.astype(bf16))
    np.testing.assert_allclose(get(total)[:, 0], flat.astype(np.float64).sum(1), rtol=1e-5, atol=1e-6)
    x = put(flat)
    nisa.tensor_scalar_reduce(x, x, nl.subtract, 1.0, nl.max, total, reduce_res_negate=True)  # in place
    np.testing.assert_array_equal(get(total)[:, 0], -(flat - 1).max(1))
    np.testing.assert_array_equal(get(x), flat - 1)


def test_vector_registers_go_on(rng):
    a = noise(rng, 3, 8, 10)
    out, total = new(8, 10), new(8, 1)
    step = lambda i, cmd, **more: nisa.tensor_scalar_reduce(
        out, put(a[i]), nl.add, 0.0, nl.maximum, reduce_cmd=cmd, **more
    )
    with pytest.raises(errors.UninitializedError, match="reset_reduce"):
        step(0, CMD.reduce)
    first = step(0, CMD.reset_reduce)
    second = step(1, CMD.reduce)
    third = step(2, CMD.reduce, reduce_res=total)
    np.testing.assert_array_equal(get(total)[:, 0], a.max((0, 2)))
    assert first.index in second.after
    assert second.index in third.after
    step(0, CMD.load_reduce, reduce_init=100.0, reduce_res=total)
    assert (get(total) == 100).all()
    vector = put(a[1, :, :1])
    step(0, CMD.load_reduce, reduce_init=vector, reduce_res=total)
    np.testing.assert_array_equal(get(total), np.maximum(a[0].max(1, keepdims=True), a[1, :, :1]))
    for arguments in (dict(cmd=CMD.load_reduce), dict(cmd=CMD.reset_reduce, reduce_init=1.0), dict(cmd=CMD.idle)):
        with pytest.raises(errors.EngineError):
            step(0, **arguments)


@pytest.mark.parametrize(
    ("op", "f"), [(nl.add, np.add), (nl.multiply, np.multiply), (nl.max, np.maximum), (nl.minimum, np.minimum)]
)
def test_tensor_scalar_cumulative(rng, op, f):
    a, v, start = noise(rng, 128, 24), noise(rng, 128, 1), noise(rng, 128, 1)
    out = new(128, 24)
    nisa.tensor_scalar_cumulative(out, put(a), nl.add, op, put(v))
    first = f.accumulate(a + v, axis=1)
    np.testing.assert_array_equal(get(out), first)
    nisa.tensor_scalar_cumulative(out, put(a), nl.add, op, 0.0, reduce_cmd=CMD.reduce)  # from the last state
    np.testing.assert_array_equal(get(out), f.accumulate(np.hstack((first[:, -1:], a)), axis=1)[:, 1:])
    nisa.tensor_scalar_cumulative(out, put(a), nl.multiply, op, 2.0, put(start), reduce_cmd=CMD.load_reduce)
    np.testing.assert_array_equal(get(out), f.accumulate(np.hstack((start, 2 * a)), axis=1)[:, 1:])


def test_tensor_scalar_cumulative_subtracts_the_state_from_the_element():
    out = new(1, 4)
    nisa.tensor_scalar_cumulative(out, put(np.array([[5, 7, 1, 2]], np.float32)), nl.add, nl.subtract, 0.0)
    np.testing.assert_array_equal(get(out), [[5, 2, -1, 3]])
    with pytest.raises(errors.DtypeError):
        nisa.tensor_scalar_cumulative(new(1, 4, dtype="int32"), out, nl.add, nl.add, 0.0)


# --- scalar engine ---------------------------------------------------------------------------------------------------


def _erf(x):
    from math import erf

    return np.vectorize(erf)(x)


ACTIVATIONS = {
    nl.copy: lambda x: x,
    nl.square: lambda x: x * x,
    nl.sigmoid: lambda x: 1 / (1 + np.exp(-x)),
    nl.relu: lambda x: np.where(x > 0, x, 0),
    nl.gelu: lambda x: x * (1 + _erf(x / 2**0.5)) / 2,
    nl.gelu_apprx_tanh: lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x))),
    nl.gelu_apprx_sigmoid: lambda x: x / (1 + np.exp(-1.702 * x)),
    nl.silu: lambda x: x / (1 + np.exp(-x)),
    nl.tanh: np.tanh,
    nl.softplus: lambda x: np.log(1 + np.exp(x)),
    nl.mish: lambda x: x * np.tanh(np.log(1 + np.exp(x))),
    nl.erf: _erf,
    nl.exp: np.exp,
    nl.sign: np.sign,
    nl.abs: abs,
    nl.log: np.log,
    nl.sqrt: np.sqrt,
    nl.rsqrt: lambda x: x**-0.5,
    nl.reciprocal: lambda x: 1 / x,
    nl.sin: np.sin,
    nl.arctan: np.arctan,
}
DERIVATIVES = {  # of which
    nl.gelu_dx: nl.gelu,
    nl.gelu_apprx_sigmoid_dx: nl.gelu_apprx_sigmoid,
    nl.silu_dx: nl.silu,
    nl.erf_dx: nl.erf,
}
POSITIVE = (nl.log, nl.sqrt, nl.rsqrt)


@pytest.mark.parametrize("op", [*ACTIVATIONS, *DERIVATIVES], ids=lambda op: op.__name__)
def test_activation(rng, op):
    a = noise(rng, 32, 30)
    a = abs(a) + np.float32(0.01) if op in POSITIVE else np.clip(a, -1.5, 1.5)
    out = new(32, 30)
    assert nisa.activation(out, op, put(a)).engine == "ACT"
    x = a.astype(np.float64)
    if op in DERIVATIVES:
        f, h = ACTIVATIONS[DERIVATIVES[op]], 1e-5
        want = (f(x + h) - f(x - h)) / (2 * h)
    else:
        want = ACTIVATIONS[op](x)
    np.testing.assert_allclose(get(out), want, rtol=2e-6, atol=1e-6)


def test_activation_scale_and_bias(rng):
    b, c, s = noise(rng, 128, 2, 8), noise(rng, 128, 1), noise(rng, 128, 1)
    out = new(128, 16, dtype="bfloat16", buffer=nl.psum)
    nisa.activation(out, nl.square, put(b), bias=put(c), scale=2.0)
    b = b.reshape(128, 16)
    np.testing.assert_array_equal(get(out), np.square((b * 2 + c).astype(np.float64)).astype(np.float32).astype(bf16))
    nisa.activation(out, nl.exp, put(b), bias=put(c, "bfloat16"), scale=put(s))
    np.testing.assert_array_equal(get(out), np.exp(b * s + c.astype(bf16).astype(np.float32)).astype(bf16))
    nisa.activation(out, nl.exp, put(b), bias=-0.5, scale=-1.0)
    np.testing.assert_array_equal(get(out), np.exp(-b - np.float32(0.5)).astype(bf16))


def test_activation_sums(core, rng):
    a = noise(rng, 3, 16, 12)
    out, total = new(16, 12, dtype="bfloat16"), new(16, 1)
    nisa.activation_reduce(out, nl.exp, put(a[0]), nl.add, total, bias=0.0)
    want = np.exp(a.astype(np.float64)).sum(2)[:, :, None]
    np.testing.assert_allclose(get(total), want[0], rtol=1e-5)  # of the float32 results, before rounding
    nisa.activation(out, nl.exp, put(a[0]), reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
    nisa.activation(out, nl.exp, put(a[1]))  # idle: the registers stay
    nisa.activation(out, nl.exp, put(a[2]), reduce_op=nl.add, reduce_cmd=CMD.reduce, reduce_res=total)
    np.testing.assert_allclose(get(total), want[0] + want[2], rtol=1e-5)
    summed = core.instructions[-1]
    other = new(16, 12)
    taken = nisa.activation(other, nl.copy, put(a[1]), reduce_cmd=CMD.idle, reduce_res=new(16, 1))
    assert taken.after == (summed.index,)
    cleared = nisa.activation(new(16, 12), nl.copy, put(a[1]), reduce_cmd=CMD.reset, reduce_res=total)
    assert taken.index in cleared.after
    assert (get(total) == 0).all()
    for more in (dict(reduce_cmd=CMD.load_reduce), dict(reduce_cmd=CMD.reduce), dict(reduce_cmd="reduce")):
        with pytest.raises(errors.EngineError):
            nisa.activation(out, nl.exp, put(a[0]), **more)
    with pytest.raises(errors.UninitializedError):
        nisa.activation(out[:8], nl.exp, put(np.vstack([a[0]] * 5))[64:72], reduce_op=nl.add, reduce_cmd=CMD.reduce)


def test_activation_in_place_and_shifted(rng):
    a = noise(rng, 4, 10)
    x, total = put(a), new(4, 1)
    nisa.activation_reduce(x[:, 1:], nl.copy, x[:, :9], nl.add, total)
    np.testing.assert_array_equal(get(x)[:, 1:], a[:, :9])
    np.testing.assert_allclose(get(total)[:, 0], a[:, :9].sum(1), rtol=1e-6)


def test_activation_ranges(core):
    x = put(np.array([[-3.0, 0.5]], np.float32))
    nisa.activation(new(1, 2), nl.exp, x, scale=2.0)
    nisa.activation(new(1, 2), nl.exp, x, bias=1.0)
    assert core.ranges["exp"] == (-6.0, 1.5)
    core.options.exp_limit = 0.0
    with pytest.raises(errors.RangeError, match="limit"):
        nisa.activation(new(1, 2), nl.exp, x)
    for op, value in ((nl.log, 0.0), (nl.sin, 4.0), (nl.rsqrt, -1.0), (nl.reciprocal, 1e-20), (nl.arctan, -2.0)):
        with pytest.raises(errors.RangeError, match=op.__name__):
            nisa.activation(new(1, 1), op, put(np.array([[value]], np.float32)))


def test_activation_perturbed(core, rng):
    core.options.perturb = 2.0**-12
    a = noise(rng, 16, 64)
    out = new(16, 64)
    made = nisa.activation(out, nl.exp, put(a))
    first = get(out)
    assert 1e-5 < np.abs(first / np.exp(a) - 1).max() <= 2.0**-12 + 1e-6
    made.run()
    np.testing.assert_array_equal(get(out), first)  # done again, the same


# --- selections and what moves partitions ----------------------------------------------------------------------------


def test_affine_select_lower_triangle(rng):
    """Kept where column < partition: partition - column > 0."""
    a = noise(rng, 128, 128)
    out = new(128, 128)
    nisa.affine_select(
        out, pattern=[[-1, 128]], channel_multiplier=1, on_true_tile=put(a), on_false_value=F32_MIN, cmp_op=nl.greater
    )
    want = a.copy()
    want[np.triu_indices(128)] = F32_MIN
    np.testing.assert_array_equal(get(out), want)


@pytest.mark.parametrize(
    ("op", "f"),
    [(None, np.equal), (nl.not_equal, np.not_equal), (nl.less, np.less), (nl.less_equal, np.less_equal),
     (nl.greater, np.greater), (nl.greater_equal, np.greater_equal)],
)  # fmt: skip
def test_affine_select_compares_with_zero(rng, op, f):
    a = noise(rng, 64, 6, 5)
    out = new(64, 30, dtype="bfloat16")
    more = {} if op is None else {"cmp_op": op}
    nisa.affine_select(out, [[3, 6], [-2, 5]], -1, put(a), -1.5, offset=7, **more)
    value = 7 - np.arange(64)[:, None, None] + 3 * np.arange(6)[:, None] - 2 * np.arange(5)
    np.testing.assert_array_equal(get(out).reshape(64, 6, 5), np.where(f(value, 0), a, -1.5).astype(bf16))


def test_affine_select_counts_partitions_from_the_tile(rng):
    a = noise(rng, 128, 4)
    x, out = put(a), new(32, 4)
    nisa.affine_select(out, [[0, 4]], 1, x[64:96], 0.0, cmp_op=nl.less, offset=-2)
    np.testing.assert_array_equal(get(out), np.where(np.arange(32)[:, None] < 2, a[64:96], 0))


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_iota(dtype):
    cases = [
        ((1, 512), dict(pattern=[[1, 512]]), np.arange(512)[None]),
        ((128, 1), dict(pattern=[[0, 1]], channel_multiplier=1), np.arange(128)[:, None]),
        ((1, 512), dict(pattern=[[-1, 512]]), -np.arange(512)[None]),
        ((128, 1), dict(pattern=[[0, 1]], offset=5, channel_multiplier=2), np.arange(5, 260, 2)[:, None]),
        ((128, 20), dict(pattern=[[1, 20]], channel_multiplier=1), np.arange(128)[:, None] + np.arange(20)),
        ((3, 6), dict(pattern=[[10, 2], [1, 3]]), np.tile([0, 1, 2, 10, 11, 12], (3, 1))),
    ]
    for shape, arguments, want in cases:
        out = new(*shape, dtype=dtype)
        assert nisa.iota(out, **arguments).engine == "POOL"
        np.testing.assert_array_equal(get(out), want)


@pytest.mark.parametrize("reverse", [False, True])
def test_copy_predicated(rng, reverse):
    a, b = noise(rng, 32, 2, 6), noise(rng, 32, 12)
    chosen = rng.integers(0, 3, (32, 12)).astype(np.uint8)
    out = put(b)
    nisa.tensor_copy_predicated(out, put(a, buffer=nl.psum), put(chosen), reverse_pred=reverse)
    mask = (chosen == 0) if reverse else (chosen != 0)
    np.testing.assert_array_equal(get(out), np.where(mask, a.reshape(32, 12), b))
    fresh = new(32, 12)
    nisa.tensor_copy_predicated(fresh, 2.5, put(chosen), reverse_pred=reverse)
    assert (fresh.array()[mask] == 2.5).all()
    np.testing.assert_array_equal(fresh.state()[..., 0] != memory.NEVER, mask)  # the rest is as unwritten as before
    with pytest.raises(errors.DtypeError, match="cast"):
        nisa.tensor_copy_predicated(new(32, 12, dtype="bfloat16"), put(b), put(chosen))
    with pytest.raises(errors.DtypeError, match="predicate"):
        nisa.tensor_copy_predicated(out, put(b), put(b))


@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce(rng, reverse):
    a, v = noise(rng, 128, 20), noise(rng, 128, 1)
    chosen = rng.integers(0, 2, (128, 20)).astype(np.uint8)
    out, most = new(128, 20), new(128, 1)
    mask = chosen == 0 if reverse else chosen != 0
    nisa.select_reduce(out, put(chosen), put(a), F32_MIN, reverse_pred=reverse)
    np.testing.assert_array_equal(get(out), np.where(mask, a, F32_MIN))
    nisa.select_reduce(out, put(chosen), put(a), put(v), most, CMD.reset_reduce, nl.max, reverse_pred=reverse)
    want = np.where(mask, a, v)
    np.testing.assert_array_equal(get(out), want)
    np.testing.assert_array_equal(get(most)[:, 0], want.max(1))
    nisa.select_reduce(out, put(chosen), put(a), 0.0)  # idle: the registers are unknown after it
    with pytest.raises(errors.UninitializedError):
        nisa.select_reduce(out, put(chosen), put(a), 0.0, most, CMD.reduce)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_range_select(rng, dtype):
    a = noise(rng, 128, 50)
    low, high = rng.integers(0, 60, (2, 128, 1)).astype(np.float32)
    out, most = new(128, 50, dtype=dtype), new(128, 1)
    nisa.range_select(out, put(a), nl.greater_equal, nl.less, put(low), put(high), reduce_res=most, range_start=16)
    j = 16 + np.arange(50)
    want = np.where((j >= low) & (j < high), a, F32_MIN)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(get(out), want.astype(get(out).dtype))
    np.testing.assert_array_equal(get(most)[:, 0], want.max(1))


def test_range_select_in_pieces(rng):
    a = noise(rng, 3, 128, 50)
    low, high = put(np.full((128, 1), 20, np.float32)), put(np.full((128, 1), 120, np.float32))
    out, most, want = new(128, 50), new(128, 1), np.full(128, F32_MIN)
    for i in range(3):
        cmd, res = (CMD.reduce if i else CMD.reset_reduce), (most if i == 2 else None)
        nisa.range_select(out, put(a[i]), nl.greater_equal, nl.less, low, high, cmd, res, range_start=50 * i)
        j = 50 * i + np.arange(50)
        want = np.maximum(want, np.where((j >= 20) & (j < 120), a[i], F32_MIN).max(1))
    np.testing.assert_array_equal(get(most)[:, 0], want)
    for more, error in (
        (dict(on_false_value=0.0), errors.EngineError),
        (dict(range_start=2**24), errors.ShapeError),
        (dict(reduce_op=nl.add), errors.EngineError),
    ):
        with pytest.raises(error):
            nisa.range_select(out, put(a[0]), nl.equal, nl.less, low, high, **more)


def test_stream_shuffle(rng):
    a = noise(rng, 128, 7)
    x, out = put(a), new(128, 7)
    nisa.nc_stream_shuffle(out, x, [(i - 1) % 32 for i in range(32)])
    want = np.concatenate([np.roll(part, 1, axis=0) for part in a.reshape(4, 32, 7)])
    np.testing.assert_array_equal(get(out), want)
    nisa.nc_stream_shuffle(x[:32], x[:32], [(i - 1) % 32 for i in range(32)])  # in place
    np.testing.assert_array_equal(get(x)[:32], want[:32])
    wide = new(32, 7)
    nisa.nc_stream_shuffle(wide, x[:1], [0] * 32)
    np.testing.assert_array_equal(get(wide), np.repeat(want[:1], 32, axis=0))
    nisa.nc_stream_shuffle(wide, x[64:96], [255] * 31 + [3])
    np.testing.assert_array_equal(get(wide)[30:], [want[0], a[67]])
    for mask in ([0] * 31, [32] + [0] * 31):
        with pytest.raises(errors.ShapeError):
            nisa.nc_stream_shuffle(wide, x[:32], mask)
    with pytest.raises(errors.ShapeError, match="partition 9"):
        nisa.nc_stream_shuffle(wide, x[:1], [9] * 32)
    with pytest.raises(errors.PartitionError):
        nisa.nc_stream_shuffle(new(128, 7)[:64], x[32:64], [0] * 32)


# --- statistics, the largest eight, gathers --------------------------------------------------------------------------


def test_bn(rng):
    a = 100 * rng.random((128, 700)).astype(np.float32)
    stats, out = new(128, 12), new(128, 2)
    nisa.bn_stats(stats[:, :6], put(a)[:, :512])
    nisa.bn_stats(stats[:, 6:], put(a)[:, 512:])
    even = a[:, 512::2].astype(np.float64)
    np.testing.assert_allclose(
        get(stats)[:, 6:9], np.stack((np.full(128, 94), even.mean(1), even.var(1) * 94), 1), rtol=1e-4
    )
    nisa.bn_aggr(out, stats)
    np.testing.assert_allclose(get(out), np.stack((a.mean(1), a.astype(np.float64).var(1)), 1), rtol=1e-4)
    with pytest.raises(errors.ShapeError, match="512"):
        nisa.bn_stats(stats[:, :6], put(a))


def test_largest_eight(rng):
    a = rng.permutation(32 * 40).reshape(32, 40).astype(np.float32)
    x, most, at, out = put(a), new(32, 8), new(32, 8, dtype="uint32"), new(32, 40)
    nisa.max8(most, x)
    np.testing.assert_array_equal(get(most), -np.sort(-a, axis=1)[:, :8])
    nisa.nc_find_index8(at, x, most)
    np.testing.assert_array_equal(get(at), np.argsort(-a, axis=1)[:, :8])
    nisa.nc_match_replace8(out, x, most, -np.inf, dst_idx=at)
    np.testing.assert_array_equal(get(at), np.argsort(-a, axis=1)[:, :8])
    want = a.copy()
    np.put_along_axis(want, np.argsort(-a, axis=1)[:, :8], -np.inf, axis=1)
    np.testing.assert_array_equal(get(out), want)


def test_equal_values_of_the_eight():
    """Finding pairs them with their places upward, replacing downward; what is missing is all ones."""
    data = put(np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32))
    vals = put(np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32))
    at, out = new(1, 8, dtype="uint32"), new(1, 11)
    nisa.nc_find_index8(at, data, vals)
    np.testing.assert_array_equal(get(at), [[2, 4, 5, 6, 7, 8, 9, 10]])
    nisa.nc_match_replace8(out, data, vals, 0.0, dst_idx=at)
    np.testing.assert_array_equal(get(at), [[2, 10, 9, 8, 7, 6, 5, 4]])
    np.testing.assert_array_equal(get(out), [[1, 2, 0, 4] + [0] * 7])
    short = new(1, 8, dtype="uint16")
    other = put(np.array([[5, 1, 1, 1, 1, 1, 1, 1]], np.float32))
    nisa.nc_find_index8(short, data, other)
    np.testing.assert_array_equal(get(short), [[0xFFFF, 0] + [0xFFFF] * 6])
    with pytest.raises(errors.UnsupportedError):
        nisa.nc_match_replace8(out, data, other, 0.0, dst_idx=at)
    with pytest.raises(errors.ShapeError):
        nisa.max8(new(1, 8), data[:, :7])


@pytest.mark.parametrize(("op", "f"), [(nl.add, np.sum), (nl.max, np.max), (nl.maximum, np.max), (nl.average, np.mean)])
def test_partition_reduce(rng, op, f):
    a = noise(rng, 128, 6, 4)
    out = new(1, 6, 4)
    assert nisa.tensor_partition_reduce(out, op, put(a)).engine == "POOL"
    np.testing.assert_allclose(get(out)[0], f(a.astype(np.float64), axis=0), rtol=1e-4, atol=1e-5)


def test_partition_reduce_of_bits(rng):
    a = rng.integers(0, 256, (50, 6)).astype(np.uint8)
    out = new(1, 6, dtype="uint8")
    nisa.tensor_partition_reduce(out, nl.bitwise_or, put(a[:3]))
    np.testing.assert_array_equal(get(out)[0], np.bitwise_or.reduce(a[:3]))
    with pytest.raises(errors.EngineError):
        nisa.tensor_partition_reduce(out, nl.multiply, put(a))


@pytest.mark.parametrize(("each", "valid"), [(1, None), (4, 64), (2, 37)])
def test_local_gather(rng, each, valid):
    """16 partitions read their indices down the partitions first, and share them."""
    a = noise(rng, 128, 80, each)
    place = rng.integers(0, 80, (128, 4)).astype(np.uint16)
    n = valid or 64
    out = new(128, n, each)
    nisa.local_gather(out, put(a), put(place * np.uint16(each)), num_elem_per_idx=each, num_valid_indices=valid)
    for p in (0, 15, 16, 127):
        own = place[p // 16 * 16 : p // 16 * 16 + 16]
        order = [own[i % 16, i // 16] for i in range(n)]
        np.testing.assert_array_equal(get(out)[p], a[p, order])
    with pytest.raises(errors.OutOfBoundsError):
        nisa.local_gather(new(128, 64), put(a[:, :3, 0]), put(place + np.uint16(3)))


def test_gather_in_each_partition(rng):
    a = noise(rng, 20, 3, 30)
    at = rng.integers(0, 90, (20, 12)).astype(np.uint32)
    out = new(20, 3, 4)
    nisa.nc_n_gather(out, put(a), put(at))
    np.testing.assert_array_equal(get(out).reshape(20, 12), np.take_along_axis(a.reshape(20, 90), at.astype(int), 1))
    with pytest.raises(errors.OutOfBoundsError, match="index 90"):
        nisa.nc_n_gather(out, put(a), put(np.full((20, 12), 90, np.uint32)))


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_sequence_bounds(dtype):
    out = new(1, 2, 9, dtype=dtype)
    nisa.sequence_bounds(out, put(np.array([[0, 1, 1, 2, 2, 2, 0, 3, 3]]), dtype))
    np.testing.assert_array_equal(get(out)[0], [[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]])


def test_nonzero_with_count():
    x = np.zeros((32, 8), np.float32)
    x[0, [1, 2, 5]] = x[16, 7] = x[3, 3] = 2
    out = put(np.full((32, 9), -5, np.int32))
    nisa.nonzero_with_count(out, put(x), index_offset=16)
    want = np.full((32, 9), -5)
    want[0], want[16] = [17, 18, 21, -1, -1, -1, -1, -1, 3], [23, *[-1] * 7, 1]
    np.testing.assert_array_equal(get(out), want)


# --- DMA, registers, cores -------------------------------------------------------------------------------------------


def test_dma_copy(rng):
    a = noise(rng, 6, 40)
    source, back = put(a, buffer=nl.shared_hbm), new(3, 80, buffer=nl.shared_hbm)
    tile, narrow = new(40, 6), new(6, 4, 10, dtype="bfloat16")
    nisa.dma_copy(tile, source.ap([[1, 40], [40, 6]]))
    np.testing.assert_array_equal(get(tile), a.T)
    nisa.dma_copy(narrow, source)
    np.testing.assert_array_equal(get(narrow).reshape(6, 40), a.astype(bf16))
    nisa.dma_copy(back, source, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)
    np.testing.assert_array_equal(get(back), a.reshape(3, 80))
    nisa.dma_copy(tile[7:9], tile[1:3], oob_mode=nisa.oob_mode.skip)  # no rule of where partitions start
    np.testing.assert_array_equal(get(tile)[7:9], a.T[1:3])


def test_dma_modes_by_number():
    x = put(np.ones((1, 2), np.float32), buffer=nl.shared_hbm)
    nisa.dma_copy(new(1, 2), x, dge_mode=2)
    with pytest.raises(errors.DtypeError, match="hwdge"):
        nisa.dma_copy(new(1, 2, dtype="bfloat16"), x, dge_mode=2)
    with pytest.raises(errors.EngineError):
        nisa.dma_copy(new(1, 2), x, dge_mode=4)


def test_dma_casts_through_float32():
    out = new(1, 2, dtype="int32", buffer=nl.shared_hbm)
    nisa.dma_copy(out, put(np.array([[2.5, 3e10]], np.float32), buffer=nl.shared_hbm))
    np.testing.assert_array_equal(get(out), [[2, 2**31 - 1]])
    wide = new(1, 1, dtype="uint32")
    nisa.dma_copy(wide, put(np.array([[2**24 + 1]], np.int32), buffer=nl.shared_hbm))
    assert get(wide)[0, 0] == 2**24


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.shared_hbm])
@pytest.mark.parametrize(
    ("shape", "axes"), [((16, 40), (1, 0)), ((8, 4, 16), (2, 1, 0)), ((4, 3, 8, 16), (3, 1, 2, 0))]
)
def test_dma_transpose(rng, buffer, shape, axes):
    a = noise(rng, *shape, dtype=np.float16)
    want = a.transpose(axes)
    out = new(*want.shape, dtype="float16")
    for more in ({}, {"axes": axes}, {"dge_mode": nisa.dge_mode.hwdge}):
        nisa.dma_transpose(out, put(a, buffer=buffer), **more)
        np.testing.assert_array_equal(get(out), want)


def test_dma_transpose_refuses(rng):
    a = put(noise(rng, 20, 40), buffer=nl.shared_hbm)
    out = new(40, 20)
    for more, error in (
        (dict(axes=(0, 1)), errors.ShapeError),
        (dict(dge_mode=nisa.dge_mode.hwdge), errors.ShapeError),
        (dict(dge_mode=nisa.dge_mode.swdge), errors.EngineError),
        (dict(oob_mode=nisa.oob_mode.skip), errors.EngineError),
    ):
        with pytest.raises(error):
            nisa.dma_transpose(out, a, **more)
    with pytest.raises(errors.DtypeError):
        nisa.dma_transpose(new(40, 20, dtype="float16"), a)
    with pytest.raises(errors.ShapeError):
        nisa.dma_transpose(new(20, 40), a)


def test_dma_compute(rng):
    a = [noise(rng, 8, 6), noise(rng, 6, 8, dtype=bf16), noise(rng, 48, 1)]
    out = new(8, 6, dtype="float16", buffer=nl.shared_hbm)
    nisa.dma_compute(out, [put(a[0]), put(a[1], buffer=nl.shared_hbm), put(a[2])], nl.add)
    want = sum(x.astype(np.float32).reshape(8, 6) for x in a)
    np.testing.assert_array_equal(get(out), want.astype(np.float16))


def test_registers(rng):
    index = put(np.array([[2]], np.int32))
    a, b = nisa.register_alloc(), nisa.register_alloc(7)
    with pytest.raises(errors.UninitializedError):
        nisa.register_move(b, a)
    nisa.register_load(a, index)
    nisa.register_move(b, a)
    x, row = put(noise(rng, 4, 6), buffer=nl.shared_hbm), new(1, 6)
    loaded = nisa.dma_copy(row, x.ap([[6, 1], [1, 6]], scalar_offset=b))
    np.testing.assert_array_equal(get(row), get(x)[2:3])
    assert any(storage is index.storage for storage, _ in loaded.reads)  # the transfer depends on it
    out = new(1, 1, dtype="int32")
    nisa.register_store(out, b)
    assert get(out)[0, 0] == 2
    nisa.register_move(b, -3)
    nisa.register_store(out, b)
    assert get(out)[0, 0] == -3
    for call in (lambda: nisa.register_move(b, 1.5), lambda: nisa.register_load(b, x), lambda: int(b)):
        with pytest.raises((errors.ShapeError, TypeError)):
            call()


def test_cores_meet(core, rng):
    a = noise(rng, 2, 8, 4)
    machine.enter(None)

    def kernel(x):
        me = nl.program_id(0)
        mine, theirs, whole = new(8, 4), new(8, 4), new(16, 4, buffer=nl.shared_hbm)
        nisa.dma_copy(mine, x[me])
        nisa.sendrecv(mine, theirs, 1 - me, 1 - me, pipe_id=0)
        nisa.tensor_tensor(theirs, mine, theirs, nl.subtract)
        nisa.dma_copy(whole[8 * me : 8 * me + 8], theirs)
        wrote = machine.current().instructions[-1]
        barrier = nisa.core_barrier(whole, (0, 1))
        assert wrote.index in barrier.after
        turned = new(8, 4)
        read = nisa.dma_copy(turned, whole[8 - 8 * me : 16 - 8 * me])  # what the other core wrote
        assert barrier.index in read.after
        out = nl.ndarray((2, 8, 4), "float32", nl.shared_hbm)
        nisa.dma_copy(out[me], turned)
        return out

    out = launch.simulate(launch.jit(kernel)[2])(a)
    np.testing.assert_array_equal(out, np.stack((a[1] - a[0], a[0] - a[1])))


def test_one_core_has_no_other():
    x = put(np.ones((4, 4), np.float32))
    for call in (
        lambda: nisa.core_barrier(new(4, 4, buffer=nl.shared_hbm), (0, 1)),
        lambda: nisa.sendrecv(x, x, 1, 1, 0),
    ):
        with pytest.raises(errors.HazardError, match=r"kernel\[2\]"):
            call()


def test_depends_on():
    a, b = new(1, 4), new(1, 4)
    first, second = nisa.memset(a, 0), nisa.memset(b, 0)
    assert second.after == ()
    assert second.depends_on(first) is second
    assert second.after == (first.index,)
    with pytest.raises(errors.HazardError):
        first.depends_on(second)


def test_instructions_do_again_what_they_did(core, rng):
    """On memory as freshly allocated, in the same order: the order fuzzing rests on that."""
    a, b = put(noise(rng, 32, 16)), put(noise(rng, 32, 32))
    given = {id(x.storage): (x.storage.data.copy(), x.storage.state.copy()) for x in (a, b)}
    p, s, total, out = new(32, 16, buffer=nl.psum), new(32, 16), new(32, 1), new(32, 16)
    nisa.nc_matmul(p, b, a)
    nisa.nc_matmul(p, b, a)
    nisa.activation(s, nl.tanh, p, reduce_op=nl.add, reduce_cmd=CMD.reset_reduce)
    nisa.activation(s, nl.exp, s, reduce_op=nl.add, reduce_cmd=CMD.reduce, reduce_res=total)
    nisa.tensor_scalar_reduce(out, s, nl.multiply, total, nl.maximum, total)
    nisa.tensor_tensor_scan(out, out, p, total, nl.multiply, nl.subtract)
    want = get(out)
    for storage in (*core.storages, *core.registers.values()):
        storage.forget()
        if id(storage) in given:
            storage.data[:], storage.state[:] = given[id(storage)]
    for made in core.instructions:
        made.run()
    np.testing.assert_array_equal(get(out), want)


# --- costs -----------------------------------------------------------------------------------------------------------


def cycles(made):
    return made.cycles


@pytest.mark.parametrize(
    ("k", "m", "n", "dtype", "more", "want"),
    [
        (128, 128, 512, "bfloat16", {}, 512),
        (128, 128, 128, "bfloat16", {}, 128),
        (64, 64, 32, "bfloat16", {}, 64),
        (64, 16, 32, "bfloat16", {}, 32),
        (128, 128, 512, "float32", {}, 2048),
        (128, 128, 512, "tfloat32", {}, 512),
        (128, 128, 128, "float32", {"is_moving_onezero": True}, 256),
        (128, 128, 128, "float32", {"is_stationary_onezero": True}, 256),
        (128, 128, 128, "bfloat16", {"is_moving_onezero": True}, 128),
        (128, 96, 128, "float32", {"is_transpose": True}, 256),
    ],
)
def test_cost_of_matmul(k, m, n, dtype, more, want):
    eye = np.eye(k, n, dtype=np.float32)
    p = new(m, n, dtype=dtype if "is_transpose" in more else "float32", buffer=nl.psum)
    made = nisa.nc_matmul(p, put(np.ones((k, m), np.float32), dtype), put(eye, dtype), accumulate=False, **more)
    assert (made.cycles, made.us) == (want, want / 2400)


@pytest.mark.parametrize(
    ("dtypes", "buffers", "want"),
    [
        (("float32", "float32"), (nl.sbuf, nl.sbuf), 512),
        (("bfloat16", "bfloat16"), (nl.sbuf, nl.sbuf), 128),
        (("float16", "bfloat16"), (nl.sbuf, nl.sbuf), 128),
        (("bfloat16", "float32"), (nl.sbuf, nl.sbuf), 512),
        (("bfloat16", "bfloat16"), (nl.sbuf, nl.psum), 256),
        (("bfloat16", "bfloat16"), (nl.psum, nl.psum), 512),
        (("bfloat16", "float32"), (nl.sbuf, nl.psum), 512),
    ],
)
def test_cost_of_copies(dtypes, buffers, want):
    dst, src = new(128, 512, dtype=dtypes[0], buffer=buffers[0]), put(np.ones((128, 512)), dtypes[1], buffers[1])
    assert nisa.tensor_copy(dst, src).cycles == want
    assert nisa.tensor_scalar(dst, src, nl.multiply, 2.0).cycles == want
    assert nisa.tensor_scalar(dst, src, nl.multiply, 2.0, op1=nl.add, operand1=1.0).cycles == want
    on_act = nisa.tensor_copy(dst, src, engine=nisa.engine.scalar)
    assert (on_act.cycles, on_act.us) == (512, 512 / 1200)


def test_cost_of_strides():
    x, out = put(np.ones((128, 1024)), "bfloat16"), new(128, 256, dtype="bfloat16")
    assert nisa.tensor_copy(out, x[:, ::4]).cycles == 128  # two elements a cycle if not side by side
    assert nisa.tensor_copy(out, x[:, 0 : 4 * 256 : 4]).cycles == 128
    wide = put(np.ones((128, 2048)), "float32")
    assert nisa.tensor_copy(new(128, 512), wide[:, ::4]).cycles == 512  # 16 bytes apart
    assert nisa.tensor_copy(new(128, 256), wide[:, ::8]).cycles == 512  # 32: half the bandwidth
    assert nisa.tensor_copy(new(128, 256), wide[:, :1].broadcast(1, 256)).cycles == 256


@pytest.mark.parametrize(
    ("dtype", "buffers", "op", "want"),
    [
        ("float32", (nl.sbuf, nl.sbuf), nl.add, 1024),
        ("float32", (nl.sbuf, nl.psum), nl.add, 512),
        ("float32", (nl.psum, nl.sbuf), nl.maximum, 512),
        ("bfloat16", (nl.sbuf, nl.sbuf), nl.multiply, 256),
        ("bfloat16", (nl.sbuf, nl.sbuf), nl.maximum, 512),
        ("bfloat16", (nl.sbuf, nl.psum), nl.multiply, 512),
    ],
)
def test_cost_of_tensor_tensor(dtype, buffers, op, want):
    a, b = (put(np.ones((128, 512)), dtype, buffer) for buffer in buffers)
    made = nisa.tensor_tensor(new(128, 512, dtype=dtype), a, b, op)
    assert (made.cycles, made.us) == (want, want / 960)


def test_cost_of_the_others(rng):
    a, v, o, p = put(np.ones((128, 512), np.float32)), put(np.ones((128, 1), np.float32)), new(128, 512), new(128, 1)
    bits, eight, at = put(np.ones((128, 512), np.uint8)), new(128, 8), new(128, 8, dtype="uint32")
    for made, want in (
        (nisa.activation(o, nl.exp, a), 512),
        (nisa.activation_reduce(o, nl.exp, a, nl.add, p), 576),
        (nisa.scalar_tensor_tensor(o, a, nl.multiply, 2.0, nl.add, a), 1024),
        (nisa.tensor_tensor_scan(o, a, a, 0.0, nl.multiply, nl.add), 1024),
        (nisa.tensor_reduce(p, nl.add, a, 1), 512),
        (nisa.tensor_scalar_reduce(o, a, nl.add, 1.0, nl.add, p), 576),
        (nisa.reciprocal(o, a), 4096),
        (nisa.memset(o, 1.0), 512),
        (nisa.memset(new(128, 512, dtype="bfloat16"), 0), 256),
        (nisa.affine_select(o, [[1, 512]], 1, a, 0.0), 662),
        (nisa.iota(o, [[1, 512]]), 662),
        (nisa.tensor_copy_predicated(o, a, bits), 1024),
        (nisa.range_select(o, a, nl.less, nl.less, v, v), 512),
        (nisa.nc_stream_shuffle(o, a, list(range(32))), 512),
        (nisa.bn_stats(new(128, 6), a), 512),
        (nisa.bn_aggr(new(128, 2), a[:, :12]), 64),
        (nisa.max8(eight, a), 512),
        (nisa.nc_find_index8(at, a, eight), 512),
        (nisa.tensor_scalar(p, v, nl.add, 1.0), 64),
        (nisa.activation(p, nl.exp, v), 64),
        (nisa.nc_transpose(new(32, 32), a[:32, :32]), 64),
    ):
        assert made.cycles == want, made.op
        assert made.us == want / cost.CLOCK[made.engine]


def test_cost_of_an_address_in_memory(rng):
    at = put(np.array([[1]], np.int32))
    x = put(noise(rng, 128, 2, 64))
    assert nisa.tensor_copy(new(128, 64), x.select(1, at)).cycles == 600
    assert nisa.tensor_copy(new(128, 64), x[:, 1]).cycles == 64


def test_cost_of_dma(rng):
    tile, hbm = put(noise(rng, 128, 1024)), new(128, 1024, buffer=nl.shared_hbm)
    whole = nisa.dma_copy(hbm, tile)
    assert (whole.engine, whole.cycles, whole.nbytes) == ("DMA", 0, 2**19)
    assert whole.us == pytest.approx(2**19 / 368e3)
    part = nisa.dma_copy(hbm[:, :128], tile[:, :128])  # rows of 512 bytes: a quarter of the rate
    assert part.us == pytest.approx(2**16 / 368e3 * 4)
    half = nisa.dma_copy(new(128, 512, dtype="bfloat16"), hbm[:, :512])  # rows of 1 KiB on the narrower side
    assert half.us == pytest.approx(2**18 / 368e3 * 2)
    turned = nisa.dma_transpose(new(128, 128), hbm[:, :128])
    assert turned.us == pytest.approx(2**16 / 368e3 * 4 / 0.9)
    assert (cost.DMA_LATENCY, cost.SYNC) == (1.3, 0.3)


def price(op, engine, **facts):
    return cost.price(op, engine, facts)[1]


def test_counts_of_a_chunk_of_gla():
    """The design's own counts, 128 tokens of 128 x 128: without the modes in which 16-bit data pass several at once."""
    matmul = lambda moving, stationary=128, **more: price(
        "nc_matmul", "PE", stationary=stationary, moving=moving, **more
    )
    pe = 9 * matmul(128, fp32=True, onezero=True)  # exponents
    pe += matmul(64, 64) + 2 * matmul(32, 64) + 4 * matmul(16, 64)  # coarse: the stationary one padded
    pe += 5 * matmul(128)  # fine
    pe += 2 * price("nc_transpose", "PE", stationary=128, moving=128)
    pe += (6 + 1 + 1) * matmul(128)  # levels times v, state times q, k times v
    act = 2 * price("activation", "ACT", n=512) + price("activation", "ACT", n=128)  # exponentials
    act += price("activation", "ACT", n=1) + 2 * price("tensor_copy", "ACT", n=128)
    act += 2 * price("tensor_copy", "ACT", n=128)  # output, state
    dve = (7 + 2) * price("tensor_tensor", "DVE", n=128, light=True)  # products of bfloat16
    dve += 5 * price("tensor_tensor", "DVE", n=128, light=True)  # masks, from PSUM
    dve += price("tensor_copy", "DVE", n=128) + price("scalar_tensor_tensor", "DVE", n=128)
    assert (pe, act, dve) == (4672, 1728, 2176)


def test_every_price_has_a_source():
    for key, (_, source) in cost.CYCLES.items():
        assert source.split(":")[0].split(";")[0] in ("doc", "old-doc", "inferred", "unknown"), key
