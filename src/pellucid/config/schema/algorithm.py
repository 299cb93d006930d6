"""Section `algorithm`: how rewards become advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pellucid.config.fields import Range, Refused
from pellucid.config.schema.actor import KlType

LaterEstimator = Refused(
    ("gae", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gdpo"),
    "Set it to grpo, the estimator of this version.",
)


@dataclass(frozen=True)
class KlControlConfig:
    """The KL penalty in the reward."""

    kl_coef: Annotated[float, Range(ge=0)] = 0.001
    """Weight of the KL penalty when `use_kl_in_reward` is true."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, and the KL penalty in the reward."""

    adv_estimator: Annotated[Literal["grpo"], LaterEstimator] = "grpo"
    """Advantage estimator: grpo compares each response's reward with the others of the same prompt."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false only subtracts the mean (Dr. GRPO)."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the frozen reference model from each token's reward."""
    kl_penalty: KlType = "kl"
    """Estimator of that KL: kl = k1, mse = k2, low_var_kl = k3."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    """The weight of that KL."""
