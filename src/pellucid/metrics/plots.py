"""Learning curves as picture files, drawn from one or several `metrics.jsonl`.

The demo and the result pages call these; held-out accuracy is drawn over minutes of training, reward over steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.metrics.trackers import read_metrics

_COLOURS = ("#2a6f97", "#e07a5f", "#3d9970", "#8d6cab", "#c9a227", "#4d4d4d")


def plot_curve(metrics_jsonl: Path, path_png: Path) -> None:
    """Draw one run: held-out accuracy of each task over minutes, mean reward over steps."""
    _draw({"": metrics_jsonl}, path_png)


def plot_runs(runs: Mapping[str, Path], path_png: Path) -> None:
    """Draw several runs, e.g. seeds, one colour each; keys are the labels of the legend."""
    _draw(runs, path_png)


def plot_bands(variants: Mapping[str, Sequence[Path]], metric: str, path_png: Path) -> None:
    """Draw one metric of several variants over steps: the mean over each variant's runs, and a band of its 95% confidence.

    The band is Student's t interval of the mean over runs; with one run there is only the line. A run that stopped early
    counts as long as it ran.
    """
    import numpy as np

    figure, axes = _figure(1)
    for index, (label, files) in enumerate(variants.items()):
        colour, dashes = _COLOURS[index % len(_COLOURS)], ("-", "--", ":")[index // len(_COLOURS) % 3]
        by_step: dict[int, list[float]] = {}
        for rows in map(read_metrics, files):
            for row in rows:
                if row.get(metric) is not None:
                    by_step.setdefault(row["step"], []).append(row[metric])
        steps = sorted(by_step)
        mean = np.array([np.mean(by_step[step]) for step in steps])
        half = np.array([_t_interval(by_step[step]) for step in steps])
        axes[0].plot(steps, mean, color=colour, linestyle=dashes, linewidth=1.6, label=f"{label} {mean[-1]:.3g}")
        axes[0].fill_between(steps, mean - half, mean + half, color=colour, alpha=0.7 / (4 + len(variants)), linewidth=0)
    axes[0].set(title=f"{metric}: mean over runs, 95% confidence", xlabel="step")
    _finish(figure, axes, path_png)


# Two-sided 97.5% quantiles of Student's t with 1, 2, … degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _t_interval(values: list[float]) -> float:
    """Return half the width of the 95% confidence interval of the mean of `values`."""
    if len(values) < 2:
        return 0.0
    from statistics import stdev

    quantile = _T_QUANTILES[len(values) - 2] if len(values) - 2 < len(_T_QUANTILES) else 1.96
    return quantile * stdev(values) / len(values) ** 0.5


def training_minutes(rows: list[dict[str, Any]]) -> list[float]:
    """Return the minutes of training done at each line: the running sum of `timing_s/step`, validation left out."""
    total_s, minutes = 0.0, []
    for row in rows:
        if row["step"] > 0:
            total_s += row.get("timing_s/step", 0.0)
        minutes.append(total_s / 60)
    return minutes


def _draw(runs: Mapping[str, Path], path_png: Path) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, (accuracy, reward) = _figure(2)
    for colour, (label, path) in zip(_COLOURS * len(runs), runs.items()):
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
    _finish(figure, [accuracy, reward], path_png)


def _figure(num_axes: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8 if num_axes > 1 else 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def _finish(figure: Any, all_axes: Sequence[Any], path_png: Path) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[1]:
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
        axes.annotate(f"{points[-1][1]:.0%}", points[-1], xytext=(5, 4), textcoords="offset points",
                      color=colour, fontsize=9)
