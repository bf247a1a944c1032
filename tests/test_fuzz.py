"""The fuzzer finds what is planted, passes what is right, and replays what it prints."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given

import ringtide
from ringtide.cli import fuzz
from ringtide.kernels.masks import Interval
from ringtide.reference.attention import attention as attention64
from ringtide.reference.gla import gla as gla64
from ringtide.testing import AttentionCase, GLACase, attention_cases, check, gla_cases, parse
from ringtide.testing.cases import deal, segment_ids
from ringtide.testing.sharded import drawn, whole

# Right implementations in NumPy: the reference computed in float32. They compile nothing, so whole sweeps take seconds.


def numpy_attention(q, k, v, *, return_lse=False, **options):
    out, lse = attention64(q, k, v, dtype=np.float32, **options)
    return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)


def numpy_gla(q, k, v, g, *, output_final_state=False, **options):
    o, state = gla64(q, k, v, g, dtype=np.float32, **options)
    return o.astype(v.dtype), state if output_final_state else None


@pytest.mark.parametrize(("fn", "op"), [(numpy_attention, "attention"), (numpy_gla, "gla")])
def test_right_functions_pass(fn, op):
    report = check(fn, op, cases=60, seed=1, gradients=False, block=32)
    assert report, report
    assert report.cases == 60
    assert 0 < report.worst < 1


def test_relative_errors_can_be_held_tighter():
    """Half precision is wide: one percent is within the usual bounds."""

    def off(q, k, v, g, **options):
        o, state = numpy_gla(q, k, v, g, **options)
        return (o.astype(np.float32) * 1.01).astype(o.dtype), state

    how = {"cases": 20, "gradients": False, "dtypes": ("bfloat16",), "shrink": 0}
    limits = {"bfloat16": {"o": 5e-3}}
    assert check(off, "gla", **how)
    assert check(numpy_gla, "gla", relative=limits, **how)
    report = check(off, "gla", relative=limits, **how)
    assert report.failed
    assert report.failure.property == "values"


# Wrong ones: what people really ship. Each takes a keyword of its own, `right`, the function it spoils.


def base_two_lse(q, k, v, **options):
    out = numpy_attention(q, k, v, **options)
    return (out[0], out[1] / np.float32(np.log(2))) if options.get("return_lse") else out


def orphans_are_means(q, k, v, *, return_lse=False, **options):
    out, lse = numpy_attention(q, k, v, return_lse=True, **options)
    if v.shape[1]:
        mean = np.nan_to_num(v.astype(np.float32)).mean(1, keepdims=True).repeat(q.shape[2] // v.shape[2], 2)
        out = np.where(np.isneginf(lse)[..., None], mean, out).astype(out.dtype)
    return (out, lse) if return_lse else out


def window_off_by_one(q, k, v, *, mask=None, **options):
    return numpy_attention(q, k, v, mask=(lambda q, k: mask(q, k - 1)) if callable(mask) else mask, **options)


def acausal_tile(q, k, v, *, mask=None, **options):
    if callable(mask):
        right = mask
        mask = lambda q, k: right(q, k) | ((q // 16 == k // 16) & (q > 40))
    return numpy_attention(q, k, v, mask=mask, **options)


def bfloat16_sums(q, k, v, *, return_lse=False, **options):
    out, lse = numpy_attention(q, k, v, return_lse=True, **options)
    out = out.astype(ml_dtypes.bfloat16).astype(out.dtype)
    return (out, lse) if return_lse else out


def heads_interleaved(q, k, v, **options):
    times = q.shape[2] // k.shape[2]
    return numpy_attention(q, np.tile(k, (1, 1, times, 1)), np.tile(v, (1, 1, times, 1)), **options)


def padding_attends_padding(q, k, v, *, segment_ids=None, **options):
    if segment_ids is not None:
        q, k, v = (np.nan_to_num(x) for x in (q, k, v))
        segment_ids = tuple(abs(ids) for ids in (segment_ids if isinstance(segment_ids, tuple) else [segment_ids] * 2))
    return numpy_attention(q, k, v, segment_ids=segment_ids, **options)


def positions_ignored(q, k, v, *, q_positions=None, kv_positions=None, **options):
    return numpy_attention(q, k, v, **options)


def sink_counted_twice(q, k, v, *, sinks=None, **options):
    return numpy_attention(q, k, v, sinks=None if sinks is None else sinks + np.float32(np.log(2)), **options)


def scale_forgotten(q, k, v, *, scale=None, **options):
    return numpy_attention(q, k, v, scale=1.0, **options)


def nan_leaks_from_padding(q, k, v, **options):
    out = numpy_attention(q, k, v, **options)
    first = out[0] if isinstance(out, tuple) else out
    first[np.isnan(q.astype(np.float32)).any((2, 3))] = np.nan
    return out


def rounds_with_other_rows(q, k, v, **options):
    """Right within every bound, but a row depends in its last bit on the largest key of all."""
    out = numpy_attention(q, k, v, **options)
    first = out[0] if isinstance(out, tuple) else out
    if np.nan_to_num(k.astype(np.float32)).max(initial=0) > 20:
        first[:] = np.nextafter(first.astype(np.float32), np.float32(9)).astype(q.dtype)
    return out


def crashes_at_one_token(q, k, v, **options):
    if q.shape[1] == 1:
        raise IndexError("no block fits")
    return numpy_attention(q, k, v, **options)


ATTENTION_FAULTS = [
    base_two_lse,
    orphans_are_means,
    window_off_by_one,
    acausal_tile,
    bfloat16_sums,
    heads_interleaved,
    padding_attends_padding,
    positions_ignored,
    sink_counted_twice,
    scale_forgotten,
    nan_leaks_from_padding,
    rounds_with_other_rows,
    crashes_at_one_token,
]


@pytest.mark.parametrize("fn", ATTENTION_FAULTS, ids=lambda fn: fn.__name__)
def test_attention_faults_are_caught(fn):
    report = check(fn, "attention", cases=300, seed=2, gradients=False, stop_early=True, shrink=0, block=32)
    assert not report
    assert fn is not rounds_with_other_rows or report.failure.property == "unseen", report


def segments_ignored(q, k, v, g, *, segment_ids=None, **options):
    ids = None if segment_ids is None else np.where(segment_ids < 0, -1, 0)
    return numpy_gla(q, k, v, g, segment_ids=ids, **options)


def padding_hides_a_boundary(q, k, v, g, *, segment_ids=None, **options):
    """Compares each token with its neighbour only: no reset where padding stands between two documents."""
    if segment_ids is not None:
        before = np.roll(segment_ids, 1, axis=1)
        starts = (segment_ids != before) & (segment_ids >= 0) & (before >= 0)
        segment_ids = np.where(segment_ids < 0, -1, np.cumsum(starts, axis=1))
    return numpy_gla(q, k, v, g, segment_ids=segment_ids, **options)


def padding_decays(q, k, v, g, *, segment_ids=None, **options):
    if segment_ids is not None:
        padding = segment_ids < 0
        q, k, v = (np.where(padding[..., None, None], 0, x).astype(x.dtype) for x in (q, k, v))
        g = np.where(padding[..., None, None], np.float32(-0.5), g)
        real = np.maximum.accumulate(np.where(padding, 0, np.arange(ids_length(padding))), axis=1)
        segment_ids = np.take_along_axis(np.where(padding, segment_ids.max(1, keepdims=True), segment_ids), real, 1)
    return numpy_gla(q, k, v, g, segment_ids=segment_ids, **options)


def ids_length(padding):
    return padding.shape[1]


def gates_by_cumulative_sums(q, k, v, g, *, scale=None, initial_state=None, output_final_state=False, segment_ids=None):
    """The textbook form: exponents as differences of one cumulative sum."""
    if segment_ids is not None:
        raise NotImplementedError("segment_ids: not here")
    G = np.cumsum(np.maximum(g, -128), 1, dtype=np.float32)
    causal = np.tril(np.ones((q.shape[1],) * 2, bool))[None, :, :, None, None]
    decay = np.exp(np.where(causal, G[:, :, None] - G[:, None], -np.inf))  # [B, T, T, N, K]
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    out = np.einsum("btnk,btsnk,bsnk,bsnv->btnv", q, decay, k, v, optimize=True)
    state = np.einsum("bsnk,bsnk,bsnv->bnkv", decay[:, -1], k, v, optimize=True)
    if initial_state is not None:
        out += np.einsum("btnk,bnkv->btnv", q * np.exp(G), initial_state)
        state += np.exp(G[:, -1])[..., None] * initial_state
    return np.float32(scale or q.shape[-1] ** -0.5) * out, state


def gates_clamped_too_soon(q, k, v, g, **options):
    return numpy_gla(q, k, v, np.maximum(g, -8), **options)


def state_in_bfloat16(q, k, v, g, **options):
    out, state = numpy_gla(q, k, v, g, **options)
    return out, None if state is None else state.astype(ml_dtypes.bfloat16).astype(np.float32)


def current_token_excluded(q, k, v, g, **options):
    out, state = numpy_gla(q, k, v, g, **options)
    own = (q.astype(np.float32) * k.astype(np.float32)).sum(-1, keepdims=True) * v.astype(np.float32)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    return np.nan_to_num(out - scale * own).astype(out.dtype), state


def reads_a_later_token(q, k, v, g, **options):
    if q.shape[1] > 20 and options.get("segment_ids") is None:
        later = (k[:, -1, :, :1] > 0) * np.float32(1e-7)  # of no size, but from the future
        k = k.copy()
        k[:, 15] = (k[:, 15] * (1 + later)).astype(k.dtype)
    return numpy_gla(q, k, v, g, **options)


def state_dropped_when_empty(q, k, v, g, **options):
    out, state = numpy_gla(q, k, v, g, **options)
    return out, np.zeros_like(state) if not q.shape[1] else state


GLA_FAULTS = [
    segments_ignored,
    padding_hides_a_boundary,
    padding_decays,
    gates_by_cumulative_sums,
    gates_clamped_too_soon,
    state_in_bfloat16,
    current_token_excluded,
    reads_a_later_token,
    state_dropped_when_empty,
]


@pytest.mark.parametrize("fn", GLA_FAULTS, ids=lambda fn: fn.__name__)
def test_gla_faults_are_caught(fn):
    limits = {}
    if fn is gates_by_cumulative_sums:
        limits = {"without": ("segments", "empty"), "dtypes": ("float32",)}
    report = check(fn, "gla", cases=80, seed=2, gradients=False, stop_early=True, shrink=0, **limits)
    assert not report
    assert fn is not reads_a_later_token or report.failure.property == "causal", report


# Faults that only gradients show, so in JAX; small shapes and one dtype, since each shape is compiled.


def jax_attention(q, k, v, *, mask=None, return_lse=False, spoil=None):
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5
    if mask is not None:
        s = jnp.where(mask(jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])), s, -jnp.inf)
    lse = jax.nn.logsumexp(s, -1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), v, precision="highest")
    lse = lse.swapaxes(1, 2)
    lse = jax.lax.stop_gradient(lse) if spoil == "dlse" else lse
    return (out, lse) if return_lse else out


def jax_gla(q, k, v, g, *, initial_state=None, output_final_state=False, spoil=None):
    def walk(g):
        def step(S, x):
            q, k, v, g = x
            S = jnp.exp(g)[..., None] * S + k[..., None] * v[..., None, :]
            return S, jnp.einsum("bnk,bnkv->bnv", q, S, precision="highest") * q.shape[-1] ** -0.5

        first = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1])) if initial_state is None else initial_state
        return jax.lax.scan(step, first, [x.swapaxes(0, 1) for x in (q, k, v, jnp.maximum(g, -128))])

    state, o = walk(g)
    if spoil == "dhT":  # the gradient of the final state does not reach the gates
        state, _ = walk(jax.lax.stop_gradient(g))
    if spoil == "dh0" and initial_state is not None:
        state, _ = jax.lax.stop_gradient(walk(g))
    return o.swapaxes(0, 1), state if output_final_state else None


@pytest.mark.parametrize("spoil", [None, "dlse"])
def test_attention_gradients(spoil):
    def fn(q, k, v, *, mask=None, return_lse=False):
        return jax_attention(q, k, v, mask=mask, return_lse=return_lse, spoil=spoil)

    limits = {"masks": ("Causal()",), "dtypes": ("float32",), "block": 16, "without": ("gqa", "cross", "empty")}
    report = check(fn, "attention", cases=32, seed=3, stop_early=True, shrink=0, **limits)
    assert report.ok == (spoil is None), report
    assert spoil is None or report.failure.message[:3] in ("dq[", "dk[")


@pytest.mark.parametrize("spoil", [None, "dhT", "dh0"])
def test_gla_gradients(spoil):
    def fn(q, k, v, g, *, initial_state=None, output_final_state=False):
        return jax_gla(q, k, v, g, initial_state=initial_state, output_final_state=output_final_state, spoil=spoil)

    report = check(fn, "gla", cases=32, seed=3, stop_early=True, shrink=0, dtypes=("float32",), block=16)
    assert report.ok == (spoil is None), report
    assert spoil is None or report.failure.property == "values"


# Our own ops.


def test_ringtide_attention():
    report = check(ringtide.attention, "attention", cases=30, seed=1)
    assert report, report


def test_ringtide_attention_in_many_tiles(monkeypatch):
    """Tiles of 16 tokens, so that every walk over tiles is one over several: skipped, mixed and full ones."""
    kernel = import_module("ringtide.kernels.xla.attention")
    for name in ("forward", "backward"):
        monkeypatch.setattr(kernel, name, partial(getattr(kernel, name), block=(16, 16)))
    report = check(ringtide.attention, "attention", cases=40, seed=4, block=16)
    assert report, report


def test_ringtide_gla():
    report = check(ringtide.gla, "gla", cases=30, seed=1, decode_step=ringtide.gla_decode_step)
    assert report, report


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("striped", marks=pytest.mark.slow)])
def test_ring(layout):
    ring = whole(ringtide.context_parallel_attention, layout=layout, strategy="ring")
    report = check(ring, "attention", cases=12, seed=1, block=16)
    assert report, report


@pytest.mark.slow
def test_every_strategy():
    assert check(drawn(ringtide.context_parallel_attention), "attention", cases=200, seed=2, block=16)


def test_the_way_is_drawn_from_the_shapes():
    fn, case = drawn(ringtide.context_parallel_attention), AttentionCase(T=17, S=17, N=4, N_kv=2, H=8, H_v=8)
    text = lambda *shapes: jax.jit(fn).lower(*(jax.ShapeDtypeStruct(x, "float32") for x in shapes)).as_text()
    sends = {"ring": "collective_permute", "usp": "all_to_all", "ulysses": "all_to_all", "all_gather": "all_gather"}
    ways = [fn.way(replace(case, H=h)) for h in range(1, 60)]
    assert {way["strategy"] for way in ways} == sends.keys()
    for strategy, collective in sends.items():
        h, way = next((h, w) for h, w in enumerate(ways, 1) if w["strategy"] == strategy and max(w["devices"]) > 1)
        assert collective in text((1, 17, 4, h), (1, 17, 2, h), (1, 17, 2, 8)), way


@pytest.mark.slow
@pytest.mark.parametrize("op", ["attention", "gla"])
def test_three_hundred_cases(op):
    result = CliRunner().invoke(fuzz.command, [op, "--impl", "xla", "--cases", "300", "--seed", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["failures"] == 0


# The machinery.


def test_masks_have_a_truth_of_their_own(monkeypatch):
    """A vocabulary of masks that is off by one is not held to itself."""
    right = Interval.bounds
    monkeypatch.setattr(Interval, "bounds", lambda self, q: right(self, q if self.left is None else q + 1))
    report = check(numpy_attention, "attention", cases=10, masks=("Local(7, 0)",), gradients=False, shrink=0)
    assert report.failure.property == "values", report


def test_same_seed_same_findings():
    first, again, other = (check(numpy_gla, "gla", cases=30, seed=s, gradients=False) for s in (5, 5, 6))
    assert (first.worst, first.worst_case) == (again.worst, again.worst_case)
    assert (first.worst, first.worst_case) != (other.worst, other.worst_case)


def test_failures_shrink_and_replay():
    report = check(scale_forgotten, "attention", cases=10, seed=1, gradients=False)
    assert report.failed > 1
    case = report.failure.case
    assert (case.B, case.N, case.mask, case.segments, case.sinks) == (1, 1, "none", "none", False)
    assert f"{case!r}" in str(report)
    assert "  expected " in str(report)
    again = check(scale_forgotten, "attention", replay=repr(case), gradients=False)
    assert again.cases == again.failed == 1
    assert again.failure == report.failure


def test_refusals_are_counted_but_do_not_pass():
    def fn(q, k, v, *, mask=None):
        raise NotImplementedError("fn: on Sundays only")

    report = check(fn, "attention", cases=10, gradients=False)
    assert report.refused == report.cases == 10
    assert not report
    assert "on Sundays only" in str(report)


def test_keywords_that_a_function_lacks_are_not_drawn():
    def fn(q, k, v):
        return numpy_attention(q, k, v)

    assert check(fn, "attention", cases=20, gradients=False, dtypes=("float32",))


def test_decode_step_is_held_to_the_whole():
    def step(q, k, v, g, state, *, slot_ids, has_initial_state, scale=None, forget_skips=False):
        old = jnp.where(has_initial_state[:, None, None, None], state[slot_ids], 0)
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        S = jnp.exp(jnp.maximum(g, -128))[..., None] * old + k[..., None] * v[..., None, :]
        out = jnp.einsum("bnk,bnkv->bnv", q, S, precision="highest") * (q.shape[-1] ** -0.5 if scale is None else scale)
        used = slot_ids >= 0
        out = jnp.where(used[:, None, None], out, 0)
        where = slot_ids if forget_skips else jnp.where(used, slot_ids, len(state))
        return out, state.at[where].set(S, mode="drop")

    def forgetful(*args, **options):
        return step(*args, **options, forget_skips=True)

    limits = {"cases": 24, "gradients": False, "dtypes": ("float32",), "shrink": 0, "without": ("segments",)}
    assert check(numpy_gla, "gla", decode_step=step, **limits)
    report = check(numpy_gla, "gla", decode_step=forgetful, **limits)
    assert report.failure.property == "decode", report


@given(attention_cases() | gla_cases())
def test_recipes_print_as_they_are_read(case):
    assert parse(repr(case)) == case


def test_every_value_is_dealt():
    cases = deal("attention", 32, seed=4)
    assert {c.T for c in cases} >= {0, 1, 127, 128, 129, 257}
    assert len({c.mask for c in cases}) == 11
    assert {c.segments for c in deal("attention", 32, without=("segments",))} == {"none"}
    assert all(c.T == c.S and c.T for c in deal("attention", 32, without=("cross", "empty")))


def test_documents_apart_have_padding_between_them():
    ids = segment_ids(np.random.default_rng(0), 50, 65, "apart")
    before, after = ids[:, :-1], ids[:, 1:]
    assert not ((before != after) & (before >= 0) & (after >= 0)).any()
    assert sum(len(set(row) - {-1}) > 1 for row in ids) > 25


@pytest.mark.parametrize("op", ["attention", "gla"])
def test_every_shape_takes_its_turn_and_an_empty_one_only_one(op):
    shapes = []
    check(lambda q, k, v, *g, **_: shapes.append((q.shape, k.shape)), op, cases=60, gradients=False, shrink=0)
    empty = [shape for shape in shapes if 0 in (shape[0][1], shape[1][1])]
    assert len(shapes) == 60
    assert len(empty) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "AttentionCase(",
        "AttentionCase(3)",
        "__import__('os').system('true')",
        "GLACase(T=__import__('os').getpid())",
        "GLACase(T=[1 for _ in 'ab'])",
        "GLACase(T=-1)",
        "GLACase(X=1)",
        "GLACase(**{'T': 3})",
        "AttentionCase(mask='os.system')",
        "AttentionCase(dtype='float64')",
        "AttentionCase(N=3, N_kv=2)",
        "Other(T=3)",
        "GLACase.T",
        "AttentionCase(T=1, T=2)",
        f"AttentionCase(seed={'-' * 20_000}1)",
        f"AttentionCase(seed={'-' * 1_900}1)",
        f"AttentionCase(mask='{'x' * 1_900}')",
    ],
)
def test_replay_reads_literals_only(text):
    with pytest.raises(ValueError, match=r"^replay: expected a line such as") as refusal:
        parse(text)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "softmax"}, "op: expected one of attention, gla, got 'softmax'"),
        ({"without": ("wings",)}, "without: attention has no feature 'wings'; it has mask, segments"),
        ({"masks": ("causal",)}, r"masks: 'causal' is none of none, Causal\(\)"),
        ({"dtypes": ("int8",)}, "dtypes: 'int8' is none of float32"),
        ({"masks": ()}, "masks: expected at least one of none, Causal"),
        ({"dtypes": ()}, "dtypes: expected at least one of float32"),
        ({"cases": 0}, "cases: expected an int of at least 1, got 0"),
        ({"minutes": float("nan")}, "minutes: expected a positive number, got nan"),
        ({"minutes": float("inf")}, "minutes: expected a positive number, got inf"),
        ({"replay": "GLACase(T=3)"}, "replay: GLACase is not a recipe of attention"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        check(numpy_attention, **{"op": "attention", **options})


def test_fuzzing_numpy_imports_no_jax():
    code = "import sys, ringtide.testing; assert 'jax' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# The command.


@pytest.fixture
def ringtide_fuzz(monkeypatch):
    def run(*arguments, attention=numpy_attention):
        functions = {"attention": attention, "gla": numpy_gla}
        monkeypatch.setitem(fuzz.IMPLEMENTATIONS, "xla", lambda op: {"fn": functions[op], "gradients": False})
        return CliRunner().invoke(fuzz.command, arguments)

    return run


def test_command_passes(ringtide_fuzz):
    result = ringtide_fuzz("gla", "--cases", "20", "--seed", "1", "--json")
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert {"op": "gla", "impl": "xla", "cases": 20, "failures": 0}.items() <= line.items()
    assert 0 < line["worst_error_over_bound"] < 1
    assert isinstance(parse(line["worst_case"]), GLACase)


def test_command_fails_and_replays(ringtide_fuzz):
    result = ringtide_fuzz("attention", "--cases", "10", "--json", attention=base_two_lse)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert json.loads(lines[-1])["failures"] > 0
    replay = next(line for line in lines if line.startswith("replay: ")).split('"')[1]
    assert isinstance(parse(replay), AttentionCase)
    again = ringtide_fuzz("attention", "--replay", replay, attention=base_two_lse)
    assert again.exit_code == 1
    assert "expected lse[" in again.output
    assert ringtide_fuzz("attention", "--replay", replay).exit_code == 0


def test_command_keeps_time(ringtide_fuzz):
    result = ringtide_fuzz("gla", "--minutes", "0.02", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["cases"] > 0


def test_nothing_tested_is_no_pass(ringtide_fuzz):
    result = ringtide_fuzz("gla", "--minutes", "1e-9", "--json")
    assert result.exit_code == 1
    assert {"cases": 0, "worst_case": None}.items() <= json.loads(result.stdout.splitlines()[-1]).items()
    assert "FAILED: nothing was tested" in result.stdout


def test_command_reports_what_ran_before_an_interrupt(ringtide_fuzz):
    calls = []

    def fn(q, k, v, **options):
        calls.append(q)
        if len(calls) > 40:
            raise KeyboardInterrupt
        return numpy_attention(q, k, v, **options)

    result = ringtide_fuzz("attention", "--cases", "100", "--json", attention=fn)
    assert result.exit_code == 130, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["interrupted"]
    assert 0 < line["cases"] < 40


def test_command_without_jax(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    result = CliRunner().invoke(fuzz.command, ["gla", "--cases", "1"])
    assert (result.exit_code, result.stderr) == (1, "Error: jax is not installed: pip install ringtide\n")


def test_command_refuses_in_one_line(ringtide_fuzz):
    result = ringtide_fuzz("gla", "--replay", "open('/etc/passwd')")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: replay: expected a line such as")
    assert ringtide_fuzz("gla", "--minutes", "1", "--cases", "3").exit_code == 2
    result = ringtide_fuzz("gla", "--minutes", "nan")
    assert (result.exit_code, result.stderr) == (1, "Error: minutes: expected a positive number, got nan\n")
