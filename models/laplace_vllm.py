"""Laplace in vLLM: a plug-in (entry point group vllm.general_plugins), so that vLLM serves it as it is installed.

vLLM knows layers that remember a sequence in one block of fixed size. It keeps a pool of blocks, and says with each
batch which block a row owns. The model here is that of laplace.py, names of weights and all; only its `mix` is another:
a custom op, which torch.compile does not look into, and which finds the batch in vLLM's forward context. The tokens of
the batch [T] are those of its rows, end to end; a row is a prompt, a part of one, or the token decoded last.

    a block        is zeros to a row that begins its sequence, whatever its last owner left there
    convolution    over [W taps of row 0's block, row 0, W taps of row 1's block, row 1, ...]
    first rows     of one token each: decode steps
    other rows     chunk_gla with cu_seqlens

vLLM's --data-parallel-size makes several servers of a whole model each; a model is not split over devices.
"""

import torch
from transformers import AutoConfig, PreTrainedConfig
from vllm import ModelRegistry
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ringtide.models.laplace import Config, LaplaceForCausalLM
from ringtide.models.laplace_weights import config_of
from ringtide.torch import chunk_gla, gla_decode_step_

ARCHITECTURE = "GLAForCausalLM"  # what config.json names


class GLAConfig(PreTrainedConfig):
    """config.json as vLLM reads it, fla's default where transformers has another."""

    model_type = "gla"
    tie_word_embeddings: bool = False

    def __post_init__(self, **keys):
        keys.pop("max_position_embeddings", None)  # no position enters the model: --max-model-len may be anything
        super().__post_init__(**{key: value for key, value in keys.items() if value is not None})  # null: left out


class Settings(MambaModelConfig):
    """What vLLM asks before it builds anything."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache = vllm_config.cache_config
        for wrong, cure in (
            (vllm_config.parallel_config.tensor_parallel_size > 1, "a model is not split: --tensor-parallel-size 1"),
            (cache.enable_prefix_caching, "no state but the last is kept: leave out --enable-prefix-caching"),
            (
                cache.mamba_ssm_cache_dtype not in ("auto", "float32"),
                "the state is float32: --mamba-ssm-cache-dtype auto",
            ),
            (vllm_config.speculative_config, "a state cannot take tokens back: leave out --speculative-config"),
            (vllm_config.model_config.quantization, "its matrices are not quantized: leave out --quantization"),
        ):
            if wrong:
                raise ValueError(f"Laplace: {cure}")
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE  # a recorded batch would be replayed
        super().verify_and_update_config(vllm_config)


def state_shapes(config: Config):
    """Of a block: the state, and the taps if there is a convolution."""
    state = config.heads, config.key_dim, config.value_dim
    return (state, (sum(config.widths), config.conv)) if config.conv else (state,)


def state_dtypes(config: Config, dtype):
    return (torch.float32, dtype)[: len(state_shapes(config))]


class Memory(MambaBase):
    """A layer's part of the pool: kv_cache = (states float32 [blocks, N, K, V], taps [blocks, E, W])."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, layer, dtype):
        self.layer, self.dtype = layer, dtype

    def get_state_shape(self):
        return state_shapes(self.layer.config)

    def get_state_dtype(self):
        return state_dtypes(self.layer.config, self.dtype)

    def mix(self, x, g, batch, out):
        """Tokens x [T, E] before the convolution and their gates -> out [T, N, V]; the blocks go on."""
        decodes, rows = batch.num_decodes, batch.num_decodes + batch.num_prefills
        T = batch.num_decode_tokens + batch.num_prefill_tokens
        begin = batch.query_start_loc[: rows + 1].long()
        lengths = begin.diff()
        block = batch.state_indices_tensor[:rows].long()
        old = batch.seq_lens[:rows] > lengths  # those that have a past
        states = self.kv_cache[0]

        if W := self.layer.config.conv:
            taps = self.kv_cache[1]
            row = torch.repeat_interleave(torch.arange(rows, device=x.device), lengths, output_size=T)
            at = torch.arange(T, device=x.device) + (row + 1) * W  # where the tokens are among the taps
            ends = (begin[1:] + torch.arange(1, rows + 1, device=x.device) * W)[:, None]
            last = ends + torch.arange(-W, 0, device=x.device)
            first = last - lengths[:, None]
            line = x.new_empty(T + rows * W, x.shape[1])
            line[first] = torch.where(old[:, None, None], taps[block].mT, 0).to(x.dtype)
            line[at] = x[:T]
            x = self.layer.convolve(line[None])[0, at - (W - 1)]
            taps[block] = line[last].mT.to(taps.dtype)
        q, k, v, g = self.layer.heads(x[:T], g[:T])
        if decodes:
            tokens = (y[:decodes] for y in (q, k, v, g))
            slots = dict(slot_ids=block[:decodes], has_initial_state=old[:decodes])
            out[:decodes] = gla_decode_step_(*tokens, states, **slots)
        if decodes < rows:
            block, old = block[decodes:], old[decodes:, None, None, None]
            o, states[block] = chunk_gla(
                *(y[None, decodes:] for y in (q, k, v, g)),
                initial_state=torch.where(old, states[block], 0),
                output_final_state=True,
                cu_seqlens=begin[decodes:] - decodes,
            )
            out[decodes:T] = o[0]


@torch.library.custom_op("ringtide::laplace_vllm_mix", mutates_args=("out",))
def mix(x: torch.Tensor, g: torch.Tensor, out: torch.Tensor, name: str) -> None:
    context = get_forward_context()
    if context.attn_metadata is not None:  # else it is a run that only finds out what memory is needed
        context.no_compile_layers[name].mix(x, g, context.attn_metadata[name], out)


@mix.register_fake
def _(x, g, out, name):
    return None


def _config(vllm_config):
    return config_of(vllm_config.model_config.hf_config.to_dict())


@support_torch_compile
class LaplaceForVLLM(LaplaceForCausalLM, HasInnerState, IsAttentionFree):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(_config(vllm_config))
        for layer in self.model.layers:
            memory = Memory(layer.attn, vllm_config.model_config.dtype)
            vllm_config.compilation_config.static_forward_context[_name(layer.attn)] = memory

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):
        return state_shapes(_config(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config):
        return state_dtypes(_config(vllm_config), vllm_config.model_config.dtype)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embeddings(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, _mix)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights):
        # fla has two names for this norm, by whether it is fused.
        return AutoWeightsLoader(self).load_weights(
            (n.replace(".g_norm.", ".g_norm_swish_gate."), w) for n, w in weights
        )


def _name(layer):
    return f"model.layers.{layer.index}.attn"


def _mix(layer, x, g):
    out = x.new_zeros(len(x), layer.config.heads, layer.config.value_dim)
    mix(x, g, out, _name(layer))
    return out


def register() -> None:
    """The entry point: vLLM calls it in each of its processes."""
    AutoConfig.register(GLAConfig.model_type, GLAConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, LaplaceForVLLM)
    MODELS_CONFIG_MAP[ARCHITECTURE] = Settings
