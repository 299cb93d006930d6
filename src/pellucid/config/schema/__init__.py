"""The schema: one dataclass file a section; each field has a type, a range or choices, a default and a docstring."""

from pellucid.config.schema.actor import ActorConfig, CheckpointConfig, OptimConfig, PolicyLossConfig, RefConfig
from pellucid.config.schema.algorithm import AlgorithmConfig, FilterGroupsConfig, KlControlConfig, RejectionRuleConfig
from pellucid.config.schema.critic import CriticConfig, CriticModelConfig, CriticOptimConfig
from pellucid.config.schema.data import CustomClassConfig, DataConfig, SftDataConfig, SourceConfig
from pellucid.config.schema.model import BaseModelConfig, ModelConfig, SftModelConfig
from pellucid.config.schema.profiler import (
    GlobalNsysConfig,
    GlobalProfilerConfig,
    GlobalToolConfig,
    GlobalTorchMemoryConfig,
    NpuToolConfig,
    NsysToolConfig,
    PrecisionDebuggerConfig,
    ProfilerConfig,
    RoleToolConfig,
    ScheduleConfig,
    TorchMemoryToolConfig,
    TorchToolConfig,
)
from pellucid.config.schema.reward_model import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardModelSourceConfig,
)
from pellucid.config.schema.rollout import RolloutConfig, SimulateMismatchConfig, ValSamplingConfig
from pellucid.config.schema.root import ActorRolloutRefConfig, RunConfig, SftConfig, SftEngineConfig
from pellucid.config.schema.sharding import FsdpConfig, RefFsdpConfig
from pellucid.config.schema.trainer import BaseTrainerConfig, SftTrainerConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "BaseModelConfig",
    "BaseTrainerConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "CustomClassConfig",
    "CustomRewardConfig",
    "DataConfig",
    "FilterGroupsConfig",
    "FsdpConfig",
    "GlobalNsysConfig",
    "GlobalProfilerConfig",
    "GlobalToolConfig",
    "GlobalTorchMemoryConfig",
    "KlControlConfig",
    "ModelConfig",
    "NpuToolConfig",
    "NsysToolConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "PrecisionDebuggerConfig",
    "ProfilerConfig",
    "RefConfig",
    "RefFsdpConfig",
    "RejectionRuleConfig",
    "RewardConfig",
    "RewardModelSourceConfig",
    "RoleToolConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SftConfig",
    "SftDataConfig",
    "SftEngineConfig",
    "SftModelConfig",
    "SftTrainerConfig",
    "SimulateMismatchConfig",
    "SourceConfig",
    "TorchMemoryToolConfig",
    "TorchToolConfig",
    "TrainerConfig",
    "ValSamplingConfig",
]
