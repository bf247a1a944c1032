"""Training a Laplace with Muon, on one rank or over many, in a run that can be killed at any moment.

The life of a run is in loop.py, how the model lies over ranks in ranks.py, the optimizer in muon.py. The loss is the
mean over the tokens of all ranks; each rank has a part of the batch, of the sequences, or of both, and its gradients
are of its part of that mean, so that they need only be summed.

Documents are packed: the token that ends one begins the next, and with it the state and the convolution begin anew. An
end token is therefore what a text starts from, as in generation from nothing.
"""

import dataclasses
import os

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ringtide.models import BadInput, checkpoint, laplace, laplace_weights, loop, run_folder, tensor_files
from ringtide.models.muon import Muon
from ringtide.models.processes import Alone
from ringtide.models.ranks import Mesh, Parallel, device

DECAY = 0.2  # of the steps, at their end: the learning rate falls to 0


@dataclasses.dataclass(frozen=True)
class Settings(run_folder.Settings):
    preset: str = "laplace-tiny"
    lr: float = 3e-3
    presets = tuple(laplace.PRESETS)


class Trainer:
    """What a run computes on this rank, as loop.py wants it. A state is {"params": the model, "opt", "step"}, and
    `train_step` changes it in place. end: the token that ends a document, None if none does."""

    def __init__(self, config: laplace.Config, settings: Settings, parallel: Parallel, mesh: Mesh, end: int | None):
        self.config, self.settings, self.parallel, self.mesh, self.end = config, settings, parallel, mesh, end
        self.dtype = getattr(torch, settings.dtype)
        short = settings.seq // parallel.context < config.conv
        if settings.seq % parallel.context or short:
            least = f", and at least {config.conv} tokens for each" if short else ""
            raise BadInput(
                f"--seq {settings.seq}: must be a multiple of context of the mesh, {parallel.context}{least}"
            )
        if settings.batch % parallel.batch:
            raise BadInput(f"--batch {settings.batch}: must be a multiple of data * fsdp of the mesh, {parallel.batch}")

    def schedule(self, step: int) -> float:
        """Warmup, then the same rate, then down in a straight line, to 0 after the last step."""
        s = self.settings
        up, down = min(s.warmup, s.steps - 1), max(1, round(DECAY * s.steps))
        return s.lr * min(1.0, (step + 1) / up if up else 1.0, (s.steps - step) / down)

    def fresh(self, seed: int, params=None):
        """The state before the first step: random, or of the given {name: float32 tensor}."""
        return self._state(laplace.initial_weights(self.config, seed) if params is None else params.items())

    def restore(self, checkpoints, step):
        """The state in a checkpoint, of however many ranks it was."""
        state = self._state()
        try:
            state["opt"].load(reader(checkpoints, step))
        except ValueError as error:  # whole, but of another model
            raise _unfit(checkpoints, step, error) from None
        return {**state, "step": step}

    def save(self, checkpoints, step, state, link):
        def fill(folder):
            folder.mkdir(exist_ok=True)
            path = folder / f"rank-{self.mesh.rank:05d}.safetensors"
            save_file({key: x.contiguous() for key, x in state["opt"].state().items()}, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            link.any_of(False)  # all have written

        checkpoint.write(checkpoints, step, fill, state["opt"].state_bytes(), link.first, link.tell)

    def place(self, tokens, targets):
        """This rank's (tokens, targets, segment ids or None), int64 [b, t], of int32 [B, T] that all ranks hold."""
        segments = np.cumsum(tokens == self.end, axis=1) if self.end is not None else None
        b, t = len(tokens) // self.parallel.batch, tokens.shape[1] // self.parallel.context
        rows, columns = self.mesh.batch_rank * b, self.mesh.context_rank * t
        mine = lambda x: torch.from_numpy(x[rows : rows + b, columns : columns + t].astype(np.int64))
        return [x if x is None else mine(x).to(self.mesh.device) for x in (tokens, targets, segments)]

    def train_step(self, state, *batch):
        total = self._loss(state["params"], *batch) / (self.settings.batch * self.settings.seq)
        total.backward()
        norm = state["opt"].step(self.schedule(state["step"]))
        return {**state, "step": state["step"] + 1}, self._of_all(total.detach()), norm

    @torch.no_grad()
    def validate(self, params, windows) -> float:
        """Mean loss over held-out (tokens, targets), int [count, T] each, at most as many at a time as in a step."""
        ranks = self.parallel.batch
        group, total = -(-min(self.settings.batch, len(windows[0])) // ranks) * ranks, 0.0
        for start in range(0, len(windows[0]), group):
            tokens, targets = (x[start : start + group] for x in windows)
            short = ((0, group - len(tokens)), (0, 0))
            batch = self.place(np.pad(tokens, short), np.pad(targets, short, constant_values=-1))  # -1 does not count
            total += float(self._of_all(self._loss(params, *batch)))
        return total / windows[0].size

    @torch.no_grad()
    def prove(self, params, data):
        """That the model as it is trained, all tokens at once, is the one that generates, token by token."""
        tokens = torch.from_numpy(data.held_out[:64].astype(np.int64))[None].to(self.mesh.device)
        logits, cache = params(tokens), laplace.new_cache(self.config, 1, self.dtype, self.mesh.device)
        one_by_one = []
        for t in range(tokens.shape[1]):
            now, cache = params(tokens[:, t : t + 1], cache=cache)
            one_by_one.append(now)
        difference = float((torch.stack(one_by_one, 1) - logits).abs().max())
        line = (
            f"{tokens.shape[1]} tokens at once, and one by one from a state: logits differ by at most {difference:.1e}"
        )
        return {"logit_difference": difference}, line

    def count(self, params):
        return sum(p.numel() for p in params.parameters())

    def write_model(self, out, state, link):
        """OUT/model, in fla's format, float32: the masters of all ranks, which are in the last checkpoint."""
        if link.first:
            model, masters = state["params"], _masters(out / "checkpoints", state["step"], self.config)
            laplace_weights.save(out / "model", model, masters)

    def _state(self, initial=None):
        """initial: (name, float32 tensor) of all parameters, None: they will be loaded."""
        mesh, shapes = self.mesh, _shapes(self.config)
        empty = {name: torch.empty(shape, dtype=self.dtype, device=mesh.device) for name, shape in shapes.items()}
        model = build(self.config, empty)
        if mesh.shards is not None:
            over = DeviceMesh.from_group(mesh.shards, mesh.device.type)
            float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=over, mp_policy=float32)
                part.set_gradient_divide_factor(1.0)  # sums, not means
                part.set_force_sum_reduction_for_comms(True)  # gloo has nothing else
        over = {"replicas": mesh.replicas, "shards": mesh.shards}
        opt = Muon(model.named_parameters(), initial, **over, precise=self.dtype == torch.float32)
        return {"params": model, "opt": opt, "step": 0}

    def _loss(self, model, tokens, targets, segments):
        """Sum over this rank's targets."""
        remat = self.parallel.remat == "full"
        return model(tokens, targets=targets, segment_ids=segments, context=self.mesh.context, remat=remat)

    def _of_all(self, value):
        if self.parallel.devices > 1:
            dist.all_reduce(value)
        return value


def run(out, given: dict, parallel: Parallel, resume: bool = False, say=print, progress=None, link=None) -> dict:
    """Trains a Laplace in folder `out`: `loop.run`, with all that is the Laplace's."""
    return loop.run(KIND, out, given, parallel, Mesh(parallel), resume, say, progress, link or Alone())


def load(folder, warn=print):
    """(model in float32 on the CPU, Settings) of the last whole checkpoint of a run's folder."""
    _, settings, config = run_folder.read(folder, KIND)
    step = checkpoint.find(folder / "checkpoints", warn, owner=False)
    if step is None:
        raise BadInput(f"--ckpt {folder}: no checkpoint yet")
    return build(config, _masters(folder / "checkpoints", step, config)), settings


def build(config, tensors) -> laplace.LaplaceForCausalLM:
    """The model that has these tensors, {name: tensor}, for parameters."""
    with torch.device("meta"):
        model = laplace.LaplaceForCausalLM(config)
    for name in _shapes(config):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensors[name]))
    if config.tied:
        model.lm_head.weight = model.model.embeddings.weight
    return model


