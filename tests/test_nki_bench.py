"""`ringtide bench nki`: on a small kernel, and the forward kernel against the times that it was designed for."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from ringtide.bench import nki as bench
from ringtide.cli import main
from ringtide.kernels.nki.simulator import isa as nisa
from ringtide.kernels.nki.simulator import language as nl
from ringtide.kernels.nki.simulator.launch import simulate

KEYS = {"kernel", "d_k", "d_v", "heads", "t_max_us", "t_sum_us", "t_sched_us", "t_list_us", "hbm_floor_us", "critical"}


def doubled(x):
    """2 x, eight rows of 128 a turn."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)

    def turn(i):
        for unit in range(8):
            tile = nl.ndarray((128, x.shape[3]), x.dtype)
            here = [[x.shape[3], 128], [1, x.shape[3]]]
            at = unit * 128 * x.shape[3]
            nisa.dma_copy(tile, x.ap(here, offset=at, scalar_offset=i, indirect_dim=0))
            nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
            nisa.dma_copy(out.ap(here, offset=at, scalar_offset=i, indirect_dim=0), tile)

    nl.fori_loop(0, x.shape[0], turn)
    return out


@pytest.fixture
def small(monkeypatch):
    def run(case):
        call = simulate(doubled)
        call(np.ones((2, 8, 128, case.d_v), np.float32))
        return call.last, 8

    monkeypatch.setattr(bench, "_RUNS", dict.fromkeys(bench.KERNELS, run))


def invoke(*args):
    return CliRunner().invoke(main, ["bench", "nki", *args])


def test_rows_are_of_a_unit(small):
    result = invoke("--json", "--shape", "kernel=forward,d_v=512,heads=2", "--shape", "d_v=64")
    assert result.exit_code == 0, result.output
    wide, narrow = map(json.loads, result.stdout.splitlines())
    assert set(wide) >= KEYS
    assert (wide["kernel"], wide["d_k"], wide["d_v"], wide["heads"]) == ("forward", 128, 512, 2)
    assert wide["kind"] == "estimate"
    assert wide["critical"] == "DMA"
    nbytes = 2 * 128 * 512 * 4
    assert wide["hbm_floor_us"] == pytest.approx(nbytes / 362e3, abs=1e-4)
    assert wide["t_max_us"] == pytest.approx(nbytes / 368e3, abs=1e-4)
    assert wide["t_sum_us"] == pytest.approx(512 / 960, abs=1e-4)  # DVE, cycles of one a partition
    assert wide["engines"]["DVE"] == wide["t_sum_us"]
    assert wide["instructions"] == 3
    assert narrow["t_max_us"] == pytest.approx(nbytes / 8 / 368e3 * 8, abs=1e-4)  # rows of 256 bytes, an eighth as fast
    assert narrow["kernel"] == "forward"


def test_the_table_and_its_heading(small):
    text = invoke().stdout.splitlines()
    assert "estimated" in text[0]
    assert len(text) == 2 + len(bench.TABLE)
    assert {case.kernel for case in bench.TABLE} == set(bench.KERNELS)
    widths = {line.index("|") for line in text[1:]}
    assert len(widths) == 1


def test_trace_of_the_first_row(small, tmp_path):
    file = tmp_path / "trace.json"
    assert invoke("--shape", "d_k=8", "--trace", str(file)).exit_code == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {"DMA", "DVE"}
    assert len(events) == 2 * 8 * 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "kernel=sideways"], "kernel=forward|forward-fast|backward|decode"),
        (["--shape", "d_k=many"], "d_k=, d_v= or heads= with a number"),
        (["--shape", "d_k=200"], "forward takes d_k from 1 to 128"),
        (["--shape", "kernel=backward,d_v=512"], "backward takes d_v from 1 to 256"),
        (["--shape", "heads=9"], "forward takes heads from 1 to 8"),  # 9 are two groups with a loop each
        (["--shape", "kernel=decode,heads=0"], "decode takes heads from 1 to 128"),
        (["--shape", "dtype=float64"], "dtype=bfloat16|float16|float32"),
        (["--trace", "/nowhere/at/all.json"], "its folder does not exist"),
    ],
)
def test_refused(args, message):
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


slow = pytest.mark.slow
TARGETS = [  # case, T_max, T_sched, T_list: us a unit that the kernels were designed for
    pytest.param(bench.Case("forward"), 2.3, 3.2, 2.6, id="forward"),
    pytest.param(bench.Case("forward", 96, 192), 2.6, 3.6, 2.7, id="forward-96-192", marks=slow),
    pytest.param(bench.Case("forward-fast"), 1.5, 2.4, 2.4, id="fast", marks=slow),
    pytest.param(bench.Case("backward"), 9.0, 11.0, 11.0, id="backward", marks=slow),
    pytest.param(bench.Case("decode", 96, 192, 16, "float32"), 0.65, 0.65, 0.65, id="decode"),  # 1.6 x its floor, 0.41
]


@pytest.mark.parametrize(("case", "t_max", "t_sched", "t_list"), TARGETS)
def test_as_fast_as_designed(case, t_max, t_sched, t_list):
    row, _ = bench.row(case)
    assert row["t_max_us"] <= t_max
    assert row["t_sched_us"] <= t_sched
    assert row["t_list_us"] <= t_list
    if case.kernel == "decode":
        assert row["t_sched_us"] <= 1.6 * row["hbm_floor_us"]
