"""The splash kernels of jax and of tokamax, priced like ours, by the same compiler in one environment.

tokamax needs Python >= 3.12 and its own choice of JAX: `python()` makes an environment for it under .cache/peers, once,
with ringtide in it. Configurations are the best found by the schedule (`best`), not the kernels' defaults.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from ringtide.bench.case import row
from ringtide.bench.chips import CHIPS
from ringtide.bench.compile import CompileError, dumped
from ringtide.bench.schedule import read

_NAMES = {"forward": r".*splash_m[hq]a_fwd.*", "backward": r".*splash_m[hq]a_(dkv|bwd).*"}  # of the kernels in a dump
_PEERS = "tokamax==0.0.17", "jax[tpu]==0.12.0.1"

# Keys that a tile of 2048 x 2048 takes at a time, by head_dim up to: the best of those that compile, forward. Backward
# 512 is, to 2 %.
_AT_A_TIME = {
    ("jax", "v5p"): {256: 256},
    ("jax", "v6e"): {128: 1024, 256: 512},
    ("jax", "tpu7x"): {128: 1024, 256: 512},
    ("tokamax", "v5p"): {256: 256},
    ("tokamax", "v6e"): {256: 512},
    ("tokamax", "tpu7x"): {256: 512},
}


def best(case, impl):
    """((queries, keys, keys at a time), options), as `ringtide bench tune splash --impl` ranks them at 32K."""
    if case.head_dim > 256:
        raise CompileError(f"no configuration for head_dim {case.head_dim}")
    forward, side = case.pass_ == "forward", min(2048, case.seq)
    table = _AT_A_TIME[impl, case.chip] if forward else {256: 512}
    at_a_time = table[min(dim for dim in table if dim >= case.head_dim)]
    scheduled = forward and impl == "tokamax" and case.chip != "v5p"
    return (side, side, min(at_a_time, side)), {"use_experimental_scheduler": True} if scheduled else {}


def price(case, impl, python, config=None):
    """The row (case.row) of a peer's call, by config (blocks, options) or the best one known.

    Raises compile.CompileError, also where the peer has no mask for the case.
    """
    if case.mask.startswith("packed"):
        raise CompileError("documents are priced for ringtide only")
    (q, k, compute), options = config or best(case, impl)
    with dumped(
        case.chip,
        f"ringtide.bench.peers:{impl}_splash",
        {
            "pass_": case.pass_,
            "shape": (case.heads, case.kv_heads, case.seq, case.head_dim),
            "mask": case.mask,
            "blocks": (q, k, compute),
            "options": options,
        },
        python=python,
        flags="--xla_tpu_scoped_vmem_limit_kib=61440",
    ) as (facts, dump):
        kernel = read(dump, _NAMES[case.pass_], case.chip)
    costs = grid_costs(kernel)
    whole, part, widest = case.tiles(q, k)
    rows = case.seq // (q if case.pass_ == "forward" else k)
    steps = rows * widest if impl == "jax" else whole + part  # jax's grid is a rectangle, tokamax's a list of tiles
    cycles = whole * costs["full"] + part * costs["masked"] + steps * costs["step"] + rows * costs["row"]
    tile = {
        "pairs": q * k,
        "cycles": costs["full"],
        "masked": costs["masked"],
        "mxu": costs["mxu"],
        "spills": costs["spills"],
    }
    call = {
        "cycles": case.heads * cycles + kernel.root.cycles,
        "cores": CHIPS[case.chip].cores if kernel.split else 1,
        "bytes": case.heads * _bytes(case, rows, whole + part, q, k),
    }
    return row(case, impl, kernel, tile, call, facts, {"blocks": [q, k, compute], **options})


def grid_costs(kernel):
    """Cycles of the parts of a kernel that is one loop over its grid: the bodies of a full and of a masked tile (often
    one), a step around them, and what a row of tiles takes at its start and end."""
    inner = [region for region in kernel.root.walk() if region is not kernel.root]
    bodies = sorted((region for region in inner if region.mxu > 0), key=lambda region: region.selects)
    ends = [r for r in inner if r.kind == "branch" and not r.mxu and not r.within and r.stores >= 20]
    if not bodies:
        raise ValueError(f"{kernel.name}: no branch multiplies matrices")
    return {
        "full": bodies[0].cycles,
        "masked": bodies[-1].cycles,
        "mxu": bodies[0].mxu,
        "spills": bodies[0].spills,
        "row": sum(region.cycles for region in ends),
        "step": sum(region.cycles for region in inner if region not in bodies and region not in ends),
    }


def _bytes(case, rows, steps, q, k):
    """HBM traffic a head. Forward: q, out a row; k, v a step. Backward: k, v, dk, dv a row; q, dout, dq a step."""
    token = case.token_bytes
    if case.pass_ == "forward":
        return rows * q * 2 * token + steps * k * 2 * token
    return rows * k * 4 * token + steps * q * 3 * token


def jax_splash(pass_, shape, mask, blocks, options):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, _, seq, _ = shape
    sizes = kernels.BlockSizes(**_sizes(pass_, blocks), **options)
    mask = masks.MultiHeadMask([_mask(masks, mask, seq)] * heads)
    kernel = kernels.make_splash_mha_single_device(mask, block_sizes=sizes, save_residuals=pass_ == "forward")
    return _call(kernel, pass_, shape)


def tokamax_splash(pass_, shape, mask, blocks, options):
    import dataclasses

    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    sizes = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"))
    sizes |= _sizes(pass_, blocks) | options
    config = dataclasses.replace(kernels.SplashConfig.get_default(), **sizes)
    mask = _mask(masks, mask, shape[2])
    kernel = kernels.make_splash_mha_single_device(mask, config=config, save_residuals=pass_ == "forward")
    return _call(kernel, pass_, shape)


def _sizes(pass_, blocks):
    q, k, compute = blocks
    if pass_ == "forward":
        return {"block_q": q, "block_kv": k, "block_kv_compute": compute}
    forward = {"block_q": 1024, "block_kv": 1024, "block_kv_compute": 512}  # compiled beside it, not priced
    backward = {"block_q_dkv": q, "block_kv_dkv": k, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": True}
    return forward | backward


def _mask(masks, mask, seq):
    kind, _, n = mask.partition(":")
    if kind == "local":
        return masks.LocalMask((seq, seq), (int(n) - 1, 0), 0)
    return {"full": masks.FullMask, "causal": masks.CausalMask}[kind]((seq, seq))


def _call(kernel, pass_, shape):
    import jax
    import jax.numpy as jnp

    heads, kv_heads, seq, head_dim = shape
    q, k = (jax.ShapeDtypeStruct((n, seq, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
    if pass_ == "forward":
        return kernel, (q, k, k), {}
    return jax.grad(lambda q, k, v: kernel(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)), (q, k, k), {}


def python(folder=Path(".cache/peers"), log=lambda text: None):
    """The interpreter of the environment with tokamax, made at the first call (minutes, about 2 GB)."""
    folder = folder.absolute()
    interpreter = folder / "bin/python"
    ready = folder / ".ready"
    if ready.exists() and interpreter.exists():
        return str(interpreter)
    source = Path(__file__).absolute().parent.parent
    if not (source / "pyproject.toml").exists():
        raise RuntimeError("--peers works from a clone, installed by `pip install -e .`: ringtide is priced there too")
    log(f"making {folder} with tokamax: a few minutes, once")
    base = _newest_python()
    steps = (
        [base, "-m", "venv", "--clear", folder],
        [interpreter, "-m", "pip", "install", "--quiet", *_PEERS, "-e", source],
    )
    for step in steps:
        done = subprocess.run([str(word) for word in step], capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
            raise RuntimeError(f"--peers: cannot make {folder}: {(said or ['no reason given'])[-1]}")
    ready.touch()
    return str(interpreter)


def _newest_python():
    """The newest interpreter that tokamax installs on: on the path, or kept aside by pyenv or uv."""
    aside = [Path.home() / ".pyenv/versions", Path.home() / ".local/share/uv/python"]
    kept = [path for folder in aside for path in folder.glob("*/bin/python3")]
    names = ["python3", *(f"python3.{minor}" for minor in range(12, 20))]
    found = {}
    for path in [sys.executable, *filter(None, map(shutil.which, names)), *kept]:
        code = "import sys, ensurepip; print(*sys.version_info[:2])"
        printed = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False).stdout
        if re.fullmatch(r"3 \d+\n", printed):
            found.setdefault(int(printed.split()[1]), path)
    if max(found, default=0) < 12:
        raise RuntimeError("--peers needs Python 3.12 or newer for tokamax: install one, and have it on the path")
    return found[max(found)]
