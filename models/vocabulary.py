"""Between text and tokens: bytes or a tokenizer.json, and the choice of the next token. NumPy alone."""

import codecs
import math
from pathlib import Path

import numpy as np

from ringtide.models import BadInput
from ringtide.models.data import load_tokenizer


class Bytes:
    """The vocabulary of bytes, with the two methods of a tokenizer that generation needs."""

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text)) or [0]  # 0 ends a document, so what follows begins one

    def decoder(self):
        """A function from one token to the text that it completes."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return lambda token: decode(bytes([token]))


class Tokens:
    """A tokenizer.json of the tokenizers library."""

    def __init__(self, path):
        self._tokenizer = load_tokenizer(path)
        self.size = max(self._tokenizer.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        # As in training, where a text is followed by an end token and begins with none. But an empty prompt needs some
        # token to go on from: the one that begins a text, if there is one.
        ids = self._tokenizer.encode(_utf8(text).decode(), add_special_tokens=not text).ids
        if not ids:
            raise BadInput("--prompt: this tokenizer makes no token of it: give a longer one")
        return ids

    def decoder(self):
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


def choose(folder, vocab_size: int, tokenizer=None, ready=False):
    """Bytes | Tokens for the model of `folder`, the --ckpt of a command. tokenizer: a path, or None for the folder's
    own tokenizer.json, or bytes. ready: it was trained on ready-made tokens, so that bytes are not meant.
    """
    if tokenizer is None and (Path(folder) / "tokenizer.json").exists():
        tokenizer = Path(folder) / "tokenizer.json"
    if tokenizer is None and (ready or vocab_size != 256):
        raise BadInput(f"--ckpt {folder}: not a model of bytes: pass its --tokenizer tokenizer.json")
    if tokenizer is None:
        return Bytes()
    tokens = Tokens(tokenizer)
    if tokens.size > vocab_size:  # a model may have more, rounded up, but never less
        raise BadInput(
            f"--tokenizer {tokenizer}: has {tokens.size} tokens, the model of {folder} only {vocab_size}: "
            "pass the one that belongs to it"
        )
    return tokens


def check(prompt: list[int], temperature: float, vocab_size: int) -> None:
    """Refuses what no token can be drawn with."""
    if not 0 <= temperature < math.inf:
        raise BadInput(f"--temperature {temperature}: give a finite number of at least 0")
    if max(prompt) >= vocab_size:
        raise BadInput(f"--tokenizer: token {max(prompt)} is outside the model's vocabulary of {vocab_size}")


def draw(logits, temperature, top_k, random) -> int:
    """A token by its float64 logits [V]. temperature 0: the likeliest; top_k 0: from all. random: NumPy's Generator."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.partition(logits, -top_k)[-top_k], -np.inf, logits)
    with np.errstate(over="ignore"):  # at a tiny temperature: exp(-inf) = 0 is what is meant
        p = np.exp((logits - logits.max()) / temperature)
    return int(random.choice(len(p), p=p / p.sum()))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"--prompt {text!a}: not UTF-8 text") from None
