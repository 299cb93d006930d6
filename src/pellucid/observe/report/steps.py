"""How long each stage of a step takes: the controller's spans as durations by step, and what lies outside of all
stages.

Pure functions over `timeline.py`'s records. `choose_steps` leaves out what would mislead: warm-up and captured steps.
"""

import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pellucid.observe.process import WRITE
from pellucid.observe.report.timeline import Process, Span
from pellucid.stages import Stage

STAGES = frozenset(stage.value for stage in Stage)
BETWEEN = (Stage.VALIDATE, Stage.SAVE_CHECKPOINT)
"""Stages that come between two steps, not at each."""
OUTSIDE = "outside stages"
MIN_STEPS_KEPT = 2
"""Warm-up and captured steps are left out where at least so many others are left."""
Interval = tuple[float, float]


@dataclass(slots=True)
class StepSpans:
    """One step of the controller."""

    step: int
    span: Span
    """The whole step."""
    stages: dict[str, list[Span]]
    """Stages within it, by name, in the order run."""
    writing: list[Span]
    """When profiling itself was at work, to start captures and to write their files."""

    @property
    def wall_s(self) -> float:
        """Duration of the step."""
        return self.span.dur_us / 1e6

    @property
    def outside_s(self) -> float:
        """Time of the step in which no stage runs, and profiling is not at work."""
        return max(0.0, self.wall_s - self._covered_s([*self._stage_spans, *self.writing]))

    @property
    def writing_s(self) -> float:
        """Time of the step that profiling itself takes outside of all stages."""
        return self._covered_s([*self._stage_spans, *self.writing]) - self._covered_s(self._stage_spans)

    @property
    def _stage_spans(self) -> list[Span]:
        return [span for spans in self.stages.values() for span in spans]

    def _covered_s(self, spans: list[Span]) -> float:
        """Return the seconds of the step in which one of the spans runs."""
        begin, end = self.span.start_us, self.span.end_us
        inside = [span for span in spans if span.overlaps(self.span)]
        return length(union((max(begin, span.start_us), min(end, span.end_us)) for span in inside)) / 1e6

    def stage_s(self, stage: str) -> float:
        """Duration of a stage, all its calls together; 0 where it did not run."""
        return sum(span.dur_us for span in self.stages.get(stage, ())) / 1e6


@dataclass(frozen=True, slots=True)
class StageTime:
    """A stage over the steps that are looked at, or one that comes between steps."""

    stage: str
    seconds: tuple[float, ...]
    """Of each step."""
    steps: tuple[int, ...]
    """Which; of what comes between steps the one before it, 0 before training."""
    share: float
    """Of the steps' time; stages that overlap add up to more than 1."""

    @property
    def mean_s(self) -> float:
        """Mean per step."""
        return statistics.fmean(self.seconds)

    @property
    def median_s(self) -> float:
        """Median over the steps."""
        return statistics.median(self.seconds)

    @property
    def slowest(self) -> tuple[int, float]:
        """The step in which it took longest, and how long."""
        return max(zip(self.steps, self.seconds), key=lambda pair: pair[1])

    @property
    def fastest(self) -> tuple[int, float]:
        """The step in which it took shortest, and how long."""
        return min(zip(self.steps, self.seconds), key=lambda pair: pair[1])


@dataclass(slots=True)
class ChosenSteps:
    """The steps that a report is about, and what was left out of them."""

    steps: list[StepSpans]
    left_out: dict[int, str] = field(default_factory=dict)
    """Finished steps that are not among them, and why."""
    captured: tuple[int, ...] = ()
    """Those among them that are slower for being captured."""
    warming_up: tuple[int, ...] = ()
    """Those among them that are the first after a start."""
    unfinished: list[int] = field(default_factory=list)
    """Steps of which the timeline has no end."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps, ascending."""
        return tuple(step.step for step in self.steps)

    @property
    def wall_s(self) -> float:
        """Time of all steps together."""
        return sum(step.wall_s for step in self.steps)

    @property
    def mean_s(self) -> float:
        """Mean time of a step."""
        return self.wall_s / len(self.steps)

    @property
    def typical(self) -> StepSpans:
        """The step whose duration is nearest to the median."""
        middle = statistics.median(step.wall_s for step in self.steps)
        return min(self.steps, key=lambda step: (abs(step.wall_s - middle), step.step))


