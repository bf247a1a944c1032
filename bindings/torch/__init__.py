"""The ops for PyTorch: shape checks, dispatch, autograd. The work is done in ringtide.kernels."""

from ringtide.torch.gla import chunk_gla, fused_recurrent_gla, gla, gla_decode_step, gla_decode_step_
from ringtide.torch.pool import StatePool

__all__ = ["StatePool", "chunk_gla", "fused_recurrent_gla", "gla", "gla_decode_step", "gla_decode_step_"]
