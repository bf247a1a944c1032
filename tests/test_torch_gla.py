"""ringtide.torch.gla and its forms for fla's users, against the float64 recurrence, and the laws they keep exactly."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ringtide.kernels.eager import gla as kernel  # noqa: E402
from ringtide.reference import gla as truth  # noqa: E402
from ringtide.torch import chunk_gla, fused_recurrent_gla, gla, gla_decode_step_  # noqa: E402
from ringtide.torch.arrays import to_numpy, to_torch  # noqa: E402

RESETS = (-1e4, -1e6, -3.4e37, -np.inf)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(T, K=8, V=12, B=2, N=2, seed=0, states=None):
    """q, k, v, g, h0, do, dhT, zero mean, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    keys, values, state = (B, T, N, K), (B, T, N, V), (states or B, N, K, V)
    shapes = keys, keys, values, keys, state, values, state
    q, k, v, g, h0, do, dhT = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return [q, k, v, -0.3 * np.abs(g), h0, do, dhT]


def everything(q, k, v, g, h0, do, dhT, fn=gla, **options):
    """(o, hT, dq, dk, dv, dg, dh0) of ringtide.torch.gla, or of fn."""
    x = [to_torch(a).requires_grad_() for a in (q, k, v, g, h0)]
    o, hT = fn(*x[:4], initial_state=x[4], output_final_state=True, **options)
    grads = torch.autograd.grad((o, hT), x, (to_torch(do).to(o.dtype), to_torch(dhT)))
    return [to_numpy(a) for a in (o, hT, *grads)]


def expected(q, k, v, g, h0, do, dhT, **options):
    options["initial_state"] = h0
    return *truth.gla(q, k, v, g, **options), *truth.gla_grad(q, k, v, g, do, dhT, **options)


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


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 63, 64, 65, 130])
def test_any_length(T):
    x = inputs(T)
    assert_exact(everything(*x), expected(*x))


@pytest.mark.parametrize(("T", "K", "V"), [(5, 1, 8), (5, 8, 1), (5, 64, 80), (20, 96, 192), (17, 192, 96)])
def test_any_width(T, K, V):
    x = inputs(T, K, V, B=1)
    assert_exact(everything(*x, scale=0.7), expected(*x, scale=0.7))


@pytest.mark.parametrize("reset", RESETS)
def test_resets_are_exact(reset):
    x = inputs(65)
    at = np.random.default_rng(1).random(x[3].shape) < 0.03
    x[3] = np.where(at, np.float32(reset), x[3])
    got = everything(*x)
    assert_exact(got, expected(*x))
    assert (got[5][at] == 0).all()


@pytest.mark.parametrize("gate", [0, -1, -50, -85, -100, -np.inf])
@pytest.mark.parametrize("T", [1, 17, 70])
def test_one_gate_everywhere(gate, T):
    x = inputs(T)
    x[3] = np.full_like(x[3], gate)
    assert_exact(everything(*x), expected(*x))


def test_mixed_channels():
    x = inputs(65)
    x[3] = np.broadcast_to(np.float32([0, -1e-6, -1e-2, -0.7, -5, -89, -1e3, -np.inf]), x[3].shape)
    assert_exact(everything(*x), expected(*x))


@pytest.mark.parametrize(("chunk", "slab"), [(1, 3), (2, 1), (8, 2), (16, None), (64, 1)])
def test_chunks_and_slabs_do_not_matter(chunk, slab):
    x = inputs(29)
    tensors, how = [to_torch(a) for a in x], {"scale": 8**-0.5, "chunk": chunk, "slab": slab}
    got = *kernel.forward(*tensors[:5], **how), *kernel.backward(*tensors, **how)
    assert_exact(got, expected(*x))


@pytest.mark.parametrize("split", [1, 15, 40, 64, 79])
def test_the_state_and_its_gradient_carry_over_a_split(split):
    x = inputs(80)

    def halves(q, k, v, g, *, initial_state, output_final_state):
        first, h = gla(*(a[:, :split] for a in (q, k, v, g)), initial_state=initial_state, output_final_state=True)
        second, h = gla(*(a[:, split:] for a in (q, k, v, g)), initial_state=h, output_final_state=True)
        return torch.cat((first, second), 1), h

    assert_exact(everything(*x, fn=halves), expected(*x))


@pytest.mark.parametrize("alone", [4, 5, 6])  # do, dhT; do and dhT without h0's
def test_one_gradient_alone(alone):
    x = inputs(70)
    for other in {4, 5, 6} - {alone}:
        x[other] = np.zeros_like(x[other])
    assert_exact(everything(*x), expected(*x))


def test_without_a_state():
    x = inputs(20)[:4]
    o, state = gla(*map(to_torch, x))
    assert state is None
    assert error(o, truth.gla(*x)[0]) <= 2e-6


