"""Where a Pallas kernel runs: compiled by Mosaic for a TPU, interpreted elsewhere; under vmap and shard_map alike.

A call is one primitive, whose kernel is traced only when it is lowered, and only for the platform that it is lowered
for. So an op that offers the kernel beside another (`lax.platform_dependent`) costs nothing where that is chosen, and
the kernel knows what it is compiled for when it chooses its tiles. The types of `shard_map` stay outside: JAX's
interpreter of kernels does not keep them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringtide.kernels.pallas.tiles import INTERPRET


def run(kernel, interpret, shapes, *args):
    """kernel(interpret, chip's name, TensorCores a device, *args) on the platform that is compiled for.

    args: arrays [B, ...], or trees of them. int32 arrays may be [1, ...], for all of B. interpret: True, or how else to
    interpret, where there is no TPU. shapes: a (shape, dtype) for each of the arrays [B, ...] that the kernel returns.
    """
    leaves, structure = jax.tree.flatten(args)
    call = lambda *where: lambda *leaves: kernel(*where, *structure.unflatten(leaves))
    if interpret is not True:  # an interpreter with effects, which the primitive has not
        branches = {"tpu": call(False, *chip()), "default": call(interpret, INTERPRET, 1)}
        return lax.platform_dependent(*leaves, **branches)
    outs = tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in shapes)
    return tuple(_kernel.bind(*leaves, call=call, interpret=interpret, outs=outs))


def chip():
    """(name, TensorCores a device) of the TPU compiled for, or ("unknown", 1), as for `jax.export` without a device."""
    try:
        info = pltpu.get_tpu_info()
    except Exception:  # no TPU in sight: jax raises one of several
        return "unknown", 1
    return info.chip_version.name.removeprefix("TPU_").lower(), info.num_cores


_kernel = Primitive("kernel")
_kernel.multiple_results = True
_kernel.def_impl(lambda *args, **how: jax.jit(lambda *args: _kernel.bind(*args, **how))(*args))


@_kernel.def_abstract_eval
def _abstract(like, *avals, call, interpret, outs):
    spec = lambda shape: like.sharding.update(spec=jax.P(*[None] * len(shape)))
    return [like.update(shape=s, dtype=d, weak_type=False, sharding=spec(s)) for s, d in outs]


def _lower(on_tpu, ctx, *args, call, interpret, outs):
    where = (False, *chip()) if on_tpu else (interpret, INTERPRET, 1)
    nowhere = ShapedArray((), jnp.float32).manual_axis_type
    bare = lambda avals: [x.update_manual_axis_type(nowhere) for x in avals]
    ctx = ctx.replace(avals_in=bare(ctx.avals_in), avals_out=bare(ctx.avals_out))
    return mlir.lower_fun(call(*where), multiple_results=True)(ctx, *args)


def _batch(args, axes, *, call, interpret, outs):
    """vmap joins its axis to B, instead of to the kernel's grid."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    batch = outs[0][0][0]

    def join(x, axis):
        if axis is None:
            if x.dtype == jnp.int32 and x.shape[0] == 1:
                return x
            x = jnp.broadcast_to(x, (size, *x.shape))
        else:
            x = jnp.moveaxis(x, axis, 0)
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(-1, *x.shape[2:])

    joined = tuple(((size * batch, *shape[1:]), dtype) for shape, dtype in outs)
    results = _kernel.bind(*map(join, args, axes), call=call, interpret=interpret, outs=joined)
    return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)


def _jvp(primals, tangents, *, outs, **how):
    """Fails when lowered, not here: under `lax.platform_dependent` another kernel may be the one that is lowered."""
    return _kernel.bind(*primals, outs=outs, **how), _tangents.bind(*primals, outs=outs)


def _lower_tangents(ctx, *args, **how):
    raise NotImplementedError(
        'a Pallas kernel is differentiable by jax.grad or jax.vjp, once: use implementation="xla" for forward mode '
        "and for second derivatives"
    )


_tangents = Primitive("kernel_tangents")
_tangents.multiple_results = True
_tangents.def_abstract_eval(lambda *avals, outs: _abstract(*avals, call=None, interpret=None, outs=outs))
mlir.register_lowering(_tangents, _lower_tangents)
ad.primitive_jvps[_kernel] = _jvp
mlir.register_lowering(_kernel, lambda *args, **how: _lower(False, *args, **how))
mlir.register_lowering(_kernel, lambda *args, **how: _lower(True, *args, **how), platform="tpu")
batching.primitive_batchers[_kernel] = _batch
