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


def runner(apply, gradients: bool, framework: str = "jax"):
    """Turns apply(static, inputs, others) -> outputs into run(..., cotangents) -> (outputs, gradients | None).

    static is hashable; inputs and outputs are dicts of arrays, outputs differentiable in inputs. With gradients, apply
    is a function of `framework`; JAX compiles it once for each `static` (and shape), with its VJP. Without, it is
    called as it is.
    """
    return _FRAMEWORKS[framework](apply) if gradients else _plain(apply)


def stepper(decode_step, framework: str = "jax"):
    """scale -> the decode step as a function of NumPy arrays."""

    @functools.cache
    def of(scale):
        step = functools.partial(decode_step, **({} if scale is None else {"scale": scale}))
        return _jit(step) if framework == "jax" else _on_tensors(step)

    return of


def _plain(apply):
    def run(static, inputs, others, cotangents):
        return _numpy(apply(static, inputs, others)), None

    return run


def _jax(apply):
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


def _torch(apply):
    import torch

    from ringtide.torch.arrays import to_numpy, to_torch

    def run(static, inputs, others, cotangents):
        inputs = {name: to_torch(x).requires_grad_() for name, x in inputs.items()}
        outputs = apply(static, inputs, {name: to_torch(x) for name, x in others.items()})
        cotangents = [to_torch(cotangents[name]).to(x.dtype) for name, x in outputs.items()]
        grads = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
        outputs = {name: to_numpy(x) for name, x in outputs.items()}
        return outputs, {name: to_numpy(x) for name, x in zip(inputs, grads, strict=True)}

    return run


_FRAMEWORKS = {"jax": _jax, "torch": _torch}


def _jit(step):
    import jax

    return jax.jit(step)


def _on_tensors(step):
    from ringtide.torch.arrays import to_numpy, to_torch

    def run(*args, **options):
        return map(to_numpy, step(*map(to_torch, args), **{name: to_torch(x) for name, x in options.items()}))

    return run


def _numpy(arrays):
    return {name: np.asarray(x) for name, x in arrays.items()}
