"""What the property tests of `ringtide fuzz` do not reach: arguments, transformations, dtypes on the wire, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringtide
from ringtide import Causal, Local, attention
from ringtide.kernels.xla import attention as xla
from ringtide.reference import attention as reference


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)  # jax.random would compile a shape


def close(x, truth, bound=2e-6):
    x, truth = np.asarray(x, np.float64), np.asarray(truth)
    assert np.abs(x - truth).max() <= bound * np.abs(truth).max()


Q, K, V = normal(2, 150, 4, 16), normal(2, 150, 2, 16, seed=1), normal(2, 150, 2, 24, seed=2)


@pytest.mark.parametrize("block", [(16, 64), (64, 16), (256, 256)])
def test_tile_sizes_change_nothing_but_rounding(block):
    kernel = {"mask": Local(40, 0), "scale": 0.25, "block": block}
    out, lse = jax.jit(lambda *x: xla.forward(*x, xla.Where(), **kernel))(Q, K, V)
    truth, truth_lse = reference.attention(Q, K, V, mask=Local(40, 0))
    close(out, truth)
    close(lse, truth_lse)
    dout, delta = normal(*out.shape, seed=3), normal(*lse.shape, seed=4)
    got = jax.jit(lambda q, k, v, *x: xla.backward(q, k, v, xla.Where(), *x, **kernel))(Q, K, V, dout, lse, delta)
    dlse = np.sum(np.asarray(dout, np.float64) * truth, -1) - delta
    for dx, expected in zip(got, reference.attention_grad(Q, K, V, dout, dlse, mask=Local(40, 0)), strict=False):
        close(dx, expected)


def test_tiles_that_hide_all_are_never_visited():
    """A key of NaN outside every window would poison the rows of any tile that is multiplied."""
    k = K.at[:, 140:].set(jnp.nan)
    kernel = {"mask": Causal(), "scale": 0.25, "block": (16, 16)}
    out, _ = jax.jit(lambda *x: xla.forward(*x, xla.Where(), **kernel))(Q, k, V.at[:, 140:].set(jnp.nan))
    assert not jnp.isnan(out[:, :128]).any()


def test_no_array_grows_with_the_square_of_the_length():
    def loss(q, k, v):
        return attention(q, k, v, mask=Causal()).sum()

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(16384), temporaries(65536)
    assert long < 4.2 * short
    assert long < 8 * 65536 * 64 * 4


def test_float32_is_multiplied_in_float32():
    def step(q, k, v):
        out, vjp = jax.vjp(lambda *x: attention(*x, mask=Causal()), q, k, v)
        return vjp(out)

    text = jax.jit(step).lower(Q, K, V[..., :16]).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 14  # two loops forward, two backward
    assert all("HIGHEST, HIGHEST" in line for line in products)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_summed_in_float32(dtype):
    text = jax.jit(attention).lower(*(x.astype(dtype) for x in (Q, K, V))).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.rstrip().endswith("xf32>") for line in products)
    assert attention(*(x.astype(dtype) for x in (Q, K, V))).dtype == dtype


def test_float16_gradients_keep_their_range():
    """dS = P (dO V^T - delta) reached 1e5 here, beyond float16, and dq became inf."""
    q, k, v, dout = (
        jnp.asarray(size * normal(1, 4, 1, width, seed=i), jnp.float16)
        for i, (size, width) in enumerate(((0.01, 8), (0.01, 8), (100, 64), (3000, 64)))
    )
    _, vjp = jax.vjp(jax.jit(attention), q, k, v)
    for dx, truth in zip(vjp(dout), reference.attention_grad(q, k, v, dout), strict=False):
        close(dx, truth, 4e-3)


@pytest.mark.parametrize("transform", ["jit", "vmap", "remat"])
def test_transformations(transform):
    ids = np.sort(np.random.default_rng(5).integers(-1, 3, (2, 150)), axis=1)

    def loss(q, ids):
        return (attention(q, K[: len(q)], V[: len(q)], mask=Causal(), segment_ids=ids) ** 2).sum()

    expected = jax.grad(loss)(Q, ids)
    if transform == "vmap":

        def one(q, k, v, ids):
            return (attention(q[None], k[None], v[None], mask=Causal(), segment_ids=ids[None]) ** 2).sum()

        got = jax.vmap(jax.grad(one))(Q, K, V, ids)
    else:
        got = jax.jit(jax.grad(loss if transform == "jit" else jax.checkpoint(loss)))(Q, ids)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_batch_and_heads_shard_without_communication(kind):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    sharding = NamedSharding(mesh, P("b", None, "h"))

    def loss(q, k, v):
        return (attention(q, k, v, mask=Causal()) ** 2).sum()

    with jax.set_mesh(mesh):
        args = [jax.device_put(x, sharding) for x in (Q, K, V)]
        step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile()
        got = step(*args)
    assert not any(word in step.as_text() for word in ("all-gather", "all-to-all", "collective-permute"))
    for a, b in zip(got, jax.grad(loss, (0, 1, 2))(Q, K, V), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(q, sinks):
        f = jax.shard_map(
            lambda q, k, v, s: attention(q, k, v, mask=Causal(), sinks=s),
            mesh=mesh,
            in_specs=(P("b"), P("b"), P("b"), P()),
            out_specs=P("b"),
        )
        return (f(q, K, V, sinks) ** 2).sum()

    sinks = jnp.arange(4.0)
    got = jax.jit(jax.grad(loss, (0, 1)))(Q, sinks)
    expected = jax.grad(lambda q, s: (attention(q, K, V, mask=Causal(), sinks=s) ** 2).sum(), (0, 1))(Q, sinks)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)


def test_an_eager_call_compiles_once():
    x = normal(1, 33, 1, 8)
    attention(x, x, x, mask=Causal())
    with jax.no_tracing():  # the second one finds the compiled one
        attention(x, x, x, mask=Causal())


def test_empty():
    none, some = normal(2, 0, 4, 16), normal(2, 5, 4, 16)
    assert attention(none, none, none).shape == (2, 0, 4, 16)
    out, lse = attention(some, none, none, return_lse=True)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    grads = jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2))(some, none, none)
    assert [g.shape for g in grads] == [some.shape, none.shape, none.shape]
    out, lse = attention(some, none, none, sinks=jnp.arange(4.0), return_lse=True)
    assert (out == 0).all()
    assert (lse == jnp.arange(4.0)).all()


def test_a_sink_of_minus_infinity_is_no_sink():
    ids = jnp.where(jnp.arange(150) < 9, -1, 0)[None].repeat(2, 0)

    def run(sinks):
        def f(q):
            out, lse = attention(q, K, V, segment_ids=ids, sinks=sinks, return_lse=True)
            return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

        return jax.value_and_grad(f)(Q)

    for a, b in zip(run(None), run(jnp.full(4, -jnp.inf)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": Q[0]}, ValueError, r"query: expected shape \[B, T, N, H\]"),
        ({"query": Q.astype(jnp.int32)}, TypeError, "query: expected float32 or bfloat16 or float16, got int32"),
        ({"key": K.astype(jnp.bfloat16)}, TypeError, "key: expected float32"),
        ({"key": K[:1]}, ValueError, "key: expected shape"),
        ({"key": K[..., :8]}, ValueError, "key: expected shape .*H=16"),
        ({"value": V[:, :100]}, ValueError, "value: expected shape .*S=150"),
        ({"query": Q[:, :, :3]}, ValueError, "key: 2 heads do not divide the 3 of query"),
        ({"key": K.swapaxes(1, 2), "value": V.swapaxes(1, 2)}, ValueError, r"x\.swapaxes\(1, 2\)"),
        ({"segment_ids": jnp.zeros((2, 149), int)}, ValueError, "segment_ids: expected shape .*T=150"),
        ({"segment_ids": jnp.zeros((2, 150))}, TypeError, "segment_ids: expected integers, got float32"),
        ({"segment_ids": (jnp.zeros((2, 150), int), None)}, ValueError, "segment_ids: .* or a tuple of two"),
        ({"segment_ids": (jnp.zeros((2, 150), int),) * 3}, ValueError, "segment_ids: .* or a tuple of two"),
        ({"segment_ids": [[0] * 8]}, ValueError, "segment_ids: expected shape .*T=150"),
        ({"segment_ids": np.zeros(150, int)}, ValueError, "segment_ids: expected shape .*T=150"),
        ({"segment_ids": np.full((2, 150), 2**31 + 5)}, ValueError, r"segment_ids: expected values below 2\*\*31"),
        ({"q_positions": np.arange(150) + 2**33}, ValueError, r"q_positions: expected values below 2\*\*30"),
        ({"q_positions": jnp.zeros(7, int)}, ValueError, "q_positions: expected shape"),
        ({"kv_positions": jnp.zeros((3, 150), int)}, ValueError, "kv_positions: expected shape"),
        ({"sinks": jnp.zeros(3)}, ValueError, r"sinks: expected shape \[N=4\]"),
        ({"mask": jnp.ones((150, 150), bool)}, ValueError, "mask: expected shape"),
        ({"mask": jnp.ones((1, 1, 150, 150))}, TypeError, "mask: expected bool"),
        ({"mask": jnp.ones((1, 1, 1, 150), bool)}, ValueError, r"mask: expected shape \[B=2 or 1, N=4 or 1, T=150"),
        ({"mask": "causal"}, TypeError, "mask: expected a mask"),
        ({"mask": Causal}, TypeError, "mask: expected a hashable, pure JAX function .* takes 0 positional"),
        ({"mask": lambda q, k: (k <= q).astype(jnp.int32) * 2}, TypeError, "mask: expected bool .* got int32"),
        ({"mask": lambda q, k: np.greater(q, k)}, TypeError, "mask: expected a hashable, pure JAX function"),
        ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
        ({"scale": "0.5"}, TypeError, "scale: expected a finite number, got str: multiply query"),
        ({"scale": 10**400}, TypeError, "scale: expected a finite number"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: expected a positive number"),
        ({"logits_soft_cap": jnp.ones(4)}, TypeError, "logits_soft_cap: expected a finite number.* serves all heads"),
        ({"query": Q[..., :0], "key": K[..., :0]}, ValueError, "query: expected a head_dim of at least 1"),
        ({"implementation": "cuda"}, ValueError, "implementation: attention has xla"),
        ({"implementation": ()}, TypeError, "implementation: expected a name, a sequence"),
        ({"implementation": {"xla"}}, TypeError, "implementation: expected a name, a sequence"),
        ({"implementation": "triton"}, NotImplementedError, "triton: not in this release, which has xla, pallas"),
    ],
)
def test_bad_arguments_are_named_in_one_line(change, error, message):
    arguments = {"query": Q, "key": K, "value": V, **change}
    with pytest.raises(error, match=message) as caught:
        ringtide.attention(**arguments)
    assert "\n" not in str(caught.value)


def test_a_list_of_rows_is_no_pair():
    rows = list(np.sort(np.random.default_rng(5).integers(-1, 3, (2, 150)), axis=1))
    np.testing.assert_array_equal(attention(Q, K, V, segment_ids=rows), attention(Q, K, V, segment_ids=np.stack(rows)))


def test_positions_may_be_a_list():
    order = list(range(150))
    expected = attention(Q, K, V, mask=Causal())
    np.testing.assert_array_equal(attention(Q, K, V, mask=Causal(), q_positions=order, kv_positions=order), expected)


def test_names_of_other_releases_are_tried_in_turn():
    np.testing.assert_array_equal(attention(Q, K, V, implementation=["triton", "xla"]), attention(Q, K, V))


def test_64_bit_mode():
    """lse of an empty call was float64."""
    with jax.enable_x64(True):
        for q, k, v in ((Q, K, V), (Q[:, :0], K, V), (Q, K[:, :0], V[:, :0])):
            (out, lse), vjp = jax.vjp(lambda *x: attention(*x, mask=Causal(), return_lse=True), q, k, v)
            assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
            assert all(dx.dtype == jnp.float32 for dx in vjp((out, lse)))


def test_head_first_arrays_are_recognised_by_their_ids():
    x = normal(2, 4, 150, 16)
    with pytest.raises(ValueError, match="swapaxes"):
        attention(x, x, x, segment_ids=jnp.zeros((2, 150), int))
