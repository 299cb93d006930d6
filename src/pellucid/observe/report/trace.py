"""Reads traces of PyTorch's profiler event by event, so that a file of gigabytes needs no more memory than a small one.

The format is one JSON object: a few keys about the process, then `traceEvents`, a list.
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_CHUNK_CHARS = 1 << 20
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')
_INFO = re.compile(r'"distributedInfo"\s*:\s*(\{)')
_SEPARATORS = re.compile(r"[\s,]*")


class TraceError(ValueError):
    """A file is no trace, or ends in the middle of one."""


@dataclass(slots=True)
class TraceFile:
    """A trace on disk. `events` reads it; `base_us` and `distributed` come from what precedes the events."""

    path: Path
    base_us: float = 0.0
    """Added to the events' times gives microseconds since 1970."""
    distributed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "TraceFile":
        """Read what a trace says before its events.

        Raises:
            TraceError: it is no trace.
            OSError: it cannot be read.
        """
        trace = cls(path)
        with _text(path) as file:
            head, _ = _seek_events(file, path)
        if base := _BASE.search(head):
            trace.base_us = int(base[1]) / 1e3
        if info := _INFO.search(head):
            trace.distributed, _ = json.JSONDecoder().raw_decode(head, info.start(1))
        return trace

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events in the order of the file.

        Raises:
            TraceError: the file ends before its list of events does.
        """
        decoder = json.JSONDecoder()
        with _text(self.path) as file:
            _, buffer = _seek_events(file, self.path)
            at = 0
            while True:
                match = _SEPARATORS.match(buffer, at)
                at = match.end() if match else at
                if at < len(buffer) and buffer[at] == "]":
                    return
                try:
                    event, at = decoder.raw_decode(buffer, at)
                except json.JSONDecodeError as error:
                    # An event spans the chunks' border, or the file is torn.
                    more = _read(file, self.path)
                    if not more:
                        raise TraceError(f"{self.path}: ends in the middle of its events") from error
                    buffer, at = buffer[at:] + more, 0
                    continue
                yield event


def _text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _read(file: IO[str], path: Path) -> str:
    try:
        return file.read(_CHUNK_CHARS)
    except (EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: {error}") from error


def _seek_events(file: IO[str], path: Path) -> tuple[str, str]:
    """Return what precedes the list of events, and what is read of it already."""
    head = ""
    while (found := _EVENTS.search(head)) is None:
        more = _read(file, path)
        if not more:
            raise TraceError(f"{path}: holds no trace events")
        head += more
    return head[: found.start()], head[found.end() :]
