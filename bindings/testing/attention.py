"""What must hold of any attention: each property is a generator of claims about one recipe."""

from functools import cached_property
from typing import ClassVar

import numpy as np

from ringtide.reference.attention import attention, attention_grad, visibility
from ringtide.testing import trial
from ringtide.testing.bounds import EXACT, Bound, Claim, epsilon, largest
from ringtide.testing.cases import MASKS, np_dtype, numbers, segment_ids
from ringtide.testing.trial import values

QUERY_SIDE, KEY_SIDE = ("q", "dout", "dlse", "q_pos", "q_seg"), ("k", "v", "k_pos", "k_seg")
QUERY_RESULTS, KEY_RESULTS = ("out", "lse", "dq"), ("dk", "dv")


def arrays(case) -> dict:
    """The arrays of a recipe: q k v [sinks], cotangents, positions, segment ids, dense mask. Padding holds NaN."""
    rng = case.rng("arrays")
    queries, keys = (case.B, case.T, case.N), (case.B, case.S, case.N_kv)
    a = {
        "q": numbers(rng, (*queries, case.H), case.fill, case.dtype),
        "k": numbers(rng, (*keys, case.H), case.fill, case.dtype),
        "v": numbers(rng, (*keys, case.H_v), case.fill, case.dtype),
        "dout": numbers(rng, (*queries, case.H_v), "normal", case.dtype),
        "dlse": numbers(rng, queries, "normal" if case.lse else "zeros", "float32"),
    }
    if case.sinks:
        a["sinks"] = rng.normal(size=case.N).astype(np.float32)
    if case.mask == "dense":
        a["dense"] = rng.random((case.B, case.N, case.T, case.S)) < rng.choice([0.02, 0.5, 0.98])
    if case.positions != "none":
        a["q_pos"], a["k_pos"] = _positions(rng, case)
    if case.segments != "none":
        a["q_seg"] = a["k_seg"] = segment_ids(rng, case.B, case.T, case.documents)
        if case.segments == "pair":
            a["k_seg"] = segment_ids(rng, case.B, case.S, case.documents)
        poison(a)
    return a


def poison(a):
    for name in ("q", "dout", "dlse"):
        a[name][a["q_seg"] < 0] = np.nan
    for name in ("k", "v"):
        a[name][a["k_seg"] < 0] = np.nan


def _positions(rng, case):
    start, sides = int(rng.integers(0, 50)) if case.order == "offset" else 0, []
    for length in (case.T, case.S):
        order = np.arange(length, dtype=np.int32) + start
        if case.order == "striped":
            order = np.concatenate([order[i::4] for i in range(4)])
        elif case.order == "zigzag":
            half = length // 4
            order = np.concatenate([order[:half], order[length - half :], order[half : length - half]])
        elif case.order == "shuffled":
            order = rng.permutation(order)
        if case.positions == "batch":
            order = np.stack([np.roll(order, b * (case.order != "count")) for b in range(case.B)])
        sides.append(order)
    return sides


def reference_keywords(case, a) -> dict:
    return {
        "mask": a.get("dense", MASKS[case.mask][1]),
        "segment_ids": (a["q_seg"], a["k_seg"]) if "q_seg" in a else None,
        "q_positions": a.get("q_pos"),
        "kv_positions": a.get("k_pos"),
    }


def solve(case, a, dtype=np.float64) -> dict:
    """All results by the reference, computed in `dtype`."""
    options = {
        **reference_keywords(case, a),
        "scale": case.scale,
        "logits_soft_cap": case.soft_cap,
        "sinks": a.get("sinks"),
        "dtype": dtype,
    }
    out, lse = attention(a["q"], a["k"], a["v"], **options)
    dq, dk, dv, dsinks = attention_grad(a["q"], a["k"], a["v"], a["dout"], a["dlse"], **options)
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}
    return {name: x for name, x in results.items() if x is not None}


def apply(fn):
    """`fn` with the signature of ringtide.attention, in the form that `runner` wants."""

    def call(static, inputs, others):
        options = {}
        mask = others.get("dense", MASKS[static.mask][0])
        if mask is not None:
            options["mask"] = mask
        if static.segments != "none":
            options["segment_ids"] = (
                (others["q_seg"], others["k_seg"]) if static.segments == "pair" else others["q_seg"]
            )
        if static.positions != "none":
            options |= {"q_positions": others["q_pos"], "kv_positions": others["k_pos"]}
        if static.scale is not None:
            options["scale"] = static.scale
        if static.soft_cap is not None:
            options["logits_soft_cap"] = static.soft_cap
        if static.sinks:
            options["sinks"] = inputs["sinks"]
        if static.lse:
            options["return_lse"] = True
        result = fn(inputs["q"], inputs["k"], inputs["v"], **options)
        return dict(zip(("out", "lse"), result, strict=True)) if static.lse else {"out": result}

    return call


