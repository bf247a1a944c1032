"""Portable JAX: runs on any backend in O(T) memory, the default on a CPU."""
