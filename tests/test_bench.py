"""The bench on made-up times (what it measures is for `ringtide bench cpu`), and errors in bfloat16."""

import json

import pytest
from click.testing import CliRunner

from ringtide.bench import cpu, error
from ringtide.cli import main

SECONDS = {
    "matmul": 1.0,  # 8 products of side 2,048: 137.4 GFLOP/s
    "causal 4K": 1.0,
    "naive 4K": 10.0,
    "causal 16K": 1.0,  # 7 matmuls of 2 * 64 * 16,384^2 / 2 FLOP: 120.3 GFLOP/s
    "window 16K": 0.1,
    "naive 16K": 20.0,
    "gla": 1.0,
    "gla recurrence": 4.0,
    "torch gla": 1.0,
    "torch recurrence": 8.0,
    "torch chunks": 5.0,
    "torch textbook": 2.0,
    **{f"torch decode {rows}": 3.0 for rows in (1, 32, 1280)},
    **{f"torch copy {rows}": 2.0 for rows in (1, 32, 1280)},
}


def test_rows(monkeypatch):
    def made_up(functions, rounds, log):
        assert rounds == 2
        return {name: SECONDS[name] for name in functions}

    pytest.importorskip("torch")
    monkeypatch.setattr(cpu, "_interleaved", made_up)
    monkeypatch.setattr(cpu, "memory_row", lambda log: cpu.Row("peak RSS", 0.5, "GB", "< 0.80"))
    result = CliRunner().invoke(main, ["bench", "cpu", "--rounds", "2", "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [round(row["value"], 3) for row in rows] == [
        0.1,
        0.05,
        0.005,
        0.875,
        0.25,
        0.125,
        0.2,
        0.5,
        1.5,
        1.5,
        1.5,
        0.5,
    ]
    assert all(row["measured"] and row["rounds"] == 2 for row in rows)
    text = CliRunner().invoke(main, ["bench", "cpu", "--rounds", "2"]).stdout
    assert "measured on this machine" in text
    assert "0.875 share (aim >= 0.40)" in text


def test_peak_memory_is_of_this_process():
    assert 5e7 < cpu._peak_bytes() < 2e10


@pytest.mark.parametrize("case", ["sharp", "growing"])
def test_splash_is_as_exact_in_bfloat16_as_the_plain_formula(case, monkeypatch):
    monkeypatch.setattr(error, "SEEDS", range(2))
    ours, plain = (error.errors(case, impl) for impl in ("ringtide", "plain"))
    for output in error.OUTPUTS:
        assert ours[output][1] < 1.1 * plain[output][1]  # root mean squares
