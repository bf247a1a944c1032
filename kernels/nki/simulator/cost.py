"""What an instruction costs: one table, an estimate each, tagged with where it is from.

Sources: "doc" is documented today, "old-doc" was documented once and withdrawn, "inferred" is our conclusion from
those, "unknown" is a placeholder of which nothing is known. None of it has been measured on a Trainium2.

Cycles are those that an instruction occupies its engine; the ~60 that its access to memory takes overlap with the
next one. Not in them: that the vector engine's fast modes stall GpSimd, and what a change of the scalar engine's
function costs. Of a DMA the transfer is priced, all sixteen queues together; the fixed latency of a dependent one,
and that of a semaphore between two engines, are constants for the schedule.
"""

CLOCK = {"PE": 2400.0, "DVE": 960.0, "ACT": 1200.0, "POOL": 1200.0}  # cycles a microsecond (doc)
ISSUE = 64  # cycles between two instructions of an engine, at least (doc: "roughly 64")
DMA_RATE = 368e3  # bytes a microsecond, sixteen queues at the practical 23 GB/s (doc)
DMA_ROW = 2048  # contiguous bytes from which a transfer runs at that rate; shorter ones in proportion (doc, inferred)
DMA_LATENCY = 1.3  # us from the semaphore to the start of the transfer (doc)
DMA_TRANSPOSE = {"hbm": 0.9, "sbuf": 0.5}  # part of the rate that a transposing one reaches, by its source (doc)
SYNC = 0.3  # us from the end of an instruction to the start of one on another engine that waits for it (inferred)
DYNAMIC = 600  # cycles between two instructions, at least, when an address comes from memory (old-doc)
STRIDE = 16  # bytes between neighbours in a row beyond which an engine's memory bandwidth halves (doc)


def _matmul(f):
    """Columns of the moving operand stream through; four passes of float32, two if one operand is only 0 and 1, or in a
    transpose."""
    passes = (2 if f.get("onezero") or f.get("transpose") else 4) if f.get("fp32") else 1
    return max(min(64, f["stationary"]), f["moving"]) * passes


def _two_inputs(f):
    """One element a cycle if one input comes from PSUM, or if both are bfloat16 and simply added; else half."""
    return f["n"] if f.get("light") else 2 * f["n"]


def _gather(f):
    """4 indices at a time take 28 cycles more than their elements; elements below 4 bytes pass several at once."""
    taken = f["each"] * 4
    return 150 + f["n"] * (28 + taken) / taken / min(4 / f["bytes"], f["each"])


def _elements(f):
    return f["n"]


# operation, or (operation, engine) -> (cycles from the facts, source). Never less than ISSUE, but on PE.
CYCLES = {
    "nc_matmul": (_matmul, "old-doc; halving by the hint: doc, as possible"),
    "nc_transpose": (_matmul, "old-doc; two passes of 32 bits: doc"),
    ("nc_transpose", "DVE"): (_elements, "old-doc"),
    "activation": (lambda f: f["n"] + ISSUE * f.get("readout", 0), "old-doc; reading the sums out: inferred"),
    "activation_reduce": (lambda f: f["n"] + ISSUE, "old-doc"),
    "tensor_tensor": (_two_inputs, "old-doc; all of 16 bits at twice the rate: doc"),
    ("tensor_tensor", "POOL"): (lambda f: 2 * f["n"], "unknown"),
    "tensor_scalar": (_elements, "old-doc"),
    ("tensor_scalar", "POOL"): (lambda f: 4 * f["n"], "doc: a quarter of the scalar engine's rate"),
    "scalar_tensor_tensor": (_two_inputs, "old-doc"),
    "tensor_tensor_scan": (lambda f: 2 * f["n"], "old-doc"),
    "tensor_reduce": (_elements, "old-doc"),
    "tensor_copy": (_elements, "old-doc"),
    "memset": (_elements, "old-doc"),
    "reciprocal": (lambda f: 8 * f["n"], "doc"),
    "tensor_scalar_reduce": (lambda f: max(ISSUE, f["n"]) + ISSUE, "old-doc"),
    "tensor_scalar_cumulative": (_elements, "inferred: as tensor_scalar"),
    "tensor_copy_predicated": (_two_inputs, "old-doc"),
    "select_reduce": (_two_inputs, "inferred: as tensor_copy_predicated"),
    "range_select": (_elements, "old-doc"),
    "nc_stream_shuffle": (_elements, "old-doc"),
    "bn_stats": (_elements, "old-doc"),
    "bn_aggr": (lambda f: 13 * f["n"] / 3, "old-doc"),
    "max8": (_elements, "old-doc"),
    "nc_find_index8": (_elements, "old-doc"),
    "nc_match_replace8": (_elements, "old-doc"),
    "affine_select": (lambda f: 150 + f["n"], "old-doc"),
    "iota": (lambda f: 150 + f["n"], "old-doc"),
    "local_gather": (_gather, "inferred: the old formula, which divides where it must multiply"),
    "nc_n_gather": (lambda f: 150 + f["n"], "unknown"),
    "nonzero_with_count": (lambda f: 150 + f["n"], "unknown"),
    "sequence_bounds": (lambda f: 150 + f["n"], "unknown"),
    "tensor_partition_reduce": (lambda f: 150 + f["n"] * f["partitions"], "unknown"),
    "core_barrier": (lambda f: 0, "unknown"),
    "register_store": (lambda f: 0, "unknown"),
}


def cycles(op, engine, facts) -> float:
    """Cycles of a compute engine.

    facts: n (elements a partition); mode (1, 2 or 4: elements a cycle, see isa/checks.py); light (tensor_tensor);
    strided, dynamic (true or false); on PE: stationary, moving (columns), fp32, onezero.
    """
    formula, _ = CYCLES.get((op, engine)) or CYCLES[op]
    least = 0 if engine == "PE" else ISSUE
    least = DYNAMIC if facts.get("dynamic") else least
    return max(least, formula(facts) / facts.get("mode", 1) * (2 if facts.get("strided") else 1))


def price(op, engine, facts) -> tuple:
    """(microseconds, cycles, bytes moved by DMA). facts of a DMA: nbytes, row (contiguous bytes), share of the rate."""
    if engine == "DMA":
        rate = DMA_RATE * min(1.0, facts["row"] / DMA_ROW) * facts.get("share", 1.0)
        return facts["nbytes"] / rate, 0.0, facts["nbytes"]
    taken = cycles(op, engine, facts)
    return taken / CLOCK[engine], taken, 0
