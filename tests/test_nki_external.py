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
    if not whole.exists():
        pytest.skip(f"{file} is not in {DIR}")
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


# --- nki-samples ----------------------------------------------------------------------------------------------------


def test_a_keyword_that_is_gone(public):
    """Written for 0.2: tensor_copy took a dtype."""
    kernel = public(
        f"{SAMPLES}/tutorials/matrix_multiplication/matrix_multiplication_nki_kernels.py", "nki_matmul_tiled_"
    )
    with pytest.raises(TypeError, match="dtype"):
        kernel(_normal(128, 128, dtype=BF16), _normal(128, 512, dtype=BF16))


def test_exact_topk_mask(public):
    """Of pull request 137 (737f88e); its author ran it on a Trainium and on the official simulator. Bit exact."""
    check = public("nki-samples/contributed/exact_topk_mask.py", "check_correct")
    assert check("simulate", shapes=[(8, 2112, 512)])


def test_chunked_delta_rule(public):
    """Of 68eda49; its author ran it on a Trainium and on the official simulator. Its own bound, 1e-4."""
    check = public("nki-samples/contributed/chunked_delta_rule.py", "check_correct")
    assert check("simulate", T=256, Hk=1, Hv=2)


def test_decode_attention(public):
    """Of 14c1acc. Functions of nl on tiles, and assignment to tiles."""
    kernel = public("nki-samples/contributed/decode_attention.py", "decode_attention_gqa_fwd")
    q, k, v = _normal(8, 128), _normal(2, 256, 128, seed=1), _normal(2, 256, 128, seed=2)
    turned = [np.ascontiguousarray(x.swapaxes(-1, -2)) for x in (q, k, v)]
    scores = np.einsum("hgd,hsd->hgs", q.reshape(2, 4, 128), k) / np.sqrt(128)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    truth = np.einsum("hgs,hsd->hgd", p / p.sum(-1, keepdims=True), v).reshape(8, 128)
    np.testing.assert_allclose(kernel(*turned, 8, 2), truth, rtol=1e-4, atol=1e-5)


# --- nki-library: against the *_torch.py beside each kernel ---------------------------------------------------------


def _library(public, file, name):
    return public(f"{LIBRARY}/nkilib_src/nkilib/{file}.py", name)


def _torch(x):
    return x if x is None else pytest.importorskip("torch").from_numpy(np.asarray(x, np.float32))


def _near(out, truth, bound):
    """max|out - truth| / max|truth| below the bound; tensors of any kind, or dicts and tuples of them."""
    if isinstance(truth, dict | tuple | list):
        truth = list(truth.values()) if isinstance(truth, dict) else truth
        out = out if isinstance(out, tuple | list) else [out]
        assert len(out) == len(truth)
        for a, b in zip(out, truth, strict=True):
            _near(a, b, bound)
        return
    out, truth = (np.asarray(x.float() if hasattr(x, "float") else x, np.float64) for x in (out, truth))
    assert out.shape == truth.shape
    assert np.abs(out - truth).max() <= bound * np.abs(truth).max()


def test_cumsum(public):
    kernel = _library(public, "core/cumsum/cumsum", "cumsum")
    reference = _library(public, "core/cumsum/cumsum_torch", "cumsum_torch_ref")
    x = _normal(200, 3000)
    _near(kernel(x), reference(_torch(x)), 1e-5)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_rope_hf(public, cores, backward):
    kernel = _library(public, "core/embeddings/rope_hf", "rope_hf")
    reference = _library(public, "core/embeddings/rope_hf_torch", "rope_hf_torch_ref")
    q, k, cos, sin = _normal(2, 4, 256, 64), _normal(2, 2, 256, 64), _normal(2, 256, 64), _normal(2, 256, 64, seed=1)
    out = kernel[cores](q, k, np.zeros_like(q), np.zeros_like(k), cos, sin, backward=backward)
    _near(out, reference(*map(_torch, (q, k, None, None, cos, sin)), backward=backward), 1e-6)


@pytest.mark.parametrize(
    ("cores", "options"),
    [
        (1, {}),
        (1, {"contiguous_layout": False}),
        (1, {"contiguous_layout": False, "relayout_in_sbuf": True}),
        (2, {"lnc_shard": True}),
    ],
)
def test_rope(public, cores, options):
    kernel = _library(public, "core/embeddings/rope", "RoPE")
    reference = _library(public, "core/embeddings/rope_torch", "rope_torch_ref")
    x, cos, sin = _normal(128, 1, 2, 256, dtype=BF16), _normal(64, 1, 256, dtype=BF16), _normal(64, 1, 256, dtype=BF16)
    _near(kernel[cores](x, cos, sin, **options), reference(*map(_torch, (x, cos, sin)), **options), 1e-2)


