"""A run's folder: locked while in use, with checkpoints that are whole or not there, and metrics without gaps.

    OUT/run.json                     what the run was started with
    OUT/metrics.jsonl                one line a step
    OUT/checkpoints/step-00000100/   state/ by the trainer, manifest.json: the SHA-256 of every file of it

A checkpoint is written under another name and renamed when the manifest is on the disk, so kill -9 leaves it whole or
not at all. One that was damaged afterwards fails its manifest: it is named and set aside, and the one before is used.
While none is whole, nothing is set aside: every resume is refused, and none starts at step 0.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from ringtide.models import BadInput

KEEP = 3
_PREFIX = "step-"


@contextlib.contextmanager
def locked(folder: Path):
    """Holds the folder (created when missing) for this process; the kernel lets go of it however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BadInput(f"--out {folder}: in use by process {file.read().strip() or '?'}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file has its old content or this one, never a part."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync(path.parent)


class Metrics:
    """metrics.jsonl: one JSON object a line, each with its "step"."""

    def __init__(self, path: Path, last: int, warn=print):
        """Keeps the whole lines up to step `last`: what came after the checkpoint will come again.

        A file with damage is kept beside the new one, as metrics.jsonl.damaged. warn: called with one line when steps
        are missing.
        """
        lines, damaged = read_metrics(path)
        self.lines = [line for line in lines if line["step"] <= last]
        missing = sorted(set(range(last + 1)) - {line["step"] for line in self.lines})
        if damaged:
            write_atomically(path.with_name(f"{path.name}.damaged"), path.read_bytes())
        if missing or damaged:
            what = f"{len(missing)} of the steps 0 to {last} are missing, the first is {missing[0]}" if missing else ""
            kept = f"it is damaged and kept as {path.name}.damaged" if damaged else ""
            warn(f"{path}: {'; '.join(filter(None, (what, kept)))}")
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self._file = open(path, "a")  # noqa: SIM115  open as long as the run

    def write(self, line: dict) -> None:
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())


def read_metrics(path: Path) -> tuple[list[dict], bool]:
    """(the lines that are whole, whether others are damaged); a last one that a kill cut short is no damage."""
    if not path.is_file():
        return [], False
    *whole, last = path.read_bytes().split(b"\n")
    lines = [_metric(line) for line in whole]
    return [line for line in (*lines, _metric(last)) if line], None in lines


