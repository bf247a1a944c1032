"""A small attention kernel with the loops of the real ones: rows (the grid), steps over blocks of keys fetched by hand,
chunks of a block. Causal; right, not fast. tests/test_schedule.py compiles it; `python tests/data/nested_kernel.py`
writes the dump in tests/data/schedule, cut down to what is read."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROW, STEP, CHUNK, HEAD_DIM = 128, 256, 128, 128


def kernel(q_ref, k_hbm, v_hbm, o_ref, k_buf, v_buf, acc, m, l, arrived):
    first = pl.program_id(0) * ROW
    steps = (first + ROW + STEP - 1) // STEP

    def copies(step):
        slot, keys = lax.rem(step, 2), pl.ds(step * STEP, STEP)
        pairs = ((k_hbm, k_buf), (v_hbm, v_buf))
        return [pltpu.make_async_copy(a.at[keys], b.at[slot], arrived.at[i, slot]) for i, (a, b) in enumerate(pairs)]

    def scores(slot, chunk):
        return _dot(k_buf[slot, pl.ds(chunk * CHUNK, CHUNK)], q_ref[...], 1, 1)

    def add(p, slot, chunk):
        acc[...] += _dot(v_buf[slot, pl.ds(chunk * CHUNK, CHUNK)], p.astype(jnp.bfloat16), 0, 0)
        l[...] += jnp.sum(p, axis=0, keepdims=True)

    def unmasked(slot, chunk):
        add(jnp.exp2(scores(slot, chunk) - m[...]), slot, chunk)

    def mixed(slot, chunk, below):
        s = scores(slot, chunk)
        seen = lax.broadcasted_iota(jnp.int32, s.shape, 0) <= lax.broadcasted_iota(jnp.int32, s.shape, 1) + below
        s = jnp.where(seen, s, -1e30)
        top = jnp.maximum(m[...], jnp.max(s, axis=0, keepdims=True))
        shrink = jnp.exp2(m[...] - top)
        m[...], l[...], acc[...] = top, l[...] * shrink, acc[...] * shrink
        add(jnp.exp2(s - top), slot, chunk)

    def step(i, _):
        slot = lax.rem(i, 2)

        @pl.when(i + 1 < steps)
        def _():
            [copy.start() for copy in copies(i + 1)]

        [copy.wait() for copy in copies(i)]

        @pl.when((i + 1) * STEP <= first)
        def _():
            [unmasked(slot, c) for c in range(STEP // CHUNK)]

        @pl.when((i + 1) * STEP > first)
        def _():
            def chunk(c, _):
                start = i * STEP + c * CHUNK
                pl.when(start + CHUNK <= first)(lambda: unmasked(slot, c))
                pl.when((start + CHUNK > first) & (start < first + ROW))(lambda: mixed(slot, c, first - start))
                return 0

            lax.fori_loop(0, STEP // CHUNK, chunk, 0)

        return 0

    [copy.start() for copy in copies(0)]
    acc[...], m[...], l[...] = jnp.zeros_like(acc), jnp.full_like(m, -1e30), jnp.zeros_like(l)
    lax.fori_loop(0, steps, step, 0)
    o_ref[...] = (acc[...] / l[...]).T.astype(o_ref.dtype)


def _dot(a, b, i, j):
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def call(length):
    """(function, inputs, facts), as compile.py takes them."""
    x = jax.ShapeDtypeStruct((length, HEAD_DIM), jnp.bfloat16)
    rows = pl.BlockSpec((ROW, HEAD_DIM), lambda i: (i, 0))
    by_hand = pl.BlockSpec(memory_space=pltpu.HBM)
    block = pltpu.VMEM((2, STEP, HEAD_DIM), jnp.bfloat16)
    row = pltpu.VMEM((1, ROW), jnp.float32)
    function = pl.pallas_call(
        kernel,
        grid=(length // ROW,),
        in_specs=[rows, by_hand, by_hand],
        out_specs=rows,
        out_shape=x,
        scratch_shapes=[
            block,
            block,
            pltpu.VMEM((HEAD_DIM, ROW), jnp.float32),
            row,
            row,
            pltpu.SemaphoreType.DMA((2, 2)),
        ],
        name="nested",
    )
    return function, (x, x, x), {"length": length}


def trim(name, text):
    """The lines and words of a dump that the reader looks at."""
    if "allocations" in name:
        lines = re.findall(r"#allocation\d+ \[.*?size = \w+.*?scoped", text)
        return "\n".join(lines) + "\n"
    if "final_bundles" not in name:
        return text
    kept = r"/\*[^*]*region[^*]*\*/|sbr\.rel[^;}]*|= vsel|\[[vs]mem:\[#allocation\d+_spill"
    bundles = re.split(r"^(\s*(?:0x[0-9a-f]+|0)\s+\w*\s*:)", text, flags=re.MULTILINE)[1:]
    pairs = zip(bundles[::2], bundles[1::2], strict=True)
    return "".join(f"{head} {{ {' '.join(re.findall(kept, body))} }}\n" for head, body in pairs)


if __name__ == "__main__":
    import os

    from ringtide.bench.compile import dumped

    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = str(here)
    with dumped("tpu7x", "nested_kernel:call", {"length": 65536}) as (_, folder):
        for path in Path(folder).glob("*-nested*-*"):
            if re.search("utilization|final_bundles|allocations", path.name) and "analysis" not in path.name:
                out = here / "schedule" / re.sub(r"^\d+", "1", path.name)
                out.parent.mkdir(exist_ok=True)
                out.write_text(trim(path.name, path.read_text()))
