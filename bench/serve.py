"""Sequences of random lengths that come and go in one pool of states, measured: what serving takes on this machine.

Twice as many requests as slots are waiting; each slot that comes free takes the next one, until all have their tokens.
Under torchrun each rank serves its share of the sequences, with a copy of the weights: nothing is sent between them.
"""

import os
import random
import statistics
import time

import torch

from ringtide.models import BadInput, laplace
from ringtide.torch import StatePool

GIB = 1 << 30


def share(sequences: int) -> tuple[int, int]:
    """(this rank's sequences, ranks), of `sequences` over the ranks that torchrun has started."""
    rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return (sequences + count - 1 - rank) // count, count


def make(preset: str, dtype: str, slots: int, device="cpu", seed=0) -> laplace.LaplaceForCausalLM:
    """A model of random weights. Raises BadInput, one line, where it and its states are larger than this machine."""
    config, dtype = laplace.PRESETS[preset], getattr(torch, dtype)
    with torch.device("meta"):
        model = laplace.LaplaceForCausalLM(config).to(dtype)
    need = sum(p.nbytes for p in model.parameters()) + slots * laplace.state_bytes(config, dtype)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.device(device).type == "cpu" and need > 0.9 * have:
        raise BadInput(
            f"{preset} with {slots} states takes {need / GIB:,.1f} GiB, here are {have / GIB:,.1f}: --scale-down"
        )
    return laplace.init_weights(model.to_empty(device=device), seed).requires_grad_(False)


def run(model, slots: int, *, prompt: int, tokens: int, chunk=128, rows=4, requests=None, seed=0) -> dict:
    """Serves `requests` (None: 2 x slots) sequences: prompts of 1 to `prompt` random tokens, answers of 1 to `tokens`.

    Returns what was measured: tokens_per_s of answers; decode_step_s, the median of the steps that read no prompt;
    mixed_step_s, of the others; most, how many sequences were there at once; pool_bytes, and state_bytes of one.
    """
    rng, requests = random.Random(seed), 2 * slots if requests is None else requests
    vocabulary = model.config.vocab_size
    waiting = [
        ([rng.randrange(vocabulary) for _ in range(rng.randint(1, prompt))], rng.randint(1, tokens))
        for _ in range(requests)
    ]
    pool = StatePool(model, slots, chunk=chunk, rows=rows)
    held, left, given, most = pool.nbytes, {}, 0, 0
    reading, steps = {}, {"decode": [], "mixed": []}
    begun = time.perf_counter()
    while waiting or left:
        while waiting and pool.free:
            text, count = waiting.pop()
            id = pool.add(text)
            left[id] = count
            reading[id] = len(text)
        most, kind = max(most, len(pool)), "mixed" if reading else "decode"
        start = time.perf_counter()
        chosen = pool.step()
        steps[kind].append(time.perf_counter() - start)
        given += len(chosen)
        for id in chosen:
            reading.pop(id, None)
            left[id] -= 1
            if not left[id]:
                pool.remove(id)
                del left[id]
    seconds = time.perf_counter() - begun
    assert pool.nbytes == held, "the pool has grown"
    return {
        "kind": "measured",
        "slots": slots,
        "requests": requests,
        "most": most,
        "tokens": given,
        "seconds": seconds,
        "tokens_per_s": given / seconds,
        **{f"{kind}_step_s": statistics.median(each) if each else None for kind, each in steps.items()},
        "steps": {kind: len(each) for kind, each in steps.items()},
        "pool_bytes": held,
        "state_bytes": held // slots,
    }


def text(row) -> str:
    step = lambda kind: "none" if row[f"{kind}_step_s"] is None else f"{1e3 * row[f'{kind}_step_s']:.2f} ms"
    return (
        f"measured: {row['requests']} requests through {row['slots']} slots of {row['state_bytes']:,} bytes, at most "
        f"{row['most']} at once: {row['tokens']:,} tokens in {row['seconds']:.1f} s, {row['tokens_per_s']:,.0f} "
        f"tokens/s; a step that only decodes {step('decode')}, one that reads prompts too {step('mixed')}"
    )
