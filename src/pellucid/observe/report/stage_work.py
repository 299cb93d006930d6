"""How long each stage of a step takes, and how each process spends it: the spans of a timeline as seconds.

Processor time tells work from waiting: ranks compute in lock step, so the spans of all get long when one is slow. What
is neither work nor waiting for a core is waiting for something else.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pellucid.observe.process import WRITE
from pellucid.observe.report.timeline import CONTROLLER, Span, Timeline
from pellucid.stages import Stage, Unit

OUTSIDE = "outside stages"
BETWEEN = {Stage.VALIDATE: "validate, between steps", Stage.SAVE_CHECKPOINT: "save_checkpoint, between steps"}
REWARD_CALL = "reward_call"
BUSY, NO_CORE, ABSENT = "busy", "no core", "absent"
IN_MICRO_BATCHES = "in its micro-batches"
IN_MINI_BATCHES = "in its mini-batches, outside of their micro-batches"
OUTSIDE_UNITS = "outside of its units of work"
_STAGES = frozenset(stage.value for stage in Stage)
Interval = tuple[float, float]


@dataclass(slots=True)
class Work:
    """One process in one stage: of one step, or the mean over all."""

    process: str
    seconds: Counter[str]
    """The stage's time by what the process does: it is `busy`; it has work to do and gets `no core`; it waits for
    something else, by place; or it is `absent`, for it has not begun or is done."""
    cpu_s: float | None
    """Processor time of the whole process; None where not recorded, and then it counts as busy."""
    tokens: float | None
    num_units: float

    @property
    def wall_s(self) -> float:
        """Seconds between its first and its last moment in the stage."""
        return self.seconds.total() - self.seconds[ABSENT]

    @property
    def waiting_s(self) -> float:
        """Seconds in which it waits within a unit of work: for other ranks, for a device, or asleep."""
        return self.seconds[IN_MICRO_BATCHES] + self.seconds[IN_MINI_BATCHES]

    @property
    def idle_s(self) -> float:
        """Seconds in which it waits outside of all units of work, where no other rank makes it wait."""
        return self.seconds[OUTSIDE_UNITS]

    @property
    def own_s(self) -> float:
        """Seconds for which it answers itself."""
        return self.seconds[BUSY] + self.seconds[NO_CORE] + self.idle_s


@dataclass(slots=True)
class StageTime:
    """A stage over the steps that are looked at."""

    name: str
    seconds: dict[int, float]
    """By step."""
    begins_s: list[float] = field(default_factory=list)
    """Since the start of each step; below 0 where a schedule runs ahead."""
    works: dict[int, list[Work]] = field(default_factory=dict)
    """By step, of the ranks that ran it, or else of the controller."""
    processes: list[Work] = field(default_factory=list)
    """The same as means per step, by process."""
    share: float = 0.0
    """Of the steps' time; stages that overlap add up to more than 1."""

    @property
    def mean_s(self) -> float:
        """Mean seconds per step."""
        return statistics.fmean(self.seconds.values())

    @property
    def limited_by(self) -> Work | None:
        """Return the process that the others wait for; the critical path goes through it."""
        return max(self.processes, key=lambda work: work.own_s, default=None)


@dataclass(frozen=True, slots=True)
class RewardCalls:
    """The reward calls of the steps that are looked at."""

    per_step: float
    num_failed: int
    median_s: float
    longest_s: float
    at_once: float
    """Calls that run at the same time, on average over the time in which any does."""
    covered_share: float
    """Of the reward stage's time: some call runs."""


def stage_times(timeline: Timeline) -> list[StageTime]:
    """Return the time of each stage that ran, in the order of a step: the critical path.

    What profiling itself took between stages is a row of its own, `outside stages` the rest of the step; after it come
    validations and checkpoints between steps.
    """
    spans_of: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.is_own:
            spans_of[span.step][span.process].append(span)
    stages: dict[str, StageTime] = {}
    outside = StageTime(OUTSIDE, {})
    between = {stage: StageTime(name, dict.fromkeys(timeline.steps, 0.0)) for stage, name in BETWEEN.items()}
    for step, whole in timeline.steps.items():
        by_process = spans_of[step]
        covered: list[Interval] = []
        for name, spans in _by_stage(by_process[CONTROLLER]).items():
            inside = [span for span in spans if whole.start_us <= span.start_us < whole.end_us]
            if name in between and step != timeline.last_step:  # after the last, no frequency asks for it
                between[Stage(name)].seconds[step] = sum(span.dur_us for span in spans if span not in inside) / 1e6
            if name in BETWEEN or name == WRITE:  # other stages may run ahead of the step that they are for
                spans = inside
            if not spans:
                continue
            stage = stages.setdefault(name, StageTime(name, dict.fromkeys(timeline.steps, 0.0)))
            stage.seconds[step] = _wall_s(spans)
            stage.begins_s.append((spans[0].start_us - whole.start_us) / 1e6)
            if name != WRITE:
                stage.works[step] = _works(name, spans, by_process, timeline.ranks)
            covered += ((span.start_us, span.end_us) for span in spans)
        in_stages = clip(union(covered), [(whole.start_us, whole.end_us)])
        outside.seconds[step] = max(0.0, whole.dur_us - length(in_stages)) / 1e6
    ordered = sorted(stages.values(), key=lambda stage: statistics.fmean(stage.begins_s))
    rows = [*ordered, outside, *(row for row in between.values() if any(row.seconds.values()))]
    for row in rows:
        row.share = row.mean_s / timeline.step_s
        row.processes = _means(row.works, len(timeline.steps))
    return rows


