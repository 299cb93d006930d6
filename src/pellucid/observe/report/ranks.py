"""Who works, who waits and who holds the others up: the processes of a stage against each other.

A process's time in a stage is divided into its micro-batches, the optimizer step around them, and the gaps between
units. Processor time tells work from waiting: ranks compute in lock step, so the spans of all get long when one is
slow. What is neither work nor waiting for a core is waiting for something else.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pellucid.observe.report.steps import ChosenSteps, StepSpans, top_level
from pellucid.observe.report.timeline import Process, Span, Timeline
from pellucid.stages import Stage, Unit

UNITS = (Unit.MINI_BATCH.value, Unit.MICRO_BATCH.value)
NOT_COMPUTE = (Stage.REWARD, Stage.WEIGHT_SYNC, Stage.VALIDATE, Stage.SAVE_CHECKPOINT)
"""Stages that work in other processes, the network or the disk: little processor time says nothing there."""
MIN_QUIET_SHARE = 0.3
"""Of an interval: with less the process works there, and waits a little in between."""
MIN_GAP_SHARE = 0.02
"""Of a stage: shorter gaps hold nobody up."""


class Kind(StrEnum):
    """What a process is doing by its spans."""

    MICRO_BATCH = "in its micro-batches"
    MINI_BATCH = "in its mini-batches, outside of their micro-batches"
    BEFORE = "before its first unit of work"
    BETWEEN = "between its units of work"
    AFTER = "after its last unit of work"
    WHOLE = "somewhere in it, for it has no units of work"


IN_UNIT = (Kind.MICRO_BATCH, Kind.MINI_BATCH)
IN_GAP = (Kind.BEFORE, Kind.BETWEEN, Kind.AFTER)


@dataclass(slots=True)
class StageWork:
    """What one process did in one stage of one step; times are seconds."""

    process: Process
    stage: str
    step: int
    spans: list[Span]
    cpu_s: float | None
    tokens: int | None
    num_units: int = 0
    units_s: float = 0.0
    """Within units of work."""
    busy_s: float = 0.0
    """At least one core was in use, as far as processor time tells."""
    queued_s: float = 0.0
    """There was work to do and no core to be had."""
    quiet_s: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """The process waited for something else than a core."""
    still_s: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """The same, of the intervals in which it hardly did anything else."""

    @property
    def wall_s(self) -> float:
        """Seconds in the stage."""
        return sum(span.dur_us for span in self.spans) / 1e6

    @property
    def end_us(self) -> float:
        """When the process left the stage."""
        return max(span.end_us for span in self.spans)

    def total(self, seconds: dict[Kind, float], kinds: Iterable[Kind]) -> float:
        """Return the seconds of some kinds together."""
        return sum(seconds.get(kind, 0.0) for kind in kinds)

    def add(self, kind: Kind, seconds: float, busy: float, queued: float) -> None:
        """Add an interval of which shares were `busy` and `queued`."""
        quiet = max(0.0, 1.0 - busy - queued)
        self.busy_s += seconds * busy
        self.queued_s += seconds * queued
        self.quiet_s[kind] += seconds * quiet
        if quiet >= MIN_QUIET_SHARE:
            self.still_s[kind] += seconds * quiet


@dataclass(slots=True)
class ProcessShare:
    """One process in one stage, means per step: the stage's time is `busy + queued + waiting + idle + absent`."""

    process: str
    stage: str
    wall_s: float
    busy_s: float
    """Some core in use."""
    queued_s: float
    """Work to do, and no core to be had."""
    waiting_s: float
    """In a unit of work, neither: for other ranks, for a device, or asleep."""
    idle_s: float
    """In the stage between units of work, neither."""
    absent_s: float
    """The stage runs, but not in this process: it has not begun yet, or is done."""
    cpu_s: float | None
    tokens: float | None
    num_units: float


@dataclass(slots=True)
class Imbalance:
    """A stage in which one rank has more to do than the others."""

    stage: str
    by: str
    """What was compared: `processor time` or `tokens`."""
    slowest: str
    """The rank with the most."""
    ratio: float
    """The most over the mean of all ranks, by what was compared."""
    work: dict[str, float]
    """Mean per step of what was compared, by rank: seconds or tokens."""
    tokens: dict[str, float] | None
    tokens_ratio: float | None
    lost_s: float
    """Mean per step of what the stage would take less if all had the same."""
    waits_s: float
    """Mean per step and rank that the others wait or are absent."""


