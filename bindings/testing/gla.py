"""What must hold of any gated linear attention: each property is a generator of claims about one recipe."""

from functools import cached_property
from typing import ClassVar

import numpy as np
from ml_dtypes import finfo

from ringtide.reference.gla import gla, gla_grad
from ringtide.testing import trial
from ringtide.testing.bounds import Bound, C, Claim, epsilon, largest
from ringtide.testing.cases import np_dtype, numbers, segment_ids
from ringtide.testing.trial import values

TOKENS = ("q", "k", "v", "g", "do", "segments")  # axis 1 is time
RESETS = (-1e4, -1e6, -3.4e37, -np.inf)


def arrays(case) -> dict:
    """The arrays of a recipe: q k v g [h0], cotangents, segment ids. Padding holds NaN."""
    rng = case.rng("arrays")
    keys, values, state = (case.B, case.T, case.N, case.K), (case.B, case.T, case.N, case.V), (case.B, case.N)
    a = {
        "q": numbers(rng, keys, case.fill, case.dtype),
        "k": numbers(rng, keys, case.fill, case.dtype),
        "v": numbers(rng, values, case.fill, case.dtype),
        "g": gates(rng, keys, case.gates),
        "do": numbers(rng, values, "normal", case.dtype),
        "dhT": rng.normal(size=(*state, case.K, case.V)).astype(np.float32),
    }
    if case.state:
        a["h0"] = rng.normal(size=(*state, case.K, case.V)).astype(np.float32)
    if case.segments != "none":
        a["segments"] = segment_ids(rng, case.B, case.T, case.documents)
        poison(a)
    return a


def poison(a):
    for name in ("q", "k", "v", "g", "do"):
        a[name][a["segments"] < 0] = np.nan


def gates(rng, shape, kind: str):
    """Log decays in [-inf, 0], float32. The kinds: see `cases.GATES`."""
    g = -rng.exponential(0.1, shape)
    if kind == "open":  # plain linear attention
        g[:] = 0
    elif kind == "strong":  # e^-50 a step: cumulative sums run away
        g = -50 * rng.random(shape)
    elif kind == "resets":
        g[rng.random(shape[:2]) < 0.1] = rng.choice(RESETS)
        single = rng.random(shape) < 0.03
        g[single] = rng.choice(RESETS, single.sum())
    elif kind == "channels":  # each its own speed, from none to a reset every step
        g = -rng.exponential(1, shape) * rng.choice([0, 1e-3, 1, 30, 200], shape[-1])
    elif kind == "shut":
        g[:] = rng.choice(RESETS)
    return g.astype(np.float32)


def solve(case, a, dtype=np.float64) -> dict:
    """All results by the reference, computed in `dtype`."""
    options = {
        "scale": case.scale,
        "initial_state": a.get("h0"),
        "segment_ids": a.get("segments"),
        "dtype": dtype,
    }
    inputs = [a[name] for name in ("q", "k", "v", "g")]
    results = dict(zip(("o", "hT"), gla(*inputs, **options), strict=True))
    grads = gla_grad(*inputs, a["do"], a["dhT"], **options)
    return results | dict(zip(("dq", "dk", "dv", "dg", "dh0"), grads, strict=True))


def apply(fn, final_state=True):
    """`fn` with the signature of ringtide.gla, in the form that `runner` wants."""

    def call(static, inputs, others):
        options = {"output_final_state": True} if final_state else {}
        if static.scale is not None:
            options["scale"] = static.scale
        if static.state:
            options["initial_state"] = inputs["h0"]
        if static.segments != "none":
            options["segment_ids"] = others["segments"]
        result = fn(*(inputs[name] for name in ("q", "k", "v", "g")), **options)
        if not final_state:
            return {"o": result[0] if isinstance(result, tuple) else result}
        return dict(zip(("o", "hT"), result, strict=True))

    return call


