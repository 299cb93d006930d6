"""Sections `*.fsdp_config` and `*.megatron`: how a role's model is spread over its ranks by either training engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pellucid.config.fields import Needs, Range, option
from pellucid.config.schema.model import Dtype

Strategy = Literal["fsdp", "fsdp2", "megatron"]
FSDP = Needs(
    "uses_fsdp",
    otherwise="with strategy: megatron",
    remedy="Set actor_rollout_ref.actor.strategy: fsdp2",
)
MEGATRON = Needs(
    "uses_megatron",
    otherwise="with strategy: {0.actor_rollout_ref.actor.strategy}",
    remedy="Set actor_rollout_ref.actor.strategy: megatron",
)
Size = Annotated[int, Range(ge=1)]
_WHOLE_LAYERS = Needs(".recompute_granularity", ("full",))


@dataclass(frozen=True)
class RefFsdpConfig:
    """How any model is spread over its ranks."""

    fsdp_size: Annotated[int, Range(ge=-1)] = -1
    """Ranks that hold one copy of the model between them; -1 is all. Fewer, a divisor of the number of ranks, make
    several copies (HSDP): less traffic between machines, more memory."""
    param_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and step there: slower, and the device holds
    little more than the copy that responses are sampled from."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights between its forward and its backward pass: less memory, one more gather."""


@dataclass(frozen=True)
class FsdpConfig(RefFsdpConfig):
    """How a trained model is spread over its ranks."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory; the weights stay on the device."""
    reduce_dtype: Dtype = "float32"
    """Number format in which gradients are added up over the ranks; bfloat16 halves the traffic and rounds the sum."""


@dataclass(frozen=True)
class TransformerOverrides:
    """Fields of megatron-core's `TransformerConfig` that change memory and speed, and no result; null is its default.

    All others follow the model and the other keys.
    """

    recompute_granularity: Literal["full", "selective"] | None = None
    """What the backward pass computes again: whole layers, or the `recompute_modules` alone."""
    recompute_method: Literal["uniform", "block"] | None = option(None, needs=_WHOLE_LAYERS)
    """How whole layers are chosen: every group of `recompute_num_layers`, or that many of each stage."""
    recompute_num_layers: Size | None = option(None, needs=_WHOLE_LAYERS)
    """The number of layers that `recompute_method` speaks of."""
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] | None = option(
        None, needs=Needs(".recompute_granularity", ("selective",))
    )
    """Modules that are recomputed; null is `[core_attn]`."""
    num_layers_in_first_pipeline_stage: Size | None = None
    """Layers of the first stage, where it is to have fewer than the others."""
    num_layers_in_last_pipeline_stage: Size | None = None
    """Layers of the last stage."""


@dataclass(frozen=True)
class RefMegatronConfig:
    """How any model is spread over its ranks by megatron-core: tensor × pipeline × context × data = ranks."""

    tensor_model_parallel_size: Size = 1
    """Ranks between which the matrices of each layer are divided; heads that do not come out are padded with zeros."""
    pipeline_model_parallel_size: Size = 1
    """Stages of consecutive layers, one after the other."""
    virtual_pipeline_model_parallel_size: Annotated[int, Range(ge=2)] | None = None
    """Chunks of layers that each stage holds, interleaved with those of the others: stages wait less and talk more."""
    context_parallel_size: Size = 1
    """Ranks between which the tokens of a micro-batch are divided; a divisor of a rank's attention heads."""
    expert_model_parallel_size: Size = 1
    """Ranks between which the experts of a layer are divided, taken from those of tensors, context and data."""
    expert_tensor_parallel_size: Size | None = None
    """Ranks between which the matrices of each expert are divided; null follows `tensor_model_parallel_size`."""
    sequence_parallel: bool = True
    """Divide tokens, too, between the ranks that divide matrices, where each would hold them all: less memory."""
    param_offload: bool = False
    """Keep weights and gradients in CPU memory between the passes of a role; nothing on a CPU."""
    override_transformer_config: TransformerOverrides = field(default_factory=TransformerOverrides)
    """Fields of megatron-core's own config."""

    @property
    def copy_ranks(self) -> int:
        """Ranks that hold the weights of one copy of the model between them."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def batch_ranks(self) -> int:
        """Ranks that run one micro-batch between them."""
        return self.copy_ranks * self.context_parallel_size


@dataclass(frozen=True)
class MegatronConfig(RefMegatronConfig):
    """How a trained model is spread over its ranks by megatron-core; data ranks always divide its optimizer's state."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory between its steps; nothing on a CPU."""
