"""Who held memory: from a process's allocations and frees to the peak, its holders and what is left at the end.

`memory_changes.py` gives the allocations, the torch_memory tool the ranges; the figures go to its JSON and its page.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.text import Text

from pellucid.observe.memory_changes import Change
from pellucid.observe.tables import page, size, table
from pellucid.stages import Stage

OUTSIDE = "outside any stage"
BEFORE_CAPTURE = "before the capture"
MAX_SITES, FRAMES_SHOWN = 40, 6
_STAGES = frozenset(stage.value for stage in Stage)
_PLUMBING = ("torch/", "contextlib.py", "functools.py", "threading.py", "<", "??")
"""How files begin that say nothing about who wanted the memory."""


class RangeLog:
    """Records which stage, and which unit of work in it, runs when.

    Args:
        stage: what is captured; None: a whole step.
    """

    def __init__(self, stage: str | None) -> None:
        self._running = [] if stage is None else [str(stage)]
        self._switches = [(0, tuple(self._running))]

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Enclose a range."""
        self._running.append(str(name))
        self._switches.append((time.time_ns(), tuple(self._running)))
        try:
            yield
        finally:
            self._running.remove(str(name))  # ranges of tasks that overlap need not nest
            self._switches.append((time.time_ns(), tuple(self._running)))

    def at(self, time_ns: int) -> tuple[str, str]:
        """Return the stage that ran at a time, and all ranges, as in `actor_update › micro_batch`."""
        _, running = self._switches[bisect_right(self._switches, time_ns, key=lambda switch: switch[0]) - 1]
        stage = next((name for name in reversed(running) if name in _STAGES), OUTSIDE)
        return stage, " › ".join(dict.fromkeys(running)) or OUTSIDE


def figures(changes: list[Change], ranges: RangeLog, started_ns: int) -> dict[str, Any]:
    """Return who held memory, as plain values for JSON.

    Args:
        changes: in order of time; what was held when the capture began comes before its start.
        ranges: what ran when.
        started_ns: start of the capture, since the epoch.
    """

    def stage_of(change: Change) -> str:
        return BEFORE_CAPTURE if change.time_ns < started_ns else ranges.at(change.time_ns)[0]

    at_end, at_peak = dict[int, Change](), dict[int, Change]()
    total = peak_bytes = peak = 0
    highest: dict[str, int] = {}
    allocated: Counter[str] = Counter()
    for position, (change, total) in enumerate(zip(changes, _follow(changes, at_end)), 1):
        stage = stage_of(change)
        highest[stage] = max(highest.get(stage, 0), total)
        allocated[stage] += max(0, change.num_bytes)
        if total > peak_bytes:
            peak_bytes, peak = total, position
    list(_follow(changes[:peak], at_peak))
    of_stage: Counter[str] = Counter()
    for change in at_peak.values():
        of_stage[stage_of(change)] += change.num_bytes
    peak_ns = changes[peak - 1].time_ns if peak else started_ns
    return {
        "changes": len(changes),
        "before_bytes": highest.get(BEFORE_CAPTURE, 0),
        "peak_bytes": peak_bytes,
        "peak_at_s": max(0, peak_ns - started_ns) / 1e9,
        "peak_range": ranges.at(peak_ns)[1],
        "end_bytes": total,
        "by_stage": [
            {
                "stage": stage,
                "allocated_bytes": allocated[stage],
                "at_peak_bytes": of_stage[stage],
                # The most that was held while it ran, whoever allocated it.
                "peak_bytes": most,
            }
            for stage, most in highest.items()
        ],
        "at_peak": _sites(at_peak, stage_of),
        "at_end": _sites(at_end, stage_of),
    }


def _follow(changes: list[Change], held: dict[int, Change]) -> Iterator[int]:
    """Yield after each change how many bytes are held; `held` has by whom, by address."""
    total = 0
    for change in changes:
        # An address that is given out again was freed before, by a thread that is not seen.
        if (freed := held.pop(change.address, None)) is not None:
            total -= freed.num_bytes
        if change.num_bytes > 0:
            held[change.address] = change
            total += change.num_bytes
        yield total


def _sites(held: dict[int, Change], stage_of: Callable[[Change], str]) -> list[dict[str, Any]]:
    """Return who holds most, by stage, operator and stack."""
    num_bytes: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    counts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for change in held.values():
        site = stage_of(change), change.operator, change.stack
        num_bytes[site] += change.num_bytes
        counts[site] += 1
    return [
        {"bytes": held_bytes, "count": counts[site], "stage": site[0], "operator": site[1], "stack": site[2]}
        for site, held_bytes in num_bytes.most_common(MAX_SITES)
    ]


def memory_page(title: str, use: dict[str, Any]) -> str:
    """Return the figures as a page that loads nothing."""
    before, counted = f"of which {size(use['before_bytes'])} were held before the capture", "counted, the latest"
    if use["device"] == "cpu":
        before, counted = "without what was allocated before the capture, which nobody counts on a CPU", "counted"
    answer = (
        f"Memory peaked {use['peak_at_s']:.3f} s after the start, during {use['peak_range']}: "
        f"{size(use['peak_bytes'])}, {before}. {use['changes']:,} allocations and frees are {counted}."
    )
    columns = ("stage", "it allocated, freed or not", "of the peak", "peak while it ran")
    names = ("allocated_bytes", "at_peak_bytes", "peak_bytes")
    rows = ((each["stage"], *(size(each[name]) for name in names)) for each in use["by_stage"])
    stages = table("By stage", columns, rows)
    sites = [
        table(
            heading,
            ("operator", "stage", "stack", "bytes", "allocations"),
            (
                (each["operator"], each["stage"], _shown(each["stack"]), size(each["bytes"]), f"{each['count']:,}")
                for each in use[key]
            ),
            num_texts=3,
        )
        for heading, key in (("Held at the peak", "at_peak"), ("Left at the end", "at_end"))
    ]
    return page(title, [Text(title, style="bold"), Text(answer), stages, *sites])


def _shown(stack: tuple[str, ...]) -> str:
    """Return the frames that say who wanted the memory, innermost first: not PyTorch's own."""
    own = [frame for frame in stack if not frame.startswith(_PLUMBING) and "/site-packages/torch/" not in frame]
    return " ← ".join((own or stack)[:FRAMES_SHOWN])
