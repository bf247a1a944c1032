"""Training a Llama with its sequence over a mesh of devices, in a run that can be killed at any moment.

Tokens [B, T] are laid out over the devices of a sequence, each holds T / shards of it: in zigzag, or with Ulysses in
order. Everything but attention acts on each token by itself; attention passes keys and values around. How parameters
lie, and how they come to the tokens, is in sharding.py. Each step is a function of (state, seed, step), so a run that
was killed and resumed gives, on the same devices, bitwise the losses of one that was not; on others, the same to
rounding.
"""

import contextlib
import dataclasses
import math
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringtide
from ringtide.kernels import layouts
from ringtide.models import BadInput, checkpoint, llama, plot, run_folder, sharding, weights
from ringtide.models import data as data_module
from ringtide.models.processes import Alone
from ringtide.models.run_folder import Settings
from ringtide.models.sharding import Parallel, make_mesh


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
    """Trains in folder `out` and returns a summary. Raises BadInput, one line, for what the user can cure.

    given: the Settings that the user chose; with `resume` they must agree with the run's. parallel: over which devices,
    and how; a resumed run may differ in it. say: takes a line of text. progress: called with (metrics line, total
    steps) after each step. link: to the other processes, each of which makes the same call; only the first of them
    locks and writes, but for its share of a checkpoint, and `out` must be the same folder for all.
    """
    out, mesh, link = Path(out), make_mesh(parallel), link or Alone()
    opened = _reopen if resume else _begin
    if not link.first:
        say, progress = lambda line: None, None
    try:
        with opened(out, given, parallel, mesh, say, link) as (trainer, data, params):
            return _loop(out, trainer, data, params, say, progress, link)
    except OSError as error:
        later = "; go on later with --resume" if (out / "run.json").is_file() else ""
        raise BadInput(f"{error.filename or out}: {error.strerror or error}{later}") from None


@contextlib.contextmanager
def _begin(out, given, parallel, mesh, say, link):
    """(Trainer, Data, initial parameters or None) of a new run. Nothing is written before all is known to be right."""
    if link.first:
        run_folder.refuse_used(out, given)
    if "init" in given and "preset" in given:
        raise BadInput("--preset: the model in --init has its own shape; leave one of the two out")
    settings = Settings(**given)
    if settings.demo and link.count > 1:
        raise BadInput("--demo: compares with a single device, which takes a single process")
    source = Path(settings.data).resolve() if settings.data else None
    if source and source.is_dir() and out.resolve().is_relative_to(source):
        raise BadInput(f"--out {out}: lies in --data {source}, so the run would be its own data; choose another folder")
    data = _load(settings, settings.tokenizer, say)
    config, params = _model(settings, data.vocab_size)
    trainer = Trainer(config, settings, parallel, mesh)
    tokenizer = run_folder.sha256(settings.tokenizer)
    link.agree(data=data.fingerprint, model=dataclasses.asdict(config), tokenizer=tokenizer)
    with checkpoint.locked(out) if link.first else contextlib.nullcontext():
        if link.first:
            run_folder.refuse_used(out, given, replace=True)
            run_folder.write(out, settings, config, parallel, data.fingerprint, tokenizer)
        yield trainer, data, params


@contextlib.contextmanager
def _reopen(out, given, parallel, mesh, say, link):
    """(Trainer, Data, None) of the run in `out`, which go by run.json alone: --init may have gone since."""
    if not (out / "run.json").is_file():
        raise BadInput(f"--resume: no run in {out} (run.json is missing)")
    with checkpoint.locked(out) if link.first else contextlib.nullcontext():
        saved, settings, config = run_folder.read(out)
        run_folder.refuse_other(saved["settings"], given, out)
        ours = out / "tokenizer.json"
        tokenizer = ours if settings.tokenizer and ours.is_file() else settings.tokenizer
        if run_folder.sha256(tokenizer) != saved.get("tokenizer_sha256"):
            raise BadInput(f"--resume: the tokenizer {tokenizer} has changed since the run began")
        data = _load(settings, tokenizer, say)
        if saved["data_fingerprint"] != data.fingerprint:
            raise BadInput(f"--resume: the data of {out} has changed since the run began")
        trainer = Trainer(config, settings, parallel, mesh)
        link.agree(run=saved)
        before = {**saved["machine"], **saved["parallel"]}
        here = {**run_folder.machine(), **dataclasses.asdict(parallel)}
        changed = [name for name in here if before.get(name) != here[name]]
        if changed and link.first:
            was, now = (", ".join(f"{name} {x.get(name)}" for name in changed) for x in (before, here))
            say(f"resumed with {now}, before {was}: the losses may differ in the last bits")
            run_folder.write(out, settings, config, parallel, data.fingerprint, saved["tokenizer_sha256"])
        yield trainer, data, None


