"""The plan of a Laplace on Trainium2: its terms by hand, its bounds, its refusals, and the recipes that it prices."""

import json
import math

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from ringtide import recipes
from ringtide.bench import plan_laplace, trainium
from ringtide.bench.plan_laplace import Setup
from ringtide.cli import main
from ringtide.models import laplace

LAYER = 3072 * (2 * 1536 + 3 * 3072) + 3072 * 16 + 16 * 1536 + 3 * 3072 * 8192  # parameters of a layer's matrices
HEAD = 50304 * 3072


@pytest.fixture
def kernels(monkeypatch):
    """Round times in place of the simulator's: forward 2, backward 8, decode 0.5 us."""

    def row(name, us):
        return {"kernel": name, "t_max_us": us / 2, "t_sched_us": us, "t_list_us": us, "t_sum_us": 2 * us} | {
            "hbm_floor_us": us / 4
        }

    pair = {"forward": row("forward", 2.0), "backward": row("backward", 8.0)}
    monkeypatch.setattr(plan_laplace, "kernels", lambda *shape: pair)
    monkeypatch.setattr(plan_laplace, "decode_kernel", lambda *call: row("decode", 0.5))
    return pair


def test_the_model_is_the_one_that_is_priced():
    setup = Setup("laplace-3b")
    assert setup.of_layers == 24 * LAYER
    assert setup.of_head == HEAD
    assert setup.parameters == 24 * (LAYER + 6144 * 4 + 1536 + 192 + 2 * 3072) + 2 * HEAD + 3072
    assert setup.state_bytes == 29_491_200
    assert trainium.ranks(1) == 64
    assert (setup.tokens, setup.rows) == (8192, 20)
    assert plan_laplace.flops(setup) == pytest.approx(17.3e9, rel=0.005)
    assert plan_laplace.limit() == 24 << 30


