"""Every strategy equals one device: values, lse and gradients, every layout, every kind of mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringtide import (
    Causal,
    Chunked,
    Full,
    Local,
    attention,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)
from ringtide.jax.attention import Kernel
from ringtide.kernels import layouts
from ringtide.kernels.context import hops
from ringtide.kernels.context.ring import Ring
from ringtide.kernels.context.ulysses import heads_over
from ringtide.kernels.masks import Where
from ringtide.reference import attention as reference

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
B, T, N, N_KV, H, H_V = 2, 48, 4, 2, 8, 12


def mesh_of(sizes, names, kind=AUTO):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def inputs(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)  # jax.random would compile for each shape
    shapes = (B, T, N, H), (B, T, N_KV, H), (B, T, N_KV, H_V), (N,), (B, T, N, H_V), (B, T, N)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def truth_of(q, k, v, sinks, dout, dlse, ids, **options):
    """As `run`, in float64."""
    options |= {"segment_ids": ids, "sinks": sinks}
    out, lse = reference.attention(q, k, v, **options)
    return out, lse, *reference.attention_grad(q, k, v, dout, dlse, **options)


def run(op, q, k, v, sinks, dout, dlse, ids, **options):
    """(out, lse, dq, dk, dv, dsinks), the gradients for cotangents of out and of lse."""

    def f(q, k, v, sinks):
        return op(q, k, v, sinks=sinks, segment_ids=ids, return_lse=True, **options)

    def step(q, k, v, sinks, dout, dlse):
        (out, lse), vjp = jax.vjp(f, q, k, v, sinks)
        return out, lse, *vjp((dout, dlse))

    return jax.jit(step)(q, k, v, sinks, dout, dlse)


MASKS = {
    "full": None,
    "causal": Causal(),
    "window": Local(9, 4),
    "chunked": Chunked(16) & Causal(),
    "either": Chunked(16) | Local(3, 0),
    "function": lambda q, k: (q - k) % 3 == 0,
}


@pytest.mark.parametrize(
    ("strategy", "devices", "layout", "mask", "kind"),
    [
        ("ring", 1, "zigzag", "causal", AUTO),
        ("ring", 2, "contiguous", "full", EXPLICIT),
        ("ring", 3, "striped", "window", AUTO),
        ("ring", 4, "zigzag", "causal", AUTO),
        ("ring", 4, "contiguous", "chunked", AUTO),
        ("ring", 8, "zigzag", "either", EXPLICIT),
        ("ring", 8, "contiguous", "function", AUTO),
        ("ring", 8, "contiguous", "window", AUTO),  # three hops one way, one the other
        ("both ways", 3, "zigzag", "causal", EXPLICIT),
        ("both ways", 8, "contiguous", "full", AUTO),
        ("all_gather", 3, "zigzag", "window", AUTO),
        ("all_gather", 8, "striped", "causal", EXPLICIT),
        ("ulysses", 1, "striped", "full", AUTO),
        ("ulysses", 2, "zigzag", "function", AUTO),
        ("ulysses", 3, "contiguous", "either", AUTO),  # heads padded with their group
        ("ulysses", 8, "zigzag", "causal", EXPLICIT),  # two copies of each kv head
        ("usp", (2, 4), "zigzag", "causal", AUTO),
        ("usp", (4, 2), "striped", "window", EXPLICIT),
        ("usp", (1, 4), "contiguous", "full", AUTO),
        ("usp", (3, 1), "contiguous", "chunked", AUTO),
        ("usp", (2, 3), "contiguous", "either", AUTO),
    ],
)
def test_equals_one_device(strategy, devices, layout, mask, kind):
    mesh = mesh_of(devices, ("ulysses", "ring"), kind) if strategy == "usp" else mesh_of((devices,), ("context",), kind)
    axis = mesh.axis_names if strategy == "usp" else "context"
    args = inputs()
    ids = np.sort(np.random.default_rng(9).integers(-1, 3, (B, T)), axis=1)
    expected = truth_of(*args, ids, mask=MASKS[mask])

    def shard(x):
        return shard_sequence(x, mesh, axis, layout)

    how = {"strategy": "ring", "bidirectional": True} if strategy == "both ways" else {"strategy": strategy}

    def parallel(*a, **o):
        return context_parallel_attention(*a, mesh=mesh, seq_axis=axis, layout=layout, **how, **o)

    q, k, v, sinks, dout, dlse = args
    got = run(parallel, *map(shard, (q, k, v)), sinks, shard(dout), shard(dlse), shard(ids), mask=MASKS[mask])
    *got, dsinks = got
    got = [unshard_sequence(x, mesh, axis, layout) for x in got] + [dsinks]
    for name, x, truth in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, expected, strict=True):
        x, truth = np.asarray(x), np.asarray(truth)
        assert np.abs(x - truth).max() <= 2e-6 * np.abs(truth).max(), name


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "usp"])
def test_batch_and_head_axes_and_a_dense_mask(strategy):
    mesh = mesh_of((2, 2, 2), ("data", "context", "model"))
    axes = {"seq_axis": "context", "head_axis": "model", "batch_axis": "data"}
    if strategy == "usp":
        axes = {"seq_axis": ("model", "context"), "batch_axis": "data"}
    args = inputs(1)
    for shape in ((B, N, T, T), (1, 1, T, T)):
        dense = np.random.default_rng(2).random(shape) < 0.3

        def parallel(*a, **o):
            return context_parallel_attention(*a, mesh=mesh, strategy=strategy, **axes, **o)

        for x, truth in zip(run(parallel, *args, None, mask=dense), truth_of(*args, None, mask=dense), strict=True):
            assert np.abs(np.asarray(x) - truth).max() <= 2e-6 * np.abs(truth).max()


def test_batch_and_heads_over_several_mesh_axes():
    mesh = mesh_of((2, 1, 2, 2), ("data", "fsdp", "context", "model"))
    axes = {"seq_axis": "context", "batch_axis": ("data", "fsdp"), "head_axis": ("model",)}
    args = inputs(5)
    ids = np.sort(np.random.default_rng(6).integers(-1, 3, (B, T)), axis=1)

    def parallel(*a, **o):
        return context_parallel_attention(*a, mesh=mesh, **axes, **o)

    expected = truth_of(*args, ids, mask=Causal())
    for x, truth in zip(run(parallel, *args, ids, mask=Causal()), expected, strict=True):
        assert np.abs(np.asarray(x) - truth).max() <= 2e-6 * np.abs(truth).max()


def test_given_positions_rule():
    mesh = mesh_of((4,), ("context",))
    q, k, v, *_ = inputs(3)
    order = np.random.default_rng(0).permutation(T)
    expected, _ = reference.attention(q, k, v, mask=Causal(), q_positions=order, kv_positions=order)
    options = {"seq_axis": "context", "mask": Causal(), "q_positions": order, "kv_positions": order}
    got = jax.jit(lambda *x: context_parallel_attention(*x, mesh=mesh, **options))(q, k, v)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_partial_results_are_float32():
    """bfloat16 partials would add an error a hop."""
    q, k, v, *_ = inputs(4, jnp.bfloat16)
    expected = attention(q, k, v)
    for devices in (2, 8):
        mesh = mesh_of((devices,), ("context",))
        ring = functools.partial(context_parallel_attention, mesh=mesh, seq_axis="context", strategy="ring")
        got = jax.jit(ring)(q, k, v)
        assert got.dtype == jnp.bfloat16
        error = jnp.abs(got.astype(jnp.float32) - expected.astype(jnp.float32)).max()
        assert error <= 2**-8 * jnp.abs(expected).max(), "more than the last rounding"


def test_hops_are_scanned():
    def sends(devices):
        mesh = mesh_of((devices,), ("context",))
        q, k, v, *_ = inputs()
        text = (
            jax.jit(lambda *x: context_parallel_attention(*x, mesh=mesh, seq_axis="context", strategy="ring"))
            .lower(q, k, v)
            .as_text()
        )
        return text.count("collective_permute")

    assert 0 < sends(2) < sends(3) == sends(8)  # the last hop sends nothing on; those between are one loop


@pytest.mark.parametrize(
    ("layout", "mask", "shards", "both_ways", "expected"),
    [
        ("contiguous", Causal(), 8, False, [(1, 7, None)]),
        ("contiguous", Local(15, 0), 8, False, [(1, 2, None)]),  # ceil(15 / 8)
        ("contiguous", Local(16, 0), 8, False, [(1, 2, None)]),
        ("contiguous", Local(17, 0), 8, False, [(1, 3, None)]),
        ("contiguous", Local(9, 4), 8, False, [(1, 2, None), (-1, 1, None)]),
        ("contiguous", Chunked(16), 8, False, [(1, 1, None), (-1, 1, None)]),
        ("contiguous", Chunked(8), 8, False, []),
        ("zigzag", Local(4, 0), 8, False, [(1, 1, None), (-1, 1, None)]),  # pieces of four tokens
        ("zigzag", Local(4, 0), 2, False, [(1, 1, None)]),
        ("zigzag", Causal(), 4, False, [(1, 3, None)]),
        ("striped", Local(15, 0), 8, False, [(1, 7, None)]),
        ("zigzag", Causal(), 4, True, [(1, 3, 0), (-1, 3, 1)]),
        ("contiguous", Local(15, 0), 8, True, [(1, 2, None)]),  # half of the way: both ways would be further
        ("contiguous", Causal(), 1, True, []),
    ],
)
def test_only_hops_that_some_device_needs_are_made(layout, mask, shards, both_ways, expected):
    place = hops.spans(layout, 64, shards)
    see = hops.visible(mask, place, place)
    assert list(hops.streams(see.any(0), both_ways)) == expected
    at = layouts.position_of(np.arange(64), layout, 64, shards).reshape(shards, -1)
    for d, offset in np.ndindex(shards, shards):
        really = mask(at[d][:, None], at[d - offset][None]).any()
        assert see[d, offset] or not really
        assert layout == "striped" or see[d, offset] == really


def test_a_device_that_sees_nothing_of_a_hop_calls_no_kernel():
    """Of the (P - 1) P = 12 hops of a contiguous causal ring half, and where the segments do not meet, all."""
    calls = []

    class Counted(Kernel):
        def forward(self, q, *args, **options):
            jax.debug.callback(lambda _: calls.append(1), q[0, 0, 0, 0])
            return super().forward(q, *args, **options)

    mesh = mesh_of((4,), ("context",))
    q, k, v, *_ = inputs()

    def count(mask, segments, pieces):
        calls.clear()
        shard = np.arange(T)[None] // (T // 4)
        ids = jnp.asarray(np.broadcast_to(shard if segments else shard * 0, (B, T)), jnp.int32)
        kernel = Ring(Counted("xla", mask, 1.0, None), "context", hops.streams([True] * 4), pieces)
        at = jnp.arange(T, dtype=jnp.int32)[None]
        where = Where(at, at, ids, ids)
        tokens = jax.P(None, "context")
        f = jax.shard_map(lambda *x: kernel.forward(*x)[0], mesh=mesh, in_specs=tokens, out_specs=tokens)
        jax.block_until_ready(jax.jit(f)(q, k, v, where))
        jax.effects_barrier()
        return len(calls)

    assert count(Causal(), False, pieces=0) == 16
    assert count(Causal(), False, pieces=1) == 4 + 6
    assert count(Full(), True, pieces=1) == 4


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(("t", "s"), [(0, 8), (8, 0)])
def test_empty_sequences(strategy, t, s):
    mesh = mesh_of((4,), ("context",))
    q, k = jnp.ones((1, t, 4, 8)), jnp.ones((1, s, 4, 8))

    def total(q, k, v):
        return context_parallel_attention(q, k, v, mesh=mesh, seq_axis="context", strategy=strategy).sum()

    grads = jax.jit(jax.grad(total, (0, 1, 2)))(q, k, k)
    assert not any(x.any() for x in grads)


@pytest.mark.parametrize(("strategy", "devices"), [("ring", (4,)), ("usp", (2, 2))])
def test_under_x64(strategy, devices):
    """Where JAX makes float64 of what is not said to be float32."""
    axes = ("ulysses", "context")[-len(devices) :]
    mesh = mesh_of(devices, axes)
    how = {"mesh": mesh, "seq_axis": axes, "strategy": strategy, "mask": Causal()}
    x = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
    loss = lambda q, k, v: context_parallel_attention(q, k, v, **how).sum()
    with jax.enable_x64(True):
        grads = jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, x, x)
    assert all(dx.dtype == jnp.float32 for dx in grads)


@pytest.mark.parametrize(("t", "s", "devices"), [(4, 4, 4), (2, 2, 2), (12, 4, 4)])
def test_a_single_key_has_no_halves(t, s, devices):
    mesh = mesh_of((devices,), ("context",))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 1, 8)).astype(np.float32) for n in (t, s, s))
    how = {"mesh": mesh, "seq_axis": "context", "strategy": "ring", "bidirectional": True}
    out = jax.jit(lambda *x: context_parallel_attention(*x, mask=Causal(), **how))(q, k, v)
    np.testing.assert_allclose(out, attention(q, k, v, mask=Causal()), atol=2e-6)


@pytest.mark.parametrize(
    ("n", "n_kv", "devices", "expected"),
    [
        (32, 8, 8, (8, 4, 1)),
        (32, 8, 16, (8, 4, 2)),
        (32, 1, 8, (1, 32, 8)),
        (5, 1, 4, (1, 8, 4)),  # the group padded
        (6, 6, 4, (8, 1, 1)),  # kv heads padded
        (4, 2, 8, (4, 2, 2)),  # both copies and padding: 8 query heads, not 16
        (4, 2, 1, (2, 2, 1)),
    ],
)
def test_heads_over_devices(n, n_kv, devices, expected):
    heads = heads_over(n, n_kv, devices)
    assert heads == expected
    assert heads.kv_heads * heads.copies % devices == heads.kv_heads * heads.group % devices == 0
    assert heads.group % heads.copies == 0


@pytest.mark.parametrize(
    ("length", "heads", "sends"),
    [
        (4 * 16384, (1, 1), "collective_permute"),
        (4 * 2048, (8, 1), "collective_permute"),  # eight query heads a key: as much arithmetic a byte
        (4 * 1024, (8, 4), "all_to_all"),
        (4 * 1024, (8, 1), "all_to_all"),
        (4 * 1024, (2, 2), "all_gather"),  # two heads for four devices
    ],
)
def test_auto_follows_its_rule(length, heads, sends):
    mesh = mesh_of((4,), ("context",))
    q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in heads)

    def attend(q, k, v):
        return context_parallel_attention(q, k, v, mesh=mesh, seq_axis="context", implementation="xla")

    text = jax.jit(attend).lower(q, k, k).as_text()
    for collective in ("collective_permute", "all_to_all", "all_gather"):
        assert (collective in text) == (collective == sends)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_shard_and_unshard_are_inverse(layout):
    mesh = mesh_of((4,), ("context",))
    x = jnp.arange(48.0).reshape(1, 48)
    there = shard_sequence(x, mesh, "context", layout)
    assert (there[0] == layouts.position_of(np.arange(48), layout, 48, 4)).all()
    assert there.sharding.shard_shape(there.shape) == (1, 12)
    back = jax.jit(lambda x: unshard_sequence(x, mesh, "context", layout))(there)
    assert (back == x).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seq_axis": "time"}, ValueError, "seq_axis: expected one of the mesh's axes, context, got 'time'"),
        ({"seq_axis": None}, ValueError, "seq_axis: expected one of the mesh's axes, context, got None"),
        ({"mesh": "context"}, TypeError, "mesh: expected a jax.sharding.Mesh, got str"),
        ({"layout": "zigzag"}, ValueError, "sequence length 50 .* pad it to 56"),
        ({"strategy": "spiral"}, ValueError, "strategy: expected auto, all_gather, ring, ulysses, usp, got 'spiral'"),
        ({"strategy": "usp"}, ValueError, "seq_axis: usp does not work over one, .*name two, .ulysses, ring."),
        (
            {"seq_axis": ("context", "time")},
            ValueError,
            "seq_axis: expected one of the mesh's axes, context, got 'time'",
        ),
        (
            {"strategy": "ulysses", "bidirectional": True},
            ValueError,
            "bidirectional: ulysses has no ring, ring and usp do: leave it out",
        ),
        ({"seq_axis": ("context", "context"), "strategy": "usp"}, ValueError, "'context' is named twice"),
        ({"batch_axis": "context"}, ValueError, "seq_axis, head_axis, batch_axis: 'context' is named twice"),
        ({"seq_axis": ()}, ValueError, "seq_axis: expected the name of a mesh axis, or two"),
        ({"batch_axis": ("context",)}, ValueError, "'context' is named twice"),
        ({"batch_axis": ("data",)}, ValueError, "batch_axis: expected one of the mesh's axes, context, got 'data'"),
    ],
)
def test_refusals(change, error, message):
    mesh = mesh_of((4,), ("context",))
    x = jnp.ones((1, 50, 3, 8))
    with pytest.raises(error, match=message):
        context_parallel_attention(x, x[:, :, :1], x[:, :, :1], **{"mesh": mesh, "seq_axis": "context", **change})


@pytest.mark.parametrize(
    ("axis", "what"), [("head_axis", "heads of query and key, 3 and 1"), ("batch_axis", "batch, 1")]
)
def test_what_an_axis_does_not_divide(axis, what):
    mesh, x = mesh_of((2, 2), ("context", "other")), jnp.ones((1, 50, 3, 8))
    with pytest.raises(ValueError, match=f"{axis}: {what}, must divide by 2, the size of .'other',."):
        context_parallel_attention(x, x[:, :, :1], x[:, :, :1], mesh=mesh, seq_axis="context", **{axis: ("other",)})
