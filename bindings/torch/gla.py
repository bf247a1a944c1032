"""Gated linear attention for PyTorch: checks, segments and padding, autocast, and the names that fla's users know."""

import torch
from torch.nn.functional import pad

from ringtide.torch import checks, ops

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

    Works under autograd, torch.compile(fullgraph=True), export and autocast (q, k and v in the autocast dtype, gates
    and states in float32). Any T (0 too), K and V. What a row gives does not depend on the other rows, bit for bit.

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
      implementation: a name ("eager", "nki") or a sequence of names to try; None chooses by the device.

    "eager" also takes float64, states and gates too, and then computes in float64.

    Returns:
      (out [B, T, N, V] in the dtype of v, final state [B, N, K, V] float32, or None). Both are differentiable.

    Raises:
      ValueError, TypeError: an argument of the wrong shape or dtype, named with its cure. Heads before
        time are recognised where arguments disagree; where all of them are so, only beside a state or segment_ids.
      NotImplementedError: none of `implementation` can serve.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv 2312.06635.
    """
    q, k, v, g, single, sizes = _tokens(q, k, v, g, "B T N")
    h0 = _state(initial_state, "B", q, single, sizes)
    g = g.to(single)
    scale, implementation = _scale(scale, sizes["K"]), ops.choose(implementation, q)
    if segment_ids is None:
        out, state = ops.gla(q, k, v, _gates(g), h0, None, scale, implementation)
    else:
        ids = checks.integers("segment_ids", segment_ids, "B T", sizes)
        valid, reset = (x[..., None, None] for x in _segments(ids))
        q, k, v, g = (torch.where(valid, x, 0) for x in (q, k, v, g))
        g = torch.where(reset, RESET, _gates(g))
        out, state = ops.gla(q, k, v, g, h0, None, scale, implementation)
        out = torch.where(valid, out, 0)  # 0 already; this keeps a NaN cotangent at padding out of the gradients
    return out, state if output_final_state else None


def chunk_gla(
    q,
    k,
    v,
    g,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    *,
    implementation=None,
):
    """`gla` with the signature of fla.ops.gla.chunk_gla.

    Args:
      q, k, v, g, scale, output_final_state, implementation: as in `gla`.
      initial_state: [B, N, K, V] float32, with cu_seqlens [sequences, N, K, V]; None is zeros.
      state_v_first: states, in and out, are [..., V, K].
      cu_seqlens: [sequences + 1] integers from 0 to T that never decrease; B is 1. Sequence i is the tokens from
        cu_seqlens[i] to cu_seqlens[i + 1] of the one row, none if they are equal, and has a state of its own. Nothing
        waits for the device and no shape depends on the values, which are checked on a CPU and in checked mode.
      cu_seqlens_cpu: not needed; taken so that fla's callers need no change.

    Returns, raises: as `gla`; the final state has the shape of initial_state.
    """
    if cu_seqlens is None:
        initial_state = _turned(initial_state, state_v_first)
        options = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
        out, state = gla(q, k, v, g, **options, implementation=implementation)
        return out, _turned(state, state_v_first)
    q, k, v, g, single, sizes = _tokens(q, k, v, g, "B T N")
    cu_seqlens = checks.integers("cu_seqlens", cu_seqlens, "ends", sizes)
    if sizes["B"] != 1:
        raise ValueError(f"cu_seqlens: expected q, k, v and g with B = 1, got {sizes['B']}: put all tokens in a row")
    if sizes["ends"] == 0:
        raise ValueError("cu_seqlens: expected [0, ..., T], got no value: it has one more than there are sequences")
    sizes["sequences"] = sizes["ends"] - 1
    h0 = _state(_turned(initial_state, state_v_first), "sequences", q, single, sizes)
    scale, implementation = _scale(scale, sizes["K"]), ops.choose(implementation, q, cu_seqlens)
    out, state = ops.gla(q, k, v, _gates(g.to(single)), h0, cu_seqlens, scale, implementation)
    return out, _turned(state, state_v_first) if output_final_state else None


def fused_recurrent_gla(
    q,
    k,
    v,
    gk=None,
    gv=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    reverse=False,
    state_v_first=False,
    cu_seqlens=None,
    *,
    implementation=None,
):
    """`chunk_gla` with the signature of fla.ops.gla.fused_recurrent_gla, and by the same kernel: a chunk is no longer
    than T, so that a few tokens cost little, and it is as exact as the recurrence token by token.

    Args:
      gk: the gates, None for none.  gv: gates of the value channels are not supported.
      reverse: from the last token (of each sequence) to the first.
      others: as in `chunk_gla`.
    """
    if gv is not None:
        raise NotImplementedError("gv: gates of the value channels are not supported: pass gk, those of the keys")
    if gk is None:
        checks.array("q", q, "B T N K", {})
        gk = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
    inputs = q, k, v, gk
    if reverse:
        *inputs, _, sizes = _tokens(*inputs, "B T N")
        inputs = [x.flip(1) for x in inputs]
    if reverse and cu_seqlens is not None:
        checks.sequences(checks.integers("cu_seqlens", cu_seqlens, "ends", sizes), q.shape[1])
        cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    out, state = chunk_gla(
        *inputs, scale, initial_state, output_final_state, state_v_first, cu_seqlens, implementation=implementation
    )
    if reverse:
        out = out.flip(1)
        state = state.flip(0) if state is not None and cu_seqlens is not None else state
    return out, state


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

    Equals one token of `gla`. What a row gives does not depend on the other rows nor on their number, bit for bit.

    Args:
      q, k, g: [B, N, K], v: [B, N, V], as in `gla` without the time axis.
      state: the pool, [slots, N, K, V] float32.
      slot_ids: [B] integers, the slot of each row, no two alike. A negative one skips the row: its output is 0, no slot
        is touched, and the row may hold anything. None: row b is slot b. On a CPU and in checked mode, slots beyond the
        pool and duplicates are refused; elsewhere one beyond the pool touches nothing and gives NaN.
      has_initial_state: [B] bool. False starts the row from zeros, whatever its slot holds; None: all True.
      scale, implementation: as in `gla`.

    Returns:
      (out [B, N, V] in the dtype of v, the new pool [slots, N, K, V] float32). Both are differentiable.

    Raises: as `gla`.
    """
    return ops.gla_decode(*_decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation))


