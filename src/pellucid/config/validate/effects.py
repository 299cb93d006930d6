"""Keys that act in some modes only: changing one in another mode is an error, not a silent nothing.

One table says for each such key when it acts; `validate` in the package calls `changed_keys` and `mistakes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pellucid.config.convert import defaults_tree
from pellucid.config.fields import is_import_path
from pellucid.config.schema import RunConfig
from pellucid.errors import UserError

_ALGORITHM, _ACTOR, _LOSS = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss"
_MODEL, _REWARD = "actor_rollout_ref.model", "reward_model"
_GDPO = "with adv_estimator: gdpo, which normalises the components of the reward one by one"
_GDPO_REMEDY = "Weigh the components with algorithm.gdpo_reward_weights"


@dataclass(frozen=True)
class Effect:
    """When some keys act.

    Attributes:
        section: what the keys' names begin with.
        keys: names within the section; empty for all of it.
        acts: tells whether they act under a config.
        otherwise: why they do not, e.g. "while x is false".
        remedy: what to set to make them act.
    """

    section: str
    keys: tuple[str, ...]
    acts: Callable[[RunConfig], bool]
    otherwise: str
    remedy: str

    def covers(self, key: str) -> bool:
        """Tell whether this is about `key`."""
        section, _, name = key.partition(f"{self.section}.")
        return section == "" and key != name and (not self.keys or name in self.keys)


def _switch(section: str, keys: tuple[str, ...], switch: str, acts: Callable[[RunConfig], bool]) -> Effect:
    return Effect(section, keys, acts, f"while {switch} is false", f"Set {switch}: true")


def _of_estimators(keys: tuple[str, ...], *names: str) -> Effect:
    """Keys that some estimators read; a user's own estimator is given them all."""
    return Effect(
        _ALGORITHM,
        keys,
        lambda config: config.algorithm.adv_estimator in names or is_import_path(config.algorithm.adv_estimator),
        "with adv_estimator: {estimator}",
        f"Set algorithm.adv_estimator to {' or '.join(names)}",
    )


def _of_losses(section: str, keys: tuple[str, ...], *names: str) -> Effect:
    """Keys that some losses read; a user's own loss is given them all."""
    return Effect(
        section,
        keys,
        lambda config: (
            config.algorithm.loss_type != "reinforce"
            and (
                config.actor_rollout_ref.actor.policy_loss.loss_mode in names
                or is_import_path(config.actor_rollout_ref.actor.policy_loss.loss_mode)
            )
        ),
        "with {loss}",
        f"Set {_LOSS}.loss_mode to {' or '.join(names)}",
    )


def _has_weights(config: RunConfig) -> bool:
    return config.algorithm.rollout_is_threshold is not None


