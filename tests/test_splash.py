"""The splash kernels, interpreted: the forward's branch, tiles of every shape, stacks of heads, refusals."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ringtide import Causal, Full, Local, attention
from ringtide.kernels.masks import Where
from ringtide.kernels.pallas import splash, splash_bwd
from ringtide.kernels.pallas.tiles import INTERPRET, Cut, Tiles
from ringtide.reference import attention as reference
from ringtide.testing import check
from ringtide.testing.attention import np_dtype
from ringtide.testing.bounds import Bound, Claim, epsilon, largest

pallas = partial(attention, implementation="pallas", return_lse=True)
RESULTS = ("out", "lse", "dq", "dk", "dv")
MASKS = {  # and the truth, which shares no code with the op
    "full": (Full(), lambda q, k: k == k + 0 * q),
    "causal": (Causal(), lambda q, k: k <= q),
    "window": (Local(450, 20), lambda q, k: (q - 450 <= k) & (k <= q + 20)),
}


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np_dtype(dtype))


def inputs(t, s, n, n_kv, h, h_v=None, *, b=1, seed=0, dtype="float32"):
    """(q, k, v, dout, dlse)"""
    x = partial(normal, dtype=dtype)
    q, k, v = x(b, t, n, h, seed=seed), x(b, s, n_kv, h, seed=seed + 1), x(b, s, n_kv, h_v or h, seed=seed + 2)
    return q, k, v, x(b, t, n, h_v or h, seed=seed + 3), normal(b, t, n, seed=seed + 4)


def stepper(fn, **options):
    """(q, k, v, dout, dlse) -> RESULTS, compiled."""

    def step(q, k, v, dout, dlse):
        (out, lse), vjp = jax.vjp(lambda *x: fn(*x, **options), q, k, v)
        return out, lse, *vjp((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))

    return jax.jit(step)


def kernels(q, k, v, dout, dlse, *, mask, scale=None, **options):
    """RESULTS by the pair of kernels itself, every row of which sees something."""
    options |= {"mask": mask, "scale": scale or q.shape[3] ** -0.5}
    out, lse = splash.forward(q, k, v, Where(), **options)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), -1) - dlse
    return out, lse, *splash.backward(q, k, v, Where(), dout, lse, delta, **options)


def truth_of(args, dtype=np.float64, **options):
    q, k, v, dout, dlse = args
    with np.errstate(over="ignore", invalid="ignore"):
        out, lse = reference.attention(q, k, v, dtype=dtype, **options)
        dlse = np.where(np.isfinite(lse), dlse, 0)
        return out, lse, *reference.attention_grad(q, k, v, dout, dlse, dtype=dtype, **options)[:3]


def held(got, args, why="", **options):
    """Within the bounds of `ringtide.testing`, with a logit's rounding taken from the sum of its terms."""
    q, k, _, dout, dlse = args
    truth, naive = truth_of(args, **options), truth_of(args, np.float32, **options)
    scale = options.get("scale") or q.shape[3] ** -0.5
    by_head = lambda x: np.abs(x.astype(np.float64)).max((0, 2))
    logit = scale * (by_head(q) @ by_head(k).T).max()
    delta = (dout.astype(np.float64) * truth[0]).sum(-1) - dlse
    ds = scale * largest(delta)
    terms = dict(zip(RESULTS, map(largest, truth), strict=True)) | {
        "dq": ds * largest(k),
        "dk": ds * largest(q),
        "lse": 1,
    }
    for name, x, want, rough in zip(RESULTS, got, truth, naive, strict=False):
        dtype = np.dtype(np.float32) if name == "lse" else q.dtype
        assert x.dtype == dtype
        slack = terms[name] * (logit * epsilon(np.float32) / 2 + (0 if name in ("out", "dv") else epsilon(dtype)))
        claim = Claim(name, np.asarray(x), want, Bound.of(want, rough.astype(dtype), dtype, slack))
        assert claim.ratio() <= 1, f"{why}: {claim}"


