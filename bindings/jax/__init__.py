"""The ops for JAX: shape checks, dispatch, autograd, shard_map. The work is done in ringtide.kernels."""

from ringtide.jax.attention import attention
from ringtide.jax.context_parallel import context_parallel_attention, shard_sequence, unshard_sequence
from ringtide.jax.gla import gla, gla_decode_step

__all__ = [
    "attention",
    "context_parallel_attention",
    "gla",
    "gla_decode_step",
    "shard_sequence",
    "unshard_sequence",
]
