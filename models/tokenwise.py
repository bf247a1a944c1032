"""A function of single tokens over very many: a chunk at a time, its weights whole only while they are needed.

    forward      W = gather(w);  for each chunk:  y = f(W, x)
    backward     W = gather(w);  for each chunk:  dW += pull(dy), dx      pull: of f at (W, x), computed again
                 dw = scatter(dW), the transpose of gather, in float32

At 16M tokens one [T, F] activation of a feed-forward is many gigabytes a device; a chunk's is not. What is kept for the
backward pass are the arguments. A sum over tokens, such as a loss, needs no second pass: its gradients are found with
it, and scaled later. Gradients of weights are added up over chunks and devices in float32, whatever the dtype that the
matrices were multiplied in.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def tokenwise(f, w, xs, at=(), *, dtype=None, chunk=None, total=False, gather=lambda w: w):
    """f(w, *xs, *at) on one device, or inside shard_map with a `gather`.

    Args:
      f: a function (w, *xs, *at) -> y, arrays or a tuple of them, that treats each token by itself.
      w: the weights, a pytree of arrays.
      xs: a tuple of arrays [B, T, ...], differentiated. at: as xs, integers.
      dtype: what the weights are cast to, before they are gathered; None leaves them as they are.
      chunk: tokens that f sees at a time; None for all of them, by JAX's own autodiff.
      total: the sum of y [B, T] over tokens is wanted, [1, 1]; needs a chunk.
      gather: weights as they are kept -> whole; linear.

    Returns y [B, T, ...].
    """
    if chunk is None:
        return f(gather(_cast(w, dtype)), *xs, *at)
    lead = (*xs, *at)[0].shape[:2]
    xs, at = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (xs, at))  # [B T, ...]
    if total:
        return _summed(f, gather, dtype, chunk, w, xs, at)
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
    pull, no_gradients = _puller(f, gather, dtype, w)

    def piece(sums, x):
        *x, dy = x
        return pull(sums, *x, lambda y: dy)[1:]

    dw, dx = _fold(piece, no_gradients, (xs, at, dy), chunk)
    return _scatter(gather, dw, w), dx, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _summed(f, gather, dtype, chunk, w, xs, at):
    w = gather(_cast(w, dtype))
    start = _no_sum(xs)
    return _fold(lambda total, x: (total + jnp.sum(f(w, *x[0], *x[1])), ()), start, (xs, at), chunk)[0]


def _summed_fwd(f, gather, dtype, chunk, w, xs, at):
    pull, no_gradients = _puller(f, gather, dtype, w)

    def piece(carry, x):
        total, sums = carry
        y, sums, dx = pull(sums, *x, jnp.ones_like)
        return (total + jnp.sum(y), sums), dx

    (total, dw), dx = _fold(piece, (_no_sum(xs), no_gradients), (xs, at), chunk)
    return total, (_scatter(gather, dw, w), dx)


def _summed_bwd(f, gather, dtype, chunk, gradients, scale):
    def scaled(dx):
        axes = jax.typeof(scale).manual_axis_type.varying - jax.typeof(dx).manual_axis_type.varying
        same = lax.pmax(scale, tuple(axes)) if axes else scale  # it is on all devices, but shard_map cannot know
        return (dx * same.reshape((1,) * dx.ndim)).astype(dx.dtype)

    return *jax.tree.map(scaled, gradients), None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _no_sum(xs):
    return jnp.zeros_like(xs[0][:1, :1], jnp.float32)  # [1, 1]: a mesh sees by xs where it lies


def _puller(f, gather, dtype, w):
    """A function that adds a chunk's gradients of the whole weights to float32 sums, and the sums to start with.

    (sums, xs, at, cotangent of y as a function of y) -> (y, sums, dx)
    """
    whole = gather(_cast(w, dtype))

    def pull(sums, xs, at, dy_of):
        y, back = jax.vjp(lambda w, xs: f(w, *xs, *at), whole, xs)
        dw, dx = back(dy_of(y))
        return y, jax.tree.map(lambda total, dw: total + dw.astype(total.dtype), sums, dw), dx

    return pull, jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), whole)


def _scatter(gather, dw, w):
    """Gradients of the whole weights, summed over devices, as those of the weights as they are kept."""
    _, transpose = jax.vjp(gather, _cast(w, jnp.float32))
    return jax.tree.map(lambda dw, w: dw.astype(w.dtype), *transpose(dw), w)


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
