"""Gated linear attention in plain PyTorch: any device, any T, K and V, O(T) memory, exact for every gate in [-128, 0].

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

Chunks of C tokens, as in kernels/xla/gla.py: at level m = 1, 2, 4, ..., C/2 each pair of neighbouring blocks of m
tokens meets in one matmul. With the decay a = e^g, what lies between tokens j < i is the product of a over (j, i], and
it is only ever built by multiplying, never by dividing one running product by another:

      left block          right block
    . . j - - - - - - | - - - - i . .       decay(j, i) = exclusive suffix of j * inclusive prefix of i

Both factors are at most 1. A level keeps them in one array, E_m [C, K]: suffixes in left blocks, prefixes in right;
X_m holds k in left blocks and q in right ones. With Y_m = E_m X_m the level gives

    A_m = Y_right Y_left^T        dY_right = dA_m Y_left        dY_left = dA_m^T Y_right        dX_m = E_m dY_m

and dY_m Y_m is the gradient of the sum of gates in each exponent; the walk from the last level to the first hands it to
the gates that the sum is made of (`_to_gates`). So no pair of tokens is counted twice, nothing has to cancel, and dg is
exactly 0 at a reset.

The chunks of a slab are batched; only the states go from chunk to chunk, elementwise:

    S_leave = e^total S_enter + (k e^suffix)^T v        dS_enter = e^total dS_leave + (q e^prefix)^T do

With cu_seqlens the sequences lie end to end in one row. They are moved apart so that each begins a chunk: at most
(T + sequences (C - 1)) / C chunks, whatever their lengths, so that no shape depends on a value and nothing waits for
the device. A chunk that begins a sequence takes that sequence's state.

Everything is computed in float32, or in float64 if q is float64.
"""

import torch
from torch.nn.functional import pad

CHUNK = 64  # tokens
SLAB = 32  # chunks of a head that are worked on at once, all heads and rows together


def forward(q, k, v, g, h0, *, scale, cu_seqlens=None, chunk=CHUNK, slab=SLAB):
    """Runs the recurrence over all tokens.

    q, k: [B, T, N, K], v: [B, T, N, V], float32, bfloat16, float16 or float64.  g: [B, T, N, K] in [-128, 0] and
    h0: [B, N, K, V], the state before the first token, both float32 (float64 if q is).
    cu_seqlens: [sequences + 1] integers, 0 = cu_seqlens[0] <= cu_seqlens[1] <= ... <= cu_seqlens[-1] = T: where the
    sequences of the one row begin and end; then B = 1 and h0 is [sequences, N, K, V].  chunk: a power of two.
    Returns (o [B, T, N, V] in v.dtype, the state after the last token, as h0).
    """
    plan = _Plan(q, v, h0, cu_seqlens, chunk, slab)
    q, k, v, g = map(plan.pack, (q, k, v, g))
    o = torch.empty_like(v)
    S, hT = plan.begin(h0)
    for tokens, chunks in plan.slabs():
        x = _Chunks(*(plan.split(x, tokens) for x in (q, k, v, g)), scale)
        states, S = _states(x, S, h0, hT, plan, chunks)
        plan.join(o, tokens, torch.baddbmm(x.scores() @ x.v, x.q_prefix, states.flatten(0, 2)))
    return plan.unpack(o), plan.end(S, hT)


def backward(q, k, v, g, h0, do, dhT, *, scale, cu_seqlens=None, chunk=CHUNK, slab=SLAB):
    """Gradients of `forward`: do [B, T, N, V] in v.dtype, dhT as h0 -> (dq, dk, dv, dg, dh0), as q, k, v, g, h0."""
    plan = _Plan(q, v, h0, cu_seqlens, chunk, slab)
    q, k, v, g, do = map(plan.pack, (q, k, v, g, do))
    dq, dk, dv, dg = map(torch.empty_like, (q, k, v, g))
    S, hT = plan.begin(h0)
    entering = []
    for tokens, chunks in plan.slabs():
        x = _Chunks(*(plan.split(x, tokens) for x in (q, k, v, g)), scale)
        states, S = _states(x, S, h0, hT, plan, chunks)
        entering.append(states)
    D, dh0 = plan.begin(dhT)
    for tokens, chunks in reversed(list(plan.slabs())):
        x = _Chunks(*(plan.split(x, tokens) for x in (q, k, v, g)), scale)
        do_ = plan.split(do, tokens).flatten(0, 2)
        S = entering.pop()
        leaving, D = _state_gradients(x, do_, D, dhT, dh0, plan, chunks)
        grads = _chunk_gradients(x, do_, S.flatten(0, 2), leaving.flatten(0, 2), scale)
        for whole, part in zip((dq, dk, dv, dg), grads, strict=True):
            plan.join(whole, tokens, part)
    return *map(plan.unpack, (dq, dk, dv, dg)), plan.end(D, dh0)


