"""The GLA kernels for Trainium2, forward and backward, in the simulator, against the recurrence; the laws they keep.

Every exponential but the fast path's is refused an argument above 0, which is what makes them exact for any gate.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import ringtide
from ringtide.jax import nki
from ringtide.kernels.nki import gla as gla_fwd
from ringtide.kernels.nki import gla_bwd, gla_states, ops
from ringtide.kernels.nki.gla import gla_forward
from ringtide.kernels.nki.gla_bwd import gla_backward
from ringtide.kernels.nki.simulator.errors import RangeError
from ringtide.kernels.nki.simulator.launch import simulate
from ringtide.kernels.nki.simulator.orders import shuffled
from ringtide.reference import gla as truth

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LAUNCH = ops.launch
RESETS = (-1e4, -1e6, -3.4e37, -np.inf)
NAMES = ("o", "hT", "dq", "dk", "dv", "dg", "dh0")
BOUNDS = {  # relative Frobenius errors
    np.dtype(np.float32): dict.fromkeys(NAMES, 2e-6),
    BFLOAT16: {**dict.fromkeys(NAMES, 5e-3), "dg": 2e-2},
}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """No exponent above 0; the Runs of the kernels that were launched."""
    found = []

    def launch(kernel, lnc, *args):
        call = simulate(kernel if lnc == 1 else kernel[lnc], exp_limit=0)
        result = call(*args)
        found.append(call.last)
        return result

    monkeypatch.setattr(ops, "launch", launch)
    return found


def inputs(B, T, N, K, V, dtype=np.float32, seed=0):
    """q, k, v, g, h0, do, dhT."""
    rng = np.random.default_rng(seed)
    keys, values, state = (B, T, N, K), (B, T, N, V), (B, N, K, V)
    q, k, v, do = (rng.normal(size=s).astype(dtype) for s in (keys, keys, values, values))
    g = -rng.exponential(0.3, keys).astype(np.float32)
    h0, dhT = (rng.normal(size=state).astype(np.float32) for _ in range(2))
    return q, k, v, g, h0, do, dhT


def everything(x, scale=0.3, lnc=1):
    """The results by NAMES."""
    o, hT = ops.forward(*x[:5], scale=scale, lnc=lnc)
    return dict(zip(NAMES, (o, hT, *ops.backward(*x, scale=scale, lnc=lnc)), strict=True))


def expected(x, scale=0.3):
    q, k, v, g, h0, do, dhT = x
    options = {"initial_state": h0, "scale": scale}
    results = *truth.gla(q, k, v, g, **options), *truth.gla_grad(q, k, v, g, do, dhT, **options)
    return dict(zip(NAMES, results, strict=True))


def error(x, y):
    x = np.asarray(x, np.float64)
    assert x.shape == y.shape
    assert np.isfinite(x).all()
    return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)


def assert_right(got, want, bounds):
    errors = {name: error(x, want[name]) for name, x in got.items()}
    assert all(errors[name] <= bounds[name] for name in errors), errors


FLOAT32 = BOUNDS[np.dtype(np.float32)]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (80, 160), (96, 192), (128, 128), (128, 256), (192, 40)])
def test_widths(K, V, dtype):
    x = inputs(1, 129, 1 if K == 192 else 2, K, V, dtype)
    got = everything(x, K**-0.5)
    assert [a.dtype for a in got.values()] == [dtype, np.float32, dtype, dtype, dtype, np.float32, np.float32]
    assert_right(got, expected(x, K**-0.5), BOUNDS[dtype])


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 8), (8, 1), (130, 5), (5, 600), (131, 300)])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_odd_widths(K, V, dtype):
    """Of many tokens, so that no result is a few numbers that happen to cancel."""
    x = inputs(2, 20, 1, K, V, dtype)
    assert_right(everything(x), expected(x), BOUNDS[dtype])


@pytest.mark.parametrize("T", [1, 127, 128, 129, 300])
def test_lengths(T):
    x = inputs(1 if T > 129 else 2, T, 3, 8, 12)
    assert_right(everything(x), expected(x), FLOAT32)


@pytest.mark.parametrize("shape", [(2, 0, 1, 8, 4), (0, 3, 1, 8, 4), (1, 3, 0, 8, 4)], ids=str)
def test_nothing(shape):
    x = inputs(*shape)
    got = everything(x)
    assert {name: a.shape for name, a in got.items()} == {name: a.shape for name, a in expected(x).items()}
    assert np.array_equal(got["hT"], x[4])
    assert np.array_equal(got["dh0"], x[6])


@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_any_scale(scale):
    x = inputs(1, 20, 2, 8, 12)
    assert_right(everything(x, scale), expected(x, scale), FLOAT32)


def test_float16_is_computed_in_float32():
    x = inputs(1, 40, 2, 8, 12, np.float16)
    got = everything(x)
    assert got["o"].dtype == got["dq"].dtype == np.float16
    assert_right(got, expected(x), {**dict.fromkeys(NAMES, 4e-4), **dict.fromkeys(("hT", "dg", "dh0"), 2e-6)})


@pytest.mark.parametrize("reset", RESETS)
def test_resets_are_exact(reset):
    """As the op hands them on: a gate is at least -128, whose exponential is 0 in float32."""
    x = list(inputs(1, 200, 2, 16, 24))
    rng = np.random.default_rng(1)
    tokens, single = rng.random((1, 200, 1, 1)) < 0.05, rng.random(x[3].shape) < 0.03
    gates = np.where(tokens | single, np.float32(reset), x[3])
    want = expected([*x[:3], gates, *x[4:]])
    x[3] = np.maximum(gates, np.float32(-128))
    got = everything(x)
    assert_right(got, want, FLOAT32)
    assert (got["dg"][np.broadcast_to(tokens | single, gates.shape)] == 0).all()


@pytest.mark.parametrize("gate", [0, -1e-4, -50, -128])
def test_one_gate_everywhere(gate):
    x = list(inputs(1, 130, 1, 8, 12))
    x[3] = np.full_like(x[3], gate)
    assert_right(everything(x), expected(x), FLOAT32)


def test_a_split_sequence_is_the_whole():
    x = inputs(1, 300, 2, 8, 12)
    whole, want = everything(x), expected(x)
    for at in (128, 190):  # between two chunks, inside one
        q, k, v, g, h0, do, dhT = x
        first, second = ([a[:, s] for a in (q, k, v, g, do)] for s in (slice(at), slice(at, None)))
        h = ops.forward(*first[:4], h0, scale=0.3)[1]
        last = everything([*second[:4], h, second[4], dhT])
        got = everything([*first[:4], h0, first[4], last["dh0"]])
        joined = {name: np.concatenate([got[name], last[name]], 1) for name in ("o", "dq", "dk", "dv", "dg")}
        joined |= {"hT": last["hT"], "dh0": got["dh0"]}
        assert_right(joined, want, FLOAT32)
        assert_right(joined, {name: a.astype(np.float64) for name, a in whole.items()}, FLOAT32)


def test_a_long_sequence_is_a_loop(runs, monkeypatch):
    """Turns of the same instructions each, what stands around them the same, and the results right."""
    for kernel in (gla_fwd, gla_bwd, gla_states):
        monkeypatch.setattr(kernel, "TURN", 4)  # units: here two chunks of two heads

    def program(run):
        turns = {}
        for made in run.machines[0].instructions:
            turns.setdefault(made.loop, []).append((made.op, made.engine, made.line, made.facts.get("n", made.nbytes)))
        return turns.pop(()), [turns[loop] for loop in sorted(turns)]

    for chunks in (5, 7):
        x = inputs(1, 128 * chunks + 3, 2, 2, 3)
        assert_right(everything(x), expected(x), FLOAT32)
    programs = [program(run) for run in runs]
    for (outside, short), (also, long) in zip(programs[:2], programs[2:], strict=True):
        assert outside == also
        assert len(long) > len(short) >= 2
        assert {tuple(turn) for turn in long} == {tuple(turn) for turn in short}
    assert len(set(map(tuple, programs[0][1]))) == 1  # the forward kernel has one loop


@pytest.mark.parametrize("N", [1, 3, 4])
def test_two_cores_give_the_same_bits(N):
    x = inputs(1, 130, N, 8, 12)
    one, two = everything(x), everything(x, lnc=2)
    for name in NAMES:
        assert np.array_equal(one[name], two[name]), name


@pytest.mark.parametrize("lnc", [1, 2])
def test_any_order_gives_the_same_bits(runs, lnc):
    everything(inputs(1, 129, 2, 8, 12, BFLOAT16), lnc=lnc)
    for run in runs:
        for seed in range(20):
            shuffled(run, seed)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_the_widest_fit_on_the_chip(runs, dtype):
    q, k, v, g, h0, *_ = inputs(1, 1, 8, 128, 512, dtype)
    ops.forward(q, k, v, g, h0, scale=1.0)
    x = inputs(1, 1, 8, 128, 256, dtype)
    ops.backward(*x, scale=1.0)
    for run in runs:
        assert run.capacity[0].sbuf_bytes <= 192 * 1024
        assert run.capacity[0].psum_banks <= 8


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_the_fast_path_is_right_for_bounded_gates(dtype):
    x = inputs(1, 200, 2, 64, 64, dtype)
    g = np.maximum(x[3], -5)
    args = *x[:3], g, x[4], 0.3, True
    with pytest.raises(RangeError, match="exp of"):  # its exponents rise above 0
        simulate(gla_forward, exp_limit=0)(*args)
    o, hT = simulate(gla_forward, exp_limit=75)(*args)
    want = truth.gla(*x[:3], g, initial_state=x[4], scale=0.3)
    assert error(o, want[0]) <= BOUNDS[dtype]["o"]
    assert error(hT, want[1]) <= BOUNDS[dtype]["hT"]


def test_results_hang_on_every_exponential():
    """Noise of 2**-12 on the scalar engine's functions shows, and no more than that."""
    x = inputs(1, 140, 1, 16, 24)
    for kernel, args, want in ((gla_forward, x[:5], expected(x)["o"]), (gla_backward, x, expected(x)["dq"])):
        noisy = simulate(kernel, exp_limit=0, perturb=2.0**-12)(*args, 0.3)[0]
        assert 1e-6 < error(noisy, want) < 2.0**-10


