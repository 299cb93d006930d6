"""PyTorch's profiler: operators, kernels, shapes, memory and stacks of one process, as a Chrome trace.

A capture gives one `.json.gz`, for Perfetto, `pellucid profile report`, TensorBoard or HolisticTraceAnalysis.
"""

import gzip
import json
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from pellucid.errors import UserError
from pellucid.observe.tools.base import Capture, ToolSettings, free_path

_INJECTED = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


class TorchTool:
    """Records with PyTorch's profiler; a capture gives one trace."""

    def __init__(self, settings: ToolSettings) -> None:
        contents = set(settings.role_options.torch.contents)
        if not contents & {"cpu", "cuda"}:
            contents |= {"cpu", "cuda"} if settings.device == "cuda" else {"cpu"}
        names = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
        self._activities = [activity for name, activity in names.items() if name in contents]
        self._contents = contents
        self._profile: _KinetoProfile | None = None
        self._capture: Capture | None = None

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether the profiler can see what it is asked for.

        Raises:
            UserError: another profiler holds CUPTI, through which kernels are seen; or there is nothing to collect.
        """
        if settings.device != "cuda" and set(settings.role_options.torch.contents) & {"cpu", "cuda"} == {"cuda"}:
            raise UserError(
                "tool_config.torch.contents",
                f"asks for cuda alone, and the run is on {settings.device}: nothing would be collected.",
                "Add cpu, or leave the list empty.",
            )
        holder = next((name for name in _INJECTED if name in os.environ), None)
        if settings.device == "cuda" and holder is not None:
            raise UserError(
                "global_profiler.tool",
                f"torch cannot see kernels while another profiler is attached to the process ({holder} is set).",
                "Start the run without it, or use tool: nsys.",
            )

    def warm_up(self, capture: Capture) -> None:
        """Let the profiler run without keeping anything."""
        self._profile = _KinetoProfile(
            activities=self._activities,
            record_shapes="shapes" in self._contents,
            profile_memory="memory" in self._contents,
            with_stack="stack" in self._contents,
            with_modules="module" in self._contents,
        )
        self._profile.prepare_trace()

    def start(self, capture: Capture) -> None:
        """Begin to collect."""
        if self._profile is None:
            self.warm_up(capture)
        assert self._profile is not None
        self._capture = capture
        self._profile.start_trace()
        if not torch.distributed.is_initialized():  # readers of traces of several ranks expect it
            about = {"backend": "none", "rank": capture.rank, "world_size": capture.num_ranks, "pg_count": 0}
            self._profile.add_metadata_json("distributedInfo", json.dumps(about))

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a range of the trace."""
        return record_function(name)

    def stop(self) -> list[Path]:
        """End the capture and write its trace, compressed."""
        profile, self._profile = self._profile, None
        capture, self._capture = self._capture, None
        assert profile is not None
        if capture is None:  # it was only warming up, which torch ends in no other way
            profile.start_trace()
            profile.stop_trace()
            return []
        profile.stop_trace()
        path = free_path(capture.folder / f"{capture.name}.json.gz")
        plain, partial = path.with_suffix(".partial"), path.with_suffix(".partial.gz")
        try:
            profile.export_chrome_trace(str(plain))
            # torch's own way to a .gz compresses as well as it can, which takes ten times as long for 30% less.
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, length=1024**2)
            partial.replace(path)
        finally:
            plain.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
        return [path]
