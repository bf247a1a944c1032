"""Recipes: one frozen dataclass a problem, scalars and strings only, so that its repr replays it.

A recipe has two kinds of fields. Shapes, dtype and options are *static*: a new combination costs a compile. Everything
else is *data*: what the arrays hold, where documents begin, in which order positions stand. So static halves are dealt
once into a small pool (`deal`), lengths from a few residues of a block, every value of every field from its own
shuffled deck; each recipe of the pool takes its turn, and hypothesis draws the data to go with it (`strategy`).
"""

import ast
import random
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import chain, cycle, islice
from typing import ClassVar

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from ringtide.kernels.masks import Causal, Chunked, Local

FILLS = ("normal", "large", "tiny", "spiky", "positive", "same", "zeros")
DOCUMENTS = ("one", "packed", "padded", "apart", "scattered", "blank")
ORDERS = ("count", "offset", "zigzag", "striped", "shuffled")
GATES = ("mild", "open", "strong", "resets", "channels", "shut")
DTYPES = ("float32", "bfloat16", "float16")


def _every_third(q, k):
    return (q + 2 * k) % 3 == 0


# By the text that a recipe carries: the mask that the op is given, and the truth about it, which shares no code with
# the op. "dense" is drawn from the seed, a head its own.
MASKS = {
    "none": (None, None),
    "Causal()": (Causal(), lambda q, k: k <= q),
    "Local(7, 0)": (Local(7, 0), lambda q, k: (q - 7 <= k) & (k <= q)),
    "Local(100, 0)": (Local(100, 0), lambda q, k: (q - 100 <= k) & (k <= q)),
    "Local(3, 130)": (Local(3, 130), lambda q, k: (q - 3 <= k) & (k <= q + 130)),
    "Chunked(16)": (Chunked(16), lambda q, k: q // 16 == k // 16),
    "Chunked(100) & Causal()": (Chunked(100) & Causal(), lambda q, k: (q // 100 == k // 100) & (k <= q)),
    "Causal() | Chunked(8)": (Causal() | Chunked(8), lambda q, k: (k <= q) | (q // 8 == k // 8)),
    "~Causal()": (~Causal(), lambda q, k: k > q),
    "function": (_every_third, _every_third),
    "dense": (None, None),
}


class _Recipe:
    def __repr__(self):
        told = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in self.choices:
                fits, expected = value in self.choices[field.name], f"one of {', '.join(self.choices[field.name])}"
            elif field.name in ("scale", "soft_cap"):
                fits = value is None or (type(value) in (int, float) and 0 < value < float("inf"))
                expected = "a positive number or None"
            elif isinstance(field.default, bool):
                fits, expected = isinstance(value, bool), "True or False"
            else:
                least = 0 if field.name in ("T", "S", "seed") else 1
                fits, expected = type(value) is int and value >= least, f"an int of at least {least}"
            if not fits:
                raise ValueError(f"{type(self).__name__}: {field.name} must be {expected}, got {value!r}")

    @property
    def static(self):
        """The recipe without its data."""
        return replace(self, **{name: getattr(type(self), name) for name in self.data})

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *purpose.encode()])


@dataclass(frozen=True, repr=False)
class AttentionCase(_Recipe):
    """An attention problem, `query [B, T, N, H]` over `key [B, S, N_kv, H]` and `value [B, S, N_kv, H_v]`."""

    B: int = 1
    T: int = 1
    S: int = 1
    N: int = 1
    N_kv: int = 1
    H: int = 1
    H_v: int = 1
    dtype: str = "float32"
    mask: str = "none"
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    lse: bool = False  # return it, and differentiate through it
    segments: str = "none"  # "one": a single array serves both sides
    positions: str = "none"  # "row": [T];  "batch": [B, T]
    # data
    order: str = "count"
    documents: str = "one"
    fill: str = "normal"
    seed: int = 0

    choices: ClassVar = {
        "dtype": DTYPES,
        "mask": tuple(MASKS),
        "segments": ("none", "one", "pair"),
        "positions": ("none", "row", "batch"),
        "order": ORDERS,
        "documents": DOCUMENTS,
        "fill": FILLS,
    }
    data: ClassVar = ("order", "documents", "fill", "seed")

    def __post_init__(self):
        super().__post_init__()
        if self.N % self.N_kv:
            raise ValueError(f"AttentionCase: N = {self.N} must be a multiple of N_kv = {self.N_kv}")
        if self.segments == "one" and self.T != self.S:
            raise ValueError(f"AttentionCase: segments='one' needs T = S, got T = {self.T}, S = {self.S}")


@dataclass(frozen=True, repr=False)
class GLACase(_Recipe):
    """A GLA problem, `q, k, g [B, T, N, K]` and `v [B, T, N, V]`."""

    B: int = 1
    T: int = 1
    N: int = 1
    K: int = 1
    V: int = 1
    dtype: str = "float32"
    scale: float | None = None
    state: bool = False  # an initial state
    segments: str = "none"
    # data
    documents: str = "one"
    gates: str = "mild"
    fill: str = "normal"
    seed: int = 0

    choices: ClassVar = {
        "dtype": DTYPES,
        "segments": ("none", "one"),
        "documents": DOCUMENTS,
        "gates": GATES,
        "fill": FILLS,
    }
    data: ClassVar = ("documents", "gates", "fill", "seed")


RECIPES = {"attention": AttentionCase, "gla": GLACase}
BLOCK = {"attention": 128, "gla": 64}

# Feature -> the keyword of the op that carries it (None: it is a matter of shapes alone).
FEATURES = {
    "attention": {
        "mask": "mask",
        "segments": "segment_ids",
        "positions": "q_positions",
        "scale": "scale",
        "soft_cap": "logits_soft_cap",
        "sinks": "sinks",
        "lse": "return_lse",
        "gqa": None,
        "cross": None,
        "value_dim": None,
        "empty": None,
    },
    "gla": {
        "scale": "scale",
        "state": "initial_state",
        "final_state": "output_final_state",
        "segments": "segment_ids",
        "value_dim": None,
        "empty": None,
    },
}


def decks(op: str, block: int) -> dict:
    """The values of each static field (or fields that go together). Later decks are dealt independently of these."""
    b = block
    if op == "gla":
        return {
            ("T",): [(t,) for t in (1, 15, 16, 17, b - 1, b, b + 1, b + 1, 2 * b + 1, 3 * b - 1)],
            ("B", "N"): [(1, 1), (1, 2), (2, 1), (2, 3)],
            ("K", "V"): [(16, 16), (64, 64), (1, 8), (8, 1), (16, 80), (80, 160), (96, 192), (192, 96)],
            ("dtype",): [("float32",), ("float32",), ("bfloat16",), ("float32",), ("float16",)],
            ("scale",): [(None,), (None,), (0.5,)],
            ("state",): [(True,), (True,), (False,)],
            ("segments",): [("one",), ("none",)],
        }
    square = [(t, t) for t in (1, 15, 17, b - 1, b, b + 1, b + 1, 2 * b + 1, 3 * b - 1, 4 * b + 1, 5 * b)]
    return {
        ("T", "S"): [*square, (17, 2 * b + 1), (b + 1, 17), (1, b + 1)],
        ("B", "N", "N_kv"): [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 4, 2), (2, 6, 2), (3, 3, 1)],
        ("H", "H_v"): [(16, 16), (64, 64), (128, 128), (1, 1), (8, 24), (80, 80), (192, 128), (24, 8)],
        ("dtype",): [("float32",), ("float32",), ("bfloat16",), ("float32",), ("float16",)],
        ("mask",): [(m,) for m in ("Causal()", *MASKS)],
        ("scale",): [(None,), (None,), (0.3,)],
        ("soft_cap",): [(None,), (None,), (1.5,)],
        ("sinks",): [(False,), (False,), (True,)],
        ("lse",): [(True,), (True,), (False,)],
        ("segments",): [("none",), ("one",), ("pair",)],
        ("positions",): [("none",), ("none",), ("row",), ("batch",)],
    }


LONGEST = 2000  # characters of a replay line: a recipe has some 400, and Python's parser fails on deep nesting

EMPTY = {  # a shape of their own, with next to no data: in every pool, for one turn each
    "attention": [{"T": 0, "S": 0}, {"T": 3, "S": 0, "N": 2, "lse": True}],
    "gla": [{"T": 0, "K": 8, "V": 16, "state": True}, {"T": 0, "segments": "one"}],
}


def deal(op: str, count: int, seed=0, *, without=(), masks=None, dtypes=None, block=None) -> list:
    """The empty static recipes and `count` others, in random order; none uses what is named in `without`."""
    rng, columns = random.Random(f"{op} {seed}"), {}
    for names, deck in decks(op, block or BLOCK[op]).items():
        if names == ("mask",) and masks is not None:
            deck = [(mask,) for mask in masks]
        if names == ("dtype",) and dtypes is not None:
            deck = [(dtype,) for dtype in dtypes]
        cards = [card for _ in range(-(-count // len(deck))) for card in rng.sample(deck, len(deck))]
        for i, name in enumerate(names):
            columns[name] = [card[i] for card in cards[:count]]
    hands = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if "empty" not in without:
        plain = {name: getattr(RECIPES[op], name) for name in columns}
        plain |= {"mask": (masks or ["none"])[0], "dtype": (dtypes or ["float32"])[0]}
        hands = [{name: {**plain, **fixed}[name] for name in columns} for fixed in EMPTY[op]] + hands
    return [_settle(op, hand, without) for hand in hands]


def turns(pool: list, count: int) -> dict:
    """How many of `count` recipes each static one of the pool gives: an empty one 1, the others share the rest."""
    empty = [case for case in pool if _empty(case)]
    others = cycle(case for case in pool if not _empty(case))
    return Counter(islice(chain(empty, others), count))


def _empty(case):
    return not case.T * getattr(case, "S", 1)


def _settle(op, hand, without):
    """A recipe from fields dealt independently: what does not go together gives way."""
    recipe = RECIPES[op]
    for name in without:
        if name in hand and name != "mask":
            hand[name] = getattr(recipe, name)
    if "value_dim" in without:
        hand["H_v" if op == "attention" else "V"] = hand["H" if op == "attention" else "K"]
    if op == "attention":
        if "gqa" in without:
            hand["N_kv"] = hand["N"]
        if "cross" in without:
            hand["S"] = hand["T"]
        while hand["B"] * hand["N"] * hand["T"] * hand["S"] > 1.5e6:  # the float64 truth keeps every score
            if hand["B"] > 1:
                hand["B"] -= 1
            else:
                hand["N"], hand["N_kv"] = hand["N"] // hand["N_kv"], 1
        if hand["segments"] == "one" and hand["T"] != hand["S"]:
            hand["segments"] = "pair"
    else:
        while hand["B"] * hand["N"] * hand["T"] * hand["K"] * hand["V"] > 2e6:  # the float64 truth keeps every state
            smaller = "N" if hand["N"] > 1 else "B" if hand["B"] > 1 else "T"
            hand[smaller] = 1 if smaller != "T" else hand["T"] // 2 + 1
    return recipe(**hand)


def _cost(case):
    if isinstance(case, AttentionCase):
        return case.B * case.N * (case.T + 1) * (case.S + 1) * (case.H + case.H_v)
    return case.B * case.N * (case.T + 1) * case.K * case.V


def strategy(pool: list, rng=None) -> st.SearchStrategy:
    """A static recipe of the pool, the cheapest the simplest, with any data.

    rng: shuffles what is simplest, since hypothesis draws that most: so a check of many shapes favours nothing.
    """
    order = (lambda values: rng.sample(values, len(values))) if rng else list
    choices = {"fill": FILLS, "gates": GATES, "order": ORDERS, "documents": DOCUMENTS}
    data = {name: st.sampled_from(order(values)) for name, values in choices.items() if name in type(pool[0]).data}
    data["seed"] = st.integers(0, 9999)
    statics = st.sampled_from(sorted(pool, key=_cost))
    return st.builds(lambda static, **data: tidy(replace(static, **data)), statics, **data)


def tidy(case):
    """The same problem without data that it does not use."""
    unused = {}
    if case.segments == "none":
        unused["documents"] = "one"
    if getattr(case, "positions", None) == "none":
        unused["order"] = "count"
    return replace(case, **unused)


def attention_cases(count: int = 8, seed=0, **limits) -> st.SearchStrategy[AttentionCase]:
    """Attention recipes that share `count` compiled shapes; `limits` as for `deal`."""
    return strategy(deal("attention", count, seed, **limits))


def gla_cases(count: int = 8, seed=0, **limits) -> st.SearchStrategy[GLACase]:
    """GLA recipes that share `count` compiled shapes; `limits` as for `deal`."""
    return strategy(deal("gla", count, seed, **limits))


def parse(text: str):
    """The recipe that a replay line shows. Reads literals, evaluates nothing; raises ValueError."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"{len(text)} characters")
        call = ast.parse(text.strip(), mode="eval").body
        recipe = {r.__name__: r for r in RECIPES.values()}[call.func.id]
        if call.args:
            raise ValueError("fields are given by name")
        names = [keyword.arg for keyword in call.keywords]
        if len(set(names)) < len(names):
            raise ValueError("a field is given twice")
        return recipe(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"replay: expected a line such as AttentionCase(T=17, S=17, seed=3) or GLACase(T=65, K=16), "
            f"got {_short(repr(text))} ({_short(str(error))})"
        ) from None


def _short(text, length=120):
    return text if len(text) <= length else text[: length - 3] + "..."


def simpler(case):
    """Recipes one step closer to the plainest one, the largest steps first."""
    plain = {f.name: f.default for f in fields(case)}
    together = [("T", "S"), ("N", "N_kv"), ("H", "H_v"), ("K", "V")]
    groups = [*([name] for name in plain), *(g for g in together if set(g) <= set(plain))]
    for group in groups:
        values = [getattr(case, name) for name in group]
        steps = [[plain[name] for name in group]]
        if all(type(value) is int for value in values) and group != ["seed"]:
            steps += [[max(v // 2, 1) for v in values], [max(v - 1, 1) for v in values]]
        for step in steps:
            if step != values:
                try:
                    yield tidy(replace(case, **dict(zip(group, step, strict=True))))
                except ValueError:
                    continue  # an invalid combination


# What the data fields mean, for both ops.


def numbers(rng, shape, fill: str, dtype: str):
    """An array in `dtype` (then exactly representable in float64)."""
    x = rng.normal(size=shape)
    if fill == "large":
        x *= 5
    elif fill == "tiny":
        x *= 1e-2
    elif fill == "spiky":
        x *= np.where(rng.random(shape) < 0.05, 20, 0.05)
    elif fill == "positive":
        x = np.abs(x) + 0.5
    elif fill == "same" and len(shape) > 1:
        x[:] = x[:, :1]  # every token alike
    elif fill == "zeros":
        x[:] = 0
    if dtype == "float16":
        x /= 8  # sums of products must stay below its largest number, 65504
    return x.astype(np_dtype(dtype))


def segment_ids(rng, batch: int, length: int, documents: str):
    """int32 [batch, length]; negative ids are padding."""
    if documents == "scattered":  # anywhere, also apart from their like
        return rng.integers(-1, 3, (batch, length), dtype=np.int32)
    ids = np.zeros((batch, length), np.int32)
    if documents != "one":
        ids = np.cumsum(rng.random((batch, length)) < 3 / max(length, 1), axis=1).astype(np.int32)
    if documents == "apart":  # between two documents there is always padding
        ids[ids % 2 == 1] = -1
    if documents in ("padded", "blank"):
        ids[np.arange(length) >= rng.integers(0, length + 1, (batch, 1))] = -1
        ids[rng.random((batch, length)) < 0.1] = -7
    if documents == "blank":
        ids[0] = -1
    return ids


def np_dtype(name: str):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)  # NumPy has none of its own
