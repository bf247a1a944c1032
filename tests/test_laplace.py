"""Laplace: fla's own numbers, the seams of its cache, texts apart."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ringtide.models import laplace, laplace_autograd, laplace_weights  # noqa: E402
from ringtide.models.laplace import PRESETS, Config, LaplaceForCausalLM, init_weights, new_cache  # noqa: E402

GOLDENS = Path(__file__).parent / "goldens"
MICRO = PRESETS["laplace-micro"]
SHAPES = {
    "conv": MICRO,
    "plain": dataclasses.replace(MICRO, conv=0, tied=False),
    "shared": dataclasses.replace(MICRO, heads=4, clamp_min=-0.03, conv=3, gate_normalizer=2.0),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def model(request):
    return loud(request.param)


def loud(config, seed=0):
    """A model whose layers say as much as its embedding: nothing is hidden under the residual."""
    model = init_weights(LaplaceForCausalLM(config), seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 1 if "embed" in name else p.shape[1] ** -0.5, generator=random)
            elif "conv1d" in name:
                p.uniform_(-0.5, 0.5, generator=random)
            elif "norm" in name:
                p.uniform_(0.5, 1.5, generator=random)
    return model.requires_grad_(False)


def tokens_of(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def close(got, want, bound=2e-6):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= bound * want.abs().max()


def equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# The model against fla's, and by itself.


@pytest.mark.parametrize("name", ["laplace", "laplace-conv"])
def test_golden_of_fla(name):
    """Theirs is float32, too: these bounds are of both together."""
    golden = np.load(GOLDENS / name / "expected.npz")
    model = laplace_weights.load(GOLDENS / name)
    tokens = torch.tensor(golden["tokens"]).long()
    close(model(tokens), torch.tensor(golden["logits"]), 1e-5)
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-1)
    loss = model(tokens, targets=targets) / (targets >= 0).sum()
    assert abs(loss.item() - golden["loss"]) < 1e-5
    loss.backward()
    theirs = {key: golden[key] for key in golden.files if key.startswith("d ")}
    for key, p in model.named_parameters():
        if f"d {key}" not in theirs:  # in a config that does not fuse it
            key = key.replace("g_norm_swish_gate", "g_norm")
        close(p.grad, torch.tensor(theirs.pop(f"d {key}")), 3e-5)
    assert not theirs


def test_laplace_3b_has_the_published_size():
    with torch.device("meta"):
        model = LaplaceForCausalLM(PRESETS["laplace-3b"])
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 3.03
    assert laplace.state_bytes(model.config) == 29_491_200
    cache = new_cache(model.config, 1, device="meta")
    assert cache["state"].shape == (24, 1, 16, 96, 192)
    assert cache["conv"].shape == (24, 1, 6144, 4)


def test_laplace_tiny_is_as_large_as_the_tiny_llama():
    count = sum(p.numel() for p in LaplaceForCausalLM(PRESETS["laplace-tiny"]).parameters())
    assert abs(count / 2_131_200 - 1) < 0.05


def test_initial_weights_are_the_same_whoever_asks():
    one, other = (init_weights(LaplaceForCausalLM(MICRO), seed) for seed in (1, 2))
    with torch.device("meta"):
        late = LaplaceForCausalLM(MICRO)
    late = init_weights(late.to_empty(device="cpu"), 1)
    for (name, p), q, r in zip(one.named_parameters(), other.parameters(), late.parameters(), strict=True):
        equal(p, r)
        assert p.std() == 0 or not torch.equal(p, q), name
        assert p.isfinite().all()


def test_bfloat16_weights_and_their_cache():
    model, tokens = loud(MICRO), tokens_of(2, 40)
    half = copy.deepcopy(model).bfloat16()
    want = copy.deepcopy(half).float()(tokens)
    got = half(tokens)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.1 * want.abs().max()
    cache = half.new_cache(2)
    assert cache["conv"].dtype == torch.bfloat16
    assert cache["state"].dtype == torch.float32
    got, cache = half(tokens[:, :-1], cache=cache)
    assert (half.decode_(tokens[:, -1], cache) - want[:, -1]).abs().max() < 0.1 * want.abs().max()


# The loss.


def gradients(model, tokens, targets, **options):
    model = copy.deepcopy(model).requires_grad_(True)
    loss = model(tokens, targets=targets, **options)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def test_the_loss_is_that_of_all_logits(model, monkeypatch):
    monkeypatch.setattr(laplace_autograd, "LOSS_CHUNK", 24)
    tokens, targets = tokens_of(2, 50), tokens_of(2, 50, seed=1)
    targets[0, 7:9] = -1
    loss, found = gradients(model, tokens, targets)
    plain = copy.deepcopy(model).requires_grad_(True)
    logits = plain(tokens).flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")
    want.backward()
    close(loss, want.detach())
    for got, p in zip(found, plain.parameters(), strict=True):
        close(got, p.grad, 1e-5)
    again, recomputed = gradients(model, tokens, targets, remat=True)
    assert again == loss
    for a, b in zip(found, recomputed, strict=True):
        equal(a, b)


def test_the_loss_never_holds_all_logits():
    """The largest tensor that is allocated, with 50 times as many tokens as a chunk has."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.numel())
            return out

    h = torch.randn(50 * laplace_autograd.LOSS_CHUNK, 2, requires_grad=True)
    weight = torch.randn(512, 2, requires_grad=True)
    with Largest() as largest:
        laplace_autograd.cross_entropy(h, weight, torch.zeros(len(h), dtype=torch.long)).backward()
    assert largest.size == laplace_autograd.LOSS_CHUNK * 512