def test_the_fuzzer_finds_nothing():
    report = check(partial(attention, implementation="pallas"), "attention", cases=20, seed=3)
    assert report, report
    assert not report.refused


def test_the_fuzzer_finds_nothing_in_the_tiles_of_v6e_and_7x(monkeypatch):
    jax.clear_caches()
    for kernel in (splash, splash_bwd):
        monkeypatch.setitem(kernel.TILES, INTERPRET, {256: Tiles(256, 256, 128, 256, fold=True)})
    report = check(partial(attention, implementation="pallas"), "attention", cases=10, seed=4, dtypes=("bfloat16",))
    jax.clear_caches()
    assert report, report


def test_no_row_depends_on_the_row_that_overflows_beside_it():
    """The fuzzer's property of what is not seen, bit for bit; with this case other rows changed in their last bits."""
    case = "AttentionCase(T=640, S=640, H=16, H_v=16, mask='Causal()', fill='large', seed=20)"
    report = check(partial(attention, implementation="pallas"), "attention", replay=case)
    assert report, report


@pytest.mark.parametrize("side", ["q_positions", "kv_positions"])
def test_positions_of_each_sequence_on_one_side_only(side):
    q, k, v, *_ = inputs(300, 650, 2, 2, 8, b=3)
    length = 300 if side == "q_positions" else 650
    positions = {side: np.arange(length) * np.array([[2], [1], [0]]) + np.array([[0], [7], [320]])}
    want, _ = reference.attention(q, k, v, mask=Causal(), **positions)
    got = jax.jit(partial(attention, mask=Causal(), implementation="pallas"))(q, k, v, **positions)
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


def test_values_without_a_width():
    q, k, v, *_ = inputs(200, 200, 2, 1, 8)
    (out, lse), (_, want) = (
        attention(q, k, v[..., :0], mask=Causal(), return_lse=True, implementation=name) for name in ("pallas", "xla")
    )
    assert out.shape == (1, 200, 2, 0)
    np.testing.assert_allclose(lse, want, rtol=1e-6)


def test_second_derivatives_where_another_kernel_is_lowered():
    q, k, v, *_ = inputs(100, 100, 2, 1, 8)

    def curvature(name):
        gradient = jax.grad(lambda q: (attention(q, k, v, implementation=name) ** 2).sum())
        return jax.jit(lambda q: jax.jvp(gradient, (q,), (q,))[1])(q)

    np.testing.assert_array_equal(curvature(None), curvature("xla"))
    with pytest.raises(NotImplementedError, match="once: use implementation="):
        curvature("pallas")


# The forward's branch. With scale ln 2 a score is q . k in powers of two: q[0] = 1 and k[0] say how large.

T, ONE = 640, np.log(2)


def heights():
    """name -> the scores of the T keys, in powers of two."""
    ramp = np.arange(T)
    cases = {"all equal": 0 * ramp, "ties": ramp % 3 * 60.0, "very negative": 0.0 * ramp - 3e4}
    cases |= {"grows": 2.0 * ramp, "falls": -2.0 * ramp, "grows far": 60.0 * ramp, "falls far": -60.0 * ramp}
    spike = lambda height, place: {f"{height} at {place}": np.where(ramp == place, height, 0)}
    for height in (99, 101, 130, 5000):
        cases |= spike(height, 3) | spike(height, 300)
    return cases | spike(5000, 636)


