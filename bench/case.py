"""A call of attention that is priced, and its line in the table. Predicted, not measured."""

from dataclasses import dataclass

from ringtide.bench.chips import CHIPS
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
    given: bool = (
        False  # positions are given as arrays, as under context parallelism, instead of following from the index
    )

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

    @property
    def token_bytes(self) -> int:
        """Of q, k, v or out, a head, in HBM: 128 elements at a time."""
        return 2 * -(-self.head_dim // 128) * 128

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
