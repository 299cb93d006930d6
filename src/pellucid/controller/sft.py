"""Supervised fine-tuning: next-token cross-entropy on the answers, one optimizer step a batch.

Rows come from the same sources as prompts; the engine, optimizer, loader and checkpoint store are those of RL training.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid import devices
from pellucid.algo.aggregation import aggregation_weights
from pellucid.checkpoint_store import CheckpointStore
from pellucid.config import SftConfig
from pellucid.console import console
from pellucid.controller.checkpointing import STATE_FILE, checkpoint_step, is_due
from pellucid.controller.interrupt import StopRequested, stop_on_signals
from pellucid.controller.make_roles import make_optimizer, torch_dtype
from pellucid.data import PromptLoader
from pellucid.data.prompts import encode_text, render, uses_template
from pellucid.data.sources import load_rows
from pellucid.errors import UserError, did_you_mean
from pellucid.metrics.console import StepDisplay
from pellucid.metrics.trackers import Trackers
from pellucid.rundir import RunDir
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import init_model, load_model, load_tokenizer, save_hf_model
from pellucid.training.common.packing import TokenSequence
from pellucid.training.fsdp import FsdpEngine, MicroBatching
from pellucid.training.protocol import NonFiniteError, TokenScores
from pellucid.types import Prompt

_CONTENTS = ["model", "optimizer"]
_HEAD = LogProbHead(temperature=1.0)


@dataclass
class SftRun:
    """The parts of a fine-tuning run."""

    config: SftConfig
    run_dir: RunDir
    store: CheckpointStore
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    engine: FsdpEngine
    loader: PromptLoader
    val_examples: list[TokenSequence]
    total_steps: int
    first_step: int = 1


def build_sft(config: SftConfig, run_dir: RunDir) -> SftRun:
    """Load data and model, and restore the last checkpoint if there is one.

    Raises:
        UserError: see `load_examples`, `load_model` and `CheckpointStore.verify`.
    """
    devices.keep_freed_memory()
    device = devices.choose_device(config.trainer.device)
    model_config, trainer = config.model, config.trainer
    tokenizer_path = model_config.tokenizer_path or model_config.path
    assert tokenizer_path is not None
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=model_config.trust_remote_code)
    train = load_examples(config, tokenizer, "train")
    val = _sequences(load_examples(config, tokenizer, "val")) if config.data.val_files else []
    loader = PromptLoader(train, config.data.train_batch_size, config.data.shuffle, config.data.seed)
    total_steps = trainer.total_training_steps or trainer.total_epochs * loader.steps_per_epoch
    if model_config.path is None:
        assert model_config.init_config is not None
        model = init_model(model_config.init_config, seed=trainer.seed, device=device)
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
    else:
        model = load_model(
            model_config.path,
            device=device,
            override_config=model_config.override_config,
            trust_remote_code=model_config.trust_remote_code,
            gradient_checkpointing=model_config.enable_gradient_checkpointing,
        )
    engine = FsdpEngine(
        model,
        make_optimizer(model, config.optim, config.engine.grad_clip, total_steps),
        MicroBatching(config.engine.max_token_len_per_gpu, None, packed=model_config.use_remove_padding),
        device=device,
        dtype=torch_dtype(model_config.dtype),
    )
    run = SftRun(
        config,
        run_dir,
        CheckpointStore(run_dir.checkpoints, trainer.max_ckpt_to_keep),
        tokenizer,
        model,
        engine,
        loader,
        val,
        total_steps,
    )
    if trainer.resume_mode == "auto":
        run.store.recover()
        if (latest := run.store.latest()) is not None:
            _restore(run, run.store.verify(latest))
    return run


def load_examples(config: SftConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> list[Prompt]:
    """Read the rows of a split; `extra["response_ids"]` of each holds the answer's tokens, end-of-text included.

    Raises:
        UserError: a column is missing, the answer is no text, or nothing is left after dropping overlong rows.
    """
    data = config.data
    field, files, limit = (
        ("data.train_files", data.train_files, data.train_max_samples)
        if split == "train"
        else ("data.val_files", data.val_files, data.val_max_samples)
    )
    assert files is not None
    rows = load_rows(files, field, split)[:limit]
    for key, option in ((data.prompt_key, "data.prompt_key"), (data.answer_key, "data.answer_key")):
        if key not in rows[0]:
            raise UserError(option, f"the rows have no column '{key}'.", did_you_mean(key, rows[0]))
    templated = uses_template(tokenizer, data.chat_template)
    texts = [render(row[data.prompt_key], tokenizer, templated, data.system_prompt)[0] for row in rows]
    prompt_ids = encode_text(texts, tokenizer, templated)
    answer_ids: list[list[int]] = tokenizer(
        [str(row[data.answer_key]) for row in rows], add_special_tokens=False
    ).input_ids  # pyright: ignore[reportAssignmentType]
    examples = [
        Prompt(
            uid=f"{split}:{index}",
            token_ids=ids,
            text=text,
            task="sft",
            extra={"response_ids": [*answer, tokenizer.eos_token_id]},
        )
        for index, (ids, text, answer) in enumerate(zip(prompt_ids, texts, answer_ids))
        if len(ids) + len(answer) < data.max_length
    ]
    console.print(
        f"{split} data: {len(rows)} rows, {len(rows) - len(examples)} dropped: longer than {data.max_length} tokens",
        markup=False,
    )
    if not examples:
        raise UserError(
            field,
            f"no row is left: all {len(rows)} are longer than {data.max_length} tokens.",
            "Raise data.max_length.",
        )
    return examples


def train_sft(run: SftRun, trackers: Trackers) -> Path:
    """Train from `first_step` to `total_steps` and return the folder of the finished model.

    Raises:
        StopRequested: Ctrl-C or SIGTERM; the checkpoint of the finished step was written first.
        NonFiniteError: NaN or Inf in an update.
    """
    trainer = run.config.trainer
    display = StepDisplay(run.total_steps, run.first_step - 1)
    with stop_on_signals() as stop, display:
        for step in range(run.first_step, run.total_steps + 1):
            epoch = run.loader.epoch
            metrics = _update(run) | {"training/global_step": step, "training/epoch": epoch}
            if run.val_examples and (step == run.total_steps or is_due(step, trainer.test_freq)):
                metrics |= {"val/loss": held_out_loss(run)}
            trackers.log(step, metrics)
            display.finish_step(step, metrics)
            stopping = stop.requested
            if step == run.total_steps or stopping or is_due(step, trainer.save_freq):
                run.store.save(step, lambda folder, step=step: _write(run, folder, step))
            if stopping and step < run.total_steps:
                raise StopRequested(stop.signal_number)
    folder = run.run_dir.path / "model"
    save_hf_model(run.model, run.tokenizer, folder)
    return folder


def _update(run: SftRun) -> dict[str, float]:
    sequences = _sequences(run.loader.next_batch())
    weights = aggregation_weights(_mask(sequences), "token-mean")

    def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
        assert scores.logp is not None
        return -(scores.logp * weights[rows].to(scores.logp.device)).sum()

    try:
        result = run.engine.train_mini_batch(sequences, _HEAD, loss)
    except NonFiniteError as error:
        raise NonFiniteError(f"train/{error.quantity}", error.value, error.rows) from error
    return {"train/loss": result.loss, "train/grad_norm": result.grad_norm, "train/lr": result.lr}


def held_out_loss(run: SftRun) -> float:
    """Return the mean negative log-likelihood of the validation answers, in nats a token."""
    scores, mask = run.engine.forward(run.val_examples, _HEAD), _mask(run.val_examples)
    assert scores.logp is not None
    return float(-scores.logp.cpu().sum() / mask.sum())


def _sequences(examples: list[Prompt]) -> list[TokenSequence]:
    """Return the examples as the engine takes them; each is a group of its own, nothing is shared."""
    return [TokenSequence(e.token_ids, e.extra["response_ids"], group) for group, e in enumerate(examples)]


def _mask(sequences: list[TokenSequence]) -> torch.Tensor:
    lengths = torch.tensor([len(s.response_ids) for s in sequences])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _write(run: SftRun, folder: Path, step: int) -> None:
    run.engine.save(folder, _CONTENTS)
    (folder / STATE_FILE).write_text(json.dumps({"step": step, "loader": run.loader.state_dict()}))


def _restore(run: SftRun, checkpoint: Path) -> None:
    run.engine.load(checkpoint, _CONTENTS)
    state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text())
    run.loader.load_state_dict(state["loader"])
    run.first_step = checkpoint_step(checkpoint) + 1
