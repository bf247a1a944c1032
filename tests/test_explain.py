"""`ringtide.explain`: its bytes against what the lowered program sends, its rule, and what it says is refused."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringtide import Causal, Chunked, Full, Local, context_parallel_attention, explain

SENT = {  # of what goes in and what comes out on a device: what it sends, each group as on a ring
    "collective_permute": lambda op, x, y: x,
    "all_gather": lambda op, x, y: y - x,
    "reduce_scatter": lambda op, x, y: x - y,
    "all_to_all": lambda op, x, y: x - x // op.attributes["split_count"].value,  # all but the part that stays
}


def mesh_of(sizes, names):
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def sent(lowered):
    """Bytes that a device sends, counted in the lowered program: those in a loop as often as it runs."""
    module = lowered.compiler_ir("stablehlo")
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations if "sym_name" in op.attributes}

    def count(op):
        name = op.operation.name.split(".")[-1]
        if name == "call":
            return count(functions[op.attributes["callee"].value])
        if name in SENT:
            return SENT[name](op, size(op.operands[0]), size(op.results[0]))
        inside = sum(count(inner) for region in op.operation.regions for block in region for inner in block)
        return inside * trips(op) if inside and name == "while" else inside

    return count(functions["main"])


def size(value):
    *dims, dtype = re.fullmatch(r"tensor<(.*)>", str(value.type))[1].split("x")
    return math.prod(map(int, dims)) * int(re.search(r"\d+", dtype)[0]) // 8


def trips(loop):
    """Of a scan, which counts from 0 to a constant."""
    condition = str(loop.regions[0].blocks[0])
    (bound,) = re.findall(r"stablehlo.compare +LT, %\w+, %(\w+)", condition)
    return int(re.search(rf"%{bound} = stablehlo.constant dense<(\d+)>", condition)[1])


def shapes(length=96, heads=(4, 2), widths=(8, 12), batch=2, dtype=jnp.bfloat16):
    (n, n_kv), (h, h_v) = heads, widths
    dims = (batch, length, n, h), (batch, length, n_kv, h), (batch, length, n_kv, h_v)
    return [jax.ShapeDtypeStruct(x, dtype) for x in dims]


def ids(batch, length):
    return jax.ShapeDtypeStruct((batch, length), jnp.int32)


CASES = {
    "all gather": ("all_gather", 4, {"mask": Causal()}, {}),
    "all gather, packed, float32": ("all_gather", 3, {"segment_ids": ids(2, 96)}, {"dtype": jnp.float32}),
    "ring": ("ring", 4, {"mask": Causal(), "layout": "zigzag"}, {}),
    "ring of one": ("ring", 1, {"mask": Causal()}, {}),
    "ring of two": ("ring", 2, {}, {}),
    "ring, packed": ("ring", 8, {"mask": Causal(), "segment_ids": ids(2, 96)}, {}),
    "ring, a window": ("ring", 8, {"mask": Local(20, 0)}, {}),
    "ring, to both sides": ("ring", 8, {"mask": Local(11, 11)}, {}),
    "ring, further to both sides": ("ring", 8, {"mask": Local(24, 24)}, {}),
    "ring, unevenly": ("ring", 8, {"mask": Local(30, 11)}, {}),
    "ring, zigzag window": ("ring", 8, {"mask": Local(6, 0), "layout": "zigzag"}, {}),
    "ring, no hops": ("ring", 4, {"mask": Chunked(24)}, {}),
    "ring, given positions": ("ring", 4, {"mask": Local(3, 0), "q_positions": ids(2, 96)}, {}),
    "ring, given positions of keys": ("ring", 4, {"mask": Causal(), "kv_positions": ids(2, 96)}, {}),
    "ring, both ways": ("ring", 4, {"bidirectional": True}, {"length": 4 * 5}),  # halves of two and three
    "ulysses": ("ulysses", 2, {"mask": Causal(), "segment_ids": ids(2, 96)}, {}),
    "ulysses, copies": ("ulysses", 8, {}, {"heads": (32, 2)}),
    "ulysses, padded": ("ulysses", 3, {}, {"heads": (5, 1)}),
    "usp": ("usp", (2, 4), {"mask": Causal(), "layout": "zigzag"}, {}),
    "usp, copies and both ways": ("usp", (4, 2), {"bidirectional": True, "segment_ids": ids(2, 96)}, {}),
    "usp of ulysses": ("usp", (4, 1), {"mask": Causal()}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bytes_sent_are_those_of_the_lowered_program(case):
    strategy, devices, how, size = CASES[case]
    axes = ("ulysses", "context") if strategy == "usp" else ("context",)
    mesh = mesh_of(devices if strategy == "usp" else (devices,), axes)
    how = {"mesh": mesh, "seq_axis": axes if strategy == "usp" else "context", "strategy": strategy, **how}
    args = shapes(**size)
    arrays = {key: how.pop(key) for key in ("segment_ids", "q_positions", "kv_positions") if key in how}

    def attend(q, k, v, arrays):
        return context_parallel_attention(q, k, v, implementation="xla", return_lse=True, **how, **arrays)

    def both(q, k, v, arrays):
        out, vjp = jax.vjp(lambda *x: attend(*x, arrays), q, k, v)
        return vjp(out)

    plan = explain(*args, **how, **arrays)
    forward = sent(jax.jit(attend).lower(*args, arrays))
    assert plan.strategy == strategy
    assert plan.sent_bytes == (forward, sent(jax.jit(both).lower(*args, arrays)) - forward)


def test_no_device_and_no_array_is_needed():
    mesh = jax.sharding.AbstractMesh((64, 4), ("context", "data"))
    plan = explain(*shapes(16 << 20, (32, 8), (128, 128), 4), mesh=mesh, seq_axis="context", batch_axis="data",
                   layout="zigzag", mask=Causal())  # fmt: skip
    kv = (16 << 20) // 64 * 8 * 2 * 128
    assert (plan.strategy, plan.hops) == ("ring", 63)
    assert plan.sent_bytes.forward == 63 * (kv * 2 + (16 << 20) // 64 * 4)
    assert [x.strategy for x in plan.others] == ["all_gather", "ulysses", "usp"]


@pytest.mark.parametrize(
    ("devices", "how", "heads", "length", "expected"),
    [
        (4, {}, (4, 4), 4 * 16384, "ring"),
        (4, {}, (4, 4), 4 * 16380, "ulysses"),
        (4, {}, (2, 2), 4 * 1024, "all_gather"),
        (2, {}, (2, 2), 2 * 1024, "ring"),
        (8, {"mask": Local(1024, 0)}, (4, 4), 8 * 1024, "ring"),
        (8, {"mask": Local(1025, 0)}, (8, 8), 8 * 1024, "ulysses"),
        (8, {"bidirectional": True}, (8, 8), 8 * 1024, "ring"),
    ],
)
def test_auto_is_what_the_op_chooses(devices, how, heads, length, expected):
    mesh = mesh_of((devices,), ("context",))
    args = shapes(length, heads, (8, 8), 1)
    plan = explain(*args, mesh=mesh, seq_axis="context", **how)
    assert plan.strategy == expected

    def attend(strategy):
        options = {"seq_axis": "context", "strategy": strategy, "implementation": "xla", **how}
        return jax.jit(lambda *x: context_parallel_attention(*x, mesh=mesh, **options)).lower(*args).as_text()

    assert attend("auto") == attend(expected)


def test_what_is_skipped_padded_and_refused():
    mesh = jax.sharding.AbstractMesh((4,), ("context",))
    plan = explain(*shapes(heads=(5, 1)), mesh=mesh, seq_axis="context", mask=Causal(), strategy="ring")
    assert (plan.skipped, plan.pairs) == (6, 16)
    by_name = {x.strategy: x for x in plan.others}
    assert "name two, (ulysses, ring)" in by_name["usp"].refused
    assert by_name["ulysses"].notes == (
        "each of 1 key heads goes to 4 of 4 devices; gradients are summed",
        "5 query heads are padded to 8, of 1 key heads, to divide by 4",
    )
    text = str(plan)
    for part in ("ring: as asked for", "3 of 3 hops, to the next device", "6 of 16 pairs", "usp", "refused: ", "KiB"):
        assert part in text
    assert "16,384" in str(explain(*shapes(), mesh=mesh, seq_axis="context", mask=Full()))


@pytest.mark.parametrize(
    ("name", "large"),
    [
        ("q_positions", np.array([[0, 1, 2, 2**40]])),
        ("q_positions", [0, 1, 2, 2**40]),
        ("kv_positions", np.array([0, 1, 2, 1 << 30], np.int32)),
        ("segment_ids", (np.zeros((1, 4), np.int64), np.full((1, 4), 2**40))),
    ],
)
def test_values_that_the_op_refuses_are_refused(name, large):
    how = {"mesh": mesh_of((4,), ("context",)), "seq_axis": "context", "mask": Causal()}
    arrays = [np.zeros(x.shape, np.float32) for x in shapes(4, batch=1)]
    with pytest.raises(ValueError, match=rf"{name}: expected values below 2\*\*3[01] in size") as by_op:
        context_parallel_attention(*arrays, **how, **{name: large})
    for args in (arrays, shapes(4, batch=1)):
        with pytest.raises(ValueError) as by_plan:  # noqa: PT011  the message is compared below
            explain(*args, **how, **{name: large})
        assert str(by_plan.value) == str(by_op.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"strategy": "usp"}, "seq_axis: usp does not work over one"),
        ({"strategy": "spiral"}, "strategy: expected auto"),
        ({"layout": "zigzag", "length": 100}, "sequence length 100 .* pad it to 104"),
        ({"head_axis": "context"}, "'context' is named twice"),
    ],
)
def test_what_nothing_can_serve_is_an_error(how, message):
    size = {key: how.pop(key) for key in ("length", "heads") if key in how}
    with pytest.raises(ValueError, match=message):
        explain(*shapes(**size), mesh=jax.sharding.AbstractMesh((4,), ("context",)), **{"seq_axis": "context", **how})
