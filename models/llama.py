"""Llama 3.1 in plain JAX: the parameters are a dict, the model is a function.

    x = embed[tokens]
    every layer:  x += attention(norm(x)) Wo        grouped queries, rotary positions
                  x += (silu(h Wg) * (h Wu)) Wd     h = norm(x)
    logits = norm(x) unembed

What attends, and how tokens are taken, are arguments, so the same lines run on one device, over a mesh of devices, or
with a cache. Letters: B batch, T time, D model, N query heads, K key and value heads, H head_dim, F feed-forward,
V vocabulary, L layers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import ringtide
from ringtide.models import check_number
from ringtide.models.rope import Scaling, rope, rotate
from ringtide.models.tokenwise import tokenwise


@dataclass(frozen=True)
class Config:
    """The shape of a Llama. Defaults: llama-tiny, 2 M parameters over bytes."""

    vocab_size: int = 256
    layers: int = 3
    dim: int = 256
    ff_dim: int = 768
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    rope_theta: float = 500000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True  # the unembedding is the embedding

    def __post_init__(self):
        for name in ("vocab_size", "layers", "dim", "ff_dim", "heads", "kv_heads", "head_dim"):
            if type(value := getattr(self, name)) is not int or value < 1:  # a bool is no number
                raise ValueError(f"Config: {name} must be an int of at least 1, got {value!r}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"Config: heads must be a multiple of kv_heads and head_dim even, "
                f"got heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
            )
        check_number("Config", "rope_theta", self.rope_theta, least=1)
        check_number("Config", "norm_eps", self.norm_eps)
        if not isinstance(self.tied, bool):
            raise ValueError(f"Config: tied must be True or False, got {self.tied!r}")


PRESETS = {
    "llama-tiny": Config(),
    "llama-micro": Config(layers=2, dim=32, ff_dim=64, heads=2, kv_heads=1, head_dim=16),
    "llama3.1-8b": Config(128256, 32, 4096, 14336, 32, 8, 128, rope_scaling=Scaling(), tied=False),
    # The same work in half the heads of twice the width, which fill the matrix units of a TPU.
    "llama3.1-8b-hd256": Config(128256, 32, 4096, 14336, 16, 4, 256, rope_scaling=Scaling(), tied=False),
}
CHUNK = 8192  # tokens that a layer's matrices take at a time where activations are recomputed anyway


def _remat(save=(), offload=()):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return partial(jax.checkpoint, policy=policy, prevent_cse=False)  # in a scan nothing can be merged with forward


# What the backward pass finds of a layer; the rest is computed again, q, k, v and the feed-forward at any rate.
REMAT = {
    "none": lambda layer: layer,  # everything
    "full": _remat(),  # its input
    "attention": _remat(["attention_out", "attention_lse"]),  # also these: attention does not run forward again
    "offload": _remat(["attention_lse"], ["attention_out"]),  # the same, the second [B, T, D] in the host's memory
    "offload-all": _remat(["attention_lse"], ["attention_out", "layer_input"]),  # both there
}


def shapes(config: Config) -> dict:
    """The shape of every parameter, as the pytree that `init` and `weights.load` return."""
    c, L = config, config.layers
    tree = {
        "embed": (c.vocab_size, c.dim),
        "layers": {
            "attention_norm": (L, c.dim),
            "q": (L, c.dim, c.heads * c.head_dim),
            "k": (L, c.dim, c.kv_heads * c.head_dim),
            "v": (L, c.dim, c.kv_heads * c.head_dim),
            "o": (L, c.heads * c.head_dim, c.dim),
            "ff_norm": (L, c.dim),
            "gate": (L, c.dim, c.ff_dim),
            "up": (L, c.dim, c.ff_dim),
            "down": (L, c.ff_dim, c.dim),
        },
        "norm": (c.dim,),
    }
    return tree if c.tied else tree | {"unembed": (c.dim, c.vocab_size)}


def init(seed: int, config: Config, put=lambda path, x: x) -> dict:
    """Random float32 parameters, in NumPy (nothing to compile): norms are 1, matrices normal with deviation
    1 / sqrt(fan_in), those that add to x scaled down by sqrt(2 L), the embedding 0.02.

    put: what becomes of each, so that they need not all fit on the host: (path in the pytree, array) -> array.
    """
    random = np.random.default_rng(seed)
    scale = dict.fromkeys(("q", "k", "v", "gate", "up", "unembed"), config.dim**-0.5) | {
        "embed": 0.02,
        "o": (2 * config.layers * config.heads * config.head_dim) ** -0.5,
        "down": (2 * config.layers * config.ff_dim) ** -0.5,
    }

    def draw(path, shape):
        name = path[-1].key
        if "norm" in name:
            return put(path, np.ones(shape, np.float32))
        return put(path, random.standard_normal(shape, np.float32) * np.float32(scale[name]))

    return jax.tree.map_with_path(draw, shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def rms_norm(x, weight, eps):
    """x [..., D] over its root mean square, in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype) * weight.astype(x.dtype)


def causal(q, k, v, positions):
    """The default `attend`: plain causal attention on one device. q [B, T, N, H], k and v [B, T, K, H]."""
    return ringtide.attention(q, k, v, mask=ringtide.Causal(), q_positions=positions, kv_positions=positions)


