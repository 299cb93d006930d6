"""Makes one trace of a run for Perfetto: the spans of every process on one clock, and below them its operators.

Events go from the files to the output one by one. Every process gets a number of its own, since machines share process
ids, and so does every row, since Perfetto takes rows of one number for one thread.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.files.rundir import atomic_open
from pellucid.observe.manifest import ProfileFile
from pellucid.observe.report.timeline import clock_offsets, process_name, read_events, timeline_files
from pellucid.observe.report.torch_traces import DEVICE_EVENTS, TraceError, open_trace
from pellucid.observe.spans import FIRST_TASK_ROW, is_task_row

_ROWS_A_PROCESS = 100_000
_CAPTURE_ROWS = 10_000
"""Rows of a process from this one on are threads and streams of its captures."""
_FLOWS_A_CAPTURE = 1 << 32
_OF_THE_PROFILER = {"Trace", "Spans", "Traces"}
"""Rows that the profiler adds about itself."""


@dataclass(slots=True)
class _Process:
    """A process in the merged trace."""

    pid: int
    """Its process id there, and the number of its first row."""
    name: str
    shift_us: float
    """Added to its times gives microseconds since the run's first span."""
    rows: dict[str, int] = field(default_factory=dict)

    def row(self, name: str, number: int) -> Iterator[dict[str, Any]]:
        """Yield what introduces a row, the first time that it is met."""
        if name not in self.rows:
            self.rows[name] = number
            yield _meta("thread_name", self.pid, self.pid + number, name=name)
            order = 0 if is_task_row(number) and number < _CAPTURE_ROWS else number
            yield _meta("thread_sort_index", self.pid, self.pid + number, sort_index=order)


def merge(timeline: Path, out: Path, captures: list[ProfileFile], captures_folder: Path) -> list[str]:
    """Write one trace of all processes, and return what was left out; `out` appears when it is whole.

    Args:
        timeline: folder of the timeline.
        out: compressed where it ends in `.gz`.
        captures: traces of PyTorch's profiler that are merged in.
        captures_folder: the manifest's, below which they lie.

    Raises:
        UserError: there is no timeline.
    """
    notes, files = list[str](), timeline_files(timeline)
    with atomic_open(out) as raw:
        stream = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0) if out.suffix == ".gz" else raw
        separator = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
        for event in _events(notes, files, captures, captures_folder):
            stream.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
        stream.write(b"\n]}\n")
        if stream is not raw:
            stream.close()
    return notes


def _events(
    notes: list[str], files: list[Path], captures: list[ProfileFile], captures_folder: Path
) -> Iterator[dict[str, Any]]:
    processes = _processes(files)
    for process in processes.values():
        yield _meta("process_name", process.pid, process.pid, name=process.name)
        yield _meta("process_sort_index", process.pid, process.pid, sort_index=process.pid)
        yield from process.row("stages", 0)
    for path in files:
        for event in read_events(path):
            process = processes[path.stem, event["pid"]]
            if event["ph"] == "X":
                yield from _span(event, process)
            elif event["ph"] == "C":
                yield event | {"ts": round(event["ts"] + process.shift_us, 3), "pid": process.pid}
    for number, file in enumerate(captures):
        process = processes.get((file.process, file.pid))
        if process is None:
            notes.append(f"{file.path} was left out: the timeline has no process {file.pid} of {file.process}.")
            continue
        try:
            base_us, events = open_trace(captures_folder / file.path)
            for event in events:
                yield from _operator(event, process, base_us, number)
        except TraceError as error:
            notes.append(f"A capture was left out: {error}.")


def _processes(files: list[Path]) -> dict[tuple[str, int], _Process]:
    """Return the processes by file and process id, in the order in which they are shown."""
    processes: dict[tuple[str, int], _Process] = {}
    origin_us = float("inf")  # small times keep their nanoseconds
    for path in files:
        offsets, hosts = clock_offsets(path), dict[int, str]()
        for event in read_events(path):
            pid = event["pid"]
            if event["ph"] == "X":
                origin_us = min(origin_us, event["ts"] + offsets.get(pid, 0.0))
            hosts[pid] = event["args"].get("host") or hosts.get(pid, "")
        for start, (pid, host) in enumerate(hosts.items(), 1):
            name = process_name(path) + (f", start {start}" if len(hosts) > 1 else "") + (f" on {host}" if host else "")
            number = (len(processes) + 1) * _ROWS_A_PROCESS
            processes[path.stem, pid] = _Process(number, name, offsets.get(pid, 0.0))
    for process in processes.values():
        process.shift_us -= origin_us
    return processes


def _span(event: dict[str, Any], process: _Process) -> Iterator[dict[str, Any]]:
    number = event.get("tid", 0)
    overlapping = f"stages that overlap, {number - FIRST_TASK_ROW + 2}" if number else "stages"
    yield from process.row(overlapping if is_task_row(number) else f"reward calls {number}", number)
    start_us = round(event["ts"] + process.shift_us, 3)
    yield event | {"ts": start_us, "pid": process.pid, "tid": process.pid + number, "cat": "span"}


def _operator(event: dict[str, Any], process: _Process, base_us: float, number: int) -> Iterator[dict[str, Any]]:
    """Yield an event of a capture in a row of its process; flows keep their ends apart from other captures'."""
    kind, thread = event.get("ph"), event.get("tid")
    of_the_profiler = event.get("cat") in _OF_THE_PROFILER or event.get("pid") in _OF_THE_PROFILER
    if kind not in ("X", "i", "s", "f", "t") or of_the_profiler or event["name"] == "[memory]":
        return
    name = f"GPU {event['pid']} stream {thread}" if event.get("cat") in DEVICE_EVENTS else f"thread {thread}"
    yield from process.row(name, _CAPTURE_ROWS + len(process.rows))
    flow = {"id": (number + 1) * _FLOWS_A_CAPTURE + int(event["id"])} if kind in ("s", "f", "t") else {}
    start_us = round(event["ts"] + base_us + process.shift_us, 3)
    yield event | flow | {"ts": start_us, "pid": process.pid, "tid": process.pid + process.rows[name]}


def _meta(name: str, pid: int, row: int, /, **args: str | int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": row, "args": args}
