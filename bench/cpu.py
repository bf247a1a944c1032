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
from importlib.util import find_spec
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
        versions = {name: version(name) for name in ("jax", "torch") if find_spec(name)}
        return {**asdict(self), "rounds": rounds, "cores": cores(), **versions, "measured": True}


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def run(rounds: int = 5, log=lambda text: None) -> list[Row]:
    """All rows of the bench; those of PyTorch where it is installed. Takes a few minutes."""
    torch_rows = [*torch_gla_rows(rounds, log), *torch_decode_rows(rounds, log)] if find_spec("torch") else []
    return [*attention_rows(rounds, log), *gla_rows(rounds, log), *torch_rows, memory_row(log)]


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


def torch_gla_rows(rounds, log):
    """Forward + backward of ringtide.torch.gla against what is usual in plain PyTorch: the recurrence, chunks of 64
    whose scores are made a key at a time, and the textbook's chunks, which overflow at strong gates."""
    import torch
    from torch.nn.functional import logsigmoid, pad

    from ringtide.torch import gla

    def recurrence(q, k, v, g):
        S, out = torch.zeros(1, *q.shape[2:], v.shape[3]), []
        for x in zip(*(x.unbind(1) for x in (q * q.shape[3] ** -0.5, k, v, g.exp())), strict=True):
            q_t, k_t, v_t, decay = x
            S = S * decay[..., None] + k_t[..., None] * v_t[..., None, :]
            out.append((q_t[..., None, :] @ S)[..., 0, :])
        return torch.stack(out, 1)

    def in_chunks(scores):
        def run(q, k, v, g):
            q, k, v, g = (x.unflatten(1, (-1, 64)).permute(0, 3, 1, 2, 4) for x in (q * q.shape[3] ** -0.5, k, v, g))
            G = g.cumsum(-2)
            end = G[..., -1:, :]
            add, decay = (k * (end - G).exp()).mT @ v, end.exp().mT
            states = [torch.zeros_like(add[:, :, 0])]
            for i in range(add.shape[2] - 1):
                states.append(states[-1] * decay[:, :, i] + add[:, :, i])
            out = scores(q, k, G) @ v + (q * G.exp()) @ torch.stack(states, 2)
            return out.permute(0, 2, 3, 1, 4).flatten(1, 2)

        return run

    def by_key(q, k, G):
        columns = [
            ((q[..., j:, :] * (G[..., j:, :] - G[..., j : j + 1, :]).exp()) @ k[..., j, :, None])[..., 0]
            for j in range(64)
        ]
        return torch.stack([pad(column, (j, 0)) for j, column in enumerate(columns)], -1)

    def textbook(q, k, G):
        return ((q * G.exp()) @ (k * (-G).exp()).mT).tril()

    def both(f):
        x = [a.requires_grad_() for a in inputs]
        return lambda: torch.autograd.grad(f(*x), x, dout)

    torch.manual_seed(0)
    q, k, v, g, dout = (torch.randn(1, 4096, 4, d) for d in (96, 96, 192, 96, 192))
    inputs = q, k, v, logsigmoid(g + 3)
    functions = {
        "torch gla": lambda *x: gla(*x)[0],
        "torch recurrence": recurrence,
        "torch chunks": in_chunks(by_key),
        "torch textbook": in_chunks(textbook),
    }
    seconds = _interleaved({name: both(f) for name, f in functions.items()}, rounds, log)
    name, ours = "torch gla, T = 4,096, 4 heads of 96/192", seconds["torch gla"]
    others = {
        "torch recurrence": ("a loop over tokens", "<= 0.20"),
        "torch chunks": ("chunks of 64, a key at a time", "<= 1"),
        "torch textbook": ("chunks of 64, e^G e^-G", "-"),
    }
    return [Row(name, ours / seconds[x], "x", aim, ours, what, seconds[x]) for x, (what, aim) in others.items()]


def torch_decode_rows(rounds, log):
    """A decode step in place against reading and writing the states once: a copy."""
    import torch

    from ringtide.torch import gla_decode_step_

    def steps(rows, copy):
        q, k, v, g = (torch.randn(rows, 4, d) for d in (96, 96, 192, 96))
        state, other, closed = torch.zeros(rows, 4, 96, 192), torch.zeros(rows, 4, 96, 192), -g.abs()
        once = (lambda: other.copy_(state)) if copy else lambda: gla_decode_step_(q, k, v, closed, state)
        return lambda: [once() for _ in range(counts[rows])]

    counts = {1: 256, 32: 8, 1280: 1}  # one step of few rows is too short to time
    torch.manual_seed(0)
    kinds = {"decode": False, "copy": True}
    functions = {f"torch {kind} {n}": steps(n, copy) for n in counts for kind, copy in kinds.items()}
    seconds = _interleaved(functions, rounds, log)
    rows = []
    for n, count in counts.items():
        ours, copy = (seconds[f"torch {kind} {n}"] / count for kind in kinds)
        name = f"torch gla_decode_step_, {n:,} sequences of 4 heads of 96/192"
        rows.append(Row(name, ours / copy, "x", "-", ours, "a copy of the states", copy))
    return rows


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
