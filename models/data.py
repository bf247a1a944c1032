"""Text or tokens in, batches out. The batch of step s is a pure function of (seed, s): nothing to save, exact resume.

source                    tokens                                        held out
None                      Python's standard library, as below           every 20th file, by a hash of its name
a folder                  its text files in order of name, each ended   the same
                          by the end token
a text file               its bytes, or what the tokenizer makes        the last twentieth
a .npy file               as they are, memory-mapped                    the last twentieth
"""

import hashlib
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ringtide.models import BadInput

_ONE_IN = 20  # files, or tokens, held out
_END = 0  # NUL ends a document among bytes: text holds none


@dataclass(frozen=True)
class Data:
    """Tokens, integer [any length] each. `fingerprint` tells whether a resumed run sees the same data."""

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    fingerprint: str
    skipped: tuple[str, ...] = field(default=())

    def batch(self, seed: int, step: int, batch: int, seq: int):
        """(tokens, targets), int32 [batch, seq] each: windows of the training tokens, targets one token later."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self.train) - seq, size=batch)
        return _windows(self.train, starts, seq)

    def held_out_windows(self, count: int, seq: int):
        """(tokens, targets), int32 [<= count, seq] each: windows spread evenly over the held-out tokens."""
        count = max(1, min(count, (len(self.held_out) - 1) // seq))
        starts = np.linspace(0, len(self.held_out) - seq - 1, count).astype(np.int64)
        return _windows(self.held_out, starts, seq)


def load(source: Path | str | None, seq: int, tokenizer: Path | str | None = None) -> Data:
    """Reads `source` (see the module). Raises BadInput, one line, when it cannot give windows of seq + 1 tokens."""
    source = Path(source) if source is not None else None
    if source is not None and not source.exists():
        raise BadInput(f"--data {source}: no such file or folder")
    if source is not None and source.is_file():
        data = _from_npy(source, tokenizer) if source.suffix == ".npy" else _from_file(source, tokenizer)
    else:
        data = _from_folder(source, tokenizer)
    where = source or "(the standard library)"
    for name, tokens in (("training", data.train), ("held-out", data.held_out)):
        if len(tokens) < seq + 1:
            raise BadInput(
                f"--data {where}: {len(tokens):,} {name} tokens, but --seq {seq} needs {seq + 1:,}: "
                "give more text or a shorter --seq"
            )
    return data


def entropies(tokens: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """(unigram, bigram) entropy in nats a token of int [B, T] targets, the second given the token before (`tokens`).

    The least loss that a model which knows only these frequencies could reach on exactly these tokens.
    """
    pair = tokens.astype(np.int64).ravel() * (int(max(tokens.max(), targets.max())) + 1) + targets.ravel()
    return _entropy(targets), _entropy(pair) - _entropy(tokens)


def load_tokenizer(path):
    """A tokenizers.Tokenizer from a tokenizer.json."""
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise BadInput(f"--tokenizer {path}: no such file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"--tokenizer {path}: not a tokenizer.json ({_line(error)})") from None


def _encoder(tokenizer):
    """(encode: str -> integer array, vocabulary, end token or None)."""
    if tokenizer is None:
        return lambda text: np.frombuffer(text.encode(), np.uint8), 256, _END
    tokenizer = load_tokenizer(tokenizer)
    vocab = tokenizer.get_vocab()
    end = next((vocab[t] for t in ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>") if t in vocab), None)
    encode = lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)
    return encode, max(vocab.values()) + 1, end


def _from_folder(folder, tokenizer) -> Data:
    encode, vocab_size, end = _encoder(tokenizer)
    parts, skipped, digest = {True: [], False: []}, [], hashlib.sha256()
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(_standard_library(root) if folder is None else _visible(root))
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            text = _text(path) if path.stat().st_size else ""
        except (BadInput, OSError) as error:
            skipped.append(f"{name}: {_line(error)}")
            continue
        if not text:
            continue
        digest.update(f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
        held = hashlib.sha256(name.encode()).digest()[0] % _ONE_IN == 0
        parts[held] += [encode(text), np.array([] if end is None else [end], np.uint8)]
    if not parts[True] and not parts[False]:
        why = f" ({len(skipped)} files, none of them text; the first is {skipped[0]})" if skipped else " (no files)"
        raise BadInput(f"--data {root}: nothing readable{why}")
    train, held_out = (np.concatenate(parts[held]) if parts[held] else None for held in (False, True))
    if train is None or held_out is None:  # too few files to spare one
        train, held_out = _split(train if held_out is None else held_out)
    return Data(train, held_out, vocab_size, digest.hexdigest(), tuple(skipped))


def _from_file(path, tokenizer) -> Data:
    encode, vocab_size, _ = _encoder(tokenizer)
    try:
        text = _text(path)
    except BadInput as error:
        raise BadInput(f"--data {path}: {error}") from None
    except OSError as error:
        raise BadInput(f"--data {path}: {error.strerror}") from None
    return Data(*_split(encode(text)), vocab_size, hashlib.sha256(text.encode()).hexdigest())


def _from_npy(path, tokenizer) -> Data:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BadInput(f"--data {path}: not a readable .npy ({_line(error)})") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise BadInput(f"--data {path}: expected integer tokens [T], got {tokens.dtype} {list(tokens.shape)}")
    if not len(tokens):
        raise BadInput(f"--data {path}: the file holds no tokens")
    low = high = int(tokens[0])
    digest = hashlib.sha256(f"{tokens.dtype} {len(tokens)}".encode())
    for start in range(0, len(tokens), 1 << 24):  # a bounded piece at a time
        piece = np.ascontiguousarray(tokens[start : start + (1 << 24)])
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
        digest.update(piece)
    vocab_size = _encoder(tokenizer)[1] if tokenizer is not None else high + 1
    if low < 0 or high >= min(vocab_size, 1 << 31):
        raise BadInput(f"--data {path}: tokens lie in [{low}, {high}], outside the vocabulary of {vocab_size}")
    return Data(*_split(tokens), vocab_size, digest.hexdigest())


def _text(path) -> str:
    raw = path.read_bytes()
    if not raw:
        raise BadInput("the file is empty")
    if (nul := raw.find(b"\0")) >= 0:
        raise BadInput(f"not text: a NUL byte at {nul} (tokens are read from .npy files)")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"not UTF-8 text: byte 0x{raw[error.start]:02x} at {error.start}") from None


def _visible(root):
    """The files of a folder, without hidden files and folders."""
    return (p for p in root.rglob("*") if p.is_file() and not any(s.startswith(".") for s in p.relative_to(root).parts))


def _standard_library(root):
    """Its modules: without installed packages, its own tests, and the tables that are no text in any language."""
    out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
    names = (p for p in root.rglob("*.py") if not out & set(p.relative_to(root).parts))
    return (p for p in names if p.is_file() and not p.name.startswith("_sysconfigdata"))


def _split(tokens):
    cut = len(tokens) - max(1, len(tokens) // _ONE_IN)
    return tokens[:cut], tokens[cut:]


def _windows(tokens, starts, seq):
    rows = np.stack([tokens[s : s + seq + 1] for s in starts]).astype(np.int32)  # [batch, seq + 1]
    return rows[:, :-1], rows[:, 1:]


def _entropy(symbols) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


def _line(error) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
