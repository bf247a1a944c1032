"""The ring inside one kernel, on simulated devices under JAX's race detector.

Each run is a process of its own, this file as a script: the interpreter's callbacks wait for each other across devices,
so the CPU client needs more threads than this machine may have cores (NPROC, read once), or it hangs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if __name__ != "__main__":
    from ringtide.kernels.masks import Causal  # noqa: F401  fails here, not in the child, if there is no package


def run(devices, **case):
    """{"races": bool, "errors": [...]} of a case; an error is relative to the largest value, as in DESIGN.md."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    child = subprocess.run(
        [sys.executable, Path(__file__)],
        input=json.dumps({"devices": devices, **case}),
        env={**os.environ, "NPROC": "32", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


def right(result):
    assert not result["races"]
    assert max(result["out"]) <= 2e-6
    assert max(result.get("grads", [0])) <= 5e-6


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_no_races(devices):
    right(run(devices, layout="zigzag"))


def main():
    import jax
    import numpy as np
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from ringtide.kernels import layouts, masks
    from ringtide.kernels.pallas import platforms, ring
    from ringtide.kernels.pallas.tiles import INTERPRET, Tiles
    from ringtide.reference import attention as reference

    case = {"layout": "contiguous", "mask": "Causal()", "local": 256, "heads": [2, 1], "drop": None, "batch": 1}
    case |= {"passes": ["forward", "backward"]}
    case |= json.load(sys.stdin)
    platforms.run = lambda kernel, interpret, shapes, *args: kernel(interpret, INTERPRET, 1, *args)
    wait, remote = pl.semaphore_wait, pltpu.make_async_remote_copy
    if case["drop"] == "credit":
        pl.semaphore_wait = lambda ref, count: wait(ref, count) if count == 2 else None  # 2: the barrier
    if case["drop"] == "receive":

        def receives_nothing(*args, **how):
            copy = remote(*args, **how)
            copy.wait = copy.wait_send
            return copy

        pltpu.make_async_remote_copy = receives_nothing

    devices, (n, n_kv) = case["devices"], case["heads"]
    t = case["local"] * devices
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(case["batch"], t, heads, 16)).astype(np.float32) for heads in (n, n_kv, n_kv, n))
    at = np.asarray(layouts.position_of(np.arange(t, dtype=np.int32), case["layout"], t, devices))[None]
    mask = eval(case["mask"], vars(masks).copy())  # written in this file
    where = masks.Where(at, at)
    options = {"mask": mask, "scale": 0.25}
    truth = options | {"q_positions": at, "kv_positions": at}
    options |= {
        "axis": "ring",
        "sizes": Tiles(256, 128, 128, 128),
        "interpret": pltpu.InterpretParams(detect_races=True),
    }
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ring",))
    shards = jax.P(None, "ring")

    def sharded(f, *args):
        run = jax.shard_map(f, mesh=mesh, in_specs=shards, out_specs=shards, check_vma=False)
        args = jax.device_put(args, jax.NamedSharding(mesh, shards))
        return [np.asarray(x) for x in jax.jit(run)(*args)]

    def errors(got, want):
        return [float(np.nanmax(np.abs(x - w)) / np.abs(w).max()) for x, w in zip(got, want, strict=True)]

    result, dlse = {}, rng.normal(size=q.shape[:3]).astype(np.float32)
    want_out, want_lse = reference.attention(q, k, v, **truth)
    if "forward" in case["passes"]:
        got = sharded(lambda q, k, v, where: ring.forward(q, k, v, where, **options), q, k, v, where)
        result["out"] = errors(got, (want_out, want_lse))
    if "backward" in case["passes"]:
        dlse = np.where(np.isneginf(want_lse), 0, dlse).astype(np.float32)
        lse = np.where(np.isneginf(want_lse), np.inf, want_lse).astype(np.float32)
        args = q, k, v, where, dout, lse, (dout * want_out).sum(-1).astype(np.float32) - dlse
        got = sharded(lambda *args: ring.backward(*args, **options), *args)
        result["grads"] = errors(got, reference.attention_grad(q, k, v, dout, dlse, **truth)[:3])
    result["races"] = interpreter.races.races_found
    print(json.dumps(result))


if __name__ == "__main__":
    main()
