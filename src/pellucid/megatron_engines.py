"""The training engines of a run's roles under strategy megatron, from config sections and model folders."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from pellucid.config import RunConfig
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.config.schema.sharding import RefMegatronConfig
from pellucid.engine_maker import Compute, Policy, make_schedule, reference_cut, reward_cut, update_cut
from pellucid.loading import load_policy
from pellucid.rollout.native.copied import GatheredPolicy
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import POLICY, model_folder, read_config
from pellucid.training.common.value_models import CRITIC, REWARD_MODEL, check_one_label, value_head_class
from pellucid.training.megatron.layout import MegatronLayout, ParallelSizes
from pellucid.training.megatron.megatron_engine import MegatronEngine, Training, load_engine
from pellucid.training.sharding import join_alone


class MegatronEngines:
    """Makes Megatron engines; all roles of the process have the same layout."""

    def __init__(self, config: RunConfig, compute: Compute, first_role: str) -> None:
        self._config, self._compute = config, compute
        if compute.num_ranks == 1:
            join_alone(compute.device)
            sizes = ParallelSizes()  # also where a failure of several ranks is run again in one process
        else:
            sizes = parallel_sizes(config.megatron(first_role))
        self._layout = MegatronLayout(sizes, compute.device)

    def policy(self, run_updates: int, *, sampled: bool) -> Policy:
        """Load the policy, each rank its part; where a native engine samples from it, beside a whole copy."""
        section, model = self._config.actor_rollout_ref.actor, self._config.actor_rollout_ref.model
        engine = self._load(
            model.path,
            read_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code, field=POLICY),
            POLICY,
            section.megatron,
            update_cut(section),
            training=self._training(section, run_updates),
            recompute=model.enable_gradient_checkpointing,
        )
        if not sampled:
            return Policy(engine, None, None)
        whole: Any = load_policy(self._config, self._compute.device)
        verify = self._config.actor_rollout_ref.rollout.verify_weights
        copied = GatheredPolicy(engine, whole.to(self._compute.dtype), verify)
        return Policy(engine, copied, copied.take_weights)

    def reference(self) -> MegatronEngine:
        """Load the frozen reference."""
        model, section = self._config.actor_rollout_ref.model, self._config.actor_rollout_ref.ref
        own = read_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code, field=POLICY)
        return self._load(model.path, own, POLICY, section.megatron, reference_cut(section))

    def critic(self, run_updates: int) -> MegatronEngine:
        """Load the value model."""
        section = self._config.critic
        path, model = section.model.path, section.model
        own = read_config(path, model.override_config, trust_remote_code=model.trust_remote_code, field=CRITIC)
        if value_head_class(path, own, CRITIC) is not None:
            check_one_label(path, own, CRITIC)
        return self._load(
            path,
            own,
            CRITIC,
            section.megatron,
            update_cut(section),
            training=self._training(section, run_updates),
            recompute=model.enable_gradient_checkpointing,
            scalar=True,
        )

    def reward_model(self) -> MegatronEngine:
        """Load the frozen reward model, spread like the actor."""
        section = self._config.reward_model
        path, trust = section.model.path, section.model.trust_remote_code
        assert path is not None
        own = read_config(path, None, trust_remote_code=trust, field=REWARD_MODEL)
        value_head_class(path, own, REWARD_MODEL)
        check_one_label(path, own, REWARD_MODEL)
        layout = self._config.megatron("reward_model")
        return self._load(path, own, REWARD_MODEL, layout, reward_cut(section), scalar=True)

    def _load(
        self,
        path: str,
        model: PretrainedConfig,
        field: str,
        section: RefMegatronConfig,
        cut: MicroBatching,
        *,
        training: Training | None = None,
        recompute: bool = False,
        scalar: bool = False,
    ) -> MegatronEngine:
        overrides = {name: value for name, value in asdict(section.override_transformer_config).items() if value}
        if self._layout.sizes.pipeline == 1:  # one process that runs a failure of several stages again
            overrides = {name: value for name, value in overrides.items() if "pipeline_stage" not in name}
        return load_engine(
            _local_folder(path, field),
            model,
            training,
            cut,
            self._layout,
            self._compute.dtype,
            field=field,
            scalar=scalar,
            recompute=recompute,
            sequence_parallel=section.sequence_parallel,
            overrides=overrides,
            offload=section.param_offload,
            balance_ranks=self._compute.balance_ranks,
            probe=self._compute.probe,
        )

    def _training(self, section: ActorConfig | CriticConfig, run_updates: int) -> Training:
        optim = section.optim
        return Training(
            make_schedule(optim, run_updates),
            optim.weight_decay,
            (optim.betas[0], optim.betas[1]),
            section.grad_clip,
            section.megatron.optimizer_offload,
        )


def parallel_sizes(section: RefMegatronConfig) -> ParallelSizes:
    """Return the sizes that a config section says."""
    return ParallelSizes(
        tensor=section.tensor_model_parallel_size,
        pipeline=section.pipeline_model_parallel_size,
        virtual_pipeline=section.virtual_pipeline_model_parallel_size,
        context=section.context_parallel_size,
        expert=section.expert_model_parallel_size,
        expert_tensor=section.expert_tensor_parallel_size,
    )


def _local_folder(path: str, field: str) -> Path:
    """Return a model's folder on this machine, downloaded from the hub where it is a hub id."""
    folder = Path(model_folder(path, field))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path))
