"""Test settings: eight CPU devices, and hypothesis profiles dev (default), ci (derandomised) and fuzz."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from hypothesis import settings

settings.register_profile("dev", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=25, derandomize=True)
settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else os.environ.get("HYPOTHESIS_PROFILE", "dev"))
