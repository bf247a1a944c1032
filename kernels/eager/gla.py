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

and dY_m Y_m is the gradient of the sum of gates in each exponent; `_to_halves`, from the last level to the first, hands
it to the gates that the sum is made of. So no pair of tokens is counted twice, nothing has to cancel, and dg is exactly
0 at a reset.

The chunks of a slab are batched; only the states go from chunk to chunk, elementwise:

    S_leave = e^total S_enter + (k e^suffix)^T v        dS_enter = e^total dS_leave + (q e^prefix)^T do

With cu_seqlens the sequences lie end to end in one row. They are moved apart so that each begins a chunk: at most
(T + sequences (C - 1)) / C chunks, whatever their lengths, so that no shape depends on a value and nothing waits for
the device. A chunk that begins a sequence takes that sequence's state.

Everything is computed in float32, or in float64 if q is float64. Numbers near the least of the dtype count as 0: a CPU
takes up to a hundred times as long for one that has lost digits there. With gates of -1.3 on average, a call took 6
times as long; now 1.4 times.
"""

import torch
from torch.nn.functional import hardshrink, pad, threshold_

CHUNK, SHORT = 64, 16  # tokens of a chunk, and at least so many where short sequences lie end to end
SLAB = 1 << 19  # numbers of k and v that are worked on at a time
CACHE = 1 << 18  # numbers of the states that a decode step works on at a time


def forward(q, k, v, g, h0, *, scale, cu_seqlens=None, chunk=CHUNK, slab=None):
    """Runs the recurrence over all tokens.

    q, k: [B, T, N, K], v: [B, T, N, V], float32, bfloat16, float16 or float64.  g: [B, T, N, K] in [-128, 0] and
    h0: [B, N, K, V], the state before the first token, both float32 (float64 if q is).
    cu_seqlens: [sequences + 1] integers, 0 = cu_seqlens[0] <= cu_seqlens[1] <= ... <= cu_seqlens[-1] = T: where the
    sequences of the one row begin and end; then B = 1 and h0 is [sequences, N, K, V].  chunk: tokens, a power
    of two.  slab: chunks worked on at a time; None: by SLAB.
    Returns (o [B, T, N, V] in v.dtype, the state after the last token, as h0).
    """
    plan = _Plan(q, v, h0, cu_seqlens, chunk, slab)
    q, k, v, g = map(plan.pack, (q, k, v, g))
    o = v.new_empty(v.shape)
    S, hT = plan.begin(h0)
    for part in plan.slabs():
        qs, ks, vs, decay = (plan.split(x, part) for x in (q, k, v, g))
        A, _, prefix, suffix = _scores(qs.mul_(scale), ks, decay.exp_())
        entering, S = _states(ks.mul_(suffix), vs, prefix, S, h0, hT, plan, part)
        plan.join(o, part, torch.baddbmm(A @ vs, qs.mul_(prefix), entering.flatten(0, 2)))
    return plan.unpack(o), plan.end(S, hT)


def backward(q, k, v, g, h0, do, dhT, *, scale, cu_seqlens=None, chunk=CHUNK, slab=None):
    """Gradients of `forward`: do [B, T, N, V] in v.dtype, dhT as h0 -> (dq, dk, dv, dg, dh0), as q, k, v, g, h0."""
    plan = _Plan(q, v, h0, cu_seqlens, chunk, slab)
    q, k, v, g, do = map(plan.pack, (q, k, v, g, do))
    S, hT = plan.begin(h0)
    states = []
    for part in plan.slabs():
        ks, vs, decay = (plan.split(x, part) for x in (k, v, g))
        *_, (_, prefix, suffix) = _levels(decay.exp_())
        entering, S = _states(ks.mul_(suffix), vs, prefix, S, h0, hT, plan, part)
        states.append(entering)
    grads = [x.new_empty(x.shape) for x in (q, k, v, g)]
    D, dh0 = plan.begin(dhT)
    for part in reversed(list(plan.slabs())):
        qs, ks, vs, decay, dos = (plan.split(x, part) for x in (q, k, v, g, do))
        A, levels, prefix, suffix = _scores(qs.mul_(scale), ks, decay.exp_(), keep=True)
        leaving, D = _state_gradients(qs * prefix, dos, prefix, D, dhT, dh0, plan, part)
        S, D_ = states.pop().flatten(0, 2), leaving.flatten(0, 2)
        parts = _gradients(qs, ks, vs, A, levels, prefix, suffix, S, dos, D_)
        for whole, x in zip(grads, (parts[0].mul_(scale), *parts[1:]), strict=True):
            plan.join(whole, part, x)
    return *map(plan.unpack, grads), plan.end(D, dh0)


def _scores(q, k, decay, keep=False):
    """(A [M, C, C], what each token reads of each; keep: each level's (m, E, Y); prefix and suffix of the chunk)."""
    M, C, _ = q.shape
    A = q.new_zeros(M, C, C)
    A.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))  # a token reads itself, undecayed
    kept = []
    for m, prefix, suffix in _levels(decay):
        if m == C:
            break
        Y = torch.empty_like(k)
        left, right = _halves(Y, m)
        torch.mul(_left(k, m), _left(suffix, m), out=left)
        torch.mul(_right(q, m), _right(prefix, m), out=right)
        _met(A, m).copy_((right * left).sum(-1)[..., None] if m == 1 else right @ left.mT)
        if keep:
            kept.append((m, _join(_left(suffix, m), _right(prefix, m)), Y))
    return hardshrink(A, torch.finfo(A.dtype).tiny), kept, prefix, suffix


