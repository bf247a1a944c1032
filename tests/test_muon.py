"""Muon whose parameters have owners: the numbers of the unsharded optimizers, on any grid of ranks."""

import functools
import math

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import distribute_tensor  # noqa: E402

from ringtide.models import muon  # noqa: E402

STEPS, LR = 4, 0.03
SPLIT = {"qkv.weight": (8, 6, 5)}


def network(dtype=torch.float32):
    """Matrices wide and tall, of fewer rows than ranks, fused; a vector; three dimensions; what AdamW takes by name."""
    shapes = {"embeddings": (7, 5), "qkv": (19, 6), "down": (5, 13), "tall": (33, 4), "few": (3, 8), "conv": (6, 1, 4)}
    random = torch.Generator().manual_seed(0)
    net = nn.Module()
    for name, shape in {**shapes, "norm": (9,), "lm_head": (7, 5)}.items():
        part = nn.Module()
        part.weight = nn.Parameter(torch.randn(shape, generator=random))
        net.add_module(name, part)
    initial = {name: p.detach().clone() for name, p in net.named_parameters()}
    return net.to(dtype), initial


def gradients(net, step, rank=None, count=4):
    """Of one of `count` ranks, or the sum of all: whole numbers, so that sums have no rounding."""
    grads = {}
    for name, p in net.named_parameters():
        random = torch.Generator().manual_seed(1000 * step + len(name))
        each = [torch.randint(-8, 9, p.shape, generator=random).float() for _ in range(count)]
        grads[name] = sum(each) if rank is None else each[rank]
    return grads


@functools.cache
def unsharded(dtype=torch.float32):
    """The same with torch's own optimizers, on whole float32 parameters; the norms, and the weights as the model's."""
    net, _ = network()
    of = {"muon": [], "decayed": [], "plain": []}
    leaves = {}
    for name, p in net.named_parameters():
        kind = "muon" if name.split(".")[0] in ("qkv", "down", "tall", "few") else "decayed" if p.ndim == 2 else "plain"
        leaves[name] = [nn.Parameter(x) for x in p.detach().split(SPLIT.get(name, (len(p),)))]
        of[kind] += leaves[name]
    adamw = [{"params": of["decayed"], "weight_decay": 0.1}, {"params": of["plain"], "weight_decay": 0.0}]
    both = [
        torch.optim.Muon(of["muon"], lr=LR, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=LR, betas=(0.9, 0.95)),
    ]
    norms = []
    for step in range(STEPS):
        grads = gradients(net, step)
        norms.append(torch.stack([g.norm() for g in grads.values()]).norm())
        for name, pieces in leaves.items():
            for piece, g in zip(pieces, grads[name].split([len(p) for p in pieces]), strict=True):
                piece.grad = g * (1 / norms[-1]).clamp(max=1)
        for optimizer in both:
            optimizer.step()
    return {name: torch.cat([p.detach() for p in pieces]).to(dtype) for name, pieces in leaves.items()}, norms


def test_one_rank_is_the_unsharded_optimizer():
    net, initial = network()
    optimizer = muon.Muon(net.named_parameters(), initial.items(), split=SPLIT)
    assert optimizer.owned == list(initial)
    want, norms = unsharded()
    for step in range(STEPS):
        for name, g in gradients(net, step).items():
            net.get_parameter(name).grad = g
        assert optimizer.step(LR) == norms[step]
    for name, p in net.named_parameters():
        assert p.grad is None
        assert torch.equal(p, want[name]), name


def build(dtype, replicas, shards):
    """(model, optimizer), the model's parameters sharded by FSDP2 over a group of ranks, unless that is None."""
    net, initial = network(dtype)
    if shards:
        fully_shard(net, mesh=DeviceMesh.from_group(shards, "cpu"))
    return net, muon.Muon(net.named_parameters(), initial.items(), replicas=replicas, shards=shards, split=SPLIT)


