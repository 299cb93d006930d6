"""Draws learning curves of runs as a picture file, from their `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.errors import UserError, did_you_mean
from pellucid.metrics.definitions import find
from pellucid.metrics.trackers import read_metrics

COLOURS = ("#2a6f97", "#e07a5f", "#3d9970", "#b8860b", "#6a4c93", "#c9184a", "#5c677d", "#00b4d8")
REWARD = "critic/score/mean"
TITLES = {REWARD: "Reward"}


def plot_runs(runs: Mapping[str, Path], path_image: Path, metrics: Sequence[str] = ()) -> None:
    """Draw metrics of some runs: by default the held-out accuracy of each task over minutes of training, and the mean
    reward over steps.

    Args:
        runs: `metrics.jsonl` by what to call the run.
        path_image: PNG, or what else its ending names: PDF, SVG.
        metrics: a panel for each of these over steps instead.

    Raises:
        UserError: no run has such a metric.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    rows = {name: read_metrics(file) for name, file in runs.items()}
    seen = dict.fromkeys(key for some in rows.values() for row in some for key in row)
    if unknown := [metric for metric in metrics if metric not in seen]:
        raise UserError("--metric", f"no run has '{unknown[0]}'.", did_you_mean(unknown[0], seen))
    tasks = [] if metrics else [name for name in seen if name.startswith("val/") and name.endswith("/accuracy")]
    panels = list(metrics) or [REWARD]
    num_panels = bool(tasks) + len(panels)
    figure = Figure(figsize=(4.8 * max(num_panels, 1.4), 3.8), dpi=150, layout="constrained")
    axes = list(figure.subplots(1, num_panels, squeeze=False)[0])
    if tasks:
        accuracy = axes.pop(0)
        for (run, some), colour in zip(rows.items(), COLOURS * len(rows)):
            minutes = list(accumulate(row.get("timing_s/step", 0.0) / 60 for row in some))
            for marker, name in zip("osD^vP*X" * len(tasks), tasks):
                points = _points(zip(minutes, some), name)
                task = name.removeprefix("val/").removesuffix("/accuracy")
                label = task if len(rows) == 1 else run if len(tasks) == 1 else f"{run}, {task}"
                accuracy.plot(*points, color=colour, marker=marker, markersize=4, label=label)
        accuracy.set(title="Held-out accuracy", xlabel="training time (minutes)", ylim=(-0.02, 1.02))
        accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        accuracy.legend(frameon=False, fontsize=9)
    for panel, metric in zip(axes, panels):
        for (run, some), colour in zip(rows.items(), COLOURS * len(rows)):
            panel.plot(*_points(((row["step"], row) for row in some), metric), color=colour, label=run)
        known = find(metric)
        unit = "mean reward of a sample" if metric == REWARD else known.unit if known else ""
        panel.set(title=TITLES.get(metric, metric), xlabel="step", ylabel=unit)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(rows) > 1 and not tasks:
            panel.legend(frameon=False, fontsize=9)
    figure.savefig(path_image)


def plot_groups(groups: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path_image: Path, metric: str) -> None:
    """Draw a metric over steps of groups of runs, as their mean with a band of one standard deviation.

    Args:
        groups: rows of `metrics.jsonl` of each run, by group.
        path_image: PNG, or what else its ending names.
        metric: its name.

    Raises:
        UserError: no run has such a metric.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (group, runs), colour in zip(groups.items(), COLOURS * len(groups)):
        series = [_points(((row["step"], row) for row in rows), metric) for rows in runs]
        if series := [points for points in series if points[0]]:
            xs, mean, spread = mean_band(series)
            axes.plot(xs, mean, color=colour, label=f"{group} ({len(series)})" if len(series) > 1 else group)
            axes.fill_between(xs, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    if not axes.lines:
        seen = {name for runs in groups.values() for rows in runs for row in rows for name in row}
        raise UserError("--metric", f"no run has '{metric}'.", did_you_mean(metric, seen))
    known = find(metric)
    axes.set(title=metric, xlabel="step", ylabel=known.unit if known else "")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path_image)


def mean_band(series: Sequence[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return places, mean and standard deviation of some curves, each read between its points where it has some."""
    xs = np.unique(np.concatenate([np.asarray(points[0], dtype=float) for points in series]))
    values = np.stack([np.interp(xs, *points, left=math.nan, right=math.nan) for points in series])
    return xs, np.nanmean(values, axis=0), np.nanstd(values, axis=0)


def _points(places: Any, metric: str) -> tuple[list[float], list[float]]:
    """Return where rows have a metric, and its values; `places` are pairs of a place and its row."""
    pairs = [(place, row[metric]) for place, row in places if row.get(metric) is not None]
    return [place for place, _ in pairs], [value for _, value in pairs]