def steep(height, dtype="float32", seed=0):
    """Scores of the heights plus noise; the second head sees them upside down."""
    q, k, v, *rest = inputs(T, T, 2, 1, 16, 24, seed=seed, dtype=dtype)
    q[..., 1:] /= 2
    q[..., 0] = [1, -1]
    k[0, :, 0, 0] = height
    return q, k, v, *rest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_scores_of_any_course(mask, dtype):
    """Those that pass the reference by less and by more than 2^100, in blocks that come before and after."""
    op, see = MASKS[mask]
    step = stepper(pallas, mask=op, scale=ONE)
    cases = {name: steep(height, dtype) for name, height in heights().items()}

    q, k, v, *rest = steep(heights()["130 at 300"], dtype)
    cases["values of 1e30"] = q, k, (v.astype(np.float32) * 1e30).astype(v.dtype), *rest
    q, k, v, *rest = steep(heights()["99 at 3"], dtype)
    cases["values of 1e30, streamed"] = q, k, (v.astype(np.float32) * 1e30).astype(v.dtype), *rest

    q, k, v, *rest = inputs(T, T, 2, 1, 16, 24, dtype=dtype)
    q, k = q.copy(), k.copy()
    q[..., :7], q[..., 7:14], k[..., :7], k[..., 7:14] = 1e4, 0, 0, -1e4
    cases["huge norms, tiny scores"] = q, k, v, *rest
    alike = [np.broadcast_to(x[:, :1], x.shape).copy() for x in (q, k)]
    cases["all alike"] = *alike, v, *rest
    for name, args in cases.items():
        held(step(*args), args, name, mask=see, scale=ONE)


def test_rows_without_a_reference():
    """Half a block's rows see none of the keys that come first; some see nothing at all; then all see the others."""
    q_at, k_at = 256 + np.arange(T), np.arange(T) - T
    k_at[T - 128 :] = 384 + np.arange(128)  # the last chunk comes first, and is seen from position 384 on
    blind = q_at.copy()
    blind[300:310] = blind[512:] = -2 * T
    step = jax.jit(lambda at, *x: stepper(pallas, mask=Causal(), scale=ONE, q_positions=at, kv_positions=k_at)(*x))
    for positions in (q_at, blind):
        for name in ("all equal", "grows far", "falls far", "130 at 3", "5000 at 636"):
            args = steep(heights()[name])
            options = {"q_positions": positions, "kv_positions": k_at}
            held(step(positions, *args), args, name, mask=MASKS["causal"][1], scale=ONE, **options)


def forward():
    """(q, k, v) -> (out, lse), traced anew."""
    options = {"mask": Causal(), "scale": float(ONE)}
    return jax.jit(lambda q, k, v: splash.forward(q, k, v, Where(), **options))


def test_without_a_second_attempt_far_scores_are_lost(monkeypatch):
    """So the tests above do take it; and what passes by 2^101 does not need it."""
    once = SimpleNamespace(**{**vars(lax), "while_loop": lambda cond, body, init: body(jnp.int32(init))})
    monkeypatch.setattr(splash, "lax", once)
    step = forward()
    for name, enough in {"99 at 3": True, "101 at 3": True, "130 at 3": False, "falls far": False}.items():
        args = steep(heights()[name])
        got = step(*args[:3])
        if enough:
            held(got, args, name, mask=MASKS["causal"][1], scale=ONE)
        else:
            assert not all(np.isfinite(x).all() for x in got), name


@pytest.mark.parametrize("limit", [0.0, 2.0**20])
def test_second_attempts_change_nothing(monkeypatch, limit):
    """Every block takes one, or every other: the keys that were read ahead for the next block stay good."""
    monkeypatch.setattr(splash, "OVERFLOW", limit)
    step = forward()
    for name in ("all equal", "99 at 3", "99 at 300", "130 at 3"):
        args = steep(heights()[name])
        held(step(*args[:3]), args, name, mask=MASKS["causal"][1], scale=ONE)


# Tiles.


@pytest.mark.parametrize(
    ("h", "mask", "sizes"),
    [
        (128, "causal", (256, 256, 128, 256)),
        (64, "full", (128, 512, 256, 128)),
        (80, "window", (384, 512, 256, 256)),
    ],
)
def test_a_folded_scale_costs_nothing(h, mask, sizes):
    op, see = MASKS[mask]
    args = inputs(600, 600, 2, 1, h, seed=h, dtype="bfloat16")
    truth, errors = truth_of(args, mask=see), []
    for fold in (True, False):
        got = jax.jit(partial(kernels, mask=op, sizes=Tiles(*sizes, fold=fold)))(*args)
        held(got, args, f"fold={fold}", mask=see)
        errors.append([np.sqrt(np.mean((np.asarray(x, np.float64) - y) ** 2)) for x, y in zip(got, truth, strict=True)])
    for name, folded, plain in zip(RESULTS, *errors, strict=True):
        assert name == "lse" or folded <= 1.02 * plain, name  # lse is float32, where 16 bits of q show


