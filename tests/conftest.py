"""Test settings: eight CPU devices, and hypothesis profiles dev (default), ci (derandomised) and fuzz."""

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from hypothesis import settings

settings.register_profile("dev", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=25, derandomize=True)
settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def tpu_compiler(monkeypatch):
    """libtpu beside others of its kind, on a machine without a TPU; what needs it is skipped where it is missing."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    from ringtide.bench.compile import environment

    for name, value in environment("").items():
        monkeypatch.setenv(name, value)
