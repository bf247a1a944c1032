"""Training a Llama with its sequence over a mesh of devices, in a run that can be killed at any moment.

Tokens [B, T] are laid out over the devices of a sequence, each holds T / shards of it: in zigzag, or with Ulysses in
order. Everything but attention acts on each token by itself; attention passes keys and values around. How parameters
lie, and how they come to the tokens, is in sharding.py; the life of a run, in loop.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringtide
from ringtide.kernels import layouts
from ringtide.models import BadInput, checkpoint, llama, loop, run_folder, sharding, weights
from ringtide.models.processes import Alone
from ringtide.models.sharding import Parallel, make_mesh


@dataclasses.dataclass(frozen=True)
class Settings(run_folder.Settings):
    preset: str = "llama-tiny"
    presets = tuple(llama.PRESETS)


class Trainer:
    """What a run computes on its mesh: `train_step`, `gradients` and `evaluate`, on tokens that `place` has laid out.

    train_step: (state, tokens, targets) -> (next state, loss, norm of the gradients before clipping), one program; the
    old state is used up. Nothing in it is as long as a sequence, and it compiles for devices that are not there:
    `trainer.train_step.lower(trainer.like(), *trainer.batch_like()).compile()`.
    """

    def __init__(self, config: llama.Config, settings: Settings, parallel: Parallel, mesh):
        self.config, self.settings, self.parallel, self.mesh = config, settings, parallel, mesh
        self.tokens = NamedSharding(mesh, sharding.TOKENS)
        seq, layout, shards = settings.seq, parallel.layout, parallel.shards
        try:
            layouts.check_length(layout, seq, shards)
        except ValueError as error:
            raise BadInput(f"--seq: {error}") from None
        if settings.batch % parallel.batch:
            raise BadInput(f"--batch {settings.batch}: must be a multiple of data * fsdp of the mesh, {parallel.batch}")
        self.schedule = optax.warmup_cosine_decay_schedule(
            settings.lr / 10, settings.lr, min(settings.warmup, settings.steps - 1), settings.steps, settings.lr / 10
        )
        decayed = lambda params: jax.tree.map_with_path(lambda path, _: "norm" not in path[-1].key, params)
        adamw = optax.adamw(self.schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        each = sharding.each_token(mesh)

        def attend(q, k, v, positions):
            if parallel.devices == 1:
                return llama.causal(q, k, v, positions)
            over = {"mesh": mesh, "seq_axis": parallel.seq_axis, "batch_axis": sharding.BATCH, "layout": layout}
            return ringtide.context_parallel_attention(
                q, k, v, mask=ringtide.Causal(), strategy=parallel.strategy, **over
            )

        def loss(params, tokens, targets):
            dtype = jnp.dtype(settings.dtype)
            positions = layouts.position_of(jnp.arange(seq, dtype=jnp.int32), layout, seq, shards)
            h = llama.hidden(params, tokens, positions, config, attend, each, parallel.remat, dtype)
            return llama.loss(params, h, targets, each)

        def step(state, tokens, targets):
            value, grads = jax.value_and_grad(loss)(state["params"], tokens, targets)
            changes, opt = self.optimizer.update(grads, state["opt"], state["params"])
            state = {"params": optax.apply_updates(state["params"], changes), "opt": opt}
            return state, value, optax.tree.norm(grads)

        one = NamedSharding(mesh, P())
        where = jax.tree.map(lambda x: x.sharding, self.like())
        self.evaluate = jax.jit(loss, out_shardings=one)
        self.gradients = jax.jit(jax.value_and_grad(loss), out_shardings=(one, where["params"]))
        self.train_step = jax.jit(step, donate_argnums=0, out_shardings=(where, one, one))

    def fresh(self, seed: int, params=None):
        """The state before the first step: random, or of the given parameters."""
        put = lambda path, x: _put(x, NamedSharding(self.mesh, sharding.spec_of(path, x.shape, self.mesh)))
        if params is None:
            params = llama.init(seed, self.config, put)
        else:
            params = jax.tree.map_with_path(put, params)
        where = jax.tree.map(lambda x: x.sharding, self.like()["opt"])
        return {"params": params, "opt": jax.jit(self.optimizer.init, out_shardings=where)(params)}

    def like(self):
        """The shapes, dtypes and shardings of the state, for restoring it or compiling `train_step`."""
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            llama.shapes(self.config),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        state = {"params": params, "opt": jax.eval_shape(self.optimizer.init, params)}
        where = sharding.shardings(state, self.mesh)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, where)

    def batch_like(self):
        """(tokens, targets) of a step, as `like`."""
        shape = self.settings.batch, self.settings.seq
        return (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.tokens),) * 2

    def place(self, *rows):
        """Each int [B, T] array in layout order, split over the mesh."""
        order = np.arange(self.settings.seq, dtype=np.int32)
        order = layouts.position_of(order, self.parallel.layout, self.settings.seq, self.parallel.shards)
        return [_put(x[:, order], self.tokens) for x in rows]

    def restore(self, checkpoints, step):
        """The state in a checkpoint, on the devices of now."""
        return checkpoint.read(checkpoints, step, self.like())

    def save(self, checkpoints, step, state, link):
        checkpoint.save(checkpoints, step, state, link.first, link.tell)

    def write_model(self, out, state, link):
        """OUT/model, in Hugging Face's format."""
        params = self.whole(state["params"], keep=link.first)
        if link.first:
            weights.save(out / "model", params, self.config)

    def count(self, params):
        return sum(x.size for x in jax.tree.leaves(params))

    def prove(self, params, data):
        found = mesh_equals_single(self, params, data)
        return found, (
            "one step, mesh against single device: loss differs by {loss_difference:.1e}, gradients by at most "
            "{gradient_difference:.1e} of the largest".format(**found)
        )

    def whole(self, params, keep=True):
        """The parameters as NumPy arrays, one after another gathered from all processes; None unless they are kept."""
        gather = jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, P()))

        def fetch(x):
            x = jax.block_until_ready(x if x.is_fully_addressable else gather(x))
            return np.asarray(x) if keep else None

        return jax.tree.map(fetch, params)

    def validate(self, params, windows) -> float:
        """Mean loss over held-out (tokens, targets), int [count, T] each, as many at a time as the mesh takes."""
        group, total = self.parallel.batch, 0.0
        for start in range(0, len(windows[0]), group):
            tokens, targets = (x[start : start + group] for x in windows)
            short = ((0, group - len(tokens)), (0, 0))
            batch = self.place(np.pad(tokens, short), np.pad(targets, short, constant_values=-1))  # -1 does not count
            total += float(self.evaluate(params, *batch)) * len(tokens)
        return total / len(windows[0])


