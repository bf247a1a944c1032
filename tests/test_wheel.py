"""A wheel in an environment of its own, with the core dependencies alone, works from any folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_wheel(tmp_path):
    def run(*command):
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout

    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    run(sys.executable, "-m", "venv", str(tmp_path / "env"))
    (wheel,) = tmp_path.glob("ringtide-*.whl")
    run(str(tmp_path / "env/bin/pip"), "install", "--quiet", str(wheel))
    ringtide = str(tmp_path / "env/bin/ringtide")
    assert "xla" in run(ringtide, "doctor")
    for op in ("attention", "gla"):
        report = json.loads(run(ringtide, "fuzz", op, "--cases", "10", "--json").splitlines()[-1])
        assert (report["op"], report["cases"], report["failures"]) == (op, 10, 0)
