"""How a Laplace in training lies over the ranks of torch.distributed, and how these become one run.

    data      batch        the parameters are replicated
    fsdp      batch        the parameters are sharded, by FSDP2
    context   sequence     the parameters are replicated; a state is passed on, see ringtide.torch.context_parallel

Rank ((d * fsdp) + f) * context + c is at (d, f, c). Gradients are summed over all: over fsdp by FSDP2, over the rest by
muon.py. Ranks are processes that torchrun has started (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
environment), on CPUs over gloo, else over what the accelerator's PyTorch registers.
"""

import datetime
import os
import socket
from dataclasses import dataclass, fields
from importlib.util import find_spec

import torch
import torch.distributed as dist

from ringtide.models import BadInput, processes

AXES, REMAT = ("data", "fsdp", "context"), ("none", "full")
PATIENCE = 600  # seconds, for a collective: a rank that has died is noticed at once, by processes.py


@dataclass(frozen=True)
class Parallel:
    """The sizes of the mesh's axes, and what the backward pass keeps of a layer: everything, or its input."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    remat: str = "none"

    def __post_init__(self):
        for field in fields(self)[:3]:
            if type(size := getattr(self, field.name)) is not int or size < 1:
                raise BadInput(f"--mesh: {field.name} must be an int of at least 1, got {size!r}")
        if self.remat not in REMAT:
            raise BadInput(f"--remat: expected one of {', '.join(REMAT)}, got {self.remat!r}")

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.context

    @property
    def shards(self) -> int:
        """Ranks that a sequence lies over."""
        return self.context

    @property
    def batch(self) -> int:
        """The batch must be a multiple of it."""
        return self.data * self.fsdp


class Mesh:
    """Where this rank is, and its groups. All ranks make one, in the same order; a group of one rank is None."""

    def __init__(self, parallel: Parallel):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if parallel.devices != ranks:
            axes = ",".join(f"{axis}={getattr(parallel, axis)}" for axis in AXES)
            raise BadInput(f"--mesh {axes}: is of {parallel.devices} ranks, {ranks} were started")
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.device = device()
        shape = parallel.data, parallel.fsdp, parallel.context
        grid = torch.arange(ranks).view(shape)
        d, f, self.context_rank = (int(i) for i in (grid == self.rank).nonzero()[0])
        self.batch_rank = d * parallel.fsdp + f
        self.context = _group(grid.flatten(0, 1))
        self.shards = _group(grid.movedim(1, 2).flatten(0, 1))
        self.replicas = _group(grid.movedim(1, 0).flatten(1))


def device() -> torch.device:
    """Of this process: the accelerator whose number is LOCAL_RANK, or the CPU."""
    if find_spec("torch_neuronx"):
        import torch_neuronx  # noqa: F401  registers the device
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu" if found is None else f"{found.type}:{os.environ.get('LOCAL_RANK', 0)}")


def join(options: dict, quiet: bool = False) -> processes.Link:
    """Meets the other ranks, then starts torch.distributed. options: what must be the same on all, in JSON's types.
    quiet: rank 0 speaks for this one too.

    Raises BadInput, one line, within processes.PATIENCE seconds where ranks do not come, or not alike.
    """
    try:
        me, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise BadInput(f"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun sets them; here {error}") from None
    patience = datetime.timedelta(seconds=processes.PATIENCE)
    here = device()
    try:
        store, _, _ = next(dist.rendezvous("env://", me, count, timeout=patience))
        store = dist.PrefixStore("ringtide", store)
        if me == 0:
            server = socket.create_server((socket.gethostbyname(host), 0))
            store.set("roll call", str(server.getsockname()[1]))
        else:
            port = int(store.get("roll call"))
    except (dist.DistError, RuntimeError, OSError, ValueError) as error:
        raise BadInput(f"MASTER_ADDR {host}: rank {me} of {count} met no others ({_short(error)})") from None
    options = {**options, "WORLD_SIZE": count}
    peers = processes.call_roll(server, count, options) if me == 0 else {0: processes.answer(host, port, me, options)}
    if here.type != "cpu":
        torch.accelerator.set_device_index(here.index)
    backend = dist.get_default_backend_for_device(here.type)
    dist.init_process_group(
        backend, store=store, rank=me, world_size=count, timeout=datetime.timedelta(seconds=PATIENCE)
    )
    return processes.Link(me, count, peers, dist.destroy_process_group, quiet)


def _group(sets):
    """This rank's, of a partition of all ranks, [groups, ranks of each]."""
    mine = None
    for ranks in sets.tolist() if sets.shape[1] > 1 else ():
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def _short(error):
    return " ".join(str(error).split())[:200]
