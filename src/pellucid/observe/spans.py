"""The one span primitive: `with spans.span(Stage.REWARD):` feeds the step's timing metrics and the process's timeline.

Each process owns a `SpanRecorder`; `step_timings()` empties into metrics once a step. The timeline is a file of trace
events that Perfetto reads; `pellucid profile` merges and reports those of all processes.
"""

import asyncio
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

FIRST_CALL_ROW, FIRST_TASK_ROW = 1, 5001
"""Rows of a process's timeline: its first task in 0, calls that other processes ran, tasks that overlap the first."""


def is_task_row(row: int) -> bool:
    """Return whether a row of the timeline shows a task of the process itself."""
    return row < FIRST_CALL_ROW or row >= FIRST_TASK_ROW


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


@dataclass(frozen=True, slots=True)
class _TaskRow:
    """The row in which one task shows its spans, which nest there."""

    recorder: "SpanRecorder"
    task: object
    row: int
    offset_ns: int
    """From the steady clock to the wall's; one for all spans of the row, so that nested spans nest exactly."""


_task_row: ContextVar[_TaskRow | None] = ContextVar("task_row", default=None)


def _current_task() -> object:
    """Return what tells this task from all that may run beside it: the asyncio task, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.get_ident() if task is None else task


class SpanRecorder:
    """Records the spans of one process: durations by name for the current step, and events for the timeline.

    Spans of one task nest. Tasks that overlap, threads or asyncio tasks, have rows of their own. Any thread may record.
    """

    def __init__(self, trace_path: Path | None = None, process: str = "controller") -> None:
        """Append to `trace_path`, from the first span on; without one only durations are kept.

        `process` is what people call it: `policy rank 0`.
        """
        self._durations_s: dict[tuple[int | None, str], float] = {}
        self._path, self._process = trace_path, process
        self._trace: TextIO | None = None
        self._pid, self._offset_us, self._started_us = os.getpid(), 0.0, time.time_ns() // 1000
        self._queue = _CoreQueue()
        self._lock = threading.Lock()
        self._taken_rows: set[int] = set()
        self._calls_end_us: list[float] = []

    def set_clock(self, offset_us: float) -> None:
        """Note by how much the controller's clock is ahead of this process's."""
        self._offset_us = offset_us
        with self._lock:
            if self._trace is not None:
                self._introduce(self._trace)

    def _introduce(self, trace: TextIO) -> None:
        about = {"name": self._process, "host": socket.gethostname(), "clock_offset_us": self._offset_us}
        about["started_us"] = self._started_us
        trace.write(json.dumps({"name": "process_name", "ph": "M", "pid": self._pid, "args": about}) + ",\n")

    @contextmanager
    def span(self, name: str, *, step: int | None = None, **args: str | int | float) -> Iterator[None]:
        """Time the enclosed block as one of its step's timings; recorded even when the block raises."""
        start = time.perf_counter()
        try:
            with self.detail(name, **({} if step is None else {"step": step}), **args):
                yield
        finally:
            taken_s = time.perf_counter() - start
            with self._lock:
                self._durations_s[step, name] = self._durations_s.get((step, name), 0.0) + taken_s

    @contextmanager
    def detail(self, name: str, **args: str | int | float) -> Iterator[None]:
        """Show the enclosed block on the timeline alone.

        `cpu_s` is the processor time of the whole process meanwhile, `queued_s` how long this thread waited for a core.
        What is neither, it waited for something else.
        """
        if self._path is None:
            yield
            return
        with self._row() as row:
            start_ns, cpu, queued = time.perf_counter_ns(), time.process_time(), self._queue.seconds()
            try:
                yield
            finally:
                used = {"cpu_s": round(time.process_time() - cpu, 6)}
                if queued is not None:
                    used["queued_s"] = round((self._queue.seconds() or 0.0) - queued, 6)
                start_us, end_us = ((row.offset_ns + time_ns) // 1000 for time_ns in (start_ns, time.perf_counter_ns()))
                self._show(name, start_us, end_us - start_us, row.row, used | args)

    @contextmanager
    def _row(self) -> Iterator[_TaskRow]:
        """Give the row of the calling task; its outermost span takes the first one that no other task has."""
        task, outer = _current_task(), _task_row.get()
        if outer is not None and outer.recorder is self and outer.task == task:
            yield outer
            return
        with self._lock:
            row = 0
            while row in self._taken_rows:
                row = max(row + 1, FIRST_TASK_ROW)
            self._taken_rows.add(row)
        entered = _TaskRow(self, task, row, time.time_ns() - time.perf_counter_ns())
        _task_row.set(entered)
        try:
            yield entered
        finally:
            _task_row.set(outer)
            with self._lock:
                self._taken_rows.remove(row)

    def record_call(self, name: str, wall_us: int, duration_s: float, **args: str | int | float) -> None:
        """Show on the timeline a call that another process has run for this one, in the first row that was free then.

        Args:
            name: of the span.
            wall_us: when it began, microseconds since 1970.
            duration_s: how long it took.
            args: what is shown with it.
        """
        end_us = wall_us + duration_s * 1e6
        with self._lock:
            ends = self._calls_end_us
            index = next((index for index, busy_until in enumerate(ends) if busy_until <= wall_us), len(ends))
            ends[index : index + 1] = [end_us]
        self._show(name, wall_us, round(duration_s * 1e6), FIRST_CALL_ROW + index, args)

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        """Show on the timeline what was counted at this moment, as a track with a line for each of `values`."""
        self._write({"name": name, "ph": "C", "ts": time.time_ns() // 1000, "pid": self._pid, "args": dict(values)})

    def _show(self, name: str, wall_us: int, duration_us: int, row: int, args: dict[str, str | int | float]) -> None:
        span = {"name": name, "ph": "X", "ts": wall_us, "dur": duration_us, "pid": self._pid, "tid": row, "args": args}
        self._write(span)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._path is None:
                return
            if self._trace is None:
                self._trace = self._open(self._path)
            self._trace.write(json.dumps(event) + ",\n")

    def _open(self, path: Path) -> TextIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The JSON array format of the trace viewers allows a missing "]", so a killed run stays readable.
        resumed = path.exists() and _reopen(path)
        trace = path.open("a", encoding="utf-8")
        trace.write("" if resumed else "[\n")
        self._introduce(trace)
        return trace

    def flush(self) -> None:
        """Hand what was recorded to the operating system, so that a kill loses none of it."""
        with self._lock:
            if self._trace is not None:
                self._trace.flush()

    def step_timings(self, step: int | None = None) -> dict[str, float]:
        """Return `timing_s/<name>` of the spans that ended since the last call, and forget them.

        Args:
            step: leave the spans of other steps, which may be under way at the same time, alone; None: all spans.
        """
        with self._lock:
            taken = [key for key in self._durations_s if step is None or key[0] in (None, step)]
            timings: dict[str, float] = {}
            for key in taken:
                name = f"timing_s/{key[1]}"
                timings[name] = timings.get(name, 0.0) + self._durations_s.pop(key)
        self.flush()
        return timings

    def close(self) -> None:
        """Flush and close the timeline file, which then is JSON."""
        with self._lock:
            if self._trace is not None and self._path is not None:
                self._trace.close()
                with self._path.open("rb+") as file:
                    file.seek(-len(_NEXT), os.SEEK_END)
                    file.write(_END)
            self._path = self._trace = None


_NEXT, _END = b",\n", b"\n]\n"
"""What ends a timeline to which events are added, and one that is closed."""
_TAIL_BYTES = 1 << 16


def _reopen(path: Path) -> bool:
    """Take a timeline's closing bracket, or half a line that a kill left, away; return whether an event is left."""
    with path.open("rb+") as file:
        start = file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        tail = file.read()
        lines = tail[: tail.rfind(b"\n") + 1]
        closed = lines.endswith(_END)
        file.seek(start)
        file.write(lines.removesuffix(_END) + _NEXT * closed)
        file.truncate()
        return file.tell() > 0