def test_one_core_or_two():
    with pytest.raises(ValueError, match=r"^lnc: expected 1 or 2"):
        LAUNCH(gla_forward, 3)


# --- ringtide.gla(..., implementation="nki") -------------------------------------------------------------------------


def op(*args, **options):
    return ringtide.gla(*args, output_final_state=True, implementation="nki", **options)


def op_inputs(B=2, T=20, N=2, K=8, V=12, dtype=np.float32):
    return inputs(B, T, N, K, V, dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_op_with_segments_and_all_gradients(compiled):
    x = [a.copy() for a in op_inputs()]
    ids = np.array([[0] * 6 + [-1] * 3 + [2] * 11, [-1] * 2 + [5] * 10 + [1] * 8])
    for i in (0, 1, 2, 3, 5):
        x[i][ids < 0] = np.nan

    def run(q, k, v, g, h0, do, dhT):
        f = lambda q, k, v, g, h0: op(q, k, v, g, initial_state=h0, segment_ids=ids)
        results, vjp = jax.vjp(f, q, k, v, g, h0)
        return *results, *vjp((do, dhT))

    got = (jax.jit(run) if compiled else run)(*(jnp.asarray(a) for a in x))
    options = {"initial_state": x[4], "segment_ids": ids}
    want = *truth.gla(*x[:4], **options), *truth.gla_grad(*x[:4], *x[5:], **options)
    assert_right(*(dict(zip(NAMES, results, strict=True)) for results in (got, want)), FLOAT32)


@pytest.mark.parametrize("reset", RESETS)
def test_op_clamps_resets(reset):
    q, k, v, g, h0, *_ = op_inputs()
    g[:, 5], g[:, 9, :, 3] = reset, reset
    for got, want in zip(op(q, k, v, g, initial_state=h0), truth.gla(q, k, v, g, initial_state=h0), strict=True):
        assert error(got, want) <= 2e-6


def test_op_under_transforms():
    q, k, v, g, *_ = op_inputs(T=6, N=1)
    want = truth.gla_grad(q, k, v, g, 2 * truth.gla(q, k, v, g)[0])[:4]

    def loss(*x):
        return (op(*x)[0] ** 2).sum()

    grad = lambda f: jax.grad(f, (0, 1, 2, 3))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, total = PartitionSpec("data"), lambda *x: jax.lax.psum(loss(*x), "data")
    sharded = jax.shard_map(total, mesh=mesh, in_specs=rows, out_specs=PartitionSpec())
    for f in (
        jax.jit(grad(jax.remat(loss))),
        jax.vmap(grad(lambda *x: loss(*(a[None] for a in x)))),
        jax.jit(grad(sharded)),
    ):
        for a, b in zip(f(q, k, v, g), want, strict=True):
            assert error(a, b) <= 2e-6


def test_on_a_device_kernels_take_the_arrays_of_jax(monkeypatch):
    """The path that a device takes, the simulator in its place: two cores, keys in two parts."""
    monkeypatch.setattr(nki, "SIMULATED", False)
    x = tuple(map(jnp.asarray, inputs(1, 9, 3, 130, 5)))
    got = (*nki.forward(*x[:5], scale=0.3), *nki.backward(*x, scale=0.3))
    assert all(isinstance(a, jax.Array) for a in got)
    assert_right(dict(zip(NAMES, got, strict=True)), expected(x), FLOAT32)


def test_op_of_megabytes_under_jit():
    q, k, v, g, h0, *_ = inputs(1, 300, 4, 128, 128, BFLOAT16)
    o, hT = jax.jit(lambda *x: op(*x[:4], initial_state=x[4]))(q, k, v, g, h0)
    want = truth.gla(q, k, v, g, initial_state=h0)
    assert o.dtype == jnp.bfloat16
    assert max(error(o, want[0]), error(hT, want[1])) <= 5e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_decode_goes_on_from_a_prompt(compiled):
    """The state of a prompt into a slot of the pool, then token by token: the whole sequence."""
    q, k, v, g, *_ = op_inputs(T=12)
    want, state = truth.gla(q, k, v, g)
    _, prompt = op(*(a[:, :9] for a in (q, k, v, g)))
    ids, pool = np.array([4, -1, 1]), np.full((5, 2, 8, 12), np.nan, np.float32)
    pool[[4, 1]] = prompt
    step = lambda *x: ringtide.gla_decode_step(*x, slot_ids=ids, implementation="nki")
    step = jax.jit(step) if compiled else step
    for t in range(9, 12):
        out, pool = step(*(np.insert(a[:, t], 1, np.nan, 0) for a in (q, k, v, g)), pool)
        assert error(np.delete(out, 1, 0), want[:, t]) <= 2e-6
        assert (out[1] == 0).all()
    assert error(np.asarray(pool)[[4, 1]], state) <= 2e-6
    assert np.isnan(np.asarray(pool)[[0, 2, 3]]).all()