def _levels(decay):
    """Yields (m, inclusive prefix, exclusive suffix): products of decay [M, C, K] inside blocks of m = 1, 2, ..., C
    tokens. Both are changed in place from one to the next."""
    tiny = torch.finfo(decay.dtype).tiny
    m, prefix, suffix = 1, threshold_(decay, tiny, 0), torch.ones_like(decay)
    while True:
        yield m, prefix, suffix
        if m == decay.shape[1]:
            return
        left, right = _halves(prefix, m)
        threshold_(_left(suffix, m).mul_(right[:, :, -1:]), 64 * tiny, 0)
        threshold_(right.mul_(left[:, :, -1:]), 64 * tiny, 0)
        m *= 2


def _states(k, v, prefix, S, h0, hT, plan, part):
    """(the states that enter the chunks [chunks, B, N, K, V], the one that leaves the last); k: decayed by suffix."""
    leaving, total = plan.by_chunk(k.mT @ v), plan.by_chunk(prefix[:, -1, :, None])
    entering = torch.empty_like(leaving)
    for i, c in enumerate(part):
        plan.enter(c, S, h0, entering[i])
        S = leaving[i].addcmul_(total[i], entering[i])
    plan.leave(part, leaving, hT)
    return entering, S


def _state_gradients(q, do, prefix, D, dhT, dh0, plan, part):
    """(gradients of the states that leave the chunks, of the state that enters the first); q: decayed by prefix."""
    entering, total = plan.by_chunk(q.mT @ do), plan.by_chunk(prefix[:, -1, :, None])
    leaving = torch.empty_like(entering)
    for i, c in reversed(list(enumerate(part))):
        plan.enter_last(c, D, dhT, leaving[i])
        D = entering[i].addcmul_(total[i], leaving[i])
    plan.leave_first(part, entering, dh0)
    return leaving, D


def _gradients(q, k, v, A, levels, prefix, suffix, S, do, D):
    """(dq, dk, dv, dg) of the chunks; [M, K, V]: S, the states that enter, D, the gradients of those that leave."""
    dA = do @ v.mT
    diagonal = dA.diagonal(dim1=1, dim2=2)[..., None]
    dq, dk = diagonal * k, diagonal * q
    # The sums of gates over the whole chunk: what q reads of S, what D reads of k, and the decay of S itself.
    dS, dD = (do @ S.mT).mul_(prefix), (v @ D.mT).mul_(suffix)
    dq += dS
    dk += dD
    d_prefix, d_suffix = dS.mul_(q), dD.mul_(k)
    d_prefix[:, -1].addcmul_(prefix[:, -1], torch.einsum("mkv,mkv->mk", S, D))
    dv = torch.baddbmm(A.mT @ do, k * suffix, D)
    for m, E, Y in reversed(levels):
        dY = _meet(_met(dA, m), Y, m)
        _left(dk, m).addcmul_(_left(dY, m), _left(E, m))
        _right(dq, m).addcmul_(_right(dY, m), _right(E, m))
        _to_halves(d_prefix, d_suffix, m)
        _left(d_suffix, m).addcmul_(_left(dY, m), _left(Y, m))
        _right(d_prefix, m).addcmul_(_right(dY, m), _right(Y, m))
    return dq, dk, dv, d_prefix


