"""`ringtide doctor`: needs nothing but the core dependencies, and changes nothing."""

import json
import platform
import sys
from importlib import metadata

import click

# name on PyPI -> what it is for; the core ones first
_LIBRARIES = {
    "numpy": "core",
    "jax": "core",
    "jaxlib": "core",
    "click": "core",
    "hypothesis": "fuzz",
    "optax": "train",
    "orbax-checkpoint": "train",
    "safetensors": "train, weights",
    "tokenizers": "--tokenizer",
    "rich": "train",
    "matplotlib": "train",
    "torch": "ringtide.torch",
    "jax-triton": "triton",
    "libtpu": "tpu",
    "nki": "nki",
}
# what each backend belongs to, and what it runs on
_BACKENDS = {
    "xla": ("JAX", "any device that JAX has"),
    "pallas": ("JAX", "TPU, and any device in interpret mode"),
    "triton": ("JAX", "NVIDIA GPU, jax-triton"),
    "nki": ("JAX", "Trainium2, and any CPU in a simulator"),
    "eager": ("PyTorch", "any device that PyTorch has"),
}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def command(as_json):
    """What is installed, which backends can run here, and why others cannot."""
    report = {
        "ringtide": metadata.version("ringtide"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        **_devices(),
    }
    report["backends"] = _backends(report)
    healthy = "error" not in report
    click.echo(json.dumps(report) if as_json else _text(report))
    sys.exit(0 if healthy else 1)


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices():
    """{"devices": [...]}, with {"error": ...} when JAX does not start."""
    try:
        import jax

        return {"devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]}
    except Exception as error:  # whatever is wrong with an installation is what a doctor is for
        return {"devices": [], "error": f"jax does not start: {' '.join(str(error).split())}"}


def _backends(report):
    """{backend: {"runs": bool, "ops": [...], "why": str}}."""
    tables, missing = [], {}
    if "error" in report:
        missing["JAX"] = report["error"]
    else:
        from ringtide.jax.dispatch import KERNELS

        tables.append(KERNELS)
    try:
        import torch  # noqa: F401
    except Exception as error:  # not installed, or broken
        missing["PyTorch"] = f"PyTorch does not start: {' '.join(str(error).split())}"
    else:
        from ringtide.torch.ops import NAMES

        tables.append({"gla": NAMES})
    found = {}
    for name, (framework, needs) in _BACKENDS.items():
        ops = sorted({op for table in tables for op, kernels in table.items() if name in kernels})
        why = f"runs on {needs}" if ops else missing.get(framework, f"not in this release (will need: {needs})")
        found[name] = {"runs": bool(ops), "ops": ops, "why": why}
    return found


def _text(report):
    lines = [f"ringtide {report['ringtide']}, Python {report['python']}, {report['platform']}", "", "Libraries"]
    for name, purpose in _LIBRARIES.items():
        lines.append(f"  {name:18}{report['libraries'][name] or 'not installed':16}{purpose}")
    lines += ["", "Devices", *(f"  {device}" for device in report["devices"])]
    lines += [f"  {report['error']}"] if "error" in report else []
    lines += ["", "Backends"]
    for name, backend in report["backends"].items():
        state = f"yes: {', '.join(backend['ops'])}" if backend["runs"] else "no"
        lines.append(f"  {name:10}{state:22}{backend['why']}")
    return "\n".join(lines)