@dataclass(slots=True)
class Stall:
    """Time in a computing stage in which no process uses a core or waits for one."""

    stage: str
    processes: tuple[str, ...]
    """Who holds it up; several where the spans cannot tell."""
    is_known: bool
    """Whether these stand still of themselves: they alone take part, or the others wait in a unit of work."""
    where: Kind
    lost_s: float
    """Mean per step."""
    stage_share: float
    """Of the stage's time, in the steps in which it happens."""
    steps: tuple[int, ...]
    longest_s: float
    longest_step: int


@dataclass(slots=True)
class PathLeg:
    """A stage on the critical path of a step, and the process that the others wait for in it."""

    stage: str
    start_s: float
    """Since the step's start."""
    wall_s: float
    process: str
    """The limiting one."""
    own_s: float
    """Of the stage, for which it answers: its work, and when it stood still."""
    num_units: int
    units_s: float
    tokens: int | None
    others: int
    """Further processes in the stage."""


Works = dict[str, list[list[StageWork]]]
"""By stage, one list of processes for each step that ran it."""


def all_work(timeline: Timeline, chosen: ChosenSteps) -> Works:
    """Return the work of every stage of the chosen steps."""
    works: Works = defaultdict(list)
    for step in chosen.steps:
        for stage in step.stages:
            if found := stage_work(timeline, step, stage):
                works[stage].append(found)
    return works


def stage_work(timeline: Timeline, step: StepSpans, stage: str) -> list[StageWork]:
    """Return what each process did in a stage: the ranks that ran it, or else the controller."""
    on_ranks = [work for rank in timeline.ranks if (work := _work_of(rank, step.step, stage, None)) is not None]
    if on_ranks:
        return on_ranks
    own = _work_of(timeline.controller, step.step, stage, step.stages.get(stage))
    return [] if own is None else [own]


def _work_of(process: Process, step: int, stage: str, spans: list[Span] | None) -> StageWork | None:
    """Return a process's work in a stage; `spans` are the stage's own where they are known already."""
    all_spans = [span for span in process.steps.get(step, []) if span.is_own]
    if spans is None:
        spans = top_level([span for span in all_spans if span.name == stage])
    if not spans:
        return None
    units = [span for span in all_spans if span.name in UNITS and span.args.get("stage", stage) == stage]
    cpu = [span.cpu_s for span in spans if span.cpu_s is not None]
    micros = [unit for unit in units if unit.name == Unit.MICRO_BATCH]
    tokens = [unit.args["tokens"] for unit in micros if "tokens" in unit.args]
    cpu_s = sum(cpu) if len(cpu) == len(spans) else None
    work = StageWork(process, stage, step, spans, cpu_s, sum(tokens) if tokens else None, len(micros) or len(units))
    for span in spans:
        _divide(work, span, [unit for unit in units if span.contains(unit)])
    return work


def _divide(work: StageWork, stage: Span, units: list[Span]) -> None:
    """Add one span of a stage to its work, unit by unit and gap by gap."""
    outer = top_level(units)
    in_gaps = _rates(stage, outer)
    if not outer:
        work.add(Kind.WHOLE, stage.dur_us / 1e6, *in_gaps)
        return
    position = stage.start_us
    for index, unit in enumerate(outer):
        work.add(Kind.BETWEEN if index else Kind.BEFORE, max(0.0, unit.start_us - position) / 1e6, *in_gaps)
        inner = [unit] if unit.name == Unit.MICRO_BATCH else [each for each in units if unit.contains(each)]
        for micro in inner:
            work.add(Kind.MICRO_BATCH, micro.dur_us / 1e6, *_rates(micro, []))
        if unit.name != Unit.MICRO_BATCH:
            rest_us = unit.dur_us - sum(micro.dur_us for micro in inner)
            work.add(Kind.MINI_BATCH, max(0.0, rest_us) / 1e6, *_rates(unit, inner))
        work.units_s += unit.dur_us / 1e6
        position = unit.end_us
    work.add(Kind.AFTER, max(0.0, stage.end_us - position) / 1e6, *in_gaps)


def _rates(outer: Span, inner: list[Span]) -> tuple[float, float]:
    """Return the shares busy and queued of what a span has outside of those within it.

    Where processor time was not recorded all of it counts as busy, so that nobody is accused.
    """
    rest_s = (outer.dur_us - sum(span.dur_us for span in inner)) / 1e6
    cpu = [span.cpu_s for span in inner if span.cpu_s is not None]
    if outer.cpu_s is None or len(cpu) < len(inner) or rest_s <= 0:
        return 1.0, 0.0
    busy = min(1.0, max(0.0, outer.cpu_s - sum(cpu)) / rest_s)
    queued = max(0.0, (outer.queued_s or 0.0) - sum(span.queued_s or 0.0 for span in inner)) / rest_s
    return busy, min(1.0 - busy, queued)


