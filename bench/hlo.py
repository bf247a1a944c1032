"""Reads a compiled program (`compiled.as_text()`, scheduled HLO): what runs how often, and what it sends.

A program is computations that call one another. An instruction in the body of a loop runs as often as the loop's
condition says (scans count from 0 to a constant); of a conditional, each branch is counted as taken. From there

    collectives   bytes that a device sends over the interconnect, by kind
    kernels       runs of each Pallas kernel
    cycles        the compiler's own estimate of the other instructions: matrix products, and the rest
"""

import math
import re
from collections import Counter
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
_KINDS = "collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all"


class Instruction(NamedTuple):
    name: str
    opcode: str
    type: str
    rest: str  # operands and attributes


class Program:
    """The computations of a program: {name: [Instruction]}, in the order in which they run."""

    def __init__(self, text: str):
        self.computations, entry = {}, None
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                inside = self.computations[found[2]] = []
                entry = found[2] if found[1] else entry
            elif found := _INSTRUCTION.match(line):
                name, type_, opcode, rest = found.groups()
                inside.append(Instruction(name, opcode, type_, rest))
        self.times, self._scheduled = Counter(), set()  # how often each runs; those that are not the inside of a fusion
        self._run(entry, 1, True)

    def _run(self, name, times, scheduled):
        self.times[name] += times
        if scheduled:
            self._scheduled.add(name)
        for op in self.computations[name]:
            called = [(kind, to) for kind, to in _CALLED.findall(op.rest) if kind not in ("condition", "to_apply")]
            called += [("branch", to.strip(" %")) for found in _BRANCHES.findall(op.rest) for to in found.split(",")]
            for kind, to in called:
                n = self._trips(op) if kind == "body" else 1
                self._run(to, times * n, scheduled and op.opcode != "fusion")

    def _trips(self, loop):
        """Of a scan; 1 where the condition compares with no constant."""
        condition = dict(_CALLED.findall(loop.rest))["condition"]
        bounds = [int(op.rest.split(")")[0]) for op in self.computations[condition] if _is_integer(op)]
        return max(bounds, default=1)

    def collectives(self) -> dict[str, float]:
        """{kind: bytes that a device sends}."""
        sent = Counter()
        for name, ops in self.computations.items():
            for op in ops:
                kind = op.opcode.removesuffix("-start")
                if kind in _KINDS:
                    sent[kind] += self.times[name] * _sent(op, kind)
        return {kind: sent[kind] for kind in _KINDS if sent[kind]}

    def kernels(self) -> dict[str, int]:
        """{name of a Pallas kernel: how often it runs}."""
        runs = Counter()
        for name, ops in self.computations.items():
            for op in ops:
                if op.opcode == "custom-call" and '"tpu_custom_call"' in op.rest:
                    runs[re.sub(r"[.\d]+$", "", op.name)] += self.times[name]
        return dict(runs)

    def cycles(self) -> dict[str, int]:
        """{"matmul", "rest": cycles}, as the compiler estimated them."""
        total = Counter()
        for name in self._scheduled:
            for op in self.computations[name]:
                if found := _CYCLES.search(op.rest):
                    total["matmul" if self._multiplies(op) else "rest"] += self.times[name] * int(found[1])
        return {"matmul": total["matmul"], "rest": total["rest"]}

    def _multiplies(self, op):
        inside = [to for kind, to in _CALLED.findall(op.rest) if kind == "calls"]
        return op.opcode in ("convolution", "dot") or any(
            self._multiplies(inner) for to in inside for inner in self.computations[to]
        )


def _is_integer(op):
    return op.opcode == "constant" and re.match(r"[su]\d+\[\]", op.type) and re.match(r"\d+\)", op.rest)


def _sent(op, kind):
    """Bytes that a device sends, each group on a ring: what comes whole to all, less its own part."""
    sizes = [_bytes(*shape) for shape in _SHAPE.findall(op.type) if shape != ("u32", "")]
    if op.opcode.endswith("-start") and kind != "all-reduce":  # (operands, results)
        half = len(sizes) // 2
        sizes = sizes[half:] if kind == "all-gather" else sizes[:half]
    size = sum(sizes)
    if kind == "collective-permute":
        return size
    found = _GROUPS.search(op.rest)
    group = int(found[2]) if found and found[2] else len(found[1].split(",")) if found else 1
    if kind == "reduce-scatter" and not op.opcode.endswith("-start"):
        size *= group  # of the result: what goes in is larger
    return size * (group - 1) / group * (2 if kind == "all-reduce" else 1)


def _bytes(dtype, dims):
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits / 8
