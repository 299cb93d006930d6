"""NVIDIA Nsight Systems: a process runs under `nsys profile` from its start; this tool opens and closes captures.

`observe/recording.py` starts processes that way. Stages and units are NVTX ranges of the domain `pellucid`; nsys writes
its files later. A process notes each capture beside the raw files as it begins, so that what a killed process leaves is
found, too.
"""

import importlib.util
import os
import shutil
import time
from contextlib import AbstractContextManager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from typing_extensions import override

from pellucid.errors import MissingExtraError, UserError
from pellucid.observe.manifest import add_entry
from pellucid.observe.nsys_process import PROBLEM, Recording, own_recording
from pellucid.observe.tools.base import Capture, Tool, ToolSettings, free_path

DOMAIN, CAPTURE_RANGE = "pellucid", "capture"
"""NVTX domain of all ranges, and the range in it that opens a capture where CUDA's own calls cannot."""
REPORT, UNCONVERTED = ".nsys-rep", ".qdstrm"
"""Suffixes of its files, and of those that it could not convert."""
_numbers = count(1)
NSYS_KEY = "global_profiler.global_tool_config.nsys"


class NsysTool(Tool):
    """Opens and closes the captures of the nsys that records this process."""

    def __init__(self, settings: ToolSettings) -> None:
        self._recording = own_recording()
        self._path = Path()
        self._ranges: list[Any] = []

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether nsys is here, and has not failed to start this process."""
        check_nsys()

    @override
    def start(self, capture: Capture) -> None:
        """Open a capture.

        Raises:
            UserError: no nsys records this process.
        """
        if self._recording is None:
            reason = "nsys: this process was not started under nsys, which records nothing of it."
            remedy = "Start the run with `pellucid train` on machines that all have nsys on PATH."
            raise UserError("global_profiler.tool", reason, remedy)
        self._path = note_capture(self._recording, capture)
        if self._recording.capture_range == "cudaProfilerApi":
            import torch

            torch.cuda.profiler.start()
        elif self._recording.capture_range == "nvtx":
            self._open(CAPTURE_RANGE)
        self._open(f"step_{capture.step}")

    @override
    def range(self, name: str) -> AbstractContextManager[object]:
        """Return an NVTX range."""
        import nvtx

        return nvtx.annotate(name, domain=DOMAIN)

    @override
    def stop(self) -> list[Path]:
        """Close the capture, and return the name of the file that nsys writes later."""
        import nvtx

        if not self._ranges:
            return []  # it was only warming up
        while self._ranges:
            nvtx.end_range(self._ranges.pop())
        if self._recording is not None and self._recording.capture_range == "cudaProfilerApi":
            import torch

            torch.cuda.profiler.stop()
        return [self._path]

    def _open(self, name: str) -> None:
        """Open a range of the whole process: a capture may end in another thread than it began."""
        import nvtx

        self._ranges.append(nvtx.start_range(name, domain=DOMAIN))


def check_nsys() -> None:
    """Find out whether nsys and the package `nvtx` are here.

    Raises:
        UserError: nsys is not on PATH, or did not start this process as it was asked to.
        MissingExtraError: nvtx is not installed.
    """
    if shutil.which("nsys") is None:
        remedy = "Install NVIDIA Nsight Systems (Debian: nsight-systems in non-free), or take the tool torch."
        raise UserError("global_profiler.tool", "nsys: the program `nsys` is not on PATH.", remedy)
    if importlib.util.find_spec("nvtx") is None:
        raise MissingExtraError("global_profiler.tool", "nvtx", "profile")
    if own_recording() is None and (problem := os.environ.get(PROBLEM)) is not None:
        raise UserError(NSYS_KEY, problem, "See `nsys profile --help` for the options that this version takes.")


def note_capture(recording: Recording, capture: Capture) -> Path:
    """Write down that a capture of this process begins, and return the path that its file will have."""
    number, raw = next(_numbers), Path(recording.raw)
    if recording.capture_range is None:
        kind = "controller" if raw.name == "controller" else "worker"
        name = f"{kind}_process_{capture.pid}"
    else:
        name = f"worker_process_{capture.pid}.{capture.step if capture.stage is None else number}"
    suffix = REPORT if importer() is not None else UNCONVERTED
    path = free_path(capture.folder.absolute() / (name + suffix))
    if recording.capture_range is None and number > 1:
        return path  # one file holds all, and is named after the first
    add_entry(raw.parent, raw.name, capture.file(str(path), None, "nsys", raw.name, time.time()))
    return path


@cache
def importer() -> str | None:
    """Return the program that makes a report of what nsys collected; None where it is not installed.

    It is beside the folder of nsys itself; Debian puts it where its own nsys does not look for it.
    """
    nsys, on_path = shutil.which("nsys"), shutil.which("QdstrmImporter")
    places = [Path(nsys).resolve().parents[1], Path("/usr/lib/nsight-systems")] if nsys else []
    beside = (str(found) for place in places for found in place.glob("host-linux-*/QdstrmImporter"))
    return on_path or next(beside, None)