@pytest.mark.slow
def test_the_loss_compiles_to_the_same_numbers():
    tokens, targets = tokens_of(2, 20), tokens_of(2, 20, seed=1)
    ids = torch.tensor([[0] * 9 + [1] * 11, [2] * 20])
    for remat in (False, True):
        model = loud(MICRO).requires_grad_(True)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        loss = compiled(tokens, targets=targets, segment_ids=ids, remat=remat)
        loss.backward()
        want, grads = gradients(model, tokens, targets, segment_ids=ids)
        close(loss.detach(), want)
        for p, expected in zip(model.parameters(), grads, strict=True):
            close(p.grad, expected, 1e-5)


def test_no_target_no_loss(model):
    loss, grads = gradients(model, tokens_of(1, 5), torch.full((1, 5), -1))
    assert loss == 0
    assert not any(g.any() for g in grads)


# The cache.


def through(model, tokens, *splits):
    """(logits after the last token, the cache) of chunks in turn, each [B, split] tokens."""
    cache, at = new_cache(model.config, len(tokens), torch.float32), 0
    for split in (*splits, tokens.shape[1]):
        logits, cache = model(tokens[:, at:split], cache=cache)
        at = split
    return logits, cache


def test_a_cache_may_begin_anywhere(model):
    tokens = tokens_of(2, 70)
    want, whole = model(tokens), through(model, tokens)[1]
    for splits in [(i,) for i in (1, 2, 3, 4, 5, 63, 64, 65, 69)] + [(1, 2, 3, 40), (3, 6, 66)]:
        logits, cache = through(model, tokens, *splits)
        close(logits, want[:, -1])
        for name, x in cache.items():
            assert x.shape == whole[name].shape
            if x.numel():
                close(x, whole[name])


def test_decode_goes_on_after_any_prefill(model):
    tokens = tokens_of(2, 70)
    want = model(tokens)
    for split in (0, 1, 2, 3, 4, 33, 64, 69):
        cache = through(model, tokens[:, :split])[1] if split else new_cache(model.config, 2, torch.float32)
        got = [model.decode_(tokens[:, t], cache) for t in range(split, 70)]
        close(torch.stack(got, 1), want[:, split:])


def test_a_chunk_of_one_token_is_a_decode_step(model):
    tokens = tokens_of(2, 9)
    _, cache = through(model, tokens[:, :8])
    logits, new = model(tokens[:, 8:], cache=cache)
    close(model.decode_(tokens[:, 8], cache), logits)
    for name, x in cache.items():
        assert x.shape == new[name].shape
        assert x.stride() == new[name].stride()


