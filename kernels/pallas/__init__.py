"""Pallas kernels for TPU; on other platforms they run in interpret mode."""
