"""One span primitive: `with spans.span(Stage.REWARD):` feeds the step's timing metrics and the process's timeline.

Each process owns a `SpanRecorder`; `step_timings()` empties into metrics once a step. The timeline is a file of trace events that
Perfetto reads; `pellucid profile` merges and reports those of all processes.
"""

import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


class _CoreQueue(threading.local):
    """How long the calling thread has been ready to run without getting a core; the kernel counts it on Linux alone."""

    def __init__(self) -> None:
        try:
            self._file = io.FileIO("/proc/thread-self/schedstat")
        except OSError:
            self._file = None

    def seconds(self) -> float | None:
        """Return the seconds since the thread's start; None where nobody counts."""
        return None if self._file is None else int(os.pread(self._file.fileno(), 64, 0).split()[1]) / 1e9


class SpanRecorder:
    """Records spans of one process: durations by name for the current step, and events for the timeline."""

    def __init__(self, trace_path: Path | None = None, process: str = "controller") -> None:
        """Append to `trace_path`, from the first span on; without one only durations are kept.

        `process` is what people call it: `policy rank 0`.
        """
        self._durations_s: dict[str, float] = {}
        self._path, self._process = trace_path, process
        self._trace: TextIO | None = None
        self._pid, self._offset_us = os.getpid(), 0.0
        self._queue = _CoreQueue()

    def set_clock(self, offset_us: float) -> None:
        """Note by how much the controller's clock is ahead of this process's."""
        self._offset_us = offset_us
        if self._trace is not None:
            self._introduce(self._trace)

    def _introduce(self, trace: TextIO) -> None:
        about = {"name": self._process, "host": socket.gethostname(), "clock_offset_us": self._offset_us}
        trace.write(json.dumps({"name": "process_name", "ph": "M", "pid": self._pid, "args": about}) + ",\n")

    @contextmanager
    def span(self, name: str, **args: str | int | float) -> Iterator[None]:
        """Time the enclosed block as one of the step's timings; recorded even when the block raises."""
        start = time.perf_counter()
        try:
            with self.detail(name, **args):
                yield
        finally:
            self._durations_s[name] = self._durations_s.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def detail(self, name: str, **args: str | int | float) -> Iterator[None]:
        """Show the enclosed block on the timeline alone.

        With the processor time of the whole process in `cpu_s`, and in `queued_s` how long this thread waited for a core: what is
        neither, it waited for something else.
        """
        if self._path is None:
            yield
            return
        wall_us, start, cpu, queued = time.time_ns() // 1000, time.perf_counter(), time.process_time(), self._queue.seconds()
        try:
            yield
        finally:
            used = {"cpu_s": round(time.process_time() - cpu, 6)}
            if queued is not None:
                used["queued_s"] = round((self._queue.seconds() or 0.0) - queued, 6)
            self._show(name, wall_us, time.perf_counter() - start, 0, used | args)

    def record(self, name: str, wall_us: int, duration_s: float, *, lane: int = 0, **args: str | int | float) -> None:
        """Show on the timeline what has happened elsewhere.

        Args:
            name: of the span.
            wall_us: when it began, microseconds since 1970.
            duration_s: how long it took.
            lane: row of the process's timeline; spans of one row must nest.
            args: what is shown with it.
        """
        self._show(name, wall_us, duration_s, lane, args)

    def _show(self, name: str, wall_us: int, duration_s: float, lane: int, args: dict[str, str | int | float]) -> None:
        duration_us = round(duration_s * 1e6)
        self._write(
            {"name": name, "ph": "X", "ts": wall_us, "dur": duration_us, "pid": self._pid, "tid": lane, "args": args}
        )

    def _write(self, event: dict[str, object]) -> None:
        if self._path is None:
            return
        if self._trace is None:
            self._trace = self._open(self._path)
        self._trace.write(json.dumps(event) + ",\n")

    def _open(self, path: Path) -> TextIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        resumed = path.exists()
        trace = path.open("a", encoding="utf-8")
        # The JSON array format of the trace viewers allows a missing "]", so a killed run stays readable.
        trace.write("\n" if resumed else "[\n")  # below what may be half a line
        self._introduce(trace)
        return trace

    def flush(self) -> None:
        """Hand what was recorded to the operating system, so that a kill loses none of it."""
        if self._trace is not None:
            self._trace.flush()

    def step_timings(self) -> dict[str, float]:
        """Return `timing_s/<stage>` since the last call, and start afresh."""
        timings = {f"timing_s/{name}": duration for name, duration in self._durations_s.items()}
        self._durations_s = {}
        self.flush()
        return timings

    def close(self) -> None:
        """Flush and close the timeline file."""
        if self._trace is not None:
            self._trace.close()
        self._path = self._trace = None


class Lanes:
    """Rows of the timeline for spans that overlap: each goes to the first row that is free when it begins."""

    def __init__(self, first: int = 1) -> None:
        self._first, self._busy_until_us = first, list[float]()

    def take(self, wall_us: int, duration_s: float) -> int:
        """Return the row of a span."""
        end_us = wall_us + duration_s * 1e6
        for lane, busy_until_us in enumerate(self._busy_until_us):
            if busy_until_us <= wall_us:
                self._busy_until_us[lane] = end_us
                return self._first + lane
        self._busy_until_us.append(end_us)
        return self._first + len(self._busy_until_us) - 1
