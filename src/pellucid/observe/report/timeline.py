"""Reads the timeline of a run: the spans of every process, on the controller's clock, of the steps that are looked at.

The files are those of `spans.py`, one a process; a killed run leaves half a line, a resumed one appends under another
pid, and both may have run a step more than once.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.observe.process import WRITE
from pellucid.observe.spans import is_task_row

LAST_STEPS = 200
"""Steps that are read unless others are asked for: the last ones."""
STEPS_AROUND = 20
"""Steps before and after one in which spans of it may lie: more than samples may be old."""
CHUNK_BYTES = 1 << 22
CONTROLLER, STEP, PROCESS = "controller", "step", '"name": "process_name"'
MIN_STEPS_KEPT = 2
"""Warm-up and captured steps are left out where at least so many others are left."""
_RANK_FILE = re.compile(r"(?P<pool>.+)_rank_(?P<rank>\d+)")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time in one process."""

    name: str
    process: str
    """What people call it: `controller`, `policy rank 0`."""
    step: int
    start_us: float
    """Microseconds since 1970 by the controller's clock."""
    dur_us: float
    row: int
    """Row of the process's timeline; spans of one row nest."""
    pid: int
    args: dict[str, Any]

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.dur_us

    @property
    def is_own(self) -> bool:
        """Whether the process itself did it; reward calls ran in others."""
        return is_task_row(self.row)


@dataclass(slots=True)
class Timeline:
    """The steps of a run that are looked at, and what every process did in them."""

    steps: dict[int, Span]
    """The whole steps, by the controller, ascending."""
    spans: list[Span]
    """All that happened in them, in order of process and start; the longer of two that start together comes first."""
    ranks: list[str]
    """The processes that hold models, by pool; none where the controller does it all."""
    last_step: int
    """The last finished step of the run."""
    notes: list[str] = field(default_factory=list)
    """Which steps were left out, and what misleads in those that are not."""

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return sum(step.dur_us for step in self.steps.values()) / 1e6 / len(self.steps)


def timeline_files(folder: Path) -> list[Path]:
    """Return the files of a timeline, the controller's first; a merged trace may lie beside them.

    Raises:
        UserError: there is none of the controller.
    """
    if not (folder / f"{CONTROLLER}.json").exists():
        remedy = "Each run writes one from its first step on; give the folder of a run that has trained."
        raise UserError("RUN", f"'{folder}' holds no timeline of the controller.", remedy)
    ranks = [(match, path) for path in folder.glob("*.json") if (match := _RANK_FILE.fullmatch(path.stem))]
    ranks.sort(key=lambda rank: (rank[0]["pool"], int(rank[0]["rank"])))
    return [folder / f"{CONTROLLER}.json", *(path for _, path in ranks)]


def process_name(path: Path) -> str:
    """Return what people call the process that wrote a file."""
    return path.stem.replace("_", " ")


def read_timeline(
    folder: Path, *, only_step: int | None = None, last_steps: int = LAST_STEPS, profiled: Collection[int] = ()
) -> Timeline:
    """Read the finished steps without those whose times mislead: the first of each start, and captured ones.

    Args:
        folder: `timeline` in the run's folder.
        only_step: read this step alone, whatever it is.
        last_steps: otherwise read this many, the last ones.
        profiled: steps in which a tool captured something, which costs time.

    Raises:
        UserError: there is no timeline of the controller, or no such step in it.
    """
    files = timeline_files(folder)
    whole: dict[int, Span] = {}
    begins_us: dict[int, float] = {}
    first_of_start: dict[int, int] = {}
    started_us = {
        event["pid"]: event["args"].get("started_us", 0.0) for event in read_events(files[0], only=PROCESS)
    }
    captured = set(profiled) | {event["args"]["step"] for event in read_events(files[0], only=f'"name": "{WRITE}"')}
    for span in _spans(files[0], only=f'"name": "{STEP}"'):
        # What began before the process that ended a step, or before its first try ended, is of an earlier try.
        tried_us = whole[span.step].end_us if span.step in whole else 0.0
        begins_us[span.step] = max(tried_us, started_us.get(span.pid, 0.0))
        whole[span.step] = span
        first_of_start.setdefault(span.pid, span.step)
    if not whole:
        reason = f"the timeline '{folder}' holds no finished step."
        raise UserError("RUN", reason, "Wait for the first, or look into its logs.")
    if only_step not in (None, *whole):
        reason = f"the timeline '{folder}' has no finished step {only_step}."
        raise UserError("--step", reason, f"Finished steps: {ranges(sorted(whole))}.")
    notes: list[str] = []
    numbers = sorted(whole)[-last_steps:] if only_step is None else [only_step]
    for why, misleading in (
        ("captured, which costs time", captured),
        ("first after a start, with its warm-up", set(first_of_start.values())),
    ):
        among = [number for number in numbers if number in misleading]
        others = [number for number in numbers if number not in misleading]
        leave_out = only_step is None and len(others) >= MIN_STEPS_KEPT
        numbers = others if leave_out else numbers
        if among:
            notes.append(f"{'Left out' if leave_out else 'Slower than others'}: step {ranges(among)} ({why}).")
    spans: list[Span] = []
    times_us = _around(whole, numbers)
    for path in files:
        mine = [span for span in _spans(path, set(numbers), times_us) if span.start_us >= begins_us[span.step]]
        spans += sorted(mine, key=lambda span: (span.start_us, -span.dur_us))
    seen = {span.process for span in spans}
    ranks = [name for name in map(process_name, files[1:]) if name in seen]
    return Timeline({number: whole[number] for number in numbers}, spans, ranks, max(whole), notes)


