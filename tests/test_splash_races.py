"""The splash kernels under JAX's race detector: DMAs happen when they are waited for, and nothing is read unwritten."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringtide import Causal, Chunked, Full, Local
from ringtide.kernels.masks import Where
from ringtide.kernels.pallas import platforms, splash
from ringtide.kernels.pallas.tiles import INTERPRET, Tiles
from ringtide.reference import attention as reference

# jax 0.12 would raise at a race, earlier ones only note it.
NOTE = {"on_race": "warn"} if hasattr(pltpu.InterpretParams, "on_race") else {}
DETECT = pltpu.InterpretParams(detect_races=True, **NOTE)
SMALL = Tiles(128, 128, 128, 128)


@pytest.fixture(autouse=True)
def _forget():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def straight(monkeypatch):
    """The kernels are called as they are, not through the primitive that chooses a platform."""
    call = lambda kernel, interpret, shapes, *args: kernel(interpret, INTERPRET, 1, *args)
    monkeypatch.setattr(platforms, "run", call)


def held(t, s, mask, sizes=SMALL, where=None, height=None, forward=True, backward=True):
    """Forward and backward of three heads on two are right, and no race is seen."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.normal(size=(1, n, heads, 16)).astype(np.float32) for n, heads in ((t, 2), (s, 1), (s, 1), (t, 2))
    )
    if height is not None:
        q[..., 0], k[0, :, 0, 0] = 4, height
    dlse = rng.normal(size=(1, t, 2)).astype(np.float32)
    at = where or {}
    where = Where(*(at.get(name) for name in ("q_pos", "k_pos", "q_seg", "k_seg")))
    options = {"mask": mask, "scale": 0.25, "sizes": sizes, "interpret": DETECT}
    truth = {"mask": mask, "scale": 0.25, "q_positions": where.q_pos, "kv_positions": where.k_pos}
    truth |= {"segment_ids": None if where.q_seg is None else (where.q_seg, where.k_seg)}

    def close(x, want):
        assert not interpreter.races.races_found
        seen = np.isfinite(want)
        assert (np.asarray(x)[~seen] == want[~seen]).all()
        assert (
            np.abs(np.asarray(x)[seen] - want[seen]).max()
            <= (4e-6 if height is None else 1e-4) * np.abs(want[seen]).max()
        )

    want_out, want_lse = reference.attention(q, k, v, **truth)
    if forward:
        out, lse = jax.jit(lambda *x: splash.forward(*x, where, **options))(q, k, v)
        close(out, want_out)
        close(lse, want_lse)
    if not backward:
        return
    dlse = np.where(np.isneginf(want_lse), 0, dlse).astype(np.float32)
    delta = (dout * want_out).sum(-1).astype(np.float32) - dlse
    lse = np.where(np.isneginf(want_lse), np.inf, want_lse).astype(np.float32)
    grads = jax.jit(lambda q, k, v, *x: splash.backward(q, k, v, where, *x, **options))(q, k, v, dout, lse, delta)
    for dx, want in zip(grads, reference.attention_grad(q, k, v, dout, dlse, **truth), strict=False):
        close(dx, want)


@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize(
    ("t", "s", "mask"),
    [
        (100, 500, Full()),  # 1 query block, 4 key blocks: dQ stays, and is waited for every time
        (200, 500, Full()),  # 2: each was written in the step before the last
        (380, 380, Full()),  # 3: as many as there are slots
        (500, 500, Causal()),
        (500, 500, Local(0, None)),  # the last block's successor is the first one
        (500, 500, Local(10, 10)),  # 2 or 3 query blocks a key block
        (512, 512, Chunked(128)),  # 1: a different one every time
        (500, 130, Local(0, 0)),  # rows that see nothing, in blocks of their own too
    ],
)
def test_few_and_many_blocks(t, s, mask):
    held(t, s, mask, forward=mask != Full())


@pytest.mark.usefixtures("straight")
def test_chunks_and_stacks():
    held(700, 700, Causal(), Tiles(512, 384, 128, 384))


@pytest.mark.usefixtures("straight")
def test_positions_and_segments():
    at = np.arange(300, dtype=np.int32)
    ids = (at // 110 - (at > 280) * 9)[None]
    held(300, 300, Causal(), where={"q_pos": at[None] + 5, "k_pos": at[::-1][None].copy(), "q_seg": ids, "k_seg": ids})


@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize("limit", [0.0, splash.OVERFLOW])
def test_second_attempts(monkeypatch, limit):
    """Of every block; then of the blocks whose earlier keys pass the reference by far, every other one."""
    monkeypatch.setattr(splash, "OVERFLOW", limit)
    height = np.repeat([0, 500, 0, 500], 128)[:500]
    held(500, 500, Causal(), backward=False, height=height)


def test_through_the_op_as_well():
    held(100, 100, Causal())


@pytest.mark.parametrize("waits", [True, False])
def test_the_detector_sees_a_copy_that_is_not_waited_for(waits):
    """In a double buffer as ours."""

    def kernel(x_hbm, out, buffer, arrived):
        copy = lambda j: pltpu.make_async_copy(x_hbm.at[pl.ds(8 * j, 8)], buffer.at[j % 2], arrived.at[j % 2])
        copy(0).start()
        for j in range(3):
            if j < 2:
                copy(j + 1).start()
            if waits:
                copy(j).wait()
            out[pl.ds(8 * j, 8)] = buffer[j % 2]
            if not waits:
                copy(j).wait()

    x = jnp.arange(24.0 * 128).reshape(24, 128)
    scratch = [pltpu.VMEM((2, 8, 128), jnp.float32), pltpu.SemaphoreType.DMA((2,))]
    spec = pl.BlockSpec(memory_space=pl.ANY)
    call = partial(pl.pallas_call, in_specs=[spec], scratch_shapes=scratch, out_shape=x, interpret=DETECT)
    out = jax.block_until_ready(jax.jit(call(kernel))(x))
    assert interpreter.races.races_found != waits
    if waits:
        np.testing.assert_array_equal(out, x)
