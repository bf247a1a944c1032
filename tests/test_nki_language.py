"""nki.language in the simulator: allocation, loops, functions on tiles."""

import ml_dtypes
import numpy as np
import pytest

from ringtide import nki
from ringtide.kernels.nki.simulator import errors, isa
from ringtide.kernels.nki.simulator import language as nl

BF16 = ml_dtypes.bfloat16


def _normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _on_tiles(f, *arrays, **options):
    """f of the arrays' tiles in SBUF, as a kernel; what f returned, copied to HBM."""

    def kernel(*tensors):
        made = f(*(nl.load(x) for x in tensors))
        if made.buffer is nl.psum:
            made = nl.copy(made)
        out = nl.ndarray(made.shape, made.dtype, buffer=nl.shared_hbm)
        nl.store(out, made)
        return out

    return nki.simulate(kernel, **options)(*arrays)


def _run(f):
    """f inside a kernel that takes nothing and gives nothing; its Run."""
    run = nki.simulate(lambda: f() and None)
    run()
    return run.last


# --- allocation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: nl.ndarray((128, 8), nl.float32, buffer="sbuf"), errors.BufferError, "nl.sbuf"),
        (lambda: nl.ndarray((128,), nl.float32), errors.ShapeError, "partition and a free axis"),
        (lambda: nl.ndarray((129, 8), nl.float32), errors.PartitionError, "tile axis 0"),
        (lambda: nl.ndarray((128, 8), "float64"), errors.DtypeError, "float64"),
        (lambda: nl.ndarray((128, 8), nl.float8_e5m2_x4), errors.DtypeError, "x4"),
        (lambda: nl.ndarray((8, 8), nl.float32, nl.hbm, address=(0, 0)), errors.BufferError, "on-chip"),
        (lambda: nl.zeros((8, 8), nl.float32, nl.hbm), errors.BufferError, "dma_copy"),
        (lambda: nl.shared_constant(np.ones((4, 4))), errors.DtypeError, "cast it first"),
    ],
)
def test_what_cannot_be_allocated(make, error, says):
    with pytest.raises(error, match=says):
        _run(make)


def test_filled_tiles():
    def fill(x):
        made = nl.ndarray((128, 8), nl.float32)
        made[:, 0:2], made[:, 2:4] = nl.ones((128, 2), nl.float32), nl.full((128, 2), 2.5, nl.float32)
        made[:, 4:8] = nl.zeros_like(x)
        return made

    out = _on_tiles(fill, _normal(128, 4))
    assert (out == np.repeat([[1, 1, 2.5, 2.5, 0, 0, 0, 0]], 128, 0)).all()


def test_empty_like_is_not_written():
    with pytest.raises(errors.UninitializedError):
        _on_tiles(lambda x: nl.copy(nl.empty_like(x)), _normal(128, 4))


def test_identity_is_loaded_once():
    def kernel():
        out = nl.ndarray((16, 16), nl.bfloat16, buffer=nl.shared_hbm)
        nl.fori_loop(0, 2, lambda i: nl.shared_identity_matrix(16, nl.bfloat16))
        nl.store(out, nl.shared_identity_matrix(16, nl.bfloat16))
        return out

    run = nki.simulate(kernel)
    assert (run() == np.eye(16)).all()
    assert len(run.last.machines[0].instructions) == 2


def test_constants_and_their_files(tmp_path):
    x = _normal(16, 8, dtype=BF16)
    np.save(tmp_path / "x.npy", x.astype(np.float32))

    def kernel(file):
        return nl.shared_constant(x), nl.shared_constant(file)

    for out in nki.simulate(kernel)(str(tmp_path / "x.npy")):
        assert (out == x).all()


def test_tile_size_follows_the_options():
    seen = []
    nki.simulate(lambda: seen.append(nl.tile_size.sbuf_fmax_bytes), sbuf_bytes=1000)()
    assert seen == [1000]
    assert nl.tile_size.sbuf_fmax_bytes == nl.tile_size.total_available_sbuf_size == 192 * 1024


@pytest.mark.parametrize(("name", "says"), [("par_dim", "no longer part of NKI"), ("nonsense", "no such name")])
def test_names_that_are_gone(name, says):
    with pytest.raises(AttributeError, match=says):
        getattr(nl, name)


def test_access_patterns_lie_over_the_storage():
    """As the documentation of access patterns has it: a slice before them changes nothing but where they start."""
    x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)

    def kernel(x):
        made = [nl.ndarray((8, 4), x.dtype, buffer=nl.shared_hbm) for _ in range(3)]
        tile = nl.load(x)
        right = tile[:, 8:]
        isa.dma_copy(made[0], right.ap([[16, 8], [2, 4]]))
        isa.dma_copy(made[1], right.ap([[16, 8], [2, 4]], offset=1))
        isa.dma_copy(made[2], x[:, 8:].ap([[16, 8], [-1, 4]], offset=5))
        return made

    right, left, back = nki.simulate(kernel)(x)
    assert (right == x[:, 8::2]).all()
    assert (left == x[:, 1:9:2]).all()
    assert (back == x[:, 5:1:-1]).all()