class Trial(trial.Trial):
    """relative: {dtype: {result: largest relative error}}, in the Frobenius norm, beside the usual bounds. Who sets it
    may sum gates in float32 before the exponential, as chunks do: as if each gate were off by C eps."""

    inputs = ("q", "k", "v", "g", "h0")
    others = ("segments",)
    cotangents: ClassVar = {"o": "do", "hT": "dhT"}
    single = ("hT", "dg", "dh0")
    arrays, solve = staticmethod(arrays), staticmethod(solve)

    def __init__(self, case, run, decode=None, final_state=True, relative=None):
        super().__init__(case, run)
        self.decode, self.relative = decode, (relative or {}).get(case.dtype, {})
        if not final_state:
            self.a["dhT"] = np.zeros_like(self.a["dhT"])

    @cached_property
    def padding(self):
        return self.a["segments"] < 0 if "segments" in self.a else np.zeros((self.case.B, self.case.T), bool)

    @cached_property
    def bounds(self):
        a, truth, naive = self.a, self.truth, solve(self.case, self.a, np.float32)
        low = np_dtype(self.case.dtype)
        # In closed form dg is a sum of q dq - k dk over the tokens behind: their size is what it may round by.
        terms = largest(a["q"] * truth["dq"]) + largest(a["k"] * truth["dk"])
        bounds = {}
        for name, x in truth.items():
            rounded = naive[name] if name in self.single else naive[name].astype(low)
            bounds[name] = Bound.of(x, rounded, low, epsilon(low) * terms if name == "dg" else 0.0)
            if name in self.relative:
                bounds[name] = bounds[name].within(x, self.relative[name])
        return bounds


def padding(t):
    """At padding output and gradients are exactly 0."""
    for name in ("o", "dq", "dk", "dv", "dg"):
        if name in t.got:
            yield Claim(f"{name} at padding", t.got[name], np.zeros_like(t.got[name]), where=t.padding)


def causal(t):
    """Bit for bit: what a token gives does not change with later tokens."""
    if t.case.T < 2:
        return
    rng = t.case.rng("causal")
    first = rng.integers(1, t.case.T)
    before = np.broadcast_to(np.arange(t.case.T) < first, (t.case.B, t.case.T))
    got = t.run(_changed(rng, t, ~before))
    for name in ("o", "dq"):
        if name in got:
            yield Claim(f"{name} before the changed token {first}", got[name], t.got[name], where=before)


def packed(t):
    """Bit for bit: what a document gives does not change with the documents before and after it, nor with h0."""
    if t.case.segments == "none" or not t.case.T:
        return
    rng = t.case.rng("packed")
    runs = np.stack([_run_of(ids, rng.integers(t.case.T)) for ids in t.a["segments"]])  # [B, T]
    a = _changed(rng, t, ~runs)
    if t.case.state:
        enters = [row[ids >= 0][:1].any() for row, ids in zip(runs, t.a["segments"], strict=True)]
        a["h0"] = np.where(np.array(enters)[:, None, None, None], a["h0"], np.float32(3))
    got = t.run(a)
    for name in ("o", "dq"):
        if name in got:
            yield Claim(f"{name} of the unchanged document", got[name], t.got[name], where=runs)


def _run_of(ids, token):
    """The tokens of the run (neighbours with the same id, padding aside) that holds `token`; none for padding."""
    inside = np.zeros(len(ids), bool)
    if ids[token] >= 0:
        real = np.flatnonzero(ids >= 0)
        number = np.concatenate([[0], np.cumsum(ids[real][1:] != ids[real][:-1])])
        inside[real[number == number[real == token]]] = True
    return inside


def _changed(rng, t, tokens):
    """The arrays with other contents at `tokens` (bool [T] or [B, T]); padding stays poisoned."""
    a, tokens = dict(t.a), tokens & ~t.padding
    for name in ("q", "k", "v", "g", "do"):
        x = a[name] = a[name].copy()
        new = -rng.exponential(2, x.shape) if name == "g" else 10 * rng.normal(size=x.shape)
        x[tokens] = new[tokens].astype(x.dtype)
    return a


def split(t):
    """Splitting anywhere and carrying the state, and its gradient back, is the whole. (Two more shapes to compile.)"""
    halves = {17: 16, 65: 64, 129: 64}
    if t.case.T not in halves or not t.case.state or t.case.segments != "none" or "hT" not in t.got:
        return
    half = halves[t.case.T]
    parts = [{n: x[:, s] if n in TOKENS else x for n, x in t.a.items()} for s in (slice(0, half), slice(half, None))]
    first = t.run(parts[0])
    second = t.run({**parts[1], "h0": first["hT"]})
    if "dh0" in second:
        first = t.run({**parts[0], "dhT": second["dh0"]})
    for name in first:
        if name in ("hT", "dh0"):
            yield t.claim(name, second if name == "hT" else first, factor=2)
        else:
            yield t.claim(name, {name: np.concatenate([first[name], second[name]], 1)}, factor=2)


