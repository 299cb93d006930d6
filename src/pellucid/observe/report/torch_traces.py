"""What traces of PyTorch's profiler say of one process: which operators took the time, and how much was communication.

Of traces with GPU kernels HolisticTraceAnalysis says where the GPU's time went.
"""

import gzip
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.errors import MissingExtraError
from pellucid.observe.manifest import ProfileFile
from pellucid.observe.report.stage_work import Interval, length, overlap

TOP_KERNELS = 10
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_COMMUNICATION = re.compile(r"^(c10d::|gloo:|nccl|record_param_comms|hccl)", re.IGNORECASE)


class TraceError(ValueError):
    """A file is no trace, or ends in the middle of one."""


@dataclass(slots=True)
class Capture:
    """What one trace says; times are seconds."""

    file: ProfileFile
    wall_s: float
    """Of the captured stage or units; where there is none, from the first operator to the last."""
    compute_s: float
    """The main thread is in an operator that computes."""
    exposed_s: float
    """A collective runs and the main thread computes nothing."""
    operators: dict[str, tuple[float, int]]
    """By name: seconds without the operators that it calls, and how many calls."""
    num_kernels: int
    gpu: dict[str, float] = field(default_factory=dict)
    """Shares of the time from its GPU's first kernel to its last: `compute`, `non_compute` (communication and copies
    that overlap no computation) and `idle`; empty without kernels."""

    @property
    def what(self) -> str:
        """The stage, or `step`."""
        return self.file.stage or "step"

    @property
    def name(self) -> str:
        """The process as people call it."""
        return self.file.process.replace("_", " ")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel in one capture."""

    name: str
    capture: Capture
    kind: str
    """COMPUTATION, COMMUNICATION or MEMORY."""
    total_s: float
    mean_s: float


def open_trace(path: Path) -> tuple[float, list[dict[str, Any]]]:
    """Return what is added to a trace's times to get microseconds since 1970, and its events in the order of the file.

    Raises:
        TraceError: it is no trace, or not whole.
    """
    try:
        with gzip.open(path, "rt", errors="replace") if path.suffix == ".gz" else path.open(errors="replace") as file:
            trace = json.load(file)
        return trace.get("baseTimeNanoseconds", 0) / 1e3, trace["traceEvents"]
    except (EOFError, gzip.BadGzipFile, json.JSONDecodeError, KeyError) as error:
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from error


def read_capture(file: ProfileFile, path: Path) -> Capture:
    """Read one trace and work out its figures.

    Raises:
        TraceError: the file is torn.
    """
    operators: dict[int, list[tuple[float, float, str]]] = defaultdict(list)  # by thread: start, -duration, name
    communication: list[Interval] = []
    captured: list[Interval] = []
    num_kernels = 0
    wanted = file.units["unit"] if file.units else file.stage
    for event in open_trace(path)[1]:
        category, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X" or "dur" not in event:
            continue
        start, duration = event["ts"], event["dur"]
        if category == "cpu_op":
            operators[event["tid"]].append((start, -duration, name))
        if category == "user_annotation" and name == wanted:
            captured.append((start, start + duration))
        if category in ("user_annotation", "cpu_op", "kernel") and _COMMUNICATION.match(name):
            communication.append((start, start + duration))
        num_kernels += category == "kernel"
    main = max(operators.values(), key=len, default=[])
    if main and not captured:
        captured.append((min(main)[0], max(start - less for start, less, _ in main)))
    computing = [(start, start - less) for start, less, name in main if _computes(name)]
    compute_us = overlap(computing, captured)
    return Capture(
        file=file,
        wall_s=length(captured) / 1e6,
        compute_s=compute_us / 1e6,
        exposed_s=max(0.0, overlap([*computing, *communication], captured) - compute_us) / 1e6,
        operators=_self_times(operators.values()),
        num_kernels=num_kernels,
    )


def _computes(name: str) -> bool:
    """Tell operators from what only wraps them, as autograd's functions do, whose own time may be a wait in a hook."""
    return "::" in name and not name.startswith("autograd::") and not _COMMUNICATION.match(name)


def _self_times(threads: Iterable[list[tuple[float, float, str]]]) -> dict[str, tuple[float, int]]:
    """Return by operator the seconds without those of the operators that it calls, and its calls."""
    self_us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for operators in threads:
        callers: list[tuple[float, str]] = []  # when the operator ends, and its name; the innermost last
        for start, less, name in sorted(operators):
            while callers and callers[-1][0] <= start:
                callers.pop()
            if callers:
                self_us[callers[-1][1]] += less
            callers.append((start - less, name))
            self_us[name] -= less
            calls[name] += 1
    return {name: (us / 1e6, calls[name]) for name, us in self_us.items()}


def analyse_kernels(captures: list[Capture], folder: Path) -> list[KernelTime]:
    """Work out by HolisticTraceAnalysis what the GPU of each capture did, and return the largest kernels.

    Args:
        captures: with kernels; all ranks that captured the same at the same time are looked at together.
        folder: the manifest's, below which the files lie.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        raise MissingExtraError("profile report", "HolisticTraceAnalysis", "profile") from error

    logging.getLogger("hta").setLevel(logging.ERROR)
    together: dict[tuple[object, ...], dict[int, Capture]] = defaultdict(dict)
    for capture in captures:
        file = capture.file
        together[file.role, file.stage, file.step, file.call, file.window][file.rank] = capture
    kernels: list[KernelTime] = []
    for by_rank in together.values():
        files = {rank: str((folder / capture.file.path).absolute()) for rank, capture in by_rank.items()}
        analysis = TraceAnalysis(trace_files=files)
        for row in analysis.get_temporal_breakdown(visualize=False).to_dict("records"):
            shares = {what: float(row[f"{what}_time_pctg"]) / 100 for what in ("compute", "non_compute", "idle")}
            by_rank[int(row["rank"])].gpu = shares
        _, by_kernel = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=TOP_KERNELS)
        for row in by_kernel.to_dict("records"):
            times = (float(row[f"{what} (us)"]) / 1e6 for what in ("sum", "mean"))
            kernels.append(KernelTime(str(row["name"]), by_rank[int(row["rank"])], str(row["kernel_type"]), *times))
    kernels = [kernel for kernel in kernels if kernel.name != "others"]
    return sorted(kernels, key=lambda kernel: -kernel.total_s)[:TOP_KERNELS]
