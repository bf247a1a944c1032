"""The splash kernels inside JAX: transformations, sharding, rings, export, and the precision that is lowered to."""

import base64
import json
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ringtide import Causal, attention, context_parallel_attention
from ringtide.kernels.masks import Where
from ringtide.kernels.pallas import splash

B, T, N = 4, 160, 4


def arrays(*shape):
    return [np.random.default_rng([i, *shape]).normal(size=shape).astype(np.float32) for i in range(3)]


def loss(q, k, v, implementation="pallas", op=attention, **options):
    return (op(q, k, v, mask=Causal(), implementation=implementation, **options) ** 2).sum()


def grads(f, **options):
    return jax.grad(partial(f, **options), (0, 1, 2))


def equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 4e-6 * np.abs(b).max()


def mesh_of(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


ARGS = arrays(B, T, N, 16)


@pytest.fixture(scope="module")
def expected():
    return jax.tree.map(np.asarray, jax.jit(grads(loss, implementation="xla"))(*ARGS))


@pytest.mark.parametrize("how", ["jit", "eager", "remat"])
def test_gradients(how, expected):
    f = grads(jax.checkpoint(loss) if how == "remat" else loss)
    equal((f if how == "eager" else jax.jit(f))(*ARGS), expected)


def test_vmap(expected):
    def one(q, k, v):
        return grads(loss)(q[None], k[None], v[None])

    equal([x[:, 0] for x in jax.jit(jax.vmap(one))(*ARGS)], expected)


def test_vmap_with_shared_and_with_own_ids():
    """[1, T] positions for all, segment ids of two sequences for all of the outer axis; then ids of each."""
    q, k, v = (x.reshape(2, 2, T, N, 16) for x in ARGS)
    ids = np.stack([np.arange(T) // 50, np.where(np.arange(T) < 100, np.arange(T) // 70, -1)]).astype(np.int32)
    order = np.arange(T)[::-1].copy()

    def run(implementation):
        how = {"implementation": implementation, "q_positions": order, "kv_positions": order}
        shared = jax.vmap(grads(loss, segment_ids=ids, **how))
        own = jax.vmap(lambda q, k, v, ids: grads(loss, segment_ids=ids, **how)(q, k, v))
        return jax.jit(lambda *x: (shared(*x), own(*x, np.stack([ids, ids[::-1]]))))(q, k, v)

    equal(run("pallas"), run("xla"))


def test_vmap_of_an_inner_axis():
    """Keys that are not mapped, queries mapped over an axis that is not the first."""
    q, k, v = ARGS[0].reshape(B, T, 2, 2, 16), ARGS[1][:, :, :2], ARGS[2][:, :, :2]
    run = lambda i: jax.jit(jax.vmap(partial(attention, mask=Causal(), implementation=i), (2, None, None), 2))(q, k, v)
    equal(run("pallas"), run("xla"))


def test_shard_map_over_batch_and_heads(expected):
    """Of which the types are checked (check_vma), and which needs no communication."""
    spec = P("b", None, "h")
    mesh = mesh_of((2, 4), ("b", "h"))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    f = jax.shard_map(grads(loss), mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3)
    step = jax.jit(f, in_shardings=sharding).lower(*ARGS).compile()
    assert not any(word in step.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    equal(step(*(jax.device_put(x, sharding) for x in ARGS)), expected)


def test_ring():
    mesh, args = mesh_of((4,), ("s",)), arrays(1, 256, 2, 16)
    ring = partial(context_parallel_attention, mesh=mesh, seq_axis="s", layout="zigzag")
    run = lambda implementation: jax.jit(grads(loss, op=ring, implementation=implementation))(*args)
    equal(run("pallas"), run("xla"))


EXPORT = """
import sys
sys.modules["libtpu"] = None  # as if it were not installed
import jax, jax.numpy as jnp
from ringtide import Causal, attention

x = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)
for implementation in ("pallas", None):
    f = lambda q, k, v: (attention(q, k, v, mask=Causal(), implementation=implementation) ** 2).sum()
    exported = jax.export.export(jax.jit(jax.grad(f, (0, 1, 2))), platforms=["tpu"])(x, x, x)
    print(exported.mlir_module().count("@tpu_custom_call"))
"""


def test_export_for_a_tpu_without_its_compiler():
    done = subprocess.run([sys.executable, "-c", EXPORT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]  # forward and backward, by name and by default


def matmuls(text):
    """The lines of the Mosaic kernels in a lowered program that multiply matrices."""
    from jax._src.lib import tpu
    from jaxlib.mlir import ir

    lines = []
    for config in re.findall(r'@tpu_custom_call\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text):
        body = json.loads(config.replace(r"\22", '"'))["custom_call_config"]["body"]
        context = ir.Context()
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        module = str(ir.Module.parse(base64.b64decode(body), context))
        lines.append([line for line in module.splitlines() if re.search(r"tpu\.matmul\b", line)])
    return lines


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_multiplied_on_a_tpu(dtype):
    """float32 (and float16, widened) in float32, not in a few bfloat16 passes; bfloat16 as it is; sums in float32."""
    x = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.dtype(dtype))
    row = jax.ShapeDtypeStruct((1, 300, 2), jnp.float32)
    options = {"mask": Causal(), "scale": 0.125}

    def both(q, k, v, dout, lse, delta):
        out = splash.forward(q, k, v, Where(), **options)
        return out, splash.backward(q, k, v, Where(), dout, lse, delta, **options)

    traced = jax.jit(both).trace(x, x, x, x, row, row)
    forward, backward = matmuls(traced.lower(lowering_platforms=("tpu",)).as_text())
    assert len(forward) >= 4  # 2 streamed, 2 online
    assert len(backward) >= 10
    exact, operand = ("contract_precision<fp32>", "f32") if dtype != "bfloat16" else ("", "bf16")
    for line in forward + backward:
        a, b, _, out = re.findall(r"vector<[\dx]+x(\w+)>", line)
        assert (a, b, out) == (operand, operand, "f32"), line
        assert exact in line
        assert ("contract_precision" in line) == bool(exact)
