"""Hugging Face's Llama files in and out: config.json, and model.safetensors or its shards with an index."""

import math
from pathlib import Path

import numpy as np

from ringtide.models import BadInput, tensor_files
from ringtide.models.llama import Config, shapes
from ringtide.models.rope import Scaling

# ours -> (Hugging Face's name, how many of our axes are inputs). Their matrices are [out, in], ours the reverse.
_LAYER = {
    "attention_norm": ("input_layernorm", 0),
    "q": ("self_attn.q_proj", 1),
    "k": ("self_attn.k_proj", 1),
    "v": ("self_attn.v_proj", 1),
    "o": ("self_attn.o_proj", 1),
    "ff_norm": ("post_attention_layernorm", 0),
    "gate": ("mlp.gate_proj", 1),
    "up": ("mlp.up_proj", 1),
    "down": ("mlp.down_proj", 1),
}
_TOP = {"embed": ("model.embed_tokens", 0), "norm": ("model.norm", 0), "unembed": ("lm_head", 1)}
_SCALING = tuple(Scaling.__dataclass_fields__)


def load(folder) -> tuple[dict, Config]:
    """(parameters, config) of a folder in Hugging Face's format; float32 NumPy arrays in the shapes of llama.shapes.

    Raises BadInput naming the file, and the tensor where one is missing or has another shape than config.json says.
    """
    folder = Path(folder)
    config = config_of(tensor_files.json_of(folder, "config.json"), folder / "config.json")
    files = tensor_files.files_of(folder)
    tree = shapes(config)
    used = set()
    if config.layers > len(files):  # before room is made for them
        raise BadInput(f"{folder}: config.json says {config.layers} layers, the weights hold {len(files)} tensors")

    def read(name, shape, inputs):
        if name not in files:
            raise BadInput(f"{folder}: the weights hold no {name}")
        used.add(name)
        w = tensor_files.read(folder / files[name], name, "flax")  # jax arrays: NumPy has no bfloat16
        return _ours(w, shape, inputs, f"{folder / files[name]}: {name}")

    params = {key: read(f"{_TOP[key][0]}.weight", tree[key], _TOP[key][1]) for key in tree if key != "layers"}
    params["layers"] = {}
    for key, shape in tree["layers"].items():
        name, inputs = _LAYER[key]
        for i in range(config.layers):
            w = read(f"model.layers.{i}.{name}.weight", shape[1:], inputs)
            if i == 0:  # config.json told its true shape: make room for all. Filled in place, no second copy exists
                stack = params["layers"][key] = np.empty(shape, np.float32)
            stack[i] = w
    strange = sorted(n for n in set(files) - used if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq"))
    if strange:
        raise BadInput(f"{folder}: {strange[0]} ({len(strange)} such) has no place in the Llama of its config.json")
    return params, config


def save(folder, params: dict, config: Config) -> None:
    """Writes config.json and model.safetensors, float32, which transformers' LlamaForCausalLM loads."""
    from safetensors.numpy import save_file

    tensors = {f"{_TOP[key][0]}.weight": _theirs(params[key], _TOP[key][1]) for key in params if key != "layers"}
    for key, (name, inputs) in _LAYER.items():
        for i, w in enumerate(params["layers"][key]):
            tensors[f"model.layers.{i}.{name}.weight"] = _theirs(w, inputs)
    tensor_files.write(folder, tensors, _their_config(config), save_file)


def config_of(theirs: dict, where="config.json") -> Config:
    """The Config that a Hugging Face config.json (as a dict) describes. Refuses what this Llama does not do."""
    for key, allowed in {
        "model_type": ("llama",),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    }.items():
        if theirs.get(key) not in allowed:
            raise BadInput(f"{where}: {key} is {theirs.get(key)!r}, only {allowed[0]!r} is supported")
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    key = "rope_parameters" if theirs.get("rope_parameters") is not None else "rope_scaling"
    rope = theirs.get(key)
    if not isinstance(rope, dict | None):
        raise BadInput(f"{where}: {key} must be an object or null, got {rope!r}")
    rope = rope or {}
    kind = rope.get("rope_type", rope.get("type", None if rope.keys() - {"rope_theta"} else "default"))
    if kind not in ("default", "llama3"):
        raise BadInput(f"{where}: rope type {kind!r} in {key} is not supported, only 'default' and 'llama3'")
    try:
        heads, dim = theirs["num_attention_heads"], theirs["hidden_size"]
        kv_heads, head_dim = theirs.get("num_key_value_heads"), theirs.get("head_dim")
        if head_dim is None and type(dim) is type(heads) is int and heads:  # else Config says which of them is wrong
            head_dim = dim // heads
        return Config(
            vocab_size=theirs["vocab_size"],
            layers=theirs["num_hidden_layers"],
            dim=dim,
            ff_dim=theirs["intermediate_size"],
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rope_theta=rope.get("rope_theta", theirs.get("rope_theta", 10000.0)),
            rope_scaling=Scaling(**{key: rope[key] for key in _SCALING}) if kind == "llama3" else None,
            norm_eps=theirs.get("rms_norm_eps", 1e-6),
            tied=theirs.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise BadInput(f"{where}: the key {error} is missing") from None
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None


def _their_config(c: Config) -> dict:
    scaling = c.rope_scaling and {"rope_type": "llama3", **{key: getattr(c.rope_scaling, key) for key in _SCALING}}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "num_hidden_layers": c.layers,
        "hidden_size": c.dim,
        "intermediate_size": c.ff_dim,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def _ours(w, shape, inputs, where):
    """Their [outputs, inputs] matrix (or vector, or embedding: inputs = 0) as an array of our shape."""
    split = len(shape) if inputs == 0 else inputs
    n_in, n_out = math.prod(shape[:split]), math.prod(shape[split:])
    expected = shape if inputs == 0 else (n_out, n_in)
    if tuple(w.shape) != tuple(expected):
        raise BadInput(f"{where} has shape {list(w.shape)}, its config.json says {list(expected)}")
    w = np.asarray(w, np.float32)
    if not np.isfinite(w).all():
        raise BadInput(f"{where} holds NaN or infinite weights: take a whole copy of the model")
    return w if inputs == 0 else w.T.reshape(shape)


def _theirs(w, inputs):
    w = np.asarray(w, np.float32)
    if inputs == 0:
        return w
    return np.ascontiguousarray(w.reshape(int(np.prod(w.shape[:inputs])), -1).T)