class _Chunks:
    """The chunks of a slab, M = chunks * B * N of them: q (scaled), k, g [M, C, K], v [M, C, V], and their decays."""

    def __init__(self, q, k, v, g, scale):
        self.shape = q.shape[:3]
        q, k, self.v, g = (x.flatten(0, 2) for x in (q, k, v, g))
        self.q, self.k = q * scale, k
        self.prefix = g.exp()  # inclusive, over the block of the level reached
        self.suffix = torch.ones_like(g)  # exclusive
        self.levels = []  # (m, E, Y)
        m = 1
        while m < g.shape[1]:
            E = _join(_left(self.suffix, m), _right(self.prefix, m))
            self.levels.append((m, E, E * _join(_left(self.k, m), _right(self.q, m))))
            first, second = _left(self.prefix, m)[:, :, -1:].clone(), _right(self.prefix, m)[:, :, -1:].clone()
            _left(self.suffix, m).mul_(second)
            _right(self.prefix, m).mul_(first)
            m *= 2
        self.q_prefix, self.k_suffix = self.q * self.prefix, self.k * self.suffix
        self.total = self.prefix[:, -1].reshape(*self.shape, -1, 1)  # [chunks, B, N, K, 1]

    def scores(self):
        """A [M, C, C]: what each token reads of each."""
        A = torch.diag_embed((self.q * self.k).sum(-1))
        for m, _, Y in self.levels:
            left, right = _left(Y, m), _right(Y, m)
            _met(A, m).copy_(right @ left.mT)
        return A


def _states(x, S, h0, hT, plan, chunks):
    """(the states that enter the chunks [chunks, B, N, K, V], the one that leaves the last)."""
    leaving = (x.k_suffix.mT @ x.v).unflatten(0, x.shape)
    entering = torch.empty_like(leaving)
    for i, c in enumerate(range(*chunks)):
        plan.enter(c, S, h0, entering[i])
        S = leaving[i].addcmul_(x.total[i], entering[i])
    plan.leave(chunks, leaving, hT)
    return entering, S


def _state_gradients(x, do, D, dhT, dh0, plan, chunks):
    """(gradients of the states that leave the chunks, of the state that enters the first)."""
    entering = (x.q_prefix.mT @ do).unflatten(0, x.shape)
    leaving = torch.empty_like(entering)
    for i, c in reversed(list(enumerate(range(*chunks)))):
        plan.enter_last(c, D, dhT, leaving[i])
        D = entering[i].addcmul_(x.total[i], leaving[i])
    plan.leave_first(chunks, entering, dh0)
    return leaving, D


def _chunk_gradients(x, do, S, D, scale):
    """S: the states that enter the chunks, D: the gradients of those that leave them, [M, K, V]."""
    C = do.shape[1]
    dv = x.scores().mT @ do + x.k_suffix @ D
    dA = do @ x.v.mT
    diagonal = dA.diagonal(dim1=1, dim2=2)[..., None]
    slope_q, slope_k = do @ S.mT, x.v @ D.mT
    dq = slope_q * x.prefix + diagonal * x.k
    dk = slope_k * x.suffix + diagonal * x.q
    # Gradients of the sums of gates of the whole chunk, prefix and suffix; the last prefix decays the state too.
    d_prefix, d_suffix = slope_q * x.q_prefix, slope_k * x.k_suffix
    d_prefix[:, C - 1] += x.total.flatten(0, 2)[..., 0] * (S * D).sum(-1)
    for m, E, Y in reversed(x.levels):
        met, left, right = _met(dA, m), _left(Y, m), _right(Y, m)
        dY = _join(met.mT @ right, met @ left)
        dX = dY * E
        _left(dk, m).add_(_left(dX, m))
        _right(dq, m).add_(_right(dX, m))
        _to_gates(d_prefix, d_suffix, dY * Y, m)
    return dq * scale, dk, dv, d_prefix


