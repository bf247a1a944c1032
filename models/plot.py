"""The picture of a run."""


def curve(path, losses, held_out, summary):
    """Draws the losses, (step, loss) each, beside what the frequencies of tokens and of pairs alone would give."""
    from matplotlib.figure import Figure  # here: generating text needs none

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*losses, strict=True), color="#9bb8d3", label="training")
    axes.plot(*zip(*held_out, strict=True), color="#1f4e79", marker="o", label="held out")
    for name, style in (("unigram", "--"), ("bigram", ":")):
        axes.axhline(summary[name], color="#b04a3a", linestyle=style, label=f"{name} entropy of the held-out text")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=f"{summary['parameters'] / 1e6:.1f} M parameters")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