def _around(whole: Mapping[int, Span], numbers: Sequence[int]) -> tuple[float, float]:
    """Return between which times what belongs to some steps may have ended; overlapping steps sample long before."""
    every = sorted(whole)
    first, last = every.index(numbers[0]), every.index(numbers[-1])
    after = every[last + STEPS_AROUND :]
    return whole[every[max(first - STEPS_AROUND, 0)]].start_us, whole[after[0]].end_us if after else math.inf


def _spans(
    path: Path, steps: Collection[int] | None = None, times_us: tuple[float, float] | None = None, only: str = ""
) -> Iterator[Span]:
    """Yield the spans of one file that belong to a step, or to one of some steps, or whose lines hold a text.

    `times_us` says between which times they end, so that the rest of a long file need not be read.
    """
    offsets, process = clock_offsets(path), process_name(path)

    def span_of(event: dict[str, Any]) -> Span:
        start_us, args = event["ts"] + offsets.get(event["pid"], 0.0), event.get("args", {})
        return Span(
            event["name"], process, args.get("step"), start_us, event["dur"], event.get("tid", 0), event["pid"], args
        )

    def is_before(event: dict[str, Any]) -> bool:
        return times_us is not None and event["ph"] == "X" and span_of(event).end_us < times_us[0]

    begin = 0 if times_us is None else _first_after(path, is_before)
    for event in read_events(path, only, begin):
        if event["ph"] != "X":
            continue
        span = span_of(event)
        if times_us is not None and span.end_us > times_us[1]:
            return
        if span.step is not None and (steps is None or span.step in steps):
            yield span


def _first_after(path: Path, is_before: Callable[[dict[str, Any]], bool]) -> int:
    """Return a place near which events begin to be late enough; they are written as they end."""
    low, high = 0, path.stat().st_size
    while high - low > CHUNK_BYTES:
        middle = (low + high) // 2
        event = next((event for event in read_events(path, begin=middle) if event["ph"] == "X"), None)
        low, high = (middle, high) if event is not None and is_before(event) else (low, middle)
    return low


def clock_offsets(path: Path) -> dict[int, float]:
    """Return by process id what gives a file's times the controller's clock, in microseconds; as measured last."""
    return {
        event["pid"]: float(event["args"].get("clock_offset_us", 0.0)) for event in read_events(path, only=PROCESS)
    }


def read_events(path: Path, only: str = "", begin: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the events of one file as they are written, of lines that hold a text; half a line is passed over.

    Args:
        path: of the file.
        only: the text; long files are searched for it much faster than they are read.
        begin: where in the file to start, in bytes.
    """
    wanted, rest = only.encode(), b""
    with path.open("rb") as file:
        file.seek(begin)
        while chunk := file.read(CHUNK_BYTES):
            text, newline, rest = (rest + chunk).rpartition(b"\n")
            for line in _lines_with(wanted, text + newline):
                try:
                    event = json.loads(line.strip().removesuffix(b","))
                except ValueError:  # a kill leaves half a line, and so does a start in the middle
                    continue
                if isinstance(event, dict):  # a bracket is no event
                    yield event
        yield from map(json.loads, [rest] if rest.endswith(b"}") and wanted in rest else [])


def _lines_with(wanted: bytes, text: bytes) -> Iterator[bytes]:
    place = text.find(wanted)
    while 0 <= place < len(text):
        end = text.find(b"\n", place)
        yield text[text.rfind(b"\n", 0, place) + 1 : end]
        place = text.find(wanted, end + 1)


def ranges(numbers: Collection[int]) -> str:
    """Return ascending numbers in short: `1, 3-5`."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
