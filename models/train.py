"""Training a Llama with its sequence over a ring of devices, in a run that can be killed at any moment.

Tokens [B, T] are laid out in zigzag over the mesh axis "context": every device holds T / N of each sequence and the
whole model. Everything but attention acts on each token by itself, so jit splits it by the sharding of its inputs;
attention passes keys and values around the ring. Each step is a function of (state, seed, step), so a run that was
killed and resumed gives, on the same devices, bitwise the losses of one that was not.
"""

import contextlib
import dataclasses
import json
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
from ringtide.models import BadInput, checkpoint, llama, weights
from ringtide.models import data as data_module

AXIS = "context"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What defines a run: kept in run.json, a resumed run cannot change it. `ringtide train llama -h` explains each."""

    preset: str = "llama-tiny"
    data: str | None = None
    tokenizer: str | None = None
    init: str | None = None
    seq: int = 1024
    batch: int = 1
    steps: int = 1000
    lr: float = 3e-3
    warmup: int = 20
    seed: int = 0
    dtype: str = "float32"
    remat: bool = False
    val_every: int = 100
    val_windows: int = 4
    ckpt_every: int = 100
    demo: bool = False


def make_mesh(devices: int):
    """A ring of the first `devices` devices."""
    have = jax.devices()
    if devices > len(have):
        raise BadInput(f"--devices {devices}: this process has {len(have)} {have[0].platform} device(s)")
    return jax.make_mesh((devices,), (AXIS,), devices=have[:devices], axis_types=(jax.sharding.AxisType.Auto,))


class Trainer:
    """What a run computes on its mesh: `step`, `gradients` and `evaluate`, on tokens that `place` has laid out."""

    def __init__(self, config: llama.Config, settings: Settings, mesh):
        self.config, self.mesh, self.shards = config, mesh, mesh.size
        layout = "zigzag" if self.shards > 1 else "contiguous"
        try:
            layouts.check_length(layout, settings.seq, self.shards)
        except ValueError as error:
            raise BadInput(f"--seq: {error}") from None
        # Index of the token that each place holds: the layout, and at once its positions.
        self.positions = layouts.position_of(np.arange(settings.seq, dtype=np.int32), layout, settings.seq, self.shards)
        self.schedule = optax.warmup_cosine_decay_schedule(
            settings.lr / 10, settings.lr, min(settings.warmup, settings.steps - 1), settings.steps, settings.lr / 10
        )
        decayed = lambda params: jax.tree.map_with_path(lambda path, _: "norm" not in path[-1].key, params)
        adamw = optax.adamw(self.schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

        def attend(q, k, v, positions):
            if self.shards == 1:
                return llama.causal(q, k, v, positions)
            ring = {"mesh": mesh, "seq_axis": AXIS, "strategy": "ring", "layout": layout}
            return ringtide.context_parallel_attention(q, k, v, mask=ringtide.Causal(), **ring)

        def loss(params, tokens, targets):
            dtype = jnp.dtype(settings.dtype)
            h = llama.hidden(params, tokens, self.positions, config, attend, settings.remat, dtype)
            return llama.loss(params, h, targets, shards=self.shards)

        def update(state, grads):
            changes, opt = self.optimizer.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], changes), "opt": opt}, optax.tree.norm(grads)

        self.evaluate = jax.jit(loss)
        self.gradients = jax.jit(jax.value_and_grad(loss))
        self.update = jax.jit(update, donate_argnums=0)

    def step(self, state, tokens, targets):
        """(next state, loss, norm of the gradients before clipping); the old state is used up."""
        loss, grads = self.gradients(state["params"], tokens, targets)
        state, norm = self.update(state, grads)
        return state, loss, norm

    def fresh(self, seed: int, params=None):
        """The state before the first step, on every device: random, or of the given parameters."""
        params = llama.init(seed, self.config) if params is None else params
        params = self._everywhere(params)
        return {
            "params": params,
            "opt": jax.jit(self.optimizer.init, out_shardings=NamedSharding(self.mesh, P()))(params),
        }

    def like(self):
        """The shapes and shardings of the state, for restoring it."""
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            llama.shapes(self.config),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        state = {"params": params, "opt": jax.eval_shape(self.optimizer.init, params)}
        whole = NamedSharding(self.mesh, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)

    def place(self, *rows):
        """Each int [B, T] array in layout order, split over the ring."""
        split = NamedSharding(self.mesh, P(None, AXIS))
        return [jax.device_put(np.ascontiguousarray(x[:, self.positions]), split) for x in rows]

    def validate(self, params, windows) -> float:
        """Mean loss over held-out (tokens, targets), int [count, T] each, a window at a time."""
        pairs = zip(*windows, strict=True)
        return float(np.mean([float(self.evaluate(params, *self.place(x[None], y[None]))) for x, y in pairs]))

    def _everywhere(self, tree):
        return jax.device_put(tree, NamedSharding(self.mesh, P()))


def run(out, given: dict, devices: int = 1, resume: bool = False, say=print, progress=None) -> dict:
    """Trains in folder `out` and returns a summary. Raises BadInput, one line, for what the user can cure.

    given: the Settings that the user chose; with `resume` they must agree with the run's. say: takes a line of text.
    progress: called with (metrics line, total steps) after each step.
    """
    out = Path(out)
    with contextlib.ExitStack() as stack:
        if resume:
            if not (out / "run.json").is_file():
                raise BadInput(f"--resume: no run in {out} (run.json is missing)")
            stack.enter_context(checkpoint.locked(out))
            saved = _read_run(out)
            settings = _agree(saved["settings"], given, out)
        else:
            _refuse_used(out, given)
            settings = Settings(**given)
        data = data_module.load(settings.data, settings.seq, settings.tokenizer)
        if data.skipped:
            say(f"skipped {len(data.skipped)} files that are not text, the first: {data.skipped[0]}")
        config, params = _model(settings, data.vocab_size)
        trainer = Trainer(config, settings, make_mesh(devices))
        here = {"devices": devices, "platform": jax.devices()[0].platform, "jax": jax.__version__}
        if not resume:  # nothing is written before everything is known to be right
            stack.enter_context(checkpoint.locked(out))
            _refuse_used(out, given, replace=True)
            _write_run(out, settings, config, data, here)
        elif saved["data_fingerprint"] != data.fingerprint:
            raise BadInput(f"--resume: the data of {out} has changed since the run began")
        elif saved["machine"] != here:
            say(f"resumed on {here}, begun on {saved['machine']}: the losses may differ in the last bits")
        try:
            return _loop(out, settings, data, trainer, params, say, progress)
        except OSError as error:
            raise BadInput(f"{error.filename or out}: {error.strerror or error}; go on later with --resume") from None


def _loop(out, settings, data, trainer, params, say, progress):
    if settings.tokenizer:
        checkpoint.write_atomically(out / "tokenizer.json", Path(settings.tokenizer).read_text())
    found = checkpoint.restore(out / "checkpoints", trainer.like(), say)
    start, state = found if found else (0, trainer.fresh(settings.seed, params))
    metrics = checkpoint.Metrics(out / "metrics.jsonl", start if found else -1)
    windows = data.held_out_windows(settings.val_windows, settings.seq)
    unigram, bigram = data_module.entropies(*windows)
    count = sum(x.size for x in jax.tree.leaves(state["params"]))
    say(
        f"{count / 1e6:.2f} M parameters, {len(data.train):,} training and {len(data.held_out):,} held-out tokens, "
        f"{settings.seq:,} tokens a sequence over {trainer.shards} device(s), step {start} of {settings.steps}"
    )
    summary = {"parameters": count, "unigram": unigram, "bigram": bigram}
    if settings.demo and start == 0:
        summary |= ring_equals_single(trainer, settings, state["params"], data)
        say("one step, ring against single device: loss differs by {loss_difference:.1e}, gradients by at most "
            "{gradient_difference:.1e} of the largest".format(**summary))  # fmt: skip
    if start == 0:
        metrics.write({"step": 0, "val_loss": trainer.validate(state["params"], windows)})
    with _Stop() as stop:
        for step in range(start, settings.steps):
            began = time.perf_counter()
            batch = trainer.place(*data.batch(settings.seed, step, settings.batch, settings.seq))
            state, loss, norm = trainer.step(state, *batch)
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
            metrics.write(line)
            if progress:
                progress(line, settings.steps)
            if done % settings.ckpt_every == 0 or done == settings.steps or stop.asked:
                metrics.sync()
                checkpoint.save(out / "checkpoints", done, state)
            if stop.asked and done < settings.steps:
                return {**summary, "stopped": done}
    return {**summary, **_finish(out, trainer.config, state["params"], metrics.lines, summary)}


def ring_equals_single(trainer, settings, params, data) -> dict:
    """Loss and gradients of the first batch over the ring against one device: the largest differences.

    "loss_difference" is absolute, "gradient_difference" relative to the largest entry of any gradient.
    """
    batch = data.batch(settings.seed, 0, settings.batch, settings.seq)
    single = Trainer(trainer.config, settings, make_mesh(1))
    on_one = jax.device_put(params, jax.devices()[0])
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


def read_run(out):
    """(Settings, Config) of a run's folder."""
    saved = _read_run(Path(out))
    config = dict(saved["model"])
    if config["rope_scaling"]:
        config["rope_scaling"] = llama.Scaling(**config["rope_scaling"])
    return Settings(**saved["settings"]), llama.Config(**config)


