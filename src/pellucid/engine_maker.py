"""What makes the training engines of a process: one class a strategy, and what their files share of the config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pellucid.config.schema.actor import ActorConfig, OptimConfig, RefConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.config.schema.reward_model import RewardConfig
from pellucid.rollout.native.decoder import SampledPolicy
from pellucid.rollout.requests import WeightUpdate
from pellucid.stages import NO_PROBE, Probe
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.optimizer import Schedule
from pellucid.training.protocol import TrainingEngine


@dataclass(frozen=True, slots=True)
class Compute:
    """Where the models of a process live, and over how many ranks they are spread."""

    device: torch.device
    dtype: torch.dtype
    num_ranks: int = 1
    """Ranks of the process group that this process has joined; 1 needs none."""
    balance_ranks: bool = True
    """Give the ranks as many tokens each, rather than as many samples."""
    probe: Probe = NO_PROBE
    """What the engines tell of the units of their work."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy's training engine, and what a native rollout engine samples from."""

    engine: TrainingEngine
    sampled: SampledPolicy | None
    """The engine itself, or a whole copy of its weights; None where other engines sample."""
    take_weights: Callable[[WeightUpdate], None] | None
    """Updates the copy."""


class EngineMaker(Protocol):
    """Makes the engines of one process; over several ranks every one calls it alike."""

    def policy(self, run_updates: int, *, sampled: bool) -> Policy:
        """Load the policy, to be trained for `run_updates` optimizer steps and `sampled` by a native engine or not."""
        ...

    def reference(self) -> TrainingEngine:
        """Load the frozen reference, after the policy where both are in this process."""
        ...

    def critic(self, run_updates: int) -> TrainingEngine:
        """Load the value model."""
        ...

    def reward_model(self) -> TrainingEngine:
        """Load the frozen reward model."""
        ...


def make_schedule(optim: OptimConfig, run_updates: int) -> Schedule:
    """Return the learning rate's course over `run_updates` optimizer steps."""
    total = optim.total_training_steps if optim.total_training_steps > 0 else run_updates
    warmup = max(optim.lr_warmup_steps or 0, 0) or int(optim.lr_warmup_steps_ratio * total)
    return Schedule(optim.lr, warmup, total, optim.lr_scheduler_type, optim.min_lr_ratio)


def micro_batching(by_tokens: bool, tokens: int, sequences: int | None) -> MicroBatching:
    """Return how a role's batches are cut: by a budget of tokens, or by a number of sequences."""
    return MicroBatching(tokens, None) if by_tokens else MicroBatching(None, sequences)


def update_cut(section: ActorConfig | CriticConfig) -> MicroBatching:
    """Return how the batches of a trained role are cut."""
    tokens, sequences = section.ppo_max_token_len_per_gpu, section.ppo_micro_batch_size_per_gpu
    return micro_batching(section.use_dynamic_bsz, tokens, sequences)


def reference_cut(section: RefConfig) -> MicroBatching:
    """Return how the reference's batches are cut."""
    tokens, sequences = section.log_prob_max_token_len_per_gpu, section.log_prob_micro_batch_size_per_gpu
    return micro_batching(section.log_prob_use_dynamic_bsz, tokens, sequences)


def reward_cut(section: RewardConfig) -> MicroBatching:
    """Return how the reward model's batches are cut."""
    sequences = section.micro_batch_size_per_gpu
    return micro_batching(sequences is None, section.forward_max_token_len_per_gpu, sequences)
