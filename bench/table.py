"""Which calls `ringtide bench schedule` and `tune` price, and how a row is printed."""

import itertools

from ringtide.bench import peers, splash
from ringtide.bench.case import Case
from ringtide.bench.chips import CHIPS
from ringtide.bench.compile import CompileError

PASSES = ("forward", "backward")
IMPLS = ("ringtide", "tokamax", "jax")


def _at(head_dim):
    """Heads as models have them: 4 queries share a key head, and the width is 4,096 from head_dim 128 on."""
    return {"head_dim": head_dim, "heads": 16 if head_dim == 256 else 32, "kv_heads": 4 if head_dim == 256 else 8}


TABLE = [
    *(Case(chip, p, **_at(head_dim)) for chip in ("v5p", "tpu7x") for head_dim in (128, 256) for p in PASSES),
    *(Case("v6e", p) for p in PASSES),
    *(Case("tpu7x", p, mask=mask) for mask in ("full", "local:4096", "packed:8") for p in PASSES),
]
FIGURE = [Case(c, p, **_at(head_dim)) for p in PASSES for c in ("v5p", "v6e", "tpu7x") for head_dim in (64, 128, 256)]


def parse(texts, chips) -> list[Case]:
    """Cases from "head_dim=64,seq=8192,...": what differs from `Case`, for each chip and, unless named, each pass."""
    numbers = {"head_dim", "heads", "kv_heads", "seq"}
    cases = []
    for text in texts:
        fields = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key in numbers and value.isdigit() and 0 < int(value) <= 1 << 24:
                fields[key] = int(value)
            elif key in numbers:
                raise ValueError(f"--shape {part!r}: expected a whole number from 1 to 2^24, as in {key}=128")
            elif key == "pass" and value in PASSES:
                fields["pass_"] = value
            elif key == "mask" and _is_mask(value):
                fields["mask"] = value
            else:
                raise ValueError(
                    f"--shape {part!r}: expected head_dim=, heads=, kv_heads=, seq=, pass=forward|backward or "
                    "mask=causal|full|local:N|packed:N"
                )
        for chip, p in itertools.product(chips, [fields.pop("pass_")] if "pass_" in fields else PASSES):
            cases.append(Case(chip, p, **fields))
    for case in cases:
        _check(case)
    return cases


def _is_mask(text):
    kind, _, n = text.partition(":")
    return text in ("causal", "full") or (kind in ("local", "packed") and n.isdigit() and 0 < int(n) <= 1 << 24)


def _check(case):
    if case.head_dim > 1024:
        raise ValueError(f"--shape: head_dim={case.head_dim} is more than 1024, beyond what the kernels are for")
    if case.heads % case.kv_heads:
        raise ValueError(f"--shape: heads={case.heads} is not a multiple of kv_heads={case.kv_heads}")
    kind, _, n = case.mask.partition(":")
    if kind == "packed" and case.seq % int(n):
        raise ValueError(f"--shape: mask={case.mask} cuts equal documents, but {n} does not divide seq={case.seq}")


def candidates(case, impl):
    """Configurations that `tune` tries: (sizes, options)."""
    if impl == "ringtide":  # rows, keys, chunk, piece: see kernels/pallas/tiles.py
        sizes = itertools.product((1024, 2048), (1024, 2048), (256, 512), (512, 1024, 2048))
        folds = ({}, {"fold": True}) if CHIPS[case.chip].side == 256 and case.head_dim <= 128 else ({},)
        return [(size, fold) for size in sizes for fold in folds if size[3] <= size[1]]
    # queries, keys, keys at a time
    sizes = itertools.product((1024, 2048), (1024, 2048, 4096), (256, 512, 1024))
    scheduled = impl == "tokamax" and case.pass_ == "forward"
    options = ({}, {"use_experimental_scheduler": True}) if scheduled else ({},)
    return [(size, option) for size in sizes for option in options if max(size) <= case.seq]


def prices(cases, impls, configs=(None,), python=None, log=lambda text: None):
    """Yields (row, None) or (None, why not, in a line) for each case, implementation and configuration."""
    for case, impl, config in itertools.product(cases, impls, configs):
        what = f"{case.chip} {impl} {case.pass_}, head_dim {case.head_dim}, {case.mask} over {case.seq:,}"
        if config:
            what += f", blocks {config[0]}" + "".join(f", {name}" for name in config[1])
        log(what)
        try:
            row = splash.price(case, python, config) if impl == "ringtide" else peers.price(case, impl, python, config)
        except (CompileError, ValueError) as error:  # or a schedule that the reader does not know
            yield None, f"{what}: {error}"
        else:
            yield row, None


def heading(chips) -> str:
    """Two lines over a table."""
    factors = ", ".join(f"{chip} x {CHIPS[chip].calibration}" for chip in chips)
    return (
        f"predicted from the compiler's schedule: shares of the bf16 peak as counted, ms and TFLOP/s after {factors}\n"
        "chip  pass     dim     seq mask       impl     |    tile  masked  share   mxu spills"
        " |  VMEM  SMEM compile |       ms TFLOP/s  share | blocks"
    )


def line(row) -> str:
    """A row of the table: tile cycles and share, memory in MiB and KiB, compile time in s, then the whole call."""
    options = "".join(f" {name}" for name in row["config"] if name != "blocks")
    masked = "-" if row["masked_tile_cycles"] is None else f"{row['masked_tile_cycles']:,}"
    return (
        f"{row['chip']:<5} {row['pass']:<8} {row['head_dim']:>3} {row['seq']:>7} {row['mask']:<10} {row['impl']:<8}"
        f" | {row['tile_cycles']:>7,} {masked:>7} {row['tile_share']:>6.1%} {row['mxu_busy']:>5.0%} {row['spills']:>6}"
        f" | {row['vmem_bytes'] / 2**20:>5.1f} {row['smem_bytes'] / 2**10:>5.1f} {row['compile_s']:>6.1f}s"
        f" | {row['predicted_ms']:>8.3f} {row['predicted_tflops']:>7.1f} {row['call_share']:>6.1%}"
        f" | {'/'.join(map(str, row['config']['blocks']))}{options}"
    )
