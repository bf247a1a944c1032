"""The float64 attention against its own definition, row by row, and its gradients against finite differences."""

import math

import numpy as np
import pytest

from ringtide.kernels.masks import Causal, Chunked, Local
from ringtide.reference.attention import attention, attention_grad

B, T, S, N, KV, H, V = 2, 5, 6, 4, 2, 3, 4
PACKED = (np.array([[0, 0, 1, 1, -1], [7, -1, 7, 2, 2]]), np.array([[0, 1, 1, -1, -1, 0], [2, 2, -1, 3, 3, -1]]))
PER_HEAD = np.random.default_rng(9).random((B, N, T, S)) < 0.4  # with rows that see nothing

CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"mask": Causal()},
    "window": {"mask": Local(1, 0)},
    "function": {"mask": lambda q, k: (q + k) % 3 == 0},
    "dense": {"mask": PER_HEAD},
    "soft cap": {"logits_soft_cap": 0.8},
    "sinks": {"sinks": True},
    "segments": {"segment_ids": PACKED},
    "positions": {
        "mask": Causal() & Chunked(4),
        "q_positions": np.array([3, 1, 0, 9, 2]),
        "kv_positions": np.random.default_rng(5).permutation(B * S).reshape(B, S),
    },
    "orphans": {"mask": Local(None, 0), "q_positions": np.arange(T) - 2},
    "everything": {
        "mask": Causal(),
        "segment_ids": PACKED,
        "sinks": True,
        "logits_soft_cap": 0.8,
        "scale": 0.7,
        "kv_positions": np.arange(S)[::-1],
    },
}


def problem(options, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=s) for s in ((B, T, N, H), (B, S, KV, H), (B, S, KV, V)))
    dout, dlse = rng.normal(size=(B, T, N, V)), rng.normal(size=(B, T, N))
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = rng.normal(size=N)
    if "segment_ids" in options:  # padding holds NaN, and nobody notices
        q_pad, kv_pad = (ids < 0 for ids in options["segment_ids"])
        q[q_pad] = k[kv_pad] = v[kv_pad] = dout[q_pad] = dlse[q_pad] = np.nan
    return q, k, v, dout, dlse, options


def row_by_row(q, k, v, mask=None, segment_ids=None, q_positions=None, kv_positions=None, scale=None, **rest):
    """The definition, one number at a time, sharing no line with the reference."""
    cap, sinks = rest.get("logits_soft_cap"), rest.get("sinks")
    out, lse = np.zeros((B, T, N, V)), np.full((B, T, N), -np.inf)
    q_pos = np.broadcast_to(np.arange(T) if q_positions is None else q_positions, (B, T))
    k_pos = np.broadcast_to(np.arange(S) if kv_positions is None else kv_positions, (B, S))
    for b, i, n in np.ndindex(B, T, N):
        weights, values = [], []
        for j in range(S):
            seen = True
            if mask is not None:
                seen = mask(q_pos[b, i], k_pos[b, j]) if callable(mask) else mask[b, n, i, j]
            if segment_ids is not None:
                seen = seen and segment_ids[0][b, i] >= 0 and segment_ids[0][b, i] == segment_ids[1][b, j]
            if seen:
                z = (1 / math.sqrt(H) if scale is None else scale) * sum(q[b, i, n] * k[b, j, n // 2])
                weights.append(math.exp(z if cap is None else cap * math.tanh(z / cap)))
                values.append(v[b, j, n // 2])
        total = sum(weights) + (0 if sinks is None else math.exp(sinks[n]))
        if total:
            lse[b, i, n] = math.log(total)
            out[b, i, n] = sum((w / total * x for w, x in zip(weights, values, strict=True)), np.zeros(V))
    return out, lse


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    q, k, v, _, _, options = problem(CASES[name])
    out, lse = attention(q, k, v, **options)
    want_out, want_lse = row_by_row(q, k, v, **options)
    np.testing.assert_allclose(out, want_out, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients(name, through):
    q, k, v, dout, dlse, options = problem(CASES[name])
    dout, dlse = (0 * dout if through == "lse" else dout), (None if through == "out" else dlse)
    inputs = {"q": q, "k": k, "v": v, **({"sinks": options.pop("sinks")} if "sinks" in options else {})}

    def loss(**inputs):
        out, lse = attention(**inputs, **options)
        terms = dout * out if dlse is None else dout * out + (dlse * np.where(np.isfinite(lse), lse, 0))[..., None] / V
        return np.nansum(terms)  # NaN only at padding, whose cotangents do not count

    grads = attention_grad(dout=dout, dlse=dlse, **inputs, **options)
    assert (grads[3] is None) == ("sinks" not in inputs)
    for (name, x), grad in zip(inputs.items(), grads, strict=False):
        assert grad.shape == x.shape
        assert np.isfinite(grad).all()
        np.testing.assert_allclose(grad, differences(loss, inputs, name), atol=2e-9, err_msg=name)


def differences(loss, inputs, name, step=1e-5):
    grad = np.zeros_like(inputs[name])
    for i in np.ndindex(grad.shape):
        up, down = inputs[name].copy(), inputs[name].copy()
        up[i] += step
        down[i] -= step
        grad[i] = (loss(**{**inputs, name: up}) - loss(**{**inputs, name: down})) / (2 * step)
    return grad


def test_orphans_are_exact():
    q, k, v, dout, dlse, _ = problem({})
    blind = {"mask": lambda q, k: (q != 2) & (k >= 0)}
    out, lse = attention(q, k, v, **blind)
    dq, dk, dv, _ = attention_grad(q, k, v, dout, dlse, **blind)
    assert not out[:, 2].any()
    assert (lse[:, 2] == -np.inf).all()
    assert not dq[:, 2].any()
    without = [np.delete(x, 2, axis=1) for x in (q, dout, dlse)]
    _, dk2, dv2, _ = attention_grad(without[0], k, v, *without[1:])
    np.testing.assert_allclose(dk, dk2, atol=1e-14)
    np.testing.assert_allclose(dv, dv2, atol=1e-14)

    sinks = np.arange(N, dtype=float)
    out, lse = attention(q, k, v, sinks=sinks, **blind)
    assert not out[:, 2].any()
    assert (lse[:, 2] == sinks).all()


def test_large_logits_and_empty_sides():
    q, k, v, *_ = problem({})
    out, lse = attention(1e4 * q, k, v)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    out, lse = attention(q[:, :0], k, v)
    assert out.shape == (B, 0, N, V)
    assert lse.shape == (B, 0, N)
    out, lse = attention(q, k[:, :0], v[:, :0])
    assert not out.any()
    assert (lse == -np.inf).all()


def test_float32_yardstick_computes_in_float32():
    q, k, v, dout, dlse, _ = problem({})
    for x in (*attention(q, k, v, dtype=np.float32), *attention_grad(q, k, v, dout, dlse, dtype=np.float32)[:3]):
        assert x.dtype == np.float32
