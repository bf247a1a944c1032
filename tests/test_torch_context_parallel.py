"""Context parallel GLA for PyTorch: values and gradients of one device, whatever lies where the ranks meet."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from ringtide.torch import gla  # noqa: E402
from ringtide.torch.context_parallel import context_parallel_gla, halo  # noqa: E402

B, N, K, V = 2, 2, 5, 3
PARTS = (7, 4, 9, 1)  # tokens of each rank; of fewer ranks, the last has the rest
P = -1
IDS = {
    "none": None,
    "one": [[3] * 21, [0] * 21],
    # A change where two ranks meet; a segment over three; a rank that is all padding; ids that come again.
    "many": [
        [0] * 7 + [1] * 4 + [1] * 5 + [0] * 5,
        [5] * 3 + [5, P, P, 6] + [P] * 4 + [6] * 2 + [P] * 3 + [2] * 4 + [7],
    ],
    "padded": [[P] * 11 + [4] * 10, [1] * 6 + [P] + [P] * 4 + [P] * 9 + [2]],
}


def inputs(dtype, ids, seed):
    """q, k, v, g, h0, and cotangents of the output and, of each rank, of the final state; NaN in padding."""
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    T = sum(PARTS)
    q, k, v, g = normal(B, T, N, K), normal(B, T, N, K), normal(B, T, N, V), -normal(B, T, N, K).abs()
    g[0, 3:5, 0] = -torch.inf
    g[1, 12, :, 1] = -1e30
    h0, do, dh = normal(B, N, K, V), normal(B, T, N, V), normal(4, B, N, K, V)
    if ids is not None:
        for x in (q, k, v, g, do):
            x[torch.tensor(ids) < 0] = torch.nan
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, h0)], do.to(dtype), dh.to(dtype)


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def compare(rank, count):
    """Over 1 to 4 of the ranks, all kinds of segments, with states and without."""
    for ranks in range(1, count + 1):
        group = dist.new_group(range(ranks))
        if rank >= ranks:
            continue
        parts = [*PARTS[: ranks - 1], sum(PARTS[ranks - 1 :])]
        start = sum(parts[:rank])
        mine = slice(start, start + parts[rank])
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-6))[: 2 if ranks == count else 1]:
            for (kind, ids), states in itertools.product(IDS.items(), (False, True)):
                whole, do, dh = inputs(torch.float64, ids, seed=len(kind))
                segments = None if ids is None else torch.tensor(ids)
                want, state = gla(
                    *whole[:4],
                    initial_state=whole[4] if states else None,
                    output_final_state=states,
                    segment_ids=segments,
                )
                loss = (want * do).nan_to_num().sum() + ((state * dh[:ranks].sum(0)).sum() if states else 0)
                want_grads = gradients(loss, whole)

                (*qkvg, h0), do, dh = inputs(dtype, ids, seed=len(kind))
                local = [x[:, mine] for x in qkvg]
                out, last = context_parallel_gla(
                    *local,
                    group=group,
                    initial_state=h0 if states else None,
                    output_final_state=states,
                    segment_ids=None if ids is None else segments[:, mine],
                )
                loss = (out * do[:, mine]).nan_to_num().sum() + ((last * dh[rank]).sum() if states else 0)
                grads = gradients(loss, [*qkvg, h0])

                where = f"rank {rank} of {ranks}, {dtype}, segments {kind}, states {states}: "
                check(where + "out", out, want[:, mine], bound)
                if states:
                    check(where + "final state", last, state, bound)
                for name, got, expected in zip("qkvg", grads, want_grads, strict=False):
                    check(f"{where}d{name}", got[:, mine], expected[:, mine], 4 * bound)
                check(where + "dh0", grads[4], want_grads[4] if rank == 0 else 0 * want_grads[4], 4 * bound)
        halos(group, rank, ranks)


def check(what, got, want, bound):
    assert got.shape == want.shape, what
    error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1)
    assert error <= bound, f"{what}: {error}"


def halos(group, rank, ranks):
    """The tokens before; their gradients go back to where they came from; whole numbers too."""
    whole = torch.arange(2 * 4 * ranks * 3, dtype=torch.float32).view(2, 4 * ranks, 3).requires_grad_()
    got = halo(whole[:, 4 * rank : 4 * rank + 4], 3, group)
    assert torch.equal(got, whole[:, 4 * rank - 3 : 4 * rank] if rank else torch.zeros(2, 3, 3))
    (grad,) = torch.autograd.grad((got * (rank + 1)).sum(), whole)
    want = torch.zeros_like(whole)
    if rank < ranks - 1:
        want[:, 4 * rank + 1 : 4 * rank + 4] = rank + 2
    assert torch.equal(grad, want)
    ids = torch.full((2, 4), rank + 7)
    assert torch.equal(halo(ids, 1, group), torch.full((2, 1), rank + 6 if rank else 0))
    with pytest.raises(ValueError, match="expected at least 5 tokens on each rank, got 4: use fewer ranks"):
        halo(ids, 5, group)


def test_one_to_four_ranks_give_what_one_device_gives(ranks):
    ranks("compare", 4)


def test_what_is_no_group_is_said():
    x = torch.zeros(1, 4, 1, 2)
    with pytest.raises(TypeError, match=r"group: expected a torch.distributed.ProcessGroup, got str"):
        context_parallel_gla(x, x, x, x, group="gloo")
    with pytest.raises(TypeError, match=r"group: expected a torch.distributed.ProcessGroup, got NoneType"):
        halo(x, 1, None)