def decode(t):
    """The decode step, token by token over a pool of slots, is the whole; other slots keep what they hold."""
    case, a = t.case, t.a
    if t.decode is None or case.segments != "none" or not 0 < case.T <= 17:
        return
    rng = case.rng("decode")
    slots = rng.permutation(2 * case.B + 1)[: case.B].astype(np.int32)
    pool = np.full((2 * case.B + 1, case.N, case.K, case.V), np.nan, np.float32)
    if case.state:
        pool[slots] = a["h0"]
    before, outs, step = pool.copy(), [], t.decode(case.scale)
    skipped = np.append(slots, np.int32(-1))  # one more row, of a request that is not there
    for i in range(case.T):
        row = [np.concatenate([a[n][:, i], a[n][:1, i]]) for n in ("q", "k", "v", "g")]
        fresh = np.append(np.full(case.B, case.state or i > 0), False)
        out, pool = map(np.asarray, step(*row, pool, slot_ids=skipped, has_initial_state=fresh))
        outs.append(out)
    outs = np.stack(outs, 1)
    yield t.claim("o", {"o": outs[:-1]}, factor=2)
    yield t.claim("hT", {"hT": pool[slots]}, factor=2)
    yield Claim("out of a skipped row", outs[-1], np.zeros_like(outs[-1]))
    others = np.setdiff1d(np.arange(len(pool)), slots)
    yield Claim("slots that no row names", np.nan_to_num(pool[others]), np.nan_to_num(before[others]))
    yield Claim("poison in slots that no row names", np.isnan(pool[others]), np.isnan(before[others]))


def linear(t):
    """Twice (v, h0) is twice (o, final state), four times q is four times o: powers of two, so it costs no rounding."""
    if t.case.fill == "tiny" and t.case.dtype == "float16":
        return  # subnormal numbers round
    a = {**t.a, **{name: 2 * t.a[name] for name in ("v", "h0") if name in t.a}, "q": 4 * t.a["q"]}
    got = t.run(a)
    for name, factor in {"o": 8, "hT": 2}.items():
        if name in got:
            yield t.claim(name, got, factor * t.truth[name], factor=factor)


def adjoint(t):
    """<do, o> + <dhT, hT> = <dv, v> + <dh0, h0>: forward and backward belong to each other."""
    if "dv" not in t.got or not t.case.T:
        return
    pairs = [("do", "o"), ("dhT", "hT"), ("dv", "v"), ("dh0", "h0")]
    products = []
    for x, y in pairs:
        x, y = (t.a[n] if n in t.a else t.got.get(n) for n in (x, y))
        x, y = (np.zeros(1) if z is None else np.nan_to_num(z.astype(np.float64)) for z in (x, y))
        products.append((x * y).ravel() if x.size == y.size else np.zeros(1))
    forward, backward = np.concatenate(products[:2]), np.concatenate(products[2:])
    size = np.sqrt(np.square(forward).sum() + np.square(backward).sum())
    relative = max([C * epsilon(np_dtype(t.case.dtype)), *t.relative.values()])
    if t.case.fill == "same":  # what rounds alike at every token adds up
        relative *= np.sqrt(t.case.T)
    # A result in float16 may be so small that it rounds by a fixed amount, which its cotangent multiplies.
    rounding = 2 * float(finfo(np_dtype(t.case.dtype)).smallest_subnormal)
    factors = [np.linalg.norm(np.nan_to_num(t.a[name].astype(np.float64))) for name in ("do", "v")]
    slack = relative * size + rounding * sum(factors) + np.finfo(np.float32).tiny
    yield Claim("<do, o> + <dhT, hT>", forward.sum(), backward.sum(), Bound(slack, slack))


PROPERTIES = (values, padding, causal, packed, split, decode, linear, adjoint)