class Trial(trial.Trial):
    inputs = ("q", "k", "v", "sinks")
    others = ("dense", "q_pos", "k_pos", "q_seg", "k_seg")
    cotangents: ClassVar = {"out": "dout", "lse": "dlse"}
    single = ("lse", "dsinks")
    arrays, solve = staticmethod(arrays), staticmethod(solve)

    @cached_property
    def seen(self):
        """bool [B, 1 | N, T, S]"""
        return visibility(self.a["q"], self.a["k"], **reference_keywords(self.case, self.a))

    @cached_property
    def bounds(self):
        a, truth, naive = self.a, self.truth, solve(self.case, self.a, np.float32)
        low, single = np_dtype(self.case.dtype), np.dtype(np.float32)
        # dq and dk are sums of p (dout.v - delta) times k and q, which cancel where dout.v is the same for all keys.
        delta = np.nan_to_num(a["dout"].astype(np.float64) * truth["out"]).sum(-1) - np.nan_to_num(a["dlse"])
        scale = self.case.scale or self.case.H**-0.5
        ds = scale * largest(delta)
        terms = {name: largest(x) for name, x in truth.items()}
        terms |= {"dq": ds * largest(a["k"]), "dk": ds * largest(a["q"]), "lse": 1.0}
        if self.case.sinks:  # a sum of as many terms as there are rows
            terms["dsinks"] = largest(np.abs(np.exp(a["sinks"] - truth["lse"]) * delta).sum((0, 1)))
        # A logit rounds by eps scale |q| |k| / 2 in float32, and p = e^(logit - lse) with it.
        q, k = (np.linalg.norm(np.nan_to_num(a[n].astype(np.float64)), axis=-1).max(initial=0) for n in ("q", "k"))
        logit = scale * q * k
        bounds = {}
        for name, x in truth.items():
            dtype = single if name == "lse" else low
            rounded = naive[name] if name == "dsinks" else naive[name].astype(dtype)
            slack = terms[name] * (logit * epsilon(single) / 2 + (epsilon(dtype) if name not in ("out", "dv") else 0))
            bounds[name] = Bound.of(x, rounded, dtype, slack)
        return bounds


