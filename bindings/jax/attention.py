"""`ringtide.attention` for JAX: checks, sinks and autograd around a kernel's (forward, backward) pair."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringtide.jax import checks, dispatch, meshes
from ringtide.kernels.masks import Mask, Where, as_mask


def attention(
    query,
    key,
    value,
    *,
    mask=None,
    segment_ids=None,
    q_positions=None,
    kv_positions=None,
    scale=None,
    logits_soft_cap=None,
    sinks=None,
    return_lse=False,
    implementation=None,
):
    """Softmax attention of every query over the keys that it sees, without a T x S array.

    Args:
      query: [B, T, N, H] bfloat16, float16 or float32.
      key, value: [B, S, N_kv, H] and [B, S, N_kv, H_v], N a multiple of N_kv: each kv head serves N / N_kv query heads.
      mask: what a query position sees of the key positions. `Causal()`, `Local(left, right)`, `Chunked(size)`, their
        `&`, `|` and `~`; a function f(q_pos, k_pos) -> bool, elementwise; a bool array [B | 1, N | 1, T, S], true where
        visible; None for everything.
      segment_ids: [B, T] int32, or a pair ([B, T], [B, S]): equal ids see each other. Negative ids are padding, which
        sees nothing, is seen by nothing and may hold NaN.
      q_positions, kv_positions: [T] or [B, T], [S] or [B, S] int32, the places in the sequence that the mask compares;
        by default both count from 0.
      scale: of the scores; by default 1 / sqrt(H).
      logits_soft_cap: cap; scores become cap * tanh(score / cap), after scaling.
      sinks: [N], a score per head that takes part in the softmax and has no value.
      return_lse: whether to return the log of the softmax's denominator too, natural, sinks included.
      implementation: a name, a sequence of names to try in order, or None for the best on the platform compiled for.

    Returns:
      [B, T, N, H_v] in query's dtype, or with `return_lse` (that, lse [B, T, N] float32). Both are differentiable. A
      query that sees nothing has output 0, lse -inf (with a sink: the sink) and no gradients.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it and the cure.
      NotImplementedError: no kernel in `implementation` can serve the call.
    """
    query, key, value, where, mask, sinks = check(
        query, key, value, mask, segment_ids, q_positions, kv_positions, sinks
    )
    kernel = Kernel(dispatch.names(implementation), mask, *numbers(query, scale, logits_soft_cap))
    return differentiable(kernel, query, key, value, where, sinks, return_lse)


class Kernel(NamedTuple):
    """The (forward, backward) pair of an implementation, for a mask; equal ones share a compilation."""

    implementation: str | tuple[str, ...] | None
    mask: Mask
    scale: float
    soft_cap: float | None

    def forward(self, q, k, v, where, *, out_dtype=None):
        if not (q.size and k.size):  # kernels never see an empty array
            return jnp.zeros((*q.shape[:3], v.shape[3]), out_dtype or q.dtype), jnp.full(q.shape[:3], -jnp.inf)
        return self._call("forward", q, k, v, where, out_dtype=out_dtype)

    def backward(self, q, k, v, *args, out_dtype=None):
        if not (q.size and k.size):
            return tuple(jnp.zeros(x.shape, out_dtype or x.dtype) for x in (q, k, v))
        return self._call("backward", q, k, v, *args, out_dtype=out_dtype)

    def _call(self, function, *args, **options):
        options |= {"mask": self.mask, "scale": self.scale, "soft_cap": self.soft_cap}
        return dispatch.call("attention", function, self.implementation, *args, **options)


def differentiable(kernel, query, key, value, where, sinks, return_lse):
    """Attention by the forward and backward of `kernel`, with sinks and gradients.

    Sinks and padding are dealt with here, once for all kernels and strategies: a sink joins the finished softmax, and
    padding is zeroed, so that whatever it holds stays out of every product.
    """
    if where.q_seg is not None:
        query = _zero_padding(query, where.q_seg)
        key, value = _zero_padding(key, where.k_seg), _zero_padding(value, where.k_seg)
    args = meshes.vary_alike(query, key, value, where, sinks)
    run = meshes.auto(functools.partial(_compiled, kernel), query, (0, 1, 2, None), (0, 1, 2))
    out, lse = run(*args)
    if where.q_seg is not None:  # whatever cotangents hold at padding stays out too
        out, lse = _zero_padding(out, where.q_seg), jnp.where((where.q_seg < 0)[..., None], lax.stop_gradient(lse), lse)
    return (out, lse) if return_lse else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel, q, k, v, where, sinks):
    return _attend_fwd(kernel, q, k, v, where, sinks)[0]


def _attend_fwd(kernel, q, k, v, where, sinks):
    out, lse = kernel.forward(q, k, v, where)
    if sinks is not None:
        joined = jnp.logaddexp(lse, sinks.astype(jnp.float32))
        share = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - joined))  # what the sink leaves of the softmax
        out, lse = (out * share[..., None]).astype(out.dtype), joined
    return (out, lse), (q, k, v, where, sinks, out, lse)


def _attend_bwd(kernel, saved, cotangents):
    q, k, v, where, sinks, out, lse = saved
    dout, dlse = cotangents
    empty = lse == -jnp.inf
    dout = jnp.where(empty[..., None], 0, dout)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - jnp.where(empty, 0.0, dlse)
    lse = jnp.where(empty, jnp.inf, lse)  # exp(S - inf) = 0: rows that see nothing have no gradients
    dq, dk, dv = kernel.backward(q, k, v, where, dout, lse, delta)
    dsinks = None
    if sinks is not None:
        dsinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32) - lse) * delta, axis=(0, 1)).astype(sinks.dtype)
    return dq, dk, dv, None, dsinks


_attend.defvjp(_attend_fwd, _attend_bwd)
_compiled = jax.jit(_attend, static_argnums=0)  # so that a call outside of jit compiles its loops once


def numbers(query, scale, logits_soft_cap):
    """(scale, soft cap), checked, with the default filled in."""
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else checks.number("scale", scale)
    if logits_soft_cap is None:
        return scale, None
    cap = checks.number("logits_soft_cap", logits_soft_cap)
    if cap <= 0:
        raise ValueError(f"logits_soft_cap: expected a positive number, got {cap}: None leaves the scores as they are")
    return scale, cap


def check(query, key, value, mask, segment_ids, q_positions, kv_positions, sinks):
    """The arguments as arrays that fit together: (query, key, value, where the tokens stand, mask, sinks)."""
    sizes = {}
    query = checks.array("query", query, "B T N H", sizes)
    key = checks.array("key", key, "B S N_kv H", sizes, (query.dtype.name,))
    value = checks.array("value", value, "B S N_kv H_v", sizes, (query.dtype.name,))
    if sizes["N_kv"] == 0 or sizes["N"] % sizes["N_kv"]:
        hint = "time comes before heads, so pass head-first [B, N, T, H] arrays as x.swapaxes(1, 2)"
        raise ValueError(
            f"key: {sizes['N_kv']} heads do not divide the {sizes['N']} of query: repeat heads, or, if "
            f"{sizes['N_kv']} is a length, {hint}"
        )
    if sinks is not None:
        sinks = checks.array("sinks", sinks, "N", sizes)
    q_ids, k_ids = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if (q_ids is None) != (k_ids is None):
        raise ValueError("segment_ids: one of the pair is None: give the ids of the queries and of the keys")
    dense = None
    if hasattr(mask, "shape"):
        axes = [axis if size != 1 else "1" for axis, size in zip("BN", mask.shape, strict=False)]
        dense, mask = checks.array("mask", mask, " ".join([*axes, "T", "S"]), {**sizes, "1": 1}, ("bool",)), None
    where = Where(
        _integers("q_positions", q_positions, "B T", sizes),
        _integers("kv_positions", kv_positions, "B S", sizes),
        _integers("segment_ids", q_ids, "B T", sizes),
        _integers("segment_ids", k_ids, "B S", sizes),
        dense,
    )
    return query, key, value, where, as_mask(mask), sinks


def _integers(name, x, axes, sizes):
    """[T] or [B, T] integers as int32 [1, T] or [B, T]."""
    if x is None:
        return None
    if getattr(x, "ndim", 2) == 1:
        return checks.array(name, x, axes.split()[1], sizes, checks.INTS)[None].astype(jnp.int32)
    return checks.array(name, x, axes, sizes, checks.INTS).astype(jnp.int32)


def _zero_padding(x, segment_ids):
    return jnp.where((segment_ids < 0)[:, :, None, None], 0, x)