def _by_stage(spans: list[Span]) -> dict[str, list[Span]]:
    """Return a process's spans of stages by name, without those within another one; `spans` are in order."""
    found: dict[str, list[Span]] = {}
    end_of_row: dict[int, float] = {}
    for span in spans:
        middle_us = span.start_us + span.dur_us / 2
        if (span.name in _STAGES or span.name == WRITE) and middle_us >= end_of_row.get(span.row, 0.0):
            found.setdefault(span.name, []).append(span)
            end_of_row[span.row] = span.end_us
    return found


def _works(stage: str, spans: list[Span], by_process: dict[str, list[Span]], ranks: list[str]) -> list[Work]:
    stage_s = _wall_s(spans)
    on_ranks = [(rank, mine) for rank in ranks if (mine := _by_stage(by_process[rank]).get(stage))]
    works: list[Work] = []
    for process, mine in on_ranks or [(CONTROLLER, spans)]:
        units = [span for span in by_process[process] if span.args.get("stage") == stage]
        works.append(_work(process, stage_s, mine, units))
    return works


def _work(process: str, stage_s: float, spans: list[Span], units: list[Span]) -> Work:
    micro = [unit for unit in units if unit.name == Unit.MICRO_BATCH]
    mini = [unit for unit in units if unit.name == Unit.MINI_BATCH]
    wall_s = _wall_s(spans)
    quiet = {
        IN_MICRO_BATCHES: sum(_quiet_s([unit], []) for unit in micro),
        IN_MINI_BATCHES: _quiet_s(mini, micro) if mini else 0.0,
        OUTSIDE_UNITS: _quiet_s(spans, mini or micro),
    }
    awake_s = max(0.0, wall_s - sum(quiet.values()))
    queued_s = min(awake_s, sum(span.args.get("queued_s", 0.0) for span in spans))
    rest = {BUSY: awake_s - queued_s, NO_CORE: queued_s, ABSENT: max(0.0, stage_s - wall_s)}
    cpu = [span.args["cpu_s"] for span in spans if "cpu_s" in span.args]
    tokens = [unit.args["tokens"] for unit in micro if "tokens" in unit.args]
    return Work(
        process,
        Counter(quiet | rest),
        cpu_s=sum(cpu) if len(cpu) == len(spans) else None,
        tokens=sum(tokens) if tokens else None,
        num_units=len(micro) or len(mini),
    )


def _quiet_s(outer: list[Span], inner: list[Span]) -> float:
    """Return the seconds of spans, outside of those within them, in which the process neither ran nor waited for a
    core; 0 where processor time was not recorded, so that nobody is accused.
    """
    if any("cpu_s" not in span.args for span in (*outer, *inner)):
        return 0.0

    def quiet_s(spans: list[Span]) -> float:
        used_s = sum(span.args["cpu_s"] + span.args.get("queued_s", 0.0) for span in spans)
        return _wall_s(spans) - used_s

    return max(0.0, quiet_s(outer) - quiet_s(inner))


def _wall_s(spans: list[Span]) -> float:
    return sum(span.dur_us for span in spans) / 1e6


def _means(by_step: dict[int, list[Work]], num_steps: int) -> list[Work]:
    """Return the work of each process, a mean per step."""
    of_process: dict[str, list[Work]] = defaultdict(list)
    for work in (work for works in by_step.values() for work in works):
        of_process[work.process].append(work)
    means: list[Work] = []
    for process, works in of_process.items():
        total_s = sum((work.seconds for work in works), Counter[str]())
        cpu = [work.cpu_s for work in works if work.cpu_s is not None]
        tokens = [work.tokens for work in works if work.tokens is not None]
        means.append(
            Work(
                process,
                Counter({what: spent_s / num_steps for what, spent_s in total_s.items()}),
                cpu_s=sum(cpu) / num_steps if len(cpu) == len(works) else None,
                tokens=sum(tokens) / num_steps if tokens else None,
                num_units=sum(work.num_units for work in works) / num_steps,
            )
        )
    return means


def reward_calls(timeline: Timeline) -> RewardCalls | None:
    """Return the figures of the reward calls; None where the steps have none."""
    calls = [span for span in timeline.spans if span.name == REWARD_CALL]
    if not calls:
        return None
    covered_us = length(union((call.start_us, call.end_us) for call in calls))
    stage_us = sum(span.dur_us for span in timeline.spans if span.name == Stage.REWARD)
    return RewardCalls(
        per_step=len(calls) / len(timeline.steps),
        num_failed=sum(call.args.get("ok") is False for call in calls),
        median_s=statistics.median(call.dur_us for call in calls) / 1e6,
        longest_s=max(call.dur_us for call in calls) / 1e6,
        at_once=sum(call.dur_us for call in calls) / covered_us if covered_us else 1.0,
        covered_share=min(1.0, covered_us / stage_us) if stage_us else 0.0,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, ascending, that cover the same."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: list[Interval], window: list[Interval]) -> list[Interval]:
    """Return the parts of disjoint intervals that lie within disjoint others; both ascend."""
    parts: list[Interval] = []
    position = 0
    for low, high in window:
        while position < len(intervals) and intervals[position][1] <= low:
            position += 1
        at = position
        while at < len(intervals) and intervals[at][0] < high:
            parts.append((max(low, intervals[at][0]), min(high, intervals[at][1])))
            at += 1
    return parts


def length(intervals: list[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
