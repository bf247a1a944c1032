"""Makes llama/ beside this file: a random tiny LlamaForCausalLM of transformers, and the logits it gives.

pip install torch==2.13.0 transformers==5.24.0 && python tests/goldens/make_llama.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "llama"
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that 48 tokens reach every branch of the scaling
}


def make(folder=FOLDER, tied=False, seed=0, **save):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=500000.0,
        rope_scaling=SCALING,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones would hide a mistake
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
    model.save_pretrained(folder, **save)
    tokens = torch.randint(0, 67, (2, 48))
    with torch.no_grad():
        logits = model(tokens).logits.numpy()
    return tokens.numpy(), logits


if __name__ == "__main__":
    tokens, logits = make()
    np.savez(FOLDER / "expected.npz", tokens=tokens.astype(np.int32), logits=logits)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    print(json.loads((FOLDER / "config.json").read_text()), {p.name: p.stat().st_size for p in FOLDER.iterdir()})
