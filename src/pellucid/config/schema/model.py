"""Section `actor_rollout_ref.model`: which language model is trained and how it is held in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pellucid.config.fields import MISSING, Alias, Needs, Range, option

Dtype = Annotated[Literal["float32", "bfloat16"], Alias("fp32", "float32"), Alias("bf16", "bfloat16")]
_LORA = Needs("actor_rollout_ref.model.lora_rank", remedy="Set actor_rollout_ref.model.lora_rank, e.g. 16")


@dataclass(frozen=True)
class LoadingConfig:
    """How a model is loaded and run; the critic's follows the actor's in it."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations during the backward pass: less memory, about a third more arithmetic."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder; only for sources you trust."""


@dataclass(frozen=True)
class BaseModelConfig(LoadingConfig):
    """What every language model has, wherever its weights come from."""

    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; null takes it from `path`."""
    dtype: Dtype = "float32"
    """Number format the model computes in; trained weights stay float32, so that no small update is rounded away."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's own Hugging Face config to replace, e.g. `{attention_dropout: 0.0}`."""
    use_remove_padding: Literal[True] = True
    """Sequences are packed end to end, so that no arithmetic is spent on padding; there is no other way."""


@dataclass(frozen=True)
class ModelConfig(BaseModelConfig):
    """The policy's weights, tokenizer, number format and adapter."""

    path: str = MISSING
    """The model: `builtin` for the small one shipped in the package, a Hugging Face model folder, or a hub id."""
    lora_rank: Annotated[int, Range(ge=0)] = 0
    """Rank of the LoRA adapter that is trained in place of the weights; 0 trains the weights themselves."""
    lora_alpha: Annotated[int, Range(ge=1)] = option(16, needs=_LORA)
    """The adapter's output is scaled by lora_alpha ÷ lora_rank."""
    target_modules: str | list[str] = option("all-linear", needs=_LORA)
    """Modules that get an adapter: all-linear, or a list of names such as `[q_proj, v_proj]`."""


@dataclass(frozen=True)
class SftModelConfig(BaseModelConfig):
    """The model to fine-tune, or the shape of a fresh one."""

    path: str | None = None
    """The model to start from: `builtin`, a Hugging Face model folder, or a hub id; null starts from `init_config`."""
    init_config: dict[str, Any] | None = None
    """Fields of a Hugging Face config, with `model_type`, for a randomly initialised model; needs `tokenizer_path`."""