EFFECTS: tuple[Effect, ...] = (
    _switch(
        _ACTOR,
        ("kl_loss_coef", "kl_loss_type"),
        f"{_ACTOR}.use_kl_loss",
        lambda config: config.actor_rollout_ref.actor.use_kl_loss,
    ),
    _switch(
        _ALGORITHM,
        ("kl_penalty", "kl_ctrl.kl_coef", "kl_ctrl.type"),
        "algorithm.use_kl_in_reward",
        lambda config: config.algorithm.use_kl_in_reward,
    ),
    Effect(
        _ALGORITHM,
        ("kl_ctrl.horizon", "kl_ctrl.target_kl"),
        lambda config: config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "adaptive",
        "without adaptive control of a KL penalty in the reward",
        "Set algorithm.use_kl_in_reward: true and algorithm.kl_ctrl.type: adaptive",
    ),
    Effect(
        "actor_rollout_ref.ref",
        ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
        lambda config: config.samples_kl,
        "while no KL term is estimated from sampled tokens (full runs the reference on the actor's micro-batches)",
        f"Set {_ACTOR}.use_kl_loss: true, with another kl_loss_type than full",
    ),
    Effect(
        "actor_rollout_ref.ref.fsdp_config",
        (),
        lambda config: config.has_own_reference,
        "without a reference model of its own (no KL term asks for one, or under LoRA it is the actor's base)",
        f"Set {_ACTOR}.use_kl_loss: true and {_MODEL}.lora_rank: 0",
    ),
    _of_estimators(("lam",), "gae"),
    _of_estimators(("gamma",), "gae", "reinforce_plus_plus"),
    _of_estimators(("norm_adv_by_std_in_grpo",), "grpo", "grpo_passk", "gdpo"),
    _of_estimators(("gdpo_reward_weights",), "gdpo"),
    _switch(
        _ALGORITHM,
        ("filter_groups.metric", "filter_groups.max_num_gen_batches"),
        "algorithm.filter_groups.enable",
        lambda config: config.algorithm.filter_groups.enable,
    ),
    Effect(
        "critic",
        (),
        lambda config: config.has_critic,
        "with adv_estimator: {estimator}, which has no critic",
        "Set adv_estimator: gae",
    ),
    Effect(
        "trainer",
        ("critic_warmup",),
        lambda config: config.has_critic,
        "with adv_estimator: {estimator}, which has no critic",
        "Set adv_estimator: gae",
    ),
    Effect(
        "trainer",
        ("ray_address", "resource_pools", "max_restarts"),
        lambda config: config.trainer.placement == "ray",
        "with placement: local, which keeps all in one process",
        "Set trainer.placement: ray",
    ),
    Effect(
        "trainer",
        ("rendezvous_port",),
        lambda config: config.trainer.placement == "ray" and config.trainer.nnodes > 1,
        "unless ranks of several machines meet",
        "Set trainer.placement: ray and trainer.nnodes, e.g. 2",
    ),
    Effect(
        "trainer",
        ("balance_batch",),
        lambda config: (
            config.trainer.placement == "ray" and max(config.num_ranks, *config.trainer.resource_pools.values(), 1) > 1
        ),
        "with a single rank",
        "Set trainer.placement: ray and trainer.n_gpus_per_node, e.g. 2",
    ),
    _of_losses(_LOSS, ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), "clip_cov"),
    _of_losses(_LOSS, ("kl_cov_ratio", "ppo_kl_coef"), "kl_cov"),
    _of_losses(_LOSS, ("tau_pos", "tau_neg"), "sapo"),
    _of_losses(_LOSS, ("dro_beta",), "dro"),
    _of_losses(_ACTOR, ("clip_ratio_c",), "vanilla"),
    _of_losses(
        _ACTOR,
        ("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
        *("vanilla", "gspo", "clip_cov", "geo_mean", "cispo"),
    ),
    Effect(
        _MODEL,
        ("lora_alpha", "target_modules"),
        lambda config: config.actor_rollout_ref.model.lora_rank > 0,
        f"while {_MODEL}.lora_rank is 0",
        f"Set {_MODEL}.lora_rank, e.g. 16",
    ),
    _switch(
        _REWARD,
        ("model.path", "model.trust_remote_code", "micro_batch_size_per_gpu", "weight"),
        f"{_REWARD}.enable",
        lambda config: config.reward_model.enable,
    ),
    Effect(
        _REWARD,
        ("weight",),
        lambda config: config.algorithm.adv_estimator != "gdpo",
        _GDPO,
        _GDPO_REMEDY,
    ),
    Effect(
        _REWARD,
        ("rule_weight",),
        lambda config: config.algorithm.adv_estimator != "gdpo" or config.reward_model.rule_weight == 0,
        _GDPO,
        _GDPO_REMEDY,
    ),
    Effect(
        _REWARD,
        ("forward_max_token_len_per_gpu",),
        lambda config: config.reward_model.enable and config.reward_model.micro_batch_size_per_gpu is None,
        "unless a reward model forms its passes by tokens",
        f"Set {_REWARD}.enable: true and {_REWARD}.micro_batch_size_per_gpu: null",
    ),
    _switch(
        _REWARD,
        ("overlong_buffer.len", "overlong_buffer.penalty_factor"),
        f"{_REWARD}.overlong_buffer.enable",
        lambda config: config.reward_model.overlong_buffer.enable,
    ),
    Effect(
        _REWARD,
        ("custom_reward_function.path",),
        lambda config: config.reward_model.rule_weight != 0,
        f"while {_REWARD}.rule_weight is 0",
        f"Set {_REWARD}.rule_weight: 1.0",
    ),
    Effect(
        _ALGORITHM,
        (
            "rollout_is_threshold_lower",
            "rollout_is_level",
            "rollout_is_mode",
            "rollout_is_veto_threshold",
            "rollout_is_batch_normalize",
        ),
        _has_weights,
        "while algorithm.rollout_is_threshold is null: there are no weights",
        "Set algorithm.rollout_is_threshold, e.g. 2.0",
    ),
    Effect(
        _ALGORITHM,
        ("rollout_rs_threshold",),
        lambda config: any(rule.upper is None for rule in config.algorithm.rollout_rs),
        "while no rule of algorithm.rollout_rs lacks an upper bound",
        "Add a rule, e.g. {{statistic: k1, level: token}}",
    ),
    _switch(_ALGORITHM, ("loss_type",), "algorithm.bypass_mode", lambda config: config.algorithm.bypass_mode),
)


def mistakes(config: RunConfig, changed: dict[str, Any]) -> Iterator[UserError]:
    """Yield a mistake for each changed key that does nothing in this mode.

    Args:
        config: the whole config.
        changed: what `changed_keys` found.
    """
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    words = {
        "estimator": config.algorithm.adv_estimator,
        "loss": "algorithm.loss_type: reinforce" if config.algorithm.loss_type == "reinforce" else f"loss_mode: {loss}",
    }
    for key, value in changed.items():
        effect = next((effect for effect in EFFECTS if effect.covers(key) and not effect.acts(config)), None)
        if effect is not None:
            shown = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
            yield UserError(
                key,
                f"{shown} has no effect {effect.otherwise.format(**words)}.",
                f"{effect.remedy.format(**words)}, or remove the key.",
            )


def changed_keys(config: RunConfig) -> dict[str, Any]:
    """Return key → value of what differs from its default; for a key that follows another, from that one's value."""
    from omegaconf import OmegaConf

    pairs = _pairs(defaults_tree(RunConfig), values := dataclasses.asdict(config), "")
    links = {key: default for key, (default, _) in pairs.items() if isinstance(default, str) and "${" in default}
    followed = OmegaConf.create(values)
    for key, target in links.items():
        OmegaConf.update(followed, key, target)
    return {
        key: value
        for key, (default, value) in pairs.items()
        if value != (OmegaConf.select(followed, key) if key in links else default)
    }


def _pairs(defaults: dict[str, Any], values: dict[str, Any], prefix: str) -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (default, value); a mapping that is a value, not a section, counts as one key."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name, default in defaults.items():
        if isinstance(default, dict) and default:
            pairs |= _pairs(default, values[name], f"{prefix}{name}.")
        else:
            pairs[prefix + name] = (default, values[name])
    return pairs
