"""Data: exact resume by construction, honest entropies, and one clear line for every bad input."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from ringtide.models import BadInput, data

TEXT = "".join(f"line {i} of a small text\n" for i in range(400))


def test_a_batch_is_a_function_of_seed_and_step(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    d = data.load(tmp_path / "a.txt", 32)
    tokens, targets = d.batch(3, 7, 4, 32)
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert bytes(tokens[0].astype(np.uint8)).decode() in TEXT
    again = data.load(tmp_path / "a.txt", 32)
    np.testing.assert_array_equal(again.batch(3, 7, 4, 32)[0], tokens)
    assert again.fingerprint == d.fingerprint
    assert not np.array_equal(d.batch(3, 8, 4, 32)[0], tokens)
    assert not np.array_equal(d.batch(4, 7, 4, 32)[0], tokens)
    assert len(d.train) + len(d.held_out) == len(TEXT)


def test_the_standard_library_is_the_default():
    d = data.load(None, 8192)
    assert d.vocab_size == 256
    assert len(d.train) > 1e6
    tokens, targets = d.held_out_windows(4, 512)
    assert tokens.shape == (4, 512)
    unigram, bigram = data.entropies(tokens, targets)
    assert 0.5 < bigram < unigram < np.log(256)


def test_a_folder_ends_each_file_and_holds_files_out(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"<{i}>" * 30)
    (tmp_path / "junk.bin").write_bytes(bytes(range(256)))
    (tmp_path / ".hidden").write_text("secret")
    d = data.load(tmp_path, 16)
    train, held = (bytes(x.astype(np.uint8)) for x in (d.train, d.held_out))
    assert train.count(b"\0") + held.count(b"\0") == 60
    assert all((f"<{i}>".encode() in train) != (f"<{i}>".encode() in held) for i in range(60))
    assert b"secret" not in train + held
    assert len(d.skipped) == 1
    assert "junk.bin: not text" in d.skipped[0]


def test_entropies_of_a_known_source():
    x = np.array([[0, 1, 0, 1, 0, 1, 0, 1]])
    unigram, bigram = data.entropies(x, 1 - x)
    assert unigram == pytest.approx(np.log(2))
    assert bigram == pytest.approx(0)


def test_tokens_from_npy(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16) % 300)
    d = data.load(tmp_path / "t.npy", 16)
    assert d.vocab_size == 300
    assert isinstance(d.train, np.memmap)
    assert len(d.held_out) == 50


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(100), r"expected integer tokens \[T\], got float64 \[100\]"),
        (np.zeros((10, 10), int), r"expected integer tokens \[T\], got int64 \[10, 10\]"),
        (np.zeros(0, int), "holds no tokens"),
        (np.arange(-1, 99), r"tokens lie in \[-1, 98\], outside the vocabulary"),
        (np.array([2**32 - 1] * 100, np.uint32), r"holds token 4294967295, a token must be below 2\^31"),
        (np.array([object()]), "not a readable .npy"),
    ],
)
def test_bad_npy_is_named(tmp_path, array, message):
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    with pytest.raises(BadInput, match=message):
        data.load(tmp_path / "t.npy", 16)


@pytest.mark.parametrize("content", [b"some text", b"", "archive", "half an archive", b"\x93NUMPY\x01\x00\x03\x00((("])
def test_what_is_no_npy_is_named(tmp_path, content):
    if isinstance(content, str):
        np.savez(tmp_path / "a.npz", np.arange(100))
        archive = (tmp_path / "a.npz").read_bytes()
        content = archive if content == "archive" else archive[:100]
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(BadInput, match=r"t\.npy: not a readable \.npy \(") as caught:
        data.load(tmp_path / "t.npy", 16)
    assert "\n" not in str(caught.value)
    assert "pickle" not in str(caught.value)


def test_a_tokenizer_of_the_tokenizers_library(tmp_path):
    path = make_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text("the cat and the dog " * 100)
    d = data.load(tmp_path / "a.txt", 16, path)
    assert d.vocab_size == 5
    assert set(d.train) == {1, 2, 3, 4}
    np.save(tmp_path / "t.npy", np.full(100, 5))
    with pytest.raises(BadInput, match="outside the vocabulary of 5"):
        data.load(tmp_path / "t.npy", 16, path)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(BadInput, match=r"bad\.json: not a tokenizer\.json"):
        data.load(tmp_path / "a.txt", 16, tmp_path / "bad.json")
    with pytest.raises(BadInput, match="no such file"):
        data.load(tmp_path / "a.txt", 16, tmp_path / "none.json")
    with pytest.raises(BadInput, match=r"not a file: give the path of a tokenizer\.json"):
        data.load(tmp_path / "a.txt", 16, tmp_path)


def test_a_tokenizer_neither_cuts_nor_pads(tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path)))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=2048)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the cat and the dog " * 100)
    d = data.load(tmp_path / "a.txt", 16, tmp_path / "tokenizer.json")
    assert len(d.train) + len(d.held_out) == 500


def test_an_empty_tokenizer_is_named(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(BadInput, match=r"tokenizer\.json: its vocabulary is empty: train it first"):
        data.load(tmp_path / "a.txt", 16, tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"text\0text", "a NUL byte at 4"),
        (b"caf\xe9", r"byte 0xe9 at 3"),
        (b"short", "5? ?4? .* tokens, but --seq 16 needs 17"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        data.load(tmp_path / "a", 16)
    assert str(tmp_path / "a") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(BadInput, match="no such file or folder"):
        data.load(tmp_path / "none", 16)
    with pytest.raises(BadInput, match=r"nothing readable \(no files\)"):
        data.load(tmp_path, 16)
    (tmp_path / "x").write_bytes(b"\0")
    with pytest.raises(BadInput, match=r"nothing readable \(1 skipped, the first is x: not text"):
        data.load(tmp_path, 16)


def test_names_need_not_be_utf8(tmp_path):
    for name in (b"a\xff.txt", b"b.txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text(TEXT)
    Path(os.fsdecode(bytes(tmp_path) + b"/c\xfe.bin")).write_bytes(b"\0")
    d = data.load(tmp_path, 16)
    assert len(d.train) + len(d.held_out) == 2 * len(TEXT) + 2
    assert d.skipped[0].startswith("c\\xfe.bin: not text")


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", "a.txt/b"])
def test_names_that_cannot_be_are_named(tmp_path, name):
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(BadInput, match=r"^--data .*: (File name too long|embedded null byte|no such file or folder)$"):
        data.load(tmp_path / name, 16)
    with pytest.raises(BadInput, match=r"^--tokenizer .*: (File name too long|embedded null byte|no such file)$"):
        data.load(tmp_path / "a.txt", 16, tmp_path / name)


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    """As for a user who is not root: a folder that cannot be listed, one with r but not x."""
    for name in ("closed/a.txt", "listed/b.txt", "open/c.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(TEXT)
    scandir, status = os.scandir, Path.stat

    def refuse(path, closed, otherwise):
        if Path(path).name == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return otherwise(path)

    monkeypatch.setattr(os, "scandir", lambda path: refuse(path, "closed", scandir))
    monkeypatch.setattr(Path, "stat", lambda path, **_: refuse(path, "b.txt", status))
    d = data.load(tmp_path, 16)
    assert d.skipped == ("closed: Permission denied", "listed/b.txt: Permission denied")
    with pytest.raises(BadInput, match=r"b\.txt: Permission denied"):
        data.load(tmp_path / "listed" / "b.txt", 16)


def test_what_is_too_large_or_endless_is_refused(tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(8 << 40)  # sparse
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match=r"a\.txt: 8,796,093,022,208 bytes, more than 16 GiB: turn it into a \.npy"):
        data.load(tmp_path / "a.txt", 16)
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(BadInput, match="neither a file nor a folder: copy what it gives into a file"):
            data.load(path, 16)
    (tmp_path / "b.txt").write_text(TEXT)
    assert [name.partition(":")[0] for name in data.load(tmp_path, 16).skipped] == ["a.txt"]


def make_tokenizer(folder):
    """A word-level tokenizer.json of five words."""
    vocab = {"[UNK]": 0, "the": 1, "cat": 2, "and": 3, "dog": 4}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    rest = dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"])
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model, **rest}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spec))
    return path