def hidden(params, tokens, positions, config: Config, attend=causal, each=tokenwise, remat="none", dtype=jnp.float32):
    """The last hidden states [B, T, D], normed. `logits` or `loss` takes them from here.

    tokens: int [B, T]. positions: int32 [T], of each column in the original sequence: with a layout, in its order.
    attend: (q [B, T, N, H], k [B, T, K, H], v [B, T, K, H], positions) -> [B, T, N, H].
    each: how a function of single tokens is applied to all of them, see tokenwise.py.
    remat: what the backward pass finds of each layer, a name in REMAT. dtype: of the activations.
    """
    at = jnp.broadcast_to(positions, tokens.shape)
    each_of_layer = partial(each, dtype=dtype, chunk=None if remat == "none" else CHUNK)

    def layer(x, w):
        x = checkpoint_name(x, "layer_input")
        q, k, v = each_of_layer(partial(project, config), _pick(w, "attention_norm", "q", "k", "v"), (x,), (at,))
        attended = attend(q, k, v, positions)
        rest = _pick(w, "o", "ff_norm", "gate", "up", "down")
        return each_of_layer(partial(finish, config), rest, (x, attended)), None

    embed = lambda w, tokens: w["embed"][tokens].astype(dtype)
    x = each(embed, _pick(params, "embed"), (), (tokens,))  # [B, T, D]; its gradients add up in float32
    x, _ = jax.lax.scan(REMAT[remat](layer), x, params["layers"])
    return rms_norm(x, params["norm"], config.norm_eps)


def project(config, w, x, positions):
    """First half of a layer: (q [..., N, H], k [..., K, H], v [..., K, H]) of x [..., D], turned to positions [...]."""
    h = rms_norm(x, w["attention_norm"], config.norm_eps)
    q, k, v = (split(dense(h, w[name]), config.head_dim) for name in "qkv")
    cos, sin = rope(positions, config.head_dim, config.rope_theta, config.rope_scaling)  # [..., H / 2]
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish(config, w, x, attended):
    """Second half of a layer: x [..., D] plus what was attended [..., N, H], plus the feed-forward of that."""
    x = x + dense(attended.reshape(*x.shape[:-1], -1), w["o"])  # [..., N * H] -> [..., D]
    h = rms_norm(x, w["ff_norm"], config.norm_eps)
    return x + dense(jax.nn.silu(dense(h, w["gate"])) * dense(h, w["up"]), w["down"])  # [..., F] -> [..., D]


def dense(x, w):
    """x [..., D] times w [D, F]."""
    # Of two axes: contracting over (1, T), the gradient of w costs XLA on a CPU twice the time.
    return (x.reshape(-1, x.shape[-1]) @ w.astype(x.dtype)).reshape(*x.shape[:-1], -1)


def split(x, head_dim):
    """[..., N * H] -> [..., N, H]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def logits(params, h):
    """float32 [..., V] of hidden states [..., D]: for a few tokens at a time."""
    unembed = params["unembed"] if "unembed" in params else params["embed"].T
    return jnp.matmul(h, unembed.astype(h.dtype), preferred_element_type=jnp.float32)


def loss(params, h, targets, each=tokenwise, chunk=1024):
    """Mean cross-entropy in nats of hidden states h [B, T, D] against int targets [B, T]; negative ones do not count.

    Never more than [chunk, V] logits exist on a device, and each once: gradients are found with the loss.
    """

    def surprise(w, h, t):
        z = logits(w, h)
        true = jnp.take_along_axis(z, jnp.maximum(t, 0)[..., None], -1)[..., 0]
        return jnp.where(t < 0, 0.0, jax.nn.logsumexp(z, -1) - true)

    unembed = _pick(params, "unembed" if "unembed" in params else "embed")
    total = each(surprise, unembed, (h,), (targets,), dtype=h.dtype, chunk=chunk, total=True)
    return jnp.sum(total) / jnp.sum(targets >= 0)


def _pick(w, *names):
    return {name: w[name] for name in names}


def new_cache(config: Config, batch: int, length: int, dtype=jnp.float32):
    """Keys and values of `length` tokens, [L, B, length, K, H] each."""
    shape = config.layers, batch, length, config.kv_heads, config.head_dim
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def extend(params, cache, tokens, start, config: Config):
    """(logits [B, V] after the last of the tokens, cache with them in it).

    tokens: int [B, T], at positions start ... start + T - 1. start: int32 scalar, traced: one compilation for each T.
    What the cache holds beyond is never seen: a slot is its position, and attention is causal.
    """
    slots = jnp.arange(cache["k"].shape[2], dtype=jnp.int32)
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def layer(x, xs):
        w, keys, values = xs
        q, k, v = project(config, w, x, positions)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), start, axis=1)
        mask = ringtide.Causal()
        out = ringtide.attention(q, keys, values, mask=mask, q_positions=positions, kv_positions=slots)
        return finish(config, w, x, out), (keys, values)

    x = params["embed"].astype(cache["k"].dtype)[tokens]
    x, (keys, values) = jax.lax.scan(layer, x, (params["layers"], cache["k"], cache["v"]))
    h = rms_norm(x[:, -1], params["norm"], config.norm_eps)
    return logits(params, h), {"k": keys, "v": values}
