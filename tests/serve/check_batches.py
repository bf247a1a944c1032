"""The mixing of one layer under vLLM's batches, without its engine: equal to whole sequences, whatever the schedule."""

import random
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadata

from ringtide.models.laplace import PRESETS, Config, GatedLinearAttention, LaplaceForCausalLM, _whole, init_weights
from ringtide.models.laplace_vllm import LaplaceForVLLM, Memory, Settings, state_shapes

SHAPES = {
    "as it is": Config(dim=16, heads=2, kv_heads=2, key_dim=4, value_dim=6),
    "shared heads": Config(dim=16, heads=4, kv_heads=2, key_dim=4, value_dim=6),
    "no convolution": Config(dim=16, heads=2, kv_heads=2, key_dim=4, value_dim=6, conv=0),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_any_schedule_equals_whole_sequences(config):
    """Rows of one token and of many, blocks reused by other sequences and full of NaN when they are handed out."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    schedule = random.Random(0)
    layer = GatedLinearAttention(config, 0)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    memory = Memory(layer, torch.float32)
    blocks = 5
    memory.kv_cache = tuple(
        torch.full((blocks, *shape), torch.nan, dtype=dtype)
        for shape, dtype in zip(memory.get_state_shape(), memory.get_state_dtype(), strict=True)
    )
    waiting = [schedule.choice((1, 2, 3, 4, 5, 63, 64, 65, 150)) for _ in range(12)]
    free, running, checked = list(range(1, blocks)), [], 0  # vLLM never hands out block 0
    while waiting or running:
        while waiting and free:
            T = waiting.pop()
            x, g = torch.randn(T, sum(config.widths)), -torch.rand(T, config.widths[1]) / 8
            want = _whole(config, None, None)(layer, x[None], g[None])[0]
            running.append({"x": x, "g": g, "want": want, "at": 0, "block": free.pop(schedule.randrange(len(free)))})
        rows = schedule.sample(running, schedule.randint(1, len(running)))
        for row in rows:
            row["take"] = min(schedule.choice((1, 1, 2, 7, 64, 100)), len(row["x"]) - row["at"])
        rows.sort(key=lambda row: row["take"] > 1)
        takes = [row["take"] for row in rows]
        decodes, tokens = takes.count(1), sum(takes)
        batch = LinearAttentionMetadata(
            num_prefills=len(rows) - decodes,
            num_prefill_tokens=tokens - decodes,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            query_start_loc=torch.tensor([0, *takes], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor([row["at"] + row["take"] for row in rows], dtype=torch.int32),
            state_indices_tensor=torch.tensor([row["block"] for row in rows], dtype=torch.int32),
        )
        padding = schedule.choice((0, 3))  # tokens that belong to no row
        x, g = (
            torch.cat(
                [*(row[key][row["at"] : row["at"] + row["take"]] for row in rows), torch.full((padding, n), torch.nan)]
            )
            for key, n in (("x", sum(config.widths)), ("g", config.widths[1]))
        )
        out = torch.zeros(tokens + padding, config.heads, config.value_dim)
        others = [b for b in range(blocks) if b not in [row["block"] for row in rows]]
        before = [cache[others].clone() for cache in memory.kv_cache]
        memory.mix(x, g, batch, out)
        for cache, was in zip(memory.kv_cache, before, strict=True):
            torch.testing.assert_close(cache[others], was, rtol=0, atol=0, equal_nan=True)
        assert not out[tokens:].any()
        for row, got in zip(rows, out[:tokens].split(takes), strict=True):
            want = row["want"][row["at"] : row["at"] + row["take"]]
            assert (got - want).abs().max() <= 2e-6 * row["want"].abs().max()
            checked += row["take"]
            row["at"] += row["take"]
            if row["at"] == len(row["x"]):
                free.append(row["block"])
                for cache in memory.kv_cache:
                    cache[row["block"]] = torch.nan
        running = [row for row in running if row["at"] < len(row["x"])]
    assert checked > 500


def test_laplace_3b_takes_29_491_200_bytes_a_sequence():
    config = PRESETS["laplace-3b"]
    with torch.device("meta"):
        memory = Memory(GatedLinearAttention(config, 0), torch.bfloat16)
    assert memory.get_state_shape() == state_shapes(config)
    sizes = zip(memory.get_state_shape(), memory.get_state_dtype(), strict=True)
    assert config.layers * sum(prod(shape) * dtype.itemsize for shape, dtype in sizes) == 29_491_200


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norm", ["g_norm_swish_gate", "g_norm"])
def test_weights_by_fla_s_names(tied, norm):
    config = replace(PRESETS["laplace-micro"], tied=tied)
    there, here = init_weights(LaplaceForCausalLM(config), 1), init_weights(LaplaceForCausalLM(config), 2)
    weights = [(name.replace("g_norm_swish_gate", norm), p.detach() + 1) for name, p in there.named_parameters()]
    assert LaplaceForVLLM.load_weights(here, weights) == set(dict(here.named_parameters()))
    for (_, want), got in zip(weights, here.parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("part", "name", "value", "word"),
    [
        ("parallel_config", "tensor_parallel_size", 2, "--tensor-parallel-size 1"),
        ("cache_config", "enable_prefix_caching", True, "--enable-prefix-caching"),
        ("cache_config", "mamba_ssm_cache_dtype", "bfloat16", "the state is float32"),
        ("model_config", "quantization", "fp8", "--quantization"),
        (None, "speculative_config", "ngram", "--speculative-config"),
        (None, None, None, None),
    ],
)
def test_what_would_go_wrong_is_refused(part, name, value, word):
    cache = SimpleNamespace(enable_prefix_caching=False, mamba_ssm_cache_dtype="auto", mamba_cache_mode="none")
    cache.mamba_block_size = None
    config = SimpleNamespace(
        cache_config=cache,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(quantization=None, max_model_len=99),
        compilation_config=SimpleNamespace(),
        speculative_config=None,
    )
    if name is None:
        Settings.verify_and_update_config(config)
        assert cache.mamba_block_size == 99
    else:
        setattr(config if part is None else getattr(config, part), name, value)
        with pytest.raises(ValueError, match=word):
            Settings.verify_and_update_config(config)
