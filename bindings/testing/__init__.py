"""Fuzzing as a product: hold a function, ours or yours, to the float64 truth.

    from ringtide.testing import check
    assert check(my_attention, "attention", masks=("Causal()",), without=("sinks", "segments"))

One room a thing: `cases` (what is drawn), `bounds` (what may differ, and how a difference is shown), `trial` with
`attention` and `gla` (what must hold), `run` (calling the function), `sharded` (calling one that takes a mesh), `fuzz`
(drawing, shrinking, reporting).
"""

from ringtide.testing.cases import MASKS, AttentionCase, GLACase, attention_cases, gla_cases, parse
from ringtide.testing.fuzz import Failure, Report, check

__all__ = [
    "MASKS",
    "AttentionCase",
    "Failure",
    "GLACase",
    "Report",
    "attention_cases",
    "check",
    "gla_cases",
    "parse",
]
