"""`pellucid eval`: answers problems with a model or a run's last checkpoint, scores them and prints the accuracy."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pellucid.console import console
from pellucid.errors import UserError

if TYPE_CHECKING:
    from pellucid.harness import HarnessScore

Model = Annotated[str, typer.Argument(help="A run, a model folder, a hub id, or 'builtin'.")]
LikeRecipe = Annotated[
    Path | None, typer.Option(help="Recipe whose prompts, agent and tools to take; by default those of a run.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or npu.")]


def evaluate(
    model: Model,
    files: Annotated[
        list[str] | None,
        typer.Option(
            help="Problems: task:NAME?args, a jsonl or parquet file, or a hub dataset; may be given several times. "
            "Default: the run's or recipe's data.val_files."
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-evaluation-harness, with commas; without --files these alone. Needs the extra harness."
        ),
    ] = None,
    harness_folder: Annotated[
        Path | None, typer.Option("--harness-folder", help="A folder with more tasks of that kind, as YAML files.")
    ] = None,
    recipe: LikeRecipe = None,
    num: Annotated[int | None, typer.Option(min=1, help="At most this many problems of each.")] = None,
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

    Several benchmarks, into one table:
    [bold]pellucid eval MODEL --files task:gsm8k --files task:math --files task:reasoning_gym:countdown[/bold]
    """
    from pellucid import api

    scores: list[HarnessScore] = []
    if harness_folder is not None and harness is None:
        raise UserError("--harness-folder", "has no effect without --harness.", "Name tasks, or leave it out.")
    own = {"--out": out, "--reward": reward, "--temperature": temperature, "--recipe": recipe}
    given = [name for name, value in own.items() if value is not None]
    if harness is not None and not files and given:
        raise UserError(given[0], "has no effect on --harness alone.", "Give --files, too, or leave it out.")
    if harness is not None:
        from pellucid.harness import run_harness

        folder = None if harness_folder is None else str(harness_folder)
        scores = run_harness(model, harness.split(","), num=num, device=device_name, folder=folder)
    metrics: dict[str, float] = {}
    if harness is None or files:
        metrics = api.evaluate(
            model,
            files,
            recipe=recipe,
            num=num,
            samples=samples,
            temperature=temperature,
            max_tokens=max_tokens,
            reward=reward,
            out=out,
            device=device_name,
        )
    _print_table(metrics, scores, samples)


def _print_table(metrics: dict[str, float], scores: "list[HarnessScore]", samples: int) -> None:
    several = [f"pass@{samples}"] if samples > 1 else []
    table = Table("task", "accuracy", "95% interval", "reward", "problems", *several)
    table.columns[0].overflow = "fold"
    for task in (name.removesuffix("/accuracy") for name in metrics if name.endswith("/accuracy")):
        accuracy, reward, num = (metrics[f"{task}/{name}"] for name in ("accuracy", "reward", "num"))
        low, high = _wilson(accuracy, num)
        shown = [f"{accuracy:.1%}", f"{low:.1%} – {high:.1%}", f"{reward:.3f}", f"{num:.0f}"]
        table.add_row(task.removeprefix("val/"), *shown, *(f"{metrics[f'{task}/{name}']:.1%}" for name in several))
    for one in scores:
        spread = 1.96 * (one.stderr or 0.0)
        about = f"{one.value - spread:.1%} – {one.value + spread:.1%}" if spread else ""
        table.add_row(f"{one.task} {one.metric}", f"{one.value:.1%}", about, "", str(one.num), *("" for _ in several))
    console.print(table, markup=False)


def _wilson(share: float, num: float) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share observed over `num` problems."""
    z = 1.96
    centre, spread = share + z * z / (2 * num), z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, centre - spread) / (1 + z * z / num), (centre + spread) / (1 + z * z / num)
