"""The tree as a package: every folder listed, lazy imports, one-way imports."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {folder: name for name, folder in MAP["package-dir"].items()}

# What a top folder may import of the others (itself is understood).
MAY_IMPORT = {
    "reference": (),
    "kernels": (),
    "bindings": ("kernels", "reference"),
    "models": ("bindings", "kernels", "reference"),
    "bench": ("bindings", "kernels", "reference", "models"),
    "recipes": (),
    "cli": ("bindings", "kernels", "reference", "models", "bench", "recipes"),
}


def modules():
    for top in FOLDERS:
        yield from (ROOT / top).rglob("*.py")


def test_every_folder_is_a_listed_package():
    found = set()
    for path in modules():
        top, *rest = path.parent.relative_to(ROOT).parts
        found.add(".".join([FOLDERS[top], *rest]))
    assert found == set(MAP["packages"])


def top_of(module):
    """The top folder that a module name of ringtide lives in."""
    parts = module.split(".")
    for folder, name in FOLDERS.items():
        if folder != "bindings" and parts[: name.count(".") + 1] == name.split("."):
            return folder
    return "bindings"


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_one_way():
    for path in modules():
        folder = path.relative_to(ROOT).parts[0]
        for name in imports(path):
            if name.split(".")[0] == "ringtide":
                target = top_of(name)
                assert target == folder or target in MAY_IMPORT[folder], f"{path} imports {name}"


def test_no_reach_across_backends():
    for path in (ROOT / "kernels").rglob("*.py"):
        parts = path.relative_to(ROOT / "kernels").parts
        for name in imports(path):
            if len(parts) > 1 and name.startswith("ringtide.kernels."):
                assert name.split(".")[2] in (parts[0], "masks", "layouts"), f"{path} imports {name}"


def test_the_reference_imports_only_numpy():
    for path in (ROOT / "reference").glob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= {"numpy"}


def test_import_ringtide_imports_no_framework():
    code = "import ringtide, ringtide.cli, sys; print([m for m in ('jax', 'torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unknown_names_say_what_there_is():
    import ringtide

    with pytest.raises(AttributeError, match="attention"):
        ringtide.atention  # noqa: B018
    assert "gla" in dir(ringtide)


def test_kernels_by_their_folder_name_are_refused():
    code = "import kernels"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "pip install" in run.stderr