def gla_decode_step_(
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
    """`gla_decode_step` that changes the pool `state` in place, as a server wants it. Returns out; no gradients."""
    with torch.no_grad():
        return ops.gla_decode_(*_decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation))


def _decode(q, k, v, g, state, slot_ids, has_initial_state, scale, implementation):
    q, k, v, g, single, sizes = _tokens(q, k, v, g, "B N")
    if has_initial_state is not None:
        checks.array("has_initial_state", has_initial_state, "B", sizes, (torch.bool,))
    if slot_ids is not None:
        slot_ids = checks.integers("slot_ids", slot_ids, "B", sizes)
    rows = "B" if slot_ids is None else "slots"
    checks.array("state", state, f"{rows} N K V", sizes, (single,))
    scale, implementation = _scale(scale, sizes["K"]), ops.choose(implementation, q)
    return q, k, v, _gates(g.to(single)), state, slot_ids, has_initial_state, scale, implementation


def _tokens(q, k, v, g, axes):
    """(q, k, v, g, the dtype of gates and states, sizes), checked, and cast as autocast wants it."""
    if isinstance(q, torch.Tensor) and ops.autocast(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        lower = lambda x: isinstance(x, torch.Tensor) and x.dtype in checks.FLOATS[:3]  # float64 stays, as elsewhere
        q, k, v = (x.to(dtype) if lower(x) else x for x in (q, k, v))
    sizes = {}
    q = checks.array("q", q, f"{axes} K", sizes)
    k = checks.array("k", k, f"{axes} K", sizes, (q.dtype,))
    v = checks.array("v", v, f"{axes} V", sizes, (q.dtype,))
    g = checks.array("g", g, f"{axes} K", sizes)
    checks.no_tangents(q=q, k=k, v=v, g=g)
    return q, k, v, g, torch.promote_types(q.dtype, torch.float32), sizes


def _state(h, rows, q, single, sizes):
    if h is None:
        return q.new_zeros([sizes[axis] for axis in (rows, "N", "K", "V")], dtype=single)
    return checks.array("initial_state", h, f"{rows} N K V", sizes, (single,))


def _segments(ids):
    """(valid, reset), both bool [B, T]: is it a token, and does its id differ from that of the token before it?"""
    B, T = ids.shape
    valid = ids >= 0
    position = torch.arange(T, device=ids.device).expand(B, T)
    last = torch.where(valid, position, -1).cummax(1).values  # the last token up to here
    before = pad(last, (1, 0), value=-1)[:, :T]
    changed = ids.gather(1, before.clamp(min=0)) != ids
    return valid, valid & (before >= 0) & changed


def _gates(g):
    """As a kernel wants them: in [-128, 0]. NaN stays, and checked mode looks at it when the op runs."""
    return g.clamp(min=RESET)


def _scale(scale, K):
    return max(K, 1) ** -0.5 if scale is None else checks.number("scale", scale, "multiply q by a tensor instead")


def _turned(state, state_v_first):
    return state.mT if state_v_first and isinstance(state, torch.Tensor) and state.ndim > 1 else state
