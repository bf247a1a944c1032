"""What a call of ringtide's splash attention costs by the compiler's schedule: cycles of its parts, times how often
each of them runs."""

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from ringtide.bench.case import Case, row
from ringtide.bench.chips import CHIPS
from ringtide.bench.compile import dumped
from ringtide.bench.schedule import Kernel, read
from ringtide.kernels.masks import Causal, Where


class Cost(NamedTuple):
    """What the schedule says of a kernel, and the sizes of its tiles."""

    kernel: Kernel
    parts: dict  # see `nested_costs`
    facts: dict  # of `kernel_call`, and of the compile

    def cycles(self, counts):
        """Of a call, of all cores together; counts: `visits` of all stacks of heads."""
        return cycles(self.parts, counts) + self.kernel.root.cycles


def cost(case, python=None, config=None):
    """The Cost of the kernel that serves the call. python, config: as in `price`."""
    with dumped(
        case.chip,
        "ringtide.bench.splash:kernel_call",
        {"case": asdict(case), "config": config},
        python=python,
    ) as (facts, dump):
        kernel = read(dump, f".*splash_{case.pass_}.*", case.chip)
    return Cost(kernel, nested_costs(kernel), facts)


def price(case, python=None, config=None):
    """The row (case.row) of the call, with the kernel's own tiles or config = (rows, keys, chunk, piece), options."""
    found = cost(case, python, config)
    kernel, costs, facts = found
    rows, keys, chunk, _ = facts["config"]["blocks"]
    body, width = ("stream", keys) if costs["stream"] else ("chunk", chunk)
    tile = {
        "pairs": rows * width,
        "cycles": costs[body],
        "masked": costs["mixed"] and costs["mixed"] * width // chunk,  # of as many pairs
        "mxu": costs["mxu"][body],
        "spills": costs["spills"][body],
    }
    call = {
        "cycles": found.cycles(facts["counts"]),
        "cores": CHIPS[case.chip].cores if kernel.split else 1,
        "bytes": facts["bytes"],
    }
    return row(case, "ringtide", kernel, tile, call, facts, facts["config"])


def kernel_call(case, config):
    """What compile.py compiles: (function, inputs, {"config", "counts", "bytes"}); config None: the kernel's own."""
    import jax
    import jax.numpy as jnp

    from ringtide.kernels.pallas import platforms, splash, splash_bwd, tiles

    case = Case(**case)
    kernel, table = (
        (splash.forward, splash.TILES) if case.pass_ == "forward" else (splash_bwd.backward, splash_bwd.TILES)
    )
    mask, where = _mask(case)
    facts = {}

    def call(q, k, v, *rest):
        chip, cores = platforms.chip()  # known while tracing: the facts are filled in here
        own = tiles.choose(table, chip, case.head_dim, q.dtype)
        sizes = tiles.Tiles(*config[0], **config[1]) if config else own
        cut = tiles.Cut(q, k, v, where, mask, sizes, cores)
        sizes_of = {"span": cut.span, "keys": cut.keys, "chunk": cut.chunk}
        counts = {name: n * cut.stacks for name, n in visits(case, **sizes_of).items()}
        facts["config"] = {"blocks": [cut.rows, cut.keys, cut.chunk, cut.piece]} | (
            {"fold": True} if sizes.fold else {}
        )
        facts["sizes"], facts["stacks"] = sizes_of, cut.stacks
        facts["counts"] = counts
        facts["bytes"] = bytes_of(case, counts, cut.rows, cut.keys, sizes.fold)
        return kernel(q, k, v, where, *rest, mask=mask, scale=case.head_dim**-0.5, sizes=sizes)

    q, k = (jax.ShapeDtypeStruct((1, case.seq, n, case.head_dim), jnp.bfloat16) for n in (case.heads, case.kv_heads))
    a_row = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    return call, (q, k, k) if case.pass_ == "forward" else (q, k, k, q, a_row, a_row), facts


def _mask(case):
    """(mask, where the tokens stand) as a caller gives them: documents are segments."""
    kind, _, n = case.mask.partition(":")
    if case.given:
        at = np.arange(case.seq, dtype=np.int32)[None]
        return case.visible, Where(at, at)
    if kind != "packed":
        return case.visible, Where()
    documents = np.arange(case.seq, dtype=np.int32)[None] // (case.seq // int(n))
    return Causal(), Where(q_seg=documents, k_seg=documents)


def bytes_of(case, counts, rows, keys, fold):
    """HBM traffic. Forward: q, out, lse a row; k, v a step. Backward: k, v, dk, dv a row; q, q^T, dout, dout^T, dq in
    float32 in and out, 32 bytes of statistics a step, and with `fold` as much again for what q and dout are less."""
    token = case.token_bytes
    if case.pass_ == "forward":
        return counts["rows"] * rows * (2 * token + 4) + counts["steps"] * keys * 2 * token
    return counts["rows"] * keys * 4 * token + counts["steps"] * rows * (8 * token + 32 + fold * 2 * token)


class Tokens(NamedTuple):
    """The tokens on one side of a call: `count` of them, at position(index), which increases within a block."""

    count: int
    position: Callable = lambda index: index

    def block(self, first, size):
        """The least and the greatest position in [first, first + size)."""
        return self.position(first), self.position(np.minimum(first + size, self.count) - 1)


