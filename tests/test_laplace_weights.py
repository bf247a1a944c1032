"""fla's folders in and out: what was written is read again, by fla too, and every way a folder can be wrong."""

import dataclasses
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from ringtide.models import BadInput, laplace_weights  # noqa: E402
from ringtide.models.laplace import PRESETS, Config, LaplaceForCausalLM, init_weights  # noqa: E402

GOLDENS = Path(__file__).parent / "goldens"
MICRO = PRESETS["laplace-micro"]
CONFIGS = (
    MICRO,
    dataclasses.replace(MICRO, conv=0, tied=False),
    dataclasses.replace(MICRO, heads=4, clamp_min=-0.03, conv=3, gate_normalizer=2.0),
)


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden that a test may spoil."""
    return Path(shutil.copytree(GOLDENS / "laplace-conv", tmp_path / "model"))


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("config", CONFIGS, ids=("conv", "plain", "shared"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_in_again(tmp_path, config, dtype):
    model = init_weights(LaplaceForCausalLM(config).to(dtype), 0)
    laplace_weights.save(tmp_path, model)
    again = laplace_weights.load(tmp_path, dtype=None)
    assert again.config == model.config
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert (again.lm_head.weight is again.model.embeddings.weight) == model.config.tied
    for (name, p), (other, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p, q)


def test_every_preset_through_flas_config():
    for config in PRESETS.values():
        assert laplace_weights.config_of(json.loads(json.dumps(laplace_weights.their_config(config)))) == config
    for width in range(1, 2000):  # fla cuts dim * expand to an int: no width may be lost to rounding
        config = Config(dim=123, heads=1, kv_heads=1, key_dim=width, value_dim=2 * width + 1)
        assert laplace_weights.config_of(laplace_weights.their_config(config)) == config


def test_flas_defaults_and_ratio():
    config = laplace_weights.config_of({"model_type": "gla"})
    assert config == Config(32000, 24, 2048, 5632, 4, 4, 256, 512, conv=0, tied=False)
    assert laplace_weights.config_of({"model_type": "gla", "hidden_size": 1024, "hidden_ratio": 3}).ff_dim == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', only 'gla' is supported"),
        ({"feature_map": "relu"}, "feature_map is 'relu', only None is supported"),
        ({"use_output_gate": False}, "use_output_gate is False, only True"),
        ({"use_gv": True}, "use_gv is True"),
        ({"use_gk": 1}, "use_gk is 1, only True"),
        ({"hidden_act": "powlu"}, "hidden_act is 'powlu', only 'swish' or 'silu'"),
        ({"elementwise_affine": False}, "elementwise_affine is False"),
        ({"attn": {"layers": [0], "num_heads": 2}}, "attn is {'layers'"),
        ({"attnres_block_size": 2}, "attnres_block_size is 2"),
        ({"use_short_conv": "yes"}, "use_short_conv is 'yes', only False or True"),
        ({"conv_size": 1}, "conv must be 0 or an int of at least 2, got 1"),
        ({"num_heads": 3}, "expand_k 0.5 of hidden_size 32 is 16 channels, not a multiple of 3 heads"),
        ({"num_heads": 0}, "num_heads must be an int of at least 1, got 0"),
        ({"num_kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"num_kv_heads": True}, "kv_heads must be an int of at least 1, got True"),
        ({"hidden_size": None}, "hidden_size must be an int of at least 1, got None"),
        ({"expand_k": float("nan")}, "expand_k must be a finite number above 0, got nan"),
        ({"expand_v": "1"}, "expand_v must be a finite number above 0, got '1'"),
        ({"intermediate_size": None, "hidden_ratio": -1}, "hidden_ratio must be a finite number above 0, got -1"),
        ({"norm_eps": 0}, "norm_eps must be a finite number above 0, got 0"),
        ({"clamp_min": 0.5}, "clamp_min must be None or a number of at most 0, got 0.5"),
        ({"clamp_min": float("nan")}, "clamp_min must be None"),
        ({"gate_logit_normalizer": 0}, "gate_normalizer must be a finite number above 0, got 0"),
        ({"tie_word_embeddings": "no"}, "tied must be True or False, got 'no'"),
        ({"num_hidden_layers": 10**12}, "says 1000000000000 layers, the weights hold"),
    ],
)
def test_unsupported_configs_are_named(folder, changes, message):
    edit(folder / "config.json", **changes)
    with pytest.raises(BadInput, match=message) as caught:
        laplace_weights.load(folder)
    assert "\n" not in str(caught.value)


def _without(tensors):
    del tensors["model.layers.1.attn.gk_proj.1.bias"]


def _cut(tensors):
    tensors["model.layers.0.attn.q_conv1d.weight"] = torch.zeros(16, 1, 3)


def _foreign(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(40, 32)


def _norm(value):
    return lambda tensors: tensors.update({"model.norm.weight": value})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, r"the weights hold no model\.layers\.1\.attn\.gk_proj\.1\.bias"),
        (_cut, r"layers\.0\.attn\.q_conv1d\.weight has shape \[16, 1, 3\], its config\.json says \[16, 1, 4\]"),
        (_foreign, r"model\.layers\.2\.mlp\.up_proj\.weight \(1 such\) has no place"),
        (_norm(torch.ones(32, dtype=torch.int64)), r"model\.norm\.weight holds I64, only F64, F32, F16, BF16"),
        (_norm(torch.full((32,), torch.nan)), r"model\.norm\.weight holds NaN or infinite weights"),
        (_norm(torch.full((32,), -torch.inf)), r"model\.norm\.weight holds NaN or infinite weights"),
    ],
)
def test_wrong_tensors_are_named(folder, spoil, message):
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadInput, match=message) as caught:
        laplace_weights.load(folder)
    assert "\n" not in str(caught.value)


def test_broken_files_are_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadInput, match=r"model\.safetensors: not a readable safetensors file"):
        laplace_weights.load(folder)
    path.unlink()
    with pytest.raises(BadInput, match=r"neither model\.safetensors nor"):
        laplace_weights.load(folder)
    with pytest.raises(BadInput, match="No such file"):
        laplace_weights.load(folder / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laplace", "laplace-conv"])
def test_live_against_fla(tmp_path, monkeypatch, name):
    """Theirs in; ours out; theirs again."""
    # transformers looks for a package called kernels, and `python -m pytest` would show it our folder of that name.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    pytest.importorskip("fla.models.gla", reason="the live comparison needs flash-linear-attention, as make_laplace.py")
    make = runpy.run_path(str(GOLDENS / "make_laplace.py"))
    tokens, want, _, _ = make["make"](name, tmp_path / "theirs", seed=5)
    model = laplace_weights.load(tmp_path / "theirs")
    torch.testing.assert_close(model(tokens), want, rtol=0, atol=1e-5 * float(want.abs().max()))
    laplace_weights.save(tmp_path / "ours", model)
    theirs = make["GLAForCausalLM"].from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(theirs(tokens, use_cache=False).logits, want, rtol=0, atol=1e-6)
