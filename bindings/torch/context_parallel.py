"""Gated linear attention over a sequence that is split over ranks, rank after rank: each passes on one state.

What a rank's tokens do to a state is S -> diag(m) S + N, whatever S is: N is the state they leave behind zeros, and m
the product of their decays. So each rank

    1. finds (m, N) of its tokens              one matmul, (k * suffix decay)^T v: no token waits for another
    2. gathers those of all ranks              one all-gather
    3. scans the ones before it: S_in          ranks x K V multiplications, float32
    4. runs `gla` from S_in                    all of it in parallel on all ranks

and backwards the same: an all-to-all brings each rank the gradients of its (m, N).

Cost a head beside `gla` on the rank's T tokens: 2 T K V flops (and twice that backward), which is about a third of
gla's own at K = 96, V = 192 and chunks of 64; (K V + K) float32 sent and `ranks` times that received and kept for the
backward pass, independent of T. At 16 heads of 96/192 a rank sends 1.2 MB a sequence and layer.

Every exponent is a sum of gates, as in the kernels; what a reset or a gate of -inf separates stays exactly separate.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ringtide.torch import checks
from ringtide.torch.gla import RESET, _gates, _segments, _state, _tokens, gla


def context_parallel_gla(
    q,
    k,
    v,
    g,
    *,
    group,
    scale=None,
    initial_state=None,
    output_final_state=False,
    segment_ids=None,
    implementation=None,
):
    """`ringtide.torch.gla` over the tokens of all ranks of a group, in the order of their ranks in it.

    All ranks make the same call. Values and gradients are those of one device that holds the whole sequence; the
    gradients are those of the sum of what all ranks derive from what they get.

    Args:
      q, k, v, g: as in `gla`, the rank's own tokens, [B, T, N, ...]; T may differ from rank to rank.
      group: a torch.distributed ProcessGroup.
      initial_state: the state before the first token of all, [B, N, K, V]: the first rank's counts, others' are not
        looked at. Its gradient is the first rank's.
      output_final_state: also return the state after the last token of all, on every rank.
      segment_ids: as in `gla`, of the rank's own tokens; a segment may go on over ranks.
      scale, implementation: as in `gla`.

    Returns:
      (out [B, T, N, V], final state [B, N, K, V] or None).

    Raises: as `gla`, before anything is sent; TypeError where group is none. Ranks that pass other B, N, K or V than
    the first fail or hang in the collective: what differs between ranks cannot be seen by one.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
    q, k, v, g, single, sizes = _tokens(q, k, v, g, "B T N")
    first = dist.get_rank(group) == 0
    h0 = _state(initial_state, "B", q, single, sizes) if first and initial_state is not None else None
    ids = None if segment_ids is None else checks.integers("segment_ids", segment_ids, "B T", sizes)
    m, N, ends = _summary(k, v, g, ids, single)
    if h0 is not None:  # what leaves the first rank
        N = N + m[..., None] * h0
    S, final = _Carry.apply(group, output_final_state, m, N, ends)
    if h0 is not None:
        S = S + h0
    out, _ = gla(q, k, v, g, scale=scale, initial_state=S, segment_ids=segment_ids, implementation=implementation)
    return out, final if output_final_state else None


def halo(x, count, group):
    """The `count` tokens before the rank's own, those that end the rank before; zeros on the first rank.

    x: [B, T, ...] with T >= count on every rank, any dtype; group: as in `context_parallel_gla`.
    Returns [B, count, ...], differentiable. A convolution needs them.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if x.shape[1] < count:
        raise ValueError(f"x: expected at least {count} tokens on each rank, got {x.shape[1]}: use fewer ranks")
    return _Shift.apply(x[:, x.shape[1] - count :], 1, group)


def _summary(k, v, g, ids, dtype):
    """(m [B, N, K], N [B, N, K, V], `_ends`) of a rank's tokens."""
    k, v, g, ends = k.to(dtype), v.to(dtype), _gates(g.to(dtype)), None
    if ids is not None:
        valid, reset = (x[..., None, None] for x in _segments(ids))
        k, v, g = (torch.where(valid, x, 0) for x in (k, v, g))
        g = torch.where(reset, RESET, g)
        ends = _ends(ids)
    after = g.flip(1).cumsum(1)  # of the last token; of the last two; ...; of all
    suffix = pad(after, (0, 0, 0, 0, 1, 0))[:, :-1].flip(1) if g.shape[1] else g
    N = torch.einsum("btnk,btnv->bnkv", k * suffix.exp(), v)
    return g.sum(1).exp(), N, ends


