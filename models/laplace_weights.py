"""fla's GLAForCausalLM folders in and out: config.json and safetensors, by fla's own names, so that either loads both.

What fla can switch on and Laplace does not do is refused. `gate_logit_normalizer` is a key of ours: fla's configuration
has none and its layer divides by 16.
"""

import math
from pathlib import Path

import torch

from ringtide.models import BadInput, tensor_files
from ringtide.models.laplace import Config, LaplaceForCausalLM

# What must be so: key -> the values that are understood, fla's default first.
_FIXED = {
    "model_type": ("gla",),
    "hidden_act": ("swish", "silu"),
    "feature_map": (None,),
    "use_output_gate": (True,),
    "use_gk": (True,),
    "use_gv": (False,),
    "elementwise_affine": (True,),
    "attn": (None,),
    "attnres_block_size": (None,),
    "use_short_conv": (False, True),
    "fuse_norm": (True, False),
}


def load(folder, dtype=torch.float32) -> LaplaceForCausalLM:
    """The model of a folder in fla's format, on the CPU, its parameters in `dtype`; None: as they are there.

    Raises BadInput naming the file, and the tensor where one is missing or has another shape than config.json says.
    """
    folder = Path(folder)
    theirs = tensor_files.json_of(folder, "config.json")
    config = config_of(theirs, folder / "config.json")
    files = tensor_files.files_of(folder)
    if config.layers > len(files):  # before they are built
        raise BadInput(f"{folder}: config.json says {config.layers} layers, the weights hold {len(files)} tensors")
    with torch.device("meta"):
        model = LaplaceForCausalLM(config)
    tensors = {}
    for ours, p in model.named_parameters():
        # fla has two names for this norm, by whether it is fused.
        name = ours if theirs.get("fuse_norm", True) else ours.replace("g_norm_swish_gate", "g_norm")
        if name not in files:
            raise BadInput(f"{folder}: the weights hold no {name}")
        w = tensor_files.read(folder / files.pop(name), name, "pt")
        if w.shape != p.shape:
            raise BadInput(f"{folder}: {name} has shape {list(w.shape)}, its config.json says {list(p.shape)}")
        if not w.isfinite().all():
            raise BadInput(f"{folder}: {name} holds NaN or infinite weights: take a whole copy of the model")
        tensors[ours] = w if dtype is None else w.to(dtype)
    if config.tied:
        files.pop("lm_head.weight", None)
        tensors["lm_head.weight"] = tensors["model.embeddings.weight"]
    if files:
        raise BadInput(f"{folder}: {min(files)} ({len(files)} such) has no place in the GLA of its config.json")
    model.load_state_dict(tensors, assign=True)
    if config.tied:
        model.lm_head.weight = model.model.embeddings.weight
    return model


def save(folder, model: LaplaceForCausalLM, tensors=None) -> None:
    """Writes config.json and model.safetensors, which fla's GLAForCausalLM loads.

    tensors: instead of the model's own parameters, by their names: those that a trainer keeps elsewhere.
    """
    from safetensors.torch import save_file

    tensors = dict(model.named_parameters()) if tensors is None else dict(tensors)
    tensors = {name: w.detach().cpu().contiguous() for name, w in tensors.items()}
    dtypes = {str(w.dtype).removeprefix("torch.") for w in tensors.values()}
    config = their_config(model.config) | {"dtype": dtypes.pop() if len(dtypes) == 1 else "float32"}
    tensor_files.write(folder, tensors, config, save_file)


def config_of(theirs: dict, where="config.json") -> Config:
    """The Config that fla's config.json (as a dict) describes. Refuses what this model does not do."""
    for key, allowed in _FIXED.items():
        value = theirs.get(key, None if key == "model_type" else allowed[0])
        if value not in allowed or (isinstance(value, int) and not isinstance(value, bool)):
            raise BadInput(f"{where}: {key} is {value!r}, only {' or '.join(map(repr, allowed))} is supported")
    number = {"hidden_size": 2048, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0} | theirs
    dim, heads = number["hidden_size"], number["num_heads"]
    for key in ("hidden_size", "num_heads"):
        if type(number[key]) is not int or number[key] < 1:
            raise BadInput(f"{where}: {key} must be an int of at least 1, got {number[key]!r}")
    widths = {}
    for key in ("expand_k", "expand_v"):
        expand = number[key]
        if type(expand) not in (int, float) or not 0 < expand < 1e6:
            raise BadInput(f"{where}: {key} must be a finite number above 0, got {expand!r}")
        width = int(dim * expand)
        if width < heads or width % heads:
            raise BadInput(
                f"{where}: {key} {expand} of hidden_size {dim} is {width} channels, not a multiple of {heads} heads"
            )
        widths[key] = width // heads
    ff_dim, ratio = theirs.get("intermediate_size"), theirs.get("hidden_ratio", 4)
    if ff_dim is None:
        ratio = 4 if ratio is None else ratio
        if type(ratio) not in (int, float) or not 0 < ratio < 1e6:
            raise BadInput(f"{where}: hidden_ratio must be a finite number above 0, got {ratio!r}")
        ff_dim = -(-int(dim * ratio * 2 / 3) // 256) * 256
    kv_heads = theirs.get("num_kv_heads")
    try:
        return Config(
            vocab_size=theirs.get("vocab_size", 32000),
            layers=theirs.get("num_hidden_layers", 24),
            dim=dim,
            ff_dim=ff_dim,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            key_dim=widths["expand_k"],
            value_dim=widths["expand_v"],
            conv=theirs.get("conv_size", 4) if theirs.get("use_short_conv", False) else 0,
            gate_normalizer=theirs.get("gate_logit_normalizer", 16),
            clamp_min=theirs.get("clamp_min"),
            norm_eps=theirs.get("norm_eps", 1e-6),
            tied=theirs.get("tie_word_embeddings", False),
        )
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from None


def their_config(c: Config) -> dict:
    """The config.json of fla's GLAForCausalLM. Its token ids are left open: they belong to a tokenizer."""
    return {
        "architectures": ["GLAForCausalLM"],
        "model_type": "gla",
        "vocab_size": c.vocab_size,
        "num_hidden_layers": c.layers,
        "hidden_size": c.dim,
        "intermediate_size": c.ff_dim,
        "hidden_ratio": None,
        "num_heads": c.heads,
        "num_kv_heads": None if c.kv_heads == c.heads else c.kv_heads,
        "expand_k": _expand(c.dim, c.heads * c.key_dim),
        "expand_v": _expand(c.dim, c.heads * c.value_dim),
        "use_short_conv": c.conv > 0,
        "conv_size": c.conv or 4,
        "clamp_min": c.clamp_min,
        "gate_logit_normalizer": c.gate_normalizer,
        "norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "hidden_act": "swish",
        "feature_map": None,
        "use_output_gate": True,
        "elementwise_affine": True,
        "fuse_norm": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _expand(dim, width):
    """The float that fla multiplies with dim and cuts to an int to get the width."""
    expand = width / dim
    while int(dim * expand) < width:
        expand = math.nextafter(expand, math.inf)
    return expand
