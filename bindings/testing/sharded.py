"""A context-parallel op seen as an op on whole sequences of any length, so that the same properties apply to it."""

import functools
import itertools
import math
import random

from ringtide.kernels import layouts

WAYS = (  # strategy, bidirectional, devices along the axes
    *itertools.product(["all_gather", "ring", "ulysses"], [False], [(1,), (2,), (3,), (4,), (8,)]),
    *itertools.product(["ring"], [True], [(2,), (3,), (4,), (8,)]),
    *itertools.product(["usp"], [False, True], [(1, 3), (2, 2), (3, 1), (4, 2), (2, 4)]),
)


def drawn(context_parallel_attention):
    """`whole`, in a way that is drawn from the shapes of a call: strategy, layout, devices. The same shapes, the same,
    of as many devices as there are.

    The function's `way(case)` says which it is for an AttentionCase.
    """
    of = functools.cache(lambda how: whole(context_parallel_attention, **dict(how)))

    def draw(*shape):
        import jax

        rng = random.Random(repr(shape))
        at_hand = len(jax.devices())
        strategy, bidirectional, devices = rng.choice([way for way in WAYS if math.prod(way[2]) <= at_hand])
        how = {
            "strategy": strategy,
            "bidirectional": bidirectional,
            "devices": devices,
            "layout": rng.choice(layouts.LAYOUTS),
        }
        return tuple(how.items())

    def attention(q, k, v, **options):
        return of(draw(*q.shape, *k.shape[1:3], v.shape[3]))(q, k, v, **options)

    attention.way = lambda case: dict(draw(case.B, case.T, case.N, case.H, case.S, case.N_kv, case.H_v))
    return attention


def whole(context_parallel_attention, *, layout="zigzag", devices=(4,), **how):
    """`context_parallel_attention` with the signature of `ringtide.attention`.

    Pads time to what the layout needs (padding tokens belong to no segment), puts it in layout order, and undoes both.
    devices: so many of those at hand, along one axis of a mesh or two.  how: further keywords, such as strategy.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    shards, axes = math.prod(devices), ("ulysses", "context")[-len(devices) :]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]).reshape(devices), axes)
    sharded = functools.partial(context_parallel_attention, mesh=mesh, seq_axis=axes, layout=layout, **how)

    class Side:
        """Queries or keys: T tokens on their way to layout order, and back."""

        def __init__(self, length):
            multiple = layouts.multiple(layout, shards)
            self.length, self.padded = length, -(-length // multiple) * multiple
            self.order = layouts.position_of(np.arange(self.padded), layout, self.padded, shards)

        def there(self, x, axis=1, fill=0):
            axis %= x.ndim
            pad = [(0, self.padded - self.length) if a == axis else (0, 0) for a in range(x.ndim)]
            return jnp.take(jnp.pad(x, pad, constant_values=fill), self.order, axis=axis)

        def back(self, x):
            return jnp.take(x, np.argsort(self.order), axis=1)[:, : self.length]

    def attention(q, k, v, *, mask=None, segment_ids=None, q_positions=None, kv_positions=None, sinks=None, **options):
        """options: scale, logits_soft_cap, return_lse, as they are."""
        queries, keys = Side(q.shape[1]), Side(k.shape[1])
        if segment_ids is None and (queries.padded, keys.padded) != (queries.length, keys.length):
            segment_ids = tuple(jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k))
        if segment_ids is not None:
            q_ids, k_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
            options["segment_ids"] = queries.there(q_ids, fill=-1), keys.there(k_ids, fill=-1)
        if q_positions is not None:
            options |= {"q_positions": queries.there(q_positions, -1), "kv_positions": keys.there(kv_positions, -1)}
        if mask is not None and not callable(mask):
            mask = keys.there(queries.there(mask, -2), -1)
        result = sharded(queries.there(q), keys.there(k), keys.there(v), mask=mask, sinks=sinks, **options)
        return jax.tree.map(queries.back, result)

    return attention
