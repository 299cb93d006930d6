"""Answers about the device by HolisticTraceAnalysis: what a GPU's time went to, kernel by kernel, rank by rank.

It reads traces that hold GPU kernels; of others `kernel_table.py` says what there is to say.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pellucid.errors import MissingExtraError
from pellucid.observe.report.kernel_table import CaptureStats

TOP_KERNELS = 10


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """One GPU in one capture; the shares are of the time from its first kernel to its last."""

    process: str
    what: str
    """The stage, or `step`."""
    step: int
    compute_share: float
    other_share: float
    """Communication and copies that overlap no computation."""
    idle_share: float
    overlap_share: float | None
    """Of the communication, that ran beside computation; None where one GPU has nothing to communicate."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel in one capture."""

    name: str
    process: str
    what: str
    kind: str
    """COMPUTATION, COMMUNICATION or MEMORY."""
    total_s: float
    mean_s: float


def device_times(captures: list[CaptureStats], folder: Path) -> tuple[list[DeviceTime], list[KernelTime]]:
    """Return device times and the largest kernels of captures that hold kernels.

    Args:
        captures: with kernels; all ranks that captured the same at the same time are looked at together.
        folder: the manifest's, below which the files lie.

    Raises:
        MissingExtraError: HolisticTraceAnalysis is not installed.
    """
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        raise MissingExtraError("profile report", "HolisticTraceAnalysis", "profile") from error

    logging.getLogger("hta").setLevel(logging.ERROR)
    together: dict[tuple[str, int, str, int, int], dict[int, CaptureStats]] = defaultdict(dict)
    for capture in captures:
        file = capture.file
        together[capture.what, file.step, file.role, file.call, file.window][file.rank] = capture
    devices: list[DeviceTime] = []
    kernels: list[KernelTime] = []
    for (what, step, *_), by_rank in together.items():
        files = {rank: str((folder / capture.file.path).absolute()) for rank, capture in by_rank.items()}
        analysis = TraceAnalysis(trace_files=files)
        overlap = {}
        if any(capture.communication_s for capture in by_rank.values()):
            frame = analysis.get_comm_comp_overlap(visualize=False)
            overlap = dict(zip(frame["rank"], frame["comp_comm_overlap_pctg"]))
        for row in analysis.get_temporal_breakdown(visualize=False).to_dict("records"):
            devices.append(
                DeviceTime(
                    process=by_rank[int(row["rank"])].name,
                    what=what,
                    step=step,
                    compute_share=float(row["compute_time_pctg"]) / 100,
                    other_share=float(row["non_compute_time_pctg"]) / 100,
                    idle_share=float(row["idle_time_pctg"]) / 100,
                    overlap_share=float(overlap[row["rank"]]) / 100 if row["rank"] in overlap else None,
                )
            )
        _, by_kernel = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=TOP_KERNELS)
        kernels += [
            KernelTime(
                name=str(row["name"]),
                process=by_rank[int(row["rank"])].name,
                what=what,
                kind=str(row["kernel_type"]),
                total_s=float(row["sum (us)"]) / 1e6,
                mean_s=float(row["mean (us)"]) / 1e6,
            )
            for row in by_kernel.to_dict("records")
            if row["name"] != "others"
        ]
    return devices, sorted(kernels, key=lambda kernel: -kernel.total_s)[:TOP_KERNELS]
