"""Captures of rollout engines that have processes of their own, each by its engine's own means.

An engine records itself and writes the files; what is done here is to ask for it, and to give the files their names.
"""

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from pellucid.observe.tools.base import Capture, KeptInPartError, Tool, ToolSettings, free_path
from pellucid.observe.tools.torch_trace import TorchTool

Result = TypeVar("Result")
_WORKER = "pellucid.precision.vllm_capture"


def ask(call: Coroutine[Any, Any, Result]) -> Result:
    """Return what an engine answers, whether or not an event loop runs in this thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="engine capture") as thread:
        return thread.submit(asyncio.run, call).result()


class EngineTraceTool(Tool):
    """PyTorch's profiler in the engine's processes, by the engine's own profiler; a process gives one trace."""

    def __init__(self, settings: ToolSettings) -> None:
        """Get ready for a capture; what is collected was said to the engine when it started."""
        self._capture: Capture | None = None

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        TorchTool.check(settings)

    @override
    def start(self, capture: Capture) -> None:
        assert capture.engine is not None
        ask(capture.engine.start_profile(capture.folder, capture.skip_steps, capture.num_steps))
        self._capture = capture

    @override
    def stop(self) -> list[Path]:
        capture, files = self._capture, list[Path]()
        assert capture is not None and capture.engine is not None
        written = ask(capture.engine.stop_profile())
        for number, file in enumerate(written):
            of = f"_worker{number}" if len(written) > 1 else ""
            ends = ".json.gz" if file.suffix == ".gz" else ".json"
            files.append(file.replace(free_path(capture.folder / f"{capture.name}{of}{ends}")))
        return files


class EnginePrecisionTool(Tool):
    """Statistics of what vLLM's modules compute, by hooks in its workers, under the names of the trainer's modules."""

    def __init__(self, settings: ToolSettings) -> None:
        self._device = settings.device
        self._capture: Capture | None = None
        self._folder = Path()

    @override
    def start(self, capture: Capture) -> None:
        assert capture.engine is not None and capture.stage is not None
        folder = capture.folder / f"step_{capture.step}" / capture.stage
        number = next(k for k in count() if not (folder / f"step{k}" / "rank0").exists())
        about = {
            "backend": "native", "level": "L0", "stage": str(capture.stage), "step": capture.step,
            "role": capture.role, "call": number, "device": self._device, "engine": "vllm", "started_at": time.time(),
        }  # fmt: skip
        ask(capture.engine.look_inside(f"{_WORKER}:begin", about, capture.skip_steps, capture.num_steps))
        self._capture, self._folder = capture, folder / f"step{number}" / "rank0"

    @override
    def stop(self) -> list[Path]:
        assert self._capture is not None and self._capture.engine is not None
        answers = ask(self._capture.engine.look_inside(f"{_WORKER}:end", str(self._folder.absolute())))
        files = [Path(file) for mine, _ in answers for file in mine]
        if (error := next((error for _, error in answers if error), None)) is not None:
            raise KeptInPartError(RuntimeError(error), files)
        return files
