"""Muon for the matrices of a model, AdamW for the rest, each parameter updated by one rank and sent back to all.

    gradients   summed over the replicas (data x context), to the row of the owner; over its shards FSDP2 has summed
                the shards of a row, all-to-all, to the owner
    owner       clips by the norm of all gradients; torch.optim.Muon or AdamW on its master; all of it float32
    weights     in the model's dtype: from the owner, all-to-all, to the shards of its row; from there to the replicas

Ranks are a grid of replicas (rows) x shards (columns). A parameter has one owner, which alone holds its master and the
optimizer's state: memory is that of ZeRO, and Newton-Schulz, which needs a whole matrix, runs once for each matrix, not
once a rank. What travels is what an all-reduce of the gradients would send. A parameter's new value depends on nothing
but its gradient and that norm, so the result is that of the same optimizers unsharded, bitwise where the summed
gradients are.

Muon: K. Jordan, kellerjordan.github.io/posts/muon; owners and the learning rate that is AdamW's too: arXiv 2502.16982.
"""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

BETAS, MOMENTUM = (0.9, 0.95), 0.95
_ROUNDS = 5  # of Newton-Schulz, torch.optim.Muon's default


def is_matrix(name: str, shape) -> bool:
    """Whether Muon takes it: the projections of a layer. AdamW: embeddings, head, norms, convolution, low-rank gate."""
    return len(shape) == 2 and not any(part in name for part in ("embed", "lm_head", "gk_proj"))


