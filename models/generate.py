"""Text from a trained model, a token at a time: a run's folder or one in Hugging Face's format, a static KV cache."""

import codecs
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ringtide.models import BadInput, checkpoint, line, llama, run_folder, train, weights
from ringtide.models.data import load_tokenizer
from ringtide.models.sharding import Parallel, make_mesh


class Bytes:
    """The vocabulary of bytes, with the two methods of a tokenizer that `stream` needs."""

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


def load(folder, tokenizer=None, warn=print):
    """(params, config, Bytes | Tokens) of a run's folder (its last whole checkpoint) or of Hugging Face's format."""
    folder = Path(folder)
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise BadInput(f"--ckpt {folder}: {line(error)}") from None
    ready = False  # was it trained on ready-made tokens?
    if "run.json" in names:
        _, settings, config = run_folder.read(folder)
        alone = Parallel()
        trainer = train.Trainer(config, settings, alone, make_mesh(alone))
        found = checkpoint.restore(folder / "checkpoints", trainer.like(), warn, owner=False)
        if found is None:
            raise BadInput(f"--ckpt {folder}: no checkpoint yet")
        params = found[1]["params"]
        ready = (settings.data or "").endswith(".npy")
    elif "config.json" in names:
        params, config = weights.load(folder)
    else:
        raise BadInput(f"--ckpt {folder}: neither a run (run.json) nor a model (config.json)")
    if tokenizer is None and "tokenizer.json" in names:
        tokenizer = folder / "tokenizer.json"
    if tokenizer is None and (ready or config.vocab_size != 256):
        raise BadInput(f"--ckpt {folder}: not a model of bytes: pass its --tokenizer tokenizer.json")
    if tokenizer is None:
        return params, config, Bytes()
    tokens = Tokens(tokenizer)
    if tokens.size > config.vocab_size:  # a model may have more, rounded up, but never less
        raise BadInput(
            f"--tokenizer {tokenizer}: has {tokens.size} tokens, the model of {folder} only {config.vocab_size}: "
            "pass the one that belongs to it"
        )
    return params, config, tokens


def stream(params, config: llama.Config, prompt: list[int], count: int, temperature=0.8, top_k=40, seed=0):
    """An iterator of `count` tokens after the prompt. temperature 0: always the likeliest; top_k 0: from all tokens."""
    if not 0 <= temperature < math.inf:
        raise BadInput(f"--temperature {temperature}: give a finite number of at least 0")
    if max(prompt) >= config.vocab_size:
        raise BadInput(f"--tokenizer: token {max(prompt)} is outside the model's vocabulary of {config.vocab_size}")
    # The power of two above, so that prompts of other lengths find the step for one token compiled.
    length = 1 << (len(prompt) + count - 1).bit_length()
    need = 2 * 4 * length * config.layers * config.kv_heads * config.head_dim  # keys and values, float32
    have = (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or _host_memory()
    if need > have or length > 1 << 31:
        raise BadInput(
            f"--tokens {count}: {length:,} slots of keys and values, {need / 2**30:,.1f} GiB; "
            f"here {have / 2**30:,.1f} GiB and anywhere 2^31 slots are the most: ask for fewer"
        )
    random = np.random.default_rng(seed)

    def steps():
        on_device = jax.tree.map(jnp.asarray, params)
        cache = llama.new_cache(config, 1, length)
        tokens, start = np.array([prompt], np.int32), 0
        for _ in range(count):
            logits, cache = llama.extend(on_device, cache, tokens, np.int32(start), config)
            start += tokens.shape[1]
            logits = np.asarray(logits[0], np.float64)
            if not np.isfinite(logits).all():
                raise BadInput("--ckpt: the model's logits are not finite: its weights are damaged, take another one")
            token = _draw(logits, temperature, top_k, random)
            yield token
            tokens = np.array([[token]], np.int32)

    return steps()  # so that what is wrong is said at the call, before anything is shown


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"--prompt {text!a}: not UTF-8 text") from None


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _draw(logits, temperature, top_k, random) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = np.where(logits < np.partition(logits, -top_k)[-top_k], -np.inf, logits)
    with np.errstate(over="ignore"):  # at a tiny temperature: exp(-inf) = 0 is what is meant
        p = np.exp((logits - logits.max()) / temperature)
    return int(random.choice(len(p), p=p / p.sum()))
