"""From a Hugging Face config to megatron-core's model, cut into chunks: this rank's layers, on packed sequences.

The layers are megatron-core's own. What it takes from here are four modules: attention over the packs that every
engine shares (`common/attention.py`), the positions of a pack, a norm, and an output layer that hands on hidden states.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron import core
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional as F
from transformers import PretrainedConfig

from pellucid.errors import UserError
from pellucid.training.common.packing import ModelInput
from pellucid.training.megatron.architectures import rope
from pellucid.training.megatron.layout import MegatronLayout

parallel_state: Any = core.parallel_state  # whose groups are typed as what they never are
moe_utils.__dict__.setdefault("te_general_gemm", None)  # which it looks up and, without Transformer Engine, never sets


@dataclass(slots=True)
class Pack:
    """What attention and positions need of a micro-batch; megatron-core hands it down to every layer, recomputed or not
    (`packed_seq_params`).
    """

    inputs: ModelInput
    own: slice
    """Which tokens this context-parallel rank has."""
    qkv_format: str = "pellucid"
    """Not megatron-core's own format of packs, which is Transformer Engine's."""
    cp_group: Any = None


def chunk_config(
    model: PretrainedConfig, layout: MegatronLayout, dtype: torch.dtype, *, recompute: bool, overrides: dict[str, Any]
) -> TransformerConfig:
    """Return megatron-core's config of a model, with `overrides` of its fields.

    Raises:
        UserError: megatron-core refuses the sizes or an override.
    """
    fields, sizes = model.to_dict(), layout.sizes
    heads, groups = fields["num_attention_heads"], fields.get("num_key_value_heads") or fields["num_attention_heads"]
    padded = padded_size(groups, layout)
    experts = {}
    if model.model_type == "qwen3_moe":
        experts = {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": fields["num_experts_per_tok"],
            "moe_ffn_hidden_size": fields["moe_intermediate_size"],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
        }
    bf16 = dtype == torch.bfloat16
    known: dict[str, Any] = {
        "num_layers": fields["num_hidden_layers"],
        "hidden_size": fields["hidden_size"],
        "num_attention_heads": heads // groups * padded,
        "num_query_groups": padded,
        "kv_channels": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "ffn_hidden_size": fields["intermediate_size"],
        "layernorm_epsilon": fields["rms_norm_eps"],
        "qk_layernorm": model.model_type in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": model.model_type == "qwen2",
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        "perform_initialization": False,
        "use_cpu_initialization": layout.device.type == "cpu",
        # Gradients are sums: each micro-batch's loss is its share of the whole mini-batch's.
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        # What Apex and Transformer Engine would fuse.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    } | experts
    if recompute and "recompute_granularity" not in overrides:
        overrides = {"recompute_granularity": "full"} | overrides
    if overrides.get("recompute_granularity") == "full":
        overrides = {"recompute_method": "uniform", "recompute_num_layers": 1} | overrides
    try:
        return TransformerConfig(**known | overrides)
    except (ValueError, AssertionError) as error:
        field, reason = "actor_rollout_ref.actor.megatron", f"megatron-core refuses it: {error}"
        raise UserError(field, reason, "Change override_transformer_config or the sizes.") from error


class PackedNorm(torch.nn.RMSNorm):
    """The norm of a layer; its gradient is summed over the tensor-parallel ranks where they divide the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed states in their own type; computed in float32, as transformers does."""
        if x.dtype == torch.float32:
            return super().forward(x)
        normed = F.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)
        return self.weight * normed


class PackedCoreAttention(torch.nn.Module):
    """Attention over a pack. Where the context is parallel, ranks swap tokens for heads (arXiv 2309.14509): each runs
    its heads over all tokens.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.scale = config.kv_channels**-0.5  # pyright: ignore
        self.window: int | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Pack,
        **_: Any,
    ) -> torch.Tensor:
        """Return [n, 1, H·D] for query [n, 1, H, D], key and value [n, 1, K, D] of this rank's n tokens and heads."""
        group = parallel_state.get_context_parallel_group()
        copies = group.size() // math.gcd(group.size(), key.shape[2])
        if copies > 1:  # ranks that share a key and value head each get it
            key, value = key.repeat_interleave(copies, 2), value.repeat_interleave(copies, 2)
        query, key, value = (_tokens_for_heads(tensor, group) for tensor in (query, key, value))
        by_head = [tensor.transpose(0, 1).transpose(1, 2) for tensor in (query, key, value)]  # [1, heads, N, D]
        layout = packed_seq_params.inputs.layout
        attended = layout.attend(self.layer, *by_head, scale=self.scale, window=self.window)
        return _heads_for_tokens(attended.transpose(0, 1), group).flatten(2)