def test_a_folded_scale_keeps_lse_in_float32():
    q, *rest = inputs(300, 300, 2, 1, 128, seed=1, dtype="bfloat16")
    args = (25 * q).astype(q.dtype), *rest
    options = {"mask": Causal(), "scale": 128**-0.5, "sizes": Tiles(256, 256, 128, 256, fold=True)}
    got = jax.jit(lambda q, k, v: splash.forward(q, k, v, Where(), **options))(*args[:3])
    held(got, args, mask=MASKS["causal"][1])


@pytest.mark.parametrize(("n", "n_kv", "stack"), [(3, 3, 1), (6, 3, 2), (3, 1, 3), (15, 3, 5), (32, 1, 8)])
def test_stacks_of_heads(n, n_kv, stack):
    sizes = Tiles(2048, 256, 128, 256)
    args = inputs(300, 300, n, n_kv, 16, 8)
    assert Cut(*args[:3], Where(), Causal(), sizes).stack == stack
    held(jax.jit(partial(kernels, mask=Causal(), sizes=sizes))(*args), args, mask=MASKS["causal"][1])


@pytest.mark.parametrize(("b", "n", "n_kv"), [(1, 4, 1), (1, 8, 2), (2, 3, 1), (1, 6, 2), (1, 2, 2), (1, 32, 1)])
def test_every_core_has_a_stack(b, n, n_kv):
    q, k = (jax.ShapeDtypeStruct((b, 4096, heads, 128), jnp.bfloat16) for heads in (n, n_kv))
    cut = Cut(q, k, k, Where(), Causal(), Tiles(2048, 2048, 512, 512), cores=2)
    assert cut.b * cut.stacks % 2 == 0
    assert cut.stack * cut.stacks == n
    assert n // n_kv % cut.stack == 0


def test_two_cores(monkeypatch):
    """The cut for them; the interpreter has one."""
    for module in (splash, splash_bwd):
        monkeypatch.setattr(module, "Cut", lambda *args: Cut(*args[:6], cores=2))
    args = inputs(300, 300, 4, 1, 16)
    held(
        jax.jit(partial(kernels, mask=Causal(), sizes=Tiles(2048, 256, 128, 256)))(*args), args, mask=MASKS["causal"][1]
    )


# Shapes, dtypes, refusals.


@pytest.mark.parametrize(
    ("h", "h_v", "t", "s", "dtype"),
    [
        (1, 1, 129, 1, "float32"),
        (8, 8, 1, 129, "bfloat16"),
        (48, 48, 127, 127, "float16"),
        (80, 80, 129, 127, "float32"),
        (96, 96, 129, 129, "bfloat16"),
        (192, 128, 127, 129, "float16"),
    ],
)
def test_any_shape(h, h_v, t, s, dtype):
    args = inputs(t, s, 2, 1, h, h_v, dtype=dtype)
    held(stepper(pallas, mask=Causal())(*args), args, mask=MASKS["causal"][1])


def test_empty():
    none, some = normal(2, 0, 4, 16), normal(2, 5, 4, 16)
    assert pallas(none, none, none)[0].shape == (2, 0, 4, 16)
    out, lse = pallas(some, none, none)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()


def test_refusals():
    x = normal(1, 9, 2, 8)
    table = jnp.arange(20) % 3 == 0
    for mask, cure in ((np.ones((1, 1, 9, 9), bool), "dense mask"), (lambda q, k: table[q - k], "captures an array")):
        with pytest.raises(NotImplementedError, match=f'pallas: .*{cure}.*implementation="xla"'):
            pallas(x, x, x, mask=mask)
        expected = attention(x, x, x, mask=mask, implementation="xla")
        np.testing.assert_array_equal(attention(x, x, x, mask=mask, implementation=("pallas", "xla")), expected)
        np.testing.assert_array_equal(attention(x, x, x, mask=mask), expected)
