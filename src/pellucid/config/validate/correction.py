"""Rules on rollout correction: bounds in order, log-probabilities at hand, and nothing that biases silently.

`validate` in the package calls `mistakes` and `unusual`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.algo.catalog import loss_entry
from pellucid.config.schema import RunConfig
from pellucid.config.schema.algorithm import AlgorithmConfig, RejectionRuleConfig
from pellucid.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in the correction keys of section `algorithm`."""
    yield from _needs(config)
    yield from _weights(config.algorithm)
    for index, rule in enumerate(config.algorithm.rollout_rs):
        yield from _rule(f"algorithm.rollout_rs[{index}]", rule, config.algorithm.rollout_rs_threshold)
    if config.algorithm.bypass_mode:
        yield from _bypass(config)


def _needs(config: RunConfig) -> Iterator[UserError]:
    """Yield what correction needs of the rollout: its log-probabilities, of the distribution it sampled from."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    asked = {
        "rollout_is_threshold": algorithm.rollout_is_threshold is not None,
        "rollout_rs": bool(algorithm.rollout_rs),
        "bypass_mode": algorithm.bypass_mode,
    }
    keys = ", ".join(f"algorithm.{key}" for key, is_set in asked.items() if is_set)
    if keys and not rollout.calculate_log_probs:
        reason = (
            f"is false, but {keys} {'compare' if ',' in keys else 'compares'} the rollout's log-probabilities with "
            "those of training."
        )
        yield UserError(f"{ROLLOUT}.calculate_log_probs", reason, f"Set {ROLLOUT}.calculate_log_probs: true.")
    applied = algorithm.rollout_is or algorithm.rollout_rs or algorithm.bypass_mode
    for key, value, is_off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if applied and value != is_off:
            yield UserError(
                f"{ROLLOUT}.{key}",
                f"{value:g} samples from a part of the vocabulary, while both log-probabilities are over all of it: "
                "the corrected gradient would be biased.",
                f"Set it to {is_off:g}, or correct nothing (rollout_is: false, no rollout_rs, no bypass_mode).",
            )


def _weights(algorithm: AlgorithmConfig) -> Iterator[UserError]:
    upper, lower = algorithm.rollout_is_threshold, algorithm.rollout_is_threshold_lower
    if algorithm.rollout_is and upper is None:
        reason = "true applies importance weights, but rollout_is_threshold is null: none are computed."
        yield UserError("algorithm.rollout_is", reason, "Set algorithm.rollout_is_threshold, e.g. 2.0.")
    if upper is not None:
        yield from _bounds("algorithm.rollout_is_threshold", "algorithm.rollout_is_threshold_lower", upper, lower)


def _bounds(upper_key: str, lower_key: str, upper: float, lower: float | None) -> Iterator[UserError]:
    """Yield a mistake for bounds of a ratio that leave out 1; without a lower bound it is 1 ÷ upper."""
    remedy = "Set lower < 1 < upper, e.g. 0.5 and 2.0."
    if upper < 1:
        yield UserError(upper_key, f"{upper:g} is below 1, the ratio of two equal policies.", remedy)
    if lower is not None and lower > 1:
        yield UserError(lower_key, f"{lower:g} is above 1, the ratio of two equal policies.", remedy)


def _rule(key: str, rule: RejectionRuleConfig, shared: float | None) -> Iterator[UserError]:
    upper = rule.upper if rule.upper is not None else shared
    if upper is None:
        reason = f"nothing bounds {rule.statistic} at level {rule.level}."
        remedy = "Set upper in the rule, or algorithm.rollout_rs_threshold for all rules."
        yield UserError(f"{key}.upper", reason, remedy)
    if rule.lower is not None and rule.statistic != "k1":
        reason = f"{rule.lower:g} has no effect: {rule.statistic} is a divergence, 0 at best, and only bounded above."
        yield UserError(f"{key}.lower", reason, "Remove it, or set statistic: k1.")
    elif upper is not None and rule.statistic == "k1":
        yield from _bounds(f"{key}.upper", f"{key}.lower", upper, rule.lower)


def _bypass(config: RunConfig) -> Iterator[UserError]:
    """Yield what bypass mode, in which the rollout's log-probabilities are π_old, leaves without a meaning."""
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if algorithm.use_kl_in_reward:
        yield UserError(
            "algorithm.bypass_mode",
            "skips the forward pass for π_old, which the KL penalty in the reward is computed from.",
            "Set algorithm.use_kl_in_reward: false (actor_rollout_ref.actor.use_kl_loss: true works), or "
            "algorithm.bypass_mode: false.",
        )
    if algorithm.rollout_is_batch_normalize:
        yield UserError(
            "algorithm.rollout_is_batch_normalize",
            "needs the weights of the whole batch, but in bypass mode they are computed per micro-batch, against the "
            "policy as it changes.",
            "Set it to false, or algorithm.bypass_mode: false.",
        )
    if algorithm.loss_type == "reinforce" and loss != "vanilla":
        reason = f"{loss} is not used: algorithm.loss_type: reinforce takes its place."
        remedy = "Remove it, or set algorithm.loss_type: ppo_clip."
        yield UserError("actor_rollout_ref.actor.policy_loss.loss_mode", reason, remedy)
    if algorithm.loss_type == "ppo_clip" and algorithm.rollout_is:
        reason = "in bypass mode the loss's own ratio is π_θ ÷ π_rollout already; weights would count it twice."
        yield UserError("algorithm.rollout_is", reason, "Set it to false, or algorithm.loss_type: reinforce.")
    if algorithm.loss_type == "ppo_clip" and loss_entry(loss).sequence_mean:
        for index, rule in enumerate(algorithm.rollout_rs):
            if rule.level == "token":
                yield UserError(
                    f"algorithm.rollout_rs[{index}].level",
                    "token: in bypass mode a rejected token gets loss 0, but stays in the mean over its sequence that "
                    f"{loss} takes.",
                    "Reject whole sequences: level seq_mean, seq_sum or seq_max.",
                )


def unusual(config: RunConfig) -> Iterator[str]:
    """Yield a line about a veto that is allowed and seldom meant."""
    veto = config.algorithm.rollout_is_veto_threshold
    if config.algorithm.rollout_is_threshold is not None and veto is not None and veto >= 0.5:
        yield f"algorithm.rollout_is_veto_threshold: {veto:g} discards sequences for ordinary tokens; 1e-4 is usual."