def orphans(t):
    """Rows that see nothing: out 0, lse -inf or the sink, no gradient. Keys that nobody sees get no gradient."""
    seen = np.broadcast_to(t.seen, (t.case.B, t.case.N, t.case.T, t.case.S))
    rows = ~seen.any(-1).swapaxes(1, 2)  # [B, T, N]
    by_kv_head = seen.reshape(t.case.B, t.case.N_kv, t.case.N // t.case.N_kv, t.case.T, t.case.S)
    keys = ~by_kv_head.any((2, 3)).swapaxes(1, 2)  # [B, S, N_kv]
    for name, hidden in {"out": rows, "dq": rows, "dk": keys, "dv": keys}.items():
        if name in t.got:
            yield Claim(f"{name} where nothing is seen", t.got[name], np.zeros_like(t.got[name]), where=hidden)
    if "lse" in t.got:
        want = np.broadcast_to(t.a["sinks"] if t.case.sinks else np.float32(-np.inf), rows.shape)
        bound = Bound(1e-6, 1e-6) * (1 + largest(t.a["sinks"])) if t.case.sinks else EXACT
        yield Claim("lse where nothing is seen", t.got["lse"], want, bound, rows)


def unseen(t):
    """Bit for bit: a row does not change with keys that it does not see, nor with other rows: causality, packing."""
    if not t.case.T * t.case.S:
        return
    rng = t.case.rng("unseen")
    row = rng.integers(t.case.T)
    hidden = ~t.seen[:, :, row].any(1)  # [B, S]: keys that this row does not see in any head
    same = ~(t.seen & hidden[:, None, None, :]).any(-1).any(1)  # [B, T]: rows that see none of these
    a = dict(t.a)
    for name, change in {"k": hidden, "v": hidden, "q": ~same, "dout": ~same}.items():
        a[name] = a[name].copy()
        change = change & ~np.isnan(a[name].astype(np.float32)).any((2, 3))  # padding stays poisoned
        a[name][change] = (30 * rng.normal(size=a[name][change].shape)).astype(a[name].dtype)
    other = t.run(a)
    for name in QUERY_RESULTS:
        if name in other:
            yield Claim(f"{name} of rows that see no changed key", other[name], t.got[name], where=same)


def merge(t):
    """Any partition of the keys, merged by lse in any order, is the whole."""
    if t.case.segments != "pair" or not t.case.lse or t.case.sinks:
        return
    rng = t.case.rng("merge")
    part = rng.integers(3, size=t.a["k_seg"].shape)
    out, lse = np.float32(0), np.full(t.truth["lse"].shape, -np.inf, np.float32)
    for p in rng.permutation(3):
        some = t.run({**t.a, "k_seg": np.where(part == p, t.a["k_seg"], -1)})
        with np.errstate(invalid="ignore"):
            total = np.logaddexp(lse, some["lse"])
            old, new = (
                np.where(np.isneginf(x), np.float32(0), np.exp(x - total))[..., None] for x in (lse, some["lse"])
            )
        out, lse = old * out + new * some["out"].astype(np.float32), total
    yield t.claim("out", {"out": out}, factor=2)
    yield t.claim("lse", {"lse": lse}, factor=2)


def permuted(t):
    """Sequences of the batch and heads are independent: permuting them permutes the results."""
    rng, groups = t.case.rng("permuted"), t.case.N // t.case.N_kv
    batch, kv = rng.permutation(t.case.B), rng.permutation(t.case.N_kv)
    heads = np.concatenate([n * groups + rng.permutation(groups) for n in kv])
    if np.array_equal(batch, np.arange(t.case.B)) and np.array_equal(heads, np.arange(t.case.N)):
        return

    def permute(x, name):
        if name in ("sinks", "dsinks"):
            return x[heads]
        if name == "dense":
            return x[batch][:, heads]
        if x.ndim < 3:
            return x[batch] if x.ndim == 2 else x  # ids and positions
        return x[batch][:, :, kv if name in ("k", "v", "dk", "dv") else heads]

    got = t.run({name: permute(x, name) for name, x in t.a.items()})
    for name in got:
        yield t.claim(name, got, permute(t.truth[name], name))


def shuffled(t):
    """Only positions tell the order: tokens stored in another order give the same results in that order."""
    if t.case.positions == "none" or t.case.mask == "dense":
        return
    rng = t.case.rng("shuffled")
    queries, keys = rng.permutation(t.case.T), rng.permutation(t.case.S)
    if t.case.segments == "one":
        keys = queries
    order = dict.fromkeys(QUERY_SIDE + QUERY_RESULTS, queries) | dict.fromkeys(KEY_SIDE + KEY_RESULTS, keys)

    def shuffle(x, name):
        return x if name not in order else x[order[name]] if x.ndim == 1 else x[:, order[name]]

    got = t.run({name: shuffle(x, name) for name, x in t.a.items()})
    for name in got:
        yield t.claim(name, got, shuffle(t.truth[name], name))


def alone(t):
    """A document packed among others is the document alone (here: with all others poisoned padding)."""
    if t.case.segments == "none" or not t.case.T or t.a["q_seg"].max() < 1:
        return
    rng = t.case.rng("alone")
    document = t.a["q_seg"][np.arange(t.case.B), rng.integers(t.case.T, size=t.case.B)][:, None]
    a = {name: x.copy() for name, x in t.a.items()}
    for name in ("q_seg", "k_seg"):
        a[name] = np.where(a[name] == document, a[name], -1).astype(np.int32)
    poison(a)
    got = t.run(a)
    for name in got:
        if name != "dsinks":  # a sum over all documents
            yield t.claim(name, got, where=a["q_seg" if name in QUERY_RESULTS else "k_seg"] >= 0)


def split(t):
    """Queries in two halves: values concatenate, gradients of keys and values add up. (Two more shapes to compile.)"""
    if t.case.positions == "none" or t.case.mask == "dense" or t.case.T not in (65, 129) or t.case.dtype != "float32":
        return
    half, parts = t.case.T // 2, []
    for rows in (slice(0, half), slice(half, None)):
        a = {n: x[rows] if x.ndim == 1 else x[:, rows] for n, x in t.a.items() if n in QUERY_SIDE}
        segments = "none" if t.case.segments == "none" else "pair"
        case = type(t.case)(**{**vars(t.case), "T": len(a["q"][0]), "segments": segments})
        parts.append(t.run({**t.a, **a}, case))
    for name in parts[0]:
        if name in QUERY_RESULTS:
            yield t.claim(name, {name: np.concatenate([p[name] for p in parts], 1)})
        else:
            yield t.claim(name, {name: parts[0][name] + parts[1][name]}, factor=2)


PROPERTIES = (values, orphans, unseen, merge, permuted, shuffled, alone, split)
