"""Every Python block of the README and of the docs runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    exec(compile(block, "README", "exec"), {"__name__": "readme"})


def test_no_figure_is_left_open():
    assert "NUMBERS" not in (ROOT / "README.md").read_text()
