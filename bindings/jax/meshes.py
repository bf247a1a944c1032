"""How arrays lie over a device mesh: what the ops do so that jit, shard_map and explicit sharding all take them."""

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def vary_alike(*trees):
    """Under shard_map: all arrays, marked as varying over each mesh axis that one varies over, as loops want it."""
    leaves, structure = jax.tree.flatten(trees)
    varying = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    every = frozenset().union(*varying)
    alike = [
        lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, alike)


def auto(f, like, *out_axes):
    """f, compiled with automatic sharding also where the axes of the mesh are explicit.

    like: an argument of f. out_axes: for each output, the axis of `like` that each of its axes is sharded as, or None.
    """
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return f
    spec = tuple(sharding.spec) + (None,) * (like.ndim - len(sharding.spec))
    return jax.sharding.auto_axes(
        f, out_sharding=tuple(P(*(axis if axis is None else spec[axis] for axis in axes)) for axes in out_axes)
    )


def place(x, mesh, spec):
    """x, sharded over `mesh` as `spec` says, traced or not."""
    sharding = NamedSharding(mesh, spec)
    if not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)
    return jax.reshard(x, sharding) if is_explicit(mesh) else lax.with_sharding_constraint(x, sharding)


def is_explicit(mesh):
    return AxisType.Explicit in mesh.axis_types
