"""Section `reward_model`: how a response becomes a number, by rule, by a function of the user's, or by a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pellucid.config.fields import Needs, Range, option
from pellucid.config.schema.profiler import ProfilerConfig

Positive = Annotated[int, Range(ge=1)]
Weight = Annotated[float, Range()]
_MODEL = Needs("reward_model.enable")
_BY_TOKENS = Needs(
    ".scores_by_tokens",
    otherwise="unless a reward model forms its passes by tokens",
    remedy="Set reward_model.enable: true and reward_model.micro_batch_size_per_gpu: null",
)


@dataclass(frozen=True)
class CustomRewardConfig:
    """A reward function of the user's own."""

    path: str | None = option(None, needs=Needs("reward_model.rule_weight", remedy="Set reward_model.rule_weight: 1.0"))
    """Python file (`reward.py`) or importable module (`pkg.mod`) with the function; null uses the task's verifier."""
    name: str = option("compute_score", needs=Needs(".path"))
    """Name of the function inside `path`."""


@dataclass(frozen=True)
class RewardModelSourceConfig:
    """The model that scores."""

    path: str | None = option(None, needs=_MODEL)
    """A sequence or token classifier with one label, as a folder or hub id; `pellucid export --critic` writes one."""
    trust_remote_code: bool = option(False, needs=_MODEL)
    """Run Python code that comes with the model folder; only for sources you trust."""


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft length limit."""

    enable: bool = False
    """Lower the reward of responses that end in the last `len` tokens before `data.max_response_length`."""
    len: Positive | None = option(None, needs=Needs(".enable"))
    """Tokens over which the penalty grows from 0; must be set when it is on."""
    penalty_factor: Annotated[float, Range(gt=0)] = option(1.0, needs=Needs(".enable"))
    """Penalty at the length limit; under gdpo it cancels when components are divided by their standard deviation."""


@dataclass(frozen=True)
class RewardConfig:
    """Scoring of responses: weight × model's score + rule_weight × rule's score − length penalty."""

    enable: bool = False
    """Score with a reward model, beside the rule or in its place."""
    model: RewardModelSourceConfig = field(default_factory=RewardModelSourceConfig)
    """The reward model."""
    micro_batch_size_per_gpu: Positive | None = option(None, needs=_MODEL)
    """Samples in one forward pass of the reward model; null forms the passes by tokens."""
    forward_max_token_len_per_gpu: Positive = option(
        16384, link="${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}", needs=_BY_TOKENS
    )
    """Most tokens in one forward pass of the reward model; null follows the actor."""
    weight: Weight = option(1.0, needs=_MODEL)
    """Weight of the reward model's score."""
    rule_weight: Weight = 1.0
    """Weight of the verifier's or custom function's score; 0 does not call it."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """Penalty on responses close to the length limit."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A Python function in place of the task's verifier."""
    functions: dict[str, Weight] | None = option(
        None, needs=Needs("reward_model.rule_weight", remedy="Set reward_model.rule_weight: 1.0")
    )
    """Several reward functions with their weights, by import path (`file.py:name`), `verifier` for the task's own; the
    rule's score is their weighted sum, and each one's is among its parts. null: the verifier, or the function above."""
    reward_num_workers: Annotated[int, Range(ge=1)] = 2
    """Processes that run the custom function in parallel."""
    reward_timeout_s: Annotated[float, Range(gt=0)] = 30.0
    """Seconds a reward call may take before it is stopped; a call that fails twice is masked out of training."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling of the reward model."""

    @property
    def scores_by_tokens(self) -> bool:
        """Whether a reward model scores, in passes formed by tokens."""
        return self.enable and self.micro_batch_size_per_gpu is None
