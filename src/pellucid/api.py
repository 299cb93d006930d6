"""What scripts and notebooks call: `pellucid.load_config`, `train`, `evaluate`, `generate`, `prepare`, `open_run`.

The commands of the same names do the same through the same functions. `pellucid/__init__.py` gives these names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid import config as configs
from pellucid.agents.llm import sample_rollouts
from pellucid.config import RunConfig
from pellucid.config.schema.reward_model import RewardConfig
from pellucid.console import notice, progress
from pellucid.data import build_prompts
from pellucid.data.prompts import encode_rows
from pellucid.errors import UserError
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rollout_dump import read_rollouts, write_rollouts
from pellucid.files.rundir import RunDir
from pellucid.loading import run_loop
from pellucid.metrics.trackers import read_metrics
from pellucid.reward import make_scorer
from pellucid.reward.scorer import require_scores
from pellucid.rollout.requests import SamplingParams
from pellucid.run import VERIFIED_AGENTS, Callback, Run
from pellucid.session import prepared_run, train_run
from pellucid.trained import Asked, load_asked, load_trained
from pellucid.training.common.models import TokenPieces
from pellucid.types import Rollout, Score
from pellucid.validation import answer, validation_metrics

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Callback",
    "Run",
    "RunConfig",
    "RunRecord",
    "evaluate",
    "generate",
    "load_config",
    "open_run",
    "prepare",
    "train",
]

Recipe = str | Path | Mapping[str, Any]


def load_config(source: Recipe | None = None, *overrides: str, **sections: Mapping[str, Any]) -> RunConfig:
    """Return a checked configuration.

    Args:
        source: a recipe's path, or its keys as a dictionary; None starts from the defaults.
        overrides: as on the command line, e.g. `"trainer.total_training_steps=20"`.
        sections: keys of top-level sections, e.g. `trainer={"total_training_steps": 20}`; they win over `source`.

    Raises:
        UserError: a key does not exist, a value cannot work, or a file is missing.
    """
    loaded = configs.load_config(source, list(overrides), sections=sections)
    for line in loaded.notices:
        notice(line)
    return loaded.config


def train(config: RunConfig | Recipe, callbacks: Sequence[Callback] = ()) -> RunRecord:
    """Train as the config says, as `pellucid train` does: a run that was stopped goes on from its last checkpoint.

    Args:
        config: what `load_config` returned or takes.
        callbacks: each is called with the `Run`, the step and its metrics after every step, and may return "checkpoint"
            to have one written, or "end" to end the run after that step, with a checkpoint.

    Raises:
        UserError: anything wrong with the config, the data, a function or a checkpoint.
        NonFiniteError, RunFailedError: the run failed; its checkpoints are whole.
    """
    config = config if isinstance(config, RunConfig) else load_config(config)
    if config.trainer.val_only:
        reason = "is for `pellucid train` alone, and this function trains."
        raise UserError("trainer.val_only", reason, "Call pellucid.evaluate, or remove the key.")
    train_run(config, callbacks)
    return open_run(config.trainer.default_local_dir)


def prepare(config: RunConfig | Recipe) -> AbstractContextManager[Run]:
    """Make a run's parts ready for a loop of one's own: a context manager that gives the `Run`.

    `pellucid.produce.produce(run, step)` samples and scores, `pellucid.learn.learn(run, samples, step)` updates, and
    `pellucid.learn.publish(run, step)` hands the new weights to the rollout engine.
    """
    return prepared_run(config if isinstance(config, RunConfig) else load_config(config))


def open_run(path: str | Path) -> RunRecord:
    """Return what a run wrote, finished or not.

    Raises:
        UserError: there is no run in that folder.
    """
    return RunRecord(RunDir.open(path))


@dataclass(frozen=True)
class RunRecord:
    """A run as it lies on disk; each attribute but `config` is read anew when it is asked for."""

    run_dir: RunDir

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.run_dir.path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as resolved, in plain containers."""
        import yaml

        return yaml.safe_load(self.run_dir.config_yaml.read_text())

    @property
    def starts(self) -> list[dict[str, Any]]:
        """What `run.json` says of each start: versions, times, device, alerts, and why it ended (None: it has not)."""
        return self.run_dir.read_record()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each step, as dictionaries with `step`; empty before the first."""
        return read_metrics(self.run_dir.metrics) if self.run_dir.metrics.exists() else []

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics, a row a step and a column a metric; NaN where a step has no value."""
        import pandas as pd

        rows = self.rows
        return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()

    @property
    def rollout_steps(self) -> list[int]:
        """Steps whose rollouts were kept."""
        return self.run_dir.rollout_steps()

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return a step's samples: prompt, response, tokens, log-probs of both policies, reward, failure, turns.

        Raises:
            UserError: there are none, or the file was altered.
        """
        return read_rollouts(self.run_dir.rollouts(step))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step → folder of each checkpoint, in the order in which they were saved."""
        store = CheckpointStore(self.run_dir.checkpoints)
        return {step: store.path(step) for step in store.steps()}

    def load_model(
        self, step: int | None = None, device: str = "cpu"
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the policy of a checkpoint (None: the last one) and its tokenizer, as transformers has them.

        Raises:
            UserError: there is no such checkpoint.
        """
        model, tokenizer, _ = load_trained(str(self.path), torch.device(device), step=step)
        return model, tokenizer


def generate(
    model: str | Path,
    prompts: Sequence[str | list[dict[str, Any]]],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 256,
    recipe: Path | None = None,
    device: str = "auto",
) -> list[list[Rollout]]:
    """Answer prompts with a model or a run's last checkpoint, with the agent and tools that it was trained with.

    Args:
        model: a run, a checkpoint, a model folder, a hub id or `builtin`.
        prompts: texts, or chats (`[{"role": "user", "content": "..."}]`); the chat template is applied to both.
        samples: answers to each prompt.
        temperature: 0 takes the most likely token each time.
        max_tokens: longest answer.
        recipe: whose prompts' form, agent and tools to take in place of the run's.
        device: auto, cpu, cuda or npu.

    Returns:
        For each prompt its rollouts: `text`, `token_ids`, `logprobs`, `finish_reason`, `turns`.

    Raises:
        UserError: there is no such model, or a prompt is neither text nor a chat.
    """
    asked = load_asked(str(model), recipe, device)
    names = {"prompt_key": "prompt", "reward_fn_key": "data_source", "answer_key": "answer"}
    rows = [{"prompt": prompt, "data_source": "prompt"} for prompt in prompts]
    with closing(run_loop(asked.config, asked.tokenizer)) as loop:
        encoded = encode_rows(rows, 0, replace(asked.config.data, **names), asked.tokenizer, "val", loop.schemas)
        params = _params(asked, samples, temperature, max_tokens)
        rollouts = sample_rollouts(asked.engine, encoded, params, stream=("generate",), loop=loop)
    return [rollouts[start : start + samples] for start in range(0, len(rollouts), samples)]


def evaluate(
    model: str | Path,
    files: str | Sequence[str] | None = None,
    *,
    recipe: Path | None = None,
    num: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    reward: str | None = None,
    out: Path | None = None,
    device: str = "auto",
) -> dict[str, float]:
    """Answer held-out problems with a model or a run's last checkpoint, and score the answers.

    Args:
        model: a run, a checkpoint, a model folder, a hub id or `builtin`.
        files: the problems, or several benchmarks of them: `task:NAME?args`, a jsonl or parquet file, or a hub data
            set; None: the run's or recipe's `data.val_files`.
        recipe: whose prompts' form, agent and tools to take in place of the run's.
        num: at most this many problems of each benchmark.
        samples: answers to each problem; with several, pass@k is among the metrics.
        temperature: None is 0, greedy, of one sample, else 1.
        max_tokens: longest answer; None: the run's or recipe's, or 256.
        reward: own reward function, `file.py:name`.
        out: file for the scored answers, as `pellucid rollouts` reads it.
        device: auto, cpu, cuda or npu.

    Returns:
        `val/<task>/{accuracy,reward,num}`, and `val/<task>/pass@<samples>` of several; of a task that is there twice,
        `val/<file>/…`, and `val/<file> <task>/…` of a file with several.

    Raises:
        UserError: there is no such model, problem or function, or nothing could be scored.
    """
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if samples > 1 and temperature == 0:
        reason = f"0 would draw the same response {samples} times."
        raise UserError("--temperature", reason, "Leave it out, or set --samples 1.")
    if reward is not None and ":" not in reward:
        raise UserError("--reward", f"'{reward}' names no function.", f"Write it as {reward}:compute_score.")
    if out is not None:
        try:  # before anything is asked
            out.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out.parent).close()
        except OSError as error:
            raise UserError("--out", f"'{out}' cannot be written: {error.strerror}.") from error
    asked = load_asked(str(model), recipe, device)
    data = asked.config.data
    if not files and data.val_files is None:
        raise UserError("--files", "is not given, and nothing else names problems.", "Give it, e.g. 'task:arithmetic'.")
    named = [files] if isinstance(files, str) else files or [data.val_files]
    source = replace(data, val_max_samples=num, max_prompt_length=1 << 20)
    scoring = asked.config.reward_model if reward is None else RewardConfig(functions={reward: 1.0})
    longest = max_tokens or (asked.config.actor_rollout_ref.rollout.response_length if asked.knows_more else 256)
    with (
        closing(run_loop(asked.config, asked.tokenizer)) as loop,
        make_scorer(scoring) as scorer,
        progress(transient=True) as bar,
    ):
        sources = [replace(source, val_files=each) for each in named]
        keep = {"tools": loop.schemas, "keep_messages": loop.has_turns}
        benchmarks = [build_prompts(each, asked.tokenizer, "val", **keep).prompts for each in sources]
        if asked.config.actor_rollout_ref.rollout.agent.name in VERIFIED_AGENTS:
            scorer.require_verifiers(prompt.task for prompts in benchmarks for prompt in prompts)
        task = bar.add_task("answering", total=sum(map(len, benchmarks)) * samples)
        rollouts, scores, metrics = list[Rollout](), list[Score](), dict[str, float]()
        for name, prompts in zip(named, benchmarks):
            answers, given = answer(
                asked.engine,
                lambda rollouts: require_scores(scorer.score(rollouts)[0]),
                prompts,
                _params(asked, samples, temperature, longest),
                batch_size=None,
                on_done=lambda count: bar.advance(task, count),
                loop=loop,
            )
            measured = validation_metrics(answers, given)
            if measured.keys() & metrics.keys():  # the same task with other arguments
                several = len({prompt.task for prompt in prompts}) > 1
                begins = f"val/{name} " if several else f"val/{name}/"
                named_so = {key: key.removeprefix("val/") if several else key.rpartition("/")[2] for key in measured}
                measured = {begins + named_so[key]: value for key, value in measured.items()}
            metrics |= measured
            rollouts, scores = rollouts + answers, scores + given
    if out is not None:
        write_rollouts(out, rollouts, scores, step=0, pieces=TokenPieces(asked.tokenizer))
    return metrics


def _params(asked: Asked, samples: int, temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=samples,
        max_tokens=max_tokens,
        temperature=temperature or 1.0,
        do_sample=temperature > 0,
        stop=asked.config.actor_rollout_ref.rollout.stop,
    )
