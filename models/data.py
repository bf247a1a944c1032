"""Text or tokens in, batches out. The batch of step s is a pure function of (seed, s): nothing to save, exact resume.

source                    tokens                                        held out
None                      Python's standard library, as below           every 20th file, by a hash of its name
a folder                  its text files in order of name, each ended   the same
                          by the end token
a text file               its bytes, or what the tokenizer makes        the last twentieth
a .npy file               as they are, memory-mapped                    the last twentieth
"""

import hashlib
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringtide.models import BadInput, line

_ONE_IN = 20  # files, or tokens, held out
_END = 0  # NUL ends a document among bytes: text holds none
_LARGEST = 16 << 30  # bytes of one text file: it is read into memory whole, a .npy is not


@dataclass(frozen=True)
class Data:
    """Tokens, integer [any length] each. `fingerprint` tells whether a resumed run sees the same data. `end`: the token
    that ends a document, or None where there is none."""

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    fingerprint: str
    skipped: tuple[str, ...] = ()
    end: int | None = None

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
    mode = None if source is None else _mode(source, f"--data {source}", "no such file or folder")
    if mode is None or stat.S_ISDIR(mode):
        data = _from_folder(source, tokenizer)
    elif stat.S_ISREG(mode):
        data = _from_npy(source, tokenizer) if source.suffix == ".npy" else _from_file(source, tokenizer)
    else:
        raise BadInput(f"--data {source}: neither a file nor a folder: copy what it gives into a file")
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

    if not stat.S_ISREG(_mode(Path(path), f"--tokenizer {path}", "no such file")):
        raise BadInput(f"--tokenizer {path}: not a file: give the path of a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"--tokenizer {path}: not a tokenizer.json ({line(error)})") from None
    if not tokenizer.get_vocab_size():
        raise BadInput(f"--tokenizer {path}: its vocabulary is empty: train it first")
    # A file may carry the settings of some earlier use, which would cut every text, or fill it up, in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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

    def skip(path, error):  # names need not be UTF-8, messages must
        name = os.fsencode(os.path.relpath(path, root)).decode(errors="backslashreplace")
        skipped.append(f"{name}: {line(error)}")

    unreadable = lambda error: skip(error.filename, error)
    files = sorted(_standard_library(root) if folder is None else _visible(root, unreadable))
    for path in files:
        name = os.fsencode(path.relative_to(root).as_posix())
        try:
            text = _text(path) if path.stat().st_size else ""  # a pipe has size 0 too: never opened
        except (BadInput, OSError) as error:
            skip(path, error)
            continue
        if not text:
            continue
        digest.update(b"%s\0%s\n" % (name, hashlib.sha256(text.encode()).hexdigest().encode()))
        held = hashlib.sha256(name).digest()[0] % _ONE_IN == 0
        parts[held] += [encode(text), np.array([] if end is None else [end], np.uint8)]
    if not parts[True] and not parts[False]:
        why = f" ({len(skipped)} skipped, the first is {skipped[0]})" if skipped else " (no files)"
        raise BadInput(f"--data {root}: nothing readable{why}")
    train, held_out = (np.concatenate(parts[held]) if parts[held] else None for held in (False, True))
    if train is None or held_out is None:  # too few files to spare one
        train, held_out = _split(train if held_out is None else held_out)
    return Data(train, held_out, vocab_size, digest.hexdigest(), tuple(skipped), end)


def _from_file(path, tokenizer) -> Data:
    encode, vocab_size, end = _encoder(tokenizer)
    try:
        text = _text(path)
    except (BadInput, OSError) as error:
        raise BadInput(f"--data {path}: {line(error)}") from None
    return Data(*_split(encode(text)), vocab_size, hashlib.sha256(text.encode()).hexdigest(), end=end)


def _from_npy(path, tokenizer) -> Data:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")  # not np.load: that takes archives and pickles too
    except Exception as error:  # a broken header raises almost anything
        raise BadInput(f"--data {path}: not a readable .npy ({line(error)})") from None
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
    _, vocab_size, end = _encoder(tokenizer) if tokenizer is not None else (None, high + 1, None)
    if high >= 1 << 31:
        raise BadInput(f"--data {path}: holds token {high}, a token must be below 2^31 = {1 << 31}")
    if low < 0 or high >= vocab_size:
        raise BadInput(f"--data {path}: tokens lie in [{low}, {high}], outside the vocabulary of {vocab_size}")
    return Data(*_split(tokens), vocab_size, digest.hexdigest(), end=end)


def _text(path) -> str:
    if (size := path.stat().st_size) > _LARGEST:
        raise BadInput(f"{size:,} bytes, more than {_LARGEST >> 30} GiB: turn it into a .npy of tokens")
    raw = path.read_bytes()
    if not raw:
        raise BadInput("the file is empty")
    if (nul := raw.find(b"\0")) >= 0:
        raise BadInput(f"not text: a NUL byte at {nul} (tokens are read from .npy files)")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"not UTF-8 text: byte 0x{raw[error.start]:02x} at {error.start}") from None


def _mode(path, where, missing) -> int:
    """What kind of thing lies at `path`: the st_mode of stat."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{where}: {missing}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"{where}: {line(error)}") from None


def _visible(root, unreadable):
    """What a folder holds, without hidden files and folders. `unreadable` is told of folders that cannot be listed."""
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


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
