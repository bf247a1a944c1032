"""`ringtide doctor` says what is true, from any folder."""

import json
import subprocess
import sys

import jax
from click.testing import CliRunner

from ringtide.cli import main


def test_text_and_json_agree():
    text = CliRunner().invoke(main, ["doctor"])
    assert text.exit_code == 0
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    assert report["libraries"]["jax"] == jax.__version__
    assert report["backends"]["xla"]["runs"]
    assert {"attention", "gla"} <= set(report["backends"]["xla"]["ops"])
    assert len(report["devices"]) == len(jax.devices())
    for name, backend in report["backends"].items():
        assert name in text.output
        assert backend["runs"] or name == "eager" or "not in this release" in backend["why"]


def test_the_backend_of_pytorch_runs_where_pytorch_is():
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    eager, there = report["backends"]["eager"], report["libraries"]["torch"] is not None
    assert (eager["runs"], eager["ops"]) == (there, ["gla"] if there else [])
    assert there or "PyTorch does not start" in eager["why"]


def test_with_the_core_dependencies_only_and_from_any_folder(tmp_path):
    """No extra is imported: with every one of them made to fail, it still works."""
    extras = ["optax", "orbax", "safetensors", "tokenizers", "rich", "matplotlib", "torch", "threadpoolctl"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extras})); from ringtide.cli import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "xla       yes: attention, gla" in done.stdout


def test_a_broken_jax_is_told_not_thrown():
    code = "import sys; sys.modules['jax'] = None; from ringtide.cli import main; main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert "jax does not start" in report["error"]
    assert not report["backends"]["xla"]["runs"]
