"""Draws a run's learning curve as a picture file, from its `metrics.jsonl`."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from pellucid.metrics.trackers import read_metrics

COLOUR = "#2a6f97"


def plot_run(metrics: Path, path_png: Path) -> None:
    """Draw held-out accuracy of each task over minutes of training, and mean reward over steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    rows = read_metrics(metrics)
    figure = Figure(figsize=(9.6, 3.8), dpi=150)
    accuracy, reward = figure.subplots(1, 2, gridspec_kw={"left": 0.07, "right": 0.98, "bottom": 0.13, "top": 0.91})
    minutes = list(accumulate(row.get("timing_s/step", 0.0) / 60 for row in rows))
    seen = dict.fromkeys(name for row in rows for name in row)
    for marker, name in zip("osD^vP*X" * len(seen), (name for name in seen if name.endswith("/accuracy"))):
        points = [(minute, row[name]) for minute, row in zip(minutes, rows) if row.get(name) is not None]
        task = name.removeprefix("val/").removesuffix("/accuracy")
        accuracy.plot(*zip(*points), color=COLOUR, marker=marker, markersize=4, label=task)
    reward.plot(*zip(*((row["step"], row.get("critic/score/mean")) for row in rows)), color=COLOUR)
    accuracy.set(title="Held-out accuracy", xlabel="training time (minutes)", ylim=(-0.02, 1.02))
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if accuracy.get_legend_handles_labels()[1]:
        accuracy.legend(frameon=False, fontsize=9)
    reward.set(title="Reward", xlabel="step", ylabel="mean reward of a sample")
    reward.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path_png)
