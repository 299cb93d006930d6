"""Rules on rollout correction: bounds in order, log-probabilities at hand, and nothing that biases silently.

`validate` in the package calls `mistakes` and `unusual`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import AlgorithmConfig, RejectionRuleConfig, RunConfig
from pellucid.config.schema.actor import SEQUENCE_MEAN_LOSSES
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
        yield UserError(
            f"{ROLLOUT}.calculate_log_probs",
            f"is false, but {keys} {'compare' if ',' in keys else 'compares'} the rollout's log-probabilities with "
            "those of training.",
            f"Set {ROLLOUT}.calculate_log_probs: true.",
        )
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
        yield UserError(
            "algorithm.rollout_is",
            "true applies importance weights, but rollout_is_threshold is null: none are computed.",
            "Set algorithm.rollout_is_threshold, e.g. 2.0.",
        )
    if upper is None:
        return
    if lower is not None and algorithm.rollout_is_mode == "truncate":
        yield UserError(
            "algorithm.rollout_is_threshold_lower",
            f"{lower:g} has no effect with rollout_is_mode: truncate, which only caps weights.",
            "Set algorithm.rollout_is_mode: clip, or remove the key.",
        )
    elif lower is not None and lower > upper:
        yield UserError(
            "algorithm.rollout_is_threshold_lower",
            f"the lower bound {lower:g} is above the upper bound {upper:g} (rollout_is_threshold).",
            "Set lower < 1 < upper, e.g. 0.5 and 2.0.",
        )
    elif lower is None and algorithm.rollout_is_mode == "clip" and upper < 1:
        yield UserError(
            "algorithm.rollout_is_threshold",
            f"{upper:g} is below 1, so the lower bound 1 ÷ {upper:g} = {1 / upper:g} is above it.",
            "Set it above 1, e.g. 2.0.",
        )


def _rule(key: str, rule: RejectionRuleConfig, shared: float | None) -> Iterator[UserError]:
    upper = rule.upper if rule.upper is not None else shared
    if upper is None:
        yield UserError(
            f"{key}.upper",
            f"nothing bounds {rule.statistic} at level {rule.level}.",
            "Set upper in the rule, or algorithm.rollout_rs_threshold for all rules.",
        )
    if rule.lower is not None and rule.statistic != "k1":
        yield UserError(
            f"{key}.lower",
            f"{rule.lower:g} has no effect: {rule.statistic} is a divergence, 0 at best, and only bounded above.",
            "Remove it, or set statistic: k1.",
        )
    elif upper is not None and rule.statistic == "k1":
        lower = rule.lower if rule.lower is not None else 1 / upper
        if lower > upper:
            made = "" if rule.lower is not None else f" = 1 ÷ {upper:g}"
            yield UserError(
                f"{key}.{'lower' if rule.lower is not None else 'upper'}",
                f"the lower bound {lower:g}{made} is above the upper bound {upper:g}.",
                "Set lower < 1 < upper, e.g. 0.5 and 2.0.",
            )


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
        yield UserError(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"{loss} is not used: algorithm.loss_type: reinforce takes its place.",
            "Remove it, or set algorithm.loss_type: ppo_clip.",
        )
    if algorithm.loss_type == "ppo_clip" and algorithm.rollout_is:
        yield UserError(
            "algorithm.rollout_is",
            "in bypass mode the loss's own ratio is π_θ ÷ π_rollout already; weights would count it twice.",
            "Set it to false, or algorithm.loss_type: reinforce.",
        )
    if algorithm.loss_type == "ppo_clip" and loss in SEQUENCE_MEAN_LOSSES:
        for index, rule in enumerate(algorithm.rollout_rs):
            if rule.level == "token":
                yield UserError(
                    f"algorithm.rollout_rs[{index}].level",
                    "token: in bypass mode a rejected token gets loss 0, but stays in the mean over its sequence that "
                    f"{loss} takes.",
                    "Reject whole sequences: level seq_mean, seq_sum or seq_max.",
                )


def unusual(config: RunConfig) -> Iterator[str]:
    """Yield lines about bounds that are allowed and seldom meant."""
    algorithm = config.algorithm
    bounds = [
        ("algorithm.rollout_is_threshold", algorithm.rollout_is_threshold, algorithm.rollout_is_threshold_lower),
        *(
            (f"algorithm.rollout_rs[{index}]", rule.upper or algorithm.rollout_rs_threshold, rule.lower)
            for index, rule in enumerate(algorithm.rollout_rs)
            if rule.statistic == "k1"
        ),
    ]
    for key, upper, lower in bounds:
        if upper is not None and upper <= 1:
            yield f"{key}: the upper bound {upper:g} is not above 1, the ratio of two equal policies."
        if lower is not None and lower >= 1:
            yield f"{key}: the lower bound {lower:g} is not below 1, the ratio of two equal policies."
    veto = algorithm.rollout_is_veto_threshold
    if algorithm.rollout_is_threshold is not None and veto is not None and veto >= 0.5:
        yield f"algorithm.rollout_is_veto_threshold: {veto:g} discards sequences for ordinary tokens; 1e-4 is usual."
