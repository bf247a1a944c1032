"""Tensors as NumPy arrays and back. NumPy has no bfloat16 of its own: ml_dtypes gives it one."""

import ml_dtypes
import numpy as np
import torch


def to_numpy(x):
    """A NumPy array of what x holds, on the host."""
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def to_torch(x):
    """A tensor with a copy of x."""
    x = np.array(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
