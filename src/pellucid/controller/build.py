"""From a validated config to a `Run`: the parts that the loop drives, made in the order in which mistakes are cheapest.

Data and reward are checked before the plan is printed, the plan before the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid import devices
from pellucid.checkpoint_store import CheckpointStore
from pellucid.config import RunConfig
from pellucid.config.plan import build_plan, read_model_facts
from pellucid.config.schema.actor import OptimConfig
from pellucid.console import console, notice
from pellucid.data import PromptLoader, build_prompts
from pellucid.metrics.console import StepDisplay
from pellucid.metrics.trackers import Trackers
from pellucid.profiler.spans import SpanRecorder
from pellucid.reward import Scorer, make_scorer
from pellucid.roles.actor import Actor
from pellucid.roles.reference import Reference
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.protocol import RolloutEngine
from pellucid.rundir import RunDir
from pellucid.training.common.models import (
    eos_token_ids,
    load_model,
    load_tokenizer,
    model_folder,
    num_parameters,
    token_pieces,
)
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.fsdp import Fsdp2Engine, MicroBatching
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
    rollout_engine: RolloutEngine
    scorer: Scorer
    spans: SpanRecorder
    display: StepDisplay
    trackers: Trackers
    num_parameters: int
    total_steps: int
    first_step: int = 1
    """The next step to run; later than 1 after a resume."""

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether a pass before the update must supply `old_logp`: the update's own forward does when it is the only one."""
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= self.config.data.train_batch_size
        return not one_update or algorithm.use_kl_in_reward

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


def load_inputs(config: RunConfig) -> Inputs:
    """Load tokenizer, prompts and reward function, and say what was read.

    Raises:
        UserError: a file, column, model folder or function is missing or wrong.
    """
    tokenizer = run_tokenizer(config)
    scorer = run_scorer(config)
    train = build_prompts(config.data, tokenizer, "train")
    console.print(f"train data: {train.describe()}", markup=False)
    val_prompts: list[Prompt] = []
    if config.data.val_files:
        val = build_prompts(config.data, tokenizer, "val")
        console.print(f"validation data: {val.describe()}", markup=False)
        val_prompts = val.prompts
    return Inputs(tokenizer, train.prompts, val_prompts, scorer)


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
    actor_config, rollout_config = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor_config.use_torch_compile:
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
    model = config_model(config, device)
    updates = (
        total_steps * actor_config.ppo_epochs * -(-config.data.train_batch_size // actor_config.ppo_mini_batch_size)
    )
    optimizer = make_optimizer(model, actor_config.optim, actor_config.grad_clip, updates)
    engine = Fsdp2Engine(model, optimizer, _micro_batching(config), device=device, dtype=dtype)
    actor = Actor(
        engine,
        actor_config,
        temperature=rollout_config.temperature,
        max_response_length=rollout_config.response_length,
        seed=seed,
    )
    rollout_engine = NativeRolloutEngine(
        engine,
        inputs.tokenizer,
        eos_token_ids(model, inputs.tokenizer),
        seed=rollout_config.seed,
        max_num_seqs=rollout_config.max_num_seqs,
        max_num_batched_tokens=rollout_config.max_num_batched_tokens,
    )
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
        actor=actor,
        reference=_reference(config, device, dtype),
        rollout_engine=rollout_engine,
        scorer=inputs.scorer,
        spans=SpanRecorder(run_dir.timeline / "controller.json"),
        display=StepDisplay(total_steps, first_step - 1),
        trackers=trackers,
        num_parameters=num_parameters(model),
        total_steps=total_steps,
        first_step=first_step,
    )


def num_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the run's length in steps: `total_training_steps`, else `total_epochs` over the data."""
    return config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of the config's `float32` or `bfloat16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def config_model(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """Load the model of the config's model section, frozen or not as the caller decides."""
    model = config.actor_rollout_ref.model
    return load_model(
        model.path,
        device=device,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )


def make_optimizer(model: PreTrainedModel, optim: OptimConfig, grad_clip: float, num_updates: int) -> ScheduledAdamW:
    """Return AdamW over the model's parameters with the schedule laid out over `num_updates` optimizer steps."""
    total = optim.total_training_steps if optim.total_training_steps > 0 else num_updates
    warmup = (
        optim.lr_warmup_steps
        if optim.lr_warmup_steps and optim.lr_warmup_steps > 0
        else int(optim.lr_warmup_steps_ratio * total)
    )
    schedule = Schedule(optim.lr, warmup, total, optim.lr_scheduler_type, optim.min_lr_ratio)
    return ScheduledAdamW(
        dict(model.named_parameters()), schedule, optim.weight_decay, (optim.betas[0], optim.betas[1]), grad_clip
    )


def _micro_batching(config: RunConfig) -> MicroBatching:
    actor = config.actor_rollout_ref.actor
    return MicroBatching(
        actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        packed=config.actor_rollout_ref.model.use_remove_padding,
    )


def _reference(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Reference | None:
    """Load the frozen reference, only where a KL term needs it."""
    if not (config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        return None
    ref = config.actor_rollout_ref.ref
    cut = MicroBatching(
        ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
        None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu,
        packed=config.actor_rollout_ref.model.use_remove_padding,
    )
    model = config_model(config, device).requires_grad_(False)
    return Reference(
        Fsdp2Engine(model, None, cut, device=device, dtype=dtype),
        temperature=config.actor_rollout_ref.rollout.temperature,
    )
