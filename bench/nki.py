"""What the NKI kernels cost a unit on a Trainium2 core, estimated by the simulator: no device, nothing measured.

A unit is a (chunk of 128 tokens, head), or for decode a (sequence, head). Each row is the steady state: one turn of the
kernel's loop over a long sequence or a large batch, the barrier at its end included. (backward has two loops, one over
the chunks for their states and one back: a turn of each.)
All times are of one core, the documented costs of instructions put together in four ways: see
kernels/nki/simulator/schedule.py, and docs/simulator.md for how far to trust them.
"""

from dataclasses import dataclass

import numpy as np

# kernel -> the most of d_k and d_v that it takes, and of heads that share a turn of its loop
KERNELS = {
    "forward": (128, 512, 8),
    "forward-fast": (128, 512, 8),
    "backward": (128, 256, 8),
    "decode": (128, 512, 128),
}
C = 128  # tokens a chunk


@dataclass(frozen=True)
class Case:
    kernel: str
    d_k: int = 128
    d_v: int = 128
    heads: int = 4
    dtype: str = "bfloat16"  # of q, k, v, o; states and gates are float32


TABLE = [
    *(Case("forward", *shape) for shape in ((64, 64), (80, 160), (96, 192), (128, 128), (128, 256))),
    Case("forward", dtype="float32"),
    *(Case("forward-fast", *shape) for shape in ((96, 192), (128, 128))),
    *(Case("backward", *shape) for shape in ((96, 192), (128, 128))),
    *(Case("decode", 96, 192, 16, dtype) for dtype in ("bfloat16", "float32")),
    Case("decode", heads=16),
]


def parse(texts) -> list[Case]:
    """Cases from "kernel=forward,d_k=96,d_v=192,heads=4,dtype=float32": what differs from `Case`. Raises ValueError."""
    cases = []
    for text in texts:
        fields = {"kernel": "forward"}
        for part in filter(None, text.split(",")):
            key, _, x = part.partition("=")
            if key in ("d_k", "d_v", "heads") and x.isdecimal():
                fields[key] = int(x)
            elif (key == "kernel" and x in KERNELS) or (key == "dtype" and x in ("bfloat16", "float16", "float32")):
                fields[key] = x
            else:
                raise ValueError(
                    f"--shape {part!r}: expected kernel={'|'.join(KERNELS)}, d_k=, d_v= or heads= with a number, "
                    "dtype=bfloat16|float16|float32"
                )
        cases.append(case := Case(**fields))
        for key, most in zip(("d_k", "d_v", "heads"), KERNELS[case.kernel], strict=True):
            if not 1 <= getattr(case, key) <= most:
                raise ValueError(f"--shape {text!r}: {case.kernel} takes {key} from 1 to {most}")
    return cases


def row(case) -> tuple:
    """(the figures of a case, the Run that they are from)."""
    from ringtide.kernels.nki.simulator import schedule

    run, units = _RUNS[case.kernel](case)
    found, held = schedule.of_turn(run, units), run.capacity[0]
    return {
        "kernel": case.kernel,
        "d_k": case.d_k,
        "d_v": case.d_v,
        "heads": case.heads,
        "dtype": case.dtype,
        **{name: round(found[name], 4) for name in ("t_max_us", "t_sum_us", "t_sched_us", "t_list_us", "hbm_floor_us")},
        "critical": found["critical"],
        "engines": {engine: round(us, 4) for engine, us in found["engines"].items()},
        "instructions": round(found["instructions"], 2),
        "sbuf_bytes": held.sbuf_bytes,
        "psum_banks": held.psum_banks,
        "kind": "estimate",
    }, run


def _forward(case, fast=False):
    from ringtide.kernels.nki import gla

    chunks = _chunks(gla, case)
    q, k, v, g, h0, _ = _inputs(case, 2 * chunks * C)
    run = _run(gla.gla_forward, q, k, v, g, h0, case.d_k**-0.5, fast)
    return run, chunks * case.heads


def _backward(case):
    from ringtide.kernels.nki import gla_bwd

    chunks = _chunks(gla_bwd, case)
    q, k, v, g, h0, do = _inputs(case, 2 * chunks * C)
    run = _run(gla_bwd.gla_backward, q, k, v, g, h0, do, h0, case.d_k**-0.5)
    return run, chunks * case.heads


def _decode(case):
    from ringtide.kernels.nki import gla_decode

    turn = gla_decode.ROWS // case.heads  # sequences
    q, k, v, g, _, _ = (x[0] for x in _inputs(case, 2 * turn))
    pool = np.zeros((2 * turn + gla_decode.SPARE, case.d_k, case.heads, case.d_v), np.float32)
    slots = np.repeat(np.arange(2 * turn, dtype=np.int32)[:, None], 2, axis=1)
    run = _run(gla_decode.gla_decode, q, k, v, g, pool, slots, case.d_k**-0.5)
    return run, turn * case.heads


_RUNS = {  # kernel -> (a run of two turns of its loop, units of a turn)
    "forward": _forward,
    "forward-fast": lambda case: _forward(case, fast=True),
    "backward": _backward,
    "decode": _decode,
}


def _run(kernel, *arrays):
    from ringtide.kernels.nki.simulator import launch

    call = launch.simulate(kernel)
    call(*arrays)
    return call.last


def _chunks(kernel, case):
    """Chunks of a turn of a kernel's loop over the sequence."""
    return 2 * -(-kernel.TURN // (2 * case.heads))


def _inputs(case, tokens):
    """q, k, v, g, initial state, do."""
    from ringtide.kernels.nki.simulator import dtypes

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    q, k, g = (draw(1, tokens, case.heads, case.d_k) for _ in range(3))
    v, do = (draw(1, tokens, case.heads, case.d_v) for _ in range(2))
    q, k, v, do = (dtypes.narrow(x, case.dtype) for x in (q, k, v, do))
    return q, k, v, -np.abs(g) / 16, draw(1, case.heads, case.d_k, case.d_v), do


HEADING = (
    "estimated, us a (chunk of 128, head) or (sequence, head) of one core; T_max: the busiest engine, T_sum: no "
    "overlap, T_sched: as recorded, T_list: reordered\n"
    "kernel        d_k d_v heads dtype     |  T_max  T_sum T_sched T_list  floor"
    " | critical     PE    ACT    DVE   POOL    DMA | SBUF KiB banks"
)


def line(row) -> str:
    """A row of the table."""
    engines = " ".join(f"{row['engines'][engine]:6.2f}" for engine in ("PE", "ACT", "DVE", "POOL", "DMA"))
    return (
        f"{row['kernel']:<13} {row['d_k']:>3} {row['d_v']:>3} {row['heads']:>5} {row['dtype']:<9}"
        f" | {row['t_max_us']:6.2f} {row['t_sum_us']:6.2f} {row['t_sched_us']:7.2f} {row['t_list_us']:6.2f}"
        f" {row['hbm_floor_us']:6.2f} | {row['critical']:<8} {engines} | {row['sbuf_bytes'] / 1024:8.1f}"
        f" {row['psum_banks']:>5}"
    )
