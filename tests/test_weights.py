"""Hugging Face files in and out: against transformers' own logits, and every way a folder can be wrong."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ringtide.models import BadInput, llama, weights

GOLDEN = Path(__file__).parent / "goldens" / "llama"
LLAMA3 = json.loads((GOLDEN / "config.json").read_text())["rope_parameters"]


def logits_of(folder, tokens):
    params, config = weights.load(folder)
    h = llama.hidden(params, tokens, jnp.arange(tokens.shape[1]), config)
    return np.asarray(llama.logits(params, h))


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden that a test may spoil."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


def shard(folder):
    """The same weights in two files with an index; returns the index's path."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in halves.items() for name in part}}))
    return index


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_golden_of_transformers():
    golden = np.load(GOLDEN / "expected.npz")
    assert np.abs(logits_of(GOLDEN, golden["tokens"]) - golden["logits"]).max() < 2e-5


def test_shards_give_the_same_weights(folder):
    shard(folder)
    golden = np.load(GOLDEN / "expected.npz")
    np.testing.assert_array_equal(logits_of(folder, golden["tokens"]), logits_of(GOLDEN, golden["tokens"]))


@pytest.mark.parametrize("tied", [True, False])
def test_out_and_in_again(tmp_path, tied):
    config = llama.Config(41, 2, 24, 40, 4, 2, 6, rope_scaling=llama.Scaling(), tied=tied)
    params = llama.init(0, config)
    weights.save(tmp_path, params, config)
    again, same = weights.load(tmp_path)
    assert same == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_bfloat16_is_read(folder):
    path = folder / "model.safetensors"
    tensors = {name: w.astype(jnp.bfloat16) for name, w in load_file(path).items()}
    from safetensors.flax import save_file as save_jax

    save_jax({name: jnp.asarray(w) for name, w in tensors.items()}, path)
    params, _ = weights.load(folder)
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "a\\b.safetensors", "x.bin", 7, None]
)
def test_index_that_points_outside_is_refused(folder, name):
    index = shard(folder)
    files = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=files | {"model.norm.weight": name})
    with pytest.raises(BadInput, match=r"not the plain name of a \.safetensors file in the same folder"):
        weights.load(folder)


def without(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def cut(tensors):
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((31, 24), np.float32)


def foreign(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 24), np.float32)


def with_norm(value):
    return lambda tensors: tensors.update({"model.norm.weight": value})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without, r"hold no model\.layers\.1\.mlp\.up_proj\.weight"),
        (cut, r"layers\.1\.self_attn\.k_proj\.weight has shape \[31, 24\], its config\.json says \[32, 24\]"),
        (foreign, r"model\.layers\.2\.mlp\.up_proj\.weight .* no place"),
        (with_norm(np.ones(24, np.int64)), r"model\.norm\.weight holds I64, only F64, F32, F16, BF16 are read"),
        (with_norm(np.ones(24, bool)), r"model\.norm\.weight holds BOOL, only"),
        (with_norm(np.ones(24, np.complex64)), r"model\.norm\.weight holds C64, only"),
        (with_norm(np.ones(24, jnp.float8_e4m3fn)), r"model\.norm\.weight holds F8_E4M3, only"),
        (with_norm(np.full(24, np.nan, np.float32)), r"model\.norm\.weight holds NaN or infinite weights"),
        (with_norm(np.full(24, -np.inf, np.float16)), r"model\.norm\.weight holds NaN or infinite weights"),
    ],
)
def test_wrong_tensors_are_named(folder, spoil, message):
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadInput, match=message):
        weights.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', only 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "the key 'factor' is missing"),
        ({"hidden_size": None}, "dim must be an int of at least 1, got None"),
        ({"num_key_value_heads": 5}, "heads must be a multiple of kv_heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "heads must be an int of at least 1, got 0"),
        ({"num_attention_heads": "x", "head_dim": None}, "heads must be an int of at least 1, got 'x'"),
        ({"num_key_value_heads": 0}, "kv_heads must be an int of at least 1, got 0"),
        ({"num_hidden_layers": True}, "layers must be an int of at least 1, got True"),
        ({"num_hidden_layers": 10**12}, "says 1000000000000 layers, the weights hold 21 tensors"),
        ({"intermediate_size": 10**30}, r"layers\.0\.mlp\.gate_proj\.weight has shape \[40, 24\]"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be a finite number of at least 1, got 0"),
        ({"rope_parameters": None, "rope_theta": -1}, "rope_theta must .*, got -1"),
        ({"rope_parameters": None, "rope_theta": 10**400}, "rope_theta must be a finite number"),
        ({"rope_parameters": None, "rope_scaling": "llama3"}, "rope_scaling must be an object or null, got 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"factor": 8.0}}, "rope type None in rope_scaling"),
        ({"rope_parameters": LLAMA3 | {"factor": "8"}}, "factor must be a finite number of at least 1, got '8'"),
        ({"rope_parameters": LLAMA3 | {"factor": 0}}, "factor must be .* got 0"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be above low_freq_factor"),
        ({"rms_norm_eps": "x"}, "norm_eps must be a finite number above 0, got 'x'"),
        ({"rms_norm_eps": None}, "norm_eps must be a finite number above 0, got None"),
        ({"rms_norm_eps": float("nan")}, "norm_eps must .* got nan"),
        ({"tie_word_embeddings": "no"}, "tied must be True or False, got 'no'"),
    ],
)
def test_unsupported_configs_are_named(folder, changes, message):
    edit(folder / "config.json", **changes)
    with pytest.raises(BadInput, match=message) as caught:
        weights.load(folder)
    assert "\n" not in str(caught.value)


def test_broken_files_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"model\.safetensors: not a readable safetensors file"):
        weights.load(folder)
    path.unlink()
    with pytest.raises(BadInput, match=r"neither model\.safetensors nor"):
        weights.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config\.json: not JSON"):
        weights.load(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"config\.json: not JSON \(maximum recursion depth"):
        weights.load(folder)
    with pytest.raises(BadInput, match="No such file"):
        weights.load(folder / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_live_against_transformers(tmp_path, tied, monkeypatch):
    """Theirs in, sharded; ours out; theirs again."""
    # transformers looks for a package called kernels, and `python -m pytest` would show it our folder of that name.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    torch = pytest.importorskip("torch", reason="the live comparison needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="the live comparison needs torch and transformers")
    make = runpy.run_path(str(GOLDEN.parent / "make_llama.py"))["make"]
    tokens, want = make(tmp_path / "theirs", tied=tied, seed=5, max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    assert np.abs(logits_of(tmp_path / "theirs", tokens) - want).max() < 2e-5
    weights.save(tmp_path / "ours", *weights.load(tmp_path / "theirs"))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(tokens)).logits.numpy(), want, atol=1e-6)
