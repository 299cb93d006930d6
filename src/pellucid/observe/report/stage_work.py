"""How long each stage of a step takes, and how each process spends it: the spans of a timeline as seconds.

Processor time tells work from waiting: ranks compute in lock step, so the spans of all get long when one is slow. What
is neither work nor waiting for a core is waiting for something else.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pellucid.observe.process import WRITE
from pellucid.observe.report.timeline import CONTROLLER, Span, Timeline
from pellucid.stages import Stage, Unit

OUTSIDE = "outside stages"
BETWEEN = {Stage.VALIDATE: "validate, between steps", Stage.SAVE_CHECKPOINT: "save_checkpoint, between steps"}
REWARD_CALL, TURN, TOOL_CALL = "reward_call", "turn", "tool_call"
BUSY, NO_CORE, ABSENT = "busy", "no core", "absent"
IN_MICRO_BATCHES = "in its micro-batches"
IN_MINI_BATCHES = "in its mini-batches, outside of their micro-batches"
OUTSIDE_UNITS = "outside of its units of work"
_STAGES = frozenset(stage.value for stage in Stage)
Interval = tuple[float, float]


@dataclass(slots=True)
class Work:
    """One process in one stage, a mean per step."""

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
    still_s: dict[int, float] = field(default_factory=dict)
    """By step: how long no process used a core or waited for one."""
    processes: list[Work] = field(default_factory=list)
    """The ranks that ran it, or else the controller."""
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
    """Samples whose last call failed, too."""
    num_timeouts: int
    """Calls that were killed for taking too long, repeats included."""
    timeouts_share: float
    """Of the time in calls."""
    median_s: float
    longest_s: float
    at_once: float
    """Calls that run at the same time, on average over the time in which any does."""
    covered_share: float
    """Of the reward stage's time: some call runs."""


@dataclass(frozen=True, slots=True)
class ToolTime:
    """The calls of a tool, or of an environment, in the steps that are looked at."""

    name: str
    share: float
    """Of the time of the trajectories, which is that of their turns and calls."""
    per_step: float
    median_s: float
    longest_s: float


def stage_times(timeline: Timeline) -> list[StageTime]:
    """Return the time of each stage that ran, in the order of a step: the critical path.

    What profiling itself took between stages is a row of its own, `outside stages` the rest of the step; after it come
    validations and checkpoints between steps.
    """
    spans_of: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.is_own:
            spans_of[span.step][span.process].append(span)
    rows: dict[str, StageTime] = {}
    works: dict[str, list[Work]] = defaultdict(list)

    def row(name: str) -> StageTime:
        return rows.setdefault(name, StageTime(name, dict.fromkeys(timeline.steps, 0.0)))

    for step, whole in timeline.steps.items():
        covered: list[Interval] = []
        for name, spans in _by_stage(spans_of[step][CONTROLLER]).items():
            if name in BETWEEN or name == WRITE:  # other stages may run ahead of the step that they are for
                inside = [span for span in spans if whole.start_us <= span.start_us < whole.end_us]
                after_s = _wall_s(spans) - _wall_s(inside)
                if name in BETWEEN and after_s and step != timeline.last_step:  # after which no frequency asks for it
                    row(BETWEEN[Stage(name)]).seconds[step] = after_s
                spans = inside
            if not spans:
                continue
            stage = row(name)
            stage.seconds[step] = _wall_s(spans)
            stage.begins_s.append((spans[0].start_us - whole.start_us) / 1e6)
            covered += ((span.start_us, span.end_us) for span in spans)
            if name != WRITE:
                of_step = _works(name, spans, spans_of[step], timeline.ranks)
                longest_s = max(work.wall_s for work in of_step)
                stage.still_s[step] = min(longest_s - work.seconds[BUSY] - work.seconds[NO_CORE] for work in of_step)
                works[name] += of_step
        in_stages_us = overlap(covered, [(whole.start_us, whole.end_us)])
        row(OUTSIDE).seconds[step] = max(0.0, whole.dur_us - in_stages_us) / 1e6
    last = [OUTSIDE, *BETWEEN.values()]
    for stage in rows.values():
        stage.share = stage.mean_s / timeline.step_s
        stage.processes = _means(works[stage.name], len(timeline.steps))
    ordered = [stage for stage in rows.values() if stage.name not in last]
    ordered.sort(key=lambda stage: statistics.fmean(stage.begins_s))
    return ordered + [rows[name] for name in last if name in rows]


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
    """Return the work of the ranks that ran a stage in one step, or else of the controller, whose spans are given."""
    stage_s = _wall_s(spans)
    on_ranks = [(rank, mine) for rank in ranks if (mine := _by_stage(by_process[rank]).get(stage))]
    return [
        _work(process, stage_s, mine, [span for span in by_process[process] if span.args.get("stage") == stage])
        for process, mine in on_ranks or [(CONTROLLER, spans)]
    ]


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
    cpu_s, tokens = _total(span.args.get("cpu_s") for span in spans), _total(unit.args.get("tokens") for unit in micro)
    return Work(process, Counter(quiet | rest), cpu_s, tokens, len(micro) or len(mini))


