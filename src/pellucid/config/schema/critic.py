"""Section `critic`: the value model of estimators that have one (gae); it follows the actor unless it is set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pellucid.config.fields import MISSING, Range, option
from pellucid.config.schema.actor import LossAggMode, OptimConfig, Positive
from pellucid.config.schema.profiler import ProfilerConfig
from pellucid.config.schema.sharding import FsdpConfig, Strategy


@dataclass(frozen=True)
class CriticModelConfig:
    """The language model whose output layer is replaced by one value per token."""

    path: str = option(MISSING, link="${actor_rollout_ref.model.path}")
    """The model to start from; null follows the actor's."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's own Hugging Face config to replace."""
    enable_gradient_checkpointing: bool = option(False, link="${actor_rollout_ref.model.enable_gradient_checkpointing}")
    """Recompute activations during the backward pass; null follows the actor."""
    trust_remote_code: bool = option(False, link="${actor_rollout_ref.model.trust_remote_code}")
    """Run Python code that comes with the model folder; null follows the actor."""


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    """AdamW of the critic, and its learning-rate schedule."""

    lr: Annotated[float, Range(ge=0)] = 1e-5
    """Peak learning rate; 0 runs everything and changes no weight."""


@dataclass(frozen=True)
class CriticConfig:
    """The value update; only estimators with a critic (gae) read this section."""

    strategy: Strategy = option(MISSING, link="${actor_rollout_ref.actor.strategy}")
    """Training engine that holds the critic; null follows the actor."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """How the critic is spread over its ranks."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The critic's model."""
    ppo_mini_batch_size: Positive = option(256, link="${actor_rollout_ref.actor.ppo_mini_batch_size}")
    """Prompts per optimizer step; null follows the actor."""
    ppo_micro_batch_size_per_gpu: Positive | None = option(
        None, link="${actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}"
    )
    """Samples in one forward and backward pass; null follows the actor."""
    use_dynamic_bsz: bool = option(False, link="${actor_rollout_ref.actor.use_dynamic_bsz}")
    """Form micro-batches by tokens; null follows the actor."""
    ppo_max_token_len_per_gpu: Positive = option(16384, link="${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}")
    """Most tokens in one micro-batch; null follows the actor."""
    ppo_epochs: Positive = option(1, link="${actor_rollout_ref.actor.ppo_epochs}")
    """Passes over each step's samples; null follows the actor."""
    shuffle: bool = option(False, link="${actor_rollout_ref.actor.shuffle}")
    """Shuffle the prompts into new mini-batches for each pass; null follows the actor."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token value losses become one number, over the whole mini-batch."""
    cliprange_value: Annotated[float, Range(gt=0)] = 0.5
    """How far a new value may move from the old one before the loss stops following it."""
    grad_clip: Annotated[float, Range(gt=0)] = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it."""
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    """The optimizer and its schedule."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling of the value model."""
