"""How the plan of a Laplace is printed: bench/plan_laplace.py."""

from ringtide.bench.trainium import ASSUMED, PUBLISHED, ranks

GIB = 1 << 30


def text(found) -> str:
    """What `plan` found, to read."""
    setup, used, most = found["setup"], found["memory"], found["memory_limit"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in setup["mesh"].items() if size > 1)
    there = ranks(found["instances"])
    chips, best = int(found["instances"] * PUBLISHED["chips"].value), found["roofline_tokens_per_s"]
    lines = [
        "PREDICTED, nothing measured: instructions as documented, rates as published, their use as assumed",
        f"{found['model']}, {found['parameters'] / 1e9:.2f} B parameters, {found['state_bytes']:,} bytes of state a "
        f"sequence, on {found['instances']} x trn2.48xlarge: {chips} chips, {there} ranks",
        "",
        f"training, {setup['batch']} sequences of {setup['seq']:,} tokens a step, {mesh}, remat {found['remat']}",
        *_terms(found, "train", "s", 1),
        *(f"  behind the layers: {name} {s:.3f} s" for name, s in found["terms"]["hidden"].items()),
        f"{_speed(found, 'train', 'trained')}, MFU {found['train_mfu']:.1%}",
        f"  published: {PUBLISHED['train'].value:,} {PUBLISHED['train'].unit}, MFU {found['published_mfu']:.1%}",
        f"  published: {PUBLISHED['llama'].value:.1%} {PUBLISHED['llama'].unit}",
        _memory(used["train"], most),
        "",
        f"generation, {setup['sequences']:,} sequences at once, {-(-setup['sequences'] // there)} a rank, each with "
        "a copy of the weights",
        *_terms(found, "decode", "ms", 1e3),
        f"{_speed(found, 'decode', 'generated')}, {found['roofline_share']:.1%} of the roofline",
        "  memory alone, at the published rate: "
        + ", ".join(f"{name} {1e3 * s:.3f} ms" for name, s in found["floors"].items()),
        f"  the roofline, one copy of the weights read a chip: {best:,.0f} tokens/s",
        f"  if a chip's ranks shared a copy and the heads, which is not built: "
        f"{found['decode_tokens_per_s_copy_a_chip']:,.0f} tokens/s",
        f"  published: {PUBLISHED['decode'].value:,} {PUBLISHED['decode'].unit}, "
        f"{found['published_roofline_share']:.1%} of the roofline",
        _memory(used["decode"], most),
        "",
        "GLA kernels, estimated by the simulator, us a (chunk, head) or (sequence, head) of a core; T_sched is used, "
        "the range is T_max to T_sum",
        f"  {'':<10}{'T_max':>8}{'T_list':>8}{'T_sched':>8}{'T_sum':>8}{'HBM':>8}",
    ]
    for row in found["kernels"]:
        times = (row[f"{t}_us"] for t in ("t_max", "t_list", "t_sched", "t_sum", "hbm_floor"))
        lines.append(f"  {row['kernel']:<10}" + "".join(f"{us:8.2f}" for us in times))
    if need := found["needed"]:
        lines += [
            "",
            "the published rates are met on one instance if, all else as assumed,",
            f"  trained: large products reach {need['matmul']:.1%} of the tensor engine",
            f"  generated: HBM reaches {need['traffic']:.1%}, or a step takes {need['programs']} programs",
        ]
    lines += ["", "published"]
    lines += [f"  {_number(f.value):>9}{f.unit}: {f.source}" for f in PUBLISHED.values()]
    lines += ["", "assumed (favourable to unfavourable)"]
    for a in ASSUMED.values():
        scale, unit = (1e6, f"u{a.unit}") if a.unit.startswith("s ") else (1, a.unit)
        likely, fast, slow = (f"{value * scale:.3g}" for value in (a.assumed, a.fast, a.slow))
        lines.append(f"  {likely} ({fast} to {slow}) {unit}: {a.why}")
    return "\n".join(lines)


def _number(value) -> str:
    """With what stands before its unit: "2.9 T"."""
    for size, letter in ((1e12, "T"), (1e9, "G")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:,.0f} " if value >= 1 else f"{value:.3g} "


def _terms(found, what, unit, scale):
    terms, fast, slow = found["terms"][what], found["range"]["fast"][what], found["range"]["slow"][what]
    whole = sum(terms.values())
    rows = [*((n, s, fast[n], slow[n]) for n, s in terms.items())]
    rows.append(("step", whole, sum(fast.values()), sum(slow.values())))
    return [
        f"  {n:<37}{s * scale:8.3f} {unit}{s / whole:8.1%}   {a * scale:.3f} to {b * scale:.3f}" for n, s, a, b in rows
    ]


def _speed(found, what, done):
    low, high = found[f"{what}_tokens_per_s_range"]
    return f"  {found[f'{what}_tokens_per_s']:,.0f} tokens/s {done} ({low:,.0f} to {high:,.0f})"


def _memory(parts, most):
    total = sum(parts.values())
    fits = "fits" if total <= most else "DOES NOT FIT"
    split = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size > GIB / 20)
    return f"  memory of the fullest rank {total / GIB:.1f} of {most / GIB:.0f} GiB, {fits}: {split}"
