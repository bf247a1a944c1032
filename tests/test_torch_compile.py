"""ringtide.torch under what PyTorch does to an op: opcheck, gradcheck, compile, export, autocast; nothing waits for a
device."""

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from ringtide.kernels.eager import gla as kernel  # noqa: E402
from ringtide.torch import chunk_gla, gla, gla_decode_step, gla_decode_step_, ops  # noqa: E402

B, N, K, V = 2, 2, 8, 12
OPS = torch.ops.ringtide


@pytest.fixture(autouse=True)
def fresh():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)


def inputs(T, batch=B, states=None, dtype=torch.float32, grad=False, sizes=(N, K, V)):
    """q, k, v, g, h0; without a time axis if T is None."""
    time, (n, key, value) = () if T is None else (T,), sizes
    q, k, v, g = (torch.randn(batch, *time, n, d, dtype=dtype) for d in (key, key, value, key))
    x = q, k, v, -g.abs(), torch.randn(states or batch, *sizes, dtype=dtype)
    return [a.requires_grad_(grad) for a in x]


ENDS = torch.tensor([0, 2, 2, 5])
SLOTS, HAS = torch.tensor([2, -1]), torch.tensor([True, False])


def with_gradients(f, *x):
    """The results of f and the gradients of the sum of their squares."""
    results = f(*x)
    grads = torch.autograd.grad(sum((r**2).sum() for r in results), x)
    return *(r.detach() for r in results), *grads


def both(q, k, v, g, h0):
    return gla(q, k, v, g, initial_state=h0, output_final_state=True)


def sequences(q, k, v, g, h0, ends=ENDS):
    return chunk_gla(q, k, v, g, initial_state=h0, output_final_state=True, cu_seqlens=ends)


def decode(q, k, v, g, pool):
    return gla_decode_step(q, k, v, g, pool, slot_ids=SLOTS, has_initial_state=HAS)


CASES = {
    "rows": (both, dict(T=5)),
    "sequences": (sequences, dict(T=5, batch=1, states=3)),
    "decode": (decode, dict(T=None, states=4)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case):
    f, shape = CASES[case]
    assert torch.autograd.gradcheck(f, inputs(**shape, dtype=torch.float64, grad=True, sizes=(1, 3, 2)))


def test_opcheck():
    x = inputs(5)
    torch.library.opcheck(OPS.gla.default, (*inputs(5, grad=True), None, 0.5))
    torch.library.opcheck(OPS.gla.default, (*inputs(5, 1, 3, grad=True), ENDS, 0.5))
    torch.library.opcheck(OPS.gla_backward.default, (*x, None, *x[2::2], 0.5))


def test_opcheck_of_decode():
    x, last = inputs(None, states=4), (0.5, "eager")
    torch.library.opcheck(OPS.gla_decode_.default, (*x, SLOTS, HAS, *last))
    torch.library.opcheck(OPS.gla_decode.default, (*inputs(None, states=4, grad=True), SLOTS, HAS, *last))
    torch.library.opcheck(OPS.gla_decode_backward.default, (*x, SLOTS, HAS, x[2], x[4].clone(), 0.5))


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager(case):
    f, shape = CASES[case]
    x = inputs(**shape, grad=True)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, *x), with_gradients(f, *x), strict=True):
        assert torch.equal(a, b)


def block(q, k, v, g, h0):
    """What surrounds the op in a layer, with segments."""
    ids = torch.arange(q.shape[1]).expand(q.shape[:2]) // 3
    o, h = gla(
        q.sin(), k, v, torch.nn.functional.logsigmoid(g), initial_state=h0, output_final_state=True, segment_ids=ids
    )
    return o * torch.sigmoid(v), h


