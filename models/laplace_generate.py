"""Text from a trained Laplace, any number of prompts at once, each in a state of fixed size."""

import itertools
import os
from pathlib import Path

import numpy as np

from ringtide.models import BadInput, laplace_weights, line, vocabulary
from ringtide.models.laplace import state_bytes
from ringtide.torch import StatePool

SLOTS = 256  # prompts at once, at most
CHUNK = 256  # tokens of a prompt at once, at most


def load(folder, tokenizer=None, warn=print):
    """(model, vocabulary) of a run's folder (its last whole checkpoint) or of a model in fla's format."""
    folder = Path(folder)
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise BadInput(f"--ckpt {folder}: {line(error)}") from None
    ready = False  # was it trained on ready-made tokens?
    if "run.json" in names:
        from ringtide.models import laplace_train

        model, settings = laplace_train.load(folder, warn)
        ready = (settings.data or "").endswith(".npy")
    elif "config.json" in names:
        model = laplace_weights.load(folder, dtype=None)
    else:
        raise BadInput(f"--ckpt {folder}: neither a run (run.json) nor a model (config.json)")
    return model.eval(), vocabulary.choose(folder, model.config.vocab_size, tokenizer, ready)


def stream(model, prompts: list[list[int]], count: int, temperature=0.8, top_k=40, seed=0):
    """An iterator of {index of the prompt: its next token}, `count` tokens after each prompt.

    temperature 0: always the likeliest; top_k 0: from all tokens. What follows a prompt does not depend on the others,
    but on its place among them, and on how many there are: the sums are rounded otherwise in another shape.
    """
    for prompt in prompts:
        vocabulary.check(prompt, temperature, model.config.vocab_size)
    slots = min(len(prompts), SLOTS)
    need = slots * state_bytes(model.config, model.model.embeddings.weight.dtype)
    if need > (have := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise BadInput(
            f"--prompt: {slots} states take {need / 2**30:,.1f} GiB, here are {have / 2**30:,.1f}: give fewer"
        )
    longest = max(map(len, prompts))
    pool = StatePool(model, slots, chunk=min(CHUNK, 1 << (longest - 1).bit_length()), rows=min(slots, 4))

    def chooser(i):
        if temperature == 0:
            return None
        random = np.random.default_rng((seed, i))
        return lambda logits: vocabulary.draw(logits.double().numpy(), temperature, top_k, random)

    def steps():
        left = dict.fromkeys(range(len(prompts)), count)
        coming = iter(range(len(prompts)))
        while left:
            for i in itertools.islice(coming, pool.free):
                pool.add(prompts[i], id=i, choose=chooser(i))
            try:
                tokens = pool.step()
            except ValueError as error:
                raise BadInput(f"--ckpt: {error}: take another one") from None
            for i in tokens:
                left[i] -= 1
                if not left[i]:
                    pool.remove(i)
                    del left[i]
            if tokens:
                yield tokens

    return steps()  # so that what is wrong is said at the call, before anything is shown
