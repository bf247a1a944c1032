"""Planning: what a compiled program sends and runs, which tiles a hop visits, and a plan of a small model."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringtide.bench import plan, splash
from ringtide.bench.case import Case
from ringtide.bench.hlo import Program
from ringtide.cli import main
from ringtide.cli import plan as cli
from ringtide.kernels import layouts
from ringtide.models import BadInput, llama, sharding


@pytest.mark.usefixtures("tpu_compiler")
def test_what_a_program_sends():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh = Mesh(np.array(devices), ("x",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P("x"), P()))
    def f(x):  # a shard: [128, 512] float32
        def hop(x, _):
            return lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]) * 2, None

        y, _ = lax.scan(hop, x, None, length=5)
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        return y[:, :128] @ y, whole[::4] * whole[1::4], lax.psum(x, "x")

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    program = Program(f.lower(x).compile().as_text())
    shard = 128 * 512 * 4
    sent = {"collective-permute": 5 * shard, "all-gather": 3 * shard, "all-reduce": 2 * 3 / 4 * shard}
    assert program.collectives() == sent
    assert program.cycles()["matmul"] > 0
    assert program.kernels() == {}


def test_loops_branches_and_calls_are_counted():
    text = """
HloModule m, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %splash_forward.7 = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"
}

%body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %cp = (f32[8]{0:T(128)}, f32[8]{0:T(128)}, u32[]{:S(2)}) collective-permute-start(%p.1), channel_id=1
  %c = f32[8]{0} conditional(%p.1), true_computation=%inner, false_computation=%other
  ROOT %t = (s32[], f32[8]{0}) tuple(%c)
}

