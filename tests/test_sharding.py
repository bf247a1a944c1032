"""The model over meshes: the loss and gradients of one device, whatever the axes, the strategy and what is kept."""

import dataclasses
import math
import re

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringtide.cli import train as cli
from ringtide.models import BadInput, llama, sharding
from ringtide.models.sharding import Parallel, make_mesh
from ringtide.models.tokenwise import tokenwise
from ringtide.models.train import Settings, Trainer

SEQ, BATCH = 48, 4
CONFIG = dataclasses.replace(llama.PRESETS["llama-micro"], dim=128, heads=4, kv_heads=2, tied=False)
SETTINGS = Settings(seq=SEQ, batch=BATCH, steps=4, warmup=1)
ROWS = np.random.default_rng(0).integers(0, 256, (2, BATCH, SEQ)).astype(np.int32)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(llama, "CHUNK", 12)


def trainer_of(parallel, settings=SETTINGS):
    return Trainer(CONFIG, settings, parallel, make_mesh(parallel))


def steps(parallel, count=3):
    """Loss and norm of the gradients of each step, and the parameters after the last."""
    trainer = trainer_of(parallel)
    state, curve = trainer.fresh(0), []
    for _ in range(count):
        state, loss, norm = trainer.train_step(state, *trainer.place(*ROWS))
        curve.append((float(loss), float(norm)))
    return curve, jax.tree.map(np.asarray, state["params"])


@pytest.fixture(scope="module")
def single():
    return steps(Parallel())


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(context=8),
        Parallel(fsdp=2, context=4, remat="attention"),
        Parallel(ulysses=2, context=4, strategy="usp", remat="full"),  # some weights lie over context alone
        Parallel(fsdp=4, ulysses=2, strategy="ulysses", remat="attention"),
        Parallel(data=2, context=3, strategy="all_gather", remat="full"),
        Parallel(fsdp=2, data=2),
    ],
    ids=str,
)
def test_a_mesh_learns_what_one_device_learns(single, parallel):
    curve, params = steps(parallel)
    np.testing.assert_allclose(curve, single[0], rtol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(single[1]), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-3 * np.abs(theirs).max())  # Adam divides small by small


def gradients(remat):
    trainer = trainer_of(Parallel(context=2, remat=remat))
    return jax.tree.map(np.asarray, trainer.gradients(trainer.fresh(0)["params"], *trainer.place(*ROWS)))


@pytest.fixture(scope="module")
def all_kept():
    return gradients("none")


@pytest.mark.parametrize("remat", [name for name in llama.REMAT if name != "none"])
def test_what_is_kept_changes_no_gradient(all_kept, remat):
    """Offload too, though a CPU's host memory is its own."""
    loss, grads = gradients(remat)
    assert loss == pytest.approx(all_kept[0], rel=1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(all_kept[1]), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(b, a, atol=3e-6 * largest)


def count(jaxpr, found):
    """Equations, in all that a jaxpr calls, for which `found` holds."""
    inner = (x for eqn in jaxpr.eqns for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr))
    inside = sum(count(getattr(x, "jaxpr", x), found) for x in inner if _is_jaxpr(x))
    return inside + sum(bool(found(eqn)) for eqn in jaxpr.eqns)


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize(
    ("remat", "runs"), [("none", 1), ("full", 2), ("attention", 1), ("offload", 1), ("offload-all", 1)]
)
def test_attention_runs_forward_again_only_where_nothing_of_it_is_kept(remat, runs, monkeypatch):
    """Counted by calls of a forward kernel that stands out: it alone has an erf in it."""
    from ringtide.kernels.xla import attention

    forward = attention.forward

    def marked(q, *args, **options):
        return forward(jax.lax.erf(q), *args, **options)

    monkeypatch.setattr(attention, "forward", marked)
    jax.clear_caches()  # of the kernel without the mark
    trainer, erf = trainer_of(Parallel(context=2, remat=remat)), lambda eqn: eqn.primitive.name == "erf"
    like = trainer.like()["params"], *trainer.batch_like()
    once, both = (count(f.trace(*like).jaxpr.jaxpr, erf) for f in (trainer.evaluate, trainer.gradients))
    jax.clear_caches()
    assert once > 0
    assert both == runs * once


