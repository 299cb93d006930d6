"""The training engines of a run's roles under strategy fsdp2, from config sections and model folders."""

import copy
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from pellucid.config import RunConfig
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.config.schema.sharding import FsdpConfig, RefFsdpConfig
from pellucid.engine_maker import Compute, Policy, make_schedule, reference_cut, reward_cut, update_cut
from pellucid.loading import load_critic, load_policy, torch_dtype
from pellucid.rollout.native.copied import GatheredPolicy
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.value_models import load_reward_model
from pellucid.training.fsdp import FsdpEngine

if TYPE_CHECKING:  # a run in one process does without the second that importing it takes
    from pellucid.training.sharding import Sharding


class FsdpEngines:
    """Makes FSDP2 engines, or plain ones where one process holds a model whole."""

    def __init__(self, config: RunConfig, compute: Compute) -> None:
        self._config, self._compute = config, compute
        self._actor: FsdpEngine | None = None

    def policy(self, run_updates: int, *, sampled: bool) -> Policy:
        """Load and spread the policy; where it is `sampled` by a native engine, beside a whole copy if spread."""
        section = self._config.actor_rollout_ref.actor
        model = load_policy(self._config, self._compute.device)
        # The copy is made before sharding takes the model apart.
        whole = copy.deepcopy(model) if sampled and self._spreads(section.fsdp_config) else None
        engine = self._actor = self._trained(model, section, run_updates)
        if whole is None:
            return Policy(engine, engine, None)
        copied = GatheredPolicy(engine, whole, self._config.actor_rollout_ref.rollout.verify_weights)
        return Policy(engine, copied, copied.take_weights)

    def reference(self) -> FsdpEngine:
        """Load the frozen reference: the actor's base under LoRA, else a model of its own."""
        policy = self._config.actor_rollout_ref
        if policy.model.lora_rank:
            assert self._actor is not None, "under LoRA the reference shares the actor's ranks"
            model, sharding = self._actor.model, self._actor.sharding
            return self._engine(model, None, reference_cut(policy.ref), sharding=sharding, without_adapters=True)
        model = load_policy(self._config, self._compute.device, adapters=False).requires_grad_(False)
        sharding = self._shard(model, policy.ref.fsdp_config)
        return self._engine(model, None, reference_cut(policy.ref), sharding=sharding)

    def critic(self, run_updates: int) -> FsdpEngine:
        """Load and spread the value model."""
        return self._trained(load_critic(self._config, self._compute.device), self._config.critic, run_updates)

    def reward_model(self) -> FsdpEngine:
        """Load and spread the frozen reward model."""
        section = self._config.reward_model
        assert section.model.path is not None
        device, trust = self._compute.device, section.model.trust_remote_code
        model = load_reward_model(section.model.path, device=device, trust_remote_code=trust)
        return self._engine(model, None, reward_cut(section), sharding=self._shard(model, FsdpConfig()))

    def _spreads(self, fsdp: FsdpConfig | RefFsdpConfig) -> bool:
        """Return whether a model is taken apart: over several ranks, or between a device and the CPU's memory."""
        return self._compute.num_ranks > 1 or (fsdp.param_offload and self._compute.device.type != "cpu")

    def _trained(self, model: PreTrainedModel, section: ActorConfig | CriticConfig, run_updates: int) -> FsdpEngine:
        sharding = self._shard(model, section.fsdp_config)
        # The parameters are the shards that they have become.
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer = ScheduledAdamW(
            trained,
            make_schedule(section.optim, run_updates),
            section.optim.weight_decay,
            (section.optim.betas[0], section.optim.betas[1]),
            section.grad_clip,
            offload=section.fsdp_config.optimizer_offload,
        )
        return self._engine(model, optimizer, update_cut(section), sharding=sharding)

    def _engine(
        self,
        model: PreTrainedModel,
        optimizer: ScheduledAdamW | None,
        cut: MicroBatching,
        *,
        sharding: "Sharding | None",
        without_adapters: bool = False,
    ) -> FsdpEngine:
        compute = self._compute
        return FsdpEngine(
            model,
            optimizer,
            cut,
            device=compute.device,
            dtype=compute.dtype,
            sharding=sharding,
            without_adapters=without_adapters,
            balance_ranks=compute.balance_ranks,
            probe=compute.probe,
        )

    def _shard(self, model: PreTrainedModel, fsdp: FsdpConfig | RefFsdpConfig) -> "Sharding | None":
        """Spread `model` over the ranks; None where one process holds it whole."""
        if not self._spreads(fsdp):
            return None
        from pellucid.training.sharding import Sharding, ShardingPlan, join_alone

        if self._compute.num_ranks == 1:
            join_alone(self._compute.device)
        plan = ShardingPlan(
            fsdp_size=fsdp.fsdp_size,
            param_dtype=self._compute.dtype,
            reduce_dtype=torch_dtype(fsdp.reduce_dtype) if isinstance(fsdp, FsdpConfig) else torch_dtype("float32"),
            reshard_after_forward=fsdp.reshard_after_forward,
            param_offload=fsdp.param_offload,
        )
        return Sharding(model, plan, self._compute.device)