class Muon:
    """The optimizer of a model whose parameters are replicated, or FSDP2's DTensors (all of them, on dimension 0).

    named: (name, parameter) of all parameters, the same on all ranks. initial: (name, tensor) of all of them, whole:
    the owners make them their masters, then all ranks their weights; None: `load` will do that. replicas: ProcessGroup
    of the ranks that hold the same (shards of) parameters and other gradients, None: this rank alone. shards: that of
    FSDP2, None: not sharded. split: {name: rows of each of the matrices that are fused in it}, which Muon takes one by
    one. clip: the norm of all gradients is at most this. decay: weight decay of what has two dimensions. precise:
    Newton-Schulz in float32, not in bfloat16: slower on an accelerator, but what the number of ranks changes in the
    last bits of a gradient then stays in the last bits of the weights.
    """

    def __init__(
        self,
        named,
        initial=None,
        *,
        replicas=None,
        shards=None,
        split=None,
        muon=is_matrix,
        clip=1.0,
        decay=0.1,
        precise=False,
    ):
        self._params, self._replicas, self._shards, self._clip = dict(named), replicas, shards, clip
        self._precise = precise
        self._row, self._rows = _place(replicas)
        self._column, self._columns = _place(shards)
        for name, p in self._params.items():
            if isinstance(p, DTensor) != (shards is not None):
                raise ValueError(f"{name}: is {'no' if shards else 'a'} DTensor, but shards is {shards}")
        self._device = next((_local(p).device for p in self._params.values()), None)
        self._dtype = functools.reduce(torch.promote_types, (p.dtype for p in self._params.values()))
        self._matrices = {name for name, p in self._params.items() if muon(name, p.shape)}
        costs = {name: cost(p.shape, name in self._matrices) for name, p in self._params.items()}
        owners = balance(costs, self._rows * self._columns)
        self.owners = {name: divmod(owner, self._columns) for name, owner in owners.items()}  # (row, column)
        # As the numbers travel: by row, in it by column of the owner.
        self._order = [
            [[name for name in self._params if self.owners[name] == (row, column)] for column in range(self._columns)]
            for row in range(self._rows)
        ]
        self.owned = self._order[self._row][self._column]
        empty = lambda name: torch.empty(self._params[name].shape, dtype=torch.float32, device=self._device)
        self._masters = {name: empty(name) for name in self.owned}
        pieces = {name: master.split(_fused(split, name, len(master))) for name, master in self._masters.items()}
        self._pieces = {name: [nn.Parameter(piece) for piece in split] for name, split in pieces.items()}
        self._optimizers = self._new_optimizers(decay)
        if initial is not None:
            for name, tensor in initial:
                if name in self._masters:
                    self._masters[name].copy_(tensor)
            self.publish()

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """One update by the gradients in `.grad` of all parameters, then gone. The norm before clipping, float32 []."""
        grads = self._to_owners()
        scale, norm = self._clipping(grads)
        for name, grad in grads.items():
            pieces = self._pieces[name]
            for piece, part in zip(pieces, grad.mul_(scale).split([len(p) for p in pieces]), strict=True):
                piece.grad = part
        with _Precise() if self._precise else contextlib.nullcontext():
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
                optimizer.zero_grad()
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Sets the model's weights, on all ranks, to the masters of their owners."""
        cut = lambda name, column: self._masters[name][slice(*self._range(name, column))].to(self._dtype)
        mine = [self._flat([cut(name, column) for name in self.owned], self._dtype) for column in range(self._columns)]
        for row, columns in enumerate(self._order):
            sizes = self._sizes(columns)
            flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
            if row == self._row:
                _exchange(flat, torch.cat(mine), sizes, [len(x) for x in mine], self._shards)
            if self._rows > 1 and len(flat):
                dist.broadcast(flat, group=self._replicas, group_src=row)
            targets = [_local(self._params[name]) for names in columns for name in names]
            for target, part in zip(targets, flat.split([x.numel() for x in targets]), strict=True):
                target.copy_(part.view_as(target))

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank owns: masters, momentum, moments, counts. All ranks together hold each key once."""
        tensors = {}
        for key, piece in self._keyed():
            of_piece = [optimizer.state[piece] for optimizer in self._optimizers if piece in optimizer.state]
            tensors |= {f"{key}.{what}": x for state in of_piece for what, x in state.items()}
            tensors[f"{key}.master"] = piece.detach()
        return tensors

    def state_bytes(self) -> int:
        """Of all ranks together."""
        kept = {True: 2, False: 3}  # master and momentum; master and two moments
        return sum(4 * p.numel() * kept[name in self._matrices] for name, p in self._params.items())

    @torch.no_grad()
    def load(self, read) -> None:
        """From `read(key) -> tensor`, which knows what all ranks have saved, however many they were.

        Raises ValueError where one has another shape.
        """
        of_piece = {
            id(piece): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for piece in group["params"]
        }
        for key, piece in self._keyed():
            optimizer = of_piece[id(piece)]
            muon = isinstance(optimizer, torch.optim.Muon)
            like_it = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
            tensors = {what: read(f"{key}.{what}") for what in ("master", *like_it)}
            for what, x in tensors.items():
                if x.shape != piece.shape:
                    raise ValueError(f"{key}.{what} has shape {list(x.shape)}, expected {list(piece.shape)}")
            piece.copy_(tensors.pop("master"))
            state = {what: x.to(self._device) for what, x in tensors.items()}
            optimizer.state[piece] = state if muon else {"step": read(f"{key}.step"), **state}
        self.publish()

    def _new_optimizers(self, decay):
        muon, decayed, plain = [], [], []
        for name, pieces in self._pieces.items():
            (muon if name in self._matrices else decayed if pieces[0].ndim == 2 else plain).extend(pieces)
        optimizers = []
        if muon:
            with_rate = {"adjust_lr_fn": "match_rms_adamw", "ns_steps": _ROUNDS}
            optimizers.append(torch.optim.Muon(muon, momentum=MOMENTUM, weight_decay=decay, **with_rate))
        groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        if groups := [group for group in groups if group["params"]]:
            optimizers.append(torch.optim.AdamW(groups, betas=BETAS))
        return optimizers

    def _keyed(self):
        for name, pieces in self._pieces.items():
            yield from ((f"{name}.{i}" if len(pieces) > 1 else name, piece) for i, piece in enumerate(pieces))

    def _to_owners(self):
        """{name: the whole gradient, summed over all ranks, float32} of what this rank owns. Empties `.grad`."""
        for row, columns in enumerate(self._order):
            flat = self._flat([self._take(name) for names in columns for name in names], torch.float32)
            if self._rows > 1 and len(flat):
                dist.reduce(flat, group=self._replicas, group_dst=row)
            if row == self._row:
                mine = flat
        counts = [[self._count(name, column) for name in self.owned] for column in range(self._columns)]
        out = mine.new_empty(sum(map(sum, counts)))
        _exchange(out, mine, [sum(x) for x in counts], self._sizes(self._order[self._row]), self._shards)
        parts = out.split([count for of_column in counts for count in of_column])
        whole = (torch.cat(parts[i :: len(self.owned)]) for i in range(len(self.owned)))  # of one name, by column
        return {name: grad.view(self._params[name].shape) for name, grad in zip(self.owned, whole, strict=True)}

    def _take(self, name):
        p = self._params[name]
        if p.grad is None:
            raise ValueError(f"{name} has no gradient: it has no part in the loss; leave it out of the optimizer")
        grad, p.grad = _local(p.grad), None
        return grad

    def _clipping(self, grads):
        """(factor for all gradients, their norm). The norm does not depend on who owns what."""
        index = {name: i for i, name in enumerate(self._params)}
        norms = torch.zeros(len(index), device=self._device)  # each from its owner; the others add 0
        for name, grad in grads.items():
            norms[index[name]] = torch.linalg.vector_norm(grad)
        for group in (self._replicas, self._shards):
            if group is not None:
                dist.all_reduce(norms, group=group)
        norm = torch.linalg.vector_norm(norms)
        return (self._clip / norm).clamp(max=1.0), norm

    def _flat(self, tensors, dtype):
        return torch.cat([torch.empty(0, dtype=dtype, device=self._device), *(x.to(dtype).flatten() for x in tensors)])

    def _sizes(self, columns):
        """How many numbers this rank holds of what each column of a row owns."""
        return [sum(_local(self._params[name]).numel() for name in names) for names in columns]

    def _range(self, name, column):
        """[start, stop): the rows of a parameter that are in a column. FSDP2 cuts as torch.chunk does."""
        count = self._params[name].shape[0]
        each = -(-count // self._columns)
        return min(count, column * each), min(count, (column + 1) * each)

    def _count(self, name, column):
        start, stop = self._range(name, column)
        return (stop - start) * math.prod(self._params[name].shape[1:])


class _Precise(TorchFunctionMode):
    """In it torch.optim.Muon orthogonalises in float32: it has no option for that, and casts by this one method."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return args[0] if function is torch.Tensor.bfloat16 else function(*args, **(kwargs or {}))


def balance(costs: dict[str, float], owners: int) -> dict[str, int]:
    """{name: owner}: the costliest first, each to the owner that has least to do."""
    load, chosen = [0.0] * owners, {}
    for name in sorted(costs, key=lambda name: -costs[name]):  # stable: the same on all ranks
        chosen[name] = min(range(owners), key=load.__getitem__)
        load[chosen[name]] += costs[name]
    return chosen


def cost(shape, muon):
    """In multiplications: Newton-Schulz of a matrix, and as much as it takes to move what belongs to an element."""
    a, b = sorted(shape)[-2:] if muon else (0, 0)
    return 200 * math.prod(shape) + _ROUNDS * (2 * a * a * b + a**3)


def _fused(split, name, rows):
    sizes = (split or {}).get(name, (rows,))
    if sum(sizes) != rows:
        raise ValueError(f"split of {name}: {tuple(sizes)} do not add up to its {rows} rows")
    return list(sizes)


def _place(group):
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x.detach()


def _exchange(out, given, out_sizes, given_sizes, group):
    """All-to-all in a row."""
    if group is None:
        out.copy_(given)
    else:
        dist.all_to_all_single(out, given, out_sizes, given_sizes, group=group)
