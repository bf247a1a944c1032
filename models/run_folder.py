"""What defines a run, and the file that keeps it, run.json; which folders a run may not begin or go on in.

All that is wrong is a BadInput of one line. The other files of a run's folder are in checkpoint.py. Nothing here knows
a framework: what differs between the trainers is a Kind.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from ringtide.models import BadInput, checkpoint

_CHOICES = {"dtype": ("float32", "bfloat16")}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What defines a run: kept in run.json, a resumed run cannot change it. `ringtide train MODEL -h` explains each."""

    preset: str
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
    val_every: int = 100
    val_windows: int = 4
    ckpt_every: int = 100
    demo: bool = False
    presets: ClassVar[tuple[str, ...]]  # of the model

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, kind, value = field.name, field.type, getattr(self, field.name)
            if kind is float:
                fits = type(value) in (int, float) and 0 < value < math.inf
            elif kind is int:
                fits = type(value) is int and value >= (0 if name in ("warmup", "seed") else 1)
            else:
                known = self.presets if name == "preset" else _CHOICES.get(name, (value,))
                fits = isinstance(value, kind) and value in known
            if not fits:
                raise BadInput(f"--{name.replace('_', '-')}: {value!r} is not possible")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The model of a run, and what is made of the parts of its run.json."""

    name: str  # as in `ringtide train NAME`
    settings: type[Settings]
    config: Callable  # (dict) -> Config, or ValueError, KeyError, TypeError
    parallel: type  # a dataclass: how it lies over devices
    machine: Callable  # () -> dict: what, beside that, may change the last bits of a loss
    model: Callable  # (Settings, vocabulary) -> (Config, initial parameters or None)
    trainer: Callable  # (Config, Settings, parallel, mesh, token that ends a document or None) -> what loop.py runs


def read(out, kind: Kind):
    """(what run.json says, Settings, Config). Raises BadInput, one line, whatever is wrong in it."""
    path = out / "run.json"
    try:
        saved = json.loads(path.read_bytes())
        name = saved.get("kind", "llama")  # the first runs did not say
        if name == kind.name:
            kind.parallel(**saved["parallel"])
            for key, expected in {"machine": dict, "data_fingerprint": str, "tokenizer_sha256": str | None}.items():
                if not isinstance(saved[key], expected):
                    raise ValueError(f"{key} {saved[key]!r}")
            return saved, kind.settings(**saved["settings"]), kind.config(dict(saved["model"]))
    except KeyError as error:
        raise BadInput(f"{path}: not readable (the key {error} is missing)") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path}: not readable ({checkpoint.reason(error)})") from None
    raise BadInput(f"{path}: is of `ringtide train {name}`, not of {kind.name}: take that, or another folder")


def write(out, kind, settings, config, parallel, data_fingerprint, tokenizer_sha256):
    """Writes run.json: a folder that has one holds a run."""
    content = {
        "kind": kind.name,
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(config),
        "data_fingerprint": data_fingerprint,
        "tokenizer_sha256": tokenizer_sha256,
        "parallel": dataclasses.asdict(parallel),
        "machine": kind.machine(),
    }
    checkpoint.write_atomically(out / "run.json", json.dumps(content, indent=2) + "\n")


def sha256(path):
    """In hexadecimal, of a file; None of None."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


def refuse_used(out, kind, given, replace=False):
    """Refuses a folder that holds anything, except that a demo replaces the demo before it (when `replace`)."""
    if not out.exists():
        return
    if not out.is_dir():
        raise BadInput(f"--out {out}: is a file")
    # What a kill may leave behind is nothing.
    held = [path for path in out.iterdir() if not re.fullmatch(r"\.lock|\..*\.part|\.saving-gone-.*", path.name)]
    begun = (out / "run.json").is_file()
    demo = given.get("demo") and begun and read(out, kind)[1].demo
    if held and not demo:
        if begun and not replace:
            with checkpoint.locked(out):  # says so if it is in use
                pass
        cure = "go on with --resume, or choose another folder" if begun else "choose another folder"
        raise BadInput(f"--out {out}: already holds something; {cure}")
    if replace:  # run.json last: until then it is a demo, which may be replaced
        for path in sorted(held, key=lambda path: path.name == "run.json"):
            checkpoint.remove(path)


def refuse_lost(out, settings):
    """Refuses a run that had a checkpoint and has none: to start at step 0 would delete what is left of it."""
    last = max((line["step"] for line in checkpoint.read_metrics(out / "metrics.jsonl")[0]), default=0)
    if last > settings.ckpt_every or (out / "model").exists():
        raise BadInput(
            f"{out / 'checkpoints'}: no checkpoint is left, though the run came to step {last}: "
            "put them back, or start again with another --out"
        )


def refuse_other(saved, given, out):
    """Refuses settings that are given to a resumed run and are not its own."""
    for name, value in given.items():
        if saved.get(name) != value:
            option = name.replace("_", "-")
            raise BadInput(
                f"--{option} {value}: the run in {out} has {saved.get(name)}; leave --{option} out to go on, "
                "or start another --out"
            )
