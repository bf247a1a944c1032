"""ringtide.gla_decode_step: a step is a token of ringtide.gla, and a pool of states that never leaks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringtide.jax.gla import gla, gla_decode_step

K, V, N = 8, 12, 2


def token(B, seed=0, dtype=np.float32):
    """q, k, v, g of one token of B sequences."""
    rng = np.random.default_rng(seed)
    q, k, v, g = (rng.normal(size=(B, N, d)).astype(np.float32) for d in (K, K, V, K))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), -np.abs(g)


def pool(slots, seed=1):
    return np.random.default_rng(seed).normal(size=(slots, N, K, V)).astype(np.float32)


def error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.abs(x - y).max() / np.abs(y).max()


step = jax.jit(gla_decode_step)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_decoding_equals_the_whole_sequence(dtype, bound):
    T, B = 9, 3
    tokens = [token(B, t, dtype) for t in range(T)]
    tokens[4][3][:] = -np.inf
    state = pool(B)
    whole, final = gla(
        *(np.stack(x, 1) for x in zip(*tokens, strict=True)), initial_state=state, output_final_state=True
    )
    outs = []
    for x in tokens:
        out, state = step(*x, state)
        assert out.dtype == dtype
        assert state.dtype == jnp.float32
        outs.append(out)
    assert error(np.stack(outs, 1), whole) <= bound
    assert error(state, final) <= 1e-6


def test_slots():
    x, state = token(4), pool(6)
    state[[0, 3]] = np.nan  # unused
    ids, has = np.array([5, -1, 1, 2]), np.array([True, True, False, True])
    for a in x:
        a[1] = np.nan  # skipped
    state[1] = np.nan  # reused: whatever it holds must not be read
    out, new = step(*x, state, slot_ids=ids, has_initial_state=has)

    rows = [0, 2, 3]
    entry = state[ids[rows]].copy()
    entry[1] = 0
    want, want_state = step(*(a[rows] for a in x), entry)
    assert np.array_equal(out[np.array(rows)], want)
    assert np.array_equal(new[ids[rows]], want_state)
    assert not out[1].any()
    untouched = [0, 3, 4]
    assert np.array_equal(np.asarray(new)[untouched], state[untouched], equal_nan=True)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint32])
def test_slots_beyond_the_pool_corrupt_nothing(dtype):
    x, state = token(3), pool(4)
    with jax.enable_x64(True):
        far = np.iinfo(dtype).max - 3 if dtype != np.int64 else 2**32  # 2**32 is slot 0 once it is cut to 32 bits
        ids = np.array([far, 2, 4], dtype)
        out, new = step(*x, state, slot_ids=ids)
    assert np.isnan(out[0]).all()
    assert np.isnan(out[2]).all()
    assert np.isfinite(out[1]).all()
    assert np.array_equal(np.delete(new, 2, 0), np.delete(state, 2, 0))


def test_negative_slots_never_wrap():
    x, state = token(4), pool(4)
    out, new = step(*x, state, slot_ids=np.array([-1, -2, -4, np.iinfo(np.int32).min]))
    assert not out.any()
    assert np.array_equal(new, state)


def test_has_initial_state_without_slots():
    x, state = token(2), pool(2)
    out, new = step(*x, state, has_initial_state=np.array([False, True]))
    fresh, fresh_state = step(*x, np.zeros_like(state))
    assert np.array_equal(out[0], fresh[0])
    assert np.array_equal(new[0], fresh_state[0])
    assert not np.array_equal(out[1], fresh[1])


def test_no_sequences():
    out, new = step(*token(0), pool(3), slot_ids=np.zeros(0, np.int32))
    assert out.shape == (0, N, V)
    assert np.array_equal(new, pool(3))


def test_gradients_equal_those_of_one_token():
    x, state = token(2), pool(2)

    def one(q, k, v, g, h):
        return sum((a**2).sum() for a in gla_decode_step(q, k, v, g, h))

    def sequence(q, k, v, g, h):
        q, k, v, g = (y[:, None] for y in (q, k, v, g))
        return sum((a**2).sum() for a in gla(q, k, v, g, initial_state=h, output_final_state=True))

    for a, b in zip(*(jax.grad(f, range(5))(*x, state) for f in (one, sequence)), strict=True):
        assert error(a, b) <= 1e-6


BAD = {
    "q: expected shape [B, N, K], got [3, 1, 2, 8]": {"q": (3, 1, 2, 8)},
    "v: expected shape [B=3, N=2, V], got [3, 12]": {"v": (3, 12)},
    "state: expected shape [B=3, N=2, K=8, V=12], got [6, 2, 8, 12]": {"slot_ids": None},
    "state: expected shape [slots, N=2, K=8, V=12], got [6, 2, 12, 8]": {"state": (6, 2, 12, 8)},
    "state: expected float32, got bfloat16": {"state": ((6, 2, 8, 12), jnp.bfloat16)},
    "slot_ids: expected shape [B=3], got [4]": {"slot_ids": ((4,), int)},
    "slot_ids: expected integers, got float32": {"slot_ids": (3,)},
    "has_initial_state: expected bool, got int32": {"has_initial_state": ((3,), int)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arrays_are_named(message):
    shapes = {
        "q": (3, 2, 8),
        "k": (3, 2, 8),
        "v": (3, 2, 12),
        "g": (3, 2, 8),
        "state": (6, 2, 8, 12),
        "slot_ids": ((3,), int),
    }
    shapes = {n: s for n, s in (shapes | BAD[message]).items() if s is not None}
    arrays = {n: jnp.zeros(*s) if isinstance(s[0], tuple) else jnp.zeros(s) for n, s in shapes.items()}
    with pytest.raises((ValueError, TypeError)) as e:
        gla_decode_step(**arrays)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize("run", [gla_decode_step, jax.jit(lambda *x, **o: gla_decode_step(*x, **o))])
def test_checked_mode(run, monkeypatch):
    monkeypatch.setenv("RINGTIDE_CHECK", "1")
    x, state = token(3), pool(4)
    x[3][1] = np.nan

    def check(ids):
        jax.block_until_ready(run(*x, state, slot_ids=np.array(ids)))
        jax.effects_barrier()

    check([0, -1, 3])
    check([-1, -1, -1])
    with pytest.raises(Exception, match="g: expected gates"):
        check([0, 1, 3])
    with pytest.raises(Exception, match="slot_ids: expected slots below 4"):
        check([0, -1, 4])
    with pytest.raises(Exception, match="slot_ids: two rows share a slot"):
        check([2, -1, 2])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
def test_slot_ids_of_any_width(dtype):
    """uint8 ids into a pool of 300 wrapped: slot 255 was overwritten, and a row of slot 100 gave NaN."""
    x, state = token(2), pool(300)
    ids = np.array([1, 100], dtype)
    got, want = (gla_decode_step(*x, state, slot_ids=i) for i in (ids, ids.astype("int32")))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.flatnonzero((np.asarray(got[1]) != np.asarray(state)).any((1, 2, 3))).tolist() == [1, 100]


def test_slot_ids_that_would_wrap_are_refused():
    with pytest.raises(ValueError, match=r"slot_ids: expected values below 2\*\*31"):
        gla_decode_step(*token(2), pool(4), slot_ids=np.array([1, 2**32]))


def test_an_empty_pool_and_no_rows():
    out, state = gla_decode_step(*token(2), pool(4)[:0], slot_ids=[-1, -1])
    assert (np.asarray(out) == 0).all()
    assert state.shape[0] == 0
    out, state = gla_decode_step(*(x[:0] for x in token(2)), pool(4), slot_ids=[])
    assert out.shape[0] == 0
    assert (np.asarray(state) == np.asarray(pool(4))).all()
