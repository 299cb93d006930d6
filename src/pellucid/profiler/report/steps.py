"""How long each stage of a step takes: the controller's spans as durations by step, and what lies outside of all stages.

Pure functions over `timeline.py`'s records. `choose_steps` leaves out what would mislead: warm-up and captured steps.
"""

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

from pellucid.profiler.report.timeline import Process, Span
from pellucid.stages import Stage

STAGES = frozenset(stage.value for stage in Stage)
BETWEEN = (Stage.VALIDATE, Stage.SAVE_CHECKPOINT)
"""Stages that come between two steps, not at each."""
MIN_STEPS_KEPT = 2
"""Warm-up and captured steps are left out where at least so many others are left."""


@dataclass(slots=True)
class StepSpans:
    """One step of the controller."""

    step: int
    span: Span
    """The whole step."""
    stages: dict[str, list[Span]]
    """Stages within it, by name, in the order run."""

    @property
    def wall_s(self) -> float:
        """Duration of the step."""
        return self.span.dur_us / 1e6

    def stage_s(self, stage: str) -> float:
        """Duration of a stage, all its calls together; 0 where it did not run."""
        return sum(span.dur_us for span in self.stages.get(stage, ())) / 1e6


@dataclass(frozen=True, slots=True)
class StageTime:
    """A stage over the steps that are looked at."""

    stage: str
    seconds: tuple[float, ...]
    """Of each step."""
    steps: tuple[int, ...]
    share: float
    """Of the steps' time."""

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


@dataclass(frozen=True, slots=True)
class BetweenTime:
    """Validation or checkpoints: what comes between steps."""

    stage: str
    seconds: tuple[float, ...]
    steps: tuple[int, ...]
    """The step after which each one ran; 0: before training."""


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
    finished: dict[int, StepSpans] = {}
    unfinished: list[int] = []
    for step, spans in controller.steps.items():
        whole = controller.step_span(step)
        if whole is None:
            if any(span.name not in BETWEEN for span in spans):
                unfinished.append(step)
            continue
        finished[step] = StepSpans(step, whole, _stages_within(whole, spans))
    chosen = ChosenSteps(list(finished.values()), unfinished=unfinished)
    first_of_start = {step.span.pid: step.step for step in reversed(chosen.steps) if step.span.pid not in controller.warm}
    if not keep_all:
        _leave_out(chosen, set(profiled), "captured, which costs time")
        _leave_out(chosen, set(first_of_start.values()), "first after a start: warm-up")
    chosen.captured = tuple(step for step in chosen.numbers if step in profiled)
    chosen.warming_up = tuple(step for step in chosen.numbers if step in first_of_start.values())
    return chosen


def stage_times(chosen: ChosenSteps) -> list[StageTime]:
    """Return the time of each stage that ran, in the order of a step; `outside stages` is the rest of the step."""
    total_s = chosen.wall_s
    names = list(dict.fromkeys(name for step in chosen.steps for name in step.stages))
    rows = {name: tuple(step.stage_s(name) for step in chosen.steps) for name in names}
    rows[OUTSIDE] = tuple(max(0.0, step.wall_s - sum(map(step.stage_s, step.stages))) for step in chosen.steps)
    return [StageTime(name, seconds, chosen.numbers, sum(seconds) / total_s if total_s else 0.0) for name, seconds in rows.items()]


OUTSIDE = "outside stages"


def between_times(controller: Process) -> list[BetweenTime]:
    """Return validations and checkpoints that ran between steps."""
    rows: list[BetweenTime] = []
    for stage in BETWEEN:
        runs = {
            step: sum(span.dur_us for span in spans if span.name == stage and span.lane == 0) / 1e6
            for step, spans in controller.steps.items()
        }
        runs = {step: seconds for step, seconds in runs.items() if seconds}
        if runs:
            rows.append(BetweenTime(stage, tuple(runs.values()), tuple(runs)))
    return rows


def top_level(spans: list[Span]) -> list[Span]:
    """Return the spans that lie in no other of them; `spans` are ordered by start, then the longer first."""
    kept: list[Span] = []
    for span in spans:
        if not kept or not kept[-1].contains(span):
            kept.append(span)
    return kept


def _stages_within(step: Span, spans: list[Span]) -> dict[str, list[Span]]:
    stages: dict[str, list[Span]] = {}
    for span in top_level([span for span in spans if span.name in STAGES and span.lane == 0 and step.contains(span)]):
        stages.setdefault(span.name, []).append(span)
    return stages


def _leave_out(chosen: ChosenSteps, steps: set[int], why: str) -> None:
    kept = [step for step in chosen.steps if step.step not in steps]
    if len(kept) < MIN_STEPS_KEPT:
        return
    chosen.left_out |= {step.step: why for step in chosen.steps if step.step in steps}
    chosen.steps = kept
