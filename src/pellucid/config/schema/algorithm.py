"""Section `algorithm`: how rewards become advantages, and how the gap between sampling and training is corrected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pellucid.algo.catalog import ESTIMATORS
from pellucid.config.fields import Alias, Needs, OrImportPath, Range, option
from pellucid.config.presets import PRESETS
from pellucid.config.schema.actor import KlType

if TYPE_CHECKING:
    Estimator = Preset = str
else:
    Estimator = Annotated[Literal[tuple(ESTIMATORS)], OrImportPath()]
    Preset = Literal[tuple(PRESETS)]
Positive = Annotated[float, Range(gt=0)]
_KL_REWARD = Needs("algorithm.use_kl_in_reward")
_ADAPTIVE = (_KL_REWARD, Needs(".type", ("adaptive",)))
_WEIGHTS = Needs(
    ".rollout_is_threshold",
    otherwise="while algorithm.rollout_is_threshold is null: there are no weights",
    remedy="Set algorithm.rollout_is_threshold, e.g. 2.0",
)


@dataclass(frozen=True)
class KlControlConfig:
    """The weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = option("fixed", needs=_KL_REWARD)
    """Keep the weight, or steer it each step so that the KL stays near `target_kl`."""
    kl_coef: Annotated[float, Range(ge=0)] = option(0.001, needs=_KL_REWARD)
    """Weight of the KL penalty when `use_kl_in_reward` is true; where adaptive control starts."""
    horizon: Annotated[int, Range(ge=1)] = option(10000, needs=_ADAPTIVE)
    """adaptive: samples over which the weight may change by a fifth."""
    target_kl: Positive = option(0.1, needs=_ADAPTIVE)
    """adaptive: the KL divergence per token to hold."""


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling: prompts whose responses all score alike teach nothing and are replaced by others."""

    enable: bool = False
    """Drop groups whose `metric` has no spread and draw prompts until the batch is full."""
    metric: Annotated[Literal["acc", "score", "seq_reward", "seq_final_reward"], Alias(None, "acc")] = option(
        "acc", needs=Needs(".enable")
    )
    """What must differ within a group: acc, whether the verifier says correct; score = seq_reward, its score;
    seq_final_reward, with the reward model and the length penalty."""
    max_num_gen_batches: Annotated[int, Range(ge=0)] = option(10, needs=Needs(".enable"))
    """Generations per step before the run stops with an error; 0 never stops."""


@dataclass(frozen=True)
class RejectionRuleConfig:
    """One rule of rejection sampling: what of the ratio training ÷ rollout policy must stay within bounds."""

    statistic: Literal["k1", "k2", "k3"]
    """k1 is the ratio itself; k2 = ½ log² ratio and k3 = ratio − 1 − log ratio are divergences."""
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    """Judge each token alone, or a whole sequence by the sum, mean or maximum of its log-ratios or divergences."""
    lower: Positive | None = None
    """Lowest ratio, for k1; null is 1 ÷ upper."""
    upper: Positive | None = None
    """Highest value; null takes `rollout_rs_threshold`."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, the KL penalty in the reward, dynamic sampling, and rollout correction."""

    adv_estimator: Estimator = "grpo"
    """Advantage estimator: grpo compares each response's reward with the others of the same prompt, gae trains a
    critic; `file.py:name` is a function of your own."""
    gamma: Annotated[float, Range(ge=0, le=1)] = 1.0
    """Discount per token of later rewards."""
    lam: Annotated[float, Range(ge=0, le=1)] = 1.0
    """gae: λ, from the critic's one-step estimate (0) to the whole return (1)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false only subtracts the mean (Dr. GRPO)."""
    gdpo_reward_weights: dict[str, Annotated[float, Range()]] | None = None
    """gdpo: weight of each reward component by name; null takes every component the reward returns, with weight 1."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the frozen reference model from each token's reward."""
    kl_penalty: KlType = option("kl", needs=_KL_REWARD)
    """Estimator of that KL: kl = k1, mse = k2, low_var_kl = k3; full is exact over the vocabulary."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    """The weight of that KL."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction_preset: Preset | None = None
    """A named setting of the rollout-correction keys below; keys that are set themselves win over it."""
    rollout_is_threshold: Positive | None = None
    """Upper bound of the importance weights π_old ÷ π_rollout, and their main switch: null computes none."""
    rollout_is: bool = option(False, needs=_WEIGHTS)
    """Multiply the policy loss by the weights; false only computes their metrics."""
    rollout_is_threshold_lower: Positive | None = option(None, needs=(_WEIGHTS, Needs(".rollout_is_mode", ("clip",))))
    """Lower bound of the weights in clip mode; null is 1 ÷ upper bound."""
    rollout_is_level: Literal["token", "sequence", "geometric"] = option("token", needs=_WEIGHTS)
    """What a weight is of: each token's ratio, or the product or geometric mean of its sequence's ratios."""
    rollout_is_mode: Literal["truncate", "clip"] = option("truncate", needs=_WEIGHTS)
    """Cap weights at the upper bound, or set those outside the bounds to 0."""
    rollout_is_veto_threshold: Positive | None = option(1e-4, needs=_WEIGHTS)
    """A sequence that has a token with a ratio below this gets weight 0; null switches that off."""
    rollout_is_batch_normalize: bool = option(False, needs=_WEIGHTS)
    """Divide the bounded weights by their mean over the batch."""
    rollout_rs: Annotated[list[RejectionRuleConfig], Alias(None, [])] = field(default_factory=list)
    """Rejection sampling: tokens or sequences that break one of these rules are left out of training, e.g.
    `[{statistic: k1, level: seq_mean, lower: 0.999, upper: 1.001}]`."""
    rollout_rs_threshold: Positive | None = option(
        None, needs=Needs(".rollout_rs", remedy="Add a rule, e.g. {statistic: k1, level: token}")
    )
    """Upper bound of the rules in `rollout_rs` that give none."""
    bypass_mode: bool = False
    """Take the rollout's log-probabilities for π_old and skip that forward pass."""
    loss_type: Literal["ppo_clip", "reinforce"] = option("ppo_clip", needs=Needs(".bypass_mode"))
    """Loss in bypass mode: the one of `policy_loss.loss_mode`, whose ratio is then π_θ ÷ π_rollout, or REINFORCE
    without clipping, weighted by π_θ ÷ π_rollout only when `rollout_is` is true."""