def run(out, given: dict, parallel: Parallel, resume: bool = False, say=print, progress=None, link=None) -> dict:
    """Trains a Llama in folder `out`: `loop.run`, with all that is the Llama's."""
    link, mesh = link or Alone(), make_mesh(parallel)
    if given.get("demo") and link.count > 1 and not resume:
        raise BadInput("--demo: compares with a single device, which takes a single process")
    return loop.run(KIND, out, given, parallel, mesh, resume, say, progress, link)


def mesh_equals_single(trainer, params, data) -> dict:
    """Loss and gradients of the first batch over the mesh against one device: the largest differences.

    "loss_difference" is absolute, "gradient_difference" relative to the largest entry of any gradient.
    """
    settings, alone = trainer.settings, dataclasses.replace(trainer.parallel, data=1, fsdp=1, ulysses=1, context=1)
    batch = data.batch(settings.seed, 0, settings.batch, settings.seq)
    single = Trainer(trainer.config, settings, alone, make_mesh(alone))
    on_one = jax.device_put(params, jax.tree.map(lambda x: x.sharding, single.like()["params"]))
    (a, ga), (b, gb) = (
        trainer.gradients(params, *trainer.place(*batch)),
        single.gradients(on_one, *single.place(*batch)),
    )
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(ga), jax.tree.leaves(gb), strict=True)]
    largest = max(np.abs(y).max() for _, y in pairs)
    return {
        "loss_difference": abs(float(a) - float(b)),
        "gradient_difference": float(max(np.abs(x - y).max() for x, y in pairs) / largest),
    }


def _put(x, where):
    """A NumPy array that every process holds, as a global one."""
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def _model(settings, vocab_size):
    """(config, parameters or None) that the settings ask for."""
    if settings.init is None:
        return dataclasses.replace(llama.PRESETS[settings.preset], vocab_size=vocab_size), None
    params, config = weights.load(settings.init)
    if vocab_size > config.vocab_size:
        raise BadInput(
            f"--init {settings.init}: its vocabulary of {config.vocab_size} is smaller than that of the data, "
            f"{vocab_size}: pass the --tokenizer that belongs to it"
        )
    return config, params


def _config(model):
    """Of run.json."""
    if model["rope_scaling"] is not None:
        model["rope_scaling"] = llama.Scaling(**model["rope_scaling"])
    return llama.Config(**model)


def _machine():
    return {"platform": jax.devices()[0].platform, "jax": jax.__version__}


KIND = run_folder.Kind("llama", Settings, _config, Parallel, _machine, _model, lambda *made: Trainer(*made[:4]))
