"""What a token costs a Laplace after prompts of several lengths, on this machine's CPU. Measured.

Each prompt has a cache of its own. In turn, and in an order that changes, one token is decoded after each of them, so
that a drift of the machine hits all alike; medians of single steps.
"""

import random
import statistics
import time

import torch

from ringtide.models.laplace import PRESETS, LaplaceForCausalLM, init_weights

PROMPTS = (512, 2048, 8192, 32768)
CHUNK = 512  # tokens of a prompt at once


def run(preset, prompts=PROMPTS, rows=1, tokens=500, threads=1, compile=False, log=lambda text: None):
    """A dict a prompt length: median seconds of a step of `rows` tokens, its ratio to the first, the bytes it works on.

    tokens: how many steps are timed of each. compile: the step by torch.compile (inductor, which needs a C++ compiler).
    """
    torch.set_num_threads(threads)
    model = init_weights(LaplaceForCausalLM(PRESETS[preset]), 0).requires_grad_(False)
    step = torch.compile(model.decode_, fullgraph=True, dynamic=False) if compile else model.decode_
    text = torch.randint(0, model.config.vocab_size, (rows, max(prompts)), generator=torch.Generator().manual_seed(0))
    cache, caches, read = model.new_cache(rows), {}, 0
    for prompt in sorted(prompts):
        while read < prompt:
            part = text[:, read : min(prompt, read + CHUNK)]
            cache, read = model(part, cache=cache)[1], read + part.shape[1]
        caches[prompt] = {name: x.clone() for name, x in cache.items()}
        log(f"read {prompt:,} tokens")
    seconds = {prompt: [] for prompt in prompts}
    order, last = list(prompts), text[:, -1]
    draw = random.Random(0)
    for i in range(tokens + 10):
        draw.shuffle(order)
        for prompt in order:
            begin = time.perf_counter()
            step(last, caches[prompt])
            if i >= 10:  # the first ones warm up
                seconds[prompt].append(time.perf_counter() - begin)
    medians = {prompt: statistics.median(x) for prompt, x in seconds.items()}
    return [
        {
            "preset": preset,
            "prompt": prompt,
            "rows": rows,
            "seconds": medians[prompt],
            "ratio": medians[prompt] / medians[prompts[0]],
            "state_bytes": sum(x.nbytes for x in caches[prompt].values()) // rows,
            "steps": tokens,
            "threads": threads,
            "compiled": compile,
            "torch": torch.__version__,
            "measured": True,
        }
        for prompt in prompts
    ]


HEADING = f"{'prompt':>8} {'ms a step':>10} {'ratio':>7} {'bytes of a state':>17}"


def line(row):
    return f"{row['prompt']:8,} {1e3 * row['seconds']:10.3f} {row['ratio']:7.3f} {row['state_bytes']:17,}"