def visits(case, span, keys, chunk, q_at=None, k_at=None):
    """How often each part of the kernel runs, a stack of heads; for what the parts are see `nested_costs`.

    q_at, k_at: Tokens, where queries and keys do not stand in order.

    Forward, each block of `span` queries visits key blocks from the last to the first that it sees something of, and
    goes chunk by chunk, all of them mixed, until each of its queries has seen a key. Backward, each block of keys
    visits blocks of queries. A block that is seen whole is streamed; of others, each chunk is taken, taken with a mask
    ("mixed"), or skipped.
    """
    q_at, k_at = q_at or Tokens(case.seq), k_at or Tokens(case.seq)
    q, k, c = (np.arange(0, n, size) for n, size in ((q_at.count, span), (k_at.count, keys), (keys, chunk)))

    def seen(q, span, k, width):
        """(some, every) of tiles of [q, q + span) and [k, k + width)."""
        some, every = case.visible.block(*q_at.block(q, span), *k_at.block(np.minimum(k, k_at.count - 1), width))
        return some & (k < k_at.count), every & (k + width <= k_at.count)

    forward = case.pass_ == "forward"
    counts = dict.fromkeys(("rows", "steps", "stream", "chunk", "mixed", "skipped"), 0)
    for at in q if forward else k:
        block_q, block_k = (at, k[::-1]) if forward else (q, at)
        some, whole = seen(block_q, span, block_k, keys)
        reach = np.flatnonzero(some) if some.any() else np.zeros(1, int)
        there = slice(reach[0], reach[-1] + 1)
        chunks = (block_k[there, None] + c[::-1]) if forward else block_k + c
        some, every = seen(block_q if forward else block_q[there, None], span, chunks, chunk)
        whole = whole[there]
        if forward:
            blind = _blind(seen, np.arange(at, min(at + span, q_at.count)), chunks, chunk)
            every = every & ~blind
            whole = whole & ~blind.any(axis=1)
        counts["rows"] += 1
        counts["steps"] += len(whole)
        counts["stream"] += int(whole.sum())
        counts["chunk"] += int((every & ~whole[:, None]).sum())
        counts["mixed"] += int((some & ~every & ~whole[:, None]).sum())
        counts["skipped"] += int((~some & ~whole[:, None]).sum())
    return counts


def _blind(seen, queries, chunks, width):
    """bool like `chunks`, which are in the order of visits: some query has seen nothing before this one."""
    blind = np.zeros(chunks.shape, bool)
    for i, k in np.ndenumerate(chunks):
        if not queries.size:
            break
        blind[i] = True
        queries = queries[~seen(queries, 1, k, width)[0]]
    return blind


def nested_costs(kernel):
    """Cycles of the parts of a kernel like ours: a loop over rows (the grid), in it one over steps (blocks of memory),
    and in that one over chunks. Bodies are the branches that use the matrix units:

        row     outside the step loop          step    in the step loop, outside bodies and chunk loop
        stream  a whole block, no mask         link    in the chunk loop, outside bodies
        chunk   a chunk, no mask               mixed   a chunk that needs a mask: the most selects

    A body without a region of its own (no chunk loop, say) is None. A branch without matrix work inside a body is what
    the first of a row does: it belongs to the row. "mxu" and "spills" are {body: ...}.
    """
    step = grid = _busiest_loop(kernel.root)
    if not grid:
        raise ValueError(f"{kernel.name}: no loop multiplies matrices")
    while (inner := _busiest_loop(step)) and _work(inner) == _work(grid):
        step = inner  # a loop around the step loop, such as one that tries again, is passed once a row
    links = _busiest_loop(step)
    in_chunks = _bodies(links) if links else []
    whole = [body for body in _bodies(step) if not any(body is other for other in in_chunks)]
    bodies = {
        "stream": max(whole, key=_work, default=None),
        "chunk": min(in_chunks, key=lambda body: body.selects, default=None),
        "mixed": max(in_chunks, key=lambda body: body.selects, default=None),
    }

    def outside(loop, *inner):
        skip = {id(region) for part in inner if part for region in part.walk()}
        return sum(region.cycles for region in loop.walk() if id(region) not in skip)

    def first(body):
        return sum(part.total for part in body.within if part.kind == "branch" and not _work(part)) if body else 0

    return {
        "row": outside(grid, step) + max(map(first, bodies.values())),
        "step": outside(step, links, *whole),
        "link": outside(links, *in_chunks) if links else 0,
        **{name: body and body.total - first(body) for name, body in bodies.items()},
        "mxu": {name: body and _work(body) for name, body in bodies.items()},
        "spills": {name: body and body.spills for name, body in bodies.items()},
    }


def cycles(costs, counts):
    """Cycles of a call: counts {"rows", "steps", "stream", "chunk", "mixed", "skipped"} of all heads together."""
    bodies = sum(counts[name] * (costs[name] or 0) for name in ("stream", "chunk", "mixed"))
    links = counts["chunk"] + counts["mixed"] + counts["skipped"]
    return counts["rows"] * costs["row"] + counts["steps"] * costs["step"] + links * costs["link"] + bodies


def _busiest_loop(region):
    """The outermost loop inside `region` with the most matrix work in and below it; None if there is none."""
    loops = [r for r in region.walk() if r is not region and r.kind == "loop" and _work(r)]
    return max(loops, key=lambda r: (_work(r), r.stop - r.start), default=None)


def _work(region):
    return sum(r.mxu for r in region.walk())


def _bodies(region):
    """The outermost branches within that have matrix work of their own."""
    if region.kind != "loop" and region.mxu:
        return [region]
    return [body for child in region.within for body in _bodies(child)]