def _total(values: Iterable[float | None]) -> float | None:
    """Return a sum; None where there is nothing to add, or one of the values is not known."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _quiet_s(outer: list[Span], inner: list[Span]) -> float:
    """Return the seconds of spans, outside of those within them, in which the process neither ran nor waited for a
    core; 0 where processor time was not recorded, so that nobody is accused.
    """
    if any("cpu_s" not in span.args for span in (*outer, *inner)):
        return 0.0

    def quiet_s(spans: list[Span]) -> float:
        return _wall_s(spans) - sum(span.args["cpu_s"] + span.args.get("queued_s", 0.0) for span in spans)

    return max(0.0, quiet_s(outer) - quiet_s(inner))


def _wall_s(spans: list[Span]) -> float:
    return sum(span.dur_us for span in spans) / 1e6


def _means(works: list[Work], num_steps: int) -> list[Work]:
    """Return the work of each process, a mean per step."""
    of_process: dict[str, list[Work]] = defaultdict(list)
    for work in works:
        of_process[work.process].append(work)
    means: list[Work] = []
    for process, mine in of_process.items():
        total_s = sum((work.seconds for work in mine), Counter[str]())
        cpu_s, tokens = _total(work.cpu_s for work in mine), _total(work.tokens for work in mine)
        mean = Work(process, Counter({what: spent_s / num_steps for what, spent_s in total_s.items()}),
                    cpu_s and cpu_s / num_steps, tokens and tokens / num_steps,
                    sum(work.num_units for work in mine) / num_steps)  # fmt: skip
        means.append(mean)
    return means


def reward_calls(timeline: Timeline) -> RewardCalls | None:
    """Return the figures of the reward calls; None where the steps have none."""
    calls = [span for span in timeline.spans if span.name == REWARD_CALL]
    if not calls:
        return None
    covered_us = length((call.start_us, call.end_us) for call in calls)
    stage_us = sum(span.dur_us for span in timeline.spans if span.name == Stage.REWARD)
    timeouts = [call.dur_us for call in calls if call.args.get("failure") == "timeout"]
    return RewardCalls(
        per_step=len(calls) / len(timeline.steps),
        num_failed=sum(call.args["ok"] is False and call.args.get("last", True) for call in calls),
        num_timeouts=len(timeouts),
        timeouts_share=sum(timeouts) / max(1.0, sum(call.dur_us for call in calls)),
        median_s=statistics.median(call.dur_us for call in calls) / 1e6,
        longest_s=max(call.dur_us for call in calls) / 1e6,
        at_once=sum(call.dur_us for call in calls) / covered_us if covered_us else 1.0,
        covered_share=min(1.0, covered_us / stage_us) if stage_us else 0.0,
    )


def tool_times(timeline: Timeline) -> list[ToolTime]:
    """Return the figures of each tool that was called, the one that trajectories spend most time in first."""
    taken_us: dict[str, list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.name in (TURN, TOOL_CALL):
            taken_us[span.args.get("tool", TURN)].append(span.dur_us)
    whole_us = sum(map(sum, taken_us.values()))
    taken_us.pop(TURN, None)
    num_steps, median = len(timeline.steps), statistics.median
    times = [
        ToolTime(name, sum(each) / whole_us, len(each) / num_steps, median(each) / 1e6, max(each) / 1e6)
        for name, each in taken_us.items()
    ]
    return sorted(times, key=lambda tool: -tool.share)


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of all that some interval covers."""
    total, covered_to = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


def overlap(intervals: list[Interval], window: list[Interval]) -> float:
    """Return the length of what both cover."""
    return length(intervals) + length(window) - length([*intervals, *window])