%other (p.2: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

%condition (p.3: (s32[], f32[8])) -> pred[] {
  %p.3 = (s32[], f32[8]{0}) parameter(0)
  %n = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[] compare(%p.3, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = (s32[], f32[8]{0}) while(%x), condition=%condition, body=%body
  ROOT %rs = bf16[2,8]{1,0:T(8,128)(2,1)} reduce-scatter(%w), replica_groups=[2,4]<=[8], to_apply=%other
}
"""
    program = Program(text)
    assert program.kernels() == {"splash_forward": 7}
    assert program.collectives() == {"collective-permute": 7 * 32, "reduce-scatter": 3 * 32}


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("hop", [0, 1, 3])
def test_a_hop_visits_the_tiles_that_its_positions_say(pass_, hop):
    """Of shard 2 of 4 in zigzag: its own keys, those of a shard before, those of one after."""
    case, span, keys, chunk = Case("v5p", pass_, given=True), 64, 128, 32
    part = partial(plan.Part, 2048, "zigzag", 4)
    q_at, k_at = part(2), part((2 - hop) % 4)
    counts = splash.visits(case, span, keys, chunk, q_at, k_at)
    at = layouts.position_of(np.arange(2048), "zigzag", 2048, 4).reshape(4, 512)
    seen = at[2][:, None] >= at[(2 - hop) % 4]
    tiles = seen.reshape(512 // span, span, 512 // keys, keys).swapaxes(1, 2).reshape(-1, span, keys)
    tiles = tiles.reshape(512 // span, 512 // keys, span, keys)
    some = tiles.any((2, 3))
    outer = some if pass_ == "forward" else some.T
    reach = [np.flatnonzero(row) for row in outer]
    assert counts["rows"] == len(outer)
    assert counts["steps"] == sum(r[-1] - r[0] + 1 if len(r) else 1 for r in reach)
    pairs = counts["stream"] * span * keys + (counts["chunk"] + counts["mixed"]) * span * chunk
    assert seen.sum() <= pairs <= seen.sum() + 512 * max(span, chunk)


@pytest.mark.parametrize("strategy", ["ring", "usp", "ulysses", "all_gather"])
def test_the_calls_of_a_layer_cover_what_a_device_owes(strategy):
    """Half of T^2 pairs a head, over all devices: each has the same, within the diagonal's tiles."""
    config, pod, tokens = llama.PRESETS["llama3.1-8b"], plan.Pod("v5p", "2x2x2"), 1 << 17
    parallel = sharding.Parallel(**plan.meshes(pod, config)[strategy], strategy=strategy)
    case, calls = plan.calls_of("v5p", config, tokens, parallel, "backward")
    pairs = 0
    for q_at, k_at in calls:
        counts = splash.visits(case, 512, 512, 512, q_at, k_at)
        pairs += (counts["stream"] + counts["chunk"] + counts["mixed"]) * 512 * 512 * case.heads
    owed = tokens**2 / 2 * config.heads / pod.devices
    assert owed <= pairs <= 1.05 * owed


def test_alike_hops_are_priced_once_and_rightly():
    part = partial(plan.Part, 1 << 15, "zigzag", 8)
    case, sizes = Case("v5p", "forward", given=True), (("span", 256), ("keys", 512), ("chunk", 128))
    for source in range(8):
        want = splash.visits(case, q_at=part(3), k_at=part(source), **dict(sizes))
        assert plan._visits(case, part(3), part(source), sizes) == want


@pytest.mark.parametrize("limit", [1 << 14, 1 << 20, 3_000_000, 14 << 20])
def test_the_longest_that_fits(limit, monkeypatch):
    """By bisection, to 1/32; a policy that did not fit is not tried for a longer one."""
    tried = []

    def compiled(pod, preset, tokens, parallel, batch, remats, log):
        tried.append((tokens, remats))
        remat = next((name for i, name in enumerate(("none", "full")) if tokens * 4 <= limit << 2 * i), "full")
        return {"tokens": tokens, "fits": tokens <= limit, "remat": remat}

    monkeypatch.setattr(plan, "plan", compiled)
    parallel = sharding.Parallel(context=8)
    row = plan.longest(plan.Pod("v5p", "2x2x2"), "llama-tiny", parallel, remats=("none", "full"))
    unit = 2048 * 8
    assert row["tokens"] % unit == 0
    assert row["fits"]
    assert limit - max(unit, limit / 32) < row["tokens"] <= limit
    assert len(tried) < 20


def test_a_refusal_of_the_compiler_says_how_much():
    message = "RESOURCE_EXHAUSTED: ... HLO temporaries (298.02G) exceeds available HBM (95.74G)."
    assert plan._exhausted(message) == round(298.02 * 2**30)
    assert plan._exhausted("XLA:TPU ... hbm. Used 1.5T of 31.25G hbm. Exceeded") == round(1.5 * 2**40)
    assert plan._exhausted("INTERNAL: something else") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 1000}, "--tokens: sequence length 1000 .* pad it to 1024"),
        ({"batch": 3, "mesh": {"fsdp": 2, "context": 32}}, "--batch 3: must be a multiple of 2"),
        ({"mesh": {"context": 32}}, "--mesh: holds 32 devices, v5p:4x4x4 has 64"),
    ],
)
def test_what_a_mesh_cannot_hold_is_refused(change, message):
    call = {"tokens": 4096, "batch": 1, "mesh": {"context": 64}} | change
    parallel = sharding.Parallel(**call["mesh"])
    with pytest.raises(BadInput, match=message):
        plan.check(plan.Pod("v5p", "4x4x4"), call["tokens"], call["batch"], parallel)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "PRESET nope: expected one of llama-tiny"),
        (["llama-tiny", "--tokens", "4Q"], "--tokens 4Q: expected a whole number"),
        (["llama-tiny", "--topology", "4x"], "--topology 4x: expected chips"),
        (["llama-tiny", "--mesh", "context"], "--mesh context: expected sizes of data, fsdp"),
        (["llama-tiny", "--mesh", "row=2"], "--mesh row=2: expected sizes of data, fsdp"),
        (["llama-tiny", "--mesh", "context=²"], "--mesh context=²: expected sizes"),
        (["llama-tiny", "--tokens", "9" * 400], "expected a whole number below 2^30"),
        ([], "PRESET: expected one of llama-tiny"),
        (["--recipe", "nope"], "--recipe nope: expected one of tpu7x-14m"),
        (["llama-tiny", "--plot", "nowhere/x.png"], "--plot nowhere/x.png: expected a .png"),
    ],
)
@pytest.mark.usefixtures("tpu_compiler")
def test_bad_input_gets_one_line(arguments, message):
    done = CliRunner().invoke(main, ["plan", *arguments])
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.split())


def test_the_command_knows_what_there_is():
    assert {*cli._STRATEGIES, "auto"} == set(sharding.STRATEGIES)
    assert set(cli._REMATS) == set(plan.REMATS) == set(llama.REMAT)


@pytest.mark.usefixtures("tpu_compiler")
def test_a_small_plan(tmp_path):
    picture = tmp_path / "plan.png"
    arguments = ["llama-micro", "--topology", "2x2x1", "--tokens", "16K", "--strategy", "ring", "--json"]
    done = CliRunner().invoke(main, ["plan", *arguments, "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row["fits"]
    assert 0 < row["hbm_bytes"] < row["hbm_limit"]
    assert row["step_s"] == pytest.approx(sum(row["terms"].values()))
    assert row["tokens_per_s"] == pytest.approx(16384 / row["step_s"])
    k_and_v = 2 * 16384 // 4 * 16 * 2 * 2  # bytes a hop, of two layers
    assert row["sent_bytes"]["collective-permute"] >= (3 + 3) * k_and_v
    assert 0 < row["mfu"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")