def test_terms_of_a_training_step_by_hand(kernels):
    setup, rates = Setup("laplace-3b"), trainium.Rates()
    terms, hidden = plan_laplace.train(setup, rates, "none")
    rank = 2 * 2 * 128 * 128 * 2.4e9 * 0.66  # FLOP/s
    assert terms["matmuls, forward"] == pytest.approx(2 * 24 * LAYER * 8192 / rank)
    assert terms["matmuls, backward"] == pytest.approx(2 * terms["matmuls, forward"])
    units = 24 * 16 * (8192 // 128) / 2
    assert terms["GLA kernel, forward"] == pytest.approx(units * 2e-6)
    assert terms["GLA kernel, backward"] == pytest.approx(units * 8e-6)
    hbm = 2.9e12 / 4 * 0.6
    assert terms["elementwise, forward"] == pytest.approx(24 * 8192 * 2 * 78336 / hbm)
    head = 3 * 2 * HEAD * 8192 / rank
    assert head < terms["embedding, head and loss"] < 1.3 * head
    assert terms["gradients to owners"] == pytest.approx(4 * setup.parameters * 15 / 16 / 512e9)
    assert terms["weights from owners"] == pytest.approx(terms["gradients to owners"] / 2)
    assert terms["FSDP"] == 0 < hidden["FSDP"] < terms["matmuls, forward"]
    again, _ = plan_laplace.train(setup, rates, "full")
    forward = sum(seconds for name, seconds in terms.items() if name.endswith(", forward"))
    assert again.pop("layers forward again") == pytest.approx(forward)
    assert again == terms


def test_newton_schulz_has_one_owner_a_matrix(kernels):
    setup, rates = Setup("laplace-3b"), trainium.Rates()
    assert plan_laplace.newton_schulz((8192, 3072)) == 5 * (4 * 3072**2 * 8192 + 2 * 3072**3)
    names = plan_laplace.owned(setup)
    assert sorted(name for owner in names for name in owner) == sorted(setup.shapes)
    whole = sum(plan_laplace.newton_schulz(s) for n, s in setup.shapes.items() if len(s) == 2 and "_proj.w" in n)
    most = sum(plan_laplace.optimizer(setup, rates).values())  # of a rank with an embedding too
    assert rates.flops(whole) / 64 <= most < 2 * rates.flops(whole) / 64
    assert rates.flops(whole) / 64 / sum(plan_laplace.train(setup, rates, "none")[0].values()) < 0.022


def test_a_product_of_few_rows_waits_for_its_weights():
    rates = trainium.Rates()
    read = 2 * LAYER / (2.9e12 / 4 * 0.6)
    assert rates.matmul(LAYER, 1) == rates.matmul(LAYER, 100) == pytest.approx(read)
    assert rates.matmul(LAYER, 8192) == pytest.approx(rates.flops(2 * LAYER * 8192))


def test_no_decode_is_faster_than_the_roofline():
    for sequences in (1, 64, 1280, 20480):
        setup = Setup("laplace-3b", sequences=sequences)
        floors = sum(plan_laplace.floors(setup).values())
        for scenario in trainium.SCENARIOS:
            for cores in (1, 4):
                seconds = sum(plan_laplace.decode(setup, trainium.Rates(scenario), cores).values())
                assert seconds > plan_laplace.roofline(setup)
                assert cores > 1 or seconds > floors > plan_laplace.roofline(setup)
    weights = 2 * (24 * LAYER + HEAD)
    assert plan_laplace.roofline(Setup("laplace-3b")) == pytest.approx((weights + 160 * 29_491_200) / 2.9e12)


def test_terms_of_a_decode_step_by_hand(kernels):
    terms = plan_laplace.decode(Setup("laplace-3b"), trainium.Rates())
    hbm = 2.9e12 / 4 * 0.6
    assert terms["projections and MLP"] == pytest.approx(2 * 24 * LAYER / hbm)
    assert terms["head"] == pytest.approx(2 * HEAD / hbm)
    assert terms["GLA kernel: states read and written"] == pytest.approx(24 * 20 * 8 * 0.5e-6)
    cache = 2 * 24 * 6144 * 4 * 2
    assert terms["elementwise and convolution cache"] == pytest.approx(20 * (24 * 2 * 78336 + cache) / hbm)
    assert terms["launches"] == 190e-6


@pytest.mark.parametrize(("mesh", "chips"), [({"data": 16, "fsdp": 4}, 0), ({"fsdp": 64}, 15 / 16), ({"data": 64}, 0)])
def test_what_weights_in_shards_send(kernels, mesh, chips):
    """Within a chip only HBM moves; over all ranks each chip gets what the other chips hold."""
    setup = Setup("laplace-3b", mesh=tuple(mesh.items()))
    _, hidden = plan_laplace.train(setup, trainium.Rates(instead=("link", 0.05)), "full")
    size = 8 * setup.parameters if setup.axes["fsdp"] > 1 else 0
    assert hidden["FSDP"] == pytest.approx(max(2 * size / (2.9e12 / 4 * 0.6), size * chips / 51.2e9))


def test_more_instances(kernels):
    """Twice the machines and the batch: the same layers, no faster optimizer than its largest matrix, EFA."""
    one, two = (plan_laplace.plan(Setup("laplace-3b", n, batch=128 * n), "full") for n in (1, 2))
    assert 1.9 < two["train_tokens_per_s"] / one["train_tokens_per_s"] < 2.05
    for name in ("matmuls, forward", "GLA kernel, backward", "embedding, head and loss"):
        assert two["terms"]["train"][name] == pytest.approx(one["terms"]["train"][name])
    assert two["terms"]["train"]["gradients to owners"] > one["terms"]["train"]["gradients to owners"]
    largest = trainium.Rates().flops(plan_laplace.newton_schulz((8192, 3072)))
    assert sum(two["terms"]["train"][name] for name in ("Muon: Newton-Schulz", "optimizer: state")) >= largest
    fewer = plan_laplace.plan(Setup("laplace-3b", 2), "full")  # the batch of one
    assert one["train_tokens_per_s"] < fewer["train_tokens_per_s"] < two["train_tokens_per_s"]
    assert two["decode_step_s"] < one["decode_step_s"]


def test_a_sequence_longer_than_a_rank(kernels):
    """Its ranks pass on 16 states of 96 x 192 a sequence and layer; what is left of the work is the same."""
    split, whole = Setup("laplace-3b", seq=1 << 18, batch=2), Setup("laplace-3b")
    assert split.axes == {"data": 1, "fsdp": 2, "context": 32}
    assert split.tokens == whole.tokens
    rates = trainium.Rates()
    terms, _ = plan_laplace.train(split, rates, "none")
    product = 24 * 3 * 4 * 2 * 8192 * 16 * 96 * 192 / (2 * 2 * 128 * 128 * 2.4e9 * 0.66)
    sent = 24 * 2 * (2 * 10e-6 + 4 * 32 * 16 * 96 * 193 * 4 / 512e9)
    assert terms.pop("context") == pytest.approx(product + sent)
    assert terms["gradients to owners"] == pytest.approx(4 * split.parameters / 2 * 31 / 32 / 512e9)  # a shard a chip
    others, _ = plan_laplace.train(whole, rates, "none")
    same = [name for name in others if name.endswith(("ward", "loss"))]
    assert {name: terms[name] for name in same} == pytest.approx({name: others[name] for name in same})


def test_ranges_enclose_what_is_predicted(kernels):
    found = plan_laplace.plan(Setup("laplace-3b"))
    for what in ("train", "decode"):
        for name, seconds in found["terms"][what].items():
            assert found["range"]["fast"][what][name] <= seconds <= found["range"]["slow"][what][name], name
        low, high = found[f"{what}_tokens_per_s_range"]
        assert low < found[f"{what}_tokens_per_s"] < high


def test_what_has_to_hold_for_the_published_rates(kernels):
    need, setup = plan_laplace.needed(), Setup("laplace-3b")
    speed = lambda *instead: 1280 / sum(plan_laplace.decode(setup, trainium.Rates(instead=instead)).values())
    assert speed("traffic", need["traffic"]) == pytest.approx(11_544)
    assert speed("programs", need["programs"]) >= 11_544 > speed("programs", need["programs"] + 1)
    terms, _ = plan_laplace.train(setup, trainium.Rates(instead=("matmul", need["matmul"])), "full")
    assert 524_288 / sum(terms.values()) == pytest.approx(120_000)
    assert need["matmul"] < trainium.ASSUMED["matmul"].slow


def test_memory(kernels):
    """Without remat 8,192 tokens a rank do not fit, 4,096 do; what a rank owns is whole once over all of them."""
    setup = Setup("laplace-3b")
    used = plan_laplace.memory(setup, "none")["train"]
    assert used["activations"] == 24 * 8192 * plan_laplace.kept(setup.config)
    assert plan_laplace.kept(setup.config) == 2 * 69136
    assert used["weights"] == 2 * setup.parameters / 4
    assert plan_laplace.plan(setup)["remat"] == "full"
    assert plan_laplace.plan(Setup("laplace-3b", batch=64))["remat"] == "none"
    assert not plan_laplace.plan(setup, "none")["fits"]["train"]
    decoding = plan_laplace.memory(setup, "none")["decode"]
    assert decoding["states"] == 20 * 29_491_200
    assert plan_laplace.plan(setup)["fits"]["decode"]
    assert not plan_laplace.plan(Setup("laplace-3b", sequences=64 * 700))["fits"]["decode"]


def test_figures_have_sources():
    assert all(figure.source and figure.unit for figure in trainium.PUBLISHED.values())
    assert all(a.why and min(a.fast, a.slow) <= a.assumed <= max(a.fast, a.slow) for a in trainium.ASSUMED.values())
    share = trainium.PUBLISHED["peak"].value / trainium.PUBLISHED["cores"].value
    assert 2 * 128**2 * trainium.PUBLISHED["clock"].value == pytest.approx(share, rel=0.06)  # of two figures of AWS


def test_the_simulator_is_asked_once():
    first = trainium.decode_kernel(4, 2, 8, 16)
    assert trainium.decode_kernel(4, 2, 8, 16) is first
    assert 0 < first["hbm_floor_us"] <= first["t_max_us"] <= first["t_list_us"] <= first["t_sched_us"]


def invoke(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_json(kernels, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    done = invoke("laplace-3b", "--chip", "trn2", "--instances", "1", "--json", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    wanted = {"state_bytes", "train_tokens_per_s", "train_mfu", "decode_step_s", "decode_tokens_per_s"}
    assert found.keys() >= wanted | {"roofline_share", "terms", "published", "assumed"}
    assert found["kind"] == "prediction"
    assert found["train_tokens_per_s"] == pytest.approx(524_288 / sum(found["terms"]["train"].values()))
    assert found["decode_step_s"] == pytest.approx(sum(found["terms"]["decode"].values()))
    assert found["decode_tokens_per_s"] == pytest.approx(1280 / found["decode_step_s"])
    assert found["published"]["train"]["value"] == 120_000
    assert found["published"]["decode"]["value"] == 11_544
    assert found["published_mfu"] == pytest.approx(0.196, abs=0.002)
    assert found["published_roofline_share"] == pytest.approx(11_544 / found["roofline_tokens_per_s"])
    assert found["published_roofline_share"] == pytest.approx(0.033, abs=0.001)
    assert 0 < found["train_mfu"] < 1
    assert 0 < found["roofline_share"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_says_what_it_is(kernels):
    text = invoke("laplace-3b").stdout
    assert text.startswith("PREDICTED, nothing measured")
    for word in ("published", "assumed", "T_sched", "11,544", "120,000", "roofline", "29,491,200", "Newton-Schulz"):
        assert word in text


@pytest.mark.parametrize("name", [name for name in recipes.NAMES if name.startswith("trn2")])
def test_recipes_are_priced_and_fit(name, kernels):
    recipe = recipes.load(name)
    done = invoke("--recipe", name, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert all(found["fits"].values())
    assert (found["model"], found["instances"]) == (recipe.model, recipe.instances)
    if recipe.train:
        assert found["setup"]["seq"] * found["setup"]["batch"] == 524_288
        assert found["remat"] == recipe.train["remat"]
    else:
        assert found["setup"]["sequences"] == recipe.serve["sequences"] == 1280


def test_laplace_tiny_has_a_plan_too(kernels):
    found = json.loads(invoke("laplace-tiny", "--tokens", "1K", "--batch", "64", "--sequences", "100", "--json").stdout)
    assert found["setup"] == {"seq": 1024, "batch": 64, "sequences": 100, "mesh": {"data": 16, "fsdp": 4, "context": 1}}
    assert found["state_bytes"] == laplace.state_bytes(laplace.PRESETS["laplace-tiny"])
    assert math.isfinite(found["train_mfu"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["laplace-3b", "--chip", "v5p"], "--chip v5p: laplace-3b is planned on trn2"),
        (["llama-tiny", "--chip", "trn2"], "PRESET llama-tiny: on trn2 expected a Laplace, such as laplace-3b"),
        (["--chip", "trn2"], "PRESET: on trn2 expected a Laplace"),
        (["laplace-9b"], "PRESET laplace-9b: expected one of laplace-tiny"),
        (["laplace-3b", "--strategy", "ring"], "--strategy: is not for trn2"),
        (["laplace-3b", "--topology", "4x4x4"], "--topology: is not for trn2"),
        (["llama-tiny", "--instances", "2"], "--instances: is not for v5p"),
        (["llama-tiny", "--sequences", "2"], "--sequences: is not for v5p"),
        (["laplace-3b", "--remat", "offload"], "--remat offload: on trn2 expected none or full"),
        (["laplace-3b", "--tokens", "max"], "--tokens max: is for TPUs"),
        (["laplace-3b", "--mesh", "data=16"], "--mesh: holds 16 ranks, 1 x trn2.48xlarge have 64 logical cores"),
        (["laplace-3b", "--mesh", "ulysses=64"], "--mesh ulysses=64: expected sizes of data, fsdp, context"),
        (["laplace-3b", "--mesh", "data=64", "--batch", "96"], "--batch 96: must be a multiple of 64, data x fsdp"),
        (["laplace-3b", "--instances", "3"], "--tokens 4096: must be a multiple of 3, context of the mesh"),
        (["laplace-3b", "--plot", "nowhere/x.png"], "--plot nowhere/x.png: expected a .png"),
        (["--recipe", "trn2-nope"], "--recipe trn2-nope: expected one of"),
    ],
)
def test_bad_input_gets_one_line(arguments, message):
    done = invoke(*arguments)
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.output.split())


@pytest.mark.slow
def test_the_whole_plan_is_the_one_in_its_page():
    found = json.loads(invoke("laplace-3b", "--json").stdout)
    assert found["train_tokens_per_s"] == pytest.approx(225_000, rel=0.005)
    assert found["train_mfu"] == pytest.approx(0.365, abs=0.001)
    assert found["decode_tokens_per_s"] == pytest.approx(78_000, rel=0.005)
    assert found["roofline_share"] == pytest.approx(0.22, abs=0.001)
    assert {row["kernel"] for row in found["kernels"]} == {"forward", "backward", "decode"}
    assert all(row["t_max_us"] <= row["t_sched_us"] for row in found["kernels"])