def test_rows_that_are_not_alive_stay_as_they_are(model):
    tokens = tokens_of(3, 12)
    _, cache = through(model, tokens)
    for x in cache.values():
        x[:, 2] = torch.nan
    before = {name: x.clone() for name, x in cache.items()}
    twin = {name: x.clone() for name, x in cache.items()}
    model.decode_(torch.tensor([1, 2, 3]), cache, torch.tensor([True, False, False]))
    model.decode_(torch.tensor([1, 7, 9]), twin, torch.tensor([True, False, False]))
    for name, x in cache.items():
        torch.testing.assert_close(x[:, 1:], before[name][:, 1:], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(x, twin[name], rtol=0, atol=0, equal_nan=True)
        assert not x.numel() or not torch.equal(x[:, 0], before[name][:, 0])


# Texts in one row, and padding.


def test_texts_in_a_row_do_not_see_each_other(model):
    tokens = tokens_of(1, 40)
    ids = torch.tensor([[3] * 1 + [0] * 2 + [7] * 3 + [0] * 20 + [1] * 14])  # an id that comes again begins anew
    got = model(tokens, segment_ids=ids)
    at = 0
    for length in (1, 2, 3, 20, 14):
        close(got[:, at : at + length], model(tokens[:, at : at + length]))
        at += length
    tokens[0, 5] += 1
    changed = model(tokens % 256, segment_ids=ids)
    equal(changed[0, :5], got[0, :5])
    equal(changed[0, 6:], got[0, 6:])


def test_padding_is_as_if_it_were_not_there(model):
    tokens = tokens_of(2, 30)
    ids = torch.zeros(2, 30, dtype=torch.long)
    ids[0, :4] = ids[0, 9:11] = ids[0, 25:] = -1
    ids[1, 12:14] = -2
    ids[1, 20:] = 5
    real = tokens[0, ids[0] >= 0][None]
    got = model(tokens, segment_ids=ids)
    close(got[0, ids[0] >= 0], model(real)[0])
    first = torch.cat((tokens[1, :12], tokens[1, 14:20]))
    close(got[1, (ids[1] == 0)], model(first[None])[0])
    close(got[1, 20:], model(tokens[1:, 20:])[0])
    poisoned = torch.where(ids < 0, 255 - tokens, tokens)
    equal(model(poisoned, segment_ids=ids)[ids >= 0], got[ids >= 0])
    targets = torch.where(ids < 0, -1, tokens_of(2, 30, seed=4))
    want = torch.nn.functional.cross_entropy(got[ids >= 0], targets[ids >= 0], reduction="sum")
    loss, grads = gradients(model, tokens, targets, segment_ids=ids)
    close(loss, want)
    for a, b in zip(grads, gradients(model, poisoned, targets, segment_ids=ids)[1], strict=True):
        equal(a, b) if a.shape[0] != 256 else None  # the embedding's gradient is where the tokens are


def test_padded_chunks_of_a_cache(model):
    """Two rows of other lengths, cut anywhere: a row with nothing in a chunk, a text that ends inside one."""
    tokens = tokens_of(2, 24)
    cache = new_cache(model.config, 2, torch.float32)
    lengths = ((8, 3), (8, 0), (2, 7))
    read = [[], []]
    for at, row_lengths in enumerate(lengths):
        part = tokens[:, at * 8 : at * 8 + 8]
        ids = torch.full((2, 8), -1)
        for row, n in enumerate(row_lengths):
            ids[row, 8 - n if row else 0 : 8 if row else n] = 4  # padding after, and before
            read[row].append(part[row][ids[row] >= 0])
        logits, cache = model(part, cache=cache, segment_ids=ids)
    for row in (0, 1):
        want, alone = through(model, torch.cat(read[row])[None])
        close(logits[row], want[0])
        for name, x in cache.items():
            if x.numel():
                close(x[:, row], alone[name][:, 0])
    ids = torch.tensor([[4, 4, 9, 9], [4, 9, -1, -1]])  # a new text begins inside the chunk
    logits, cache = model(tokens[:, :4], cache=cache, segment_ids=ids)
    for row, text in enumerate((tokens[0, 2:4], tokens[1, 1:2])):
        want, alone = through(model, text[None])
        close(logits[row], want[0])
        for name, x in cache.items():
            if x.numel():
                close(x[:, row], alone[name][:, 0])


def split_over_ranks(rank, count):
    """Loss and gradients of the ranks' shares add up to those of the whole; texts go on over ranks."""
    import torch.distributed as dist

    T = 10
    for config in (SHAPES["conv"], SHAPES["shared"]):
        model = loud(config)
        tokens, targets = tokens_of(2, T * count), tokens_of(2, T * count, seed=1)
        ids = torch.tensor([[0] * 7 + [3] * 5 + [0] * (T * count - 12), [2] * 11 + [6] * 4 + [-1] * (T * count - 15)])
        mine = slice(rank * T, (rank + 1) * T)
        for segments in (None, ids):
            whole = targets if segments is None else targets.where(segments >= 0, -1)
            local = None if segments is None else segments[:, mine]
            want = gradients(model, tokens, whole, segment_ids=segments)
            share = dict(segment_ids=local, context=dist.group.WORLD, remat=segments is None)
            loss, grads = gradients(model, tokens[:, mine], whole[:, mine], **share)
            for x in (loss, *grads):
                dist.all_reduce(x)
            close(loss, want[0])
            for got, expected in zip(grads, want[1], strict=True):
                close(got, expected, 1e-5)
            logits = model(tokens[:, mine], segment_ids=local, context=dist.group.WORLD)
            expected = model(tokens, segment_ids=segments)[:, mine]
            real = slice(None) if local is None else local >= 0
            close(logits[real], expected[real])


def test_a_sequence_split_over_ranks(ranks):
    ranks("split_over_ranks", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_of_an_element_does_not_depend_on_its_place(dtype):
    x = torch.randn(200, 1, 37, generator=torch.Generator().manual_seed(0)).to(dtype).expand(200, 7, 37).contiguous()
    with torch.no_grad():
        y = torch.stack([laplace.silu(rows) for rows in x])
    equal(y, y[:, :1].expand_as(y).contiguous())
    torch.testing.assert_close(y, torch.nn.functional.silu(x))
    with torch.no_grad():
        extreme = laplace.silu(torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30], dtype=dtype))
    torch.testing.assert_close(extreme, torch.tensor([0.0, 0.0, 0.0, 100.0, 1e30], dtype=dtype))


