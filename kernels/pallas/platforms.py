"""Where a Pallas kernel runs: compiled by Mosaic for a TPU, interpreted elsewhere; under vmap and shard_map alike."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ringtide.kernels.pallas.tiles import INTERPRET


def run(kernel, interpret, *args):
    """kernel(interpret, chip's name, TensorCores a device, *args) on the platform that is compiled for.

    args: arrays [B, ...], or trees of them, or None. interpret: True, or how else to interpret, where there is no TPU.
    """
    varying = any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(args))
    elsewhere = lambda *args: kernel(interpret, INTERPRET, 1, *args)
    if varying and interpret is True:
        elsewhere = _unvarying(elsewhere)
    compiled = lambda *args: kernel(False, *chip(), *args)
    return _batched(lambda *args: lax.platform_dependent(*args, tpu=compiled, default=elsewhere))(*args)


def chip():
    """(name, TensorCores a device) of the TPU compiled for, or ("unknown", 1), as for `jax.export` without a device."""
    try:
        info = pltpu.get_tpu_info()
    except Exception:  # no TPU in sight: jax raises one of several
        return "unknown", 1
    return info.chip_version.name.removeprefix("TPU_").lower(), info.num_cores


def _batched(f):
    """f of arrays [B, ...] (or None), such that `jax.vmap` joins its axis to B instead of to the kernel's grid."""
    f = jax.custom_batching.custom_vmap(f)

    @f.def_vmap
    def rule(size, mapped, *args):
        batch = args[0].shape[int(mapped[0])]

        def join(x, on):
            if x.dtype == jnp.int32:  # positions and segment ids: [1, ...] stands for all sequences
                if not on and x.shape[0] == 1:
                    return x
                x = jnp.broadcast_to(x, (*x.shape[:on], batch, *x.shape[1 + on :]))
            x = x if on else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = f(*jax.tree.map(join, args, tuple(mapped)))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out), jax.tree.map(lambda _: True, out)

    return f


def _unvarying(f):
    """f, lowered as if it were outside of shard_map, whose types JAX's interpreter of kernels does not keep."""

    def call(*args):
        leaves, structure = jax.tree.flatten(args)
        outs, out_structure = jax.tree.flatten(jax.eval_shape(f, *args))
        flat = lambda *leaves: jax.tree.leaves(f(*structure.unflatten(leaves)))
        shapes = tuple((x.shape, x.dtype) for x in outs)
        return out_structure.unflatten(_hidden.bind(*leaves, f=flat, shapes=shapes))

    return call


_hidden = Primitive("interpreted_kernel")
_hidden.multiple_results = True


@_hidden.def_abstract_eval
def _(like, *avals, f, shapes):
    spec = lambda shape: like.sharding.update(spec=jax.P(*[None] * len(shape)))
    return [like.update(shape=s, dtype=d, weak_type=False, sharding=spec(s)) for s, d in shapes]


def _lower_hidden(ctx, *args, f, shapes):
    nowhere = ShapedArray((), jnp.float32).manual_axis_type
    bare = lambda avals: [x.update_manual_axis_type(nowhere) for x in avals]
    ctx = ctx.replace(avals_in=bare(ctx.avals_in), avals_out=bare(ctx.avals_out))
    return mlir.lower_fun(f, multiple_results=True)(ctx, *args)


mlir.register_lowering(_hidden, _lower_hidden)
