"""The schema: one dataclass file a section; each field has a type, a range or choices, a default and a docstring."""

from pellucid.config.schema.actor import ActorConfig, CheckpointConfig, OptimConfig, PolicyLossConfig, RefConfig
from pellucid.config.schema.algorithm import AlgorithmConfig, KlControlConfig
from pellucid.config.schema.data import CustomClassConfig, DataConfig, SftDataConfig, SourceConfig
from pellucid.config.schema.model import BaseModelConfig, ModelConfig, SftModelConfig
from pellucid.config.schema.reward_model import CustomRewardConfig, RewardConfig
from pellucid.config.schema.rollout import RolloutConfig, ValSamplingConfig
from pellucid.config.schema.root import ActorRolloutRefConfig, RunConfig, SftConfig, SftEngineConfig
from pellucid.config.schema.trainer import BaseTrainerConfig, SftTrainerConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "BaseModelConfig",
    "BaseTrainerConfig",
    "CheckpointConfig",
    "CustomClassConfig",
    "CustomRewardConfig",
    "DataConfig",
    "KlControlConfig",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "SftDataConfig",
    "SftEngineConfig",
    "SftModelConfig",
    "SftTrainerConfig",
    "SourceConfig",
    "TrainerConfig",
    "ValSamplingConfig",
]