def _ends(ids):
    """[2, B]: the ids of the first token and of the last, padding aside; -1 where all is padding."""
    B, T = ids.shape
    if T == 0:
        return ids.new_full((2, B), -1)
    valid = (ids >= 0).int()
    first, last = valid.argmax(1), T - 1 - valid.flip(1).argmax(1)
    return torch.stack([torch.where(valid.any(1), ids.gather(1, at[:, None])[:, 0], -1) for at in (first, last)])


class _Carry(torch.autograd.Function):
    """(m, N) of each rank -> (the state that enters this one, the one that leaves the last, or None).

    The scan is S_j+1 = c_j S_j + N_j from S_0 = 0, with c_j = m_j, or 0 where rank j begins with another segment.
    """

    @staticmethod
    def forward(ctx, group, whole, m, N, ends):
        ctx.group, ctx.whole = group, whole
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        ms, Ns, same = _gather(m, N, ends, group)
        states = _scan(ms, Ns, same, ranks if whole else rank)
        ctx.save_for_backward(ms, Ns, same)
        return states[rank] * same[rank, :, None, None, None], states[ranks].clone() if whole else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dS, dfinal):
        ms, Ns, same = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        dms, dNs = torch.zeros_like(ms), torch.zeros_like(Ns)
        last = ranks if ctx.whole else rank
        states = _scan(ms, Ns, same, last)
        dS = dS * same[rank, :, None, None, None]
        D = dfinal if ctx.whole else dS
        for j in reversed(range(last)):
            if j + 1 == rank and ctx.whole:
                D = D + dS
            dNs[j] = D
            dms[j] = same[j, :, None, None] * (states[j] * D).sum(-1)
            D = (same[j, :, None, None] * ms[j])[..., None] * D
        flat = torch.cat([dms.flatten(1), dNs.flatten(1)], 1)
        of_all = torch.empty_like(flat)
        dist.all_to_all_single(of_all, flat, group=ctx.group)
        dm, dN = of_all.sum(0).split([dms[0].numel(), dNs[0].numel()])
        return None, None, dm.view_as(dms[0]), dN.view_as(dNs[0]), None


def _scan(ms, Ns, same, count):
    """The states that enter ranks 0 to `count`, before what begins with another segment has dropped them."""
    states = [torch.zeros_like(Ns[0])]
    for m, N, go_on in zip(ms[:count], Ns, same, strict=False):
        states.append((go_on[:, None, None] * m)[..., None] * states[-1] + N)
    return states


def _gather(m, N, ends, group):
    """(m [ranks, B, N, K], N [ranks, B, N, K, V], same [ranks, B]) of all: 1 where a rank goes on with the segment that
    it is handed, 0 where it begins another. One all-gather of bytes, in 4-byte words."""
    ranks = dist.get_world_size(group)
    ends = m.new_empty(0, dtype=torch.long) if ends is None else ends
    words = torch.cat([x.detach().contiguous().view(-1).view(torch.int32) for x in (m, N, ends)])
    of_all = words.new_empty(ranks, len(words))
    dist.all_gather(list(of_all), words, group=group)
    sizes = [x.nbytes // 4 for x in (m, N, ends)]
    ms, Ns, ends = (
        part.contiguous().view(x.dtype).view(ranks, *x.shape)
        for part, x in zip(of_all.split(sizes, 1), (m, N, ends), strict=True)
    )
    same = m.new_ones(ranks, m.shape[0])
    if ends.numel():
        handed = torch.full_like(ends[0, 0], -1)
        for j, (first, last) in enumerate(ends):
            same[j] = ~((first >= 0) & (handed >= 0) & (first != handed))
            handed = torch.where(last >= 0, last, handed)
    return ms, Ns, same


class _Shift(torch.autograd.Function):
    """What the rank `by` places before has, [like x]; zeros where there is none. Backwards, to where it came from."""

    @staticmethod
    def forward(ctx, x, by, group):
        ctx.by, ctx.group = by, group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        x = x.contiguous()
        size = lambda other: [x.numel() if i == other else 0 for i in range(ranks)]
        out = torch.zeros_like(x)
        there = 0 <= rank - by < ranks
        received = out.view(-1) if there else out.new_empty(0)
        given = x.view(-1) if 0 <= rank + by < ranks else x.new_empty(0)
        dist.all_to_all_single(received, given, size(rank - by), size(rank + by), group=group)
        return out

    @staticmethod
    def backward(ctx, d):
        return _Shift.apply(d, -ctx.by, ctx.group), None, None