SEGMENTS = np.array(
    [
        [0] * 5 + [3] * 20 + [-1] * 2 + [3] * 3 + [1] * 20 + [-7] * 15,
        [-1] * 4 + [9] * 30 + [-2] * 3 + [2] * 28,
    ]
)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_segments_and_poisoned_padding(dtype):
    x = inputs(65)
    for i in (0, 1, 2, 3, 5):
        x[i][SEGMENTS < 0] = np.nan
    got = everything(*x, segment_ids=to_torch(SEGMENTS).to(dtype))
    assert_exact(got, expected(*x, segment_ids=SEGMENTS))
    for i in (0, 2, 3, 4, 5):
        assert (got[i][SEGMENTS < 0] == 0).all()


def test_padding_only_and_segments_of_nothing():
    q, k, v, g, h0, *_ = (to_torch(a) for a in inputs(9))
    o, h = gla(q, k, v, g, initial_state=h0, output_final_state=True, segment_ids=torch.full((2, 9), -1))
    assert not o.any()
    assert torch.equal(h, h0)
    nothing = (x[:, :0] for x in (q, k, v, g))
    ids = torch.zeros(2, 0, dtype=torch.int64)
    o, h = gla(*nothing, initial_state=h0, output_final_state=True, segment_ids=ids)
    assert o.shape == (2, 0, 2, 12)
    assert torch.equal(h, h0)


def test_causality_and_packing_are_bitwise():
    q, k, v, g, *_ = (to_torch(a) for a in inputs(65))
    one = torch.zeros(2, 65, dtype=torch.int64)
    packed = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([20, 25, 20])).expand(2, 65)
    changed = [x.clone() for x in (q, k, v, g)]
    for x in changed:
        x[:, 20:45] *= 3
    assert torch.equal(gla(q, k, v, g, segment_ids=one)[0][:, :20], gla(*changed, segment_ids=one)[0][:, :20])
    before, after = (gla(*x, segment_ids=packed)[0] for x in ((q, k, v, g), changed))
    others = [*range(20), *range(45, 65)]
    assert torch.equal(before[:, others], after[:, others])
    assert error(before[:, 45:], truth.gla(*(to_numpy(x[:, 45:]) for x in (q, k, v, g)))[0]) <= 2e-6


@pytest.mark.parametrize(("T", "K", "V"), [(70, 8, 12), (130, 64, 128), (9, 96, 192)])
def test_a_row_does_not_depend_on_the_others(T, K, V):
    """Bit for bit, forward and backward, and not on how many there are either."""
    x = inputs(T, K, V, B=3)
    together, alone = everything(*x), everything(*(a[1:2] for a in x))
    x = [np.concatenate([2 * a[:1], a[1:2], 3 * a[2:]]) for a in x]
    for a, b, c in zip(together, alone, everything(*x), strict=True):
        assert np.array_equal(a[1], b[0])
        assert np.array_equal(a[1], c[1])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision(dtype, bound):
    x = [a if i in (3, 4, 6) else to_numpy(to_torch(a).to(dtype)) for i, a in enumerate(inputs(7))]
    got = everything(*x)
    low, full = x[0].dtype, np.float32
    assert [a.dtype for a in got] == [low, full, low, low, low, full, full]
    for a, b in zip(got, expected(*x), strict=True):
        assert error(a, b) <= bound  # one rounding, of the result


# --- sequences end to end ---------------------------------------------------------------------------------------------

LENGTHS = ([5, 64, 0, 1, 130], [0, 0, 7, 0], [1] * 20, [200], [0], [65, 3, 0])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_each_sequence_of_a_row_has_its_own_state(lengths, state_v_first):
    x = inputs(sum(lengths), B=1, states=len(lengths))
    ends = np.cumsum([0, *lengths])
    given = list(x)
    if state_v_first:
        given[4], given[6] = (x[i].swapaxes(-1, -2) for i in (4, 6))
    cu_seqlens = to_torch(ends.astype(np.int32))
    got = everything(*given, fn=chunk_gla, cu_seqlens=cu_seqlens, state_v_first=state_v_first)
    if state_v_first:
        got[1], got[6] = (got[i].swapaxes(-1, -2) for i in (1, 6))
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        mine = [y[i : i + 1] if j in (4, 6) else y[:, a:b] for j, y in enumerate(x)]
        parts = [y[i : i + 1] if j in (1, 6) else y[:, a:b] for j, y in enumerate(got)]
        assert_exact(parts, expected(*mine))


