"""`pellucid eval`: answers problems with a model or a run's last checkpoint, scores them and prints the accuracy."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pellucid.console import console, progress
from pellucid.errors import UserError


def evaluate(
    model: Annotated[str, typer.Argument(help="A run, a model folder, a hub id, or 'builtin'.")],
    files: Annotated[str, typer.Option(help="Problems: task:NAME?args, a jsonl or parquet file, or a hub dataset.")],
    num: Annotated[int | None, typer.Option(min=1, help="At most this many problems.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses a problem; with several, pass@k is reported.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Default: 0, greedy, of one sample, else 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest response.")] = 256,
    reward: Annotated[str | None, typer.Option("--reward", help="Own reward function, file.py:name.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the scored responses here (.jsonl.zst).")] = None,
    device_name: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or npu.")] = "auto",
) -> None:
    """Answer held-out problems with a model and print accuracy, its 95% interval, reward and number, a line a task.

    [bold]pellucid eval builtin --files 'task:arithmetic?level=2' --num 200[/bold]
    """
    import torch

    from pellucid import devices
    from pellucid.cli.export import load_trained
    from pellucid.config.schema.data import DataConfig
    from pellucid.data import build_prompts
    from pellucid.files.rollout_dump import write_rollouts
    from pellucid.reward import make_scorer
    from pellucid.reward.scorer import require_scores
    from pellucid.rollout.native import NativeRolloutEngine
    from pellucid.rollout.requests import SamplingParams
    from pellucid.training.common.models import TokenPieces, eos_token_ids
    from pellucid.training.fsdp import FsdpEngine, MicroBatching
    from pellucid.validation import answer, validation_metrics

    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if samples > 1 and temperature == 0:
        reason = f"0 would draw the same response {samples} times."
        raise UserError("--temperature", reason, "Leave it out, or set --samples 1.")
    device = devices.choose_device(device_name)
    policy, tokenizer = load_trained(model, device)
    source = DataConfig(train_files=files, val_files=files, val_max_samples=num, max_prompt_length=1 << 20)
    data = build_prompts(source, tokenizer, "val")
    path, _, name = (reward or "").rpartition(":")
    params = SamplingParams(n=samples, max_tokens=max_tokens, temperature=temperature or 1.0, do_sample=temperature > 0)
    engine = NativeRolloutEngine(
        FsdpEngine(policy, None, MicroBatching(None, None), device=device, dtype=torch.float32),
        tokenizer,
        eos_token_ids(policy.generation_config, tokenizer),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        seed=0,
    )
    with make_scorer(path or None, name, 2, 30.0) as scorer, progress(transient=True) as bar:
        task = bar.add_task("answering", total=len(data.prompts) * samples)
        rollouts, scores = answer(
            engine,
            lambda rollouts: require_scores(scorer.score(rollouts)[0]),
            data.prompts,
            params,
            batch_size=None,
            on_done=lambda count: bar.advance(task, count),
        )
    if out is not None:
        write_rollouts(out, rollouts, scores, step=0, pieces=TokenPieces(tokenizer))
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