def _metric(raw: bytes) -> dict | None:
    """A line of metrics.jsonl, or None when it is none: all that is in one are numbers, "step" an integer."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(line, dict) and all(isinstance(x, int | float) for x in line.values())
    return line if numbers and type(line.get("step")) is int else None


def save(folder: Path, step: int, state, first=True, ready=lambda: None) -> Path:
    """`write`, of a pytree of JAX arrays, by orbax, which lets no process go on before all have written."""
    import jax
    import orbax.checkpoint as ocp

    def fill(path):
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.StandardSave(state))

    return write(folder, step, fill, sum(x.nbytes for x in jax.tree.leaves(state)), first, ready)


def write(folder: Path, step: int, fill, size: int, first=True, ready=lambda: None) -> Path:
    """Writes checkpoint `step`, then lets go of all but the last KEEP. Returns its folder.

    Of several processes each fills in its part; the `first` does the rest. fill: called with a folder that is not there
    yet, returns when all processes have written their files into it. size: bytes of them all. ready: returns when the
    first has come so far.
    Raises BadInput, one line, when it cannot be written (a full disk); then nothing has changed.
    """
    part, final = folder / f".saving-{step:08d}", place(folder, step)
    try:
        if first:
            remove(part)
            part.mkdir(parents=True)
            _reserve(part / "room", size + (1 << 20))
        ready()
        fill(part / "state")
        if not first:
            return final
        write_atomically(part / "manifest.json", json.dumps({"step": step, "files": _hashes(part / "state")}))
        remove(final)
        os.replace(part, final)
        _sync(folder)
    except Exception as error:  # orbax passes a full disk on as ValueError
        if first:
            remove(part)
        kept = f"checkpoint {steps(folder)[-1]} and those before are intact" if steps(folder) else "there is none yet"
        raise BadInput(f"checkpoint {step} could not be saved in {folder} ({reason(error)}); {kept}") from None
    for old in steps(folder)[:-KEEP]:
        remove(place(folder, old))
    for damaged in folder.glob("damaged-*"):
        remove(damaged)
    return final


def restore(folder: Path, like, warn=print, owner=True):
    """(step, state) of the last checkpoint that is whole, or None when there is none at all: `find`, then `read`."""
    step = find(folder, warn, owner)
    return None if step is None else (step, read(folder, step, like))


def find(folder: Path, warn=print, owner=True) -> int | None:
    """The step of the last checkpoint that is whole, or None when there is none at all.

    warn: called with a line for each damaged checkpoint. The owner of the run also tidies: those are renamed
    `damaged-...` and deleted once a newer one is saved.
    Raises BadInput if all of them are damaged, or if one cannot be read: that says nothing of what it holds.
    """
    for leftover in folder.glob(".saving-*") if owner else ():
        remove(leftover)
    damaged = []
    for step in reversed(steps(folder)):
        path = place(folder, step)
        try:
            verify(path)
        except ValueError as error:
            warn(f"checkpoint {path} is damaged ({reason(error)}): using the one before")
            damaged.append(path)
            continue
        except OSError as error:
            raise BadInput(f"checkpoint {path} cannot be read ({reason(error)}): nothing was changed") from None
        for other in damaged if owner else ():
            remove(other.with_name(f"damaged-{other.name}"))
            other.rename(other.with_name(f"damaged-{other.name}"))
        return step
    if damaged or any(folder.glob("damaged-*")):
        raise BadInput(f"every checkpoint in {folder} is damaged: start again with another --out")
    return None


def read(folder: Path, step: int, like):
    """The state in checkpoint `step`. like: a pytree of jax.ShapeDtypeStruct with shardings, those of now."""
    import orbax.checkpoint as ocp

    path = place(folder, step)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return checkpointer.restore((path / "state").absolute(), args=ocp.args.StandardRestore(like))
    except ValueError as error:  # whole, but of another model
        raise BadInput(f"checkpoint {path} does not fit its run.json ({reason(error)})") from None


def verify(path: Path) -> None:
    """Raises ValueError naming the first file that is not what the manifest says; OSError where one cannot be read."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        step, want = int(manifest["step"]), dict(manifest["files"])
    except FileNotFoundError:
        raise ValueError("manifest.json is missing") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError("manifest.json is not readable") from None
    if path.name != f"{_PREFIX}{step:08d}":
        raise ValueError(f"manifest.json is that of step {step}")
    have = _hashes(path / "state")
    if not have:
        raise ValueError("state is missing")
    for name in sorted(want.keys() | have.keys()):
        if want.get(name) != have.get(name):
            what = "is missing" if name not in have else "is not in the manifest" if name not in want else "has changed"
            raise ValueError(f"state/{name} {what}")


def place(folder: Path, step: int) -> Path:
    """The folder of checkpoint `step`."""
    return folder / f"{_PREFIX}{step:08d}"


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints, ascending, damaged or not."""
    try:
        names = os.listdir(folder) if folder.exists() else ()  # glob takes what cannot be read for empty
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror}") from None
    found = (re.fullmatch(_PREFIX + "([0-9]{8}|[1-9][0-9]{8,})", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def reason(error: Exception) -> str:
    """An error as a part of one line, and the system's own words when the disk is at fault."""
    text = " ".join(str(error).split()) or type(error).__name__
    for cause in ("No space left on device", "File too large", "Disk quota exceeded"):
        if cause in text:
            return text[text.index(cause) :].partition(" [")[0]
    return text if len(text) < 200 else text[:200] + "..."


def _hashes(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of every file below. What is there and cannot be read is an OSError: rglob would skip it."""

    def stop(error):
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    files = (Path(place, name) for place, _, names in os.walk(folder, onerror=stop) for name in names)
    return {p.relative_to(folder).as_posix(): _hash(p) for p in sorted(files)}


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Puts the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Deletes a file or folder; a folder under another name, so that a kill in between leaves no half checkpoint."""
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f".saving-gone-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    """Raises OSError where a file of `size` bytes does not fit: asked first, as orbax fails with many tracebacks."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        path.unlink()
