"""The plan's lines on what is switched on: algorithm, critic, adapter, rewards, KL, correction, laboratory.

`plan.py` puts them under its numbers; every line comes from a checked config and the model's shape alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import AlgorithmConfig, RejectionRuleConfig, RunConfig


def role_rows(
    config: RunConfig, num_adapter_parameters: int | None, num_parameters: int | None
) -> list[tuple[str, str]]:
    """Return label and sentence for each thing that is switched on.

    Args:
        config: a checked config.
        num_adapter_parameters: what `adapter_size` found; None when the model's files are not at hand.
        num_parameters: of the policy; None when unknown.
    """
    rows = [
        ("algorithm", _algorithm(config)),
        ("critic", _critic(config)),
        ("LoRA", _lora(config, num_adapter_parameters, num_parameters)),
        ("reward", _reward(config)),
        ("KL", "; ".join(_kl(config))),
        ("dynamic sampling", _filter_groups(config)),
        ("correction", correction_text(config.algorithm)),
        ("simulated mismatch", _mismatch(config)),
    ]
    return [(label, text) for label, text in rows if text]


def _algorithm(config: RunConfig) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    greedy = " (and one greedy response per prompt)" if algorithm.adv_estimator == "remax" else ""
    loss = "reinforce" if algorithm.loss_type == "reinforce" else actor.policy_loss.loss_mode
    return f"advantages {algorithm.adv_estimator}{greedy}, loss {loss}, {actor.loss_agg_mode}"


def count_text(number: int, what: str) -> str:
    """Return `1 step` or `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _critic(config: RunConfig) -> str:
    critic, prompts, warmup = config.critic, config.data.train_batch_size, config.trainer.critic_warmup
    if not config.has_critic:
        return ""
    passes = f" × {critic.ppo_epochs} epochs" if critic.ppo_epochs > 1 else ""
    rest = f"; it learns alone for the first {count_text(warmup, 'step')}" if warmup else ""
    updates = prompts // critic.ppo_mini_batch_size * critic.ppo_epochs
    return (
        f"{critic.model.path}, {prompts} prompts ÷ {critic.ppo_mini_batch_size} per mini-batch{passes} = "
        f"{count_text(updates, 'optimizer step')} per step{rest}"
    )


def _lora(config: RunConfig, num_adapter: int | None, num_parameters: int | None) -> str:
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return ""
    modules = model.target_modules if isinstance(model.target_modules, str) else ", ".join(model.target_modules)
    text = f"rank {model.lora_rank}, alpha {model.lora_alpha} on {modules}"
    if num_adapter and num_parameters:
        share = 100 * num_adapter / num_parameters
        text += f": {num_adapter:,} trained parameters ({share:.2g}% of the model's)"
    return text


def _reward(config: RunConfig) -> str:
    reward = config.reward_model
    parts = []
    if reward.enable:
        parts.append(f"{reward.weight:g} × score of {reward.model.path}")
    if reward.rule_weight and (reward.enable or reward.rule_weight != 1):
        parts.append(f"{reward.rule_weight:g} × rule")
    if reward.overlong_buffer.enable:
        buffer = reward.overlong_buffer
        parts = parts or ["rule"]
        parts.append(f"penalty growing to {buffer.penalty_factor:g} over the last {buffer.len} tokens")
    return ", ".join(parts)


def _kl(config: RunConfig) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss:
        yield f"{actor.kl_loss_coef:g} × {actor.kl_loss_type} in the loss"
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        steered = (
            f", steered towards a KL of {control.target_kl:g} over {control.horizon:,} samples"
            if control.type == "adaptive"
            else ""
        )
        yield f"{control.kl_coef:g} × {algorithm.kl_penalty} in the reward{steered}"


def _filter_groups(config: RunConfig) -> str:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return ""
    limit = f"at most {groups.max_num_gen_batches}" if groups.max_num_gen_batches else "any number of"
    return f"prompts whose {groups.metric} is the same in all responses are replaced; {limit} generations per step"


def correction_text(algorithm: AlgorithmConfig) -> str:
    """Return what is done about the gap between rollout and training policy; empty when nothing is."""
    parts: list[str] = []
    if algorithm.bypass_mode:
        parts.append(f"bypass: π_old is the rollout policy, loss {algorithm.loss_type}")
    if algorithm.rollout_is_threshold is not None:
        parts += _weights(algorithm)
    parts += [_rule(rule, algorithm.rollout_rs_threshold) for rule in algorithm.rollout_rs]
    if algorithm.rollout_is_threshold is not None and not algorithm.rollout_is:
        parts.append("weights for the metrics only")
    preset = algorithm.rollout_correction_preset
    return (f"preset {preset} = " if preset and parts else "") + ", ".join(parts)


def _weights(algorithm: AlgorithmConfig) -> Iterator[str]:
    upper, lower = algorithm.rollout_is_threshold, algorithm.rollout_is_threshold_lower
    assert upper is not None
    yield f"{algorithm.rollout_is_level} level"
    if algorithm.rollout_is_mode == "truncate":
        yield f"truncate at {upper:g}"
    else:
        yield f"zero outside {1 / upper if lower is None else lower:g}–{upper:g}"
    if algorithm.rollout_is_veto_threshold is not None:
        yield f"veto below {algorithm.rollout_is_veto_threshold:g}"
    if algorithm.rollout_is_batch_normalize:
        yield "divided by their batch mean"


def _rule(rule: RejectionRuleConfig, shared: float | None) -> str:
    upper = shared if rule.upper is None else rule.upper
    assert upper is not None
    if rule.statistic != "k1":
        return f"reject {rule.level} {rule.statistic} above {upper:g}"
    return f"reject {rule.level} ratio outside {1 / upper if rule.lower is None else rule.lower:g}–{upper:g}"


def _mismatch(config: RunConfig) -> str:
    lab = config.actor_rollout_ref.rollout.simulate_mismatch
    parts = [f"{lab.dtype} weights"] if lab.dtype else []
    if lab.stale_steps:
        parts.append(f"{lab.stale_steps} steps behind")
    if lab.noise:
        parts.append(f"noise {lab.noise:g} on the weights")
    return f"the rollout policy is deliberately NOT the trained one: {', '.join(parts)}" if parts else ""
