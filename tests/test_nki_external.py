"""Public kernels, unmodified, on the simulator, against their own references.

Nothing of them is kept here: `make test-external DIR=folder` names a folder with checkouts of aws-neuron-sdk,
nki-samples and nki-library (those that are there are tested).
"""

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ringtide import nki
from ringtide.kernels.nki.simulator import errors

DIR = os.environ.get("NKI_EXTERNAL")
BF16 = ml_dtypes.bfloat16
EXAMPLES = "aws-neuron-sdk/nki/examples"
SAMPLES = "nki-samples/src/nki_samples"
LIBRARY = "nki-library/src"

pytestmark = pytest.mark.skipif(DIR is None, reason="make test-external DIR=a folder with checkouts of public kernels")


@pytest.fixture(scope="module")
def public():
    """get("path.py", "name") of a checkout; its modules find each other and the simulator."""
    before, path = set(sys.modules), list(sys.path)
    with nki.external():
        yield _get
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(Path(DIR).resolve())):
            del sys.modules[name]


def _get(file, name):
    whole = Path(DIR).resolve() / file
    if not (Path(DIR) / file.split("/")[0]).exists():
        pytest.skip(f"{file.split('/')[0]} is not in {DIR}")
    if file.startswith(LIBRARY):
        root = str(Path(DIR).resolve() / LIBRARY)
        if root not in sys.path:
            sys.path.insert(0, root)
        return getattr(importlib.import_module(file[len(LIBRARY) + 1 : -3].replace("/", ".")), name)
    spec = importlib.util.spec_from_file_location(whole.stem.replace("-", "_"), whole)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _function(file, *names):
    """Functions of a file that cannot be imported (it asks for a device), by their source alone."""
    whole = Path(DIR) / file
    if not whole.exists():
        pytest.skip(f"{file} is not in {DIR}")
    tree = ast.parse(whole.read_text())
    tree.body = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name in names]
    scope = {"np": np, "torch": sys.modules.get("torch")}
    exec(compile(tree, str(whole), "exec"), scope)
    return scope[names[0]]


def _normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_versions(record_property):
    """Which commits are tested, for the record."""
    for name in ("aws-neuron-sdk", "nki-samples", "nki-library"):
        folder = Path(DIR) / name
        if (folder / ".git").exists():
            found = subprocess.run(
                ["git", "-C", folder, "log", "-1", "--format=%H %cs"], capture_output=True, text=True
            )
            record_property(name, found.stdout.strip())
    assert any((Path(DIR) / x).exists() for x in ("aws-neuron-sdk", "nki-samples", "nki-library"))


# --- aws-neuron-sdk: the documentation's examples -------------------------------------------------------------------


def test_tensor_addition(public):
    kernel = public(f"{EXAMPLES}/tensor_addition/tensor_addition_nki_kernels.py", "nki_tensor_add")
    a, b = _normal(256, 1024, dtype=BF16), _normal(256, 1024, dtype=BF16, seed=1)
    assert (nki.simulate(kernel)(a, b) == a + b).all()


def test_transpose2d(public):
    kernel = public(f"{EXAMPLES}/transpose2d/transpose2d_nki_kernels.py", "tensor_transpose2D_kernel_")
    a = np.arange(5 * 3 * 4, dtype=np.int8).reshape(5, 12)
    assert (kernel(a, (3, 4)) == a.reshape(5, 3, 4).swapaxes(1, 2).reshape(5, 12)).all()


def test_average_pool2d(public):
    file = f"{EXAMPLES}/average_pool2d/average_pool2d_nki_kernels.py"
    kernel, reference = public(file, "tensor_avgpool_kernel"), public(file, "np_average_pool_2D")
    x = np.arange(2 * 6 * 6, dtype=np.float16).reshape(2, 6, 6)
    assert (kernel(x, 2) == reference(x, 2)).all()


@pytest.mark.parametrize(
    ("name", "m", "k", "n"),
    [
        ("basic", 64, 128, 512),
        ("tiled", 256, 256, 1024),
        ("hoist_load", 256, 256, 1024),
        ("block_free_dimension", 512, 256, 2048),
        ("fully_optimized", 2048, 1024, 1024),
    ],
)
def test_matrix_multiplication(public, name, m, k, n):
    file = f"{EXAMPLES}/matrix_multiplication/matrix_multiplication_nki_kernels.py"
    kernel = public(file, f"nki_matmul_{name}_")
    lhs, rhs = _normal(m, k, dtype=BF16), _normal(k, n, dtype=BF16, seed=1)
    truth = lhs.astype(np.float64) @ rhs.astype(np.float64)
    out = kernel(np.ascontiguousarray(lhs.T), rhs)
    assert np.abs(out.astype(np.float64) - truth).max() < 1e-2 * np.abs(truth).max()


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_fused_mamba(public, version):
    torch = pytest.importorskip("torch")
    kernel = public(f"{EXAMPLES}/fused_mamba/mamba_nki_kernels.py", f"mamba_{version}")
    reference = _function(f"{EXAMPLES}/fused_mamba/mamba_torch.py", "mamba_layer", "associative_scan")
    draw = lambda *shape, seed: torch.from_numpy(_normal(*shape, seed=seed))
    delta, u, a = draw(1, 128, 512, seed=0).abs(), draw(1, 128, 512, seed=1), -draw(128, 4, seed=2).abs()
    b, c = draw(1, 4, 512, seed=3), draw(1, 4, 512, seed=4)
    out = nki.simulate(kernel)(delta, u, a, b, c)
    torch.testing.assert_close(out, reference(delta, a, b, u, c), rtol=1e-3, atol=1e-3)


def test_simulate_example(public):
    kernel = public(f"{EXAMPLES}/simulate/nki_simulate_example.py", "add_kernel")  # checks itself when it is imported
    a = _normal(128, 512)
    assert (kernel(a, a) == 2 * a).all()


def test_index_cases(public):
    split = public(f"{EXAMPLES}/index-case-1.py", "tensor_split_kernel_")
    x = np.arange(20, dtype=BF16).reshape(4, 5)
    even, odd = split(x)
    assert (even == x[:, ::2]).all()
    assert (odd == x[:, 1::2]).all()
    pool = public(f"{EXAMPLES}/index-case-3.py", "tensor_maxpool_kernel_")
    x = _normal(2, 6, 6, dtype=BF16)
    assert (pool(x, 2) == x.reshape(2, 3, 2, 3, 2).max((2, 4))).all()


def test_layout(public):
    x = _normal(128, 512)
    out = public(f"{EXAMPLES}/layout-pass.py", "tensor_exp_kernel_")(x)
    np.testing.assert_allclose(out, np.exp(x), rtol=1e-6)
    with pytest.raises(errors.PartitionError, match="256 partitions, there are 128"):
        public(f"{EXAMPLES}/layout-violation.py", "tensor_exp_kernel_")(_normal(256, 512))
