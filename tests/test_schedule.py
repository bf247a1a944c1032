"""The reader of TPU schedules, on a stored dump of data/nested_kernel.py (tpu7x, libtpu 0.0.42), and its prices."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ringtide.bench import compile, peers, splash, table
from ringtide.bench.case import Case, row
from ringtide.bench.chips import CHIPS
from ringtide.bench.schedule import Kernel, Region, read
from ringtide.cli import main

DATA = Path(__file__).parent / "data"
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")


@pytest.fixture
def nested():
    return read(DATA / "schedule", "nested.*", "tpu7x")


def test_peaks_are_the_published_ones():
    peaks = {name: chip.peak / 1e12 for name, chip in CHIPS.items()}
    assert peaks == pytest.approx({"v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 1153.5}, rel=3e-3)


def test_every_cycle_is_in_one_region(nested):
    table = next((DATA / "schedule").glob("*pre-delay*")).read_text().split("UTILIZATION:\n")[1]
    assert nested.root.total == len(table.splitlines())
    busy = sum(int(row.split()[0]) for row in table.splitlines()) / CHIPS["tpu7x"].units
    assert sum(region.mxu for region in nested.root.walk()) == busy


def test_the_loops_are_those_of_the_kernel(nested):
    costs = splash.nested_costs(nested)
    ideal = 2 * 2 * 128**3 / CHIPS["tpu7x"].flops_a_cycle  # two products a chunk, two chunks a block
    assert costs["mxu"] == {"stream": 4 * ideal, "chunk": 2 * ideal, "mixed": 2 * ideal}  # 128 fill half of 256
    assert costs["stream"] > costs["chunk"] > costs["mxu"]["chunk"]
    assert costs["mixed"] > costs["chunk"]
    parts = [costs[name] for name in ("row", "step", "link", "stream", "chunk", "mixed")]
    assert sum(parts) + nested.root.cycles == nested.root.total
    assert "loop" in nested.tree()
    idle = Kernel("idle", Region("kernel", 0, 1), 0, 0, False)
    with pytest.raises(ValueError, match="idle: no loop multiplies"):
        splash.nested_costs(idle)
    with pytest.raises(ValueError, match="idle: no branch multiplies"):
        peers.grid_costs(idle)


def test_a_call_is_counts_times_costs():
    costs = {"row": 100, "step": 10, "link": 1, "stream": 1000, "chunk": None, "mixed": 500}
    counts = {"rows": 2, "steps": 3, "stream": 4, "chunk": 0, "mixed": 5, "skipped": 6}
    assert splash.cycles(costs, counts) == 200 + 30 + 11 + 4000 + 2500


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no schedule of a kernel named 'other'"):
        read(DATA / "schedule", "other", "tpu7x")
    shutil.copytree(DATA / "schedule", tmp_path, dirs_exist_ok=True)
    final = next(tmp_path.glob("*-final_hlo*"))
    final.write_text("\n".join(final.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match="bundles, but use of"):
        read(tmp_path, "nested.*", "tpu7x")
    final.write_text("A, B\n1 2\n")
    with pytest.raises(ValueError, match="not a table of use"):
        read(tmp_path, "nested.*", "tpu7x")


@pytest.mark.parametrize("mask", ["full", "causal", "local:96", "local:1000", "packed:4"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_tiles_and_pairs(mask, pass_):
    case = Case("v5p", pass_, seq=512, mask=mask)
    q = np.arange(512)
    seen = np.broadcast_to(case.visible(q[:, None], q), (512, 512))
    tiles = seen.reshape(8, 64, 4, 128).transpose(0, 2, 1, 3).reshape(8, 4, -1)
    some, every = tiles.any(-1), tiles.all(-1)
    widest = some.sum(1 if pass_ == "forward" else 0).max()
    assert case.tiles(64, 128) == (every.sum(), (some & ~every).sum(), widest)
    assert case.pairs == pytest.approx(seen.sum(), rel=0.01)


@pytest.mark.parametrize("mask", ["full", "causal", "local:96", "local:300", "packed:4"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_visits_are_what_a_walk_counts(mask, pass_):
    case, span, keys, chunk = Case("v5p", pass_, seq=1024, mask=mask), 128, 256, 64
    at = np.arange(1024)
    seen = np.broadcast_to(case.visible(at[:, None], at), (1024, 1024))
    counts = dict.fromkeys(("rows", "steps", "stream", "chunk", "mixed", "skipped"), 0)
    blocks_q, blocks_k = ([range(i, i + n) for i in range(0, 1024, n)] for n in (span, keys))
    for outer in blocks_q if pass_ == "forward" else blocks_k:
        pairs = [(outer, k) for k in blocks_k[::-1]] if pass_ == "forward" else [(q, outer) for q in blocks_q]
        tiles = [seen[np.ix_(q, k)] for q, k in pairs if seen[np.ix_(q, k)].any()]  # of an interval: without gaps
        counts["rows"] += 1
        counts["steps"] += len(tiles)
        ready = np.full(span, pass_ == "backward")
        for tile in tiles:
            if tile.all() and ready.all():
                counts["stream"] += 1
                continue
            for c in range(keys - chunk, -1, -chunk):
                part = tile[:, c : c + chunk]
                kind = "skipped" if not part.any() else "chunk" if part.all() and ready.all() else "mixed"
                counts[kind] += 1
                ready = ready | part.any(axis=1)
    assert splash.visits(case, span, keys, chunk) == counts


def test_a_row_is_the_larger_of_schedule_and_memory():
    case = Case("v5p", "backward", seq=1024)
    kernel = Kernel("", Region("kernel", 0, 1), vmem_bytes=1, smem_bytes=2, split=True)
    tile = {"pairs": 1024 * 512, "cycles": 6000, "masked": 7000, "mxu": 5400, "spills": 3}
    call = {"cycles": 3.5e6, "cores": 2, "bytes": 1e6}
    priced = row(case, "ringtide", kernel, tile, call, {"compile_s": 1.0}, {"blocks": [1024, 512, 256]})
    assert priced["tile_share"] == pytest.approx(10 * 128 * 1024 * 512 / 131072 / 6000)
    assert priced["mxu_busy"] == 0.9
    assert priced["predicted_ms"] == pytest.approx(1.03)  # 1.75e6 cycles of each core at 1.75 GHz, calibrated
    assert priced["call_share"] == pytest.approx(32 * 10 * 128 * 1024**2 / 2 / (3.5e6 * 131072))
    assert priced["predicted_tflops"] * priced["predicted_ms"] == pytest.approx(case.flops / 1e9)
    assert priced["bound"] == "schedule"
    priced = row(case, "ringtide", kernel, tile, {**call, "bytes": 2.77e12}, {"compile_s": 1.0}, {})
    assert (priced["bound"], priced["predicted_ms"]) == ("memory", 1000)
    issue = "op chip impl pass head_dim seq mask tile_cycles masked_tile_cycles tile_share mxu_busy spills vmem_bytes"
    assert {
        *issue.split(),
        "smem_bytes",
        "compile_s",
        "predicted_ms",
        "predicted_tflops",
        "call_share",
    } <= priced.keys()


def test_a_peer_has_bodies_ends_of_rows_and_steps():
    start = Region("branch", 1, 2, cycles=100, stores=64)
    full = Region("branch", 2, 3, cycles=1000, mxu=900.0, spills=5)
    masked = Region("branch", 3, 4, cycles=1200, mxu=900.0, selects=64)
    grid = Region("loop", 0, 5, cycles=30, within=[start, full, masked])
    costs = peers.grid_costs(Kernel("", Region("kernel", 0, 6, cycles=7, within=[grid]), 0, 0, False))
    assert costs == {"full": 1000, "masked": 1200, "mxu": 900.0, "spills": 5, "row": 100, "step": 30}


def test_what_a_peer_cannot_do_is_one_line():
    for case, said in (
        (Case("v5p", "forward", head_dim=512), "v5p jax forward, head_dim 512, causal over 32,768: no configuration"),
        (Case("v5p", "forward", mask="packed:8"), "documents are priced for ringtide only"),
    ):
        ((priced, error),) = table.prices([case], ["jax"])
        assert priced is None
        assert said in error
    blocks, options = peers.best(Case("tpu7x", "forward", head_dim=96, seq=1024), "tokamax")
    assert blocks == (1024, 1024, 512)
    assert options


@needs_libtpu
def test_compiled_and_read(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(DATA))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with compile.dumped("v5p", "nested_kernel:call", {"length": 65536}) as (facts, folder):
        kernel = read(folder, "nested.*", "v5p")
    assert facts["compile_s"] > 0
    assert facts["length"] == 65536
    assert None not in splash.nested_costs(kernel).values()
    assert kernel.vmem_bytes > 4 * 256 * 128 * 2
    assert not list(tmp_path.iterdir())
    with (
        pytest.raises(compile.CompileError, match="unexpected keyword"),
        compile.dumped("v5p", "nested_kernel:call", {"x": 1}),
    ):
        pass
    assert not list(tmp_path.iterdir())


@needs_libtpu
def test_the_kernel_of_this_tree_is_priced():
    ((priced, error),) = table.prices([Case("v5p", "forward", seq=8192)], ["ringtide"])
    assert not error
    assert priced["tile_share"] > 0.95
    assert 0.7 < priced["call_share"] < priced["tile_share"] < priced["mxu_busy"] + 1e-3


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("head_dims=64", "expected head_dim="),
        ("seq=many", "expected a whole number from 1 to 2^24, as in seq=128"),
        ("mask=local", "mask=causal|full|local:N|packed:N"),
        ("heads=6", "heads=6 is not a multiple of kv_heads=8"),
        ("mask=packed:3", "3 does not divide seq=32768"),
    ],
)
def test_a_wrong_shape_is_one_line(shape, said):
    result = CliRunner().invoke(main, ["bench", "schedule", "--shape", shape])
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path):
    for name in ("no/folder.png", "figure.doc"):
        result = CliRunner().invoke(main, ["bench", "schedule", "--plot", str(tmp_path / name)])
        assert result.exit_code == 2
        assert "expected a .png, .svg or .pdf in a folder that exists" in result.stderr


@pytest.mark.parametrize("argv", [["schedule"], ["tune", "splash"]])
def test_no_compiler_is_one_line(monkeypatch, argv):
    monkeypatch.setattr("ringtide.cli.bench.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["bench", *argv])
    assert result.exit_code == 1
    assert result.stderr == "Error: libtpu, the TPU compiler, is not installed: pip install 'ringtide[tpu]'\n"


def test_no_new_python_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"needs Python 3\.12 or newer"):
        peers.python(tmp_path / "none")


def test_the_environment_of_the_peers_is_made_once(monkeypatch, tmp_path):
    ran, broken = [], []

    def run(command, **options):
        if "-c" not in command:
            ran.append(command)
            (tmp_path / "peers/bin").mkdir(parents=True, exist_ok=True)
            (tmp_path / "peers/bin/python").touch()
        said = "WARNING: slow\nERROR: no tokamax\nWARNING: old pip\n" if "pip" in command and broken else ""
        return subprocess.CompletedProcess(command, len(said), "3 13\n", said)

    monkeypatch.setattr(subprocess, "run", run)
    broken.append(True)
    with pytest.raises(RuntimeError, match="ERROR: no tokamax"):
        peers.python(tmp_path / "peers")
    broken.clear()
    ran.clear()
    python = peers.python(tmp_path / "peers")
    assert python == str(tmp_path / "peers/bin/python")
    assert [command[1:3] for command in ran] == [["-m", "venv"], ["-m", "pip"]]
    assert peers.python(tmp_path / "peers") == python
    assert len(ran) == 2


def made_up(cases, impls, configs=(None,), python=None, log=None):
    for i, (case, impl) in enumerate((case, impl) for case in cases for impl in impls for _ in configs):
        kernel = Kernel("", Region("kernel", 0, 1), 2**20, 2**10, False)
        tile = {"pairs": 2**20, "cycles": 4096 * case.head_dim // 128 + 100 * i, "masked": None, "mxu": 1, "spills": 0}
        call = {"cycles": case.flops / 3e5, "cores": 1, "bytes": 0}
        yield row(case, impl, kernel, tile, call, {"compile_s": 2.0}, {"blocks": [1024, 1024, 512]}), None
    yield None, "v5p ringtide: too large"


def test_table_json_and_plot(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "prices", made_up)
    monkeypatch.setattr("ringtide.cli.bench._interpreter", lambda peers: "python")
    result = CliRunner().invoke(main, ["bench", "schedule", "--chip", "v5p", "--chip", "v6e"])
    assert result.exit_code == 1
    assert "1 of 7 rows could not be priced" in result.stderr
    assert "predicted" in result.stdout
    assert "v5p x 1.03, v6e x 1.05" in result.stdout
    assert len(result.stdout.splitlines()) == 2 + 6
    figure = tmp_path / "figure.png"
    result = CliRunner().invoke(main, ["bench", "schedule", "--peers", "--json", "--plot", str(figure)])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 3 * 3 * 2 * 3
    assert {row["impl"] for row in rows} == {"ringtide", "jax", "tokamax"}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_tune_ranks(monkeypatch):
    monkeypatch.setattr(table, "prices", made_up)
    monkeypatch.setattr("ringtide.cli.bench._interpreter", lambda peers: "python")
    result = CliRunner().invoke(main, ["bench", "tune", "splash", "--shape", "pass=forward", "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len(table.candidates(Case("tpu7x", "forward"), "ringtide")) > 5
    assert [row["call_share"] for row in rows] == sorted((row["call_share"] for row in rows), reverse=True)
