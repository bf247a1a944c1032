"""GLA for JAX by the kernels for Trainium2: on the device where the package nki is, else in the simulator on the host.

The simulated kernels run inside `jax.pure_callback`, so under jit, grad, vmap and shard_map; slowly, for correctness.
On a device a kernel is called with JAX's arrays, as its documentation says, on as many physical cores as the compiler
takes for a logical one; that has not been run here.
"""

import functools
import os

import jax
import numpy as np

from ringtide.jax import meshes
from ringtide.kernels.nki import backend, ops

SIMULATED = getattr(backend.nki, "__is_simulator__", False)


def forward(q, k, v, g, h0, *, scale):
    """As kernels/xla/gla.py: (o [B, T, N, V] in v.dtype, the final state [B, N, K, V] float32)."""
    return _call(functools.partial(ops.forward, scale=scale), (v, h0), q, k, v, g, h0)


def backward(q, k, v, g, h0, do, dhT, *, scale):
    """As kernels/xla/gla.py: (dq, dk, dv, dg, dh0)."""
    return _call(functools.partial(ops.backward, scale=scale), (q, k, v, g, h0), q, k, v, g, h0, do, dhT)


def decode_step(q, k, v, g, state, slot_ids, has_initial_state, *, scale):
    """As kernels/xla/gla.py: (out [B, N, V] in v.dtype, state). It turns the whole pool round and back, which a serving
    stack spares itself: ops.to_pool once, then ops.decode_pool."""
    args = q, k, v, g, state, slot_ids, has_initial_state
    return _call(functools.partial(ops.decode_step, scale=scale), (v, state), *args)


def _call(function, like, *args):
    """function(*args), whose results are arrays such as those of `like`."""
    if not SIMULATED:
        return function(*args, lnc=int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")))
    args = meshes.vary_alike(*args)
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like)
    on_host = lambda *args: function(*jax.tree.map(np.asarray, args))
    results = jax.pure_callback(on_host, results, *args, vmap_method="sequential")
    return meshes.vary_alike(args[0], *results)[1:]  # a callback's results pass for the same on all devices
