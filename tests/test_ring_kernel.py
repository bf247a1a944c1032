"""The ring inside one kernel, on simulated devices under JAX's race detector.

Cases run in a process of their own, this file as a script: the interpreter's callbacks wait for each other across
devices, so the CPU client needs more threads than a machine may have cores (NPROC, read once), or it hangs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(devices, *cases):
    """[{"races": bool, "out": [errors], "grads": [errors]}] of cases; errors are relative to the largest value."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    child = subprocess.run(
        [sys.executable, Path(__file__)],
        input=json.dumps(cases or [{}]),
        env={**os.environ, "NPROC": "32", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


def right(result, values=2e-6, gradients=5e-6):
    assert not result["races"]
    assert max(result.get("out", [0])) <= values
    assert max(result.get("grads", [0])) <= gradients


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_no_races(devices):
    for result in run(devices):
        right(result)


def test_masks_layouts_heads_and_lengths():
    cases = [
        {"layout": "contiguous"},  # half of the hops hold nothing
        {
            "layout": "contiguous",
            "mask": "Local(99, 0)",
        },  # of the next shard, only the first query block sees something
        {"layout": "striped", "mask": "Chunked(300)"},
        {"mask": "Full()", "local": 200, "batch": 2, "heads": [4, 2], "rows": 512},  # padded, two heads a stack
        {"segments": 150, "soft_cap": 2.0, "heads": [2, 1], "rows": 128},  # padding: rows that see nothing; two stacks
    ]
    for result in run(3, *cases):
        right(result)


def test_one_axis_of_several():
    """Each of two rings of two is among itself, whichever axis of the mesh goes around."""
    for result in run(4, {"mesh": ["batch", "ring"], "batch": 2}, {"mesh": ["ring", "batch"], "batch": 2}):
        right(result)


def test_second_attempts():
    """Of every block in every hop; then of blocks whose keys, hops later, pass the reference by far."""
    every, late = run(
        3,
        {"passes": ["forward"], "overflow": 0.0},
        {"passes": ["forward"], "layout": "contiguous", "mask": "Full()", "height": 500},
    )
    right(every)
    right(late, values=1e-4)


def test_subtraction_inside_the_products():
    """In bfloat16; what is subtracted of a row goes with it from hop to hop."""
    for result in run(2, {"dtype": "bfloat16", "head_dim": 128, "fold": True}):
        right(result, values=1e-2, gradients=2e-2)


@pytest.mark.parametrize(
    ("drop", "pass_", "eager"),
    [
        ("credit", "forward", True),
        ("credit", "backward", True),
        ("keys", "forward", True),
        (
            "keys",
            "backward",
            False,
        ),  # if eager, they are there before the gradients sent after them, and those are awaited
        ("gradients", "backward", True),
    ],
)
def test_a_wait_that_is_dropped_is_seen(drop, pass_, eager):
    """Of the credit, or of the arrival of K and V, or of dK and dV; and all is well in the same mode with that wait.

    eager: copies happen as soon as they are started; else as late as they can, which may be never.
    """
    case = {"passes": [pass_], "eager": eager, "layout": "contiguous", "mask": "Full()"}
    whole, without = run(3, case, case | {"drop": drop})
    right(whole)
    errors = without.get("out", []) + without.get("grads", [])
    assert without["races"] if eager else max(errors) > 0.1


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize(("chip", "devices"), [("tpu7x", 8), ("v5p", 4)])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_tpu_compiler_takes_it(chip, devices, pass_):
    from ringtide.bench.compile import ask

    case = {"chip": chip, "pass_": pass_, "seq": 4096, "heads": 4, "kv_heads": 1}
    assert ask("ringtide.bench.ring:compiled", {"case": case, "way": "kernel"})["devices"] == devices


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize(
    ("chip", "how", "kernel"),
    [
        ("tpu7x", {}, "ring"),
        ("tpu7x", {"implementation": "pallas", "layout": "zigzag"}, "ring"),
        ("tpu7x", {"bidirectional": True}, "splash"),
        ("v5p", {}, "splash"),  # two cores a device
    ],
)
def test_which_ring_a_chip_takes(chip, how, kernel):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    from ringtide import Causal, context_parallel_attention
    from ringtide.bench.chips import CHIPS

    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("context",))
    attend = lambda q: context_parallel_attention(
        q, q, q, mesh=mesh, seq_axis="context", strategy="ring", mask=Causal(), **how
    )
    tokens = jax.NamedSharding(mesh, jax.P(None, "context"))
    q = jax.ShapeDtypeStruct((1, 256 * mesh.size, 2, 128), jnp.bfloat16, sharding=tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(lambda q: jax.vjp(attend, q)[1](q)).lower(q).as_text()
    found = {name for name in ("ring", "splash") for pass_ in ("forward", "backward") if f"{name}_{pass_}" in text}
    assert found == {kernel}


def measure(
    *, layout="zigzag", mask="Causal()", local=256, batch=1, heads=(2, 1), head_dim=16, rows=256, fold=False,
    dtype="float32", segments=None, soft_cap=None, height=None, mesh=("ring",), overflow=None, eager=False, drop=None,
    passes=("forward", "backward"),
):  # fmt: skip
    """Runs one case in this process; see `run`. drop: which wait is left out."""
    from unittest import mock

    import jax
    import numpy as np
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from ringtide.kernels import layouts, masks
    from ringtide.kernels.pallas import platforms, ring, splash
    from ringtide.kernels.pallas.tiles import INTERPRET, Tiles
    from ringtide.reference import attention as reference

    sizes = [len(jax.devices())] if len(mesh) == 1 else [2, 2]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), tuple(mesh))
    devices = mesh.shape["ring"]
    t, rng = local * devices, np.random.default_rng(0)
    shapes = ((batch, t, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0]))
    q, k, v, dout = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    at = np.asarray(layouts.position_of(np.arange(t, dtype=np.int32), layout, t, devices))[None]
    at = np.repeat(at, batch, 0)
    ids = None if segments is None else np.where(at % 97 == 0, -1, at // segments).astype(np.int32)
    if height is not None:
        q[..., 0], k[..., 0] = 4, np.where(np.arange(t) // 128 % 2, height, 0)[:, None]
    where = masks.Where(at, at, ids, ids)
    mask = {"Full()": masks.Full(), "Causal()": masks.Causal(), "Local(99, 0)": masks.Local(99, 0)}.get(
        mask, masks.Chunked(300)
    )
    options = {"mask": mask, "scale": head_dim**-0.5}
    truth = options | {"q_positions": at, "kv_positions": at, "logits_soft_cap": soft_cap}
    truth |= {"segment_ids": None if ids is None else (ids, ids)}
    options |= {"axis": "ring", "soft_cap": soft_cap, "sizes": Tiles(rows, 128, 128, 128, fold)}
    how = {"detect_races": True, "dma_execution_mode": "eager" if eager else "on_wait"}
    if hasattr(pltpu.InterpretParams, "on_race"):  # jax 0.12; by default it would raise, earlier ones only note a race
        how["on_race"] = "warn"
    options["interpret"] = pltpu.InterpretParams(**how)
    shards = jax.P("batch" if "batch" in mesh.shape else None, "ring")

    def sharded(f, *args):
        go = jax.shard_map(f, mesh=mesh, in_specs=shards, out_specs=shards, check_vma=False)
        args = jax.device_put(args, jax.NamedSharding(mesh, shards))
        return [np.asarray(x, np.float32) for x in jax.jit(go)(*args)]

    def errors(got, want):
        for x, w in zip(got, want, strict=True):
            seen = np.isfinite(w)
            same = np.array_equal(x[~seen], w[~seen])
            yield float(np.abs(x - w)[seen].max() / np.abs(w[seen]).max()) if same else float("inf")

    wait, remote = pl.semaphore_wait, pltpu.make_async_remote_copy

    def some_waits(*args, **how):
        copy = remote(*args, **how)
        if drop == "keys":  # K, V and positions: the only copies of which both ends are waited for at once
            copy.wait = copy.wait_send
        if drop == "gradients":
            copy.wait_recv = lambda: None
        return copy

    a_credit = lambda ref, count: None if drop == "credit" and count == 1 else wait(ref, count)
    straight = lambda kernel, interpret, shapes, *args: kernel(interpret, INTERPRET, 1, *args)
    wide = lambda *xs: (x.astype(np.float32) for x in xs)
    result = {}
    with (
        mock.patch.object(platforms, "run", straight),  # not through the primitive that chooses a platform
        mock.patch.object(splash, "OVERFLOW", splash.OVERFLOW if overflow is None else overflow),
        mock.patch.object(pl, "semaphore_wait", a_credit),
        mock.patch.object(pltpu, "make_async_remote_copy", some_waits),
    ):
        want_out, want_lse = reference.attention(*wide(q, k, v), **truth)
        if "forward" in passes:
            got = sharded(lambda q, k, v, where: ring.forward(q, k, v, where, **options), q, k, v, where)
            result["out"] = list(errors(got, (want_out, want_lse)))
        if "backward" in passes:
            dlse = np.where(np.isneginf(want_lse), 0, rng.normal(size=want_lse.shape)).astype(np.float32)
            lse = np.where(np.isneginf(want_lse), np.inf, want_lse).astype(np.float32)
            delta = (dout * want_out).sum(-1).astype(np.float32) - dlse
            got = sharded(lambda *args: ring.backward(*args, **options), q, k, v, where, dout, lse, delta)
            want = reference.attention_grad(*wide(q, k, v, dout), dlse, **truth)
            result["grads"] = list(errors(got, want[:3]))
    result["races"] = interpreter.races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    return result


if __name__ == "__main__":
    print(json.dumps([measure(**case) for case in json.load(sys.stdin)]))
