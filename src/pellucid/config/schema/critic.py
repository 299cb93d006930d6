"""Section `critic`: the value model of estimators that have one (gae); it follows the actor unless it is set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pellucid.config.fields import MISSING, Range, option
from pellucid.config.schema.actor import OptimConfig, TrainedConfig
from pellucid.config.schema.model import LoadingConfig
from pellucid.config.schema.profiler import ProfilerConfig
from pellucid.config.schema.sharding import MEGATRON, MegatronConfig


@dataclass(frozen=True)
class CriticModelConfig(LoadingConfig):
    """The language model whose output layer is replaced by one value per token."""

    path: str = option(MISSING, link="${actor_rollout_ref.model.path}")
    """The model to start from; null follows the actor's."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's own Hugging Face config to replace."""


@dataclass(frozen=True)
class CriticConfig(TrainedConfig):
    """The value update; only estimators with a critic (gae) read this section."""

    model: CriticModelConfig = option(CriticModelConfig, follows=("actor_rollout_ref.model", LoadingConfig))
    """The critic's model."""
    megatron: MegatronConfig = option(
        MegatronConfig, needs=MEGATRON, follows=("actor_rollout_ref.actor.megatron", MegatronConfig)
    )
    """How the value model is spread over its ranks by megatron-core; what is not set here follows the actor."""
    cliprange_value: Annotated[float, Range(gt=0)] = 0.5
    """How far a new value may move from the old one before the loss stops following it."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The optimizer and its schedule; unless it is set, `lr` is 1e-5 here."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling of the value model."""
