"""What a trace of PyTorch's profiler says of one process: which operators took the time, and how much of it was
communication.

On a CPU everything is worked out here from the events; where there are GPU kernels `holistic.py` answers for the
device.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pellucid.observe.manifest import ProfileFile
from pellucid.observe.report.steps import Interval, length, union
from pellucid.observe.report.trace import TraceFile

COMMUNICATION = re.compile(r"^(c10d::|gloo:|nccl|record_param_comms|hccl)", re.IGNORECASE)
_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_OPERATOR_FREE_US = 1000.0
"""Gaps shorter than this are Python at work; the longest one is named."""


@dataclass(slots=True)
class OperatorTime:
    """One operator in one capture."""

    name: str
    self_s: float
    """Without the operators that it calls."""
    calls: int


@dataclass(slots=True)
class CaptureStats:
    """What one trace says."""

    file: ProfileFile
    wall_s: float
    """Of the captured ranges; where there is none, from the first event to the last."""
    compute_s: float
    """The main thread is in an operator that computes."""
    communication_s: float
    """Any collective runs, whether something else does meanwhile or not."""
    exposed_s: float
    """A collective runs and the main thread computes nothing."""
    host_s: float
    """Neither: Python, waiting, sleep."""
    longest_gap_s: float
    """The longest time in which the main thread computes nothing and no collective runs."""
    longest_gap_at_s: float
    """When it begins, since the capture's start."""
    operators: list[OperatorTime]
    """By self time, the largest first."""
    peak_bytes: int | None
    """Most memory allocated; None where the trace has no memory events."""
    num_kernels: int
    kernel_s: float = 0.0
    """Time in which some GPU kernel runs."""

    @property
    def what(self) -> str:
        """The stage, or `step`."""
        return self.file.stage or "step"

    @property
    def label(self) -> str:
        """What it is of, in words: `rollout_generate, run 2`."""
        run = f", run {self.file.call}" if self.file.call > 1 else ""
        return f"{self.what}{run}{f', window {self.file.window}' if self.file.window > 1 else ''}"

    @property
    def name(self) -> str:
        """The process as people call it."""
        return self.file.process.replace("_", " ")


@dataclass(slots=True)
class _Collected:
    """What is kept of the events while they are read."""

    operators: dict[int, list[tuple[float, float, str]]] = field(default_factory=lambda: defaultdict(list))
    """By thread: start, duration, name."""
    communication: list[Interval] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    ranges: list[Interval] = field(default_factory=list)
    num_kernels: int = 0
    peak_bytes: int | None = None
    allocated: int = 0


def capture_stats(file: ProfileFile, trace: TraceFile) -> CaptureStats:
    """Read one trace and work out its figures.

    Raises:
        TraceError: the file is torn.
    """
    collected = _collect(trace.events(), {file.stage} if file.stage else set(), file.units)
    main = max(collected.operators, key=lambda thread: len(collected.operators[thread]), default=None)
    on_main = collected.operators[main] if main is not None else []
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for operators in collected.operators.values():
        for name, self_us in _self_times(sorted(operators, key=lambda op: (op[0], -op[1]))):
            times[name][0] += self_us
            times[name][1] += 1
    window = union(
        collected.ranges
        or _extent([*((start, start + duration) for start, duration, _ in on_main), *collected.kernels])
    )
    compute = clip(union((start, start + duration) for start, duration, name in on_main if _computes(name)), window)
    communication = clip(union(collected.communication), window)
    either = union([*compute, *communication])
    gap, gap_at = _longest_gap(window, either)
    wall = length(window)
    return CaptureStats(
        file=file,
        wall_s=wall / 1e6,
        compute_s=length(compute) / 1e6,
        communication_s=length(communication) / 1e6,
        exposed_s=(length(either) - length(compute)) / 1e6,
        host_s=max(0.0, wall - length(either)) / 1e6,
        longest_gap_s=gap / 1e6,
        longest_gap_at_s=gap_at / 1e6,
        operators=sorted(
            (OperatorTime(name, self_us / 1e6, int(calls)) for name, (self_us, calls) in times.items()),
            key=lambda operator: -operator.self_s,
        ),
        peak_bytes=collected.peak_bytes,
        num_kernels=collected.num_kernels,
        kernel_s=length(union(collected.kernels)) / 1e6,
    )


def _collect(events: Iterable[dict[str, Any]], stages: set[str], units: dict[str, Any] | None) -> _Collected:
    """Keep what the figures need; ranges are the stage's, or of a sampled stage the units'."""
    collected = _Collected()
    wanted = {units["unit"]} if units else stages
    for event in events:
        category, kind = event.get("cat"), event.get("ph")
        if kind == "X" and "dur" in event:
            start, duration, name = event["ts"], event["dur"], event["name"]
            if category == "cpu_op":
                collected.operators[event["tid"]].append((start, duration, name))
            if category == "user_annotation" and name in wanted:
                collected.ranges.append((start, start + duration))
            if category in _KERNELS:
                collected.num_kernels += category == "kernel"
                collected.kernels.append((start, start + duration))
            if COMMUNICATION.match(name) and category in ("user_annotation", "cpu_op", "kernel"):
                collected.communication.append((start, start + duration))
        elif event.get("name") == "[memory]":
            _add_memory(collected, event.get("args", {}))
    return collected


def _add_memory(collected: _Collected, args: dict[str, Any]) -> None:
    collected.allocated += int(args.get("Bytes", 0))
    # Where the allocator does not count for itself it reports 0; then the sum since the capture's start is what there
    # is.
    total = int(args.get("Total Allocated", 0)) or collected.allocated
    collected.peak_bytes = max(collected.peak_bytes or 0, total)


def _computes(name: str) -> bool:
    """Tell operators from what only wraps them, as autograd's functions do, whose own time may be a wait in a hook."""
    return "::" in name and not name.startswith("autograd::") and not COMMUNICATION.match(name)


def _self_times(ordered: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Return name and self time of the nested operators of one thread, ordered by start, the longer first."""
    found: list[tuple[str, float]] = []
    stack: list[list[Any]] = []  # name, end, duration without callees

    def close(until: float) -> None:
        while stack and stack[-1][1] <= until:
            name, _, own = stack.pop()
            found.append((name, max(0.0, own)))

    for start, duration, name in ordered:
        close(start)
        if stack:
            stack[-1][2] -= duration
        stack.append([name, start + duration, duration])
    close(float("inf"))
    return found


def clip(intervals: list[Interval], window: list[Interval]) -> list[Interval]:
    """Return the parts of disjoint intervals that lie within disjoint others."""
    parts: list[Interval] = []
    position = 0
    for low, high in window:
        while position < len(intervals) and intervals[position][1] <= low:
            position += 1
        at = position
        while at < len(intervals) and intervals[at][0] < high:
            parts.append((max(low, intervals[at][0]), min(high, intervals[at][1])))
            at += 1
    return parts


def _extent(intervals: list[Interval]) -> list[Interval]:
    return [(min(start for start, _ in intervals), max(end for _, end in intervals))] if intervals else []


def _longest_gap(window: list[Interval], covered: list[Interval]) -> tuple[float, float]:
    """Return the longest stretch of the window that is not covered, and when it begins after the window's start."""
    best, best_at = 0.0, 0.0
    for low, high in window:
        edges = [low, *(edge for part in clip(covered, [(low, high)]) for edge in part), high]
        for left, right in zip(edges[::2], edges[1::2]):
            if right - left > max(best, _OPERATOR_FREE_US):
                best, best_at = right - left, left - window[0][0]
    return best, best_at
