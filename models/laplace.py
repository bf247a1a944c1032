"""Laplace: a language model of gated linear attention in PyTorch, whose memory of a text is a state of fixed size.

    x = embeddings[tokens]
    every layer:  x += attn(norm(x))        q, k, v = silu(conv(x W));  g = log sigmoid(x W1 W2 + b) / 16
                                            o = gla(q, k, v, g);        norm(o) * silu(x Wg) Wo
                  x += mlp(norm(x))         (silu(h Wg) * (h Wu)) Wd
    logits = norm(x) Wout

What mixes tokens, `mix`, is an argument of the layers, so that the same lines run on whole sequences, on a sequence
split over ranks, on a chunk after a cache, and on the slots of a pool; all else sees single tokens. Parameters have
the names and shapes of fla's GLAForCausalLM. Letters: B batch, T time, D dim, N heads, K and V their widths, W taps of
the convolution, E channels under it (those of q, k and v), L layers.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringtide.models import check_number
from ringtide.models.laplace_autograd import convolve, cross_entropy
from ringtide.torch import gla, gla_decode_step_

GATE_RANK = 16  # of the two matrices that make the gates; fla's configuration has no name for it


@dataclass(frozen=True)
class Config:
    """The shape of a Laplace. Defaults: laplace-tiny, 2 M parameters over bytes."""

    vocab_size: int = 256
    layers: int = 3
    dim: int = 256
    ff_dim: int = 512
    heads: int = 2
    kv_heads: int = 2  # heads / kv_heads neighbouring heads share k, v and g
    key_dim: int = 64  # K, of a head
    value_dim: int = 128  # V
    conv: int = 4  # taps of the short convolution; 0: there is none
    gate_normalizer: float = 16.0
    clamp_min: float | None = None  # of the log gates
    norm_eps: float = 1e-6
    tied: bool = True  # the unembedding is the embedding

    def __post_init__(self):
        for name in ("vocab_size", "layers", "dim", "ff_dim", "heads", "kv_heads", "key_dim", "value_dim"):
            if type(value := getattr(self, name)) is not int or value < 1:  # a bool is no number
                raise ValueError(f"Config: {name} must be an int of at least 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"Config: heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if type(self.conv) is not int or not (self.conv == 0 or self.conv >= 2):
            raise ValueError(f"Config: conv must be 0 or an int of at least 2, got {self.conv!r}")
        check_number("Config", "gate_normalizer", self.gate_normalizer)
        check_number("Config", "norm_eps", self.norm_eps)
        if self.clamp_min is not None and not (type(self.clamp_min) in (int, float) and self.clamp_min <= 0):
            raise ValueError(f"Config: clamp_min must be None or a number of at most 0, got {self.clamp_min!r}")
        if not isinstance(self.tied, bool):
            raise ValueError(f"Config: tied must be True or False, got {self.tied!r}")

    @property
    def widths(self):
        """Channels of q, k and v: E is their sum."""
        return self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim


PRESETS = {
    "laplace-tiny": Config(),
    "laplace-micro": Config(layers=2, dim=32, ff_dim=64, heads=2, kv_heads=2, key_dim=8, value_dim=16),
    "laplace-3b": Config(50304, 24, 3072, 8192, 16, 16, 96, 192, tied=False),
}


def silu(x):
    """x sigmoid(x). Without gradients, an element's bits do not depend on where it stands: PyTorch's own function takes
    the last few of a tensor on a CPU through another exponential.
    """
    if torch.is_grad_enabled():
        return F.silu(x)
    y = x.float()
    return (y / (1 + torch.exp(-y))).to(x.dtype)


class RMSNorm(nn.Module):
    """x [..., dim] over its root mean square, in float32."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x, gate=None):
        """With `gate`, like x: times silu(gate) before it is rounded to x.dtype."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (y if gate is None else y * silu(gate.float())).to(x.dtype)


class Taps(nn.Module):
    """The weight [channels, 1, W] of a depthwise convolution: the last tap meets the token itself."""

    def __init__(self, channels, taps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedLinearAttention(nn.Module):
    def __init__(self, config: Config, index: int):
        super().__init__()
        self.config, self.index = config, index
        dim, (q, k, v), values = config.dim, config.widths, config.heads * config.value_dim
        self.q_proj = nn.Linear(dim, q, bias=False)
        self.k_proj = nn.Linear(dim, k, bias=False)
        self.v_proj = nn.Linear(dim, v, bias=False)
        self.g_proj = nn.Linear(dim, values, bias=False)
        if config.conv:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (Taps(width, config.conv) for width in (q, k, v))
        self.gk_proj = nn.Sequential(nn.Linear(dim, GATE_RANK, bias=False), nn.Linear(GATE_RANK, k))
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.g_norm_swish_gate = RMSNorm(config.value_dim, config.norm_eps)

    def forward(self, x, mix):
        """x [..., D] -> [..., D].

        mix: (this layer, x of q, k and v before the convolution [..., E], log gates [..., k's width] float32)
        -> o [..., N, V]: the only place where one token sees another.
        """
        c = self.config
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        g = F.logsigmoid(self.gk_proj(x).float()) / c.gate_normalizer
        if c.clamp_min is not None:
            g = g.clamp_min(c.clamp_min)
        o = mix(self, qkv, g)
        gate = self.g_proj(x).unflatten(-1, (c.heads, c.value_dim))
        return self.o_proj(self.g_norm_swish_gate(o, gate).flatten(-2))

    def convolve(self, x, same=None):
        """[B, W - 1 + T, E], the first W - 1 tokens being those before -> [B, T, E], through silu; float32 inside.

        same: bool [B, T, W - 1], whether the token r = 1 ... W - 1 before belongs to the same text; None: all do.
        """
        w = torch.cat([taps.weight for taps in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])  # [E, 1, W]
        return silu(convolve(x, w[:, 0].mT.float().contiguous(), same)).to(x.dtype)

    def heads(self, qkv, g):
        """[..., E] and the gates -> q, k [..., N, K], v [..., N, V], g [..., N, K]."""
        c = self.config
        q, k, v = qkv.split(c.widths, -1)
        q, k, g = (x.unflatten(-1, (-1, c.key_dim)) for x in (q, k, g))
        v = v.unflatten(-1, (-1, c.value_dim))
        if (groups := c.heads // c.kv_heads) > 1:
            k, v, g = (x.repeat_interleave(groups, -2) for x in (k, v, g))
        return q, k, v, g


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ff_dim, bias=False)
        self.down_proj = nn.Linear(config.ff_dim, config.dim, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config, index: int):
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = GatedLinearAttention(config, index)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, mix):
        x = x + self.attn(self.attn_norm(x), mix)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, tokens, mix, remat=False):
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, mix, use_reentrant=False) if remat else layer(x, mix)
        return self.norm(x)


class LaplaceForCausalLM(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Model(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embeddings.weight

    def forward(self, input_ids, *, targets=None, segment_ids=None, context=None, cache=None, remat=False):
        """Logits, or the loss, or a step of a cache, of tokens int [B, T].

        targets: int [B, T] -> the sum of the cross-entropy in nats over targets of at least 0, a float32 scalar. Never
            more than 1,024 tokens' logits exist, each computed once.
        cache: see `new_cache` -> (float32 logits [B, vocabulary] after each row's last token, the cache after it).
        neither -> float32 logits [B, T, vocabulary].
        segment_ids: int [B, T]: a change of id begins a text that sees nothing before it; negative: padding, which
            sees and changes nothing, wherever it stands (with context: anywhere but inside a text).
        context: the torch.distributed group over which the sequences are split, rank after rank; T is a rank's share.
        remat: the backward pass computes each layer again from its input.
        """
        order = None
        if segment_ids is not None and context is None:
            # Padding goes to the end of its row, where no token looks back over it.
            order = (segment_ids < 0).to(torch.int8).argsort(dim=1, stable=True)
            input_ids, segment_ids = input_ids.gather(1, order), segment_ids.gather(1, order)
            targets = None if targets is None else targets.gather(1, order)
        if cache is not None:
            mix = _Cached(self.config, cache, segment_ids)
        else:
            mix = _whole(self.config, segment_ids, context)
        h = self.model(input_ids, mix, remat)
        if targets is not None:
            return cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets.flatten())
        if cache is None:
            return self.lm_head(h if order is None else h.gather(1, order.argsort(1)[..., None].expand_as(h))).float()
        last = h[:, -1]
        if segment_ids is not None:
            at = ((segment_ids >= 0).sum(1) - 1).clamp_min(0)
            last = h.gather(1, at[:, None, None].expand(-1, 1, h.shape[-1]))[:, 0]
        return self.lm_head(last).float(), mix.after()

    def new_cache(self, rows: int) -> dict:
        """The function of that name, in the dtype and on the device of the weights."""
        weight = self.model.embeddings.weight
        return new_cache(self.config, rows, weight.dtype, weight.device)

    @torch.no_grad()
    def decode_(self, tokens, cache, alive=None):
        """One token of every row of a cache: int [rows] -> float32 logits [rows, vocabulary]. The cache is changed in
        place, but rows that are not alive (bool [rows]; None: all are) stay as they are, whatever their token.

        Every call has the same shapes and touches the same bytes, however much the rows have read.
        """
        return self.lm_head(self.model(tokens, _in_place(self.config, cache, alive))).float()


def _same(ids, taps):
    """bool [B, T, W - 1] for `convolve`, of ids [B, W - 1 + T]: which of the tokens before are of the same text."""
    T = ids.shape[1] - (taps - 1)
    run = F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))  # an id that comes again begins another text
    now = run[:, taps - 1 :]
    return torch.stack([run[:, taps - 1 - r : taps - 1 - r + T] == now for r in range(1, taps)], -1)


def _whole(config, segment_ids, group):
    """The `mix` of whole sequences, or of this rank's part of them."""
    W, same = config.conv, None
    if group is None:
        scan, halo = gla, lambda x, count, group: x.new_zeros(x.shape[0], count, *x.shape[2:])
    else:  # not every PyTorch has torch.distributed
        from ringtide.torch.context_parallel import context_parallel_gla, halo

        scan = partial(context_parallel_gla, group=group)
    if W and segment_ids is not None:
        # Before the first token of all: zeros, which may count as of its text.
        same = _same(torch.cat((halo(segment_ids, W - 1, group), segment_ids), 1), W)

    def mix(layer, qkv, g):
        if W:
            qkv = layer.convolve(torch.cat((halo(qkv, W - 1, group), qkv), 1), same)
        return scan(*layer.heads(qkv, g), segment_ids=segment_ids)[0]

    return mix


class _Cached:
    """The `mix` of tokens that go on after a cache; `after()` is the cache then. Padding only at the ends of rows."""

    def __init__(self, config, cache, segment_ids):
        self.W, self.cache, self.ids = config.conv, cache, segment_ids
        self.state, self.conv = [], []
        if self.W and self.ids is not None:
            # What the cache holds belongs to the text that goes on, the first one.
            ids = torch.cat((self.ids[:, :1].expand(-1, self.W), self.ids), 1)
            self.same = _same(ids[:, 1:], self.W)
            self.keep = (self.ids >= 0).sum(1, keepdim=True) + torch.arange(self.W, device=ids.device)  # [B, W]
            run = F.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0)).gather(1, self.keep)
            self.kept = run == run[:, -1:]

    def __call__(self, layer, qkv, g):
        W, ids = self.W, self.ids
        conv, state = self.cache["conv"][layer.index], self.cache["state"][layer.index]
        if W:
            x = torch.cat((conv.mT.to(qkv.dtype), qkv), 1)  # [B, W + T, E]
            qkv = layer.convolve(x[:, 1:], None if ids is None else self.same)
            if ids is None:
                x = x[:, -W:]
            else:
                x = x.gather(1, self.keep[..., None].expand(-1, -1, x.shape[-1]))
                x = torch.where(self.kept[..., None], x, 0)
            conv = x.mT.to(conv.dtype)
        heads = layer.heads(qkv, g)
        o, state = gla(*heads, initial_state=state, output_final_state=True, segment_ids=ids)
        self.conv.append(conv)
        self.state.append(state)
        return o

    def after(self):
        return {"state": torch.stack(self.state), "conv": torch.stack(self.conv)}


def _in_place(config, cache, alive):
    """The `mix` of one token of each row, which changes the cache."""
    if alive is not None:
        alive = alive[:, None, None]

    def mix(layer, qkv, g):
        if config.conv:
            conv = cache["conv"][layer.index]  # [rows, E, W]
            x = torch.cat((conv.mT[:, 1:].to(qkv.dtype), qkv[:, None]), 1)  # [rows, W, E]
            qkv = layer.convolve(x)[:, 0]
            x = x.mT.to(conv.dtype)
            conv.copy_(x if alive is None else torch.where(alive, x, conv))
        q, k, v, g = layer.heads(qkv, g)
        if alive is not None:  # what adds nothing and decays nothing leaves the state as it is
            k, g = torch.where(alive, k, 0), torch.where(alive, g, 0)
        return gla_decode_step_(q, k, v, g, cache["state"][layer.index])

    return mix


def new_cache(config: Config, rows: int, dtype=torch.bfloat16, device=None) -> dict:
    """What `rows` sequences remember before their first token: {"state": float32 [L, rows, N, K, V], "conv": `dtype`
    [L, rows, E, W], the last W tokens before the convolution}. In the dtype of the weights nothing is rounded.
    """
    c = config
    state = torch.zeros(c.layers, rows, c.heads, c.key_dim, c.value_dim, device=device)
    return {"state": state, "conv": torch.zeros(c.layers, rows, sum(c.widths), c.conv, dtype=dtype, device=device)}


def state_bytes(config: Config, dtype=torch.bfloat16) -> int:
    """Bytes that a sequence takes in a cache, however long it is."""
    return sum(x.nbytes for x in new_cache(config, 1, dtype, "meta").values())


def initial_weights(config: Config, seed: int):
    """Yields (name, float32 tensor on the CPU) of every parameter in order: the same whoever asks.

    As fla's: norms 1, the gate's bias 0, all else normal with deviation 0.02; so are the taps, with which a small model
    learnt no slower than with PyTorch's own for a depthwise convolution, uniform within 1 / sqrt(W).
    """
    with torch.device("meta"):
        names = {name: p.shape for name, p in LaplaceForCausalLM(config).named_parameters()}
    for i, (name, shape) in enumerate(names.items()):
        random = torch.Generator().manual_seed((seed << 20) + i)
        if "norm" in name:
            yield name, torch.ones(shape)
        elif name.endswith("bias"):
            yield name, torch.zeros(shape)
        else:
            yield name, torch.empty(shape).normal_(0, 0.02, generator=random)


@torch.no_grad()
def init_weights(model: LaplaceForCausalLM, seed: int) -> LaplaceForCausalLM:
    """Fills the parameters of a model, on any device and in any dtype, from `initial_weights`."""
    parameters = dict(model.named_parameters())
    for name, value in initial_weights(model.config, seed):
        parameters[name].copy_(value)
    if model.config.tied:  # `to_empty` lets go of each other what was one
        model.lm_head.weight = model.model.embeddings.weight
    return model
