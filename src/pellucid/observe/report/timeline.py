"""Reads the timeline of a run: the spans of every process, on the controller's clock, by step.

The files are those of `spans.py`, one a process; a killed run leaves half a line, a resumed one appends under another
pid.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.observe.spans import is_task_row

LAST_STEPS = 200
"""Steps that are read unless others are asked for: the last ones, of which a long run's report is made."""
CONTROLLER = "controller"
STEP = "step"
MERGED = "merged.json.gz"
_RANK_FILE = re.compile(r"(?P<pool>.+)_rank_(?P<rank>\d+)")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time in one process."""

    name: str
    start_us: float
    """Microseconds since 1970 by the controller's clock."""
    dur_us: float
    row: int
    """Row of the process's timeline; spans of one row nest."""
    pid: int
    step: int | None
    cpu_s: float | None
    """Processor seconds of the whole process meanwhile; None where not recorded."""
    queued_s: float | None
    """Seconds in which its thread was ready to run and got no core; None where not recorded."""
    args: dict[str, Any]

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.dur_us

    @property
    def is_own(self) -> bool:
        """Whether the process itself did it; reward calls ran in others."""
        return is_task_row(self.row)

    def contains(self, other: "Span") -> bool:
        """Tell whether `other` lies within this span's time and is not the span itself."""
        middle_us = other.start_us + other.dur_us / 2  # clocks of two processes agree to some microseconds
        return self is not other and other.dur_us <= self.dur_us and self.start_us <= middle_us <= self.end_us

    def overlaps(self, other: "Span") -> bool:
        """Tell whether the two share time."""
        return self.start_us < other.end_us and other.start_us < self.end_us


@dataclass(frozen=True, slots=True)
class Clock:
    """What a process says of itself in its file."""

    name: str
    host: str
    offset_us: float
    """What is added to its times to get the controller's."""


@dataclass(slots=True)
class Process:
    """One process's part of the timeline; the starts of a resumed run are one process."""

    key: str
    """Stem of its file: `controller`, `policy_rank_0`."""
    name: str
    """What people call it: `policy rank 0`."""
    host: str
    pool: str
    rank: int
    steps: dict[int, list[Span]] = field(default_factory=dict)
    """Spans of each step, in order of their starts; where a step was run twice, of the last time."""
    warm: set[int] = field(default_factory=set)
    """Ids of the processes that had run a step before those that are read."""

    def step_span(self, step: int) -> Span | None:
        """Return a whole step of the controller; None where it has not finished."""
        return next((span for span in self.steps.get(step, ()) if span.name == STEP and span.is_own), None)

    def drop_first(self) -> None:
        """Forget the first step, all but that its process is warm."""
        spans = self.steps.pop(min(set(self.steps) - {0}))
        self.warm |= {span.pid for span in spans if span.name == STEP}


@dataclass(slots=True)
class Timeline:
    """All processes of a run."""

    processes: list[Process]
    """The controller first, then the ranks by pool."""
    num_damaged: int = 0
    """Lines that are not whole; one is normal for a run that was killed."""

    @property
    def controller(self) -> Process:
        """The process that drives the run."""
        return self.processes[0]

    @property
    def ranks(self) -> list[Process]:
        """The processes that hold models; none where the controller does it all."""
        return self.processes[1:]


def timeline_files(folder: Path) -> list[Path]:
    """Return the files of a timeline, the controller's first; a merged trace may lie beside them.

    Raises:
        UserError: there is none of the controller.
    """
    names = (path for path in folder.glob("*.json") if path.stem == CONTROLLER or _RANK_FILE.fullmatch(path.stem))
    files = sorted(names, key=_file_order)
    if not files or files[0].stem != CONTROLLER:
        raise UserError(
            "RUN",
            f"'{folder}' holds no timeline of the controller.",
            "Each run writes one from its first step on; give the folder of a run that has trained.",
        )
    return files


