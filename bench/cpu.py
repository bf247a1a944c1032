"""What the portable kernels cost on this machine's CPU: speed against the usual way, and peak memory. Measured.

Every round runs each function once, in turn, so that a drift of the machine hits all alike; medians over the rounds.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

HEAD_DIM = 64


@dataclass(frozen=True)
class Row:
    """One comparison, measured in one run."""

    name: str
    value: float
    unit: str  # "x": time as a share of the other's; "share": of the matmul rate, 0..1; "GB"
    target: str
    seconds: float | None = None
    against: str | None = None
    against_seconds: float | None = None

    def json(self, rounds):
        return {**asdict(self), "rounds": rounds, "cores": cores(), "jax": version("jax"), "measured": True}


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def run(rounds: int = 5, log=lambda text: None) -> list[Row]:
    """All rows of the bench. Takes a few minutes."""
    return [*attention_rows(rounds, log), *gla_rows(rounds, log), memory_row(log)]


def attention_rows(rounds, log):
    """Forward + backward of float32 attention against jax.nn's, and as a share of this machine's matmul rate."""
    import jax
    import jax.numpy as jnp

    from ringtide import Causal, Local, attention

    def both(f):
        def step(q, k, v, dout):
            out, vjp = jax.vjp(f, q, k, v)
            return out, vjp(dout)

        return jax.jit(step)

    naive = both(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    causal = both(lambda q, k, v: attention(q, k, v, mask=Causal()))
    window = both(lambda q, k, v: attention(q, k, v, mask=Local(511, 0)))
    short, long = _inputs(4096, 8), _inputs(16384, 1)
    side = 2048
    a = jax.random.normal(jax.random.key(0), (side, side))
    products = 8  # as long as what it is held against, so that waking the cores does not count
    matmul = jax.jit(lambda a: jax.lax.fori_loop(0, products, lambda i, x: jnp.dot(a, x, precision="highest"), a))
    seconds = _interleaved(
        {
            "matmul": lambda: matmul(a),
            "causal 4K": lambda: causal(*short),
            "naive 4K": lambda: naive(*short),
            "causal 16K": lambda: causal(*long),
            "window 16K": lambda: window(*long),
            "naive 16K": lambda: naive(*long),
        },
        rounds,
        log,
    )
    rate = products * 2 * side**3 / seconds["matmul"]
    flops = (2 + 5) * 2 * HEAD_DIM * 16384**2 / 2  # matmuls forward + backward, the causal half

    def ratio(name, ours, other, target):
        mine, theirs = seconds[ours], seconds[other]
        return Row(name, mine / theirs, "x", target, mine, "jax.nn.dot_product_attention, causal", theirs)

    return [
        ratio("attention, causal, T = 4,096, 8 heads of 64", "causal 4K", "naive 4K", "<= 0.20"),
        ratio("attention, causal, T = 16,384, 1 head of 64", "causal 16K", "naive 16K", "<= 0.10"),
        ratio("attention, window of 512, T = 16,384, 1 head of 64", "window 16K", "naive 16K", "<= 0.02"),
        Row(
            "attention, causal, T = 16,384: share of the matmul rate",
            flops / seconds["causal 16K"] / rate,
            "share",
            ">= 0.40",
            seconds["causal 16K"],
            f"{products} float32 matmuls of side {side}: {rate / 1e9:.0f} GFLOP/s",
            seconds["matmul"],
        ),
    ]


def gla_rows(rounds, log):
    """Forward + backward of chunked GLA against the recurrence, a token at a time by lax.scan."""
    import jax
    import jax.numpy as jnp

    from ringtide import gla

    def recurrence(q, k, v, g):
        def token(S, x):
            q, k, v, g = x
            S = jnp.exp(g)[..., None] * S + k[..., None] * v[..., None, :]
            return S, jnp.einsum("bnk,bnkv->bnv", q * q.shape[-1] ** -0.5, S)

        start = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
        _, out = jax.lax.scan(token, start, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g)))
        return jnp.moveaxis(out, 0, 1)

    def both(f):
        def step(q, k, v, g, dout):
            out, vjp = jax.vjp(f, q, k, v, g)
            return out, vjp(dout)

        return jax.jit(step)

    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g, dout = (
        jax.random.normal(key, (1, 4096, 4, d)) for key, d in zip(keys, (96, 96, 192, 96, 192), strict=True)
    )
    inputs = q, k, v, jax.nn.log_sigmoid(g + 3), dout
    chunked, tokens = both(lambda *x: gla(*x)[0]), both(recurrence)
    seconds = _interleaved({"gla": lambda: chunked(*inputs), "gla recurrence": lambda: tokens(*inputs)}, rounds, log)
    ours, other = seconds["gla"], seconds["gla recurrence"]
    return [Row("gla, T = 4,096, 4 heads of 96/192", ours / other, "x", "-", ours, "lax.scan over tokens", other)]


def memory_row(log, length=65536):
    """Peak memory of a process that does forward and backward of causal attention, one head of 64."""
    log("peak memory")
    code = f"from ringtide.bench import cpu; cpu._print_peak({length})"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return Row(f"attention, causal, T = {length:,}, 1 head of 64: peak RSS", float(printed) / 1e9, "GB", "< 0.80")


def _print_peak(length):
    import jax

    from ringtide import Causal, attention

    def loss(q, k, v, dout):
        return (attention(q, k, v, mask=Causal()) * dout).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*_inputs(length, 1)))
    print(_peak_bytes())


def _peak_bytes():
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage would report the parent's peak when that is larger
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _inputs(length, heads):
    import jax

    return [jax.random.normal(key, (1, length, heads, HEAD_DIM)) for key in jax.random.split(jax.random.key(0), 4)]


def _interleaved(functions, rounds, log):
    """{name: median seconds} of calls made in turn, after one that compiles."""
    import jax

    times = {name: [] for name in functions}
    for r in range(rounds + 1):
        log(f"round {r} of {rounds}" if r else "compiling")
        for name, call in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
