"""The two roots: `RunConfig` of `pellucid train` and `eval`, `SftConfig` of `pellucid sft`."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated
from urllib.parse import urlsplit

from pellucid.algo.catalog import estimator_entry
from pellucid.config.fields import Range, option
from pellucid.config.schema.actor import ActorConfig, OptimConfig, RefConfig, UpdateConfig
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.config.schema.data import DataConfig, SftDataConfig
from pellucid.config.schema.model import ModelConfig, SftModelConfig
from pellucid.config.schema.profiler import PROFILED_SECTIONS, GlobalProfilerConfig, ProfilerConfig
from pellucid.config.schema.reward_model import RewardConfig
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.config.schema.sharding import RefMegatronConfig
from pellucid.config.schema.trainer import CRITIC, SftTrainerConfig, TrainerConfig


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """The policy in its three parts: trained, sampled from, and kept frozen."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The language model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy update."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The frozen reference model, loaded only when a KL term needs it."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The sampling of responses."""


@dataclass(frozen=True)
class RunConfig:
    """Reinforcement learning and evaluation."""

    data: DataConfig = field(default_factory=DataConfig)
    """The prompts, and how many make a step."""
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """The policy: model, update, reference and sampling."""
    critic: CriticConfig = option(CriticConfig, needs=CRITIC, follows=("actor_rollout_ref.actor", UpdateConfig))
    """The value model, loaded only for estimators that have one."""
    reward_model: RewardConfig = field(default_factory=RewardConfig)
    """How a response is scored."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """From rewards to advantages."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run: its length, device, logs and checkpoints."""
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)
    """Profiling: the tool, the steps, and what is done with the files; each role's `profiler` says of whom."""

    @property
    def num_ranks(self) -> int:
        """Ranks that hold the policy."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    def pool_ranks(self, role: str) -> int:
        """Return how many ranks a role runs on: its own (`trainer.resource_pools`), or the policy's."""
        own = (count for name, count in self.trainer.resource_pools.items() if name == role)
        return next(own, self.num_ranks)

    @property
    def uses_megatron(self) -> bool:
        """Whether megatron-core is the training engine."""
        return self.actor_rollout_ref.actor.strategy == "megatron"

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 is the training engine."""
        return not self.uses_megatron

    def megatron(self, role: str) -> RefMegatronConfig:
        """Return how megatron-core spreads a role's model; a reward model follows the actor."""
        policy = self.actor_rollout_ref
        own: dict[str, RefMegatronConfig] = {"ref": policy.ref.megatron, "critic": self.critic.megatron}
        return own.get(role, policy.actor.megatron)

    def data_ranks(self, role: str) -> int:
        """Return how many parts a role's batches are cut into for its ranks."""
        return self.pool_ranks(role) // (self.megatron(role).batch_ranks if self.uses_megatron else 1)

    def copy_ranks(self, role: str) -> int:
        """Return how many of a role's ranks hold one copy of its model between them."""
        if self.uses_megatron:
            return self.megatron(role).copy_ranks
        spread = ("actor", "ref", "critic")
        size = attrgetter(f"{PROFILED_SECTIONS[role]}.fsdp_config.fsdp_size")(self) if role in spread else -1
        return self.pool_ranks(role) if size == -1 else size

    @property
    def has_replicas(self) -> bool:
        """Whether engines beside the trainer sample, which are sent its weights."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        overlaps = trainer.schedule != "sync" and trainer.placement == "local"
        return rollout.name != "native" or rollout.mode == "separate" or overlaps

    @property
    def engines_sleep(self) -> bool:
        """Whether engines beside the trainer give it their devices' memory while it works."""
        rollout = self.actor_rollout_ref.rollout
        here = rollout.mode == "colocated" and not rollout.server_addresses
        take_turns = here and self.trainer.schedule == "sync"
        return rollout.name != "native" and take_turns and rollout.free_cache_engine

    @property
    def rollout_machines(self) -> tuple[int, int]:
        """The devices on a machine that engines sample on, and the number of such machines."""
        of = self.actor_rollout_ref.rollout if self.actor_rollout_ref.rollout.mode == "separate" else self.trainer
        return of.n_gpus_per_node, of.nnodes

    @property
    def num_replicas(self) -> int:
        """Engines beside the trainer; one process has one."""
        if joined := self.actor_rollout_ref.rollout.server_addresses:
            return len(joined)
        per_machine, machines = self.rollout_machines
        size = self.actor_rollout_ref.rollout.tensor_model_parallel_size
        return per_machine * machines // size if self.trainer.placement == "ray" else 1

    @property
    def weight_transport(self) -> str | None:
        """How weights reach replicas; None where that depends on the machines of a cluster."""
        rollout = self.actor_rollout_ref.rollout
        if rollout.weight_transport != "auto":
            return rollout.weight_transport
        if joined := rollout.server_addresses:
            local = all(urlsplit(address).hostname in ("127.0.0.1", "::1", "localhost") for address in joined)
            return "shared_memory" if local and self.trainer.ray_address is None else "files"
        return "shared_memory" if self.trainer.ray_address is None else None

    @property
    def profilers(self) -> dict[str, ProfilerConfig]:
        """The profiler settings of each role, in the order of `PROFILED_SECTIONS`."""
        return {role: attrgetter(f"{section}.profiler")(self) for role, section in PROFILED_SECTIONS.items()}

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs a value model."""
        return "values" in estimator_entry(self.algorithm.adv_estimator).needs

    @property
    def sums_rewards(self) -> bool:
        """Whether the advantages come from one sum of rewards, instead of from each component."""
        return "reward_components" not in estimator_entry(self.algorithm.adv_estimator).needs

    @property
    def kl_types(self) -> set[str]:
        """The forms of the KL terms, in the loss and in the reward, that compare the policy to the reference model."""
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        terms = ((actor.use_kl_loss, actor.kl_loss_type), (algorithm.use_kl_in_reward, algorithm.kl_penalty))
        return {form for is_used, form in terms if is_used}

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term, in the loss or in the reward, compares the policy to the reference model."""
        return bool(self.kl_types)

    @property
    def has_own_reference(self) -> bool:
        """Whether the reference is a model of its own; under LoRA it is the actor's base."""
        return self.needs_reference and self.actor_rollout_ref.model.lora_rank == 0

    @property
    def samples_kl(self) -> bool:
        """Whether a KL term is estimated from the sampled tokens, which needs the reference's log-probs of them.

        The exact one (`full`) does not: there the actor's micro-batches pass through the reference as well.
        """
        return bool(self.kl_types - {"full"})

    @property
    def corrects(self) -> bool:
        """Whether weights or a smaller mask are worked out before the update; in bypass mode it does so itself."""
        algorithm = self.algorithm
        return not algorithm.bypass_mode and (algorithm.rollout_is or bool(algorithm.rollout_rs))

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether a pass before the update must supply `old_logp`: the update's own does when it is the only one."""
        actor = self.actor_rollout_ref.actor
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= self.data.train_batch_size
        return not one_update or self.algorithm.use_kl_in_reward or self.corrects


@dataclass(frozen=True)
class SftEngineConfig:
    """Limits of one optimizer step."""

    max_token_len_per_gpu: Annotated[int, Range(ge=1)] = 16384
    """Most tokens in one forward and backward pass; at least `data.max_length`."""
    grad_clip: Annotated[float, Range(gt=0)] = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it."""


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning."""

    data: SftDataConfig = field(default_factory=SftDataConfig)
    """The rows to learn from."""
    model: SftModelConfig = field(default_factory=SftModelConfig)
    """The language model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    engine: SftEngineConfig = field(default_factory=SftEngineConfig)
    """Limits of one optimizer step."""
    trainer: SftTrainerConfig = field(default_factory=SftTrainerConfig)
    """The run: its length, device, logs and checkpoints."""
