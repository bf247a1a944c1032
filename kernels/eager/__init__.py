"""Kernels in portable PyTorch: any device that torch runs on."""