def test_a_sequence_does_not_depend_on_those_beside_it():
    """Bit for bit, with as many others of as many tokens, whatever their lengths and contents."""
    x = inputs(150, B=1, states=4)
    a = everything(*x, fn=chunk_gla, cu_seqlens=torch.tensor([0, 30, 90, 91, 150]))
    y = [3 * b for b in x]
    for b, c in zip(y, x, strict=True):
        if b.shape[0] == 1:
            b[:, 80:140] = c[:, 30:90]
        else:
            b[2] = c[1]
    b = everything(*y, fn=chunk_gla, cu_seqlens=torch.tensor([0, 0, 80, 140, 150]))
    for i, (p, q) in enumerate(zip(a, b, strict=True)):
        assert np.array_equal(p[1] if i in (1, 6) else p[:, 30:90], q[2] if i in (1, 6) else q[:, 80:140])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 4, 4, 21]])
def test_recurrent_form(reverse, cu_seqlens):
    """Runs backwards too, and agrees with as many decode steps."""
    sequences = 1 if cu_seqlens is None else 3
    q, k, v, g, h0, *_ = (to_torch(a) for a in inputs(21, B=1, states=sequences))
    ends = cu_seqlens or [0, 21]
    options = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens)}
    o, hT = fused_recurrent_gla(
        q, k, v, g, initial_state=h0, output_final_state=True, reverse=reverse, scale=0.5, **options
    )
    state = h0.clone()
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        for t in reversed(range(a, b)) if reverse else range(a, b):
            out = gla_decode_step_(*(x[:, t] for x in (q, k, v, g)), state[i : i + 1], scale=0.5)
            assert error(out, o[:, t]) <= 2e-6
    assert error(state, hT) <= 2e-6


def test_recurrent_form_without_gates():
    q, k, v, *_ = inputs(21)
    want = truth.gla(q, k, v, 0 * q)[0]
    q, k, v = map(to_torch, (q, k, v))
    assert error(fused_recurrent_gla(q, k, v)[0], want) <= 2e-6
    with pytest.raises(NotImplementedError, match=r"^gv: gates of the value channels"):
        fused_recurrent_gla(q, k, v, gv=v)


def test_recurrent_chunked_and_decoded_are_one():
    x = inputs(150, 16, 24)
    q, k, v, g, h0, *_ = (to_torch(a) for a in x)
    state, outs = h0.clone(), []
    for t in range(150):
        outs.append(gla_decode_step_(*(a[:, t] for a in (q, k, v, g)), state))
    forms = (
        (torch.stack(outs, 1), state),
        *(f(q, k, v, g, initial_state=h0, output_final_state=True) for f in (chunk_gla, fused_recurrent_gla)),
    )
    for form in forms:
        for a, b in zip(form, expected(*x)[:2], strict=True):
            assert error(a, b) <= 2e-6


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "q: expected shape [B, T, N, K], got [7, 2, 8]": {"q": (7, 2, 8)},
    "k: expected shape [B=2, T=7, N=3, K=8], got [2, 7, 3, 9]": {"k": (2, 7, 3, 9)},
    "k: expected shape [B=2, T=7, N=3, K=8], got [2, 3, 7, 8]: time comes before heads": {"k": (2, 3, 7, 8)},
    "v: expected shape [B=2, T=7, N=3, V], got [2, 6, 3, 8]": {"v": (2, 6, 3, 8)},
    "g: expected shape [B=2, T=7, N=3, K=8], got [2, 7, 3]": {"g": (2, 7, 3)},
    "initial_state: expected shape [B=2, N=3, K=8, V=5], got [2, 3, 5, 8]": {"initial_state": (2, 3, 5, 8)},
    "initial_state: expected shape [B=2, N=7, K=8, V=5], got [2, 3, 8, 5]: time comes before heads": {
        **dict.fromkeys("qkg", (2, 3, 7, 8)),
        "v": (2, 3, 7, 5),
        "initial_state": (2, 3, 8, 5),
    },
    "segment_ids: expected shape [B=2, T=7], got [2, 8]": {"segment_ids": ((2, 8), torch.int64)},
    "segment_ids: expected shape [B=2, T=7], got [2, 3]: time comes before heads": {"segment_ids": ((2, 3), torch.int)},
    "segment_ids: expected integers": {"segment_ids": (2, 7)},
    "q: expected float32 or bfloat16 or float16 or float64, got int32: cast it": {"q": ((2, 7, 3, 8), torch.int32)},
    "k: expected float32, got bfloat16: cast it": {"k": ((2, 7, 3, 8), torch.bfloat16)},
    "initial_state: expected float32, got bfloat16": {"initial_state": ((2, 3, 8, 5), torch.bfloat16)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_tensors_are_named(message):
    shapes = {"q": (2, 7, 3, 8), "k": (2, 7, 3, 8), "v": (2, 7, 3, 5), "g": (2, 7, 3, 8)} | BAD[message]
    shapes = {n: s if isinstance(s[0], tuple) else (s, torch.float32) for n, s in shapes.items()}
    tensors = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in shapes.items()}
    with pytest.raises((ValueError, TypeError)) as e:
        gla(**tensors)
    assert str(e.value).startswith(message)
    assert "\n" not in str(e.value)