def choose_steps(controller: Process, profiled: Collection[int] = (), *, keep_all: bool = False) -> ChosenSteps:
    """Return the finished steps without those whose times mislead: the first of each start, and captured ones.

    Args:
        controller: the process that drives the run.
        profiled: steps in which a tool captured something, which costs time.
        keep_all: leave out none, and only say which they are.
    """
    chosen = ChosenSteps([])
    for step, spans in controller.steps.items():
        whole = controller.step_span(step)
        if whole is not None:
            own = [span for span in spans if span.name in STAGES and span.is_own]
            # What a schedule runs ahead begins before the step it is for.
            mine = [span for span in own if span.name not in BETWEEN or whole.contains(span)]
            stages: dict[str, list[Span]] = {}
            for span in top_level(mine):
                stages.setdefault(span.name, []).append(span)
            writing = [span for span in spans if span.name == WRITE and span.is_own]
            chosen.steps.append(StepSpans(step, whole, stages, writing))
        elif any(span.name not in BETWEEN for span in spans):
            chosen.unfinished.append(step)
    first_of_start = {
        step.span.pid: step.step for step in reversed(chosen.steps) if step.span.pid not in controller.warm
    }
    if not keep_all:
        _leave_out(chosen, set(profiled), "captured, which costs time")
        _leave_out(chosen, set(first_of_start.values()), "first after a start: warm-up")
    chosen.captured = tuple(step for step in chosen.numbers if step in profiled)
    chosen.warming_up = tuple(step for step in chosen.numbers if step in first_of_start.values())
    return chosen


def _leave_out(chosen: ChosenSteps, steps: set[int], why: str) -> None:
    kept = [step for step in chosen.steps if step.step not in steps]
    if len(kept) >= MIN_STEPS_KEPT:
        chosen.left_out |= {step.step: why for step in chosen.steps if step.step in steps}
        chosen.steps = kept


def stage_times(chosen: ChosenSteps) -> list[StageTime]:
    """Return the time of each stage that ran, in the order of a step; what profiling itself took is a row of its own,
    and `outside stages` is the rest of the step.
    """
    names = dict.fromkeys(name for step in chosen.steps for name in step.stages)
    rows = {name: tuple(step.stage_s(name) for step in chosen.steps) for name in names}
    if any(step.writing_s for step in chosen.steps):
        rows[WRITE] = tuple(step.writing_s for step in chosen.steps)
    rows[OUTSIDE] = tuple(step.outside_s for step in chosen.steps)
    total_s = chosen.wall_s or 1.0
    return [StageTime(name, seconds, chosen.numbers, sum(seconds) / total_s) for name, seconds in rows.items()]


def between_times(controller: Process) -> list[StageTime]:
    """Return validations and checkpoints that ran between steps."""
    rows: list[StageTime] = []
    for stage in BETWEEN:
        runs = {
            step: sum(span.dur_us for span in spans if span.name == stage and span.is_own) / 1e6
            for step, spans in controller.steps.items()
        }
        runs = {step: seconds for step, seconds in runs.items() if seconds}
        if runs:
            rows.append(StageTime(stage, tuple(runs.values()), tuple(runs), 0.0))
    return rows


def top_level(spans: list[Span]) -> list[Span]:
    """Return the spans that lie in no other of their row; `spans` are ordered by start, then the longer first."""
    kept: list[Span] = []
    last_of_row: dict[int, Span] = {}
    for span in spans:
        last = last_of_row.get(span.row)
        if last is None or not last.contains(span):
            kept.append(span)
            last_of_row[span.row] = span
    return kept


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, ascending, that cover the same."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