def process_shares(works: Works, chosen: ChosenSteps) -> list[ProcessShare]:
    """Return how each process spends each stage, means over the steps that are looked at."""
    num_steps = len(chosen.steps)
    stage_s = {(step.step, stage): step.stage_s(stage) for step in chosen.steps for stage in step.stages}
    shares: list[ProcessShare] = []
    for stage, of_steps in works.items():
        by_process: dict[str, list[StageWork]] = defaultdict(list)
        for work in (work for found in of_steps for work in found):
            by_process[work.process.name].append(work)
        for name, mine in by_process.items():
            cpu = [work.cpu_s for work in mine if work.cpu_s is not None]
            tokens = [work.tokens for work in mine if work.tokens is not None]
            has_units = any(work.num_units for work in mine)
            waiting, idle = (IN_UNIT, (*IN_GAP, Kind.WHOLE)) if has_units else ((Kind.WHOLE,), IN_GAP)
            shares.append(
                ProcessShare(
                    process=name,
                    stage=stage,
                    wall_s=sum(work.wall_s for work in mine) / num_steps,
                    busy_s=sum(work.busy_s for work in mine) / num_steps,
                    queued_s=sum(work.queued_s for work in mine) / num_steps,
                    waiting_s=sum(work.total(work.quiet_s, waiting) for work in mine) / num_steps,
                    idle_s=sum(work.total(work.quiet_s, idle) for work in mine) / num_steps,
                    absent_s=sum(max(0.0, stage_s[work.step, stage] - work.wall_s) for work in mine) / num_steps,
                    cpu_s=sum(cpu) / num_steps if len(cpu) == len(mine) else None,
                    tokens=sum(tokens) / num_steps if tokens else None,
                    num_units=sum(work.num_units for work in mine) / num_steps,
                )
            )
    return shares


def find_imbalances(works: Works, num_steps: int, *, cpu_tells: bool) -> list[Imbalance]:
    """Return for each stage that several ranks of a pool share how unevenly it is divided, whether that matters or not.

    Args:
        works: of `all_work`.
        num_steps: steps that are looked at; what is lost is a mean over these.
        cpu_tells: whether processor time shows work: not where it is done by a device that the process polls.
    """
    found: list[Imbalance] = []
    for stage, of_steps in works.items():
        for pool in sorted({work.process.pool for step in of_steps for work in step}):
            shared = [[work for work in step if work.process.pool == pool] for step in of_steps]
            shared = [step for step in shared if len(step) > 1]
            everyone = [work for step in shared for work in step]
            has_cpu = cpu_tells and all(work.cpu_s is not None for work in everyone)
            has_tokens = all(work.tokens is not None for work in everyone)
            if everyone and (has_cpu or has_tokens):
                found.append(_imbalance(stage, shared, num_steps, has_cpu=has_cpu, has_tokens=has_tokens))
    return sorted(found, key=lambda imbalance: -imbalance.lost_s)


def _imbalance(
    stage: str, shared: list[list[StageWork]], num_steps: int, *, has_cpu: bool, has_tokens: bool
) -> Imbalance:
    def amount(work: StageWork) -> float:
        return float((work.cpu_s if has_cpu else work.tokens) or 0.0)

    lost = 0.0
    totals: dict[str, float] = defaultdict(float)
    tokens: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    for step in shared:
        most, mean = max(step, key=amount), sum(map(amount, step)) / len(step)
        longest_s = max(work.wall_s for work in step)
        if has_cpu:
            # Processor seconds as wall time: the busiest rank shows how many processors a rank keeps busy.
            lost += (amount(most) - mean) / max(1.0, amount(most) / max(most.wall_s, 1e-9))
        elif amount(most):
            lost += longest_s * (1 - mean / amount(most))
        for work in step:
            totals[work.process.name] += amount(work) / num_steps
            tokens[work.process.name] += (work.tokens or 0) / num_steps
            waits[work.process.name] += max(0.0, longest_s - work.busy_s - work.queued_s) / num_steps
    slowest = max(totals, key=lambda name: totals[name])
    others = [seconds for name, seconds in waits.items() if name != slowest]
    return Imbalance(
        stage=stage,
        by="processor time" if has_cpu else "tokens",
        slowest=slowest,
        ratio=_most_over_mean(totals.values()),
        work=dict(totals),
        tokens=dict(tokens) if has_tokens else None,
        tokens_ratio=_most_over_mean(tokens.values()) if has_tokens else None,
        lost_s=lost / num_steps,
        waits_s=sum(others) / max(1, len(others)),
    )


