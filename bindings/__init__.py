"""ringtide: long-context attention and gated linear attention, each op held to a float64 truth.

Names are looked up lazily: `import ringtide` imports no framework, `ringtide.attention` imports JAX.
"""

from importlib import import_module

_HOME = {
    "attention": "ringtide.jax",
    "gla": "ringtide.jax",
    "gla_decode_step": "ringtide.jax",
    "context_parallel_attention": "ringtide.jax",
    "explain": "ringtide.jax.explain",
    "shard_sequence": "ringtide.jax",
    "unshard_sequence": "ringtide.jax",
    "Full": "ringtide.kernels.masks",
    "Causal": "ringtide.kernels.masks",
    "Local": "ringtide.kernels.masks",
    "Chunked": "ringtide.kernels.masks",
}
_MODULES = ("testing", "models", "nki", "torch")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"ringtide.{name}")
    raise AttributeError(f"module 'ringtide' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__():
    return sorted([*globals(), *__all__])
