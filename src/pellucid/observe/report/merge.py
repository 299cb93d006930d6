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
from pellucid.observe.report.timeline import Clock, read_clocks, read_events, timeline_files
from pellucid.observe.report.trace import TraceError, TraceFile
from pellucid.observe.spans import FIRST_TASK_ROW, is_task_row

_ROWS_A_PROCESS = 100_000
_CAPTURE_ROWS = 10_000
"""Rows of a process from this one on are threads and streams of its captures."""
_FLOWS_A_CAPTURE = 1 << 32
_SKIPPED = {"Trace", "Spans", "Traces"}
"""Rows that the profiler adds about itself."""


@dataclass(slots=True)
class _Part:
    """A process in the merged trace."""

    number: int
    name: str
    clock: Clock
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Its process id there, and the number of its first row."""
        return (self.number + 1) * _ROWS_A_PROCESS

    def row_of_thread(self, key: str) -> tuple[int, bool]:
        """Return the row of a thread of a capture, and whether it is a new one."""
        is_new = key not in self.rows
        return self.pid + self.rows.setdefault(key, _CAPTURE_ROWS + len(self.rows)), is_new


@dataclass(slots=True)
class Merged:
    """What `merge` wrote."""

    path: Path
    num_processes: int = 0
    num_spans: int = 0
    num_operators: int = 0
    """Events of captures."""
    num_captures: int = 0
    notes: list[str] = field(default_factory=list)
    """What was left out."""


def merge(
    timeline: Path,
    out: Path,
    captures: list[ProfileFile],
    captures_folder: Path,
) -> Merged:
    """Write one trace of all processes; `out` appears when it is whole.

    Args:
        timeline: folder of the timeline.
        out: `.json.gz`, or `.json`.
        captures: traces of PyTorch's profiler that are merged in.
        captures_folder: the manifest's, below which they lie.

    Raises:
        UserError: there is no timeline.
    """
    merged = Merged(out)
    files = timeline_files(timeline)
    parts = _parts(files)
    origin_us = _origin_us(files, parts)
    with atomic_open(out) as raw:
        stream = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0) if out.suffix == ".gz" else raw
        base_ns = round(origin_us * 1e3)
        stream.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base_ns}, "traceEvents": [\n'.encode())
        separator = b""
        for event in _events(merged, files, parts, origin_us, captures, captures_folder):
            stream.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
        stream.write(b"\n]}\n")
        if stream is not raw:
            stream.close()
    return merged


def _parts(files: list[Path]) -> dict[tuple[str, int], _Part]:
    """Return the processes by file and process id, in the order in which they are shown."""
    parts: dict[tuple[str, int], _Part] = {}
    for path in files:
        clocks = read_clocks(path)
        pids = dict.fromkeys(event["pid"] for event in read_events(path))
        for start, pid in enumerate(pids, 1):
            clock = clocks.get(pid) or Clock(path.stem.replace("_", " "), "", 0.0)
            name = clock.name if len(pids) == 1 else f"{clock.name}, start {start}"
            parts[path.stem, pid] = _Part(len(parts), name, clock)
    return parts


def _origin_us(files: list[Path], parts: dict[tuple[str, int], _Part]) -> float:
    """Return the earliest time of the timeline: times since then are small enough to keep their nanoseconds."""
    starts = (
        event["ts"] + parts[path.stem, event["pid"]].clock.offset_us
        for path in files
        for event in read_events(path)
        if event["ph"] == "X"
    )
    return min(starts, default=0.0)


def _events(
    merged: Merged,
    files: list[Path],
    parts: dict[tuple[str, int], _Part],
    origin_us: float,
    captures: list[ProfileFile],
    captures_folder: Path,
) -> Iterator[dict[str, Any]]:
    for part in parts.values():
        merged.num_processes += 1
        host = f" on {part.clock.host}" if part.clock.host else ""
        yield _meta("process_name", part.pid, part.pid, name=part.name + host)
        yield _meta("process_sort_index", part.pid, part.pid, sort_index=part.number)
        yield _meta("thread_name", part.pid, part.pid, name="stages")
        yield _meta("thread_sort_index", part.pid, part.pid, sort_index=0)
    yield from _spans(merged, files, parts, origin_us)
    for number, file in enumerate(captures):
        part = parts.get((file.process, file.pid))
        path = captures_folder / file.path
        if part is None:
            merged.notes.append(
                f"{path.name} was left out: the timeline has no process {file.pid} in {file.process}.json."
            )
            continue
        try:
            yield from _capture(merged, part, TraceFile.open(path), origin_us, number)
            merged.num_captures += 1
        except TraceError as error:
            merged.notes.append(f"A capture is not whole: {error}.")


def _spans(
    merged: Merged,
    files: list[Path],
    parts: dict[tuple[str, int], _Part],
    origin_us: float,
) -> Iterator[dict[str, Any]]:
    """Yield the timeline's spans."""
    for path in files:
        for event in read_events(path):
            if event["ph"] != "X":
                continue
            part = parts[path.stem, event["pid"]]
            start_us = round(event["ts"] + part.clock.offset_us - origin_us, 3)
            lane = event.get("tid", 0)
            row = part.pid + lane
            if lane and f"lane {lane}" not in part.rows:
                part.rows[f"lane {lane}"] = lane
                name = (
                    f"stages that overlap, {lane - FIRST_TASK_ROW + 2}" if is_task_row(lane) else f"reward calls {lane}"
                )
                yield _meta("thread_name", part.pid, row, name=name)
                yield _meta("thread_sort_index", part.pid, row, sort_index=0 if is_task_row(lane) else lane)
            merged.num_spans += 1
            yield event | {"ts": start_us, "pid": part.pid, "tid": row, "cat": "span"}


def _capture(merged: Merged, part: _Part, trace: TraceFile, origin_us: float, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a capture as rows of its process; flows keep their ends apart from those of other
    captures.
    """
    shift_us = trace.base_us + part.clock.offset_us - origin_us
    for event in trace.events():
        kind = event.get("ph")
        if (
            kind not in ("X", "i", "s", "f", "t", "B", "E")
            or event.get("cat") in _SKIPPED
            or event.get("pid") in _SKIPPED
        ):
            continue
        if event["name"] == "[memory]" or not isinstance(event.get("tid"), int):
            continue
        on_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        name = f"GPU {event['pid']} stream {event['tid']}" if on_device else f"thread {event['tid']}"
        row, is_new = part.row_of_thread(name)
        if is_new:
            yield _meta("thread_name", part.pid, row, name=name)
            yield _meta("thread_sort_index", part.pid, row, sort_index=row - part.pid)
        changed = {"ts": round(event["ts"] + shift_us, 3), "pid": part.pid, "tid": row}
        if kind in ("s", "f", "t"):
            changed["id"] = (number + 1) * _FLOWS_A_CAPTURE + int(event["id"])
        merged.num_operators += 1
        yield event | changed


def _meta(name: str, pid: int, row: int, /, **args: str | int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": row, "args": args}
