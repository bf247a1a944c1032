"""Fuzzing functions of PyTorch, `check(framework="torch")`: what is right passes, what is wrong does not."""

import json

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402

from ringtide.cli import main  # noqa: E402
from ringtide.testing import check  # noqa: E402
from ringtide.torch import gla, gla_decode_step  # noqa: E402

FEW = {"cases": 24, "framework": "torch", "shrink": 2, "block": 16}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ours():
    report = check(gla, "gla", decode_step=gla_decode_step, **FEW)
    assert report
    assert not report.refused


def half_a_gradient(q, k, v, g, **options):
    return gla(q, k, v, (g + g.detach()) / 2, **options)


def acausal(q, k, v, g, **options):
    out, state = gla(q, k, v, g, **options)
    return out + 1e-3 * torch.nan_to_num(v).sum(1, keepdim=True), state


def rounded_gates(q, k, v, g, **options):
    return gla(q, k, v, g.bfloat16(), **options)


@pytest.mark.parametrize("wrong", [half_a_gradient, acausal, rounded_gates])
def test_what_is_wrong_is_found(wrong):
    report = check(wrong, "gla", stop_early=True, **FEW)
    assert report.failure.property == "values"
    assert "raised" not in report.failure.message


def test_a_wrong_decode_step_is_found():
    def leaks(q, k, v, g, state, *, slot_ids, has_initial_state, scale=None):
        out, new = gla_decode_step(
            q, k, v, g, state, slot_ids=slot_ids, has_initial_state=has_initial_state, scale=scale
        )
        return out, new + 0 * new.nan_to_num().sum() + (slot_ids < 0).any()

    report = check(gla, "gla", decode_step=leaks, stop_early=True, **FEW)
    assert report.failure.property == "decode"


def test_an_unknown_framework():
    with pytest.raises(ValueError, match=r"^framework: expected 'jax' or 'torch', got 'keras'"):
        check(gla, "gla", framework="keras")


@pytest.mark.parametrize("impl", ["torch-eager", "torch-nki"])
def test_command(impl):
    case = "GLACase(B=2, T=17, N=2, K=16, V=8, state=True, segments='one', documents='padded', gates='resets')"
    run = CliRunner().invoke(main, ["fuzz", "gla", "--impl", impl, "--replay", case, "--json"])
    assert run.exit_code == 0, run.output
    row = json.loads(run.stdout.splitlines()[-1])
    assert (row["impl"], row["cases"], row["failures"]) == (impl, 1, 0)
    assert 0 < row["worst_error_over_bound"] < 1
    run = CliRunner().invoke(main, ["fuzz", "attention", "--impl", impl])
    assert run.exit_code == 1
    assert f"--impl {impl}: there is only gla" in run.output
