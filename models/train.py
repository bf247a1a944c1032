"""Training a Llama with its sequence over a ring of devices, in a run that can be killed at any moment.

Tokens [B, T] are laid out in zigzag over the mesh axis "context": every device holds T / N of each sequence and the
whole model. Everything but attention acts on each token by itself, so jit splits it by the sharding of its inputs;
attention passes keys and values around the ring. Each step is a function of (state, seed, step), so a run that was
killed and resumed gives, on the same devices, bitwise the losses of one that was not.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
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
from ringtide.models import BadInput, checkpoint, llama, plot, weights
from ringtide.models import data as data_module

AXIS = "context"
_CHOICES = {"preset": tuple(llama.PRESETS), "dtype": ("float32", "bfloat16")}


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

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, kind, value = field.name, field.type, getattr(self, field.name)
            if kind is float:
                fits = type(value) in (int, float) and 0 < value < math.inf
            elif kind is int:
                fits = type(value) is int and value >= (0 if name in ("warmup", "seed") else 1)
            else:
                fits = isinstance(value, kind) and value in _CHOICES.get(name, (value,))
            if not fits:
                raise BadInput(f"--{name.replace('_', '-')}: {value!r} is not possible")


def make_mesh(devices: int):
    """A ring of the first `devices` devices."""
    try:
        have = jax.devices()
    except RuntimeError as error:
        raise BadInput(f"jax finds no device, see JAX_PLATFORMS ({checkpoint.reason(error)})") from None
    if devices > len(have):
        raise BadInput(f"--devices {devices}: this process has {len(have)} {have[0].platform} device(s)")
    return jax.make_mesh((devices,), (AXIS,), devices=have[:devices], axis_types=(jax.sharding.AxisType.Auto,))


class Trainer:
    """What a run computes on its mesh: `step`, `gradients` and `evaluate`, on tokens that `place` has laid out."""

    def __init__(self, config: llama.Config, settings: Settings, mesh):
        self.config, self.settings, self.shards = config, settings, mesh.size
        self.whole, self.split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, AXIS))
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
        params = jax.device_put(params, self.whole)
        return {"params": params, "opt": jax.jit(self.optimizer.init, out_shardings=self.whole)(params)}

    def like(self):
        """The shapes and shardings of the state, for restoring it."""
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            llama.shapes(self.config),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        state = {"params": params, "opt": jax.eval_shape(self.optimizer.init, params)}
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.whole), state)

    def place(self, *rows):
        """Each int [B, T] array in layout order, split over the ring."""
        return [jax.device_put(np.ascontiguousarray(x[:, self.positions]), self.split) for x in rows]

    def validate(self, params, windows) -> float:
        """Mean loss over held-out (tokens, targets), int [count, T] each, a window at a time."""
        pairs = zip(*windows, strict=True)
        return float(np.mean([float(self.evaluate(params, *self.place(x[None], y[None]))) for x, y in pairs]))


def run(out, given: dict, devices: int = 1, resume: bool = False, say=print, progress=None) -> dict:
    """Trains in folder `out` and returns a summary. Raises BadInput, one line, for what the user can cure.

    given: the Settings that the user chose; with `resume` they must agree with the run's. say: takes a line of text.
    progress: called with (metrics line, total steps) after each step.
    """
    out, mesh = Path(out), make_mesh(devices)
    opened = _reopen if resume else _begin
    try:
        with opened(out, given, mesh, say) as (trainer, data, params):
            return _loop(out, trainer, data, params, say, progress)
    except OSError as error:
        later = "; go on later with --resume" if (out / "run.json").is_file() else ""
        raise BadInput(f"{error.filename or out}: {error.strerror or error}{later}") from None


@contextlib.contextmanager
def _begin(out, given, mesh, say):
    """(Trainer, Data, initial parameters or None) of a new run. Nothing is written before all is known to be right."""
    _refuse_used(out, given)
    if "init" in given and "preset" in given:
        raise BadInput("--preset: the model in --init has its own shape; leave one of the two out")
    settings = Settings(**given)
    source = Path(settings.data).resolve() if settings.data else None
    if source and source.is_dir() and out.resolve().is_relative_to(source):
        raise BadInput(f"--out {out}: lies in --data {source}, so the run would be its own data; choose another folder")
    data = _load(settings, settings.tokenizer, say)
    config, params = _model(settings, data.vocab_size)
    trainer = Trainer(config, settings, mesh)
    with checkpoint.locked(out):
        _refuse_used(out, given, replace=True)
        _write_run(out, settings, config, data, mesh)
        yield trainer, data, params


@contextlib.contextmanager
def _reopen(out, given, mesh, say):
    """(Trainer, Data, None) of the run in `out`, which go by run.json alone: --init may have gone since."""
    if not (out / "run.json").is_file():
        raise BadInput(f"--resume: no run in {out} (run.json is missing)")
    with checkpoint.locked(out):
        saved, settings, config = _read_run(out)
        _agree(saved["settings"], given, out)
        ours = out / "tokenizer.json"
        tokenizer = ours if settings.tokenizer and ours.is_file() else settings.tokenizer
        if _sha256(tokenizer) != saved.get("tokenizer_sha256"):
            raise BadInput(f"--resume: the tokenizer {tokenizer} has changed since the run began")
        data = _load(settings, tokenizer, say)
        if saved["data_fingerprint"] != data.fingerprint:
            raise BadInput(f"--resume: the data of {out} has changed since the run began")
        if saved["machine"] != (here := _machine(mesh)):
            say(f"resumed on {here}, begun on {saved['machine']}: the losses may differ in the last bits")
        yield Trainer(config, settings, mesh), data, None


def _load(settings, tokenizer, say):
    data = data_module.load(settings.data, settings.seq, tokenizer)
    if data.skipped:
        say(f"skipped {len(data.skipped)} files that are not text, the first: {data.skipped[0]}")
    return data


def _loop(out, trainer, data, params, say, progress):
    settings = trainer.settings
    if settings.tokenizer and not (out / "tokenizer.json").is_file():
        checkpoint.write_atomically(out / "tokenizer.json", Path(settings.tokenizer).read_bytes())
    found = checkpoint.restore(out / "checkpoints", trainer.like(), say)
    if not found:
        _refuse_lost(out, settings)
        if settings.init and params is None:  # killed before its first checkpoint
            config, params = _model(settings, data.vocab_size)
            if config != trainer.config:
                raise BadInput(f"--init {settings.init}: has another shape than when the run began")
    start, state = found if found else (0, trainer.fresh(settings.seed, params))
    metrics = checkpoint.Metrics(out / "metrics.jsonl", start if found else -1, say)
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
    finished = any(line["step"] == settings.steps and "val_loss" in line for line in metrics.lines)
    if start == 0 or (start == settings.steps and not finished):  # a finished run may have lost its metrics
        metrics.write({"step": start, "val_loss": trainer.validate(state["params"], windows)})
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
    return _read_run(Path(out))[1:]


def _refuse_used(out, given, replace=False):
    """Refuses a folder that holds anything, except that a demo replaces the demo before it (when `replace`)."""
    if not out.exists():
        return
    if not out.is_dir():
        raise BadInput(f"--out {out}: is a file")
    # What a kill may leave behind is nothing.
    held = [path for path in out.iterdir() if not re.fullmatch(r"\.lock|\..*\.part|\.saving-gone-.*", path.name)]
    begun = (out / "run.json").is_file()
    demo = given.get("demo") and begun and _read_run(out)[1].demo
    if held and not demo:
        if begun and not replace:
            with checkpoint.locked(out):  # says so if it is in use
                pass
        cure = "go on with --resume, or choose another folder" if begun else "choose another folder"
        raise BadInput(f"--out {out}: already holds something; {cure}")
    if replace:  # run.json last: until then it is a demo, which may be replaced
        for path in sorted(held, key=lambda path: path.name == "run.json"):
            checkpoint.remove(path)


def _refuse_lost(out, settings):
    """Refuses a run that had a checkpoint and has none: to start at step 0 would delete what is left of it."""
    last = max((line["step"] for line in checkpoint.read_metrics(out / "metrics.jsonl")[0]), default=0)
    if last > settings.ckpt_every or (out / "model").exists():
        raise BadInput(
            f"{out / 'checkpoints'}: no checkpoint is left, though the run came to step {last}: "
            "put them back, or start again with another --out"
        )


def _read_run(out):
    """(what run.json says, Settings, Config). Raises BadInput, one line, whatever is wrong in it."""
    try:
        saved = json.loads((out / "run.json").read_bytes())
        model = dict(saved["model"])
        if model["rope_scaling"] is not None:
            model["rope_scaling"] = llama.Scaling(**model["rope_scaling"])
        devices, fingerprint = saved["machine"]["devices"], saved["data_fingerprint"]
        if type(devices) is not int or devices < 1 or not isinstance(fingerprint, str):
            raise ValueError(f"devices {devices!r}, data_fingerprint {fingerprint!r}")
        return saved, Settings(**saved["settings"]), llama.Config(**model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{out / 'run.json'}: not readable ({checkpoint.reason(error)})") from None


def _write_run(out, settings, config, data, mesh):
    content = {
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(config),
        "data_fingerprint": data.fingerprint,
        "tokenizer_sha256": _sha256(settings.tokenizer),
        "machine": _machine(mesh),
    }
    checkpoint.write_atomically(out / "run.json", json.dumps(content, indent=2) + "\n")


def _machine(mesh):
    return {"devices": mesh.size, "platform": jax.devices()[0].platform, "jax": jax.__version__}


def _sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


def _agree(saved, given, out):
    for name, value in given.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise BadInput(
                f"--{option} {value}: the run in {out} has {saved.get(name)}; leave --{option} out to go on, "
                "or start another --out"
            )


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
            signal.signal(number, handler)
