"""ringtide.torch.gla_decode_step: a step is a token of ringtide.torch.gla, and a pool of states that never leaks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ringtide.torch import checks, gla, gla_decode_step, gla_decode_step_  # noqa: E402

K, V, N = 8, 12, 2


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def token(B, seed=0, dtype=torch.float32, sizes=(N, K, V)):
    """q, k, v, g of one token of B sequences."""
    rng = torch.Generator().manual_seed(seed)
    n, key, value = sizes
    q, k, v, g = (torch.randn(B, n, d, generator=rng) for d in (key, key, value, key))
    return [q.to(dtype), k.to(dtype), v.to(dtype), -g.abs()]


def pool(slots, seed=1, sizes=(N, K, V)):
    return torch.randn(slots, *sizes, generator=torch.Generator().manual_seed(seed))


def error(x, y):
    x, y = np.asarray(x.detach().double()), np.asarray(y.detach().double())
    return np.abs(x - y).max() / np.abs(y).max()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_decoding_equals_the_whole_sequence(dtype, bound):
    T, B = 9, 3
    tokens = [token(B, t, dtype) for t in range(T)]
    tokens[4][3][:] = -np.inf
    state = pool(B)
    sequence = [torch.stack(x, 1) for x in zip(*tokens, strict=True)]
    whole, final = gla(*sequence, initial_state=state, output_final_state=True)
    outs = []
    for x in tokens:
        out, state = gla_decode_step(*x, state)
        assert (out.dtype, state.dtype) == (dtype, torch.float32)
        outs.append(out)
    assert error(torch.stack(outs, 1), whole) <= bound
    assert error(state, final) <= 1e-6


@pytest.mark.parametrize("split", [1, 7, 64, 99])
def test_the_seam_between_prefill_and_decode(split):
    tokens = [token(2, t) for t in range(100)]
    q, k, v, g = (torch.stack(x, 1) for x in zip(*tokens, strict=True))
    whole, final = gla(q, k, v, g, output_final_state=True)
    out, state = gla(*(x[:, :split] for x in (q, k, v, g)), output_final_state=True)
    outs = [out, *(gla_decode_step_(*x, state)[:, None] for x in tokens[split:])]
    assert error(torch.cat(outs, 1), whole) <= 2e-6
    assert error(state, final) <= 2e-6


def test_in_place_is_the_same():
    x, state = token(3), pool(5)
    ids, has = torch.tensor([4, -1, 0]), torch.tensor([True, True, False])
    out, new = gla_decode_step(*x, state, slot_ids=ids, has_initial_state=has)
    before = state.clone()
    assert torch.equal(gla_decode_step_(*x, state, slot_ids=ids, has_initial_state=has), out)
    assert torch.equal(state, new)
    assert not torch.equal(state, before)


@pytest.mark.parametrize("sizes", [(2, 8, 12), (4, 96, 192), (3, 64, 128), (1, 1, 8)])
def test_a_row_does_not_depend_on_the_others_nor_on_their_number(sizes):
    x, state = token(40, sizes=sizes), pool(40, sizes=sizes)
    out, new = gla_decode_step(*x, state)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    for rows in (slice(7, 8), slice(7, 10), slice(5, 37)):
        alone, alone_new = gla_decode_step(*(a[rows] for a in x), state[rows])
        assert torch.equal(alone, out[rows])
        assert torch.equal(alone_new, new[rows])
        there, there_new = gla_decode_step(*(a[rows] for a in x), state[ids.argsort()], slot_ids=ids[rows])
        assert torch.equal(there, out[rows])
        assert torch.equal(there_new[ids[rows]], new[rows])


def test_slots():
    x, state = token(4), pool(6)
    state[[0, 3]] = np.nan  # unused
    ids, has = torch.tensor([5, -1, 1, 2]), torch.tensor([True, True, False, True])
    for a in x:
        a[1] = np.nan  # skipped
    state[1] = np.nan  # reused: whatever it holds must not be read
    out, new = gla_decode_step(*x, state, slot_ids=ids, has_initial_state=has)

    rows = [0, 2, 3]
    entry = state[ids[rows]].clone()
    entry[1] = 0
    want, want_state = gla_decode_step(*(a[rows] for a in x), entry)
    assert torch.equal(out[rows], want)
    assert torch.equal(new[ids[rows]], want_state)
    assert not out[1].any()
    untouched = [0, 3, 4]
    np.testing.assert_array_equal(new[untouched], state[untouched])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_slots_beyond_the_pool(dtype, monkeypatch):
    """Refused where they may be looked at; elsewhere they touch nothing and give NaN."""
    x, state = token(3), pool(4)
    ids = torch.tensor([torch.iinfo(dtype).max, 2, 4], dtype=dtype)
    with pytest.raises(ValueError, match=r"^slot_ids: expected slots below 4 \(the size of the pool\), got"):
        gla_decode_step(*x, state, slot_ids=ids)
    monkeypatch.setattr(checks, "_may_look", lambda x: False)
    out, new = gla_decode_step(*x, state, slot_ids=ids)
    assert out[[0, 2]].isnan().all()
    assert out[1].isfinite().all()
    others = [0, 1, 3]
    assert torch.equal(new[others], state[others])


def test_a_slot_used_twice_is_refused():
    x, state = token(4), pool(4)
    for step in (gla_decode_step, gla_decode_step_):
        with pytest.raises(ValueError, match=r"^slot_ids: two rows share slot 2: decode one token a slot in a step"):
            step(*x, state, slot_ids=torch.tensor([2, -1, -1, 2]))
    assert torch.equal(state, pool(4))


def test_negative_slots_never_wrap():
    x, state = token(4), pool(4)
    out, new = gla_decode_step(*x, state, slot_ids=torch.tensor([-1, -2, -4, -(1 << 31)]))
    assert not out.any()
    assert torch.equal(new, state)


def test_has_initial_state_without_slots():
    x, state = token(2), pool(2)
    out, new = gla_decode_step(*x, state, has_initial_state=torch.tensor([False, True]))
    fresh, fresh_state = gla_decode_step(*x, torch.zeros_like(state))
    assert torch.equal(out[0], fresh[0])
    assert torch.equal(new[0], fresh_state[0])
    assert not torch.equal(out[1], fresh[1])


def test_a_pool_inside_a_larger_tensor():
    """A view of it is changed in place, as a cache of several layers wants it."""
    x, cache = token(3), torch.randn(3, 5, N, K, V)
    want, new = gla_decode_step(*x, cache[:, 2].clone())
    before = cache.clone()
    assert torch.equal(gla_decode_step_(*x, cache[:, 2]), want)
    assert torch.equal(cache[:, 2], new)
    others = [0, 1, 3, 4]
    assert torch.equal(cache[:, others], before[:, others])


def test_no_sequences_and_an_empty_pool():
    out, new = gla_decode_step(*token(0), pool(3), slot_ids=torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, N, V)
    assert torch.equal(new, pool(3))
    out, new = gla_decode_step(*token(2), pool(4)[:0], slot_ids=torch.tensor([-1, -1]))
    assert not out.any()
    assert new.shape[0] == 0


@pytest.mark.parametrize("slots", [None, [3, -1, 0]])
@pytest.mark.parametrize("has", [None, [True, True, False]])
def test_gradients_equal_those_of_one_token(slots, has):
    x, state = token(3), pool(3 if slots is None else 4)
    slots, has = slots and torch.tensor(slots), has and torch.tensor(has)
    rows = torch.arange(3) if slots is None else slots.clamp(min=0)
    used = torch.ones(3, 1, 1, 1) if slots is None else (slots >= 0).float()[:, None, None, None]
    fresh = torch.ones(3, 1, 1, 1) if has is None else has.float()[:, None, None, None]

    def step(*a):
        out, new = gla_decode_step(*a, slot_ids=slots, has_initial_state=has)
        return (out**2).sum() + (new**2).sum()

    def sequence(q, k, v, g, h):
        q, k, v, g = (y[:, None] for y in (q, k, v, g))
        out, new = gla(q, k, v, g, initial_state=h[rows] * fresh, output_final_state=True)
        others = [i for i in range(len(h)) if slots is not None and i not in slots.tolist()]
        return (used * out**2).sum() + (used * new**2).sum() + (h[others] ** 2).sum()

    grads = []
    for f in (step, sequence):
        a = [y.clone().requires_grad_() for y in (*x, state)]
        grads.append(torch.autograd.grad(f(*a), a))
    for a, b in zip(*grads, strict=True):
        assert error(a, b) <= 1e-6


BAD = {
    "q: expected shape [B, N, K], got [3, 1, 2, 8]": {"q": (3, 1, 2, 8)},
    "v: expected shape [B=3, N=2, V], got [3, 12]": {"v": (3, 12)},
    "state: expected shape [B=3, N=2, K=8, V=12], got [6, 2, 8, 12]": {"slot_ids": None},
    "state: expected shape [slots, N=2, K=8, V=12], got [6, 2, 12, 8]": {"state": (6, 2, 12, 8)},
    "state: expected float32, got bfloat16": {"state": ((6, 2, 8, 12), torch.bfloat16)},
    "slot_ids: expected shape [B=3], got [4]": {"slot_ids": ((4,), torch.int64)},
    "slot_ids: expected integers, got float32": {"slot_ids": (3,)},
    "has_initial_state: expected bool, got int64": {"has_initial_state": ((3,), torch.int64)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_tensors_are_named(message):
    keys, values = (3, 2, 8), (3, 2, 12)
    shapes = {"q": keys, "k": keys, "v": values, "g": keys, "state": (6, 2, 8, 12), "slot_ids": ((3,), torch.int64)}
    shapes = {n: s if isinstance(s[0], tuple) else (s, torch.float32) for n, s in (shapes | BAD[message]).items() if s}
    with pytest.raises((ValueError, TypeError)) as e:
        gla_decode_step(**{n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in shapes.items()})
    assert str(e.value).startswith(message)


def test_checked_mode_refuses_gates(monkeypatch):
    x, state = token(3), pool(4)
    x[3][1] = np.nan
    gla_decode_step_(*x, state.clone(), slot_ids=torch.tensor([0, 1, 3]))  # not checked
    monkeypatch.setenv("RINGTIDE_CHECK", "1")
    gla_decode_step_(*x, state, slot_ids=torch.tensor([0, -1, 3]))
    with pytest.raises(ValueError, match=r"^g: expected gates"):
        gla_decode_step_(*x, state, slot_ids=torch.tensor([0, 1, 3]))


def test_in_place_there_are_no_gradients():
    q = torch.randn(2, 1, 4, requires_grad=True)
    out = gla_decode_step_(q, q, q, -torch.rand(2, 1, 4), torch.zeros(2, 1, 4, 4))
    assert not out.requires_grad
