"""`pellucid eval`: answers problems with a model or a run's last checkpoint, scores them and prints the accuracy.

`load_asked`, also for `pellucid chat`, makes a model ready to be asked, with the agent and tools that it was trained
with.
"""

import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pellucid.console import console, progress
from pellucid.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pellucid.config import RunConfig
    from pellucid.rollout.native import NativeRolloutEngine

Model = Annotated[str, typer.Argument(help="A run, a model folder, a hub id, or 'builtin'.")]
LikeRecipe = Annotated[
    Path | None, typer.Option(help="Recipe whose prompts, agent and tools to take; by default those of a run.")
]
NO_LIMIT = 1 << 15
"""Tokens of a sequence, where the model has no longest one."""
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or npu.")]


@dataclass(frozen=True)
class Asked:
    """A model that answers."""

    engine: "NativeRolloutEngine"
    tokenizer: "PreTrainedTokenizerBase"
    eos_token_ids: list[int]
    config: "RunConfig"
    """The run's, or the recipe's, with the model that is asked."""
    knows_more: bool
    """Whether that says more than defaults."""
    max_tokens: int
    """Longest sequence that the model takes."""


def load_asked(path: str, recipe: Path | None, device_name: str) -> Asked:
    """Return what answers.

    Raises:
        UserError: there is no such model, or the recipe is wrong.
    """
    import torch

    from pellucid import devices
    from pellucid.cli.export import load_trained
    from pellucid.config import RunConfig, load_config
    from pellucid.rollout.native import NativeRolloutEngine
    from pellucid.training.common.models import eos_token_ids
    from pellucid.training.common.value_models import max_positions
    from pellucid.training.fsdp import FsdpEngine, MicroBatching

    asked = None if recipe is None else load_config(recipe, []).config
    device = devices.choose_device(device_name)
    policy, tokenizer, trained = load_trained(path, device)
    config = asked or trained or RunConfig()
    section = config.actor_rollout_ref
    base = path if trained is None else trained.actor_rollout_ref.model.path
    config = replace(config, actor_rollout_ref=replace(section, model=replace(section.model, path=base)))
    ends = eos_token_ids(policy.generation_config, tokenizer)
    trainer = FsdpEngine(policy, None, MicroBatching(None, None), device=device, dtype=torch.float32)
    engine = NativeRolloutEngine(trainer, tokenizer, ends, max_num_seqs=256, max_num_batched_tokens=8192, seed=0)
    longest = max_positions(policy.config) or NO_LIMIT
    return Asked(engine, tokenizer, ends, config, (asked or trained) is not None, longest)


def evaluate(
    model: Model,
    files: Annotated[
        str | None,
        typer.Option(
            help="Problems: task:NAME?args, a jsonl or parquet file, or a hub dataset. Default: the run's or recipe's "
            "data.val_files."
        ),
    ] = None,
    recipe: LikeRecipe = None,
    num: Annotated[int | None, typer.Option(min=1, help="At most this many problems.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses a problem; with several, pass@k is reported.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Default: 0, greedy, of one sample, else 1.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Longest response. Default: the run's or recipe's, or 256."),
    ] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="Own reward function, file.py:name.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the scored responses here (.jsonl.zst).")] = None,
    device_name: Device = "auto",
) -> None:
    """Answer held-out problems with a model and print accuracy, its 95% interval, reward and number, a line a task.

    A run answers as it was trained, with its agent and tools.

    [bold]pellucid eval builtin --files 'task:arithmetic?level=2' --num 200[/bold]
    """
    from pellucid.config.schema.reward_model import RewardConfig
    from pellucid.data import build_prompts
    from pellucid.files.rollout_dump import write_rollouts
    from pellucid.loading import run_loop
    from pellucid.reward import make_scorer
    from pellucid.reward.scorer import require_scores
    from pellucid.rollout.requests import SamplingParams
    from pellucid.training.common.models import TokenPieces
    from pellucid.validation import answer, validation_metrics

    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if samples > 1 and temperature == 0:
        reason = f"0 would draw the same response {samples} times."
        raise UserError("--temperature", reason, "Leave it out, or set --samples 1.")
    if reward is not None and ":" not in reward:
        raise UserError("--reward", f"'{reward}' names no function.", f"Write it as {reward}:compute_score.")
    asked = load_asked(model, recipe, device_name)
    data, rollout = asked.config.data, asked.config.actor_rollout_ref.rollout
    if files is None and data.val_files is None:
        raise UserError("--files", "is not given, and nothing else names problems.", "Give it, e.g. 'task:arithmetic'.")
    source = replace(data, val_files=files or data.val_files, val_max_samples=num, max_prompt_length=1 << 20)
    scoring = asked.config.reward_model if reward is None else RewardConfig(functions={reward: 1.0})
    longest = max_tokens or (rollout.response_length if asked.knows_more else 256)
    params = SamplingParams(n=samples, max_tokens=longest, temperature=temperature or 1.0, do_sample=temperature > 0)
    params.stop = rollout.stop
    with (
        closing(run_loop(asked.config, asked.tokenizer)) as loop,
        make_scorer(scoring) as scorer,
        progress(transient=True) as bar,
    ):
        read = build_prompts(source, asked.tokenizer, "val", tools=loop.schemas, keep_messages=loop.has_turns)
        prompts = read.prompts
        task = bar.add_task("answering", total=len(prompts) * samples)
        rollouts, scores = answer(
            asked.engine,
            lambda rollouts: require_scores(scorer.score(rollouts)[0]),
            prompts,
            params,
            batch_size=None,
            on_done=lambda count: bar.advance(task, count),
            loop=loop,
        )
    if out is not None:
        write_rollouts(out, rollouts, scores, step=0, pieces=TokenPieces(asked.tokenizer))
    _print_table(validation_metrics(rollouts, scores), samples)


def _print_table(metrics: dict[str, float], samples: int) -> None:
    several = [f"pass@{samples}"] if samples > 1 else []
    table = Table("task", "accuracy", "95% interval", "reward", "problems", *several)
    for task in (name.removesuffix("/accuracy") for name in metrics if name.endswith("/accuracy")):
        accuracy, reward, num = (metrics[f"{task}/{name}"] for name in ("accuracy", "reward", "num"))
        low, high = _wilson(accuracy, num)
        shown = [f"{accuracy:.1%}", f"{low:.1%} – {high:.1%}", f"{reward:.3f}", f"{num:.0f}"]
        table.add_row(task.removeprefix("val/"), *shown, *(f"{metrics[f'{task}/{name}']:.1%}" for name in several))
    console.print(table)


def _wilson(share: float, num: float) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share observed over `num` problems."""
    z = 1.96
    centre, spread = share + z * z / (2 * num), z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return (centre - spread) / (1 + z * z / num), (centre + spread) / (1 + z * z / num)
