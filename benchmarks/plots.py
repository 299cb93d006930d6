"""Draws learning curves as picture files, from one or several `metrics.jsonl`, for the result pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#2a6f97", "#e07a5f", "#3d9970", "#8d6cab", "#c9a227", "#4d4d4d")


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