def test_other_bad_arguments_are_named():
    q, k, v, g, *_ = (to_torch(a) for a in inputs(7))
    with pytest.raises(TypeError, match=r"^q: expected a torch tensor, got ndarray"):
        gla(q.numpy(), k, v, g)
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, got nan"):
        gla(q, k, v, g, scale=float("nan"))
    with pytest.raises(TypeError, match=r"^scale: expected a finite number, got Tensor"):
        gla(q, k, v, g, scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^implementation: gla has eager, nki, got 'cuda'"):
        gla(q, k, v, g, implementation="cuda")
    with pytest.raises(TypeError, match=r"^implementation: expected a name"):
        gla(q, k, v, g, implementation=[])
    with pytest.raises(NotImplementedError, match=r"xla: not in this release.*nki: computes in float32"):
        gla(*(x.double() for x in (q, k, v, g)), implementation=("xla", "nki"))
    assert torch.equal(gla(q, k, v, g, implementation=["pallas", "eager"])[0], gla(q, k, v, g)[0])


CU_SEQLENS = {
    "cu_seqlens: expected to begin at 0, got 3": [3, 7],
    "cu_seqlens: expected to end at T = 7, the tokens given, got 6": [0, 4, 6],
    "cu_seqlens: expected to end at T = 7, the tokens given, got 9": [0, 9],
    "cu_seqlens: expected ends that never decrease, got 5 and then 4 at 2": [0, 5, 4, 7],
    "cu_seqlens: expected [0, ..., T], got no value": [],
    "cu_seqlens: expected shape [ends], got []": 7,
    "cu_seqlens: expected integers, got float32": [0.0, 7.0],
}


@pytest.mark.parametrize("message", CU_SEQLENS)
def test_bad_ends_are_refused(message):
    q, k, v, g, *_ = (to_torch(a) for a in inputs(7, B=1))
    ends = torch.tensor(CU_SEQLENS[message])
    with pytest.raises((ValueError, TypeError)) as e:
        chunk_gla(q, k, v, g, cu_seqlens=ends if ends.numel() else ends.long())
    assert str(e.value).startswith(message)


def test_sequences_must_lie_in_one_row():
    q, k, v, g, h0, *_ = (to_torch(a) for a in inputs(7))
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected q, k, v and g with B = 1, got 2"):
        chunk_gla(q, k, v, g, cu_seqlens=torch.tensor([0, 3, 7]))
    with pytest.raises(ValueError, match=r"^initial_state: expected shape \[sequences=1, N=2, K=8, V=12\], got \[2"):
        chunk_gla(q[:1], k[:1], v[:1], g[:1], initial_state=h0, cu_seqlens=torch.tensor([0, 7]))
    with pytest.raises(NotImplementedError, match=r"nki: has one state a row"):
        chunk_gla(q[:1], k[:1], v[:1], g[:1], cu_seqlens=torch.tensor([0, 7]), implementation="nki")


@pytest.mark.parametrize("gate", [np.nan, 0.1])
def test_checked_mode_refuses_gates(gate, monkeypatch):
    q, k, v, g, *_ = (to_torch(a) for a in inputs(7))
    bad, ids = g.clone(), torch.tensor([[0] * 7, [0] * 6 + [-1]])
    bad[1, 3, 0, 2] = gate
    gla(q, k, v, bad, segment_ids=ids)  # not checked: no error
    monkeypatch.setenv("RINGTIDE_CHECK", "1")
    good = g.clone()
    good[1, 6] = gate  # padding may hold anything
    good[0, 0] = -np.inf
    gla(q, k, v, good, segment_ids=ids)
    with pytest.raises(ValueError, match=r"^g: expected gates in \[-inf, 0\]"):
        gla(q, k, v, bad, segment_ids=ids)


def test_forward_mode_is_refused_not_zero():
    q = torch.randn(1, 5, 1, 4)
    g = -torch.rand(1, 5, 1, 4)
    with pytest.raises(NotImplementedError, match="q: carries a tangent, but there is only reverse mode"):
        torch.func.jvp(lambda q: gla(q, q, q, g)[0], (q,), (q,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": [0, 5]}, "cu_seqlens: expected a torch tensor, got list"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: expected to end at T = 5, the tokens given, got 3"),
        ({"q": np.zeros((1, 5, 1, 4))}, "q: expected a torch tensor, got ndarray"),
        ({"initial_state": [1], "state_v_first": True}, "initial_state: expected a torch tensor, got list"),
    ],
)
def test_what_is_turned_round_is_looked_at_first(change, message):
    q = torch.randn(1, 5, 1, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        fused_recurrent_gla(**{"q": q, "k": q, "v": q, "reverse": True, **change})
