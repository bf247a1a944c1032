"""How exact attention kernels are in bfloat16: errors against float64, beside the same formula done plainly.

The plain formula multiplies bfloat16, sums in float32, takes the softmax in float32, and rounds what enters a product
(P, dS) and what leaves (out, dq, dk, dv) to bfloat16: what a kernel that streams would give if streaming cost nothing.
Everything runs on the CPU: Pallas kernels in interpret mode, which rounds where the chip rounds.

An error is the largest, relative to the largest value, or the root mean square; both are means over SEEDS draws, since
the largest of a few roundings is itself a matter of luck.
"""

import json
import subprocess
import sys

import numpy as np

OUTPUTS = ("out", "dq", "dk", "dv")
SCALE = 0.125  # 1 / sqrt(64), a power of two: the peers want it inside q, and rounding there would be held against them
SEEDS = range(5)
CASES = {  # name -> (factor on q, what keys grow by along the sequence)
    "usual": (1.0, 1.0),
    "sharp": (8.0, 1.0),
    "growing": (2.0, 12.0),
    "flat": (0.01, 1.0),
}


def inputs(name, seed, seq=1024, heads=2, head_dim=64):
    """q, k, v, dout [1, T, N, H] in bfloat16."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    q, k, v, dout = rng.normal(size=(4, 1, seq, heads, head_dim))
    sharpness, growth = CASES[name]
    k *= np.linspace(1, growth, seq)[:, None, None]
    return [jnp.asarray(x, jnp.bfloat16) for x in (q * sharpness, k, v, dout)]


def truth(q, k, v, dout):
    """(out, dq, dk, dv) in float64."""
    from ringtide.reference.attention import attention, attention_grad

    *qkv, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    causal = {"mask": lambda q, k: q >= k, "scale": SCALE}
    return attention(*qkv, **causal)[0], *attention_grad(*qkv, dout, **causal)[:3]


def plain(q, k, v, dout):
    """(out, dq, dk, dv) by the formula, causal."""
    import jax.numpy as jnp

    product = lambda equation, a, b: jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
    scores = product("btnh,bsnh->bnts", q, k) * SCALE
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    p = jnp.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = product("bnts,bsnh->btnh", p.astype(q.dtype), v).astype(q.dtype)
    delta = product("btnh,btnh->bnt", dout.astype(jnp.float32), out.astype(jnp.float32))
    ds = (p * (product("btnh,bsnh->bnts", dout, v) - delta[..., None]) * SCALE).astype(q.dtype)
    dv = product("bnts,btnh->bsnh", p.astype(q.dtype), dout)
    grads = product("bnts,bsnh->btnh", ds, k), product("bnts,btnh->bsnh", ds, q), dv
    return out, *(x.astype(q.dtype) for x in grads)


def _by_vjp(attend):
    def call(q, k, v, dout):
        import jax

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    return call


def _ours(q, k, v):
    import ringtide

    return ringtide.attention(q, k, v, mask=ringtide.Causal(), scale=SCALE, implementation="pallas")


def _tokamax(q, k, v):
    import dataclasses

    import jax
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    sides = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = dict.fromkeys(sides, 256) | {"block_q_dq": None, "block_kv_dq": None}
    config = dataclasses.replace(kernels.SplashConfig.get_default(), **sizes, interpret=True)
    attend = kernels.make_splash_mha_single_device(masks.CausalMask((q.shape[1], k.shape[1])), config=config)
    q, k, v = ((x * scale).astype(x.dtype).swapaxes(1, 2) for x, scale in ((q, SCALE), (k, 1), (v, 1)))
    return jax.vmap(attend)(q, k, v).swapaxes(1, 2)


KERNELS = {"plain": plain, "ringtide": _by_vjp(_ours), "tokamax": _by_vjp(_tokamax)}


def errors(name, impl):
    """{output: [largest, root mean square]} of a kernel on a case."""
    import jax

    kernel, found = jax.jit(KERNELS[impl]), []
    for seed in SEEDS:
        given = inputs(name, seed)
        off = [(np.asarray(x, np.float64) - want, want) for x, want in zip(kernel(*given), truth(*given), strict=True)]
        found.append(
            [(np.abs(d).max() / np.abs(want).max(), np.sqrt(np.mean(d**2) / np.mean(want**2))) for d, want in off]
        )
    return dict(zip(OUTPUTS, np.mean(found, axis=0).tolist(), strict=True))


def rows(impls, python=None):
    """{"case", "impl", "out", "dq", "dk", "dv": `errors`} of each; tokamax's in the environment of `python`."""
    for name in CASES:
        for impl in impls:
            if impl == "tokamax" and python:
                command = [python, "-m", "ringtide.bench.error", name, impl]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{impl}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
                found = json.loads(done.stdout.splitlines()[-1])
            else:
                found = errors(name, impl)
            yield {"case": name, "impl": impl, **found}


def line(row, plain):
    """A row as text, beside that of the plain formula for the same case."""
    cells = []
    for output in OUTPUTS:
        (most, rms), (most_plain, rms_plain) = row[output], plain[output]
        cells.append(f"{output:>4} {rms:.1e} ({rms / rms_plain:4.2f})  {most:.1e} ({most / most_plain:4.2f})")
    return f"{row['case']:<8} {row['impl']:<9} {'  |  '.join(cells)}"


if __name__ == "__main__":
    import os

    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(errors(*sys.argv[1:])))
