"""Attention, the truth: every equation written out once, in float64 NumPy, the gradients derived by hand.

    s_ij = scale q_i . k_j           z_ij = s_ij, or cap tanh(s_ij / cap); only for the keys j that query i sees
    lse_i = log(sum_j e^z_ij  [+ e^sink])
    p_ij = e^(z_ij - lse_i)          out_i = sum_j p_ij v_j

and backwards, for the gradients dout of out and dlse of lse:

    dp_ij = dout_i . v_j             delta_i = dout_i . out_i - dlse_i
    dz_ij = p_ij (dp_ij - delta_i)   ds_ij = dz_ij (1 - tanh^2(s_ij / cap))
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i
    dv_j = sum_i p_ij dout_i         dsink = -sum_i e^(sink - lse_i) delta_i

A row that sees nothing is an orphan: out 0, lse -inf (the sink, where there is one), no gradient to q, k or v. Tokens
of a negative segment are padding: they see nothing, are seen by nothing, and whatever they hold (NaN too), in the
inputs or in dout and dlse, is ignored.
"""

import numpy as np


def attention(q, k, v, **options):
    """Softmax attention of q over k and v.

    q [B, T, N, H], k [B, S, N_kv, H], v [B, S, N_kv, H_v]; query head n reads kv head n // (N / N_kv). Options:

    mask           f(q_pos, k_pos) -> bool, or a bool array that broadcasts to [B, N, T, S]; None: all is visible
    segment_ids    [B, T] or a pair ([B, T], [B, S]); equal ids see each other, negative ones are padding
    q_positions, kv_positions   [T] or [B, T], [S] or [B, S]; default: 0, 1, 2, ...
    scale          default 1 / sqrt(H)           logits_soft_cap   None: no cap
    sinks          [N], one logit a head that takes weight and gives no value
    dtype          what to compute in; float32 turns the truth into the naive yardstick of `ringtide.testing`

    Returns out [B, T, N, H_v] and lse [B, T, N], the natural logarithm.
    """
    x = _Forward(q, k, v, **options)
    return _time_first(x.out), x.lse.swapaxes(1, 2)


def attention_grad(q, k, v, dout, dlse=None, **options):
    """Gradients of <dout, out> + <dlse, lse>. dout [B, T, N, H_v], dlse [B, T, N] or None; options as `attention`.

    Returns (dq, dk, dv, dsinks), each shaped as its input; dsinks is None without sinks.
    """
    x = _Forward(q, k, v, **options)
    dout = _head_first(x.clean(dout, x.q_padding))
    delta = (dout * x.out).sum(-1)
    if dlse is not None:
        delta -= x.clean(dlse, x.q_padding).swapaxes(1, 2)

    dz = x.p * (dout @ x.v.swapaxes(-1, -2) - delta[..., None])
    ds = x.scale * dz * x.slope
    dq = ds @ x.k
    dk = _sum_groups(ds.swapaxes(-1, -2) @ x.q, x.kv_heads)
    dv = _sum_groups(x.p.swapaxes(-1, -2) @ dout, x.kv_heads)
    dsinks = None if x.sinks is None else -(np.exp(x.sinks - x.lse) * delta).sum((0, 2))
    return _time_first(dq), _time_first(dk), _time_first(dv), dsinks


def visibility(q, k, *, mask=None, segment_ids=None, q_positions=None, kv_positions=None):
    """Which query sees which key: bool [B, N, T, S] (N is 1 unless the mask depends on the head)."""
    (batch, length, *_), keys = np.shape(q), np.shape(k)[1]
    seen = np.ones((batch, 1, length, keys), bool)
    if callable(mask):
        q_pos, k_pos = _positions(q_positions, batch, length), _positions(kv_positions, batch, keys)
        seen = seen & np.asarray(mask(q_pos[:, None, :, None], k_pos[:, None, None, :]))
    elif mask is not None:
        seen = seen & np.asarray(mask, bool)
    if segment_ids is not None:
        q_seg, k_seg = _pair(segment_ids)
        seen = seen & (q_seg[:, None, :, None] == k_seg[:, None, None, :]) & (q_seg >= 0)[:, None, :, None]
    return seen


class _Forward:
    """The forward pass with all that the backward pass needs. Heads come before time: [B, N, T, ...]."""

    def __init__(self, q, k, v, *, scale=None, logits_soft_cap=None, sinks=None, dtype=np.float64, **visible):
        self.dtype, self.kv_heads = np.dtype(dtype), np.shape(k)[2]
        self.q_padding, self.kv_padding = (None, None)
        if visible.get("segment_ids") is not None:
            self.q_padding, self.kv_padding = (ids < 0 for ids in _pair(visible["segment_ids"]))
        groups = np.shape(q)[2] // self.kv_heads
        self.q = _head_first(self.clean(q, self.q_padding))
        self.k = _head_first(self.clean(k, self.kv_padding)).repeat(groups, axis=1)
        self.v = _head_first(self.clean(v, self.kv_padding)).repeat(groups, axis=1)
        self.scale = self.dtype.type(np.shape(q)[-1] ** -0.5 if scale is None else scale)
        self.sinks = None if sinks is None else np.asarray(sinks, self.dtype)[None, :, None]

        z = self.scale * (self.q @ self.k.swapaxes(-1, -2))
        self.slope = self.dtype.type(1)
        if logits_soft_cap is not None:
            tanh = np.tanh(z / self.dtype.type(logits_soft_cap))
            z, self.slope = self.dtype.type(logits_soft_cap) * tanh, 1 - tanh**2

        seen = visibility(q, k, **visible)
        z = np.where(seen, z, -np.inf)
        top = z.max(-1, initial=-np.inf)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks)
        top = np.where(np.isfinite(top), top, 0).astype(self.dtype)  # orphans: e^-inf sums to 0, whose log is -inf
        total = np.exp(z - top[..., None]).sum(-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks - top)
        with np.errstate(divide="ignore"):
            self.lse = top + np.log(total)
        self.p = np.exp(z - np.where(np.isfinite(self.lse), self.lse, 0)[..., None])
        self.out = self.p @ self.v

    def clean(self, x, padding):
        x = np.asarray(x).astype(self.dtype)
        if padding is not None:
            x[padding] = 0
        return x


def _pair(segment_ids):
    return tuple(map(np.asarray, segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)))


def _positions(positions, batch, length):
    return np.broadcast_to(np.arange(length) if positions is None else np.asarray(positions), (batch, length))


def _head_first(x):
    return x.swapaxes(1, 2)  # [B, T, N, H] -> [B, N, T, H]


def _time_first(x):
    return x.swapaxes(1, 2)  # [B, N, T, H] -> [B, T, N, H]


def _sum_groups(x, kv_heads):
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)
