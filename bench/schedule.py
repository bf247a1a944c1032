"""Reads the schedule that the TPU compiler settled on: cycles a region of a Pallas kernel, with stalls. No TPU needed.

A TPU core issues one bundle (a very long instruction word) a cycle, in an order fixed by the compiler; so cycles can be
counted. For each kernel libtpu dumps (see compile.py)

    *-final_bundles.txt                                  the bundles, with branches and the marks of regions
    *-final_hlo-static-per-bundle-utilization.txt        what each of those bundles uses of each unit
    *-pre-delay_hlo-static-per-bundle-utilization.txt    the same a cycle, before the bundles in which the core only
                                                         waits were dropped (the hardware waits by itself there)
    *-pre-finalize-registers-and-allocations.txt         memory

`read` lays the second over the third, so that a bundle knows its cycles and the cycles that matrix units are busy, and
cuts the bundles at the branches into a tree: a jump back is a loop, a jump ahead skips a branch.

What a schedule does not see: waiting for HBM, and the calibration of the clock (chips.py).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ringtide.bench.chips import CHIPS

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:L[HBE]|P[BF]|CT)?\s*:", re.MULTILINE)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.(?:rel|abs)\s*(?:\(!?%p\w+\)\s*)?target = \$region(\d+)")
_SPILL = re.compile(r"\[(vmem|smem):\[(#allocation\d+_spill)")
_MEMORY = re.compile(r"#allocation\d+ \[.*?space=(vmem|smem), size = (0x[0-9a-f]+).*?scoped")
_FILE = re.compile(r"(\d+)-(.+?)-\d\d-(.+)\.txt")
_WAITING = {"MXU", "XLU"}  # units that stay busy after the bundle that starts them: their columns do not tell an issue


@dataclass
class Region:
    """A stretch of bundles. Counts are its own, without those of the regions within."""

    kind: str  # "kernel", "loop" or "branch"
    start: int  # first bundle
    stop: int  # past the last bundle
    cycles: int = 0  # with stalls
    mxu: float = 0.0  # cycles of a matrix unit at work, mean over the units
    loads: int = 0  # vector loads
    stores: int = 0
    spills: int = 0  # stores of vector registers that ran out
    selects: int = 0  # vector selects: what a mask is made of
    within: list["Region"] = field(default_factory=list)

    def walk(self):
        yield self
        for region in self.within:
            yield from region.walk()

    @property
    def total(self) -> int:
        """Cycles with those of all regions within, each passed once."""
        return sum(region.cycles for region in self.walk())


@dataclass
class Kernel:
    """What the compiler made of one `pallas_call`."""

    name: str
    root: Region
    vmem_bytes: int  # windows, scratch and spills
    smem_bytes: int
    split: bool  # over the two cores of a v5p

    def tree(self) -> str:
        """The regions, a line each: own cycles, share of them that the matrix units work, spills, selects."""
        lines = []

        def show(region, depth):
            name = f"{'  ' * depth}{region.kind} {region.start:#x}..{region.stop:#x}"
            busy = f"matrix {region.mxu / max(region.cycles, 1):4.0%}" if region.mxu else 11 * " "
            lines.append(
                f"{name:<40}{region.cycles:7} cycles  {busy}  stores {region.stores}"
                f"  spills {region.spills}  selects {region.selects}"
            )
            for child in region.within:
                show(child, depth + 1)

        show(self.root, 0)
        return "\n".join(lines)


def read(dump: str | Path, kernel: str, chip: str) -> Kernel:
    """The kernel in folder `dump` whose HLO name matches the regular expression `kernel`, compiled for `chip`.

    If several match, the one with the most bundles. Raises ValueError if none does, or the files are not what they
    were with libtpu 0.0.42 to 0.0.50.
    """
    files = _files(Path(dump), kernel)
    texts = _bundles(files["final_bundles"].read_text(errors="replace"))
    final = _table(files["final_hlo-static-per-bundle-utilization"])
    cycles = _table(files["pre-delay_hlo-static-per-bundle-utilization"])
    if len(final["rows"]) != len(texts):
        raise ValueError(f"{files['final_bundles'].name}: {len(texts)} bundles, but use of {len(final['rows'])}")
    root = _tree(texts, CHIPS[chip].delay)
    _count(root, texts, final, cycles)
    memory = {"vmem": 0, "smem": 0}
    with files["pre-finalize-registers-and-allocations"].open(errors="replace") as lines:
        for line in lines:
            if found := _MEMORY.search(line):
                memory[found[1]] += int(found[2], 16)
    for space, _ in {spill for text in texts for spill in _SPILL.findall(text)}:
        memory[space] += {"vmem": 4096, "smem": 4}[space]  # a vector register is 8 x 128 x 4 bytes
    name = _FILE.fullmatch(files["final_bundles"].name)[2]
    split = any("BarrierMegacore" in text for text in texts)
    return Kernel(name, root, memory["vmem"], memory["smem"], split)


def _files(dump, kernel):
    """{pass: path} of the largest kernel that matches."""
    found = {}
    for path in dump.iterdir():
        parts = _FILE.fullmatch(path.name)
        if parts and re.fullmatch(kernel, parts[2]):
            found.setdefault(parts[1], {})[parts[3]] = path
    found = [passes for passes in found.values() if "final_bundles" in passes]
    if not found:
        raise ValueError(f"no schedule of a kernel named {kernel!r} in {dump}")
    return max(found, key=lambda passes: passes["final_bundles"].stat().st_size)


def _bundles(text):
    """The text of each bundle."""
    starts = [m.start() for m in _BUNDLE.finditer(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def _table(path):
    """{"columns": names, "units": how many there are of each, "rows": use of each, a bundle or cycle a row}."""
    columns, rows = None, []
    for line in path.read_text().splitlines():
        if "VALU" in line:
            columns = [name.strip() for name in line.split(",")]
        elif columns and (words := line.split()) and all(word.isdigit() for word in words):
            rows.append(tuple(map(int, words)))
    if not columns or "MXU" not in columns or not rows:
        raise ValueError(f"{path.name}: not a table of use by this reader's libtpu (0.0.42 to 0.0.50)")
    return {"columns": columns, "units": rows[0], "rows": rows[1:]}


def _tree(texts, delay):
    """Regions from the branches: [target, branch) is a loop, (branch, target) is skipped or not."""
    begins = {}
    for i, text in enumerate(texts):
        for region in _START.findall(text):
            begins.setdefault(int(region), i)
    regions = []
    for i, text in enumerate(texts):
        for region in _BRANCH.findall(text):
            target, after = begins.get(int(region)), min(i + 1 + delay, len(texts))
            if target is not None and target <= i:
                regions.append(Region("loop", target, after))
            elif target is not None and target > after:
                regions.append(Region("branch", after, target))
    loops = [r for r in regions if r.kind == "loop"]
    root = Region("kernel", 0, len(texts))
    stack = [root]
    for region in sorted(regions, key=lambda r: (r.start, -r.stop, r.kind == "loop")):
        if region.kind == "branch" and any(r.start <= region.start < r.stop < region.stop for r in loops):
            continue  # a way out of a loop
        if region.kind == "branch" and any(region.start < r.start < region.stop < r.stop for r in loops):
            continue  # past the head of a loop that is entered in the middle
        while stack[-1].stop <= region.start:
            stack.pop()
        region.stop = min(region.stop, stack[-1].stop)
        stack[-1].within.append(region)
        stack.append(region)
    return root


def _count(root, texts, final, cycles):
    """Adds up each region's own cycles and uses."""
    places = _places(final, cycles)
    mxu, loads, stores, spills = (cycles["columns"].index(name) for name in ("MXU", "VLOAD", "VSTORE", "VSTORE:SPILL"))
    owner = [root] * len(texts)
    for region in root.walk():  # the inner ones come later
        owner[region.start : region.stop] = [region] * (region.stop - region.start)
    for i, (region, text) in enumerate(zip(owner, texts, strict=True)):
        rows = cycles["rows"][places[i] : places[i + 1]]
        region.cycles += len(rows)
        region.mxu += sum(row[mxu] for row in rows) / cycles["units"][mxu]
        region.loads += final["rows"][i][loads]
        region.stores += final["rows"][i][stores]
        region.spills += final["rows"][i][spills]
        region.selects += text.count("= vsel")


def _places(final, cycles):
    """The cycle at which each bundle issues, and the end.

    Bundles keep their order and what they issue, so the n-th operation of one table is the n-th of the other.
    """
    issues = [i for i, name in enumerate(final["columns"]) if name not in _WAITING]
    owners = [i for i, row in enumerate(cycles["rows"]) for _ in range(sum(row[c] for c in issues))]  # cycle of each
    counts = [sum(row[c] for c in issues) for row in final["rows"]]
    if len(owners) != sum(counts):
        raise ValueError(f"{len(owners)} operations a cycle, but {sum(counts)} in bundles: not of one schedule")
    at, left = len(cycles["rows"]), len(owners)
    places = [at]
    for count in reversed(counts):
        left -= count
        if count:
            at = owners[left]
        else:  # a stall may lie on either side of an empty bundle: before it
            at = max(at - 1, owners[left - 1] + 1 if left else 0)
        places.append(at)
    places[-1] = 0
    return places[::-1]
