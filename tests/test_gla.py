"""ringtide.gla against the float64 recurrence, and the laws it must keep exactly."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringtide.jax.gla import gla
from ringtide.kernels.xla import gla as kernel
from ringtide.reference import gla as truth

RESETS = (-1e4, -1e6, -3.4e37, -np.inf)


def inputs(T, K=8, V=12, B=2, N=2, seed=0, dtype=np.float32):
    """q, k, v, g, h0, do, dhT, zero mean."""
    rng = np.random.default_rng(seed)
    keys, values, state = (B, T, N, K), (B, T, N, V), (B, N, K, V)
    shapes = keys, keys, values, keys, state, values, state
    q, k, v, g, h0, do, dhT = (rng.normal(size=s).astype(np.float32) for s in shapes)
    q, k, v, do = (x.astype(dtype) for x in (q, k, v, do))
    return q, k, v, -0.3 * np.abs(g), h0, do, dhT


def everything(q, k, v, g, h0, do, dhT, **options):
    """(o, hT, dq, dk, dv, dg, dh0) of ringtide.gla; tests of equal shapes share a compilation."""

    def f(q, k, v, g, h0):
        return gla(q, k, v, g, initial_state=h0, output_final_state=True, **options)

    (o, hT), vjp = jax.vjp(f, *(jnp.asarray(x) for x in (q, k, v, g, h0)))
    return o, hT, *vjp((jnp.asarray(do), jnp.asarray(dhT)))


def expected(q, k, v, g, h0, do, dhT, **options):
    options["initial_state"] = h0
    return *truth.gla(q, k, v, g, **options), *truth.gla_grad(q, k, v, g, do, dhT, **options)


def finish(f, *args):
    """Runs f until the errors of its callbacks are out."""
    jax.block_until_ready(f(*args))
    jax.effects_barrier()


def error(x, y):
    """Largest difference relative to the largest truth."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape
    assert np.isfinite(x).all()
    return np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-30)


def assert_exact(got, want, bound=2e-6):
    names = ("o", "hT", "dq", "dk", "dv", "dg", "dh0")
    errors = {n: error(x, y) for n, x, y in zip(names, got, want, strict=True)}
    assert max(errors.values()) <= bound, errors


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 65, 130, *(pytest.param(T, marks=pytest.mark.slow) for T in (63, 64))])
def test_any_length(T):
    x = inputs(T)
    assert_exact(everything(*x), expected(*x))


@pytest.mark.parametrize(("T", "K", "V"), [(5, 1, 8), (5, 8, 1), (5, 64, 80), (20, 96, 192)])
def test_any_width(T, K, V):
    x = inputs(T, K, V, B=1)
    assert_exact(everything(*x, scale=0.7), expected(*x, scale=0.7))


@pytest.mark.parametrize("reset", RESETS)
def test_resets_are_exact(reset):
    x = list(inputs(65))
    at = np.random.default_rng(1).random(x[3].shape) < 0.03
    x[3] = np.where(at, np.float32(reset), x[3])
    got = everything(*x)
    assert_exact(got, expected(*x))
    assert (np.asarray(got[5])[at] == 0).all()


@pytest.mark.parametrize("gate", [0, -1, -50, -100, -np.inf])
def test_one_gate_everywhere(gate):
    x = list(inputs(17))
    x[3] = np.full_like(x[3], gate)
    assert_exact(everything(*x), expected(*x))


def test_mixed_channels():
    x = list(inputs(65))
    x[3] = np.broadcast_to(np.float32([0, -1e-6, -1e-2, -0.7, -5, -89, -1e3, -np.inf]), x[3].shape)
    assert_exact(everything(*x), expected(*x))


def test_chunk_size_does_not_matter():
    q, k, v, g, h0, do, dhT = inputs(29)
    want = expected(q, k, v, g, h0, do, dhT)
    for chunk in (2, 8):
        o, hT = kernel.forward(q, k, v, g, h0, scale=8**-0.5, chunk=chunk)
        grads = kernel.backward(q, k, v, g, h0, do, dhT, scale=8**-0.5, chunk=chunk)
        assert_exact((o, hT, *grads), want)


def test_the_state_carries_over_a_split():
    x = inputs(80)

    def halves(q, k, v, g, h0):
        first, h = gla(*(a[:, :15] for a in (q, k, v, g)), initial_state=h0, output_final_state=True)
        second, h = gla(*(a[:, 15:] for a in (q, k, v, g)), initial_state=h, output_final_state=True)
        return jnp.concatenate((first, second), 1), h

    o, vjp = jax.vjp(halves, *(jnp.asarray(a) for a in x[:5]))
    assert_exact((*o, *vjp(tuple(jnp.asarray(a) for a in x[5:]))), expected(*x))


