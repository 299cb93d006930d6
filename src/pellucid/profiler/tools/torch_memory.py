"""Who holds memory: snapshots of CUDA's allocator, or on a CPU the allocations that PyTorch's profiler sees.

Both give a page for people and its figures as JSON for `pellucid profile report`; CUDA also a `.pickle` for torch's own viewers.
"""

import functools
import json
import logging
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from pellucid.errors import UserError
from pellucid.profiler.memory_page import page_of, report_of
from pellucid.profiler.memory_sources import Snapshot, changes_of_profile, changes_of_snapshot, trim_stacks
from pellucid.profiler.memory_use import MemoryUse, RangeLog, summarise
from pellucid.profiler.tools.base import Capture, ToolSettings

_log = logging.getLogger(__name__)
RSS_INTERVAL_S = 0.02


class TorchMemoryTool:
    """See `Tool`."""

    def __init__(self, settings: ToolSettings) -> None:
        options = settings.role_options.torch_memory
        recorder = _CudaRecorder if settings.device == "cuda" else _CpuRecorder
        self._recorder: _Recorder = recorder(options.trace_alloc_max_entries, options.stack_depth)
        self._capture: Capture | None = None
        self._ranges = RangeLog(None)
        self._rss = _RssSampler()
        self._started_ns = 0

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """See `Tool.check`.

        Raises:
            UserError: the device has no memory recorder.
        """
        if settings.device not in ("cpu", "cuda"):
            reason = f"torch_memory has no recorder for a device of type {settings.device}."
            raise UserError("global_profiler.tool", reason, "Use tool: npu, with `memory` among its contents.")

    def warm_up(self, capture: Capture) -> None:
        """See `Tool.warm_up`: nothing has to run before."""

    def start(self, capture: Capture) -> None:
        """See `Tool.start`."""
        self._ranges = RangeLog(capture.stage)
        self._started_ns = time.time_ns()
        self._recorder.start(_path(capture, "_oom.pickle"))
        self._rss.start()
        self._capture = capture

    def range(self, name: str) -> AbstractContextManager[object]:
        """See `Tool.range`."""
        return nullcontext() if self._capture is None else self._ranges.range(name)

    def stop(self) -> list[Path]:
        """See `Tool.stop`."""
        capture, self._capture = self._capture, None
        if capture is None:
            return []  # it was only warming up
        ended_ns = time.time_ns()
        rss = self._rss.stop(self._started_ns)
        files, use = self._recorder.stop(_path(capture, ".pickle"), self._ranges, self._started_ns, ended_ns)
        report = report_of(use, capture, self._recorder.device, rss, self._recorder.max_entries)
        for suffix, text in ((".html", page_of(report)), (".json", json.dumps(report))):
            path = _path(capture, suffix)
            path.write_text(text, encoding="utf-8")
            files.append(path)
        return files


def _path(capture: Capture, suffix: str) -> Path:
    folder = capture.folder / f"step{capture.step}"
    folder.mkdir(exist_ok=True)
    # The policy's ranks go unnamed; on other machines another pool's may have the same number and process id.
    of_step = "" if capture.role == "policy" else f"_{capture.role}"
    what = of_step if capture.stage is None else f"_{capture.stage}"
    what += f"_call{capture.call}" if capture.call > 1 else ""
    what += f"_window{capture.window}" if capture.window > 1 else ""
    return folder / f"torch_memory{what}_rank{capture.rank}_pid{capture.pid}{suffix}"


class _Recorder(Protocol):
    """Records what a device's memory is used for."""

    device: str
    max_entries: int

    def start(self, oom_path: Path) -> None:
        """Begin to record; on out-of-memory what was recorded goes to `oom_path`."""
        ...

    def stop(self, path: Path, ranges: RangeLog, started_ns: int, ended_ns: int) -> tuple[list[Path], MemoryUse]:
        """End, write what there is to write to `path`, and return the files and what they show."""
        ...


class _CpuRecorder:
    device = "cpu"

    def __init__(self, max_entries: int, stack_depth: int) -> None:
        self.max_entries, self._stack_depth = max_entries, stack_depth
        self._profile: _KinetoProfile | None = None

    def start(self, oom_path: Path) -> None:
        self._profile = _KinetoProfile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
        self._profile.start()

    def stop(self, path: Path, ranges: RangeLog, started_ns: int, ended_ns: int) -> tuple[list[Path], MemoryUse]:
        profile, self._profile = self._profile, None
        assert profile is not None
        profile.stop()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        changes = changes_of_profile(profile.profiler.kineto_results, self._stack_depth)
        return [], summarise(changes, ranges, started_ns, ended_ns, self.max_entries)


class _CudaRecorder:
    device = "cuda"

    def __init__(self, max_entries: int, stack_depth: int) -> None:
        self.max_entries, self._stack_depth = max_entries, stack_depth
        self._oom_path: Path | None = None

    def start(self, oom_path: Path) -> None:
        self._oom_path = oom_path
        # Of C++ frames alone each stack has more than the frames that are kept, which are the innermost.
        torch.cuda.memory._record_memory_history(
            "all", stacks="python", max_entries=self.max_entries, clear_history=True
        )
        _observe_out_of_memory()
        _on_out_of_memory.append(self._dump_out_of_memory)

    def stop(self, path: Path, ranges: RangeLog, started_ns: int, ended_ns: int) -> tuple[list[Path], MemoryUse]:
        _on_out_of_memory.remove(self._dump_out_of_memory)
        try:
            snapshot = self._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        _dump(snapshot, path)
        files = [path]
        if self._oom_path is not None and self._oom_path.exists():
            files.append(self._oom_path)
        changes, before = changes_of_snapshot(snapshot, torch.cuda.current_device())
        return files, summarise(changes, ranges, started_ns, ended_ns, self.max_entries, before)

    def _snapshot(self) -> Snapshot:
        snapshot: Any = torch.cuda.memory._snapshot()
        return trim_stacks(snapshot, self._stack_depth)

    def _dump_out_of_memory(self) -> None:
        assert self._oom_path is not None
        try:
            _dump(self._snapshot(), self._oom_path)
        except OSError as error:  # anything raised here would hide the out-of-memory error itself
            _log.warning("torch_memory: out of memory, and the snapshot of it cannot be written: %s", error)


def _dump(snapshot: Snapshot, path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(snapshot, file)


_on_out_of_memory: list[Callable[[], None]] = []
"""Whom to tell; empty while nothing is captured."""


@functools.cache
def _observe_out_of_memory() -> None:
    """Attach to CUDA's allocator, once in a process: it has no call to detach."""

    def tell(device: int, requested_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
        for dump in _on_out_of_memory:
            dump()

    vars(torch._C)["_cuda_attach_out_of_memory_observer"](tell)


class _RssSampler:
    """Samples the process's resident memory in a thread: it also counts what PyTorch did not allocate."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._samples: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._samples, self._ended = [], threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="torch_memory_rss", daemon=True)
        self._thread.start()

    def stop(self, started_ns: int) -> list[tuple[float, int]]:
        """Return seconds since `started_ns`, and bytes."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()
        return [((time_ns - started_ns) / 1e9, num_bytes) for time_ns, num_bytes in self._samples]

    def _run(self) -> None:
        while not self._ended.wait(RSS_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        self._samples.append((time.time_ns(), self._process.memory_info().rss))
