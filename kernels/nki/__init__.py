"""Trainium2: kernels in NKI, and the simulator that runs them where there is none."""
