"""`ringtide train laplace`."""

import math
import os
import socket
import subprocess
import sys

import click

from ringtide.cli import training

# As in models/, which would start torch: a test holds them to it.
AXES = "data", "fsdp", "context"
REMAT = "none", "full"
PRESETS = "laplace-tiny", "laplace-micro", "laplace-3b"
_NEEDED = {"torch": ("torch",), "models": ("safetensors", "rich", "matplotlib")}
# Two million bytes: within eight minutes where two cores take 4,300 a second.
_DEMO = {"seq": 1024, "batch": 4, "steps": 500, "val_every": 100, "val_windows": 32, "ckpt_every": 100}
_DEMO_MESH = {"data": 2}  # a rank a core: threads of one process wait for one another, long where a core is busy
_RANKS = 8  # that are started here, at least: a rehearsal may have more ranks than cores
_QUIET = "RINGTIDE_QUIET"  # in the environment of ranks that this command has started: rank 0 speaks for them
_OWN = (
    click.option(
        "--mesh",
        help="such as data=2,fsdp=2: axes data and fsdp split the batch, context sequences. Started by torchrun, over "
        "its ranks; otherwise as many are started here [data, over all; with --resume, as before; of --demo, data=2]",
    ),
    click.option("--remat", type=click.Choice(REMAT), help="full: the backward pass computes each layer again [none]"),
)


@click.command()
@training.options(
    "laplace", PRESETS, *_OWN, weights="a GLA model in fla's format", rate="0.003", schedule="the constant rate"
)
def laplace(out, recipe, scale_down, resume, **options):
    """Train a Laplace with Muon, on one process or, started by torchrun, over many.

    Writes metrics.jsonl, checkpoints, loss.png and, at the end, model/ in fla's format into --out. Ctrl-C saves; a run
    that was killed at any moment goes on with --resume, bitwise as if it had not been. --mesh, --remat and the number
    of ranks may then be others. Text is packed: the state begins anew with each document.

    torchrun --nproc-per-node 2 -m ringtide.cli train laplace --out runs/laplace
    """
    for extra, modules in _NEEDED.items():
        training.require(extra, *modules)
    if options["tokenizer"]:
        training.require("models", "tokenizers")
    options = training.of_recipe(recipe, "laplace", scale_down, options)
    mesh, remat = options.pop("mesh"), options.pop("remat")
    given = training.settings(options, _DEMO, resume)
    saved = training.saved(out, AXES, remat=REMAT) if resume else {}
    started = int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE", "").isdecimal() else None
    axes = {axis: saved[axis] for axis in AXES if axis in saved}
    if mesh is not None:
        axes = training.axes_of(mesh, AXES)
    elif given.get("demo") and not resume and started is None:
        axes = _DEMO_MESH
    elif started is not None and math.prod(axes.values()) != started:
        axes = {"data": started}
    parallel = {**axes, "remat": remat or saved.get("remat", "none")}
    ranks = math.prod(axes.values())
    if started is None and ranks > (most := max(_RANKS, os.cpu_count() or 1)):
        raise click.ClickException(
            f"--mesh: {ranks} ranks are more than this machine is for ({most}): start them by torchrun, on several"
        )
    others = _start_others(ranks) if started is None and ranks > 1 else []

    def join():
        from ringtide.models import ranks as all_of_them

        same = {"out": str(out), "resume": resume, **given, **parallel}
        several = others or (started or 1) > 1
        return all_of_them.join(same, quiet=_QUIET in os.environ) if several else None

    def train(say, progress, link):
        from ringtide.models import laplace_train, ranks

        return laplace_train.run(out, given, ranks.Parallel(**parallel), resume, say, progress, link)

    quiet = os.environ.get("RANK", "0") != "0"
    try:
        training.run("laplace", out, options["demo"], quiet, join, train)
    finally:
        for process in others:  # they end with this one, which has told them
            process.terminate()
            process.wait()


def _start_others(ranks):
    """Starts ranks 1, 2, ... of this command on this machine; this process is rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    here = {"OMP_NUM_THREADS": str(threads), **os.environ, **here}
    command = [sys.executable, "-m", "ringtide.cli", *click.get_current_context().meta["ringtide.arguments"]]
    one = lambda rank: {**here, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(one(0))
    return [subprocess.Popen(command, env={**one(rank), _QUIET: "1"}) for rank in range(1, ranks)]
