"""Supervised fine-tuning as a job of the training loop: the data's answers are what the policy "sampled", all good.

Rows come from the sources of prompts. The loss, −A · log π with A = 1, is next-token cross-entropy.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from pellucid.agents.llm import AgentLoop
from pellucid.config import RunConfig, SftConfig
from pellucid.config.schema.actor import ActorConfig, CheckpointConfig, PolicyLossConfig
from pellucid.config.schema.data import DataConfig, SourceConfig
from pellucid.config.schema.model import BaseModelConfig, ModelConfig
from pellucid.config.schema.root import ActorRolloutRefConfig
from pellucid.config.schema.trainer import BaseTrainerConfig, TrainerConfig
from pellucid.console import console
from pellucid.data import build_prompts
from pellucid.errors import UserError, did_you_mean
from pellucid.files.rundir import RunDir
from pellucid.produce import num_tokens
from pellucid.run import Inputs, Run, load_inputs
from pellucid.schedules import Job
from pellucid.stages import Stage
from pellucid.training.common.models import init_model, save_hf_model
from pellucid.types import Prompt, Rollout, Samples, Score, TrainBatch


def run_config(config: SftConfig, run_dir: RunDir) -> RunConfig:
    """Return the run that a fine-tuning config stands for.

    A randomly initialised model is written into the run's folder first, and is the model that the run starts from.
    """
    model, trainer = config.model, config.trainer
    path = str(run_dir.path / "initial_model") if model.path is None else model.path
    actor = ActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=config.data.train_batch_size,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=config.engine.max_token_len_per_gpu,
        grad_clip=config.engine.grad_clip,
        optim=config.optim,
        policy_loss=PolicyLossConfig(loss_mode="gpg"),
        loss_agg_mode="token-mean",
        checkpoint=CheckpointConfig(),
    )
    policy = ModelConfig(path=path, **_shared(BaseModelConfig, model))
    return RunConfig(
        data=DataConfig(**_shared(SourceConfig, config.data), max_prompt_length=config.data.max_length),
        actor_rollout_ref=ActorRolloutRefConfig(model=policy, actor=actor),
        trainer=TrainerConfig(
            **_shared(BaseTrainerConfig, trainer),
            resume_mode=trainer.resume_mode,
            max_actor_ckpt_to_keep=trainer.max_ckpt_to_keep,
            val_before_train=False,
        ),
    )


def _shared(base: Any, section: object) -> dict[str, Any]:
    """Return the fields of `section` that it has from `base`."""
    return {spec.name: vars(section)[spec.name] for spec in dataclasses.fields(base)}


def load_sft_inputs(config: SftConfig, run: RunConfig) -> Inputs:
    """Load tokenizer and examples, and make the initial model where the config asks for a fresh one.

    Raises:
        UserError: a file, column or model folder is missing or wrong.
    """
    inputs, model = load_inputs(run, load_examples), config.model
    if model.path is None and model.init_config is not None:  # made anew at each start: the config may be another
        tokenizer, seed = inputs.tokenizer, config.trainer.seed
        fresh = init_model(model.init_config, seed=seed, device=torch.device("cpu"))
        fresh.generation_config.eos_token_id = tokenizer.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
        save_hf_model(fresh, tokenizer, Path(run.actor_rollout_ref.model.path))
    return inputs


def load_examples(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["train", "val"], _: AgentLoop
) -> list[Prompt]:
    """Read the rows of a split; `extra["response_ids"]` of each holds the answer's tokens, end-of-text included.

    Raises:
        UserError: a column is missing, or nothing is left after dropping overlong rows.
    """
    limit, read = run.data.max_prompt_length, build_prompts(run.data, tokenizer, split, limit_key="data.max_length")
    if any(prompt.answer is None for prompt in read.prompts):
        reason = f"the rows have no column '{run.data.answer_key}'."
        raise UserError("data.answer_key", reason, did_you_mean(run.data.answer_key, read.prompts[0].extra))
    answers = tokenizer([str(prompt.answer) for prompt in read.prompts], add_special_tokens=False)
    examples: list[Prompt] = []
    for prompt, answer in zip(read.prompts, answers["input_ids"]):  # pyright: ignore[reportArgumentType]
        prompt.extra["response_ids"] = [*answer, tokenizer.eos_token_id]
        if len(prompt.token_ids) + len(answer) < limit:
            examples.append(prompt)
    dropped = read.num_rows - len(examples)
    console.print(f"{split} data: {read.num_rows} rows, {dropped} dropped: longer than {limit} tokens", markup=False)
    if not examples:
        reason = f"no row is left: all {read.num_rows} are longer than {limit} tokens."
        raise UserError(f"data.{split}_files", reason, "Raise data.max_length.")
    return examples


def demonstrations(examples: list[Prompt]) -> Samples:
    """Return the examples with their answers in place of samples."""
    rollouts = []
    for example in examples:
        ids = example.extra["response_ids"]
        rollouts.append(Rollout.single_turn(example, 0, ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    return Samples.pad(rollouts, [Score(1.0)] * len(rollouts))


def next_examples(run: Run, step: int) -> tuple[Samples, dict[str, float]]:
    """Return the examples that a step learns from."""
    samples = demonstrations(run.loader.next_batch())
    return samples, {"perf/total_num_tokens": num_tokens(samples.rollouts)}


def fit(run: Run, samples: Samples, step: int) -> dict[str, float]:
    """Take one optimizer step on the examples' mean cross-entropy a token, and return its metrics.

    Raises:
        NonFiniteError: NaN or Inf; the batch was saved.
    """
    ones = samples.mask.float()
    batch = TrainBatch(**vars(samples), advantages=ones, returns=ones, loss_mask=samples.mask)
    with run.stage(Stage.ACTOR_UPDATE, step, len(batch), batch) as advance:
        metrics = run.actor.update(batch, step=step, on_done=advance).metrics
    names = {"train/loss": "actor/pg_loss", "train/grad_norm": "actor/grad_norm", "train/lr": "actor/lr"}
    return {name: metrics[own] for name, own in names.items()}


def held_out_loss(run: Run, step: int) -> dict[str, float]:
    """Return the mean negative log-likelihood of the validation answers, in nats a token."""
    samples = demonstrations(run.val_prompts)
    with run.stage(Stage.VALIDATE, step, len(samples)) as advance:
        logp = run.actor.compute_log_probs(samples, on_done=advance).logp
    return {"val/loss": float(-logp.sum() / samples.mask.sum())}


def save_model(run: Run) -> None:
    """Write the finished model into the run's folder, as transformers loads it."""
    run.actor.engine.save_hf(run.tokenizer, run.run_dir.path / "model")


SUPERVISED = Job(next_examples, fit, held_out_loss, publish=lambda run, step, running: {})