def _to_gates(d_prefix, d_suffix, d_level, m):
    """From the sums over blocks of 2 m tokens to those over blocks of m, in place, and what level m adds to these."""
    p0, p1, s0 = _left(d_prefix, m), _right(d_prefix, m), _left(d_suffix, m)
    p0[:, :, -1] += p1.sum(2)  # a right prefix held the left total
    p1[:, :, -1] += s0.sum(2)  # a left suffix held the right total
    p1 += _right(d_level, m)
    s0 += _left(d_level, m)


def _left(x, m):
    """[M, C, d] -> its left blocks of m tokens, [M, C / 2m, m, d], a view."""
    return x.unflatten(1, (-1, 2, m))[:, :, 0]


def _right(x, m):
    return x.unflatten(1, (-1, 2, m))[:, :, 1]


def _join(left, right):
    """The inverse of (_left, _right)."""
    return torch.stack((left, right), 2).flatten(1, 3)


def _met(A, m):
    """A [M, C, C] -> where right blocks of m tokens meet the left ones beside them, [M, C / 2m, m, m], a view."""
    blocks = A.unflatten(2, (-1, 2, m)).unflatten(1, (-1, 2, m))  # [M, n, 2, m, n, 2, m]
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


class _Plan:
    """How the tokens fall into chunks and slabs, and which state enters a chunk."""

    def __init__(self, q, v, h0, cu_seqlens, chunk, slab):
        self.T, self.dtype = q.shape[1], h0.dtype
        self.C = C = min(chunk, 1 << max(self.T - 1, 0).bit_length())
        self.packed, self.slab = cu_seqlens is not None, slab
        self.count = -(-self.T // C)
        if self.packed:
            begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            n = len(begin)
            self.count = (self.T + n * (C - 1)) // C
            chunks = (end - begin + C - 1) // C
            last = chunks.cumsum(0)
            first = last - chunks
            token, chunk = (torch.arange(i, device=q.device) for i in (self.T, self.count))
            s = torch.searchsorted(end, token, right=True)
            self.place = first[s] * C + token - begin[s]
            self.sequence = torch.searchsorted(last, chunk, right=True)  # n: a chunk that no sequence needed
            here = self.sequence.clamp(max=n - 1)
            real = self.sequence < n
            self.first, self.last = real & (chunk == first[here]), real & (chunk == last[here] - 1)
            self.here = here

    def slabs(self):
        """((first token, last token), (first chunk, last chunk)), both ends exclusive, of each slab."""
        for c in range(0, self.count, self.slab):
            end = min(c + self.slab, self.count)
            yield (c * self.C, end * self.C), (c, end)

    def pack(self, x):
        """[B, T, N, d] -> the same with the sequences moved apart."""
        if not self.packed:
            return x
        return x.new_zeros(1, self.count * self.C, *x.shape[2:]).index_copy_(1, self.place, x)

    def unpack(self, x):
        return x[:, self.place] if self.packed else x

    def split(self, x, tokens):
        """The slab [chunks, B, N, C, d] of x, zero-padded: a token of zeros leaves the state as it is."""
        x = x[:, tokens[0] : tokens[1]].to(self.dtype)
        if short := tokens[1] - tokens[0] - x.shape[1]:
            x = pad(x, (0, 0, 0, 0, 0, short))
        return x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 2, 4).contiguous()

    def join(self, whole, tokens, x):
        """Writes the slab x [M, C, d] to where `split` found it."""
        there = whole[:, tokens[0] : tokens[1]]
        x = x.unflatten(0, (-1, whole.shape[0], whole.shape[2])).permute(1, 0, 3, 2, 4).flatten(1, 2)
        there.copy_(x[:, : there.shape[1]])

    def begin(self, h):
        """(the state to begin with, where sequences leave theirs: a row each, and one for chunks without a sequence)"""
        if not self.packed:
            return h, None
        return torch.zeros_like(h[:1]), torch.cat((h, h.new_zeros(1, *h.shape[1:])))

    def end(self, S, states):
        return states[:-1] if self.packed else S.clone()

    def enter(self, c, S, h0, out):
        out.copy_(torch.where(self.first[c], h0[self.here[c]], S) if self.packed else S)

    def enter_last(self, c, D, dhT, out):
        out.copy_(torch.where(self.last[c], dhT[self.here[c]], D) if self.packed else D)

    def leave(self, chunks, states, hT):
        if self.packed:
            self._leave(self.last, chunks, states, hT)

    def leave_first(self, chunks, grads, dh0):
        if self.packed:
            self._leave(self.first, chunks, grads, dh0)

    def _leave(self, which, chunks, states, out):
        c = slice(*chunks)
        row = torch.where(which[c], self.sequence[c], out.shape[0] - 1)
        out.index_copy_(0, row, states[:, 0])