def _refuse_used(out, given, replace=False):
    """Refuses a folder that holds anything, except that a demo replaces the demo before it (when `replace`)."""
    if not out.exists():
        return
    if not out.is_dir():
        raise BadInput(f"--out {out}: is a file")
    held = [path for path in out.iterdir() if path.name != ".lock"]
    demo = given.get("demo") and (out / "run.json").is_file() and _read_run(out)["settings"].get("demo")
    if held and not demo:
        if (out / "run.json").is_file() and not replace:
            with checkpoint.locked(out):  # says so if it is in use
                pass
        raise BadInput(f"--out {out}: already holds something; go on with --resume, or choose another folder")
    for path in held if replace else ():
        checkpoint.remove(path)


def _read_run(out):
    try:
        saved = json.loads((out / "run.json").read_text())
        Settings(**saved["settings"]), saved["model"]["rope_scaling"], saved["machine"], saved["data_fingerprint"]
        return saved
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{out / 'run.json'}: not readable ({checkpoint.reason(error)})") from None


def _write_run(out, settings, config, data, here):
    content = {
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(config),
        "data_fingerprint": data.fingerprint,
        "machine": here,
    }
    checkpoint.write_atomically(out / "run.json", json.dumps(content, indent=2) + "\n")


def _agree(saved, given, out):
    for name, value in given.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise BadInput(
                f"--{option} {value}: the run in {out} has {saved.get(name)}; leave --{option} out to go on, "
                "or start another --out"
            )
    return Settings(**saved)


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
    weights.save(out / "model", jax.device_get(params), config)
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held_out = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    plot(out / "loss.png", losses, held_out, summary)
    return {"first": held_out[0][1], "last": held_out[-1][1], "picture": str(out / "loss.png")}


def plot(path, losses, held_out, summary):
    """The loss curve, beside what the frequencies of tokens and of pairs alone would give."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(*zip(*losses, strict=True), color="#9bb8d3", label="training")
    axes.plot(*zip(*held_out, strict=True), color="#1f4e79", marker="o", label="held out")
    for name, style in (("unigram", "--"), ("bigram", ":")):
        axes.axhline(summary[name], color="#b04a3a", linestyle=style, label=f"{name} entropy of the held-out text")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{summary['parameters'] / 1e6:.1f} M parameters")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
            signal.signal(number, handler)
