"""A profiling tool of one's own: Python's cProfile, for what the host does between operators.

Named by `global_profiler.tool: examples/plugins/python_calls.py:PythonCalls`; `python -m pstats FILE` opens what it writes.
"""

import cProfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pellucid.observe.tools import Capture, ToolSettings


class PythonCalls:
    """Times every Python call of the thread that trains: one `.pstats` a capture."""

    def __init__(self, settings: ToolSettings) -> None:
        self._profile = cProfile.Profile()
        self._path: Path | None = None

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """Raise a `UserError` where the tool cannot work; this one always can."""

    def warm_up(self, capture: Capture) -> None:
        """Run without keeping anything; this one needs no warm-up."""

    def start(self, capture: Capture) -> None:
        """Begin to collect."""
        self._profile, self._path = cProfile.Profile(), capture.folder / f"{capture.name}.pstats"
        self._profile.enable()

    def range(self, name: str) -> AbstractContextManager[object]:
        """Show a stage or a unit in the capture; cProfile knows no ranges."""
        return nullcontext()

    def stop(self) -> list[Path]:
        """End the capture and return its files: none where the stage was over with the warm-up."""
        self._profile.disable()
        path, self._path = self._path, None
        if path is None:
            return []
        self._profile.dump_stats(path)
        return [path]
