"""Rules on estimators, losses, rewards and adapters that belong together or exclude each other.

`validate` in the package calls `mistakes` and `unusual`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.algo.catalog import loss_entry
from pellucid.config.schema import RunConfig
from pellucid.errors import UserError

ACTOR = "actor_rollout_ref.actor"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in the algorithm and the reward."""
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    if loss_entry(loss).sequence_mean and actor.loss_agg_mode != "seq-mean-token-mean":
        reason = f"{actor.loss_agg_mode} does not go with loss_mode: {loss}, which is a mean over sequences."
        yield UserError(f"{ACTOR}.loss_agg_mode", reason, "Set it to seq-mean-token-mean, or remove the key.")
    if actor.clip_ratio != type(actor)().clip_ratio and actor.clip_ratio not in (
        actor.clip_ratio_low,
        actor.clip_ratio_high,
    ):
        reason = (
            f"{actor.clip_ratio:g} has no effect while clip_ratio_low ({actor.clip_ratio_low:g}) and "
            f"clip_ratio_high ({actor.clip_ratio_high:g}) are both set."
        )
        yield UserError(f"{ACTOR}.clip_ratio", reason, "Remove it, or set those to null.")
    if config.algorithm.use_kl_in_reward and not config.sums_rewards:
        yield UserError(
            "algorithm.use_kl_in_reward",
            f"{config.algorithm.adv_estimator} normalises the components of the reward, and the KL penalty "
            "is none: it would be lost.",
            f"Set {ACTOR}.use_kl_loss: true instead.",
        )
    model = config.actor_rollout_ref.model
    if model.lora_rank and model.target_modules == []:
        reason = "an empty list gives no module an adapter, so nothing would be trained."
        yield UserError("actor_rollout_ref.model.target_modules", reason, "Name modules, or set it to all-linear.")
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "adaptive":
        yield from _adaptive_kl(config)
    yield from _reward(config)


def _adaptive_kl(config: RunConfig) -> Iterator[UserError]:
    """Yield what would leave the steered weight of the KL penalty at 0, or take it below."""
    control = config.algorithm.kl_ctrl
    prompts, num_samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if control.kl_coef == 0:
        reason = "adaptive control multiplies the weight each step, and 0 stays 0."
        remedy = "Set it above 0, e.g. 0.001, or algorithm.kl_ctrl.type: fixed."
        yield UserError("algorithm.kl_ctrl.kl_coef", reason, remedy)
    samples = prompts * num_samples
    if 5 * control.horizon <= samples:
        yield UserError(
            "algorithm.kl_ctrl.horizon",
            f"a step of {prompts} prompts × {num_samples} samples can change the weight by 0.2 × {samples} ÷ "
            f"{control.horizon} = {0.2 * samples / control.horizon:.3g} of itself: down to 0 or below.",
            f"Set it well above 0.2 × {samples} = {0.2 * samples:g}, e.g. {max(10000, 10 * samples)}.",
        )


def _reward(config: RunConfig) -> Iterator[UserError]:
    reward, longest = config.reward_model, config.data.max_response_length
    if reward.enable and reward.model.path is None:
        reason = "reward_model.enable is true, but no model is named."
        yield UserError("reward_model.model.path", reason, "Set it to a model folder or hub id.")
    if reward.enable and reward.weight == 0:
        reason = "0 leaves the reward model's score out of the reward."
        yield UserError("reward_model.weight", reason, "Set another weight, or reward_model.enable: false.")
    if reward.rule_weight not in (0, 1) and not config.sums_rewards:
        yield UserError(
            "reward_model.rule_weight",
            f"{reward.rule_weight} has no effect with adv_estimator: {config.algorithm.adv_estimator}, "
            "which normalises each component.",
            "Weigh the components with algorithm.gdpo_reward_weights, or remove the key.",
        )
    if reward.rule_weight == 0 and not reward.enable:
        reason = "0 leaves the rule's score out, and there is no reward model: every reward is 0."
        yield UserError("reward_model.rule_weight", reason, "Set it to 1, or reward_model.enable: true.")
    buffer = reward.overlong_buffer
    if buffer.enable and buffer.len is None:
        reason = "must be set while overlong_buffer.enable is true."
        remedy = f"Set it below data.max_response_length ({longest}), e.g. {max(1, longest // 4)}."
        yield UserError("reward_model.overlong_buffer.len", reason, remedy)
    if buffer.enable and buffer.len is not None and buffer.len >= longest:
        reason = f"{buffer.len} tokens of penalty leave none of data.max_response_length ({longest}) without one."
        remedy = f"Set it below {longest}, e.g. {max(1, longest // 4)}."
        yield UserError("reward_model.overlong_buffer.len", reason, remedy)


def unusual(config: RunConfig) -> Iterator[str]:
    """Yield lines about settings that are allowed and seldom meant."""
    if config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are both on: the KL penalty counts twice."