def _most_over_mean(values: Iterable[float]) -> float:
    numbers = list(values)
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class _Still:
    """Time of a stage in one step in which nobody computes."""

    processes: tuple[str, ...]
    is_known: bool
    where: Kind
    seconds: float
    step: int


def find_stalls(works: Works, num_steps: int) -> list[Stall]:
    """Return by stage and culprit the time in which every process of the stage stands still, whether it matters or
    not.
    """
    stalls: list[Stall] = []
    for stage, of_steps in works.items():
        if stage in NOT_COMPUTE:
            continue
        wall_of = {found[0].step: max(work.wall_s for work in found) for found in of_steps}
        by_culprit: dict[tuple[tuple[str, ...], bool], list[_Still]] = defaultdict(list)
        for still in (still for found in of_steps for still in _stand_stills(found)):
            by_culprit[still.processes, still.is_known].append(still)
        for (names, is_known), mine in by_culprit.items():
            longest = max(mine, key=lambda still: still.seconds)
            lost = sum(still.seconds for still in mine)
            stalls.append(
                Stall(
                    stage=stage,
                    processes=names,
                    is_known=is_known,
                    where=longest.where,
                    lost_s=lost / num_steps,
                    stage_share=lost / sum(wall_of[still.step] for still in mine),
                    steps=tuple(sorted(still.step for still in mine)),
                    longest_s=longest.seconds,
                    longest_step=longest.step,
                )
            )
    return sorted(stalls, key=lambda stall: -stall.lost_s)


def _stand_stills(works: list[StageWork]) -> list[_Still]:
    """Return the time of a stage in which nothing computes or could, by who answers for it."""
    least_s = MIN_GAP_SHARE * max(work.wall_s for work in works)
    if len(works) == 1:
        found = [_still(works, True, tuple(Kind), works[0].total(works[0].still_s, Kind))]
    elif not any(work.num_units for work in works):
        found = [_apart(works)]
    else:
        found = _in_lock_step(works, least_s)
    return [still for still in found if still.seconds >= least_s > 0]


def _apart(works: list[StageWork]) -> _Still:
    """Return by how much a stage would end earlier in which each process works for itself, if none stood still."""
    own_end_us = [work.end_us - 1e6 * work.still_s.get(Kind.WHOLE, 0.0) for work in works]
    late = [work for work in works if work.end_us > max(own_end_us)]
    end_us = max(work.end_us for work in works)
    return _still(late or works, True, (Kind.WHOLE,), (end_us - max(own_end_us)) / 1e6)


def _in_lock_step(works: list[StageWork], least_s: float) -> list[_Still]:
    """Return when one process stands still in a gap and all others wait in units of work, and when all do the
    latter.
    """
    waits = [work.total(work.still_s, IN_UNIT) for work in works]
    left = list(waits)
    found: list[_Still] = []
    for index, work in enumerate(works):
        others = [wait for other, wait in enumerate(waits) if other != index]
        lost = min(work.total(work.still_s, (*IN_GAP, Kind.WHOLE)), *others)
        if lost >= least_s:
            found.append(_still([work], True, (*IN_GAP, Kind.WHOLE), lost))
            left = [wait - lost * (other != index) for other, wait in enumerate(left)]
    return [*found, _still(works, False, IN_UNIT, min(left))]


def _still(works: list[StageWork], is_known: bool, kinds: tuple[Kind, ...], seconds: float) -> _Still:
    where = max(kinds, key=lambda kind: works[0].still_s.get(kind, 0.0))
    return _Still(tuple(work.process.name for work in works), is_known, where, seconds, works[0].step)


def critical_path(timeline: Timeline, step: StepSpans) -> list[PathLeg]:
    """Return the stages of a step in their order, each with the process that it takes its time from."""
    legs: list[PathLeg] = []
    for stage, spans in step.stages.items():
        works = stage_work(timeline, step, stage)
        own = {work.process.name: work.busy_s + work.queued_s for work in works}
        for still in _stand_stills(works):
            for name in still.processes:
                own[name] += still.seconds
        most = max(own.values(), default=0.0)
        # Nearly equal: the one that ends last.
        near = [work for work in works if own[work.process.name] >= most * 0.98]
        limiting = max(near, key=lambda work: work.end_us)
        legs.append(
            PathLeg(
                stage=stage,
                start_s=(spans[0].start_us - step.span.start_us) / 1e6,
                wall_s=step.stage_s(stage),
                process=limiting.process.name,
                own_s=own[limiting.process.name],
                num_units=limiting.num_units,
                units_s=limiting.units_s,
                tokens=limiting.tokens,
                others=len(works) - 1,
            )
        )
    return sorted(legs, key=lambda leg: leg.start_s)