def _meet(met, Y, m):
    """dY: of the right blocks met @ left, of the left ones met^T @ right."""
    M, C, K = Y.shape
    if m == 1:
        left, right = _halves(Y, 1)
        return _join(met * right, met * left)
    both = met.new_zeros(M, C // (2 * m), 2, m, 2, m)
    both[:, :, 1, :, 0].copy_(met)
    both[:, :, 0, :, 1].copy_(met.mT)
    return (both.view(-1, 2 * m, 2 * m) @ Y.view(-1, 2 * m, K)).view(M, C, K)


def _to_halves(d_prefix, d_suffix, m):
    """Gradients of sums of gates over blocks of 2 m tokens -> of those over blocks of m, in place."""
    left, right = _halves(d_prefix, m)
    left[:, :, -1] += right.sum(2)  # a right prefix held the left total
    right[:, :, -1] += _left(d_suffix, m).sum(2)  # a left suffix held the right total


def _left(x, m):
    """[M, C, d] -> its left blocks of m tokens, [M, C / 2m, m, d], a view."""
    return x.unflatten(1, (-1, 2, m))[:, :, 0]


def _right(x, m):
    return x.unflatten(1, (-1, 2, m))[:, :, 1]


def _halves(x, m):
    return x.unflatten(1, (-1, 2, m)).unbind(2)


def _join(left, right):
    """The inverse of `_halves`."""
    return torch.stack((left, right), 2).flatten(1, 3)


def _met(A, m):
    """A [M, C, C] -> where right blocks of m tokens meet the left ones beside them, [M, C / 2m, m, m], a view."""
    blocks = A.unflatten(2, (-1, 2, m)).unflatten(1, (-1, 2, m))  # [M, n, 2, m, n, 2, m]
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


class _Plan:
    """How the tokens fall into chunks and slabs, and which state enters a chunk. Made of shapes, and of cu_seqlens on
    its device."""

    def __init__(self, q, v, h0, cu_seqlens, chunk, slab):
        (self.B, self.T, self.N, K), self.dtype = q.shape, h0.dtype
        self.packed = cu_seqlens is not None
        usual = self.T
        if self.packed:  # chunks no longer than usual, since a sequence may leave most of its last one empty
            sequences = len(cu_seqlens) - 1
            usual = min(max(-(-self.T // max(sequences, 1)), SHORT), self.T)
        self.C = C = min(chunk, 1 << max(usual - 1, 0).bit_length())
        self.slab = slab or max(SLAB // max(self.B * self.N * C * (K + v.shape[3]), 1), 1)
        self.count = -(-self.T // C)  # of chunks, of a row
        if self.packed:
            self.count = (self.T + sequences * (C - 1)) // C
            begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            last = ((end - begin + C - 1) // C).cumsum(0)  # chunks of the sequences up to each
            first = pad(last, (1, 0))[:-1]
            token, chunk = (torch.arange(n, device=q.device) for n in (self.T, self.count))
            s = torch.searchsorted(end, token, right=True)
            self.place = first[s] * C + token - begin[s]
            self.sequence = torch.searchsorted(last, chunk, right=True)  # of a chunk that none needs: `sequences`
            self.here = self.sequence.clamp(max=sequences - 1)
            real = self.sequence < sequences
            self.first, self.last = real & (chunk == first[self.here]), real & (chunk == last[self.here] - 1)

    def slabs(self):
        """The range of chunks of each slab."""
        return (range(c, min(c + self.slab, self.count)) for c in range(0, self.count, self.slab))

    def pack(self, x):
        """[B, T, N, d] -> the same with the sequences moved apart."""
        if not self.packed:
            return x
        return x.new_zeros(1, self.count * self.C, *x.shape[2:]).index_copy_(1, self.place, x)

    def unpack(self, x):
        return x[:, self.place] if self.packed else x

    def split(self, x, part):
        """The slab [M, C, d] of x, M = chunks * B * N, a copy; zero-padded: zeros leave the state as it is."""
        x = x[:, part.start * self.C : part.stop * self.C]
        if short := len(part) * self.C - x.shape[1]:
            x = pad(x, (0, 0, 0, 0, 0, short))
        x = x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 2, 4)
        return x.to(self.dtype, copy=True, memory_format=torch.contiguous_format).flatten(0, 2)

    def by_chunk(self, x):
        """[M, ...] -> [chunks, B, N, ...]"""
        return x.unflatten(0, (-1, self.B, self.N))

    def join(self, whole, part, x):
        """Writes the slab x [M, C, d] to where `split` found it."""
        there = whole[:, part.start * self.C : part.stop * self.C]
        x = self.by_chunk(x).permute(1, 0, 3, 2, 4)
        if there.shape[1] == len(part) * self.C:
            there.unflatten(1, (-1, self.C)).copy_(x)
        else:
            there.copy_(x.flatten(1, 2)[:, : there.shape[1]])

    def begin(self, h):
        """(the state to begin with, where sequences leave theirs: a row each, and one for chunks without a sequence)"""
        if not self.packed:
            return h, None
        return torch.zeros_like(h[:1]), torch.cat((h, h.new_zeros(1, *h.shape[1:])))

    def end(self, S, states):
        return states[:-1].clone() if self.packed else S.clone()

    def enter(self, c, S, h0, out):
        out.copy_(torch.where(self.first[c], self._of(h0, c), S) if self.packed else S)

    def enter_last(self, c, D, dhT, out):
        out.copy_(torch.where(self.last[c], self._of(dhT, c), D) if self.packed else D)

    def _of(self, states, c):
        """The state of the sequence of chunk c; an index of one number would be read by the host."""
        return states.index_select(0, self.here[c : c + 1])

    def leave(self, part, states, hT):
        if self.packed:
            self._leave(self.last, part, states, hT)

    def leave_first(self, part, grads, dh0):
        if self.packed:
            self._leave(self.first, part, grads, dh0)

    def _leave(self, which, part, states, out):
        c = slice(part.start, part.stop)
        out.index_copy_(0, torch.where(which[c], self.sequence[c], len(out) - 1), states[:, 0])


def decode_step_(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    """One token for each of B sequences whose states live in a pool, which is changed in place.

    q, k, g: [B, N, K], v: [B, N, V], state: [slots, N, K, V].  slot_ids: [B] integers below slots, distinct; a row of
    a negative one is all zeros, touches nothing and returns 0; None: row b is slot b.  has_initial_state: [B] bool,
    False reads the slot as zeros; None: all True.  Returns out [B, N, V] in v.dtype.
    """
    q, k, decay, values = q.to(state.dtype) * scale, k.to(state.dtype), g.exp(), v.to(state.dtype)
    if slot_ids is not None and state.device.type != "cpu":
        return _decode_without_waiting(q, k, values, decay, state, slot_ids, has_initial_state).to(v.dtype)
    rows = None if slot_ids is None else (slot_ids >= 0).nonzero()[:, 0]
    out = torch.zeros_like(values)
    count = len(q) if rows is None else len(rows)
    few = max(CACHE // state[0].numel(), 1)
    for i in range(0, count, few):
        block = slice(i, i + few) if rows is None else rows[i : i + few]
        S = state[block] if rows is None else state.index_select(0, slot_ids[block])
        if has_initial_state is not None:
            S.masked_fill_(~has_initial_state[block][:, None, None, None], 0)
        out[block] = _token_(q[block], k[block], values[block], decay[block], S)
        if rows is not None:
            state.index_copy_(0, slot_ids[block], S)
    return out.to(v.dtype)


def _decode_without_waiting(q, k, v, decay, state, slot_ids, has_initial_state):
    """On an accelerator the host does not know which rows have a slot, and a row without one may not write to any: two
    writes to one place have no order. So it does all over again what the first row with a slot does; two equal writes
    need none. If there is no such row either, the first row writes slot 0 as it is: its token is all zeros."""
    used = slot_ids >= 0
    row = torch.where(used, torch.arange(len(q), device=q.device), used.int().argmax())
    slots = slot_ids[row].clamp(min=0)
    S = state.index_select(0, slots)
    if has_initial_state is not None:
        S.masked_fill_(~(has_initial_state[row] | ~used[row])[:, None, None, None], 0)
    out = _token_(q[row], k[row], v[row], decay[row], S)
    state.index_copy_(0, slots, S)
    return torch.where(used[:, None, None], out, 0)


def _token_(q, k, v, decay, S):
    """out [B, N, V]; S [B, N, K, V] is changed in place. A matmul a head: what a row gives does not depend on B."""
    S.mul_(decay[..., None]).addcmul_(k[..., None], v[..., None, :])
    return (q[..., None, :] @ S)[..., 0, :]


def decode_step_backward(q, k, v, g, state, slot_ids, has_initial_state, dout, dnew, *, scale):
    """Gradients of a `decode_step_` that gave (out, new pool), of the pool before it and the tokens: dout [B, N, V] in
    v.dtype, dnew as state -> (dq, dk, dv, dg, dstate)."""
    S, D = state, dnew
    if slot_ids is not None:
        used = (slot_ids >= 0)[:, None, None]
        q, k, v, g, dout = (torch.where(used, x, 0) for x in (q, k, v, g, dout))
        S, D = (torch.where(used[..., None], x[slot_ids.clamp(min=0)], 0) for x in (S, D))
    if has_initial_state is not None:
        S = torch.where(has_initial_state[:, None, None, None], S, 0)
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
    if slot_ids is not None:  # one more slot, for the rows that have none
        slots = torch.where(slot_ids < 0, len(state), slot_ids)
        dS = torch.cat((dnew, dnew[:1])).index_copy_(0, slots, dS)[:-1]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg, dS
