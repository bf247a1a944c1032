"""ringtide.torch by the kernels for Trainium2, in the simulator: what lies between tensors and launches."""

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from ringtide.torch import gla, gla_decode_step, gla_decode_step_, nki  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(T, B=1, N=2, K=8, V=12, dtype=torch.float32):
    """q, k, v, g, h0; without a time axis if T is None."""
    time = () if T is None else (T,)
    q, k, v, g = (torch.randn(B, *time, N, d) for d in (K, K, V, K))
    return [*(x.to(dtype) for x in (q, k, v)), -g.abs(), torch.randn(B, N, K, V)]


def with_gradients(x, **options):
    x = [a.detach().requires_grad_() for a in x]
    out = gla(*x[:4], initial_state=x[4], output_final_state=True, **options)
    return *out, *torch.autograd.grad(sum((a.float() ** 2).sum() for a in out), x)


def error(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


@pytest.mark.parametrize(("K", "V"), [(8, 12), (130, 12), (8, 260), (130, 260)])
def test_wide_heads_are_several(K, V):
    x = inputs(5, K=K, V=V)
    got, want = (with_gradients(x, implementation=name) for name in ("nki", "eager"))
    assert max(map(error, got, want)) <= 2e-6
    q, k, v, g, h0 = inputs(None, K=K, V=V)
    got, want = (gla_decode_step(q, k, v, g, h0, implementation=name) for name in ("nki", "eager"))
    assert max(map(error, got, want)) <= 2e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_precision(dtype, bound):
    x = inputs(20, dtype=dtype)
    got, want = (with_gradients(x, implementation=name) for name in ("nki", "eager"))
    assert [a.dtype for a in got] == [a.dtype for a in want]
    assert max(map(error, got, want)) <= bound


def test_gates_of_minus_infinity():
    x = inputs(20)
    x[3][:, 7], x[3][:, 11, :, ::2] = -torch.inf, -1e30
    got, want = (with_gradients(x, implementation=name) for name in ("nki", "eager"))
    assert max(map(error, got, want)) <= 2e-6


def test_a_scale_of_zero():
    x = inputs(5)
    got, want = (with_gradients(x, implementation=name, scale=0) for name in ("nki", "eager"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_odd_heads_over_two_cores(monkeypatch):
    monkeypatch.setattr(nki, "LNC", 2)
    x = inputs(5, N=3)
    got, want = (with_gradients(x, implementation=name) for name in ("nki", "eager"))
    assert max(map(error, got, want)) <= 2e-6
    q, k, v, g, h0 = inputs(None, N=3)
    got, want = (gla_decode_step(q, k, v, g, h0, implementation=name) for name in ("nki", "eager"))
    assert max(map(error, got, want)) <= 2e-6


def test_twenty_lengths_of_a_bucket_launch_one_shape(monkeypatch):
    launched = set()

    def launch(kernel, lnc, *args):
        launched.add((kernel.__name__, *(x.shape for x in args if hasattr(x, "shape"))))
        return args[2].copy(), args[4].copy()

    monkeypatch.setattr(nki.ops, "launch", launch)
    for T in range(900, 920):
        assert gla(*inputs(T)[:4], implementation="nki")[0].shape == (1, T, 2, 12)
    assert len(launched) == 1


def test_buckets_are_close_above_and_few():
    lengths = range(1, 40_000)
    buckets = [nki.bucket(T) for T in lengths]
    assert all(b >= T and b % 128 == 0 for T, b in zip(lengths, buckets, strict=True))
    assert all(b <= 1.25 * T + 128 for T, b in zip(lengths, buckets, strict=True))
    assert len(set(buckets)) <= 4 * 9


def test_compiled():
    q, k, v, g, _ = inputs(5)
    f = lambda *x: gla(*x, implementation="nki")[0]
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v, g), f(q, k, v, g))


def test_slots_and_the_pool_in_place():
    x, pool = inputs(None, B=3)[:4], torch.randn(5, 2, 8, 12)
    ids, has = torch.tensor([4, -1, 0]), torch.tensor([True, True, False])
    mine, other = pool.clone(), pool.clone()
    out = gla_decode_step_(*x, mine, slot_ids=ids, has_initial_state=has, implementation="nki")
    want = gla_decode_step_(*x, other, slot_ids=ids, has_initial_state=has)
    assert error(out, want) <= 2e-6
    assert error(mine, other) <= 2e-6
    assert torch.equal(mine[1:4], pool[1:4])


def test_on_the_device_launches_are_nki_ops():
    """With the real packages in place, each launch is registered by torch_neuronx and calls the kernel on tensors."""
    code = """
    import sys, types, torch
    registered = {}

    def nki_op(name, mutates_args):
        def made(function):
            registered[name] = mutates_args
            return torch.library.custom_op(name, function, mutates_args=mutates_args)
        return made

    sys.modules["torch_neuronx"] = types.SimpleNamespace(nki_op=nki_op)
    from ringtide.kernels.nki import backend
    backend.nki.__is_simulator__ = False
    from ringtide.torch import nki
    seen = []
    nki.ops.launch = lambda kernel, lnc, *args: seen.append((kernel.__name__, lnc, args)) or (args[2] + 0, args[4] + 0)
    q = torch.randn(1, 128, 2, 8)
    o, h = nki.gla(q, q, q, -q.abs(), torch.zeros(1, 2, 8, 8), 0.5)
    (name, lnc, args), = seen
    assert (name, lnc, o.shape, h.shape) == ("gla_forward", 2, q.shape, (1, 2, 8, 8))
    assert all(isinstance(x, torch.Tensor) and x.is_contiguous() for x in args[:5])
    print(registered)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "{'ringtide::nki_gla': (), 'ringtide::nki_gla_backward': (), 'ringtide::nki_gla_decode': ('pool',)}\n"
    )
