"""The figures of `ringtide bench schedule --plot` and of `ringtide plan --plot`."""

_IMPLS = {"ringtide": "#1f4e79", "tokamax": "#d08a2e", "jax": "#9a9a9a"}


def shares(path, rows):
    """Draws share of peak, forward and backward: bars for the whole call, a mark above each for its full tile.

    rows: as case.row makes them, of one length and mask.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    chips = [chip for chip in ("v5p", "v6e", "tpu7x") if any(row["chip"] == chip for row in rows)]
    dims = sorted({row["head_dim"] for row in rows})
    impls = [impl for impl in _IMPLS if any(row["impl"] == impl for row in rows)]
    width = 0.8 / len(impls)
    figure = Figure(figsize=(1.5 + 3 * len(chips), 5.2), layout="constrained")
    grid = figure.subplots(2, len(chips), sharey=True, squeeze=False)
    for axes_row, pass_ in zip(grid, ("forward", "backward"), strict=True):
        for axes, chip in zip(axes_row, chips, strict=True):
            for i, impl in enumerate(impls):
                for row in rows:
                    if (row["chip"], row["impl"], row["pass"]) != (chip, impl, pass_):
                        continue
                    x = dims.index(row["head_dim"]) + (i - (len(impls) - 1) / 2) * width
                    axes.bar(x, row["call_share"], 0.92 * width, color=_IMPLS[impl])
                    axes.hlines(row["tile_share"], x - 0.4 * width, x + 0.4 * width, color="black", linewidth=1.5)
                    axes.text(
                        x, row["call_share"] - 0.02, f"{row['call_share']:.0%}"[:-1], ha="center", va="top",
                        fontsize=7, color="white",
                    )  # fmt: skip
            axes.set_title(f"{chip}, {pass_}", fontsize=10)
            axes.set_xticks(range(len(dims)), [f"head_dim {dim}" if dim == dims[0] else str(dim) for dim in dims])
            axes.set_xlim(-0.5, len(dims) - 0.5)
            axes.set_ylim(0, 1.05)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], color=_IMPLS[impl], linewidth=7, label=f"{impl}, whole call") for impl in impls]
    handles.append(Line2D([], [], color="black", linewidth=1.5, label="full tile"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    masks = " and ".join(sorted({row["mask"] for row in rows}))
    seqs = " and ".join(sorted(f"{row['seq']:,}" for row in {row["seq"]: row for row in rows}.values()))
    figure.suptitle(
        f"Share of the bf16 peak, {masks} attention over {seqs} tokens (predicted from the compiler's schedule)",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


_TERMS = {
    "attention forward": "#1f4e79",
    "attention backward": "#4f83b5",
    "matmuls": "#d08a2e",
    "elementwise": "#9a9a9a",
    "interconnect": "#b03a48",
    "host": "#6b4f8a",
}


def plans(path, rows, title):
    """Draws rows of bench.plan: the time of a step by terms, and memory beside its limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 1.6 + 0.62 * len(rows)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [f"{row['strategy']}\n{row['tokens'] / (1 << 20):g}M, {row['remat']}" for row in rows]
    at = range(len(rows))
    for i, row in zip(at, rows, strict=True):
        left = 0.0
        for name, seconds in (row["terms"] or {}).items():
            time.barh(i, seconds, 0.62, left, color=_TERMS[name])
            left += seconds
        text = f" {row['mfu']:.0%} MFU" if row["terms"] else " does not fit"
        time.text(left, i, text, va="center", fontsize=8)
        for shift, what, color in ((-0.16, "hbm", "#1f4e79"), (0.16, "host", "#6b4f8a")):
            used, limit = row[f"{what}_bytes"] / (1 << 30), row[f"{what}_limit"] / (1 << 30)
            memory.barh(i + shift, used, 0.28, color=color if used <= limit else "#b03a48")
            memory.vlines(limit, i + shift - 0.15, i + shift + 0.15, color="black", linewidth=1.5)
    time.set_yticks(at, names, fontsize=8)
    time.invert_yaxis()
    time.margins(x=0.22)
    time.set_xlabel("seconds a step (predicted)")
    memory.set_xlabel("GiB a device: HBM, host; marks: limits")
    for axes in (time, memory):
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [time.barh(0, 0, color=color, label=name) for name, color in _TERMS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def trainium(path, found):
    """Draws what bench.plan_laplace predicts: a training step and a decode step by terms, each with its range."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    colors = colormaps["tab20"].colors
    for axes, what, scale, unit in zip(figure.subplots(2), ("train", "decode"), (1, 1e3), ("s", "ms"), strict=True):
        sets = {"fast": found["range"]["fast"], "assumed": found["terms"], "slow": found["range"]["slow"]}
        for i, terms in enumerate(sets.values()):
            left = 0.0
            for color, (name, seconds) in zip(colors, terms[what].items(), strict=False):
                axes.barh(i, seconds * scale, 0.62, left, color=color, label=name if i == 0 else None)
                left += seconds * scale
        axes.set_yticks(range(3), list(sets))
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} a step (predicted)")
        speed, done = found[f"{what}_tokens_per_s"], {"train": "trained", "decode": "generated"}[what]
        axes.set_title(f"{speed:,.0f} tokens/s {done}", fontsize=10, loc="left")
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found['model']} on {found['instances']} x trn2.48xlarge", fontsize=11)
    figure.savefig(path, dpi=150)


def recalled(path, rows):
    """Draws the share of whole answers against distance, a line a run. rows: as `ringtide bench recall` makes them."""
    from matplotlib.figure import Figure

    from ringtide.bench.recall import FARTHEST

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for run in dict.fromkeys((row["model"], row["run"]) for row in rows):
        points = [(row["distance"], row["recalled"]) for row in rows if (row["model"], row["run"]) == run]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{run[0]} ({run[1]})")
    axes.axvline(FARTHEST, color="#9a9a9a", linestyle=":", label="the farthest that was trained on")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bytes between definition and question", ylabel="share answered", ylim=(-0.02, 1.02))
    axes.set_title("Four digits, asked for again (measured)", fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
