"""Gated linear attention, the truth: the recurrence in float64 NumPy, token by token, the gradients derived by hand.

With the log decay g_t in [-inf, 0]^K and the state S in R^(K x V), for each head:

    S_t = diag(e^g_t) S_(t-1) + k_t v_t^T        o_t = scale S_t^T q_t

and backwards, with D_t the gradient of S_t (D_T starts from dstate):

    D_t += scale q_t do_t^T          dq_t = scale S_t do_t     dk_t = D_t v_t     dv_t = D_t^T k_t
    dg_t = e^g_t * sum_v S_(t-1) D_t                           D_(t-1) = diag(e^g_t) D_t

Segments: a token whose id differs from that of the last token before it (padding aside) starts from a zero state, as
if g_t were -inf there. initial_state enters the first segment, final_state leaves the last. Tokens with a negative id
are padding: the state passes them unchanged, their output and gradients are 0, and whatever they hold (NaN too), in
the inputs or in do, is ignored.
"""

import numpy as np


def gla(q, k, v, g, **options):
    """q, k, g [B, T, N, K], v [B, T, N, V]. Options:

    scale           default 1 / sqrt(K)
    initial_state   [B, N, K, V]; None: zero
    segment_ids     [B, T]; None: one segment
    dtype           what to compute in; float32 turns the truth into the naive yardstick of `ringtide.testing`

    Returns o [B, T, N, V] and final_state [B, N, K, V].
    """
    x = _Forward(q, k, v, g, **options)
    return x.output(), x.states[-1]


def gla_grad(q, k, v, g, do, dstate=None, **options):
    """Gradients of <do, o> + <dstate, final_state>. do [B, T, N, V], dstate [B, N, K, V] or None; options as `gla`.

    Returns (dq, dk, dv, dg, dh0), shaped as q, k, v, g and the state.
    """
    x = _Forward(q, k, v, g, **options)
    do = x.clean(do)
    dq, dk, dv, dg = (np.zeros_like(a) for a in (x.q, x.k, x.v, x.decay))
    D = np.zeros_like(x.states[0]) if dstate is None else np.array(dstate, x.dtype)
    for t in reversed(range(len(x.q))):
        S_before, S = x.states[t], x.states[t + 1]
        D = D + x.scale * x.q[t][..., :, None] * do[t][..., None, :]
        dq[t] = x.scale * (S * do[t][..., None, :]).sum(-1)
        dk[t] = (D * x.v[t][..., None, :]).sum(-1)
        dv[t] = (D * x.k[t][..., :, None]).sum(-2)
        dg[t] = x.decay[t] * (S_before * D).sum(-1)
        D = x.decay[t][..., :, None] * D
    for grad in (dq, dk, dv, dg):
        grad[x.padding] = 0
    return *(grad.swapaxes(0, 1) for grad in (dq, dk, dv, dg)), D


def resets(segment_ids):
    """Where the state starts again from zero: bool, shaped as segment_ids [B, T]."""
    segment_ids = np.asarray(segment_ids)
    starts = np.zeros(segment_ids.shape, bool)
    for row, ids in zip(starts, segment_ids, strict=True):
        last = None
        for t, token in enumerate(ids):
            if token >= 0:
                row[t], last = last is not None and token != last, token
    return starts


class _Forward:
    """All states, states[t] before token t. Time comes first: [T, B, N, ...]."""

    def __init__(self, q, k, v, g, *, scale=None, initial_state=None, segment_ids=None, dtype=np.float64):
        batch, length, heads, width = np.shape(q)
        self.dtype = np.dtype(dtype)
        self.scale = self.dtype.type(width**-0.5 if scale is None else scale)
        self.padding = np.zeros((length, batch), bool) if segment_ids is None else np.asarray(segment_ids).T < 0
        self.q, self.k, self.v = self.clean(q), self.clean(k), self.clean(v)
        self.decay = np.exp(self.clean(g))  # 1 at padding: there g is cleaned to 0
        if segment_ids is not None:
            self.decay[resets(segment_ids).T] = 0

        self.states = np.zeros((length + 1, batch, heads, width, np.shape(v)[-1]), self.dtype)
        if initial_state is not None:
            self.states[0] = initial_state
        for t in range(length):
            kv = self.k[t][..., :, None] * self.v[t][..., None, :]
            self.states[t + 1] = self.decay[t][..., :, None] * self.states[t] + kv

    def output(self):
        o = self.scale * (self.q[..., :, None] * self.states[1:]).sum(-2)
        return o.swapaxes(0, 1)

    def clean(self, x):
        x = np.array(np.swapaxes(x, 0, 1)).astype(self.dtype)
        x[self.padding] = 0
        return x
