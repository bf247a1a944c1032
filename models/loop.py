"""The life of a run, whatever trains: begun or reopened, step after step, stopped or finished, always resumable.

A trainer (models/train.py, models/laplace_train.py) has `settings`, `config`, `parallel` and

    fresh(seed, params) -> state                 before the first step; params: initial ones, or None
    restore(checkpoints, step) -> state          save(checkpoints, step, state, link)
    place(tokens, targets) -> batch              from int32 [B, T] NumPy arrays, the same in all processes
    train_step(state, *batch) -> (state, loss, norm of the gradients before clipping)
    schedule(step) -> learning rate              count(params) -> how many parameters
    validate(params, windows) -> mean loss       write_model(out, state, link): OUT/model
    prove(params, data) -> (dict, line of text)  what a demo checks before its first step

with state["params"] the parameters. Each step is a function of (state, seed, step), so a run that was killed and
resumed gives, on the same devices, bitwise the losses of one that was not; on others, the same to rounding.
"""

import contextlib
import dataclasses
import math
import signal
import time
from pathlib import Path

from ringtide.models import BadInput, checkpoint, plot, run_folder
from ringtide.models import data as data_module


def run(kind, out, given, parallel, mesh, resume, say, progress, link) -> dict:
    """Trains in folder `out` and returns a summary. Raises BadInput, one line, for what the user can cure.

    kind: run_folder.Kind. given: the Settings that the user chose; with `resume` they must agree with the run's.
    parallel, mesh: over which devices, and how; a resumed run may differ in it. say: takes a line of text. progress:
    called with (metrics line, total steps) after each step. link: to the other processes, each of which makes the same
    call; only the first of them locks and writes, but for its share of a checkpoint, and `out` must be the same folder
    for all.
    """
    out, opened = Path(out), _reopen if resume else _begin
    if not link.first:
        say, progress = lambda line: None, None
    try:
        with opened(kind, out, given, parallel, mesh, say, link) as (trainer, data, params):
            return _loop(kind, out, trainer, data, params, say, progress, link)
    except OSError as error:
        later = "; go on later with --resume" if (out / "run.json").is_file() else ""
        raise BadInput(f"{error.filename or out}: {error.strerror or error}{later}") from None


@contextlib.contextmanager
def _begin(kind, out, given, parallel, mesh, say, link):
    """(trainer, Data, initial parameters or None) of a new run. Nothing is written before all is known to be right."""
    if link.first:
        run_folder.refuse_used(out, kind, given)
    if "init" in given and "preset" in given:
        raise BadInput("--preset: the model in --init has its own shape; leave one of the two out")
    settings = kind.settings(**given)
    source = Path(settings.data).resolve() if settings.data else None
    if source and source.is_dir() and out.resolve().is_relative_to(source):
        raise BadInput(f"--out {out}: lies in --data {source}, so the run would be its own data; choose another folder")
    data = _load(settings, settings.tokenizer, say)
    config, params = kind.model(settings, data.vocab_size)
    trainer = kind.trainer(config, settings, parallel, mesh, data.end)
    tokenizer = run_folder.sha256(settings.tokenizer)
    link.agree(data=data.fingerprint, model=dataclasses.asdict(config), tokenizer=tokenizer)
    with checkpoint.locked(out) if link.first else contextlib.nullcontext():
        if link.first:
            run_folder.refuse_used(out, kind, given, replace=True)
            run_folder.write(out, kind, settings, config, parallel, data.fingerprint, tokenizer)
        yield trainer, data, params


