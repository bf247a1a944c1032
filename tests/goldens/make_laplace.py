"""Makes laplace/ and laplace-conv/ beside this file: tiny random GLAForCausalLM of fla, their logits, loss, gradients.

pip install torch==2.13.0 transformers==5.24.0 flash-linear-attention==0.6.0 triton
python tests/goldens/make_laplace.py

fla's kernels are written in Triton and need a GPU: here they are swapped for plain torch, and fla's chunk_gla for fla's
own naive recurrence. The layers, the model and its files are fla's.
"""

from pathlib import Path

import fla.layers.gla
import fla.modules.mlp
import numpy as np
import torch
import torch.nn.functional as F
from fla.models.gla import GLAConfig, GLAForCausalLM
from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
from fla.ops.gla.naive import naive_recurrent_gla

FOLDER = Path(__file__).parent
SHAPES = {
    "laplace": dict(hidden_size=16, num_heads=4, num_kv_heads=2, expand_v=2.0, clamp_min=-0.05, fuse_norm=False),
    "laplace-conv": dict(
        hidden_size=32, intermediate_size=40, num_heads=2, use_short_conv=True, tie_word_embeddings=True, norm_eps=1e-5
    ),
}


def gla(q, k, v, gk=None, g=None, initial_state=None, output_final_state=False, **_):
    return naive_recurrent_gla(q, k, v, gk if gk is not None else g, initial_state, output_final_state)


def norm(self, x, residual=None, prenorm=False):
    x = x if residual is None else x + residual
    y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
    return (y, x) if prenorm else y


def convolution(self, x, **_):
    y = F.conv1d(x.mT, self.weight, padding=self.weight.shape[-1] - 1, groups=len(self.weight))
    return F.silu(y[..., : x.shape[1]]).mT, None


fla.layers.gla.chunk_gla = fla.layers.gla.fused_recurrent_gla = gla
fla.layers.gla.ACT2FN["swish"] = F.silu
fla.modules.mlp.swiglu_linear = lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
RMSNorm.forward = norm
FusedRMSNormGated.forward = lambda self, x, gate: norm(self, x) * F.silu(gate)
ShortConvolution.forward = convolution


def expected(model, tokens):
    """(logits [B, T, V], mean loss, {name: gradient})."""
    out = model(tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def make(name, folder=None, seed=0):
    """Writes config.json and model.safetensors; returns (tokens, *expected)."""
    torch.manual_seed(seed)
    common = dict(vocab_size=67, num_hidden_layers=2, initializer_range=0.3, fuse_cross_entropy=False)
    model = GLAForCausalLM(GLAConfig(**common, **SHAPES[name]))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key or key.endswith("bias"):  # ones and zeros would hide a mistake
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder or FOLDER / name)
    tokens = torch.randint(0, 67, (2, 48))
    return tokens, *expected(model, tokens)


if __name__ == "__main__":
    for name in SHAPES:
        tokens, logits, loss, gradients = make(name)
        gradients = {f"d {key}": value.numpy() for key, value in gradients.items()}
        content = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy(), "loss": loss.numpy()}
        np.savez(FOLDER / name / "expected.npz", **content, **gradients)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        print(float(loss), {path.name: path.stat().st_size for path in (FOLDER / name).iterdir()})