# The step of a server.


def test_decode_costs_the_same_after_any_prompt():
    """One compiled graph, and the same shapes, strides and bytes, after 2,048 tokens and after 32,768."""
    from torch._dynamo.testing import CompileCounter

    config = dataclasses.replace(MICRO, layers=1)
    model, graphs = loud(config), CompileCounter()
    step = torch.compile(model.decode_, backend=graphs, fullgraph=True, dynamic=False)
    cache, at, seen = model.new_cache(1), 0, set()
    long = tokens_of(1, 32_768)
    for length in (1, 2048, 32_768):
        _, cache = model(long[:, at:length], cache=cache)
        at = length
        for _ in range(2):
            step(long[:, 0], cache)
            seen.add(tuple((name, x.shape, x.stride(), x.dtype, x.nbytes) for name, x in sorted(cache.items())))
    assert graphs.frame_count == 1
    assert len(seen) == 1
    assert sum(x.nbytes for x in cache.values()) == laplace.state_bytes(config, torch.float32)


def test_the_step_compiles_to_the_same_numbers():
    model, tokens = loud(SHAPES["shared"]), tokens_of(2, 6)
    cache, twin = (through(model, tokens)[1] for _ in range(2))
    compiled = torch.compile(model.decode_, fullgraph=True, dynamic=False, backend="aot_eager")
    alive = torch.tensor([True, False])
    close(compiled(tokens[:, 0], cache, alive), model.decode_(tokens[:, 0], twin, alive))
    for name, x in cache.items():
        close(x, twin[name])


def test_nothing_here_imports_jax():
    code = (
        "import sys, ringtide.models.laplace_generate, ringtide.models.laplace_weights, ringtide.torch\n"
        "print([name for name in ('jax', 'jaxlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be an int of at least 1, got 0"),
        ({"conv": -1}, "conv must be 0 or an int of at least 2, got -1"),
        ({"heads": 3}, "heads must be a multiple of kv_heads, got 3 and 2"),
        ({"clamp_min": 1}, "clamp_min must be None or"),
        ({"gate_normalizer": float("inf")}, "gate_normalizer must be a finite number"),
    ],
)
def test_configs_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Config(), **changes)
