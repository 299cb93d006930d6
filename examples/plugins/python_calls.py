"""A profiling tool of one's own: Python's cProfile, for what the host does between operators.

Named by `global_profiler.tool: examples/plugins/python_calls.py:PythonCalls`; `python -m pstats FILE` opens what it writes.
"""

import cProfile
from pathlib import Path

from pellucid.observe.tools import Capture, Tool, ToolSettings


class PythonCalls(Tool):
    """Times every Python call of the thread that trains: one `.pstats` a capture."""

    def __init__(self, settings: ToolSettings) -> None:
        self._profile = cProfile.Profile()
        self._path: Path | None = None

    def start(self, capture: Capture) -> None:
        """Begin to collect."""
        self._path = capture.folder / f"{capture.name}.pstats"
        self._profile.enable()

    def stop(self) -> list[Path]:
        """End the capture and return its files: none where the stage was over with the warm-up."""
        self._profile.disable()
        if self._path is None:
            return []
        self._profile.dump_stats(self._path)
        return [self._path]