def test_access_patterns_that_go_back_are_ordered_by_what_they_touch():
    def kernel():
        out = nl.ndarray((8, 16), nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((8, 16), nl.float32)
        isa.memset(tile[:, :8], 1.0)
        isa.memset(tile[:, 8:], 2.0)
        isa.dma_copy(out, tile.ap([[16, 8], [-1, 16]], offset=15))
        return out

    run = nki.simulate(kernel)
    assert (run()[0] == [2.0] * 8 + [1.0] * 8).all()
    assert run.last.machines[0].instructions[2].after == (0, 1)


# --- loops ----------------------------------------------------------------------------------------------------------


def test_fori_loop_moves_rows():
    x = _normal(6, 32)

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)

        def body(i):
            row = nl.load(x.ap([[32, 1], [1, 32]], scalar_offset=i))
            isa.dma_copy(out.ap([[32, 1], [1, 32]], scalar_offset=i), row)

        nl.fori_loop(0, 6, body, step=2)
        nl.fori_loop(1, 6, body, step=2)
        nl.fori_loop(3, 3, body)
        return out

    run = nki.simulate(kernel)
    assert (run(x) == x).all()
    assert [m.loop for m in run.last.machines[0].instructions[4:8:2]] == [((1, 2),), ((2, 0),)]


def test_tensors_stay_in_their_loop():
    def kernel():
        kept = []
        nl.fori_loop(0, 1, lambda i: kept.append(nl.zeros((8, 8), nl.float32)))
        nl.copy(kept[0])

    with pytest.raises(errors.HazardError, match="inside a loop"):
        nki.simulate(kernel)()


def test_the_loops_register_has_no_value_for_the_kernel():
    with pytest.raises(TypeError, match="scalar_offset"):
        _run(lambda: nl.fori_loop(0, 2, lambda i: range(i)))


def test_while_loop_counts_down():
    def kernel():
        out = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        left, one, turns = (nl.full((1, 1), n, nl.int32) for n in (3, 1, 0))
        register = isa.register_alloc()
        isa.register_load(register, left)

        def body(r):
            isa.tensor_tensor(left, left, one, nl.subtract)
            isa.tensor_tensor(turns, turns, one, nl.add)
            isa.register_load(r, left)
            return r

        nl.while_loop(register, body)
        nl.store(out, turns)
        return out

    assert nki.simulate(kernel)()[0, 0] == 3


@pytest.mark.parametrize(
    ("f", "error", "says"),
    [
        (lambda: nl.dynamic_range(3), errors.UnsupportedError, "fori_loop"),
        (lambda: nl.fori_loop(0, 3, None, step=0), errors.ShapeError, "positive"),
        (lambda: nl.while_loop(1, None), errors.NkiSimError, "register_alloc"),
    ],
)
def test_loops_refuse(f, error, says):
    with pytest.raises(error, match=says):
        _run(f)


def test_no_reorder():
    def kernel():
        with nl.no_reorder():
            nl.zeros((8, 8), nl.float32)
            nl.zeros((8, 8), nl.float32)
        with nl.no_reorder():
            nl.zeros((8, 8), nl.float32)
        nl.zeros((8, 8), nl.float32)

    assert [x.ordered for x in _run(kernel).machines[0].instructions] == [1, 1, 2, 0]

    def inside(f):
        with nl.no_reorder():
            f()

    with pytest.raises(errors.NkiSimError, match="not allowed inside no_reorder"):
        _run(lambda: inside(lambda: nl.fori_loop(0, 1, lambda i: None)))
    with pytest.raises(errors.NkiSimError, match="already inside"):
        _run(lambda: inside(lambda: inside(lambda: None)))


# --- functions on tiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("add", np.add), ("subtract", np.subtract), ("multiply", np.multiply), ("divide", np.divide),
        ("maximum", np.maximum), ("minimum", np.minimum), ("less", np.less), ("equal", np.equal),
    ],
)  # fmt: skip
def test_two_tiles(name, truth):
    op, x, y, column = getattr(nl, name), _normal(128, 32), _normal(128, 32, seed=1), _normal(128, 1, seed=2)
    pairs = ((x, y), (x, column), (column, x))
    for a, b in pairs:
        np.testing.assert_allclose(_on_tiles(op, a, b), truth(a, b), rtol=1e-6)
    np.testing.assert_allclose(_on_tiles(lambda x: op(x, 2.0), x), truth(x, np.float32(2)), rtol=1e-6)
    np.testing.assert_allclose(_on_tiles(lambda x: op(2.0, x), x), truth(np.float32(2), x), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("exp", np.exp), ("abs", np.abs), ("square", np.square), ("sqrt", np.sqrt), ("negative", np.negative),
        ("reciprocal", np.reciprocal), ("copy", np.copy), ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("logical_not", lambda x: (x == 0).astype(np.float32)),
    ],
)  # fmt: skip
def test_one_tile(name, truth):
    x = np.abs(_normal(128, 32)) + np.float32(0.1)
    np.testing.assert_allclose(_on_tiles(getattr(nl, name), x), truth(x), rtol=1e-5)


