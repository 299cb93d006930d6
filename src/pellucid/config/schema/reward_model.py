"""Section `reward_model`: how a response becomes a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pellucid.config.fields import Range


@dataclass(frozen=True)
class CustomRewardConfig:
    """A reward function of the user's own."""

    path: str | None = None
    """Python file (`reward.py`) or importable module (`pkg.mod`) with the function; null uses the task's verifier."""
    name: str = "compute_score"
    """Name of the function inside `path`."""


@dataclass(frozen=True)
class RewardConfig:
    """Scoring of responses."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A Python function in place of the task's verifier."""
    reward_num_workers: Annotated[int, Range(ge=1)] = 2
    """Processes that run the custom function in parallel."""
    reward_timeout_s: Annotated[float, Range(gt=0)] = 30.0
    """Seconds a reward call may take before it is stopped; a call that fails twice is masked out of training."""
