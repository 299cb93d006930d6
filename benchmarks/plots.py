"""Draws learning curves as picture files, from one or several `metrics.jsonl`, for the result pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.metrics.trackers import read_metrics

COLOURS = ("#2a6f97", "#e07a5f", "#3d9970", "#8d6cab", "#c9a227", "#4d4d4d")


def plot_runs(runs: Mapping[str, Path], path_png: Path) -> None:
    """Draw held-out accuracy of each task over minutes, and mean reward over steps, in one colour a run.

    The keys of `runs` are the labels of the legend, the values `metrics.jsonl` files.

    Raises:
        UserError: a file has no line yet.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, (accuracy, reward) = new_figure(2)
    for colour, (label, path) in zip(COLOURS * len(runs), runs.items()):
        rows = read_metrics(path)
        if not rows:
            raise UserError(str(path), "holds no finished step to draw.")
        _accuracy_lines(accuracy, rows, label, colour)
        points = [(row["step"], value) for row in rows if (value := row.get("critic/score/mean")) is not None]
        if points:
            reward.plot(*zip(*points), color=colour, linewidth=1.4, label=label or None)
    accuracy.set(title="Held-out accuracy", xlabel="training time (minutes)", ylim=(-0.02, 1.02))
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    reward.set(title="Reward", xlabel="step", ylabel="mean reward of a sample")
    reward.xaxis.set_major_locator(MaxNLocator(integer=True))
    save_figure(figure, [accuracy, reward], path_png)


def training_minutes(rows: list[dict[str, Any]]) -> list[float]:
    """Return the minutes of training done at each line: the running sum of `timing_s/step`, validation left out."""
    total_s, minutes = 0.0, []
    for row in rows:
        if row["step"] > 0:
            total_s += row.get("timing_s/step", 0.0)
        minutes.append(total_s / 60)
    return minutes


def new_figure(num_axes: int) -> tuple[Any, Any]:
    """Return a figure with its axes side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8 if num_axes > 1 else 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def save_figure(figure: Any, all_axes: Sequence[Any], path_png: Path) -> None:
    """Give the axes the look that all our pictures have, and each a legend unless the figure has one; write the file."""
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[1] and not figure.legends:
            axes.legend(frameon=False, fontsize=9)
    path_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path_png)


def _accuracy_lines(axes: Any, rows: list[dict[str, Any]], label: str, colour: str) -> None:
    """Add one line a task; a single run's tasks differ by marker and are named in the legend."""
    minutes = training_minutes(rows)
    seen = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in seen if name.startswith("val/") and name.endswith("/accuracy")]
    for marker, name in zip("osD^vP*X" * len(names), names):
        points = [(minute, row[name]) for minute, row in zip(minutes, rows) if row.get(name) is not None]
        task = name.removeprefix("val/").removesuffix("/accuracy")
        text = f"{label} {task}".strip() if len(names) > 1 or not label else label
        axes.plot(*zip(*points), color=colour, marker=marker, markersize=4, linewidth=1.6, label=text)
        end = {"xytext": (5, 4), "textcoords": "offset points", "color": colour, "fontsize": 9}
        axes.annotate(f"{points[-1][1]:.0%}", points[-1], **end)
