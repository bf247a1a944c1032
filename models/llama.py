"""Llama 3.1 in plain JAX: the parameters are a dict, the model is a function.

    x = embed[tokens]
    every layer:  x += attention(norm(x)) Wo        grouped queries, rotary positions
                  x += (silu(h Wg) * (h Wu)) Wd     h = norm(x)
    logits = norm(x) unembed

What attends is an argument, so the same lines run on one device, over a ring of devices, or with a cache. Letters:
B batch, T time, D model, N query heads, K key and value heads, H head_dim, F feed-forward, V vocabulary, L layers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import ringtide
from ringtide.models.rope import Scaling, check_number, rope, rotate


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
}


def shapes(config: Config) -> dict:
    """The shape of every parameter, as the pytree that `init` and `weights.load` return."""
    c, L = config, config.layers
    tree = {
        "embed": (c.vocab_size, c.dim),
        "layers": {
            "attention_norm": (L, c.dim),
            "q": (L, c.dim, c.heads, c.head_dim),
            "k": (L, c.dim, c.kv_heads, c.head_dim),
            "v": (L, c.dim, c.kv_heads, c.head_dim),
            "o": (L, c.heads, c.head_dim, c.dim),
            "ff_norm": (L, c.dim),
            "gate": (L, c.dim, c.ff_dim),
            "up": (L, c.dim, c.ff_dim),
            "down": (L, c.ff_dim, c.dim),
        },
        "norm": (c.dim,),
    }
    return tree if c.tied else tree | {"unembed": (c.dim, c.vocab_size)}


def init(seed: int, config: Config) -> dict:
    """Random float32 parameters, in NumPy (nothing to compile): norms are 1, matrices normal with deviation
    1 / sqrt(fan_in), those that add to x scaled down by sqrt(2 L), the embedding 0.02.
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
            return np.ones(shape, np.float32)
        return random.standard_normal(shape, np.float32) * np.float32(scale[name])

    return jax.tree.map_with_path(draw, shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def rms_norm(x, weight, eps):
    """x [..., D] over its root mean square, in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype) * weight.astype(x.dtype)


def causal(q, k, v, positions):
    """The default `attend`: plain causal attention on one device. q [B, T, N, H], k and v [B, T, K, H]."""
    return ringtide.attention(q, k, v, mask=ringtide.Causal(), q_positions=positions, kv_positions=positions)


def hidden(params, tokens, positions, config: Config, attend=causal, remat=False, dtype=jnp.float32):
    """The last hidden states [B, T, D], normed. `logits` or `loss` takes them from here.

    tokens: int [B, T]. positions: int32 [T], of each column in the original sequence: with a layout, in its order.
    attend: (q [B, T, N, H], k [B, T, K, H], v [B, T, K, H], positions) -> [B, T, N, H].
    remat: recompute each layer in the backward pass, which then holds one [B, T, D] a layer. dtype: of the activations.
    """
    cos, sin = rope(positions[None], config.head_dim, config.rope_theta, config.rope_scaling)  # [1, T, H / 2]

    def layer(x, w):
        q, k, v = project(x, w, cos, sin, config)
        return finish(x, attend(q, k, v, positions), w, config), None

    x = params["embed"].astype(dtype)[tokens]  # [B, T, D]
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
    return rms_norm(x, params["norm"], config.norm_eps)


def project(x, w, cos, sin, config):
    """First half of a layer: (q [B, T, N, H], k [B, T, K, H], v [B, T, K, H]), rotated."""
    h = rms_norm(x, w["attention_norm"], config.norm_eps)
    q, k, v = (split(dense(h, w[name].reshape(config.dim, -1)), config.head_dim) for name in "qkv")
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish(x, attended, w, config):
    """Second half of a layer: x [B, T, D] plus what was attended [B, T, N, H], plus the feed-forward of that."""
    x = x + dense(attended.reshape(*x.shape[:2], -1), w["o"].reshape(-1, config.dim))  # [B, T, N * H] -> [B, T, D]
    h = rms_norm(x, w["ff_norm"], config.norm_eps)
    return x + dense(jax.nn.silu(dense(h, w["gate"])) * dense(h, w["up"]), w["down"])  # [B, T, F] -> [B, T, D]


def dense(x, w):
    """x [B, T, D] times w [D, F]."""
    w = w.astype(x.dtype)
    # A batch of one is left out: contracting over (1, T), the gradient of w costs XLA on a CPU twice the time.
    return (x[0] @ w)[None] if x.shape[0] == 1 else x @ w


def split(x, head_dim):
    """[B, T, N * H] -> [B, T, N, H]."""
    return x.reshape(*x.shape[:2], -1, head_dim)


def logits(params, h):
    """float32 [..., V] of hidden states [..., D]: for a few tokens at a time."""
    unembed = params["unembed"] if "unembed" in params else params["embed"].T
    return jnp.matmul(h, unembed.astype(h.dtype), preferred_element_type=jnp.float32)


def loss(params, h, targets, chunk=1024, shards=1):
    """Mean cross-entropy in nats of hidden states h [B, T, D] against int targets [B, T]; negative ones do not count.

    Never more than [B, shards, chunk, V] logits exist: the backward pass computes each chunk's again. `shards`: over
    how many devices T is split; a chunk takes tokens from every one of them, so that none has to move.
    """
    B, T, D = h.shape
    local = T // shards
    chunks = -(-local // chunk)
    short = chunks * chunk - local if chunks > 1 else 0  # padding, where the chunk does not divide
    h = jnp.pad(h.reshape(B, shards, local, D), ((0, 0), (0, 0), (0, short), (0, 0)))
    t = jnp.pad(targets.reshape(B, shards, local), ((0, 0), (0, 0), (0, short)), constant_values=-1)
    h = jnp.moveaxis(h.reshape(B, shards, chunks, -1, D), 2, 0)  # [chunks, B, shards, chunk, D]
    t = jnp.moveaxis(t.reshape(B, shards, chunks, -1), 2, 0)  # [chunks, B, shards, chunk]

    @jax.checkpoint
    def piece(total, xs):
        h, t = xs
        z = logits(params, h)
        true = jnp.take_along_axis(z, jnp.maximum(t, 0)[..., None], -1)[..., 0]
        return total + jnp.sum(jnp.where(t < 0, 0.0, jax.nn.logsumexp(z, -1) - true)), None

    return jax.lax.scan(piece, jnp.float32(0), (h, t))[0] / jnp.sum(targets >= 0)


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
    cos, sin = rope(positions[None], config.head_dim, config.rope_theta, config.rope_scaling)

    def layer(x, xs):
        w, keys, values = xs
        q, k, v = project(x, w, cos, sin, config)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(keys.dtype), start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), start, axis=1)
        mask = ringtide.Causal()
        out = ringtide.attention(q, keys, values, mask=mask, q_positions=positions, kv_positions=slots)
        return finish(x, out, w, config), (keys, values)

    x = params["embed"].astype(cache["k"].dtype)[tokens]
    x, (keys, values) = jax.lax.scan(layer, x, (params["layers"], cache["k"], cache["v"]))
    h = rms_norm(x[:, -1], params["norm"], config.norm_eps)
    return logits(params, h), {"k": keys, "v": values}
