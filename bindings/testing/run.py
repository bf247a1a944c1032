"""Calling the function under test: NumPy arrays in and out, whatever it computes with."""

import functools
import inspect

import numpy as np

from ringtide.testing.cases import FEATURES


def keywords_missing(fn, op: str) -> set[str]:
    """The features whose keyword `fn` does not take."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin: trust it
        return set()
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return set()
    return {name for name, keyword in FEATURES[op].items() if keyword and keyword not in parameters}


def runner(apply, gradients: bool):
    """Turns apply(static, inputs, others) -> outputs into run(..., cotangents) -> (outputs, gradients | None).

    static is hashable; inputs and outputs are dicts of arrays, outputs differentiable in inputs. With gradients, apply
    is JAX: it is compiled once for each `static` (and shape), with its VJP. Without, it is called as it is.
    """
    if not gradients:

        def plain(static, inputs, others, cotangents):
            return _numpy(apply(static, inputs, others)), None

        return plain

    import jax

    @functools.cache
    def compiled(static):
        def both(inputs, others, cotangents):
            outputs, vjp = jax.vjp(lambda inputs: apply(static, inputs, others), inputs)
            # A cotangent has the dtype of its output; a wrong output dtype is reported by the caller.
            cotangents = {name: cotangents[name].astype(x.dtype) for name, x in outputs.items()}
            return outputs, vjp(cotangents)[0]

        return jax.jit(both)

    def run(static, inputs, others, cotangents):
        outputs, grads = compiled(static)(inputs, others, cotangents)
        return _numpy(outputs), _numpy(grads)

    return run


def _numpy(arrays):
    return {name: np.asarray(x) for name, x in arrays.items()}