def reader(checkpoints, step):
    """key -> tensor, of all that the ranks wrote into checkpoint `step`. Raises ValueError for what is not there."""
    folder = checkpoint.place(checkpoints, step) / "state"
    where = {key: path for path in sorted(folder.glob("*.safetensors")) for key in tensor_files.names(path, "pt")}

    def read(key):
        if key not in where:
            raise ValueError(f"{key} is missing")
        return tensor_files.read(where[key], key, "pt")

    return read


def _masters(checkpoints, step, config):
    """{name: float32 tensor}, whole."""
    try:
        read = reader(checkpoints, step)
        tensors = {name: read(f"{name}.master") for name in _shapes(config)}
        for name, shape in _shapes(config).items():
            if tensors[name].shape != shape:
                raise ValueError(f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
    except ValueError as error:
        raise _unfit(checkpoints, step, error) from None
    return tensors


def _unfit(checkpoints, step, error):
    if isinstance(error, BadInput):
        return error
    return BadInput(f"checkpoint {checkpoint.place(checkpoints, step)} does not fit its run.json ({error})")


def _shapes(config):
    with torch.device("meta"):
        return {name: p.shape for name, p in laplace.LaplaceForCausalLM(config).named_parameters()}


def _model(settings, vocab_size):
    """(config, {name: float32 tensor} or None) that the settings ask for."""
    if settings.init is None:
        return dataclasses.replace(laplace.PRESETS[settings.preset], vocab_size=vocab_size), None
    model = laplace_weights.load(settings.init)
    if vocab_size > model.config.vocab_size:
        raise BadInput(
            f"--init {settings.init}: its vocabulary of {model.config.vocab_size} is smaller than that of the data, "
            f"{vocab_size}: pass the --tokenizer that belongs to it"
        )
    return model.config, {name: p.detach() for name, p in model.named_parameters()}


def _machine():
    return {"platform": device().type, "torch": torch.__version__, "threads": torch.get_num_threads()}


KIND = run_folder.Kind("laplace", Settings, lambda model: laplace.Config(**model), Parallel, _machine, _model, Trainer)
