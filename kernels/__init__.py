"""Kernels: one folder a backend, one file a kernel. They know nothing of the bindings."""

if __name__ == "kernels":
    raise ImportError("import it as `ringtide.kernels`: run `pip install -e .` in the root of the checkout first")