def test_gradient_of_the_final_state_alone():
    x = list(inputs(17))
    x[5] = np.zeros_like(x[5])
    for got, want in zip(everything(*x)[2:], expected(*x)[2:], strict=True):
        assert error(got, want) <= 2e-6


def test_without_a_state():
    q, k, v, g, *_ = inputs(20)
    o, state = gla(q, k, v, g)
    assert state is None
    assert error(o, truth.gla(q, k, v, g)[0]) <= 2e-6


SEGMENTS = np.array(
    [
        [0] * 5 + [3] * 20 + [-1] * 2 + [3] * 3 + [1] * 20 + [-7] * 15,
        [-1] * 4 + [9] * 30 + [-2] * 3 + [2] * 28,
    ]
)


def test_segments_and_poisoned_padding():
    x = [a.copy() for a in inputs(65)]
    for i in (0, 1, 2, 3, 5):
        x[i][SEGMENTS < 0] = np.nan
    got = everything(*x, segment_ids=SEGMENTS)
    assert_exact(got, expected(*x, segment_ids=SEGMENTS))
    assert (np.asarray(got[0])[SEGMENTS < 0] == 0).all()


def test_padding_only_and_segments_of_nothing():
    q, k, v, g, h0, *_ = inputs(9)
    o, h = gla(q, k, v, g, initial_state=h0, output_final_state=True, segment_ids=jnp.full((2, 9), -1))
    assert not o.any()
    assert jnp.array_equal(h, h0)
    nothing = (x[:, :0] for x in (q, k, v, g))
    o, h = gla(*nothing, initial_state=h0, output_final_state=True, segment_ids=jnp.zeros((2, 0), int))
    assert o.shape == (2, 0, 2, 12)
    assert jnp.array_equal(h, h0)


def test_causality_and_packing_are_bitwise():
    q, k, v, g, *_ = inputs(65)
    run = jax.jit(lambda *x: gla(*x[:4], segment_ids=x[4])[0])
    one, packed = np.zeros((2, 65), np.int32), np.repeat([[0, 1, 2]], [20, 25, 20], 1).repeat(2, 0)
    changed = [x.copy() for x in (q, k, v, g)]
    for x in changed:
        x[:, 20:45] *= 3
    assert np.array_equal(run(q, k, v, g, one)[:, :20], run(*changed, one)[:, :20])
    before, after = run(q, k, v, g, packed), run(*changed, packed)
    assert np.array_equal(np.delete(before, slice(20, 45), 1), np.delete(after, slice(20, 45), 1))
    assert error(before[:, 45:], truth.gla(*(x[:, 45:] for x in (q, k, v, g)))[0]) <= 2e-6


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_half_precision(dtype, bound):
    x = inputs(7, dtype=dtype)
    got = everything(*x)
    assert [a.dtype for a in got] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32, jnp.float32]
    for a, b in zip(got, expected(*x), strict=True):
        assert error(a, b) <= bound  # one rounding, of the result


def test_float32_matmuls_are_float32_on_every_backend():
    x = inputs(16)
    text = jax.jit(everything).lower(*x).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)


def test_transforms():
    q, k, v, g, *_ = inputs(4)

    def loss(q, k, v, g):
        return (gla(q, k, v, g)[0] ** 2).sum()

    want = jax.grad(loss, (0, 1, 2, 3))(q, k, v, g)
    for a, b in zip(jax.jit(jax.grad(jax.remat(loss), (0, 1, 2, 3)))(q, k, v, g), want, strict=True):
        assert error(a, b) <= 1e-6
    one = jax.vmap(jax.grad(lambda *x: loss(*(a[None] for a in x)), (0, 1, 2, 3)))(q, k, v, g)
    for a, b in zip(one, want, strict=True):
        assert error(a, b) <= 1e-6


def test_inside_shard_map():
    q, k, v, g, *_ = inputs(4)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, all_rows = PartitionSpec("data"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(all_rows, rows, rows, rows, rows), out_specs=all_rows)
    def sharded(w, q, k, v, g):
        return jax.lax.psum((gla(q, k, v, g * w)[0] ** 2).sum(), "data")

    def whole(w, q, k, v, g):
        return (gla(q, k, v, g * w)[0] ** 2).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1, 4)))(jnp.float32(1.5), q, k, v, g) for f in (sharded, whole))
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= 3e-6  # w sums over all tokens, in another order