@pytest.mark.slow
def test_inductor():
    x = inputs(7, grad=True)
    compiled = torch.compile(block, fullgraph=True)
    for a, b in zip(with_gradients(compiled, *x), with_gradients(block, *x), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_compiled_step_changes_the_pool_in_place():
    x, pool = inputs(None)[:4], torch.randn(4, N, K, V)
    step = lambda pool, *x: gla_decode_step_(*x, pool, slot_ids=SLOTS, has_initial_state=HAS) + 1
    compiled, mine, other = torch.compile(step, fullgraph=True, backend="aot_eager"), pool.clone(), pool.clone()
    assert torch.equal(compiled(mine, *x), step(other, *x))
    assert torch.equal(mine, other)
    assert not torch.equal(mine, pool)


def test_twenty_lengths_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for T in range(5, 25):
        x = inputs(T, grad=True)
        for a, b in zip(with_gradients(compiled, *x), with_gradients(block, *x), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_packed_lengths_compile_once():
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(sequences, fullgraph=True, dynamic=True, backend=counter)
    for n in range(3, 8):
        x, ends = inputs(3 * n, 1, states=n), torch.arange(n + 1) * 3
        for a, b in zip(compiled(*x, ends), sequences(*x, ends), strict=True):
            assert torch.equal(a, b)
        counts.add(counter.frame_count)  # the first compilation may begin anew once it has seen a shape
    assert len(counts) == 1


def test_bad_ends_are_refused_by_the_compiled_step_too():
    compiled = torch.compile(sequences, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected to end at T = 5"):
        compiled(*inputs(5, 1, 3), torch.tensor([0, 2, 2, 4]))


class Layer(torch.nn.Module):
    def forward(self, q, k, v, g, h0):
        return both(q, k, v, g, h0)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    T = torch.export.Dim("T", min=2, max=1000)
    x = tuple(inputs(9))
    program = torch.export.export(Layer(), x, dynamic_shapes=(*({1: T},) * 4, None), strict=strict)
    y = inputs(70)
    for a, b in zip(program.module()(*y), both(*y), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    """q, k and v in the dtype of autocast; gates and states stay in float32."""
    x, run = inputs(20, grad=True), torch.compile(both, fullgraph=True, backend="aot_eager") if compiled else both
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(run, *x)
    low = [a.detach().to(torch.bfloat16).requires_grad_() for a in x[:3]]
    want = with_gradients(both, *low, *x[3:])
    assert [a.dtype for a in want] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3, *[torch.float32] * 2]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert all(a.dtype == torch.float32 for a in got[1:])


def test_autocast_of_a_decode_step():
    q, k, v, g, pool = inputs(None)
    with torch.autocast("cpu", torch.bfloat16):
        out, new = gla_decode_step(q, k, v, g, pool)
    want, want_pool = gla_decode_step(*(x.bfloat16() for x in (q, k, v)), g, pool)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)
    assert torch.equal(new, want_pool)


def test_checkpoint_and_second_derivatives():
    q, k, v, g, h0 = inputs(6, grad=True)
    loss = lambda q, k, v, g, h0: sum((x**2).sum() for x in both(q, k, v, g, h0))
    want = torch.autograd.grad(loss(q, k, v, g, h0), (q, k, v, g, h0))
    again = torch.utils.checkpoint.checkpoint(loss, q, k, v, g, h0, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again, (q, k, v, g, h0)), want, strict=True):
        assert torch.equal(a, b)
    first = torch.autograd.grad(loss(q, k, v, g, h0), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        first.sum().backward()


def test_nothing_waits_for_the_device():
    """Neither the functions nor the kernels read a value or make a shape of one: on tensors without values they run."""
    with torch.device("meta"):
        fake = torch.empty
        q, k, v, g = (fake(1, 200, N, d) for d in (K, K, V, K))
        rows, packed, ends = fake(1, N, K, V), fake(3, N, K, V), fake(4, dtype=torch.int32)
        ids = fake(1, 200, dtype=torch.int64)
        assert gla(q, k, v, g, segment_ids=ids)[0].shape == v.shape
        assert sequences(q, k, v, g, packed, ends)[1].shape == packed.shape
        for h, cu in ((rows, None), (packed, ends)):
            o, hT = kernel.forward(q, k, v, g, h, scale=0.5, cu_seqlens=cu)
            assert (o.shape, hT.shape) == (v.shape, h.shape)
            grads = kernel.backward(q, k, v, g, h, o, hT, scale=0.5, cu_seqlens=cu)
            assert [x.shape for x in grads] == [x.shape for x in (q, k, v, g, h)]
        pool, slots, has = fake(5, N, K, V), fake(200, dtype=torch.int64), fake(200, dtype=torch.bool)
        tokens = [x[0] for x in (q, k, v, g)]
        assert gla_decode_step_(*tokens, pool, slot_ids=slots, has_initial_state=has).shape == (200, N, V)
        assert ops._decode(*tokens, pool, slots, has, 0.5, "eager").shape == (200, N, V)
        grads = kernel.decode_step_backward(*tokens, pool, slots, has, tokens[2], pool, scale=0.5)
        assert [x.shape for x in grads] == [x.shape for x in (*tokens, pool)]


def test_the_way_of_an_accelerator_gives_the_same():
    """A step that may not look at its slots writes the rows that have one, and nothing else."""
    for slots in ([2, -1, 0], [0, -1, 2], [-1, -1, 3], [-1, -1, -1], [3, 1, 0]):
        slots, pool = torch.tensor(slots), torch.randn(5, N, K, V)
        used = (slots >= 0)[:, None, None]
        x = [torch.where(used, a, 0) for a in inputs(None, 3)[:4]]
        has = torch.tensor([False, True, True])
        mine, other = pool.clone(), pool.clone()
        want = kernel.decode_step_(*x, mine, slots, has, scale=1.0)
        q, k, v, g = x
        assert torch.equal(kernel._decode_without_waiting(q, k, v, g.exp(), other, slots, has), want)
        assert torch.equal(mine, other)
