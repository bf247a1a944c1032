"""The float64 GLA recurrence against its closed form, and its gradients against finite differences."""

import numpy as np
import pytest

from ringtide.reference.gla import gla, gla_grad, resets

B, T, N, K, V = 2, 6, 2, 3, 4
SEGMENTS = np.array([[3, 3, -1, 3, 5, 5], [-1, 2, 2, 0, -1, 2]])


def problem(seed=0, state=True, segments=False, scale=None, gates="mild"):
    rng = np.random.default_rng(seed)
    q, k, v, do = (rng.normal(size=(B, T, N, d)) for d in (K, K, V, V))
    g = -rng.exponential(size=(B, T, N, K))
    if gates == "extreme":
        g[rng.random(g.shape) < 0.3] = -np.inf
        g[:, 3] = [-1e4, -1e6, -3.4e37]
    if segments:
        for x in (q, k, v, g, do):
            x[SEGMENTS < 0] = np.nan
    options = {
        "scale": scale,
        "initial_state": rng.normal(size=(B, N, K, V)) if state else None,
        "segment_ids": SEGMENTS if segments else None,
    }
    return q, k, v, g, do, rng.normal(size=(B, N, K, V)), options


CASES = {
    "plain": {"state": False},
    "state": {},
    "scale": {"scale": 0.9},
    "segments": {"segments": True},
    "extreme": {"gates": "extreme"},
    "everything": {"segments": True, "gates": "extreme", "scale": 0.9},
}


def closed_form(q, k, v, g, scale, initial_state, segment_ids):
    """o_t = scale sum_s<=t (q_t . e^(g_s+1 + ... + g_t) k_s) v_s, plus the decayed initial state."""
    ids = np.zeros((B, T), int) if segment_ids is None else segment_ids
    h0 = np.zeros((B, N, K, V)) if initial_state is None else initial_state
    o, final = np.zeros((B, T, N, V)), np.zeros((B, N, K, V))
    for b, n in np.ndindex(B, N):
        real = [t for t in range(T) if ids[b, t] >= 0]

        def decay(tokens, b=b, n=n):  # through these tokens
            return np.exp(np.sum([g[b, t, n] for t in tokens], axis=0)) if tokens else np.ones(K)

        def state_after(i, b=b, n=n, real=real, decay=decay):
            now = real[i]
            S = np.zeros((K, V))
            for j in range(i + 1):
                if all(ids[b, t] == ids[b, now] for t in real[j : i + 1]):
                    S += np.outer(decay(real[j + 1 : i + 1]) * k[b, real[j], n], v[b, real[j], n])
            if all(ids[b, t] == ids[b, now] for t in real[: i + 1]):
                S += decay(real[: i + 1])[:, None] * h0[b, n]
            return S

        for i, t in enumerate(real):
            o[b, t, n] = (K**-0.5 if scale is None else scale) * q[b, t, n] @ state_after(i)
        final[b, n] = state_after(len(real) - 1)
    return o, final


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    q, k, v, g, _, _, options = problem(**CASES[name])
    o, final = gla(q, k, v, g, **options)
    want_o, want_final = closed_form(q, k, v, g, **options)
    np.testing.assert_allclose(o, want_o, atol=1e-13)
    np.testing.assert_allclose(final, want_final, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("through", ["o", "state", "both"])
def test_gradients(name, through):
    q, k, v, g, do, dstate, options = problem(**CASES[name])
    do, dstate = (0 * do if through == "state" else do), (None if through == "o" else dstate)
    h0 = options.pop("initial_state")
    inputs = {"q": q, "k": k, "v": v, "g": g, "initial_state": np.zeros((B, N, K, V)) if h0 is None else h0}

    def loss(**inputs):
        o, final = gla(**inputs, **options)
        return np.nansum(do * o) + (0 if dstate is None else (dstate * final).sum())

    grads = gla_grad(do=do, dstate=dstate, **inputs, **options)
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        assert grad.shape == x.shape
        assert np.isfinite(grad).all()
        np.testing.assert_allclose(grad, differences(loss, inputs, name), atol=3e-9, err_msg=name)


def differences(loss, inputs, name, step=1e-5):
    grad = np.zeros_like(inputs[name])
    for i in np.ndindex(grad.shape):
        if np.isinf(inputs[name][i]):
            continue  # a reset: nothing flows
        up, down = inputs[name].copy(), inputs[name].copy()
        up[i] += step
        down[i] -= step
        grad[i] = (loss(**{**inputs, name: up}) - loss(**{**inputs, name: down})) / (2 * step)
    return grad


def test_split_and_carry():
    q, k, v, g, _, _, options = problem()
    o, final = gla(q, k, v, g, **options)
    for t in range(T + 1):
        first, h = gla(*(x[:, :t] for x in (q, k, v, g)), **options)
        second, end = gla(*(x[:, t:] for x in (q, k, v, g)), initial_state=h)
        np.testing.assert_array_equal(np.concatenate([first, second], 1), o)
        np.testing.assert_array_equal(end, final)


def test_segments_are_separate_sequences():
    q, k, v, g, _, _, options = problem(segments=True)
    o, final = gla(q, k, v, g, **options)
    first, _ = gla(*(x[:1, [0, 1, 3]] for x in (q, k, v, g)), initial_state=options["initial_state"][:1])
    second, end = gla(*(x[:1, 4:] for x in (q, k, v, g)))
    np.testing.assert_array_equal(o[:1, [0, 1, 3]], first)
    np.testing.assert_array_equal(o[:1, 4:], second)
    np.testing.assert_array_equal(final[:1], end)
    assert not o[SEGMENTS < 0].any()


def test_resets():
    want = [[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 1]]
    np.testing.assert_array_equal(resets(SEGMENTS), np.array(want, bool))


def test_reset_by_gate_equals_reset_by_segment():
    q, k, v, g, do, dstate, options = problem()
    gates = g.copy()
    gates[:, 2] = -np.inf
    ids = np.broadcast_to([0, 0, 1, 1, 1, 1], (B, T))
    for by_gate, by_segment in zip(
        gla_grad(q, k, v, gates, do, dstate, **options),
        gla_grad(q, k, v, g, do, dstate, **{**options, "segment_ids": ids}),
        strict=True,
    ):
        np.testing.assert_array_equal(by_gate, by_segment)


def test_empty_sequence_and_float32():
    q, k, v, g, do, dstate, options = problem()
    o, final = gla(*(x[:, :0] for x in (q, k, v, g)), **options)
    assert o.shape == (B, 0, N, V)
    np.testing.assert_array_equal(final, options["initial_state"])
    *_, dh0 = gla_grad(*(x[:, :0] for x in (q, k, v, g, do)), dstate, **options)
    np.testing.assert_array_equal(dh0, dstate)
    grads = gla_grad(q, k, v, g, do, dstate, **options, dtype=np.float32)
    assert {x.dtype for x in (*gla(q, k, v, g, **options, dtype=np.float32), *grads)} == {np.dtype(np.float32)}
