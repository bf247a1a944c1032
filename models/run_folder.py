"""What defines a run, and the file that keeps it, run.json; which folders a run may not begin or go on in.

All that is wrong is a BadInput of one line. The other files of a run's folder are in checkpoint.py.
"""

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path

import jax

from ringtide.models import BadInput, checkpoint, llama
from ringtide.models.sharding import Parallel

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


def read(out):
    """(what run.json says, Settings, Config). Raises BadInput, one line, whatever is wrong in it."""
    try:
        saved = json.loads((out / "run.json").read_bytes())
        model = dict(saved["model"])
        if model["rope_scaling"] is not None:
            model["rope_scaling"] = llama.Scaling(**model["rope_scaling"])
        Parallel(**saved["parallel"])
        if not isinstance(saved["machine"], dict) or not isinstance(saved["data_fingerprint"], str):
            raise ValueError(f"machine {saved['machine']!r}, data_fingerprint {saved['data_fingerprint']!r}")
        return saved, Settings(**saved["settings"]), llama.Config(**model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{out / 'run.json'}: not readable ({checkpoint.reason(error)})") from None


def write(out, settings, config, parallel, data_fingerprint, tokenizer_sha256):
    """Writes run.json: a folder that has one holds a run."""
    content = {
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(config),
        "data_fingerprint": data_fingerprint,
        "tokenizer_sha256": tokenizer_sha256,
        "parallel": dataclasses.asdict(parallel),
        "machine": machine(),
    }
    checkpoint.write_atomically(out / "run.json", json.dumps(content, indent=2) + "\n")


def machine():
    """What, beside `Parallel`, may change the last bits of a loss."""
    return {"platform": jax.devices()[0].platform, "jax": jax.__version__}


def sha256(path):
    """In hexadecimal, of a file; None of None."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None


def refuse_used(out, given, replace=False):
    """Refuses a folder that holds anything, except that a demo replaces the demo before it (when `replace`)."""
    if not out.exists():
        return
    if not out.is_dir():
        raise BadInput(f"--out {out}: is a file")
    # What a kill may leave behind is nothing.
    held = [path for path in out.iterdir() if not re.fullmatch(r"\.lock|\..*\.part|\.saving-gone-.*", path.name)]
    begun = (out / "run.json").is_file()
    demo = given.get("demo") and begun and read(out)[1].demo
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