def _load(settings, tokenizer, say):
    data = data_module.load(settings.data, settings.seq, tokenizer)
    if data.skipped:
        say(f"skipped {len(data.skipped)} files that are not text, the first: {data.skipped[0]}")
    return data


def _loop(out, trainer, data, params, say, progress, link):
    settings, checkpoints = trainer.settings, out / "checkpoints"
    if link.first and settings.tokenizer and not (out / "tokenizer.json").is_file():
        checkpoint.write_atomically(out / "tokenizer.json", Path(settings.tokenizer).read_bytes())
    found = link.tell(checkpoint.find(checkpoints, say) if link.first else None)
    if found is None:
        if link.first:
            run_folder.refuse_lost(out, settings)
        if settings.init and params is None:  # killed before its first checkpoint
            config, params = _model(settings, data.vocab_size)
            if config != trainer.config:
                raise BadInput(f"--init {settings.init}: has another shape than when the run began")
        start, state = 0, trainer.fresh(settings.seed, params)
    else:
        start, state = found, checkpoint.read(checkpoints, found, trainer.like())
    metrics = checkpoint.Metrics(out / "metrics.jsonl", -1 if found is None else found, say) if link.first else None
    windows = data.held_out_windows(settings.val_windows, settings.seq)
    unigram, bigram = data_module.entropies(*windows)
    count = sum(x.size for x in jax.tree.leaves(state["params"]))
    say(
        f"{count / 1e6:.2f} M parameters, {len(data.train):,} training and {len(data.held_out):,} held-out tokens, "
        f"{settings.seq:,} tokens a sequence over {trainer.parallel.shards} device(s), step {start} of {settings.steps}"
    )
    summary = {"parameters": count, "unigram": unigram, "bigram": bigram}
    if settings.demo and start == 0:
        summary |= mesh_equals_single(trainer, state["params"], data)
        say("one step, mesh against single device: loss differs by {loss_difference:.1e}, gradients by at most "
            "{gradient_difference:.1e} of the largest".format(**summary))  # fmt: skip
    held = link.tell([line["step"] for line in metrics.lines if "val_loss" in line] if link.first else None)
    if start == 0 or (start == settings.steps and start not in held):  # a finished run may have lost its metrics
        value = trainer.validate(state["params"], windows)
        if link.first:
            metrics.write({"step": start, "val_loss": value})
    with _Stop() as stop:
        for step in range(start, settings.steps):
            began = time.perf_counter()
            batch = trainer.place(*data.batch(settings.seed, step, settings.batch, settings.seq))
            state, loss, norm = trainer.train_step(state, *batch)
            loss, done = float(loss), step + 1
            seconds = time.perf_counter() - began
            if not math.isfinite(loss):
                raise BadInput(f"the loss is {loss} at step {done}: try a lower --lr; earlier checkpoints are in {out}")
            line = {
                "step": done,
                "loss": loss,
                "grad_norm": float(norm),
                "lr": float(trainer.schedule(step)),
                "tokens_per_second": round(settings.batch * settings.seq / seconds, 1),
            }
            if done % settings.val_every == 0 or done == settings.steps:
                line["val_loss"] = trainer.validate(state["params"], windows)
            if link.first:
                metrics.write(line)
            if progress:
                progress(line, settings.steps)
            stopping = link.any_of(stop.asked)
            if done % settings.ckpt_every == 0 or done == settings.steps or stopping:
                if link.first:
                    metrics.sync()
                checkpoint.save(checkpoints, done, state, link.first, link.tell)
            if stopping and done < settings.steps:
                return {**summary, "stopped": done}
    params = trainer.whole(state["params"], keep=link.first)
    return {**summary, **_finish(out, trainer.config, params, metrics.lines, summary)} if link.first else summary


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


def _finish(out, config, params, lines, summary):
    """The picture, and the model in Hugging Face's format."""
    weights.save(out / "model", params, config)
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held_out = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    plot.curve(out / "loss.png", losses, held_out, summary)
    first = held_out[0][1] if held_out[0][0] == 0 else math.nan  # lost with its line
    return {"first": first, "last": held_out[-1][1], "picture": str(out / "loss.png")}


class _Stop:
    """Ctrl-C or SIGTERM asks to stop after the step; a second Ctrl-C stops at once."""

    asked = False

    def __enter__(self):
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that is not Python's
