"""Gated linear attention for JAX: checks, segments and padding, autodiff over a kernel's (forward, backward) pair."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ringtide.jax import checks, dispatch, meshes

RESET = -128.0  # e^-128 is 0 in float32: the least gate that a kernel sees


def gla(
    q,
    k,
    v,
    g,
    *,
    scale=None,
    initial_state=None,
    output_final_state=False,
    segment_ids=None,
    implementation=None,
):
    """Gated linear attention over whole sequences.

        S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

    Works under jit, grad, vmap, remat and shard_map. Any T (0 too), K and V.

    Args:
      q, k: queries and keys [B, T, N, K], float32, bfloat16 or float16.
      v: values [B, T, N, V], in the dtype of q.
      g: log decay a key channel, [B, T, N, K], in [-inf, 0], best in float32; -inf forgets the channel. It is exact for
        any size and mix of gates. A positive or NaN gate is the caller's mistake: checked mode refuses it.
      scale: a number, by default 1/sqrt(K).
      initial_state: the state before the first token, [B, N, K, V] float32; None is zeros.
      output_final_state: also return the state after the last token.
      segment_ids: [B, T] integers. A token whose id differs from the last one before it starts from a zero state.
        Negative ids are padding: output 0, the state passes unchanged, and q, k, v and g may hold anything, NaN too.
        initial_state enters the first segment (hand zeros where a new one begins), the final state is the last one's.
      implementation: a name ("xla", "nki") or a sequence of names to try; None chooses by platform.

    Returns:
      (out [B, T, N, V] in the dtype of v, final state [B, N, K, V] float32, or None). Both are differentiable.

    Raises:
      ValueError, TypeError: an argument of the wrong shape or dtype, named with its cure.
      NotImplementedError: none of `implementation` can serve.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv 2312.06635.
    """
    sizes = {}
    q = checks.array("q", q, "B T N K", sizes)
    k = checks.array("k", k, "B T N K", sizes, (q.dtype.name,))
    v = checks.array("v", v, "B T N V", sizes, (q.dtype.name,))
    g = checks.array("g", g, "B T N K", sizes)
    if initial_state is None:  # zeros that lie over a mesh as k and v do
        zk, zv = (jnp.zeros_like(x.sum(1), jnp.float32) for x in (k, v))
        h0 = zk[..., None] * zv[..., None, :]
    else:
        h0 = checks.array("initial_state", initial_state, "B N K V", sizes, ("float32",))
    scale, implementation = _scale(scale, sizes["K"]), dispatch.names("gla", implementation)
    g = g.astype(jnp.float32)
    if segment_ids is None:
        out, state = _run(implementation, scale, q, k, v, _gates(g), h0)
    else:
        ids = checks.integers("segment_ids", segment_ids, "B T", sizes)
        valid, reset = (x[..., None, None] for x in _segments(ids))
        q, k, v, g = (jnp.where(valid, x, 0) for x in (q, k, v, g))
        g = jnp.where(reset, RESET, _gates(g))
        out, state = _run(implementation, scale, q, k, v, g, h0)
        out = jnp.where(valid, out, 0)  # 0 already; this keeps a NaN cotangent at padding out of the gradients
    return out, state if output_final_state else None


def gla_decode_step(
    q,
    k,
    v,
    g,
    state,
    *,
    slot_ids=None,
    has_initial_state=None,
    scale=None,
    implementation=None,
):
    """One token of gated linear attention for each of B sequences, whose states live in a pool.

    Equals one token of `gla`. Under jit, donate `state` to update the pool in place.

    Args:
      q, k, g: [B, N, K], v: [B, N, V], as in `gla` without the time axis.
      state: the pool, [slots, N, K, V] float32.
      slot_ids: [B] integers, the slot of each row, no two alike. A negative one skips the row: its output is 0, no slot
        is touched, and the row may hold anything. One beyond the pool touches nothing either and gives NaN. Checked
        mode refuses that, and duplicates. None: row b is slot b.
      has_initial_state: [B] bool. False starts the row from zeros, whatever its slot holds; None: all True.
      scale, implementation: as in `gla`.

    Returns:
      (out [B, N, V] in the dtype of v, state [slots, N, K, V] float32).

    Raises: as `gla`.
    """
    sizes = {}
    q = checks.array("q", q, "B N K", sizes)
    k = checks.array("k", k, "B N K", sizes, (q.dtype.name,))
    v = checks.array("v", v, "B N V", sizes, (q.dtype.name,))
    g = checks.array("g", g, "B N K", sizes).astype(jnp.float32)
    if has_initial_state is not None:
        has_initial_state = checks.array("has_initial_state", has_initial_state, "B", sizes, ("bool",))
    if slot_ids is None:
        state = checks.array("state", state, "B N K V", sizes, ("float32",))
    else:
        state = checks.array("state", state, "slots N K V", sizes, ("float32",))
        ids = checks.integers("slot_ids", slot_ids, "B", sizes)
        slots = sizes["slots"]
        beyond = ids >= slots
        slot_ids = jnp.where((ids >= 0) & ~beyond, ids, -1)
        used = (slot_ids >= 0)[:, None, None]
        q, k, v, g = (jnp.where(used, x, 0) for x in (q, k, v, g))
        _refuse_slots(slot_ids, beyond, slots)
    implementation, scale = dispatch.names("gla", implementation), _scale(scale, sizes["K"])
    if not (state.size and q.size):  # kernels never see an empty pool
        out = jnp.zeros_like(v)
    else:
        args = (q, k, v, _gates(g), state, slot_ids, has_initial_state)
        out, state = dispatch.call("gla", "decode_step", implementation, *args, scale=scale)
    if slot_ids is not None:
        out = jnp.where(beyond[:, None, None], jnp.nan, out)
    return out, state


def _run(implementation, scale, q, *args):
    run = meshes.auto(functools.partial(_gla, implementation, scale), q, (0, 1, 2, None), (0, 2, None, None))
    return run(*meshes.vary_alike(q, *args))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gla(implementation, scale, q, k, v, g, h0):
    return dispatch.call("gla", "forward", implementation, q, k, v, g, h0, scale=scale)


def _gla_forward(implementation, scale, *inputs):
    return dispatch.call("gla", "forward", implementation, *inputs, scale=scale), inputs


def _gla_backward(implementation, scale, inputs, grads):
    return dispatch.call("gla", "backward", implementation, *inputs, *grads, scale=scale)


_gla.defvjp(_gla_forward, _gla_backward)


def _segments(ids):
    """(valid, reset), both bool [B, T]: is it a token, and does its id differ from that of the token before it?"""
    T = ids.shape[1]
    valid = ids >= 0
    last = lax.cummax(jnp.where(valid, jnp.arange(T, dtype=jnp.int32), -1), axis=1)  # the last token up to here
    before = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :T]
    changed = jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=1) != ids
    return valid, valid & (before >= 0) & changed


def _gates(g):
    """As a kernel wants them: float32 in [-128, 0]."""
    if checks.enabled():
        message = "g: expected gates in [-inf, 0], found a positive or NaN one: pass logs, as jax.nn.log_sigmoid(x)"
        checks.refuse(~(g <= 0).all(), message)
    return jnp.where(g < RESET, RESET, g)


def _refuse_slots(ids, beyond, slots):
    if checks.enabled():
        message = f"slot_ids: expected slots below {slots} (the size of the pool), found more: negative skips a row"
        checks.refuse(beyond.any(), message)
        ids = jnp.sort(ids)
        repeated = (ids[1:] == ids[:-1]) & (ids[1:] >= 0)
        checks.refuse(repeated.any(), "slot_ids: two rows share a slot: decode one token a slot in a step")


def _scale(scale, K):
    return max(K, 1) ** -0.5 if scale is None else checks.number("scale", scale, "multiply q by an array instead")