def test_invert():
    for dtype in (np.int32, np.uint8):
        x = np.arange(128 * 4, dtype=dtype).reshape(128, 4)
        assert (_on_tiles(nl.invert, x) == ~x).all()


@pytest.mark.parametrize(("a", "b", "made"), [
    (BF16, BF16, "bfloat16"), (BF16, np.float32, "float32"), (BF16, np.float16, "float32"),
    (np.int32, BF16, "bfloat16"),
])  # fmt: skip
def test_dtypes_of_results(a, b, made):
    assert _on_tiles(nl.add, _normal(8, 8, dtype=a), _normal(8, 8, dtype=b)).dtype == made
    assert _on_tiles(lambda x: nl.exp(x, dtype=nl.float16), _normal(8, 8)).dtype == np.float16


def test_reductions():
    x = _normal(128, 4, 8)
    for f, truth in ((nl.sum, np.sum), (nl.max, np.max), (nl.min, np.min), (nl.mean, np.mean)):
        np.testing.assert_allclose(_on_tiles(lambda x, f=f: f(x, axis=2), x), truth(x, 2), rtol=1e-5, atol=1e-6)
        kept = _on_tiles(lambda x, f=f: f(x, axis=[1, 2], keepdims=True), x)
        np.testing.assert_allclose(kept, truth(x, (1, 2), keepdims=True), rtol=1e-5, atol=1e-6)
    with pytest.raises(errors.ShapeError, match="last free axes"):
        _on_tiles(lambda x: nl.sum(x, axis=1), x)
    with pytest.raises(errors.ShapeError, match="last free axes"):
        _on_tiles(lambda x: nl.sum(x, axis=[0, 1, 2]), x)


def test_softmax_and_where():
    x, y = _normal(128, 16) * 5, _normal(128, 16, seed=1)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(_on_tiles(nl.softmax, x), e / e.sum(1, keepdims=True), rtol=1e-5)
    mask = (y > 0).astype(np.float32)
    assert (_on_tiles(nl.where, mask, x, y) == np.where(mask, x, y)).all()
    assert (_on_tiles(lambda m, x: nl.where(m, x, -1.0), mask, x) == np.where(mask, x, -1)).all()


@pytest.mark.parametrize(("shape", "to"), [((128, 1), (128, 8)), ((1, 700), (128, 700)), ((1, 1), (64, 8)),
                                           ((128, 1, 8), (128, 4, 8))])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_broadcast_to(shape, to, dtype):
    x = _normal(*shape, dtype=dtype)
    assert (_on_tiles(lambda x: nl.broadcast_to(x, to), x) == np.broadcast_to(x, to)).all()


def test_matmul_and_transpose():
    x, y = _normal(64, 128), _normal(128, 300, seed=1)
    assert (_on_tiles(nl.transpose, x.astype(BF16)) == x.astype(BF16).T).all()
    truth = x @ y
    np.testing.assert_allclose(_on_tiles(nl.matmul, x, y), truth, rtol=1e-5, atol=1e-4)
    turned = _on_tiles(lambda x, y: nl.matmul(x, y, transpose_x=True), np.ascontiguousarray(x.T), y)
    np.testing.assert_allclose(turned, truth, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("f", "error", "says"),
    [
        (lambda x: nl.add(x, nl.zeros((128, 4), nl.float32)), errors.ShapeError, "equal shapes"),
        (lambda x: nl.floor(x), errors.UnsupportedError, "no documented instruction"),
        (lambda x: nl.bypass(x), TypeError, "operator"),
        (lambda x: nl.add(1, 2), TypeError, "a tile"),
        (lambda x: nl.load(x), errors.BufferError, "loads from HBM"),
        (lambda x: nl.store(x, x), errors.BufferError, "stores to HBM"),
        (lambda x: nl.broadcast_to(x, (128, 3)), errors.ShapeError, "each equal or 1"),
        (lambda x: nl.matmul(nl.copy(x, nl.bfloat16), nl.copy(x, nl.bfloat16), True), errors.DtypeError, "float32"),
    ],
)
def test_functions_refuse(f, error, says):
    with pytest.raises(error, match=says):
        _on_tiles(f, _normal(128, 2))
