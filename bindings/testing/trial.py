"""A recipe on trial: what is the same for every op."""

from functools import cached_property
from typing import ClassVar

from ringtide.testing.bounds import Claim
from ringtide.testing.cases import np_dtype


class Trial:
    """One recipe, its arrays, truth and bounds, and the results of the function under test.

    A subclass names the arrays and gives `arrays(case)`, `solve(case, a)` and `bounds` (result -> Bound).
    """

    inputs: ClassVar[tuple]  # what the results are differentiable in
    others: ClassVar[tuple]
    cotangents: ClassVar[dict]  # output -> the array that is its cotangent
    single: ClassVar[tuple]  # results in float32 whatever the dtype of the recipe

    def __init__(self, case, run):
        self.case, self._run, self.a = case, run, self.arrays(case)

    def run(self, a, case=None) -> dict:
        inputs, others = ({name: a[name] for name in names if name in a} for names in (self.inputs, self.others))
        cotangents = {output: a[name] for output, name in self.cotangents.items()}
        outputs, grads = self._run((case or self.case).static, inputs, others, cotangents)
        return outputs | {f"d{name}": x for name, x in (grads or {}).items()}

    @cached_property
    def got(self):
        return self.run(self.a)

    @cached_property
    def truth(self):
        return self.solve(self.case, self.a)

    def claim(self, name, got, want=None, where=None, factor=1):
        """The result `name` equals the truth (or `want`) within its bound."""
        want = self.truth[name] if want is None else want
        return Claim(name, got[name], want, self.bounds[name] * factor, where)


def values(t):
    """Every result equals the float64 truth; dtypes and shapes are those of the contract."""
    for name, x in t.got.items():
        dtype, shape = np_dtype("float32" if name in t.single else t.case.dtype), t.truth[name].shape
        if x.shape != shape or x.dtype != dtype:
            raise AssertionError(f"{name} is {x.dtype} {list(x.shape)}, not {dtype} {list(shape)}")
    for name in t.got:
        yield t.claim(name, t.got)