def decode_step(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    """One token for each of B sequences whose states live in a pool; `state` is left as it is.

    q, k, g: [B, N, K], v: [B, N, V], state: [slots, N, K, V].  slot_ids: [B] integers below slots, distinct; a row of
    a negative one is all zeros, touches nothing and returns 0; None: row b is slot b.  has_initial_state: [B] bool,
    False reads the slot as zeros; None: all True.  Returns (out [B, N, V] in v.dtype, state).
    """
    state = state.clone()
    return decode_step_(q, k, v, g, state, slot_ids, has_initial_state, scale=scale), state


def decode_step_(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    """`decode_step` that changes `state` in place. Returns out."""
    rows = None if slot_ids is None else slot_ids >= 0
    out, S = _token(q, k, v, g, _read(state, slot_ids, has_initial_state), scale)
    if rows is None:
        state.copy_(S)
        return out.to(v.dtype)
    _write(state, slot_ids, S)
    return torch.where(rows[:, None, None], out, 0).to(v.dtype)


def _token(q, k, v, g, S, scale):
    S = torch.addcmul(S * g.exp()[..., None], k.to(S.dtype)[..., None], v.to(S.dtype)[..., None, :])
    q = (q.to(S.dtype) * scale)[..., None, :]
    return (q @ S)[..., 0, :], S


def _read(state, slot_ids, has_initial_state):
    """The states of the rows, as a copy."""
    S = state if slot_ids is None else state[slot_ids.clamp(min=0)]
    if has_initial_state is not None:
        S = torch.where(has_initial_state[:, None, None, None], S, 0)
    return S


def _write(state, slot_ids, S):
    """Writes the rows S to their slots. Two writes to one place have no order, so a row without a slot may not write
    to any: each slot asks for its row instead."""
    slots = state.shape[0]
    row = slot_ids.new_full((slots + 1,), -1, dtype=torch.long)
    row[torch.where(slot_ids >= 0, slot_ids, slots).long()] = torch.arange(len(slot_ids), device=state.device)
    row = row[:slots]
    state.copy_(torch.where((row >= 0)[:, None, None, None], S[row.clamp(min=0)], state))


def decode_step_backward(q, k, v, g, state, slot_ids, has_initial_state, dout, dnew, *, scale):
    """Gradients of `decode_step`: dout as out, dnew as state -> (dq, dk, dv, dg, dstate)."""
    S = _read(state, slot_ids, has_initial_state)
    D = dnew if slot_ids is None else dnew[slot_ids.clamp(min=0)]
    if slot_ids is not None:
        used = (slot_ids >= 0)[:, None, None]
        q, k, v, g, dout = (torch.where(used, x, 0) for x in (q, k, v, g, dout))
        D = torch.where(used[..., None], D, 0)
        S = torch.where(used[..., None], S, 0)
    qf, kf, vf, do = (x.to(S.dtype) for x in (q, k, v, dout))
    decay = g.exp()[..., None]
    decayed = S * decay
    D = torch.addcmul(D, qf[..., None], do[..., None, :], value=scale)
    new = torch.addcmul(decayed, kf[..., None], vf[..., None, :])
    dq = scale * (new @ do[..., None])[..., 0]
    dk = (D @ vf[..., None])[..., 0]
    dv = (kf[..., None, :] @ D)[..., 0, :]
    dg = (decayed * D).sum(-1)
    dS = decay * D
    if has_initial_state is not None:
        dS = torch.where(has_initial_state[:, None, None, None], dS, 0)
    if slot_ids is None:
        dstate = dS
    else:
        dstate = dnew.clone()
        _write(dstate, slot_ids, dS)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg, dstate
