"""What a splash attention call costs by the compiler's schedule: cases, prices, rows. Predicted, not measured."""

from dataclasses import asdict, dataclass

from ringtide.bench.chips import CHIPS
from ringtide.bench.compile import CompileError, dumped
from ringtide.bench.schedule import read
from ringtide.kernels.masks import Causal, Chunked, Full, Local, Mask


@dataclass(frozen=True)
class Case:
    """One call in bf16, batch 1. A query sees, by `mask`, all keys ("full"), those up to its own ("causal"), the last
    N of these ("local:N"), or those of its own document of N equal ones ("packed:N")."""

    chip: str
    pass_: str  # "forward" (with lse) or "backward"
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    seq: int = 32768
    mask: str = "causal"

    @property
    def visible(self) -> Mask:
        """The mask; documents of equal length are chunks."""
        kind, _, n = self.mask.partition(":")
        if kind == "packed":
            return Chunked(self.seq // int(n)) & Causal()
        return {"full": Full, "causal": Causal, "local": lambda: Local(int(n) - 1, 0)}[kind]()

    @property
    def pairs(self) -> float:
        """Pairs of query and key that see each other, a head. The diagonal counts half, so that causal is T^2 / 2."""
        kind, _, n = self.mask.partition(":")
        if kind == "full":
            return self.seq**2
        if kind == "packed":
            return self.seq**2 / (2 * int(n))
        width = min(int(n or self.seq), self.seq)
        return width * (self.seq - width / 2)

    @property
    def flops_a_pair(self) -> int:
        """2 matmuls forward, 5 backward."""
        return (4 if self.pass_ == "forward" else 10) * self.head_dim

    @property
    def flops(self) -> float:
        return self.heads * self.pairs * self.flops_a_pair

    def tiles(self, q: int, k: int) -> tuple[int, int, int]:
        """How many q x k tiles a head are seen whole, how many in part, and the most seen in one row of tiles.

        A row shares its queries in the forward pass, its keys in the backward pass.
        """
        whole, some = 0, {}
        for i in range(0, self.seq, q):
            for j in range(0, self.seq, k):
                seen, all_seen = self.visible.block(i, i + q - 1, j, j + k - 1)
                in_row = i if self.pass_ == "forward" else j
                some[in_row] = some.get(in_row, 0) + bool(seen)
                whole += bool(all_seen)
        return whole, sum(some.values()) - whole, max(some.values())


def price(case, python=None, config=None):
    """The row of ringtide's call, with the kernel's own block sizes or those of config = (blocks, {})."""
    name = "splash_forward" if case.pass_ == "forward" else "splash_backward"
    with dumped(
        case.chip,
        "ringtide.bench.splash:kernel_call",
        {"case": asdict(case), "blocks": config and config[0]},
        python=python,
    ) as (facts, dump):
        kernel = read(dump, f".*{name}.*", case.chip)
    costs = nested_costs(kernel)
    q, k, chunk = facts["blocks"]
    body, width = ("stream", k) if costs["stream"] else ("chunk", chunk)
    tile = {
        "pairs": q * width,
        "cycles": costs[body],
        "masked": costs["mixed"] and costs["mixed"] * width // chunk,  # of as many pairs
        "mxu": costs["mxu"][body],
        "spills": costs["spills"][body],
    }
    call = {
        "cycles": cycles(costs, facts["counts"]) + kernel.root.cycles,
        "cores": CHIPS[case.chip].cores if kernel.split else 1,
        "bytes": facts["bytes"],
    }
    return row(case, "ringtide", kernel, tile, call, facts, {"blocks": facts["blocks"]})


def kernel_call(case, blocks):
    """What compile.py compiles: (function, inputs, {"blocks", "counts", "bytes"})."""
    raise CompileError("this release has no Pallas kernel")


def nested_costs(kernel):
    """Cycles of the parts of a kernel like ours: a loop over rows (the grid), in it one over steps (blocks of memory),
    and in that one over chunks. Bodies are the branches that use the matrix units:

        row     outside the step loop          step    in the step loop, outside bodies and chunk loop
        stream  a whole block, no mask         link    in the chunk loop, outside bodies
        chunk   a chunk, no mask               mixed   a chunk that needs a mask: the most selects

    A body without a region of its own (no chunk loop, say) is None. "mxu" and "spills" are {body: ...}.
    """
    grid = _busiest_loop(kernel.root)
    step = grid
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

    return {
        "row": outside(grid, step),
        "step": outside(step, links, *whole),
        "link": outside(links, *in_chunks) if links else 0,
        **{name: body and body.total for name, body in bodies.items()},
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


def row(case, impl, kernel, tile, call, facts, config):
    """One line of the table.

    tile: {"pairs", "cycles", "masked", "mxu", "spills"} of a full tile; call: {"cycles" (of all cores together),
    "cores" (busy), "bytes" (of HBM)}; facts: of the compile.
    """
    chip = CHIPS[case.chip]
    cycles = call["cycles"] / call["cores"]
    schedule, memory = cycles / chip.ghz / 1e9, call["bytes"] / chip.hbm
    seconds = max(schedule * chip.calibration, memory)
    return {
        "op": "splash",
        "chip": case.chip,
        "impl": impl,
        "pass": case.pass_,
        "head_dim": case.head_dim,
        "seq": case.seq,
        "mask": case.mask,
        "tile_cycles": tile["cycles"],
        "masked_tile_cycles": tile["masked"],
        "tile_share": tile["pairs"] * case.flops_a_pair / chip.flops_a_cycle / tile["cycles"],
        "mxu_busy": tile["mxu"] / tile["cycles"],
        "spills": tile["spills"],
        "vmem_bytes": kernel.vmem_bytes,
        "smem_bytes": kernel.smem_bytes,
        "compile_s": facts["compile_s"],
        "predicted_ms": 1e3 * seconds,
        "predicted_tflops": case.flops / seconds / 1e12,
        "call_share": case.flops / (cycles * chip.flops_a_cycle * chip.cores),
        "calibration": chip.calibration,
        "bound": "memory" if memory > schedule * chip.calibration else "schedule",
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "config": config,
    }
