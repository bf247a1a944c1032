"""Does a model still know what it read a while ago? A needle: `#ab=7351` in a text, and later `#ab?`; measured.

A text is lines of Python with such definitions, and questions after them at distances that are uniform in the
logarithm. `corpus` writes one to train on: it asks up to a distance of FARTHEST, so that what lies beyond is
extrapolation. `probe` asks at given distances about held-out lines with other keys and values; a question is answered
if all four digits are the likeliest after the ones before. Guessing gives one in 10,000.
"""

import heapq
import math

import numpy as np

DIGITS = 4
FARTHEST = 512  # bytes between definition and question in a corpus
_SHARE = 0.4  # of the lines are followed by a definition


def corpus(text, size: int, seed: int = 0, farthest: int = FARTHEST) -> bytes:
    """At least `size` bytes: the lines of a text, bytes each, and where they run out again from the first."""
    random, out, length, due = np.random.default_rng(seed), [], 0, []
    while length < size:
        for line in text:
            parts = [line]
            if random.random() < _SHARE:
                key, value = _needle(random)
                parts.append(b"#%s=%s\n" % (key, value))
                distance = math.exp(random.uniform(math.log(16), math.log(farthest)))
                heapq.heappush(due, (length + len(line) + distance, key, value))
            while due and due[0][0] <= length:
                parts.append(b"#%s?%s\n" % heapq.heappop(due)[1:])
            out += parts
            length += sum(map(len, parts))
            if length >= size:
                break
    return b"".join(out)


def questions(text, distance: int, count: int, seed: int = 0, before: int = 128):
    """(tokens uint8 [count, before + distance + DIGITS], answers uint8 [count, DIGITS] at their ends).

    distance: bytes from the end of the definition to where the answer begins; other definitions and questions lie
    between.
    """
    random, rows = np.random.default_rng((seed, distance)), []
    for _ in range(count):
        at = int(random.integers(len(text)))
        filler = corpus(text[at:] + text[:at], before + distance + 64, int(random.integers(1 << 30)))
        key, value = _needle(random)
        while b"#%s" % key in filler:  # nobody else may speak of it
            key, value = _needle(random)
        ask = b"#%s?" % key
        gap = distance - len(ask)
        row = b"%s\n#%s=%s\n%s\n" % (filler[: before - 1], key, value, filler[before : before + gap - 1])
        rows.append(np.frombuffer(row[-before - gap :] + ask + value, np.uint8))
    return np.stack(rows), np.stack(rows)[:, -DIGITS:]


def probe(predict, text, distances, count: int = 64, seed: int = 0):
    """Yields {"distance", "recalled", "digits"} a distance: shares of whole answers, and of digits, that were right.

    predict: tokens int32 [B, T] -> the likeliest next token after each of the last DIGITS + 1 tokens but the last,
    int [B, DIGITS].
    """
    for distance in distances:
        asked, answers = questions(text, distance, count, seed)
        parts = np.array_split(asked.astype(np.int32), -(-count // 8))
        right = np.concatenate([predict(part) for part in parts]) == answers
        yield {"distance": distance, "recalled": float(right.all(1).mean()), "digits": float(right.mean())}


def lines(seq: int = 1024):
    """(lines to train on, lines to ask with) of the default data."""
    from ringtide.models import data

    found = data.load(None, seq)
    cut = lambda tokens: [
        line + b"\n" for line in bytes(tokens).split(b"\n") if 0 < len(line) < 80 and b"#" not in line
    ]
    return cut(found.train), cut(found.held_out)


def line(row):
    return (
        f"{row['model']:<8} {row['run']:<16} {row['distance']:>8,} bytes ago: {row['recalled']:6.1%} of whole answers, "
        f"{row['digits']:6.1%} of digits"
    )


def predictor(folder):
    """(the model's name, its `predict` for `probe`) of a folder of a run or a model. Raises BadInput."""
    from ringtide.models import BadInput, tensor_files

    name = next((name for name in ("run.json", "config.json") if (folder / name).is_file()), None)
    if name is None:
        raise BadInput(f"--run {folder}: neither a run (run.json) nor a model (config.json)")
    content = tensor_files.json_of(folder, name)
    model = content.get("model") if name == "run.json" else content
    laplace = isinstance(model, dict) and ("key_dim" in model or model.get("model_type") == "gla")
    return ("Laplace", _laplace(folder)) if laplace else ("Llama", _llama(folder))


def _llama(folder):
    import jax
    import jax.numpy as jnp

    from ringtide.models import generate, llama

    params, config, _ = generate.load(folder)

    @jax.jit
    def predict(params, tokens):
        h = llama.hidden(params, tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32), config)
        return llama.logits(params, h[:, -DIGITS - 1 : -1]).argmax(-1)

    return lambda tokens: np.asarray(predict(params, tokens))


def _laplace(folder):
    import torch

    from ringtide.models import laplace_generate

    model, _ = laplace_generate.load(folder)

    @torch.inference_mode()
    def predict(tokens):
        return model(torch.from_numpy(tokens).long())[:, -DIGITS - 1 : -1].argmax(-1).numpy()

    return predict


def _needle(random):
    key = bytes(random.integers(ord("a"), ord("z") + 1, 2).astype(np.uint8))
    return key, b"%04d" % random.integers(10**DIGITS)