def loops(hlo):
    """The text of every computation that a while loop of an HLO module runs, those it calls included."""
    bodies = dict(re.findall(r"^%?([\w.-]+) (?:\([^\n]*\)) -> [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S))
    todo, seen = re.findall(r"body=%?([\w.-]+)", hlo), set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", bodies[name])
    return {name: bodies[name] for name in seen}


def test_the_loop_of_the_loss_sends_nothing():
    """The unembedding is gathered before it and its gradient summed after it, not in every chunk of tokens."""
    trainer = trainer_of(Parallel(fsdp=2, context=4))
    h = jax.ShapeDtypeStruct((BATCH, 1600, CONFIG.dim), jnp.float32, sharding=trainer.tokens)
    t = jax.ShapeDtypeStruct((BATCH, 1600), jnp.int32, sharding=trainer.tokens)
    each = sharding.each_token(trainer.mesh)
    grad = jax.value_and_grad(lambda params, h, t: llama.loss(params, h, t, each, chunk=64), argnums=(0, 1))
    hlo = jax.jit(grad).lower({"unembed": trainer.like()["params"]["unembed"]}, h, t).compile().as_text()
    sends = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    assert re.search(sends, hlo)
    assert len(loops(hlo)) > 0
    assert not re.search(sends, "".join(loops(hlo).values()))


def test_state_is_sharded_and_stays_so():
    trainer = trainer_of(Parallel(data=2, fsdp=2, context=2))
    state = trainer.fresh(0)
    for _ in range(2):
        specs = jax.tree.map(lambda x: x.sharding, state)
        assert specs == jax.tree.map(lambda x: x.sharding, trainer.like())
        state, *_ = trainer.train_step(state, *trainer.place(*ROWS))
    gate = state["opt"][1][0].mu["layers"]["gate"]
    assert gate.addressable_shards[0].data.nbytes * 4 == gate.nbytes


@pytest.mark.parametrize(
    ("rows", "sizes", "axes"),
    [
        (4096, (2, 4, 8), sharding.SHARDS),
        (4096, (8, 1, 64), ("ulysses", "context")),  # 8 rows a shard would be too few
        (4096, (8, 16, 64), ("context",)),
        (32, (2, 2, 2), ("context",)),
        (6, (2, 1, 3), sharding.SHARDS),  # nothing leaves 16 rows
        (6, (4, 1, 3), ("ulysses", "context")),
        (7, (2, 2, 2), None),
    ],
)
def test_rows_go_over_as_many_axes_as_leave_enough(rows, sizes, axes):
    mesh = jax.sharding.AbstractMesh((1, *sizes), sharding.AXES)
    key = jax.tree_util.DictKey("gate")
    wanted = P(None, axes, None) if axes else P(None, None, None)
    assert sharding.spec_of((key,), (3, rows, 5), mesh) == wanted
    assert sharding.spec_of((key,), (rows, 5), mesh) == P(*wanted[1:])
    assert sharding.spec_of((jax.tree_util.DictKey("norm"),), (rows,), mesh) == P()


@pytest.mark.parametrize("chunk", [5, 6, 12, 100])
def test_chunks_give_the_gradients_of_the_whole(chunk):
    rng = np.random.default_rng(0)
    w, x, at = rng.normal(size=(4, 4)), rng.normal(size=(2, 6, 4)), rng.integers(0, 9, (2, 6))
    f = lambda w, x, at: (jnp.tanh(x @ w) * at[..., None]).sum(-1)

    def whole(w, x):
        return jnp.sum(f(w, x, at) ** 2), jnp.sum(f(w, x, at))

    def chunked(w, x):
        y = tokenwise(f, w, (x,), (at,), chunk=chunk)
        return jnp.sum(y**2), tokenwise(f, w, (x,), (at,), chunk=chunk, total=True)[0, 0]

    def gradients(g):
        return jax.jit(lambda w, x: [jax.vjp(g, w, x)[1](ct) for ct in ((3.0, 0.0), (0.0, 3.0))])(w, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-5), gradients(whole), gradients(chunked)
    )


def test_bf16_weights_travel_and_gradients_are_summed_in_float32():
    trainer = trainer_of(
        Parallel(fsdp=2, context=2, remat="attention"), dataclasses.replace(SETTINGS, dtype="bfloat16")
    )
    jaxpr = trainer.gradients.trace(trainer.like()["params"], *trainer.batch_like()).jaxpr.jaxpr
    layer = 3  # axes of a stack of layers; a matrix has two
    sent = lambda eqn, name: eqn.primitive.name == name and len(eqn.invars[0].aval.shape) < layer
    dtypes = lambda name: {str(eqn.invars[0].aval.dtype) for eqn in _all(jaxpr) if sent(eqn, name)}
    assert "bfloat16" in dtypes("all_gather")
    assert dtypes("reduce_scatter") == {"float32"}


def _all(jaxpr):
    found = []
    count(jaxpr, found.append)
    return found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": 0}, "--mesh: context must be an int of at least 1, got 0"),
        ({"strategy": "rings"}, "--strategy: expected one of all_gather, ring"),
        ({"remat": "some"}, "--remat: expected one of none, full"),
        ({"ulysses": 2, "context": 2}, "--strategy ring: works over one axis, got ulysses=2, context=2: take usp"),
    ],
)
def test_what_cannot_be_is_one_line(fields, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        Parallel(**fields)


def test_a_batch_that_the_mesh_does_not_divide_is_one_line():
    with pytest.raises(BadInput, match=r"--batch 4: must be a multiple of data \* fsdp of the mesh, 3"):
        trainer_of(Parallel(fsdp=3))


def test_the_command_knows_the_names_of_the_model():
    assert cli._AXES == sharding.AXES
    assert cli._STRATEGIES == sharding.STRATEGIES
    assert set(cli._REMAT) == set(llama.REMAT)
    assert set(cli._PRESETS) == set(llama.PRESETS)


@pytest.mark.parametrize("mesh", ["", "context", "context=0", "context=-1", "rows=2", "context=2,context=4", "fsdp=2,"])
def test_a_strange_mesh_is_one_line(mesh):
    with pytest.raises(click.ClickException, match="expected sizes of data, fsdp"):
        cli._parallel({}, None, mesh, None, None)


def test_the_presets_are_those_of_the_paper_and_of_the_published_recipe():
    sizes = {name: sum(map(math.prod, jax.tree.leaves(llama.shapes(c), is_leaf=lambda x: isinstance(x, tuple))))
             for name, c in llama.PRESETS.items()}  # fmt: skip
    assert sizes["llama3.1-8b"] == sizes["llama3.1-8b-hd256"] == 8_030_261_248


@pytest.mark.slow
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize(("remat", "offloaded"), [("attention", 0), ("offload", 1), ("offload-all", 2)])
def test_the_step_compiles_for_a_pod_and_offloads_what_it_says(remat, offloaded):
    """By the compiler's account, for v5p: as many [B, T, D] a layer in the host's memory. (Two are no loop to it.)"""
    from jax.experimental import topologies

    config = dataclasses.replace(CONFIG, layers=3, dim=256, ff_dim=512, heads=2, kv_heads=1, head_dim=128)
    parallel = Parallel(context=4, remat=remat)
    mesh = make_mesh(parallel, topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices)
    settings = Settings(seq=4 * 4096, batch=1, dtype="bfloat16")
    trainer = Trainer(config, settings, parallel, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = trainer.train_step.lower(trainer.like(), *trainer.batch_like()).compile()
    assert compiled.memory_analysis().host_temp_size_in_bytes == offloaded * config.layers * 4096 * config.dim * 2
    longest = re.findall(r"(\w+)\[[\d,]*\b16384\b[\d,]*\][^=]*constant\(", compiled.as_text())
    assert not longest  # nothing as long as the sequence is part of the program