def read_timeline(
    folder: Path,
    *,
    only_step: int | None = None,
    last_steps: int = LAST_STEPS,
) -> Timeline:
    """Read the files of a timeline.

    Args:
        folder: `timeline` in the run's folder.
        only_step: read this step alone.
        last_steps: otherwise read this many, the last ones.

    Raises:
        UserError: there is no timeline of the controller.
    """
    timeline = Timeline([])
    for path in timeline_files(folder):
        clocks = read_clocks(path)
        last = list(clocks.values())[-1] if clocks else None
        match = _RANK_FILE.fullmatch(path.stem)
        process = Process(
            key=path.stem,
            name=last.name if last else path.stem.replace("_", " "),
            host=last.host if last else "",
            pool=match["pool"] if match else path.stem,
            rank=int(match["rank"]) if match else 0,
        )
        for event in read_events(path, on_damage=lambda: _count_damage(timeline)):
            step = event.get("args", {}).get("step")
            if event.get("ph") != "X" or step is None:
                continue
            if only_step is not None and step != only_step:
                if event["name"] == STEP and step < only_step:
                    process.warm.add(event["pid"])
                continue
            process.steps.setdefault(step, []).append(_span(event, clocks))
            # Beside the last ones there may be a step that goes on, and step 0, validation before training.
            if len(process.steps) > last_steps + 1 + (0 in process.steps):
                process.drop_first()
        process.steps = {step: _last_attempt(spans) for step, spans in sorted(process.steps.items())}
        if timeline.processes:
            process.steps = _within(timeline.controller, process.steps)
        elif sum(process.step_span(step) is not None for step in process.steps) > last_steps:
            process.drop_first()
        if process.steps or not timeline.processes:
            timeline.processes.append(process)
    return timeline


def read_clocks(path: Path) -> dict[int, Clock]:
    """Return what each process that wrote to a file says of itself; of several lines the last counts."""
    clocks: dict[int, Clock] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"process_name"' in line and (event := _parse(line)) is not None and event.get("ph") == "M":
                about = event.get("args", {})
                clocks[event["pid"]] = Clock(
                    about.get("name", path.stem.replace("_", " ")),
                    about.get("host", ""),
                    float(about.get("clock_offset_us", 0.0)),
                )
    return clocks


def read_events(path: Path, *, on_damage: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
    """Yield the events of one file as they are written; `on_damage` is called for each line that is none."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            event = _parse(line)
            if event is not None:
                yield event
            elif line.strip() not in ("", "[", "]"):
                on_damage()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.strip().removesuffix(","))
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "ph" in event and "name" in event else None


def _span(event: dict[str, Any], clocks: dict[int, Clock]) -> Span:
    clock = clocks.get(event["pid"])
    args = event.get("args", {})
    return Span(
        name=event["name"],
        start_us=event["ts"] + (clock.offset_us if clock else 0.0),
        dur_us=event.get("dur", 0.0),
        row=event.get("tid", 0),
        pid=event["pid"],
        step=args.get("step"),
        cpu_s=args.get("cpu_s"),
        queued_s=args.get("queued_s"),
        args=args,
    )


def _last_attempt(spans: list[Span]) -> list[Span]:
    """Return the spans of the last time that a step was run: after a restart it is run again, here or in a new
    process.
    """
    kept = [span for span in spans if span.pid == spans[-1].pid]
    begun = [span.start_us for span in kept if span.name == STEP]
    # Of a step that was run once, stages may have begun before it, beside the one before.
    kept = [span for span in kept if len(begun) < 2 or span.start_us >= begun[-1]]
    return sorted(kept, key=lambda span: (span.start_us, -span.dur_us))


def _within(controller: Process, steps: dict[int, list[Span]]) -> dict[int, list[Span]]:
    """Return a rank's spans of the controller's finished steps: a start with more ranks leaves files that none goes
    on with.
    """
    kept: dict[int, list[Span]] = {}
    for step, spans in steps.items():
        whole = controller.step_span(step)
        if whole is not None and (mine := [span for span in spans if span.overlaps(whole)]):
            kept[step] = mine
    return kept


def _file_order(path: Path) -> tuple[bool, str, int]:
    match = _RANK_FILE.fullmatch(path.stem)
    return (path.stem != CONTROLLER, match["pool"] if match else path.stem, int(match["rank"]) if match else 0)


def _count_damage(timeline: Timeline) -> None:
    timeline.num_damaged += 1
