"""From config sections to roles: actor, critic, reference, reward model, each an engine with its model and optimizer.

`make_roles` runs in the controller's own process, or with the same arguments on every rank of a worker group.
"""

import gc
import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from pellucid import devices
from pellucid.algo.advantages import Estimator
from pellucid.algo.catalog import ESTIMATORS, POLICY_LOSSES, REINFORCE, load
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.config import RunConfig, read_model_facts
from pellucid.config.convert import raise_all
from pellucid.config.validate.megatron import model_mistakes
from pellucid.console import notice
from pellucid.engine_maker import Compute, EngineMaker, reward_cut
from pellucid.engines import check_engine, make_local_replicas, make_native_engine
from pellucid.errors import MissingExtraError, UserError
from pellucid.plugins import load_object
from pellucid.roles.actor import Actor, ActorSettings
from pellucid.roles.critic import Critic
from pellucid.roles.plugin_checks import ESTIMATOR_FIELD, LOSS_FIELD, checked_estimator, checked_loss
from pellucid.roles.reference import Reference
from pellucid.roles.reward_model import RewardModel
from pellucid.rollout.native import MismatchedPolicy, NativeRolloutEngine
from pellucid.rollout.native.laboratory import changes_weights
from pellucid.rollout.requests import RolloutEngine
from pellucid.stages import ROLE_OF, Stage
from pellucid.training.common.logprobs import compiling_pays
from pellucid.training.common.lora import require_peft
from pellucid.training.common.models import POLICY, load_tokenizer, model_folder, read_config
from pellucid.training.common.value_models import CRITIC, REWARD_MODEL, max_positions
from pellucid.training.megatron.architectures import check_architecture, import_adaptor, require_megatron
from pellucid.training.protocol import TrainingEngine

RoleName = Literal["actor", "rollout", "ref", "critic", "reward_model"]


def choose_estimator(config: RunConfig) -> Estimator:
    """Return the advantage estimator, a built-in one or the user's own function.

    Raises:
        UserError: the import path leads to no function.
    """
    name = config.algorithm.adv_estimator
    if name in ESTIMATORS:
        return load(ESTIMATORS[name].function)
    return checked_estimator(load_object(name, ESTIMATOR_FIELD), name)


def choose_policy_loss(config: RunConfig) -> PolicyLoss:
    """Return the policy loss, a built-in one or the user's own function.

    Raises:
        UserError: the import path leads to no function.
    """
    if config.algorithm.loss_type == "reinforce":
        return PolicyLoss.named(REINFORCE)
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if name in POLICY_LOSSES:
        return PolicyLoss.named(name)
    return PolicyLoss(checked_loss(load_object(name, LOSS_FIELD), name))


