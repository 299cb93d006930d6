"""Who holds memory: on CUDA a snapshot of its allocator for torch's own viewers (https://pytorch.org/memory_viz), on a
CPU the allocations that PyTorch's profiler sees, as a page for people and its figures as JSON.
"""

import functools
import json
import logging
import pickle
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile
from typing_extensions import override

from pellucid.errors import UserError
from pellucid.observe.memory_use import RangeLog, changes_of_profile, figures, memory_page
from pellucid.observe.tools.base import Capture, Tool, ToolSettings

_log = logging.getLogger(__name__)


class TorchMemoryTool(Tool):
    """Records what this process allocates and frees; a capture's files are in `step<S>/`."""

    def __init__(self, settings: ToolSettings) -> None:
        self._options, self._device = settings.role_options.torch_memory, settings.device
        self._capture: Capture | None = None
        self._profile: _KinetoProfile | None = None
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
        if self._device == "cuda":
            # Of C++ frames alone each stack has more than the frames that are kept, which are the innermost.
            limit = self._options.trace_alloc_max_entries
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=limit, clear_history=True)
            _observe_out_of_memory()
            _recording.append((_path(capture, "_oom.pickle"), self._options.stack_depth))
        else:
            profile = _KinetoProfile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
            profile.start()
            self._profile = profile
        self._capture = capture

    @override
    def range(self, name: str) -> AbstractContextManager[object]:
        """Note which stage or unit runs, for the allocations in it."""
        return self._ranges.range(name)

    @override
    def stop(self) -> list[Path]:
        """End the recording, and write its files."""
        capture, self._capture = self._capture, None
        if capture is None:
            return []  # it was only warming up
        return self._stop_cuda(capture) if self._device == "cuda" else self._stop_cpu(capture)

    def _stop_cuda(self, capture: Capture) -> list[Path]:
        oom_path, stack_depth = _recording.pop()
        try:
            _write_snapshot(path := _path(capture, ".pickle"), stack_depth)
        finally:
            torch.cuda.memory._record_memory_history(None)
        return [path, oom_path] if oom_path.exists() else [path]

    def _stop_cpu(self, capture: Capture) -> list[Path]:
        profile, self._profile = self._profile, None
        assert profile is not None
        profile.stop()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        changes = changes_of_profile(profile.profiler.kineto_results, self._options.stack_depth)
        use = figures(changes, self._ranges, self._started_ns)
        what = f"Memory of step {capture.step}, {capture.stage or 'whole step'}"
        title = f"{what}, rank {capture.rank} of {capture.num_ranks}, process {capture.pid}, cpu"
        page, data = _path(capture, ".html"), _path(capture, ".json")
        page.write_text(memory_page(title, use), encoding="utf-8")
        data.write_text(json.dumps(use), encoding="utf-8")
        return [page, data]


def _path(capture: Capture, suffix: str) -> Path:
    folder = capture.folder / f"step{capture.step}"
    folder.mkdir(exist_ok=True)
    # The policy's ranks go unnamed; on other machines another pool's may have the same number and process id.
    of_step = "" if capture.role == "policy" else f"_{capture.role}"
    what = of_step if capture.stage is None else f"_{capture.stage}"
    return folder / f"torch_memory{what}{capture.again}_rank{capture.rank}_pid{capture.pid}{suffix}"


def _write_snapshot(path: Path, stack_depth: int) -> None:
    """Write what CUDA's allocator holds and did, each stack cut to its innermost frames."""
    snapshot: Any = torch.cuda.memory._snapshot()
    path.write_bytes(pickle.dumps(trim_stacks(snapshot, stack_depth)))


def trim_stacks(snapshot: dict[str, Any], stack_depth: int) -> dict[str, Any]:
    """Cut all stacks of a CUDA snapshot, in place, to the innermost `stack_depth` frames, and return it."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for holder in (*snapshot["segments"], *blocks, *(entry for trace in snapshot["device_traces"] for entry in trace)):
        del holder.get("frames", [])[stack_depth:]
    return snapshot


_recording: list[tuple[Path, int]] = []
"""Where a snapshot goes when memory runs out, and how deep its stacks are; empty while nothing is captured."""


@functools.cache
def _observe_out_of_memory() -> None:
    """Attach to CUDA's allocator, once in a process: it has no call to detach."""

    def dump(device: int, requested_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
        for path, stack_depth in _recording:
            try:
                _write_snapshot(path, stack_depth)
            except OSError as error:  # anything raised here would hide the out-of-memory error itself
                _log.warning("torch_memory: out of memory, and the snapshot of it cannot be written: %s", error)

    vars(torch._C)["_cuda_attach_out_of_memory_observer"](dump)
