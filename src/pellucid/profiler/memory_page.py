"""The torch_memory tool's figures as a report (JSON) and as one self-contained page, drawn from that report alone."""

import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from pellucid.profiler.memory_use import BEFORE_CAPTURE, BEFORE_ENTRIES, OTHER_SITES, OUTSIDE, MemoryUse
from pellucid.profiler.tools.base import Capture

_ASSETS = Path(__file__).parents[1] / "assets"
_COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#e45756",
    "#b279a2",
    "#72b7b2",
    "#eeca3b",
    "#9d755d",
    "#ff9da6",
    "#6b5fb5",
)
_GREYS = {OUTSIDE: "#8a919c", BEFORE_CAPTURE: "#b4b9c1", BEFORE_ENTRIES: "#b4b9c1", OTHER_SITES: "#b4b9c1"}
_PLUMBING = ("torch/", "contextlib.py", "functools.py", "threading.py", "<", "??")
"""How files begin that say nothing about who wanted the memory."""
MAX_RSS_POINTS = 400

Report = dict[str, Any]


def report_of(use: MemoryUse, capture: Capture, device: str, rss: list[tuple[float, int]], max_entries: int) -> Report:
    """Return the JSON report: the fields of `MemoryUse`, and what it is a report of.

    Args:
        use: the figures.
        capture: what was captured.
        device: whose memory: cpu or cuda.
        rss: seconds since the capture began and the process's resident bytes, at least one.
        max_entries: limit to the changes that are kept.
    """
    every = -(-len(rss) // MAX_RSS_POINTS)
    shown = [max(rss[first : first + every], key=lambda sample: sample[1]) for first in range(0, len(rss), every)]
    about = {
        "role": capture.role,
        "stage": None if capture.stage is None else str(capture.stage),
        "step": capture.step,
        "call": capture.call,
        "window": capture.window,
        "rank": capture.rank,
        "num_ranks": capture.num_ranks,
        "pid": capture.pid,
    }
    return {
        "version": 1,
        "device": device,
        "capture": about,
        "max_entries": max_entries,
        **asdict(use),
        "rss": {
            "start_bytes": rss[0][1],
            "peak_bytes": max(num_bytes for _, num_bytes in rss),
            "end_bytes": rss[-1][1],
            "curve": [(round(at_s, 4), num_bytes) for at_s, num_bytes in shown],
        },
    }


def page_of(report: Report) -> str:
    """Return the page, as HTML that loads nothing."""
    stages = _coloured(report["curve"]["by_stage"])
    sites = {
        str(number): (f"{site['operator'] or 'memory'} {headline(site['stack'])}", _COLOURS[number % len(_COLOURS)])
        for number, site in enumerate(report["by_site"])
    } | {OTHER_SITES: (OTHER_SITES, _GREYS[OTHER_SITES])}
    return _template().render(
        report=report,
        title=_title(report["capture"]),
        taken=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["started_at"])),
        stage_colours=stages
        | {stage: "#8a919c" for stage in (use["stage"] for use in report["by_stage"]) if stage not in stages},
        chart={
            "duration_s": report["duration_s"],
            "at_s": report["curve"]["at_s"],
            "peak": {"at_s": report["peak_at_s"], "bytes": report["peak_bytes"]},
            "views": {
                "stage": [_series(name, stages[name], values) for name, values in report["curve"]["by_stage"].items()],
                "site": [_series(*sites[key], values) for key, values in report["curve"]["by_site"].items()],
            },
            "ranges": [
                {
                    "label": label,
                    "depth": depth,
                    "start_s": start_s,
                    "end_s": end_s,
                    "colour": stages.get(label.split(" › ")[-1]),
                }
                for label, depth, start_s, end_s in report["ranges"]
            ],
            "rss": report["rss"]["curve"],
        },
    )


def headline(stack: list[str] | tuple[str, ...]) -> str:
    """Return the innermost frame that is not PyTorch's own, or else the innermost."""
    return next((frame for frame in stack if not is_plumbing(frame)), stack[0] if stack else "")


def is_plumbing(frame: str) -> bool:
    """Tell whether a frame is of PyTorch itself, or of the standard library."""
    return frame.startswith(_PLUMBING) or "/site-packages/torch/" in frame


def size(num_bytes: int) -> str:
    """Return bytes for people, e.g. `12.3 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return (
                f"{value:.0f} {unit}"
                if value >= 100
                else f"{value:.1f} {unit}"
                if value >= 10
                else f"{value:.2f} {unit}"
            )
    return f"{num_bytes} B"


def _title(capture: dict[str, Any]) -> str:
    what = capture["stage"] or f"whole step ({capture['role']})"
    again = f", call {capture['call']}" if capture["call"] > 1 else ""
    again += f", window {capture['window']}" if capture["window"] > 1 else ""
    return f"Memory of step {capture['step']}, {what}{again}"


def _series(name: str, colour: str, values: list[int]) -> dict[str, Any]:
    return {"name": name, "colour": colour, "values": values}


def _coloured(names: dict[str, Any]) -> dict[str, str]:
    named = [name for name in names if name not in _GREYS]
    return {name: _GREYS.get(name) or _COLOURS[named.index(name) % len(_COLOURS)] for name in names}


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(size=size, headline=headline, is_plumbing=is_plumbing)
    return environment.get_template("memory_page.html.j2")
