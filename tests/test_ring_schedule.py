"""The ring's schedule, read from programs compiled for chips that are not there: what is sent is sent during a kernel.

In the scheduled program a permute is two instructions, a start and a done; what stands between runs meanwhile.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringtide import Causal, Full, context_parallel_attention
from ringtide.bench.hlo import Program
from ringtide.jax import dispatch
from ringtide.kernels.masks import Where
from ringtide.kernels.pallas import splash

pytestmark = pytest.mark.usefixtures("tpu_compiler")

TOPOLOGY = {"v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2"}, "tpu7x": {4: "tpu7x:2x2x1", 8: "tpu7x:2x2x1"}}
SHARD, N, N_KV, H = 16384, 8, 2, 128  # with little to send, the compiler finds enough else to do meanwhile


@pytest.fixture(autouse=True)
def _by_permutes(monkeypatch):
    """Also where one kernel goes around by itself."""
    monkeypatch.setitem(dispatch.RINGS, "attention", {})


def mesh_of(chip, devices):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[chip][devices])
    return Mesh(np.array(topology.devices[:devices]), ("context",))


def compiled(mesh, fn):
    """The program of fn(q, k, v), with time sharded over the mesh."""
    tokens = NamedSharding(mesh, P(None, "context"))
    args = (jax.ShapeDtypeStruct((1, SHARD * mesh.size, n, H), jnp.bfloat16, sharding=tokens) for n in (N, N_KV, N_KV))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return Program(jax.jit(fn).lower(*args).compile().as_text())


def step(attend):
    """Output and gradients: the forward ring, and the backward ring."""

    def run(q, k, v):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(out)

    return run


def sends(program):
    """[(computation, permute, kernels that run while it is on its way)] in the order of their starts."""
    found = []
    for name, ops in program.computations.items():
        kernels = {i: kernel for i, op in enumerate(ops) for kernel in kernels_in(program, op)}
        place = {op.name: i for i, op in enumerate(ops)}
        for op in ops:
            if op.opcode == "collective-permute-done":
                start = place[op.rest.split(")")[0].split("%")[-1]]
                during = [kernel for i, kernel in kernels.items() if start < i < place[op.name]]
                found.append((name, ops[start], during))
            assert op.opcode != "collective-permute", "one that nothing runs beside"
    return found


def kernels_in(program, op):
    """The kernel that an instruction is, or that a branch of it may run."""
    if op.opcode == "custom-call" and "tpu_custom_call" in op.rest:
        return [op.name.split(".")[0]]
    if op.opcode != "conditional":
        return []
    branches = op.rest.split("branch_computations={")[1].split("}")[0].split(",")
    return [k for to in branches for inner in program.computations[to.strip(" %")] for k in kernels_in(program, inner)]


def loop_of(program, kernel):
    """The permutes, as from `sends`, in the body of the one loop that runs `kernel`."""
    loops = [op for ops in program.computations.values() for op in ops if op.opcode == "while"]
    bodies = [re.search(r"body=%?([\w.\-]+)", op.rest)[1] for op in loops]
    runs = lambda name: [k for op in program.computations[name] for k in kernels_in(program, op)]
    (body,) = [name for name in bodies if kernel in runs(name)]
    return [during for name, _, during in sends(program) if name == body]


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("chip", "devices", "how"),
    [
        ("tpu7x", 4, {"layout": "zigzag", "mask": Causal()}),
        ("v5p", 4, {"layout": "contiguous", "mask": Causal()}),  # a conditional holds the kernel
        ("tpu7x", 8, {"bidirectional": True}),
        SLOW("tpu7x", 8, {"layout": "zigzag", "mask": Causal()}),
        SLOW("v5p", 8, {"layout": "zigzag", "mask": Causal()}),
        SLOW("v5p", 4, {"layout": "zigzag", "mask": Causal(), "bidirectional": True}),
        SLOW("v5p", 8, {"layout": "contiguous", "mask": Causal(), "bidirectional": True}),
        SLOW("tpu7x", 8, {"layout": "contiguous", "mask": Causal()}),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x),
)
def test_every_hop_sends_during_its_kernel(chip, devices, how):
    mesh = mesh_of(chip, devices)
    attend = functools.partial(context_parallel_attention, mesh=mesh, seq_axis="context", strategy="ring", **how)
    program = compiled(mesh, step(attend))
    streams = 2 if how.get("bidirectional") else 1
    # Of a hop: K and V, and in backward dk and dv too; in one piece each where there are two streams.
    for kernel, permutes in (("splash_forward", 2), ("splash_backward", 4)):
        assert loop_of(program, kernel) == [[kernel] * streams] * permutes
    # The hops outside of the loops, the first and the last, too; only then do dk and dv go home.
    alone = [(name, op) for name, op, during in sends(program) if not during]
    assert len(alone) == 2
    for name, op in alone:
        ops = program.computations[name]
        assert ops.index(op) > max(i for i, other in enumerate(ops) if kernels_in(program, other))


def test_a_ring_that_sends_after_its_kernel_is_told_apart():
    mesh = mesh_of("tpu7x", 4)
    around = [(i, (i + 1) % 4) for i in range(4)]

    def late(q, k, v):
        def hop(carry, _):
            k, v, out = carry
            more, _ = splash.forward(q, k, v, Where(), mask=Full(), scale=1.0)
            k, v, out = lax.optimization_barrier((k, v, out + more))
            return (*(lax.ppermute(x, "context", around) for x in (k, v)), out), None

        return lax.scan(hop, (k, v, q), None, length=3)[0][2]

    tokens = P(None, "context")
    program = compiled(mesh, jax.shard_map(late, mesh=mesh, in_specs=tokens, out_specs=tokens))
    assert loop_of(program, "splash_forward") == [[], []]