@contextlib.contextmanager
def _reopen(kind, out, given, parallel, mesh, say, link):
    """(trainer, Data, None) of the run in `out`, which go by run.json alone: --init may have gone since."""
    if not (out / "run.json").is_file():
        raise BadInput(f"--resume: no run in {out} (run.json is missing)")
    with checkpoint.locked(out) if link.first else contextlib.nullcontext():
        saved, settings, config = run_folder.read(out, kind)
        run_folder.refuse_other(saved["settings"], given, out)
        ours = out / "tokenizer.json"
        tokenizer = ours if settings.tokenizer and ours.is_file() else settings.tokenizer
        if run_folder.sha256(tokenizer) != saved["tokenizer_sha256"]:
            raise BadInput(f"--resume: the tokenizer {tokenizer} has changed since the run began")
        data = _load(settings, tokenizer, say)
        if saved["data_fingerprint"] != data.fingerprint:
            raise BadInput(f"--resume: the data of {out} has changed since the run began")
        trainer = kind.trainer(config, settings, parallel, mesh, data.end)
        link.agree(run=saved)
        before = {**saved["machine"], **saved["parallel"]}
        here = {**kind.machine(), **dataclasses.asdict(parallel)}
        changed = [name for name in here if before.get(name) != here[name]]
        if changed and link.first:
            was, now = (", ".join(f"{name} {x.get(name)}" for name in changed) for x in (before, here))
            say(f"resumed with {now}, before {was}: the losses may differ in the last bits")
            run_folder.write(out, kind, settings, config, parallel, data.fingerprint, saved["tokenizer_sha256"])
        yield trainer, data, None


def _load(settings, tokenizer, say):
    data = data_module.load(settings.data, settings.seq, tokenizer)
    if data.skipped:
        say(f"skipped {len(data.skipped)} files that are not text, the first: {data.skipped[0]}")
    return data


def _loop(kind, out, trainer, data, params, say, progress, link):
    settings, checkpoints = trainer.settings, out / "checkpoints"
    if link.first and settings.tokenizer and not (out / "tokenizer.json").is_file():
        checkpoint.write_atomically(out / "tokenizer.json", Path(settings.tokenizer).read_bytes())
    found = link.tell(checkpoint.find(checkpoints, say) if link.first else None)
    if found is None:
        if link.first:
            run_folder.refuse_lost(out, settings)
        if settings.init and params is None:  # killed before its first checkpoint
            config, params = kind.model(settings, data.vocab_size)
            if config != trainer.config:
                raise BadInput(f"--init {settings.init}: has another shape than when the run began")
        start, state = 0, trainer.fresh(settings.seed, params)
    else:
        start, state = found, trainer.restore(checkpoints, found)
    metrics = checkpoint.Metrics(out / "metrics.jsonl", -1 if found is None else found, say) if link.first else None
    windows = data.held_out_windows(settings.val_windows, settings.seq)
    unigram, bigram = data_module.entropies(*windows)
    count = trainer.count(state["params"])
    say(
        f"{count / 1e6:.2f} M parameters, {len(data.train):,} training and {len(data.held_out):,} held-out tokens, "
        f"{settings.seq:,} tokens a sequence, over {trainer.parallel.shards} of {trainer.parallel.devices} device(s), "
        f"step {start} of {settings.steps}"
    )
    summary = {"parameters": count, "unigram": unigram, "bigram": bigram}
    if settings.demo and start == 0:
        shown, line = trainer.prove(state["params"], data)
        summary |= shown
        say(line)
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
            loss, norm, done = float(loss), float(norm), step + 1
            seconds = time.perf_counter() - began
            for name, value in (("loss", loss), ("norm of the gradients", norm)):  # after that one weights are NaN
                if not math.isfinite(value):
                    cure = f"try a lower --lr; earlier checkpoints are in {out}"
                    raise BadInput(f"the {name} is {value} at step {done}: {cure}")
            line = {
                "step": done,
                "loss": loss,
                "grad_norm": norm,
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
                trainer.save(checkpoints, done, state, link)
            if stopping and done < settings.steps:
                return {**summary, "stopped": done}
    trainer.write_model(out, state, link)
    return {**summary, **_picture(out, metrics.lines, summary)} if link.first else summary


def _picture(out, lines, summary):
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
