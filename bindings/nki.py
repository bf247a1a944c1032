"""`ringtide.nki`: kernels for Trainium2 on this CPU, and what they would cost there. Imports no framework."""

from ringtide.kernels.nki.simulator.external import external
from ringtide.kernels.nki.simulator.launch import Run, jit, simulate
from ringtide.kernels.nki.simulator.lint import check as lint
from ringtide.kernels.nki.simulator.orders import shuffled
from ringtide.kernels.nki.simulator.schedule import critical_path, times, trace

__all__ = ["Run", "critical_path", "external", "jit", "lint", "shuffled", "simulate", "times", "trace"]
