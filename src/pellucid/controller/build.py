"""From a validated config to a `Run`: the parts that the loop drives, made in the order in which mistakes are cheapest.

Data and reward are checked before the plan is printed, the plan before the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid import devices
from pellucid.algo.advantages import Estimator
from pellucid.algo.correction import CorrectionSettings
from pellucid.algo.kl import KLController, make_kl_controller
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.checkpoint_store import CheckpointStore
from pellucid.config import RunConfig
from pellucid.config.plan import build_plan, read_model_facts
from pellucid.console import console, notice
from pellucid.controller.make_roles import (
    check_roles,
    choose_estimator,
    choose_policy_loss,
    correction_settings,
    load_policy,
    make_actor,
    make_actor_engine,
    make_critic,
    make_reference,
    make_reward_model,
)
from pellucid.controller.rewards import Rewards
from pellucid.data import PromptLoader, build_prompts
from pellucid.metrics.console import StepDisplay
from pellucid.metrics.trackers import Trackers
from pellucid.profiler.spans import SpanRecorder
from pellucid.reward import Scorer, make_scorer
from pellucid.roles.actor import Actor
from pellucid.roles.critic import Critic
from pellucid.roles.reference import Reference
from pellucid.rollout.native import MismatchedEngine, MismatchSettings, NativeRolloutEngine
from pellucid.rundir import RunDir
from pellucid.training.common.models import (
    eos_token_ids,
    load_tokenizer,
    model_folder,
    token_pieces,
)
from pellucid.training.protocol import TrainingEngine
from pellucid.types import Prompt


@dataclass
class Run:
    """Everything a run consists of; the loop and the step functions read it."""

    config: RunConfig
    run_dir: RunDir
    store: CheckpointStore
    device: torch.device
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    loader: PromptLoader
    val_prompts: list[Prompt]
    actor: Actor
    reference: Reference | None
    critic: Critic | None
    rollout_engine: NativeRolloutEngine | MismatchedEngine
    """Samples what is trained on; under `rollout.simulate_mismatch` not quite from the trained policy."""
    validation_engine: NativeRolloutEngine
    """Samples from the trained policy itself."""
    rewards: Rewards
    estimator: Estimator
    correction: CorrectionSettings | None
    kl_control: KLController
    engines: list[TrainingEngine]
    """Every training engine of the run, whose arithmetic counts into its utilisation."""
    spans: SpanRecorder
    display: StepDisplay
    trackers: Trackers
    total_steps: int
    first_step: int = 1
    """The next step to run; later than 1 after a resume."""
    warned: set[str] = field(default_factory=set)
    """Metrics of which it was said that they left their healthy range."""

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether a pass before the update must supply `old_logp`: the update's own forward does when it is the only one."""
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= self.config.data.train_batch_size
        return not one_update or algorithm.use_kl_in_reward or self.corrects

    @property
    def corrects(self) -> bool:
        """Whether weights or a smaller mask are worked out before the update; in bypass mode the update does it itself."""
        algorithm = self.config.algorithm
        return not algorithm.bypass_mode and (algorithm.rollout_is or bool(algorithm.rollout_rs))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand a finished step's metrics to the trackers and the console."""
        self.trackers.log(step, metrics)
        self.display.finish_step(step, metrics)

    def token_pieces(self, ids: list[int]) -> list[str]:
        """Return what each token id looks like, for the rollout dump."""
        return token_pieces(self.tokenizer, ids)

    def close(self) -> None:
        """Close the timeline; scorer and trackers belong to who opened them."""
        self.spans.close()


@dataclass
class Inputs:
    """What a run reads, checked before any model is touched."""

    tokenizer: PreTrainedTokenizerBase
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]
    scorer: Scorer
    estimator: Estimator
    policy_loss: PolicyLoss


def load_inputs(config: RunConfig) -> Inputs:
    """Load tokenizer, prompts, reward function and plug-ins, and say what was read.

    Raises:
        UserError: a file, column, model folder or function is missing or wrong.
    """
    tokenizer = run_tokenizer(config)
    check_roles(config, tokenizer)
    scorer, estimator, policy_loss = run_scorer(config), choose_estimator(config), choose_policy_loss(config)
    train = build_prompts(config.data, tokenizer, "train")
    console.print(f"train data: {train.describe()}", markup=False)
    val_prompts: list[Prompt] = []
    if config.data.val_files:
        val = build_prompts(config.data, tokenizer, "val")
        console.print(f"validation data: {val.describe()}", markup=False)
        val_prompts = val.prompts
    return Inputs(tokenizer, train.prompts, val_prompts, scorer, estimator, policy_loss)


