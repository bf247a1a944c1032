"""A ring around the devices of a slice, all of it visible: by permutes around splash, and inside one kernel.

Cycles of the kernels are the compiler's schedule, those of everything around them its own estimate; memory is what a
device needs beside inputs and outputs. Neither sees whether transfers are done in time.
"""

import dataclasses
import tempfile

from ringtide.bench import splash
from ringtide.bench.case import Case
from ringtide.bench.chips import CHIPS
from ringtide.bench.compile import ask, dump_to
from ringtide.bench.schedule import read

WAYS = {"permutes": "splash", "kernel": "ring"}  # -> what its kernels are called
HEADING = (
    "predicted by the compiler, not measured: a round of the ring, everything visible\n"
    "chip   pass     head_dim  way       devices  full tile      a row  kernel ms  rest ms     sum  memory GiB"
)


def prices(case):
    """The rows of the call `case` on each device, one for each way; case.seq tokens a device."""
    for way, name in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="ringtide-schedule-") as folder:
            arguments = {"case": dataclasses.asdict(case), "way": way}
            facts = ask("ringtide.bench.ring:compiled", arguments, flags=dump_to(folder))
            kernel = read(folder, f".*{name}_{case.pass_}.*", case.chip)
        yield _row(case, way, kernel, facts)


def _row(case, way, kernel, facts):
    chip, parts = CHIPS[case.chip], splash.nested_costs(kernel)
    rows, hops = facts["rows"], facts["devices"]
    blind = (hops if way == "permutes" else 1) if case.pass_ == "forward" else 0  # hops without a reference at first
    counts = {
        "rows": rows * hops,
        "steps": rows * facts["steps"] * hops,
        "stream": rows * (facts["steps"] * hops - blind),
        "chunk": rows * (facts["chunks"] - 1) * blind,
        "mixed": rows * blind,
        "skipped": 0,
    }
    cores = chip.cores if kernel.split else 1
    milliseconds = lambda cycles: 1e3 * cycles / (chip.ghz * 1e9) * chip.calibration
    return {
        "op": "ring",
        "chip": case.chip,
        "pass": case.pass_,
        "head_dim": case.head_dim,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "seq": case.seq,
        "way": way,
        "devices": hops,
        "tile_cycles": parts["stream"],
        "row_cycles": parts["row"],
        "kernel_ms": milliseconds(splash.cycles(parts, counts) / cores),
        "rest_ms": milliseconds(facts["rest"]),
        "temp_bytes": facts["temp_bytes"],
        "vmem_bytes": kernel.vmem_bytes,
        "cores": cores,
    }


def line(row):
    return (
        f"{row['chip']:<7}{row['pass']:<9}{row['head_dim']:>8}  {row['way']:<9}{row['devices']:>8}"
        f"{row['tile_cycles']:>11}{row['row_cycles']:>11}{row['kernel_ms']:>11.1f}{row['rest_ms']:>9.1f}"
        f"{row['kernel_ms'] + row['rest_ms']:>8.1f}{row['temp_bytes'] / 2**30:>12.2f}"
    )


def compiled(case, way):
    """In a process of its own: what the compiler says of the ring around the smallest slice of the chip."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    from ringtide.bench.hlo import Program
    from ringtide.jax.attention import Kernel
    from ringtide.kernels.context.hops import Stream
    from ringtide.kernels.context.ring import Ring
    from ringtide.kernels.masks import Where
    from ringtide.kernels.pallas import platforms, ring, splash, splash_bwd, tiles

    case = Case(**case)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[case.chip].topology).devices
    mesh, facts = jax.sharding.Mesh(np.array(devices), ("ring",)), {"devices": len(devices)}
    options = {"mask": case.visible, "scale": case.head_dim**-0.5}
    permutes = Ring(Kernel("pallas", *options.values(), None), "ring", (Stream(1, len(devices) - 1),))

    def call(q, k, v, at, *rest):
        where, forward = Where(at, at), case.pass_ == "forward"
        chip, cores = platforms.chip()
        sizes = tiles.choose((splash if forward else splash_bwd).TILES, chip, case.head_dim, q.dtype)
        cut = tiles.Cut(q, k, v, where, case.visible, sizes, cores if way == "permutes" else 1)
        outer, inner = (cut.nq, cut.nk) if forward else (cut.nk, cut.nq)
        facts.update(rows=cut.b * cut.stacks * outer, steps=inner, chunks=cut.chunks)
        if way == "kernel":
            return getattr(ring, case.pass_)(q, k, v, where, *rest, axis="ring", **options)
        return getattr(permutes, f"_{case.pass_}")(q, k, v, where, *rest, out_dtype=None)

    shards = jax.P(None, "ring")
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        (1, case.seq * len(devices), *shape), dtype, sharding=jax.NamedSharding(mesh, shards)
    )
    q, k = (array(n, case.head_dim) for n in (case.heads, case.kv_heads))
    a_row = array(case.heads, dtype=jnp.float32)
    args = (q, k, k, array(dtype=jnp.int32)) + ((q, a_row, a_row) if case.pass_ == "backward" else ())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        done = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=shards, out_specs=shards)).lower(*args).compile()
    program = Program(done.as_text())
    return facts | {"temp_bytes": done.memory_analysis().temp_size_in_bytes, "rest": program.cycles()["rest"]}
