"""Who holds memory: snapshots of CUDA's allocator, or on a CPU the allocations that PyTorch's profiler sees.

Both give a page for people and its figures as JSON; CUDA also a `.pickle` for torch's own viewers.
"""

import functools
import json
import logging
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile
from typing_extensions import override

from pellucid.errors import UserError
from pellucid.observe.memory_changes import Change, Snapshot, changes_of_profile, changes_of_snapshot, trim_stacks
from pellucid.observe.memory_use import RangeLog, figures, memory_page
from pellucid.observe.tools.base import Capture, Tool, ToolSettings

_log = logging.getLogger(__name__)
Recorded = tuple[list[Path], list[Change]]
"""Files, and allocations and frees."""


class TorchMemoryTool(Tool):
    """Records what this process allocates and frees; a capture gives `torch_memory….html` and `.json` in `step<S>/`."""

    def __init__(self, settings: ToolSettings) -> None:
        self._options, self._device = settings.role_options.torch_memory, settings.device
        self._capture: Capture | None = None
        self._end: Callable[[], Recorded]
        self._ranges = RangeLog(None)
        self._started_ns = 0

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether the device has a memory recorder.

        Raises:
            UserError: it has none.
        """
        if settings.device not in ("cpu", "cuda"):
            reason = f"torch_memory has no recorder for a device of type {settings.device}."
            raise UserError("global_profiler.tool", reason, "Use tool: npu, with `memory` among its contents.")

    @override
    def start(self, capture: Capture) -> None:
        """Begin to record."""
        self._ranges, self._started_ns = RangeLog(capture.stage), time.time_ns()
        max_entries, stack_depth = self._options.trace_alloc_max_entries, self._options.stack_depth
        if self._device == "cuda":
            self._end = _record_cuda(_path(capture, ""), max_entries, stack_depth)
        else:
            self._end = _record_cpu(stack_depth)
        self._capture = capture

    @override
    def range(self, name: str) -> AbstractContextManager[object]:
        """Note which stage or unit runs, for the allocations in it."""
        return nullcontext() if self._capture is None else self._ranges.range(name)

    @override
    def stop(self) -> list[Path]:
        """End the recording, and write the page, its figures, and on CUDA the snapshot."""
        capture, self._capture = self._capture, None
        if capture is None:
            return []  # it was only warming up
        files, changes = self._end()
        use = {"device": self._device} | figures(changes, self._ranges, self._started_ns)
        what = f"Memory of step {capture.step}, {capture.stage or 'whole step'}"
        title = f"{what}, rank {capture.rank} of {capture.num_ranks}, process {capture.pid}, {self._device}"
        for suffix, text in ((".html", memory_page(title, use)), (".json", json.dumps(use))):
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


def _record_cpu(stack_depth: int) -> Callable[[], Recorded]:
    """Begin to record the CPU's memory, and return what ends it."""
    profile = _KinetoProfile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
    profile.start()

    def end() -> Recorded:
        profile.stop()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        return [], changes_of_profile(profile.profiler.kineto_results, stack_depth)

    return end


def _record_cuda(stem: Path, max_entries: int, stack_depth: int) -> Callable[[], Recorded]:
    """Begin to record the GPU's memory, on out-of-memory into `…_oom.pickle`, and return what ends it."""
    path, oom_path = (stem.with_name(f"{stem.name}{suffix}") for suffix in (".pickle", "_oom.pickle"))
    # Of C++ frames alone each stack has more than the frames that are kept, which are the innermost.
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=max_entries, clear_history=True)
    _observe_out_of_memory()

    def snapshot() -> Snapshot:
        taken: Any = torch.cuda.memory._snapshot()
        return trim_stacks(taken, stack_depth)

    def dump_out_of_memory() -> None:
        try:
            oom_path.write_bytes(pickle.dumps(snapshot()))
        except OSError as error:  # anything raised here would hide the out-of-memory error itself
            _log.warning("torch_memory: out of memory, and the snapshot of it cannot be written: %s", error)

    _on_out_of_memory.append(dump_out_of_memory)

    def end() -> Recorded:
        _on_out_of_memory.remove(dump_out_of_memory)
        try:
            taken = snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        path.write_bytes(pickle.dumps(taken))
        files = [path, oom_path] if oom_path.exists() else [path]
        return files, changes_of_snapshot(taken, torch.cuda.current_device())

    return end


_on_out_of_memory: list[Callable[[], None]] = []
"""Whom to tell; empty while nothing is captured."""


@functools.cache
def _observe_out_of_memory() -> None:
    """Attach to CUDA's allocator, once in a process: it has no call to detach."""

    def tell(device: int, requested_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
        for dump in _on_out_of_memory:
            dump()

    vars(torch._C)["_cuda_attach_out_of_memory_observer"](tell)
