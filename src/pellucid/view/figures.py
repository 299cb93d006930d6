"""The dashboard's figures, as the JSON that plotly draws in the browser.

Metrics of runs, spans of a step and errors of modules come in as plain values; nothing here reads a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pellucid.metrics.definitions import find
from pellucid.metrics.plots import mean_band
from pellucid.observe.report.timeline import Span

MAX_POINTS = 1000
"""Of a curve; where it has more, the least and the greatest of each stretch are kept, so that no spike is lost."""
MAX_SPANS = 4000
"""Of a timeline: the longest ones."""
COLOURS = (
    "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#475569", "#b45309",
    "#0f766e", "#a21caf",
)  # fmt: skip
X_AXES = {"step": "step", "tokens": "tokens", "hours": "hours of training"}
Figure = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def curve(
    metric: str, runs: Mapping[str, Rows], *, x: str = "step", smooth: float = 0.0, log: bool = False,
    groups: Mapping[str, str] | None = None,
) -> Figure:  # fmt: skip
    """Return one metric of some runs.

    Args:
        metric: its name.
        runs: rows of `metrics.jsonl` by run.
        x: one of `X_AXES`.
        smooth: weight of the past in an exponential mean, 0 to below 1, without its bias to the start; the values
            themselves are drawn faintly.
        log: whether the scale of the values is logarithmic.
        groups: by run what it is one of; runs of one group are drawn as their mean with a band of one
            standard deviation.
    """
    series = {name: _points(metric, rows, x) for name, rows in runs.items()}
    series = {name: points for name, points in series.items() if len(points[0])}
    colour_of = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(runs)}
    traces: list[dict[str, Any]] = []
    if groups is not None:
        members: dict[str, list[str]] = defaultdict(list)
        for name in series:
            members[groups[name]].append(name)
        for number, (group, names) in enumerate(members.items()):
            colour = COLOURS[number % len(COLOURS)]
            traces += _band(group, [series[name] for name in names], colour, smooth)
    else:
        for name, (xs, ys) in series.items():
            if smooth:
                faint = {"opacity": 0.25, "showlegend": False, "hoverinfo": "skip"}
                traces.append(_line(name, xs, ys, colour_of[name]) | faint)
            traces.append(_line(name, xs, smoothed(ys, smooth), colour_of[name]))
    known = find(metric)
    layout = {
        "title": {"text": metric, "font": {"size": 13}, "x": 0.01},
        "xaxis": {"title": {"text": X_AXES[x]}},
        "yaxis": {"title": {"text": known.unit if known else ""}, "type": "log" if log else "linear"},
        "showlegend": len(traces) > 1,
    }
    return {"data": traces, "layout": layout}


def _points(metric: str, rows: Rows, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Return where a metric was measured, and its values."""
    if x == "tokens":
        places: Iterable[float] = accumulate(row.get("perf/total_num_tokens") or 0.0 for row in rows)
    elif x == "hours":
        places = accumulate((row.get("timing_s/step") or 0.0) / 3600 for row in rows)
    else:
        places = (row["step"] for row in rows)
    pairs = [(place, row[metric]) for place, row in zip(places, rows) if row.get(metric) is not None]
    array = np.array(pairs, dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential mean of values so far, each divided by the weights that it is made of."""
    if not weight:
        return values
    mean, total, result = 0.0, 0.0, np.empty_like(values)
    for index, value in enumerate(values):
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        result[index] = mean / total
    return result


def thinned(xs: np.ndarray, ys: np.ndarray, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most that many points: of each stretch the least and the greatest, and the last of all."""
    if len(xs) <= most:
        return xs, ys
    kept = {len(xs) - 1}
    for stretch in np.array_split(np.arange(len(xs)), most // 2 - 1):
        kept |= {int(stretch[ys[stretch].argmin()]), int(stretch[ys[stretch].argmax()])}
    chosen = np.array(sorted(kept))
    return xs[chosen], ys[chosen]


def _line(name: str, xs: np.ndarray, ys: np.ndarray, colour: str) -> dict[str, Any]:
    xs, ys = thinned(xs, ys)
    style = {"mode": "lines" if len(xs) > 1 else "markers", "line": {"color": colour, "width": 1.6}}
    return {"type": "scatter", "name": name, "x": xs.tolist(), "y": ys.tolist(), **style}


def _band(name: str, series: list[tuple[np.ndarray, np.ndarray]], colour: str, smooth: float) -> list[dict[str, Any]]:
    """Return the mean of some runs where at least one has a value, and a band around it."""
    xs, mean, spread = mean_band([(points[0], smoothed(points[1], smooth)) for points in series])
    label = f"{name} ({len(series)} run{'s' * (len(series) > 1)})"
    edges = [_line(label, xs, mean + sign * spread, colour) for sign in (-1, 1)]
    for edge in edges:
        edge |= {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", "mode": "lines"}
    edges[1] |= {"fill": "tonexty", "fillcolor": f"{colour}30"}
    return [*(edges if len(series) > 1 else []), _line(label, xs, mean, colour)]


def timeline(spans: Sequence[Span]) -> tuple[Figure, int]:
    """Return the spans of a step as bars, a row a process and a depth, and how many short ones were left out."""
    longest = sorted(spans, key=lambda span: -span.dur_us)[:MAX_SPANS]
    shown = sorted(longest, key=lambda span: (span.start_us, -span.dur_us))
    begin = min((span.start_us for span in shown), default=0.0)
    ends: dict[tuple[str, int], list[float]] = defaultdict(list)
    bars: dict[str, list[tuple[str, float, float, str]]] = defaultdict(list)
    for span in shown:
        open_ends = ends[span.process, span.row]
        while open_ends and open_ends[-1] <= span.start_us + 0.5:
            open_ends.pop()
        open_ends.append(span.end_us)
        row = f" · {span.row}" if span.row else ""
        label = span.process + row + (f" ↳{len(open_ends) - 1}" if len(open_ends) > 1 else "")
        facts = "<br>".join(f"{name}: {_cut(value)}" for name, value in span.args.items())
        bars[span.name].append((label, (span.start_us - begin) / 1e6, span.dur_us / 1e6, facts))
    rows = sorted({bar[0] for some in bars.values() for bar in some}, reverse=True)
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": [bar[0] for bar in some],
            "base": [bar[1] for bar in some], "x": [bar[2] for bar in some], "customdata": [bar[3] for bar in some],
            "hovertemplate": f"<b>{name}</b> %{{x:.4g}} s from %{{base:.4g}} s<br>%{{customdata}}<extra></extra>",
            "marker": {"color": COLOURS[number % len(COLOURS)], "line": {"width": 0.5, "color": "#fff"}},
        }
        for number, (name, some) in enumerate(bars.items())
    ]  # fmt: skip
    layout = {
        "barmode": "overlay", "height": max(320, 120 + 24 * len(rows)),
        "xaxis": {"title": {"text": "seconds of the step"}},
        "yaxis": {"categoryorder": "array", "categoryarray": rows, "automargin": True, "fixedrange": True},
        "dragmode": "zoom",
    }  # fmt: skip
    return {"data": traces, "layout": layout}, len(spans) - len(shown)


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]} …"