def check_roles(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check all that adapters, critic and reward model need beside the policy and that takes no model to know.

    Raises:
        MissingExtraError: LoRA without peft, or the Ray placement without ray.
        UserError: a model folder is missing, reads other tokens than the policy's `tokenizer`, or too short texts.
    """
    if config.trainer.placement == "ray" and importlib.util.find_spec("ray") is None:
        raise MissingExtraError("trainer.placement", "ray", "ray")
    check_engine(config)
    if config.actor_rollout_ref.model.lora_rank:
        require_peft()
    if config.has_critic:
        _check_critic(config, tokenizer)
    if config.reward_model.enable:
        _check_reward_model(config, tokenizer)
    if config.uses_megatron:
        _check_megatron(config)


def _check_megatron(config: RunConfig) -> None:
    """Check that megatron-core is there and computes all models, divided as the config says."""
    require_megatron(devices.choose_device(config.trainer.device).type)
    policy, critic, reward = config.actor_rollout_ref.model, config.critic.model, config.reward_model.model
    models = [("actor", POLICY, policy.path, policy.override_config, policy.trust_remote_code)]
    if config.has_own_reference:
        models.append(("ref", *models[0][1:]))
    if config.has_critic:
        models.append(("critic", CRITIC, critic.path, critic.override_config, critic.trust_remote_code))
    if config.reward_model.enable:
        assert reward.path is not None
        models.append(("reward_model", REWARD_MODEL, reward.path, {}, reward.trust_remote_code))
    for role, field, path, overrides, trusted in models:
        check_architecture(read_config(path, overrides, trust_remote_code=trusted, field=field), field)
        if (facts := read_model_facts(path)) is not None:
            sections = {"critic": "critic", "ref": "actor_rollout_ref.ref"}
            section = sections.get(role, "actor_rollout_ref.actor")
            raise_all(list(model_mistakes(f"{section}.megatron", config.megatron(role), facts)))


def _check_critic(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    section, policy = config.critic.model, config.actor_rollout_ref.model
    if section.path == policy.path:
        return
    folder, trust = model_folder(section.path, CRITIC), section.trust_remote_code
    own = load_tokenizer(folder, trust_remote_code=trust, field=CRITIC).get_vocab().items()
    sampled = tokenizer.get_vocab()
    size = read_config(section.path, section.override_config, trust_remote_code=trust, field=CRITIC).vocab_size
    # One of the two may have tokens more, as long as the critic has room for them.
    if not (own <= sampled.items() or sampled.items() <= own) or max(sampled.values()) >= size:
        reason = f"'{section.path}' reads other tokens than the policy '{policy.path}', whose ids it must value."
        remedy = "Start from a model with the policy's vocabulary, or remove the key to start from the policy."
        raise UserError(CRITIC, reason, remedy)


def _check_reward_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    section, data = config.reward_model.model, config.data
    own = _reward_tokenizer(config, tokenizer)
    if own is not None:
        if own.chat_template is not None and not data.return_raw_chat:
            reason = "the reward model has a vocabulary and a chat template of its own: it must be given the messages."
            raise UserError("data.return_raw_chat", reason, "Set it to true.")
        return  # how long a text is in its tokens shows when it is scored
    assert section.path is not None
    model_config = read_config(section.path, None, trust_remote_code=section.trust_remote_code, field=REWARD_MODEL)
    limit, longest = max_positions(model_config), data.max_prompt_length + data.max_response_length
    if limit is not None and limit < longest:
        sizes = f"{data.max_prompt_length} prompt + {data.max_response_length} response = {longest} tokens"
        reason = f"'{section.path}' reads {limit} tokens (max_position_embeddings), the longest sequence has {sizes}."
        remedy = "Use a reward model for longer texts, or lower data.max_prompt_length or data.max_response_length."
        raise UserError(REWARD_MODEL, reason, remedy)


def _reward_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Return the reward model's tokenizer, or None where its vocabulary is that of the policy's `tokenizer`."""
    section = config.reward_model.model
    assert section.path is not None
    own = load_tokenizer(
        model_folder(section.path, REWARD_MODEL), trust_remote_code=section.trust_remote_code, field=REWARD_MODEL
    )
    return None if own.get_vocab() == tokenizer.get_vocab() else own


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The mismatch laboratory: a policy unlike the trained one, and the engine that samples from it."""

    policy: MismatchedPolicy
    engine: NativeRolloutEngine


@dataclass
class Roles:
    """The roles of a process, or their proxies; None where the run has no such role, or another pool has it."""

    actor: Actor | None = None
    rollout: RolloutEngine | None = None
    """Samples from the trained policy itself."""
    ref: Reference | None = None
    critic: Critic | None = None
    reward_model: RewardModel | None = None
    mismatch: Mismatch | None = None
    """Samples what is trained on, under `rollout.simulate_mismatch`."""

    def take_flops(self) -> float:
        """Return the arithmetic of all roles since the last call."""
        roles = (self.actor, self.ref, self.critic, self.reward_model)
        return sum(role.take_flops() for role in roles if role is not None)

    def engine_of(self, stage: Stage) -> RolloutEngine:
        """Return the engine that samples in a stage: validation is always of the trained policy itself."""
        engine = self.rollout if self.mismatch is None or stage is Stage.VALIDATE else self.mismatch.engine
        assert engine is not None, "the pool that has the actor has an engine"
        return engine

    def in_hand(self) -> list[str]:
        """Return the samples that the models of this process work on at this moment; ranks name theirs themselves."""
        roles = (self.rollout, self.actor, self.ref, self.critic, self.reward_model)
        return [name for role in roles if role is not None for name in role.in_hand]

    def modules_of(self, stage: Stage) -> tuple[torch.nn.Module, ...]:
        """Return the models that a stage runs in this process; empty where another process runs it."""
        role = self.named(ROLE_OF.get(stage, ""))
        return () if role is None else role.modules

    def named(self, role: str) -> Any:
        """Return the role of that name, None where there is none."""
        return vars(self).get(role)


def needed_roles(config: RunConfig) -> list[RoleName]:
    """Return the roles that a run has; validation alone needs the policy and what scores it."""
    trains, judged = not config.trainer.val_only, config.reward_model.enable
    needed: dict[RoleName, bool] = {
        "ref": trains and config.needs_reference,
        "critic": trains and config.has_critic,
        "reward_model": judged and (trains or not config.reward_model.rule_weight),
    }
    return ["actor", "rollout", *(role for role, is_needed in needed.items() if is_needed)]


def make_roles(
    config: RunConfig,
    names: Collection[RoleName],
    tokenizer: PreTrainedTokenizerBase,
    policy_loss: PolicyLoss,
    compute: Compute,
    total_steps: int,
) -> Roles:
    """Load the models of the roles in `names` and return the roles. Over several ranks every one calls it alike.

    Raises:
        UserError: a model does not fit its role.
    """
    roles, policy, actor, reference = Roles(), config.actor_rollout_ref, None, None
    rollout, critic = policy.rollout, config.critic
    maker = _engine_maker(config, compute, next(iter(names)))
    if "actor" in names:
        samples = not config.has_replicas and "rollout" in names
        steps = total_steps - config.trainer.critic_warmup  # the policy rests while the critic warms up
        updates = num_updates(config, steps, policy.actor.ppo_mini_batch_size, policy.actor.ppo_epochs)
        made = maker.policy(updates, sampled=samples)
        actor = made.engine
        if samples:
            assert made.sampled is not None
            roles.rollout = make_native_engine(config, made.sampled, made.take_weights, tokenizer, compute.probe)
        elif "rollout" in names:
            roles.rollout = make_local_replicas(config, actor)
        if changes_weights(rollout.simulate_mismatch):
            assert made.sampled is not None, "the config's rules let only one process that samples itself have it"
            other = MismatchedPolicy(made.sampled, rollout.simulate_mismatch, rollout.seed)
            engine = make_native_engine(config, other, other.take_weights, tokenizer, compute.probe)
            roles.mismatch = Mismatch(other, engine)
    if "ref" in names:
        reference = maker.reference()
        roles.ref = Reference(reference, temperature=rollout.temperature)
    if actor is not None:
        roles.actor = make_actor(config, actor, policy_loss, reference)
    if "critic" in names:
        updates = num_updates(config, total_steps, critic.ppo_mini_batch_size, critic.ppo_epochs)
        seed = config.trainer.seed
        roles.critic = Critic(maker.critic(updates), critic, max_response_length=rollout.response_length, seed=seed)
    if "reward_model" in names:
        roles.reward_model = _make_reward_model(config, maker.reward_model(), tokenizer)
    return roles


def _engine_maker(config: RunConfig, compute: Compute, first_role: str) -> EngineMaker:
    """Return what makes the engines of the run's strategy; `first_role` is one that this process has."""
    if config.uses_megatron:
        import_adaptor(compute.device.type)  # before anything imports megatron-core
        from pellucid.megatron_engines import MegatronEngines

        return MegatronEngines(config, compute, first_role)
    from pellucid.fsdp_engines import FsdpEngines

    return FsdpEngines(config, compute)


def leave_loaded_alone() -> None:
    """Keep the garbage collector from looking through libraries and models again and again, 0.25 s each time, and
    through trajectories under way more often than their number asks for: that took half of an asynchronous controller.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def make_actor(
    config: RunConfig, engine: TrainingEngine, policy_loss: PolicyLoss, reference: TrainingEngine | None
) -> Actor:
    """Return the actor; `reference` is the engine of the frozen reference, or None."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    compiled = actor.use_torch_compile and compiling_pays(engine.device)
    if actor.use_torch_compile:
        missing = "needs CUDA, Triton and a C compiler; nothing is compiled"
        done = "log-probabilities are compiled" if compiled else missing
        notice(f"use_torch_compile on {engine.device.type}: {done}.", style="dim")
    settings = ActorSettings(
        policy_loss=policy_loss,
        temperature=rollout.temperature,
        max_response_length=rollout.response_length,
        seed=config.trainer.seed,
        compiled=compiled,
        exact_kl_to=reference,
        bypass=algorithm if algorithm.bypass_mode else None,
    )
    return Actor(engine, actor, settings)


def _make_reward_model(
    config: RunConfig, engine: TrainingEngine, policy_tokenizer: PreTrainedTokenizerBase
) -> RewardModel:
    section, path = config.reward_model, config.reward_model.model.path
    assert path is not None
    model = read_config(path, None, trust_remote_code=section.model.trust_remote_code, field=REWARD_MODEL)
    own = _reward_tokenizer(config, policy_tokenizer)
    return RewardModel(engine, own, max_tokens=reward_cut(section).max_tokens, max_positions=max_positions(model))


def num_updates(config: RunConfig, steps: int, mini_batch_size: int, epochs: int) -> int:
    """Return the optimizer steps of a run of `steps` steps."""
    return steps * epochs * (config.data.train_batch_size // mini_batch_size)