def run_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the config's model section."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(model.tokenizer_path or model_folder(model.path), trust_remote_code=model.trust_remote_code)


def run_scorer(config: RunConfig) -> Scorer:
    """Return the scorer of the config's reward section."""
    reward = config.reward_model
    return make_scorer(
        reward.custom_reward_function.path,
        reward.custom_reward_function.name,
        reward.reward_num_workers,
        reward.reward_timeout_s,
    )


def print_plan(config: RunConfig, num_train_prompts: int) -> None:
    """Print what the run will do, with the arithmetic spelled out.

    Raises:
        UserError: the batch sizes do not fit together.
    """
    plan = build_plan(config, num_train_prompts, read_model_facts(model_folder(config.actor_rollout_ref.model.path)))
    table = Table(
        show_header=False, box=None, padding=(0, 2, 0, 0), title="plan", title_justify="left", title_style="bold"
    )
    for name, value in plan.rows():
        table.add_row(name, value)
    console.print(table)


def build_run(
    config: RunConfig, run_dir: RunDir, inputs: Inputs, trackers: Trackers, first_step: int
) -> Run:
    """Load the model and assemble the run; its state is that of a fresh start until `restore` is called."""
    devices.keep_freed_memory()
    device = devices.choose_device(config.trainer.device)
    dtype = torch_dtype(config.actor_rollout_ref.model.dtype)
    rollout_config = config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.actor.use_torch_compile:
        notice(
            "use_torch_compile: left off; packed batches change shape every step, so compiling does not pay here.",
            style="dim",
        )
    seed = config.trainer.seed
    loader = PromptLoader(
        inputs.train_prompts,
        config.data.train_batch_size,
        config.data.shuffle,
        seed if config.data.seed is None else config.data.seed,
    )
    total_steps = num_steps(config, loader.steps_per_epoch)
    model = load_policy(config, device)
    engine = make_actor_engine(config, model, device, dtype, total_steps)
    # Validation alone needs the policy and what scores it.
    trains = not config.trainer.val_only
    reference = make_reference(config, engine) if trains else None
    critic = None
    if trains and config.has_critic:
        critic = make_critic(config, device, dtype, total_steps)
    reward_model = None
    if config.reward_model.enable and (trains or not config.reward_model.rule_weight):
        reward_model = make_reward_model(config, inputs.tokenizer, device, dtype)
    spans = SpanRecorder(run_dir.timeline / "controller.json")
    native = NativeRolloutEngine(
        engine,
        inputs.tokenizer,
        eos_token_ids(model, inputs.tokenizer),
        seed=rollout_config.seed,
        max_num_seqs=rollout_config.max_num_seqs,
        max_num_batched_tokens=rollout_config.max_num_batched_tokens,
    )
    holders = (reference, critic and critic.engine, reward_model and reward_model.engine)
    control = config.algorithm.kl_ctrl
    return Run(
        config=config,
        run_dir=run_dir,
        store=CheckpointStore(run_dir.checkpoints, config.trainer.max_actor_ckpt_to_keep),
        device=device,
        dtype=dtype,
        tokenizer=inputs.tokenizer,
        model=model,
        loader=loader,
        val_prompts=inputs.val_prompts,
        actor=make_actor(config, engine, inputs.policy_loss, reference),
        reference=None if reference is None else Reference(reference, temperature=rollout_config.temperature),
        critic=critic,
        rollout_engine=_with_mismatch(config, native),
        validation_engine=native,
        rewards=Rewards(config.reward_model, inputs.scorer, reward_model, rollout_config.response_length, spans),
        estimator=inputs.estimator,
        correction=correction_settings(config.algorithm),
        kl_control=make_kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon),
        engines=[engine, *(holder for holder in holders if holder is not None)],
        spans=spans,
        display=StepDisplay(total_steps, first_step - 1),
        trackers=trackers,
        total_steps=total_steps,
        first_step=first_step,
    )


def _with_mismatch(config: RunConfig, native: NativeRolloutEngine) -> NativeRolloutEngine | MismatchedEngine:
    """Return the engine that training samples come from: the native one, unless the laboratory is on."""
    simulate, seed = config.actor_rollout_ref.rollout.simulate_mismatch, config.actor_rollout_ref.rollout.seed
    settings = MismatchSettings(simulate.dtype, simulate.stale_steps, simulate.noise)
    return MismatchedEngine(native, settings, seed) if settings.changes_weights else native


def num_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the run's length in steps: `total_training_steps`, else `total_epochs` over the data."""
    return config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of the config's `float32` or `bfloat16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