@pytest.mark.parametrize(
    ("cores", "batch", "seq", "hidden", "options"),
    [
        (1, 1, 8, 2048, {}),
        (1, 1, 4, 2048, {"hidden_actual": 1920}),
        (1, 1, 1, 4096, {"hidden_actual": 3072, "hidden_dim_tp": True}),
        (2, 2, 12, 2048, {}),
        (2, 2, 8, 2048, {"shard_on_h": True}),
    ],
)
def test_rmsnorm_tkg(public, cores, batch, seq, hidden, options):
    kernel = _library(public, "core/subkernels/rmsnorm_tkg", "rmsnorm_tkg")
    tail = "" if cores == 2 else "_lnc1"
    reference = _library(public, "core/subkernels/rmsnorm_torch", f"rmsnorm_tkg_torch_ref{tail}")
    x, gamma = _normal(batch, seq, hidden, dtype=np.float16), _normal(1, hidden, dtype=np.float16, seed=1)
    out = nki.jit(kernel)[cores](x, gamma, np.zeros((128, batch * seq, hidden // 128), np.float16), **options)
    _near(out, reference(_torch(x), _torch(gamma), None, **options), 2e-3)


def test_layernorm_tkg(public):
    kernel = _library(public, "core/subkernels/layernorm_tkg", "layernorm_tkg")
    reference = _library(public, "core/subkernels/layernorm_torch", "layernorm_tkg_torch_ref_lnc1")
    x, gamma, beta = _normal(1, 8, 2048), _normal(1, 2048), _normal(1, 2048, seed=1)
    out = nki.jit(kernel)[1](x, gamma, np.zeros((128, 8, 16), np.float32), beta)
    _near(out, reference(_torch(x), _torch(gamma), None, _torch(beta)), 2e-3)


@pytest.mark.parametrize("cores", [1, 2])
def test_rmsnorm_quant(public, cores):
    kernel = _library(public, "core/rmsnorm/rmsnorm_quant", "rmsnorm_quant_kernel")
    options = _library(public, "core/rmsnorm/rmsnorm_quant", "RmsNormQuantKernelArgs")()
    x, gamma = _normal(2, 128, 1024, dtype=BF16), _normal(1, 1024, dtype=BF16)
    out = kernel[cores](x, gamma if cores == 2 else gamma[0], options)
    wide = x.astype(np.float32)
    norm = wide / np.sqrt((wide**2).mean(-1, keepdims=True)) * gamma.astype(np.float32)
    most = np.abs(norm).max(-1, keepdims=True)
    _near(np.ascontiguousarray(out[..., 1024:]).view(np.float32), most / 240, 5e-3)  # a row's scale, as bytes
    _near(out[..., :1024].astype(np.float32), norm / most * 240, 2**-4)  # 3 bits of mantissa


@pytest.mark.parametrize("cores", [1, 2])
def test_cascaded_max(public, cores):
    x = _normal(16, 8000)
    value, index = _library(public, "core/max/cascaded_max", "cascaded_max")[cores](x)
    assert (value.reshape(-1) == x.max(-1)).all()
    assert (index.reshape(-1) == x.argmax(-1)).all()


def test_cross_entropy(public):
    torch = pytest.importorskip("torch")
    file = "experimental/loss/cross_entropy"
    forward, backward = (_library(public, file, f"cross_entropy_{x}") for x in ("forward", "backward"))
    names = (f"cross_entropy_{x}_torch_ref" for x in ("forward", "backward"))
    references = [_library(public, f"{file}_torch", name) for name in names]
    x, y = _normal(128, 3000), np.random.default_rng(1).integers(0, 3000, 128).astype(np.int32)
    options = dict(positions_per_batch=32, chunk_size=1300, dtype="float32")
    loss, lse = forward[2](x, y, **options)
    wide, targets = _torch(x), torch.from_numpy(y).long()
    _near((loss, lse), references[0](wide, targets), 1e-5)
    _near(backward[2](x, y, lse, **options), references[1](wide, targets), 1e-5)


@pytest.mark.parametrize(("width", "size", "stride", "pad"), [(256, 64, 1, 0), (256, 64, 2, 5), (400, 200, 1, 0)])
def test_depthwise_conv1d(public, width, size, stride, pad):
    torch = pytest.importorskip("torch")
    kernel = _library(public, "experimental/conv/depthwise_conv1d", "depthwise_conv1d_implicit_gemm")
    x, filters = _normal(1, 16, 1, width, dtype=BF16), _normal(16, 1, 1, size, dtype=BF16, seed=1)
    out = kernel[2](x, filters, ((0, 0), (pad, pad)), (1, stride), feature_group_count=16)
    truth = torch.nn.functional.conv2d(_torch(x), _torch(filters), stride=(1, stride), padding=(0, pad), groups=16)
    _near(out, truth, 1e-2)


@pytest.mark.parametrize("options", [{}, {"padding": (2, 2)}, {"stride": 2}, {"dilation": 2}])
def test_conv1d(public, options):
    kernel = _library(public, "experimental/conv/conv1d", "conv1d")
    reference = _library(public, "experimental/conv/conv1d_torch", "conv1d_torch_ref")
    x, filters = _normal(1, 128, 256, dtype=BF16), _normal(3, 128, 64, dtype=BF16, seed=1)
    _near(kernel[1](x, filters, **options), reference(_torch(x), _torch(filters), **options), 1e-2)


def test_output_projection_tkg(public):
    file = "core/output_projection/output_projection_tkg"
    kernel = _library(public, file, "output_projection_tkg")
    reference = _library(public, f"{file}_torch", "output_projection_tkg_torch_ref")
    x, w = _normal(128, 2, 4, 1, dtype=BF16), _normal(512, 512, dtype=BF16, seed=1)
    _near(kernel[1](x, w), reference(_torch(x), _torch(w)), 1e-2)


@pytest.mark.parametrize("cores", [1, 2])
def test_qkv_of_a_prompt(public, cores):
    kernel = _library(public, "core/qkv/qkv", "qkv")
    kinds = _library(public, "core/utils/common_types", "NormType")
    x, w, gamma = (
        _normal(1, 512, 512, dtype=BF16),
        _normal(512, 512, dtype=BF16) * BF16(0.05),
        _normal(1, 512, dtype=BF16),
    )
    options = dict(fused_norm_type=kinds.RMS_NORM, gamma_norm_weights=gamma, d_head=128, num_q_heads=2, num_kv_heads=1)
    out = nki.simulate(kernel[cores], sbuf_bytes=208 * 1024)(x, w, **options)  # it plans for more than 192 KiB
    wide = x.astype(np.float32)
    norm = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gamma.astype(np.float32)
    _near((out if hasattr(out, "shape") else out[0]).astype(np.float32), norm @ w.astype(np.float32), 1e-2)


@pytest.mark.parametrize(
    ("cores", "options"),
    [
        (1, {"scale": 0.125}),
        (1, {"scale": 0.125, "causal_mask": False}),
        (1, {"scale": 0.125, "tp_out": True}),
        (1, {"sliding_window": 128}),
        (2, {"scale": 0.125}),
    ],
)
def test_attention_cte(public, cores, options):
    kernel = _library(public, "core/attention/attention_cte", "attention_cte")
    reference = _library(public, "core/attention/attention_cte_torch", "attention_cte_torch_ref")
    q, k, v = (_normal(cores, *s, dtype=BF16, seed=i) for i, s in enumerate(((512, 64), (64, 512), (512, 64))))
    _near(kernel[cores](q, k, v, **options), reference(*map(_torch, (q, k, v)), **options), 1e-2)


@pytest.mark.parametrize(
    ("cores", "heads", "options"),
    [
        (1, (1, 1), {"use_causal_mask": True}),
        (1, (1, 1), {}),
        (2, (4, 2), {"use_causal_mask": True}),
        (1, (1, 1), {"use_causal_mask": True, "sliding_window": 128, "sinks_ref": True}),
    ],
)
def test_attention_bwd(public, cores, heads, options):
    torch = pytest.importorskip("torch")
    file = "core/attention/attention_bwd"
    kernel, reference = (
        _library(public, file, "attention_bwd"),
        _library(public, f"{file}_torch", "attention_bwd_torch_ref"),
    )
    forward = _library(public, f"{file}_torch", "compute_o_lse")
    shapes = [(1, n, 64, 512) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dy = (_torch(_normal(*shape, seed=i)).bfloat16() for i, shape in enumerate(shapes))
    sinks = _torch(_normal(1, heads[0], 1)).bfloat16() if options.get("sinks_ref") else None
    options = {**options, "sinks_ref": sinks, "mixed_precision": True}
    causal, window = options.get("use_causal_mask", False), options.get("sliding_window")
    o, lse, _ = forward(q, k, v, causal, True, sliding_window=window, sinks=sinks)
    out = kernel[cores](q, k, v, o.to(torch.bfloat16), dy, lse.float(), **options)
    _near(out, reference(q, k, v, o, dy, lse, **options), 2e-2)
