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
from typing_extensions import override

from pellucid.errors import UserError
from pellucid.observe.tools.base import Capture, Tool, ToolSettings, free_path

_INJECTED = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


class TorchTool(Tool):
    """Records with PyTorch's profiler; a capture gives one trace."""

    def __init__(self, settings: ToolSettings) -> None:
        contents = set(settings.role_options.torch.contents)
        if not contents & {"cpu", "cuda"}:
            contents |= {"cpu", "cuda"} if settings.device == "cuda" else {"cpu"}
        names = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
        self._profile = _KinetoProfile(
            activities=[activity for name, activity in names.items() if name in contents],
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
            with_modules="module" in contents,
        )
        self._is_warm = False
        self._capture: Capture | None = None

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether the profiler can see what it is asked for.

        Raises:
            UserError: another profiler holds CUPTI, through which kernels are seen; or there is nothing to collect.
        """
        if settings.device != "cuda" and set(settings.role_options.torch.contents) & {"cpu", "cuda"} == {"cuda"}:
            reason = f"asks for cuda alone, and the run is on {settings.device}: nothing would be collected."
            raise UserError("tool_config.torch.contents", reason, "Add cpu, or leave the list empty.")
        holder = next((name for name in _INJECTED if name in os.environ), None)
        if settings.device == "cuda" and holder is not None:
            reason = f"torch cannot see kernels while another profiler is attached to the process ({holder} is set)."
            raise UserError("global_profiler.tool", reason, "Start the run without it, or use tool: nsys.")

    @override
    def warm_up(self, capture: Capture) -> None:
        self._profile.prepare_trace()
        self._is_warm = True

    @override
    def start(self, capture: Capture) -> None:
        if not self._is_warm:
            self._profile.prepare_trace()
        self._capture = capture
        self._profile.start_trace()
        if not torch.distributed.is_initialized():  # readers of traces of several ranks expect it
            about = {"backend": "none", "rank": capture.rank, "world_size": capture.num_ranks, "pg_count": 0}
            self._profile.add_metadata_json("distributedInfo", json.dumps(about))

    @override
    def range(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)

    @override
    def stop(self) -> list[Path]:
        if self._capture is None:  # it was only warming up, which torch ends in no other way
            self._profile.start_trace()
            self._profile.stop_trace()
            return []
        self._profile.stop_trace()
        path = free_path(self._capture.folder / f"{self._capture.name}.json.gz")
        plain, partial = path.with_suffix(".partial"), path.with_suffix(".partial.gz")
        try:
            self._profile.export_chrome_trace(str(plain))
            # torch's own way to a .gz compresses as well as it can, which takes ten times as long for 30% less.
            with plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, length=1024**2)
            partial.replace(path)
        finally:
            plain.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
        return [path]
