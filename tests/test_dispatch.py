"""Dispatch: names, sequences of names, refusals, and the choice by the platform that is compiled for."""

import types

import jax
import jax.numpy as jnp
import pytest

from ringtide.jax import dispatch


@pytest.fixture
def backends(monkeypatch):
    """Two made-up kernels of a made-up op: the portable one adds 1; "mosaic" adds 2, and refuses odd sizes."""
    portable = types.SimpleNamespace(forward=lambda x, *, by=1: x + by)
    mosaic = types.SimpleNamespace(
        forward=lambda x, *, by=1: x + 2 * by,
        refuses=lambda x, **_: "odd sizes are not served, xla serves them" if x.size % 2 else None,
    )
    modules = {"a": portable, "b": mosaic}
    monkeypatch.setattr(dispatch, "KERNELS", {"op": {"xla": "a", "mosaic": "b"}})
    monkeypatch.setattr(dispatch, "PREFERRED", {"op": {}})
    monkeypatch.setattr(dispatch, "import_module", modules.__getitem__)


@pytest.mark.usefixtures("backends")
class TestDispatch:
    even, odd = jnp.zeros(2), jnp.zeros(3)

    def call(self, implementation, x, **options):
        return dispatch.call("op", "forward", implementation, x, **options)[0]

    def test_by_name(self):
        assert self.call("xla", self.even) == 1
        assert self.call("mosaic", self.even, by=3) == 6

    def test_the_first_that_serves(self):
        assert self.call(("mosaic", "xla"), self.even) == 2
        assert self.call(["mosaic", "xla"], self.odd) == 1

    def test_an_explicit_choice_never_falls_back(self):
        with pytest.raises(NotImplementedError, match="mosaic: odd sizes are not served, xla serves them"):
            self.call("mosaic", self.odd)

    def test_names(self):
        assert dispatch.names("op", ["mosaic", "pallas"]) == ("mosaic", "pallas")
        with pytest.raises(ValueError, match="implementation: op has xla, mosaic, got 'cuda'"):
            dispatch.names("op", ("xla", "cuda"))

    def test_a_name_of_another_release_is_a_reason(self):
        assert self.call(("pallas", "xla"), self.even) == 1
        with pytest.raises(NotImplementedError, match="pallas: not in this release, which has xla, mosaic"):
            self.call("pallas", self.even)

    def test_by_the_platform_compiled_for(self, monkeypatch):
        monkeypatch.setitem(dispatch.PREFERRED["op"], "tpu", "mosaic")

        def lowered(platform, x):
            traced = jax.jit(lambda x: dispatch.call("op", "forward", None, x)).trace(x)
            return traced.lower(lowering_platforms=(platform,)).as_text()

        assert "2.0" in lowered("tpu", self.even)
        assert "2.0" not in lowered("cpu", self.even)
        assert "2.0" not in lowered("tpu", self.odd), "a kernel that refuses is not the default"
        assert self.call(None, self.even) == 1
