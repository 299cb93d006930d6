"""Rules on rollout correction: bounds in order, log-probabilities at hand, and nothing that biases silently.

`validate` in the package calls `mistakes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.algo.catalog import loss_entry
from pellucid.config.schema import RunConfig
from pellucid.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in the correction keys of section `algorithm`."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    asked = {
        "rollout_is_threshold": algorithm.rollout_is_threshold is not None,
        "rollout_rs": bool(algorithm.rollout_rs),
        "bypass_mode": algorithm.bypass_mode,
    }
    keys = ", ".join(f"algorithm.{key}" for key, is_set in asked.items() if is_set)
    if keys and not rollout.calculate_log_probs:
        reason = f"is false, but {keys} needs the rollout's log-probabilities."
        yield UserError(f"{ROLLOUT}.calculate_log_probs", reason, f"Set {ROLLOUT}.calculate_log_probs: true.")
    applied = algorithm.rollout_is or algorithm.rollout_rs or algorithm.bypass_mode
    for key, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, -1)):
        if applied and value != whole:
            reason = (
                f"{value:g} samples from a part of the vocabulary, while both log-probabilities are over all of it: "
                "the corrected gradient would be biased."
            )
            yield UserError(f"{ROLLOUT}.{key}", reason, f"Set it to {whole}, or correct nothing.")
    upper, lower = algorithm.rollout_is_threshold, algorithm.rollout_is_threshold_lower
    yield from _bounds("algorithm.rollout_is_threshold", "algorithm.rollout_is_threshold_lower", upper, lower)
    for index, rule in enumerate(algorithm.rollout_rs):
        key, upper = f"algorithm.rollout_rs[{index}]", rule.upper or algorithm.rollout_rs_threshold
        if upper is None:
            reason = f"nothing bounds {rule.statistic} at level {rule.level}."
            yield UserError(f"{key}.upper", reason, "Set upper in the rule, or algorithm.rollout_rs_threshold.")
        if rule.statistic == "k1":
            yield from _bounds(f"{key}.upper", f"{key}.lower", upper, rule.lower)
        elif rule.lower is not None:
            reason = f"{rule.lower:g} has no effect: {rule.statistic} is a divergence, only bounded above."
            yield UserError(f"{key}.lower", reason, "Remove it, or set statistic: k1.")
    if algorithm.bypass_mode:
        yield from _bypass(config)


def _bounds(upper_key: str, lower_key: str, upper: float | None, lower: float | None) -> Iterator[UserError]:
    """Yield a mistake for bounds of a ratio that leave out 1; without a lower bound it is 1 ÷ upper."""
    remedy = "Set lower < 1 < upper, e.g. 0.5 and 2.0."
    if upper is not None and upper < 1:
        yield UserError(upper_key, f"{upper:g} is below 1, the ratio of two equal policies.", remedy)
    if lower is not None and lower > 1:
        yield UserError(lower_key, f"{lower:g} is above 1, the ratio of two equal policies.", remedy)


def _bypass(config: RunConfig) -> Iterator[UserError]:
    """Yield what bypass mode, in which the rollout's log-probabilities are π_old, leaves without a meaning."""
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    reinforce = algorithm.loss_type == "reinforce"
    if algorithm.use_kl_in_reward:
        reason = "skips the forward pass for π_old, which the KL penalty in the reward is computed from."
        yield UserError("algorithm.bypass_mode", reason, "Set it to false, or use_kl_loss instead of use_kl_in_reward.")
    if algorithm.rollout_is_batch_normalize:
        reason = "needs the weights of the whole batch, which in bypass mode are computed per micro-batch."
        yield UserError("algorithm.rollout_is_batch_normalize", reason, "Set it or algorithm.bypass_mode to false.")
    if not reinforce and algorithm.rollout_is:
        reason = "in bypass mode the loss's own ratio is π_θ ÷ π_rollout already; weights would count it twice."
        yield UserError("algorithm.rollout_is", reason, "Set it to false, or algorithm.loss_type: reinforce.")
    for index, rule in enumerate(algorithm.rollout_rs):
        if rule.level == "token" and not reinforce and loss_entry(loss).sequence_mean:
            reason = f"token: a rejected token gets loss 0, but stays in the mean over its sequence that {loss} takes."
            remedy = "Reject whole sequences: level seq_mean, seq_sum or seq_max."
            yield UserError(f"algorithm.rollout_rs[{index}].level", reason, remedy)
