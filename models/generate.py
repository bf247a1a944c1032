"""Text from a trained model, a token at a time: a run's folder or one in Hugging Face's format, a static KV cache."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ringtide.models import BadInput, checkpoint, line, llama, run_folder, train, vocabulary, weights
from ringtide.models.sharding import Parallel, make_mesh


def load(folder, tokenizer=None, warn=print):
    """(params, config, vocabulary) of a run's folder (its last whole checkpoint) or of Hugging Face's format."""
    folder = Path(folder)
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise BadInput(f"--ckpt {folder}: {line(error)}") from None
    ready = False  # was it trained on ready-made tokens?
    if "run.json" in names:
        _, settings, config = run_folder.read(folder, train.KIND)
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
    return params, config, vocabulary.choose(folder, config.vocab_size, tokenizer, ready)


def stream(params, config: llama.Config, prompt: list[int], count: int, temperature=0.8, top_k=40, seed=0):
    """An iterator of `count` tokens after the prompt. temperature 0: always the likeliest; top_k 0: from all tokens."""
    vocabulary.check(prompt, temperature, config.vocab_size)
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
            token = vocabulary.draw(logits, temperature, top_k, random)
            yield token
            tokens = np.array([[token]], np.int32)

    return steps()  # so that what is wrong is said at the call, before anything is shown


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
