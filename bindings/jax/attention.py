"""`ringtide.attention` for JAX: checks, sinks and autograd around a kernel's (forward, backward) pair."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ringtide.jax import checks, dispatch, meshes
from ringtide.kernels.masks import Mask, Where, as_mask

NAMES = "attention_out", "attention_lse"  # of what a remat policy must keep, or the backward pass runs forward again
LIMITS = {"q_positions": 1 << 30, "kv_positions": 1 << 30, "segment_ids": 1 << 31}  # that values must be below, in size


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
        `&`, `|` and `~`; a function f(q_pos, k_pos) -> bool, pure and elementwise (the same function object shares its
        compilation; what is traced belongs into positions); a bool array [B | 1, N | 1, T, S], true where visible;
        None for everything.
      segment_ids: [B, T] integers, or a tuple of two, ([B, T], [B, S]): equal ids see each other. Negative ids are
        padding, which sees nothing, is seen by nothing and may hold NaN. (Other tokens may not, seen or unseen.)
      q_positions, kv_positions: [T] or [B, T], [S] or [B, S] integers in (-2**30, 2**30), the places in the sequence
        that the mask compares; by default both count from 0.
      scale: of the scores; by default 1 / sqrt(H).
      logits_soft_cap: cap; scores become cap * tanh(score / cap), after scaling.
      sinks: [N], a score per head that takes part in the softmax and has no value.
      return_lse: whether to return the log of the softmax's denominator too, natural, sinks included.
      implementation: a name, a sequence of names to try in order, or None for the best on the platform compiled for.

    Returns:
      [B, T, N, H_v] in query's dtype, or with `return_lse` (that, lse [B, T, N] float32). Both are differentiable. A
      query that sees nothing has output 0, lse -inf (with a sink: the sink) and no gradients.

    Differentiable by jax.grad and jax.vjp, under jit, vmap, remat and shard_map, once; not by jax.jvp. Under
    jax.checkpoint the forward kernel runs again in the backward pass, unless the policy keeps the two values by name:
    `jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")`.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it and the cure.
      NotImplementedError: no kernel in `implementation` can serve the call.
    """
    query, key, value, where, mask, sinks = check(
        query, key, value, mask, segment_ids, q_positions, kv_positions, sinks
    )
    kernel = Kernel(dispatch.names("attention", implementation), mask, *numbers(query, scale, logits_soft_cap))
    return differentiable(kernel, query, key, value, where, sinks, return_lse)


class Kernel(NamedTuple):
    """The (forward, backward) pair of an implementation, for a mask; equal ones share a compilation."""

    implementation: str | tuple[str, ...] | None
    mask: Mask
    scale: float
    soft_cap: float | None

    def forward(self, q, k, v, where, *, out_dtype=None):
        if not (q.size and k.size):  # kernels never see an empty array
            out = jnp.full_like(q[..., :1], 0, out_dtype or q.dtype)  # a mesh sees where these lie by q
            return jnp.broadcast_to(out, (*q.shape[:3], v.shape[3])), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32)
        return self._call("forward", q, k, v, where, out_dtype=out_dtype)

    def backward(self, q, k, v, *args, out_dtype=None):
        if not (q.size and k.size):
            return tuple(jnp.full_like(x, 0, out_dtype or x.dtype) for x in (q, k, v))
        return self._call("backward", q, k, v, *args, out_dtype=out_dtype)

    def around(self, axis, function, otherwise, q, k, *args, out_dtype=None):
        """`function` over the keys of all shards along a mesh axis, by a kernel that sends them itself if there is one
        that serves, and is the better one on the chip compiled for; else otherwise(q, k, *args)."""
        if not (q.size and k.size):
            return otherwise(q, k, *args)
        options = self._options() | {"axis": axis, "out_dtype": out_dtype}
        return dispatch.around("attention", function, self.implementation, otherwise, q, k, *args, **options)

    def _call(self, function, *args, **options):
        return dispatch.call("attention", function, self.implementation, *args, **options, **self._options())

    def _options(self):
        return {"mask": self.mask, "scale": self.scale, "soft_cap": self.soft_cap}


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
    out, lse = checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])
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
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scale = checks.number("scale", scale, "multiply query by an array instead")
    if logits_soft_cap is None:
        return scale, None
    cap = checks.number("logits_soft_cap", logits_soft_cap, "one number serves all heads")
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
    if sizes["H"] == 0:
        raise ValueError("query: expected a head_dim of at least 1, got 0")
    if sinks is not None:
        sinks = checks.array("sinks", sinks, "N", sizes)
    q_ids, k_ids = _pair(segment_ids)
    dense = None
    if hasattr(mask, "shape"):
        dense, mask = _dense(mask, sizes), None
    where = Where(
        _integers("q_positions", q_positions, "B T", sizes),
        _integers("kv_positions", kv_positions, "B S", sizes),
        _integers("segment_ids", q_ids, "B T", sizes),
        _integers("segment_ids", k_ids, "B S", sizes),
        dense,
    )
    return query, key, value, where, _function(mask), sinks


def _pair(segment_ids):
    """(ids of the queries, ids of the keys)."""
    if not isinstance(segment_ids, tuple):
        return segment_ids, segment_ids
    if len(segment_ids) != 2 or any(ids is None for ids in segment_ids):
        raise ValueError("segment_ids: expected [B, T], or a tuple of two: the ids of the queries and of the keys")
    return segment_ids


def _integers(name, x, axes, sizes):
    """Integers as int32 [B, T], or as [1, T] for positions [T] that all sequences share."""
    if x is None:
        return None
    if name != "segment_ids" and np.ndim(x) == 1:
        return checks.integers(name, x, axes.split()[1], sizes, LIMITS[name])[None]
    return checks.integers(name, x, axes, sizes, LIMITS[name])


def _dense(mask, sizes):
    batch, heads, length, keys = (sizes[axis] for axis in ("B", "N", "T", "S"))
    if mask.dtype != bool:
        raise TypeError(f"mask: expected bool (true where visible), got an array of {mask.dtype}: compare it first")
    if (
        mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
        or mask.shape[2:] != (length, keys)
    ):
        want = f"[B={batch} or 1, N={heads} or 1, T={length}, S={keys}]"
        raise ValueError(f"mask: expected shape {want}, got {list(mask.shape)}: add axes of size 1")
    return jnp.asarray(mask)


def _function(mask):
    """The mask, of which it is known that it can be called, compared, and gives bool."""
    mask, position = as_mask(mask), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    try:
        hash(mask)
        dtype = jax.eval_shape(mask, position, position).dtype
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"mask: expected a hashable, pure JAX function of (q_pos, k_pos), int32 arrays: {reason}"
        ) from None
    if dtype != jnp.bool_:
        raise TypeError(f"mask: expected bool of the function, got {dtype}: compare, as in `!= 0`")
    return mask


def _zero_padding(x, segment_ids):
    return jnp.where((segment_ids < 0)[:, :, None, None], 0, x)
