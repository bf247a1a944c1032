"""Compiles for a TPU that is not there, by the real compiler (libtpu from PyPI), and lends out its dump.

libtpu reads its flags once, when it is loaded; so a compile with a dump gets a process of its own:

    with dumped("v5p", "ringtide.bench.peers:jax_splash", {...}) as (facts, folder):
        kernel = schedule.read(folder, ".*splash.*", "v5p")

The child (`python -m ringtide.bench.compile`) takes one JSON object on standard input and prints one. It may be another
interpreter: ours, jax's and tokamax's kernels are compared in one environment, by one compiler. `ask` has a child call
any function that needs the TPU compiler.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec

from ringtide.bench.chips import CHIPS

_PASSES = ".*(final|pre-delay|static).*"
_MISSING = "libtpu, the TPU compiler, is not installed: pip install 'ringtide[tpu]'"


class CompileError(RuntimeError):
    """One line: what the compiler could not do."""


@contextmanager
def dumped(chip, build, arguments, *, python=None, flags=""):
    """Compiles what `build` ("module:function") makes of the dict `arguments`.

    Gives (facts, folder of the dump, deleted at exit). The function returns (fn, inputs as ShapeDtypeStructs, facts: a
    dict that JSON holds); "compile_s" (tracing and lowering too) and "temp_bytes" (HBM beside inputs and outputs) are
    added. python: another interpreter. flags: more for libtpu. Raises CompileError.
    """
    with tempfile.TemporaryDirectory(prefix="ringtide-schedule-") as folder:
        spec = {"chip": chip, "build": build, "arguments": arguments}
        yield ask("ringtide.bench.compile:facts_of", spec, python=python, flags=f"{dump_to(folder)} {flags}"), folder


def dump_to(folder):
    """The flags that have libtpu write what schedule.py reads."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={_PASSES}"


def ask(function, arguments, *, python=None, flags=""):
    """What `function` ("module:name") makes of the dict `arguments`, as JSON, in a process that may compile for TPUs.

    Raises CompileError, one line, where it fails.
    """
    done = subprocess.run(
        [python or sys.executable, "-P", "-m", "ringtide.bench.compile"],
        input=json.dumps({"function": function, "arguments": arguments}),
        env={**os.environ, **environment(flags)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CompileError(_reason(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def facts_of(chip, build, arguments):
    """What `dumped` gives beside the dump."""
    fn, inputs, facts = _function(build)(**arguments)
    start = time.perf_counter()
    compiled = compile_for(chip, fn, *inputs)
    facts["compile_s"] = time.perf_counter() - start
    facts["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    return facts


def compile_for(chip, fn, *inputs):
    """`jax.stages.Compiled` of fn(*inputs) for one device of `chip`. Lowered with the chip's own facts in view."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if find_spec("libtpu") is None:
        raise CompileError(_MISSING)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology)
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # or pltpu.get_tpu_info() sees a CPU
        return jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*inputs).compile()


def environment(flags):
    """For libtpu without a TPU, beside other processes that load it; the flags of the user's own runs do not count."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": flags.strip(),
    }


def _reason(stderr):
    """The line of a traceback that says why."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Refused)\b.*: ", line)]
    line = (errors or lines or ["the compiler was killed (out of memory?)"])[-1]
    frame = (
        r"^(?:[\w.]*\.)?(?:CompileError|JaxRuntimeError): (?:RESOURCE_EXHAUSTED: XLA:TPU compile permanent error\. )?"
    )
    return re.sub(frame, "", line)[:400]


def _function(name):
    module, name = name.split(":")
    return getattr(importlib.import_module(module), name)


def _main():
    spec = json.load(sys.stdin)
    print(json.dumps(_function(spec["function"])(**spec["arguments"])))


if __name__ == "__main__":
    _main()
