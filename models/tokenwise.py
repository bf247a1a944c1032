"""A function of single tokens over very many: a chunk at a time, its weights whole only while they are needed.

    forward      W = gather(w);  for each chunk:  y = f(W, x)
    backward     W = gather(w);  for each chunk:  dW += pull(dy), dx      pull: of f at (W, x), computed again
                 dw = scatter(dW), the transpose of gather, in float32

At 16M tokens one [T, F] activation of a feed-forward is many gigabytes a device; a chunk's is not. What is kept for the
backward pass are the arguments. Gradients of weights are added up over chunks and devices in float32, whatever the
dtype that the matrices were multiplied in.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def tokenwise(f, w, xs, at=(), *, dtype=None, chunk=None, gather=lambda w: w):
    """f(w, *xs, *at) on one device, or inside shard_map with a `gather`.

    Args:
      f: a function (w, *xs, *at) -> y, arrays or a tuple of them, that treats each token by itself.
      w: the weights, a pytree of arrays.
      xs: a tuple of arrays [B, T, ...], differentiated. at: as xs, integers.
      dtype: what the weights are cast to, before they are gathered; None leaves them as they are.
      chunk: tokens that f sees at a time; None for all of them, by JAX's own autodiff.
      gather: weights as they are kept -> whole; linear.

    Returns y [B, T, ...].
    """
    if chunk is None:
        return f(gather(_cast(w, dtype)), *xs, *at)
    lead = (*xs, *at)[0].shape[:2]
    xs, at = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (xs, at))  # [B T, ...]
    y = _chunked(f, gather, dtype, chunk, w, xs, at)
    return jax.tree.map(lambda y: y.reshape(*lead, *y.shape[1:]), y)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _chunked(f, gather, dtype, chunk, w, xs, at):
    w = gather(_cast(w, dtype))
    return _fold(lambda _, x: (None, f(w, *x[0], *x[1])), None, (xs, at), chunk)[1]


def _chunked_fwd(f, gather, dtype, chunk, w, xs, at):
    return _chunked(f, gather, dtype, chunk, w, xs, at), (w, xs, at)


def _chunked_bwd(f, gather, dtype, chunk, saved, dy):
    w, xs, at = saved
    whole = gather(_cast(w, dtype))

    def piece(sums, x):
        xs, at, dy = x
        _, pull = jax.vjp(lambda w, xs: f(w, *xs, *at), whole, xs)
        dw, dx = pull(dy)
        return jax.tree.map(lambda total, dw: total + dw.astype(total.dtype), sums, dw), dx

    zero = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), whole)
    dw, dx = _fold(piece, zero, (xs, at, dy), chunk)
    _, scatter = jax.vjp(gather, _cast(w, jnp.float32))
    return jax.tree.map(lambda dw, w: dw.astype(w.dtype), *scatter(dw), w), dx, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _fold(f, carry, xs, chunk):
    """lax.scan of f: (carry, x) -> (carry, y) over chunks of xs [tokens, ...]; the rest, if any, in one more call."""
    tokens = jax.tree.leaves(xs)[0].shape[0]
    chunks, parts = tokens // chunk, []
    if chunks:
        head = jax.tree.map(lambda x: x[: chunks * chunk].reshape(chunks, chunk, *x.shape[1:]), xs)
        carry, y = lax.scan(f, carry, head)
        parts.append(jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), y))
    if tokens % chunk:
        carry, y = f(carry, jax.tree.map(lambda x: x[chunks * chunk :], xs))
        parts.append(y)
    return carry, jax.tree.map(lambda *y: jnp.concatenate(y), *parts) if len(parts) > 1 else parts[0]


def _cast(w, dtype):
    return w if dtype is None else jax.tree.map(lambda x: x.astype(dtype), w)