def test_over_an_explicit_mesh():
    x = inputs(4)[:4]

    def loss(q, k, v, g):
        return (gla(q, k, v, g)[0] ** 2).sum()

    want = jax.grad(loss, (0, 1, 2, 3))(*x)
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, "heads")))
        got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*x)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= 1e-6


def test_64_bit_mode():
    with jax.enable_x64(True):
        x = inputs(4)
        ids = np.repeat([[0, 1]], 2, 1).repeat(2, 0)
        got = everything(*x, segment_ids=ids)
        assert all(a.dtype == jnp.float32 for a in got)
        assert_exact(got, expected(*x, segment_ids=ids))


def test_sequences_do_not_mix():
    q, k, v, g, *_ = inputs(20)
    o = gla(q, k, v, g)[0]
    swapped = gla(*(x[::-1, :, ::-1] for x in (q, k, v, g)))[0]
    assert error(swapped[::-1, :, ::-1], o) <= 1e-6


BAD = {
    "q: expected shape [B, T, N, K], got [7, 2, 8]": {"q": (7, 2, 8)},
    "k: expected shape [B=2, T=7, N=3, K=8], got [2, 7, 3, 9]": {"k": (2, 7, 3, 9)},
    "k: expected shape [B=2, T=7, N=3, K=8], got [2, 3, 7, 8]: time comes before heads": {"k": (2, 3, 7, 8)},
    "v: expected shape [B=2, T=7, N=3, V], got [2, 6, 3, 8]": {"v": (2, 6, 3, 8)},
    "g: expected shape [B=2, T=7, N=3, K=8], got [2, 7, 3]": {"g": (2, 7, 3)},
    "initial_state: expected shape [B=2, N=3, K=8, V=5], got [2, 3, 5, 8]": {"initial_state": (2, 3, 5, 8)},
    "segment_ids: expected shape [B=2, T=7], got [2, 8]": {"segment_ids": ((2, 8), int)},
    "segment_ids: expected shape [B=2, T=7], got [2, 3]: time comes before heads": {"segment_ids": ((2, 3), int)},
    "segment_ids: expected integers": {"segment_ids": (2, 7)},
    "q: expected float32 or bfloat16 or float16, got int32: cast it": {"q": ((2, 7, 3, 8), int)},
    "k: expected float32, got bfloat16: cast it": {"k": ((2, 7, 3, 8), jnp.bfloat16)},
    "initial_state: expected float32, got bfloat16": {"initial_state": ((2, 3, 8, 5), jnp.bfloat16)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arrays_are_named(message):
    shapes = {"q": (2, 7, 3, 8), "k": (2, 7, 3, 8), "v": (2, 7, 3, 5), "g": (2, 7, 3, 8)} | BAD[message]
    arrays = {n: jnp.zeros(*s) if isinstance(s[0], tuple) else jnp.zeros(s) for n, s in shapes.items()}
    with pytest.raises((ValueError, TypeError)) as e:
        gla(**arrays)
    assert str(e.value).startswith(message)
    assert "\n" not in str(e.value)


def test_other_bad_arguments_are_named():
    q, k, v, g, *_ = inputs(7)
    with pytest.raises(TypeError, match=r"^q: expected an array, got object"):
        gla(object(), k, v, g)
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, got nan"):
        gla(q, k, v, g, scale=float("nan"))
    with pytest.raises(TypeError, match=r"^scale: expected a finite number"):
        jax.jit(lambda s: gla(q, k, v, g, scale=s))(1.0)
    with pytest.raises(ValueError, match=r"^implementation: gla has xla"):
        gla(q, k, v, g, implementation="cuda")
    assert error(gla(q, k, v, g, implementation=["xla"])[0], gla(q, k, v, g)[0]) == 0


@pytest.mark.parametrize(("gate", "jit"), list(itertools.product([np.nan, 0.1], [False, True])))
def test_checked_mode_refuses_gates(gate, jit, monkeypatch):
    q, k, v, g, *_ = inputs(7)
    bad = g.copy()
    bad[1, 3, 0, 2] = gate
    ids = np.array([[0] * 7, [0] * 6 + [-1]])

    def plain(g):
        return gla(q, k, v, g, segment_ids=ids)[0]

    run = jax.jit(plain) if jit else plain
    finish(run, bad)  # not checked: no error
    monkeypatch.setenv("RINGTIDE_CHECK", "1")
    run = jax.jit(lambda g: plain(g)) if jit else plain  # traced anew
    good = g.copy()
    good[1, 6] = gate  # padding may hold anything
    good[0, 0] = -np.inf
    finish(run, good)
    with pytest.raises(Exception, match=r"g: expected gates in \[-inf, 0\]"):
        finish(run, bad)