def _tokens_for_heads(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Turn [n, 1, H, D] of this rank's tokens into [N, 1, H / ranks, D] of all of them."""
    if group.size() == 1:
        return tensor
    parts = tensor.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return tensor_parallel.all_to_all(group, parts.contiguous().flatten(0, 1))


def _heads_for_tokens(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Undo `_tokens_for_heads`."""
    if group.size() == 1:
        return tensor
    parts = tensor_parallel.all_to_all(group, tensor.contiguous()).unflatten(0, (group.size(), -1))
    return parts.movedim(0, 2).flatten(2, 3)


class PackedPositions(torch.nn.Module):
    """The rotary angles of this rank's part of a pack, whose positions restart with every sequence."""

    def __init__(self, model: PretrainedConfig, device: torch.device) -> None:
        super().__init__()
        self._frequencies = rope(model)[0].to(device)  # not a buffer, or it would be cast to bf16 with the model

    def get_rotary_seq_len(self, *args: Any) -> Pack:
        """Return the pack, which `forward` is then called with."""
        return args[-1]

    def forward(self, pack: Pack, **_: Any) -> torch.Tensor:
        """Return the angles [n, 1, 1, D]."""
        angles = pack.inputs.position_ids[0, pack.own, None].float() * self._frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None]


class HiddenOutput(torch.nn.Module):
    """The output layer, which the heads apply to the tokens they need: a pass returns hidden states.

    Of a policy it has this rank's rows of the vocabulary, of a value model the one row that every rank has.
    """

    def __init__(self, weight: torch.nn.Parameter | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, None
        self._gathers = sequence_parallel

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Return the states of all of this context rank's tokens [n, 1, H]."""
        if self._gathers:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight for a checkpoint, as megatron-core asks for it: rows of the vocabulary."""
        own = self.state_dict(prefix="", keep_vars=True)
        divided = {} if self.weight is None or self.weight.shape[0] == 1 else {"weight": 0}
        groups = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        return make_sharded_tensors_for_checkpoint(own, prefix, divided, sharded_offsets, **groups)


class ScalarOutput(HiddenOutput):
    """The output layer of a value model, the same on every rank of the last stage."""

    def __init__(self, hidden_size: int, *, bias: bool, sequence_parallel: bool, device: torch.device) -> None:
        weight = torch.nn.Parameter(torch.zeros(1, hidden_size, device=device))
        super().__init__(weight, sequence_parallel=sequence_parallel)
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device)) if bias else None


def make_chunks(
    model: PretrainedConfig,
    config: TransformerConfig,
    layout: MegatronLayout,
    *,
    scalar: bool,
    scalar_bias: bool = False,
) -> list[Any]:
    """Return this rank's chunks with uninitialised weights; `scalar` gives the last one the head of a value model."""
    vocabulary = padded_size(model.vocab_size, layout)
    make: Any = GPTModel
    chunks: list[Any] = []
    for index in range(layout.sizes.virtual_pipeline or 1):
        stage = {} if layout.sizes.virtual_pipeline is None else {"vp_stage": index}
        chunk = make(
            config,
            _block_spec(model, config, stage.get("vp_stage")),
            vocabulary,
            model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=model.tie_word_embeddings and not scalar,
            position_embedding_type="rope",
            **stage,
        )
        chunk.rotary_pos_emb = PackedPositions(model, layout.device)
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.window = _window(model, layer.layer_number - 1)
        if chunk.post_process and scalar:
            sequence = config.sequence_parallel
            chunk.output_layer = ScalarOutput(
                config.hidden_size, bias=scalar_bias, sequence_parallel=sequence, device=layout.device
            )
        elif chunk.post_process:
            _mark_divided(chunk.output_layer, config)
            chunk.output_layer = HiddenOutput(chunk.output_layer.weight, sequence_parallel=config.sequence_parallel)
        for module in chunk.modules():
            _mark_divided(module, config)
        chunks.append(chunk.to(layout.device))
    return chunks


def _mark_divided(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark the parameters of which a rank has a part, as megatron-core does where it initialises them: what is not
    marked counts once among the tensor-parallel ranks in the gradient's norm.
    """
    kinds = {
        tensor_parallel.ColumnParallelLinear: 0,
        tensor_parallel.RowParallelLinear: 1,
        tensor_parallel.VocabParallelEmbedding: 0,
    }
    dimension = kinds.get(type(module))
    if dimension is not None and config.tensor_model_parallel_size > 1:
        for name, parameter in module.named_parameters(recurse=False):
            if (name == "weight" or dimension == 0) and not vars(parameter).get("tensor_model_parallel"):
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def padded_size(size: int, layout: MegatronLayout) -> int:
    """Return the vocabulary's size, or the number of heads with keys and values, rounded up so that the tensor-parallel
    ranks have as many each. What is added is zero and stays so: it gets no gradient.
    """
    return -(-size // layout.sizes.tensor) * layout.sizes.tensor


def _window(model: PretrainedConfig, layer: int) -> int | None:
    """Return how many tokens back a layer sees; None: all."""
    fields = model.to_dict()
    if model.model_type in ("mistral", "qwen3_moe"):
        return fields.get("sliding_window")
    kinds = fields.get("layer_types") or []
    return fields["sliding_window"] if kinds and kinds[layer] == "sliding_attention" else None


def _block_spec(model: PretrainedConfig, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    assert isinstance(layer, ModuleSpec)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = PackedNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = PackedNorm
    norm: Any = PackedNorm
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=vp_stage), norm)