def train_on_a_grid(rank, count, grids):
    """Rows of ranks are replicas, columns shards; after two steps another model goes on from what all have saved."""
    for rows, columns in grids:
        sets = [[r * columns + c for c in range(columns)] for r in range(rows)]
        across = [list(x) for x in zip(*sets, strict=True)]
        shards, replicas, all_of_them = (
            dist.new_subgroups_by_enumeration(x)[0] for x in (sets, across, [[*range(rows * columns)]])
        )
        if rank >= rows * columns:
            continue
        shards, replicas = (group if n > 1 else None for group, n in ((shards, columns), (replicas, rows)))
        row = rank // columns
        for dtype in (torch.float32, torch.bfloat16)[rows * columns < 3 :]:  # two ranks: in bfloat16 alone
            want, norms = unsharded(dtype)
            net, optimizer = build(dtype, replicas, shards)
            for step in range(STEPS):
                if step == 2:
                    parts = [None] * (rows * columns)
                    dist.all_gather_object(parts, optimizer.state(), group=all_of_them)
                    saved = {key: x for part in parts for key, x in part.items()}
                    assert len(saved) == sum(map(len, parts)), "a key has two owners"
                    net, optimizer = build(dtype, replicas, shards)
                    optimizer.load(saved.__getitem__)
                for name, p in net.named_parameters():
                    # FSDP2 has summed over a row: what its ranks hold are parts of that sum.
                    p.grad = sum(gradients(net, step, r)[name] for r in range(4) if r % rows == row).to(dtype)
                    if shards:
                        p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
                assert optimizer.step(LR) == norms[step]
            for name, p in net.named_parameters():
                whole = p.full_tensor() if shards else p
                assert torch.equal(whole, want[name]), f"{rows} x {columns}, {dtype}: {name}"


def test_each_grid_of_ranks_gives_bitwise_the_unsharded_result(ranks):
    """1, 2, 3 and 4 ranks, replicated, FSDP2's, and both; resumed from what all ranks together have saved."""
    ranks("train_on_a_grid", 4, [(1, 1), (2, 1), (1, 2), (1, 3), (4, 1), (1, 4), (2, 2)])


def test_precise_is_muon_whose_last_bits_stay_the_last_bits():
    """The same steps but for rounding; what is only a rounding of the gradients is then no more in the weights."""
    weights = {}
    for precise in (False, True):
        for noise in (0, 1e-6):
            random = torch.Generator().manual_seed(0)
            p = nn.Parameter(torch.zeros(48, 64))
            optimizer = muon.Muon([("down", p)], [("down", p)], precise=precise)
            for _ in range(STEPS):
                g = torch.randn(p.shape, generator=random)
                p.grad = g * (1 + noise * torch.randn(p.shape, generator=random))
                optimizer.step(LR)
            weights[precise, noise] = p.detach()
    largest = lambda x: float(x.abs().max() / weights[True, 0].abs().max())
    assert largest(weights[True, 0] - weights[False, 0]) < 0.03
    coarse, fine = (largest(weights[precise, 0] - weights[precise, 1e-6]) for precise in (False, True))
    assert fine < 2e-5
    assert coarse > 50 * fine


def test_owners_share_the_work_evenly():
    """Of the 3B model: on 16, 48 and 64 ranks no owner has over a sixth more than its share of Newton-Schulz."""
    shapes = {"lm_head": (50304, 3072), "embeddings": (50304, 3072)}
    for i in range(24):
        shapes |= {f"{i}.{n}": (1536, 3072) for n in "qk"} | {f"{i}.{n}": (3072, 3072) for n in "vgo"}
        shapes |= {f"{i}.{n}": (8192, 3072) for n in ("gate", "up")} | {f"{i}.down": (3072, 8192)}
    costs = {name: muon.cost(shape, muon.is_matrix(name, shape)) for name, shape in shapes.items()}
    for ranks in (2, 16, 48, 64):
        load = [0] * ranks
        for name, owner in muon.balance(costs, ranks).items():
            load[owner] += costs[name]
        assert max(load) < 7 / 6 * sum(load) / ranks, ranks


def test_what_cannot_be_is_said():
    net, initial = network()
    with pytest.raises(ValueError, match=r"split of qkv.weight: \(8, 8\) do not add up to its 19 rows"):
        muon.Muon(net.named_parameters(), initial.items(), split={"qkv.weight": (8, 8)})
    optimizer = muon.Muon(net.named_parameters(), initial.items())
    with pytest.raises(ValueError, match=r"embeddings.weight has no gradient: it has no part in the loss"):
        optimizer.step(LR)


def test_gradients_within_the_bound_are_not_scaled():
    net, initial = network()
    optimizer = muon.Muon(net.named_parameters(), initial.items(), clip=math.inf)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    assert optimizer.step(0.0) == pytest.approx(math.sqrt(sum(p.numel() for p in net.parameters())))
    assert all(torch.equal(p, initial[name]) for name, p in net.named_parameters())
