"""Who works, who waits and who holds the others up: the processes of a stage against each other.

A stage of a process is cut into leaves: micro-batches, the optimizer step around them, and the gaps between units. Processor
time tells work from waiting: ranks compute in lock step, so the spans of all get long when one is slow. What is neither work nor
waiting for a core is waiting for something else.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pellucid.profiler.report.steps import ChosenSteps, StepSpans, top_level
from pellucid.profiler.report.timeline import Process, Span, Timeline
from pellucid.stages import Stage, Unit

UNITS = (Unit.MINI_BATCH.value, Unit.MICRO_BATCH.value)
NOT_COMPUTE = (Stage.REWARD, Stage.WEIGHT_SYNC, Stage.VALIDATE, Stage.SAVE_CHECKPOINT)
"""Stages that work in other processes, the network or the disk: little processor time says nothing there."""


class Kind(StrEnum):
    """What a process is doing by its spans."""

    MICRO_BATCH = "in its micro-batches"
    MINI_BATCH = "in its mini-batches, outside of their micro-batches"
    BEFORE = "before its first unit of work"
    BETWEEN = "between its units of work"
    AFTER = "after its last unit of work"
    WHOLE = "somewhere in it, for it has no units of work"


IN_UNIT = (Kind.MICRO_BATCH, Kind.MINI_BATCH)


@dataclass(frozen=True, slots=True)
class Leaf:
    """An interval in which a process does one thing."""

    start_us: float
    end_us: float
    kind: Kind
    busy: float
    """Share of it in which some core was in use, as far as processor time tells."""
    queued: float
    """Share of it in which there was work to do and no core to be had."""
    number: int = 0
    """Which micro-batch of the stage, counted from 1."""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return (self.end_us - self.start_us) / 1e6

    @property
    def quiet(self) -> float:
        """Share of it in which the process waited for something else than a core."""
        return max(0.0, 1.0 - self.busy - self.queued)


@dataclass(slots=True)
class StageWork:
    """What one process did in one stage of one step."""

    process: Process
    stage: str
    step: int
    spans: list[Span]
    leaves: list[Leaf]
    num_units: int
    units_s: float
    """Seconds within units of work."""
    cpu_s: float | None
    tokens: int | None

    @property
    def wall_s(self) -> float:
        """Seconds in the stage."""
        return sum(span.dur_us for span in self.spans) / 1e6

    @property
    def end_us(self) -> float:
        """When the process left the stage."""
        return max(span.end_us for span in self.spans)

    def busy_s(self) -> float:
        """Return the seconds in which at least one core was in use, as far as processor time tells."""
        return sum(leaf.seconds * leaf.busy for leaf in self.leaves)

    def queued_s(self) -> float:
        """Return the seconds in which there was work to do and no core to be had."""
        return sum(leaf.seconds * leaf.queued for leaf in self.leaves)

    def quiet_s(self, kinds: Iterable[Kind]) -> float:
        """Return the seconds of such leaves in which the process waited for something else than a core."""
        wanted = set(kinds)
        return sum(leaf.seconds * leaf.quiet for leaf in self.leaves if leaf.kind in wanted)


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
    gaps_s: float
    """In the stage and in no unit of work, whatever the processor did."""


@dataclass(slots=True)
class Imbalance:
    """A stage in which one rank has more to do than the others."""

    stage: str
    pool: str
    by: str
    """What was compared: `processor time` or `tokens`."""
    slowest: str
    """The rank with the most, in most steps."""
    how_often: float
    """Share of the steps in which it is this one."""
    ratio: float
    """The most over the mean of all ranks, by what was compared."""
    work: dict[str, float]
    """Mean per step of what was compared, by rank: seconds or tokens."""
    tokens: dict[str, float] | None
    tokens_ratio: float | None
    lost_s: float
    """Mean per step of what the stage would take less if all had the same."""
    waits_s: dict[str, float]
    """Mean per step that each of the others waits or is absent."""


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
    longest_number: int
    """Micro-batch of the longest one; 0 where it is in none."""
    num_leaves: int
    """In how many intervals it shows."""


def worker_processes(timeline: Timeline) -> list[Process]:
    """Return the processes that hold models: the ranks, or where there are none the controller."""
    return timeline.ranks or [timeline.controller]


def stage_work(timeline: Timeline, step: StepSpans, stage: str) -> list[StageWork]:
    """Return what each process did in a stage: the ranks that ran it, or else the controller."""
    on_ranks = [work for rank in timeline.ranks if (work := _work_of(rank, step.step, stage, None)) is not None]
    if on_ranks:
        return on_ranks
    own = _work_of(timeline.controller, step.step, stage, step.stages.get(stage))
    return [] if own is None else [own]


def all_work(timeline: Timeline, chosen: ChosenSteps) -> dict[str, list[list[StageWork]]]:
    """Return the work of every stage: by stage, one list of processes for each step that ran it."""
    works: dict[str, list[list[StageWork]]] = defaultdict(list)
    for step in chosen.steps:
        for stage in step.stages:
            if found := stage_work(timeline, step, stage):
                works[stage].append(found)
    return works


def process_shares(works: dict[str, list[list[StageWork]]], chosen: ChosenSteps) -> list[ProcessShare]:
    """Return how each process spends each stage, means over the steps that are looked at."""
    num_steps = len(chosen.steps)
    stage_s = {(step.step, stage): step.stage_s(stage) for step in chosen.steps for stage in step.stages}
    shares: list[ProcessShare] = []
    for stage, of_steps in works.items():
        by_process: dict[str, list[StageWork]] = defaultdict(list)
        for found in of_steps:
            for work in found:
                by_process[work.process.name].append(work)
        for name, mine in by_process.items():
            wall = sum(work.wall_s for work in mine)
            cpu = [work.cpu_s for work in mine if work.cpu_s is not None]
            tokens = [work.tokens for work in mine if work.tokens is not None]
            has_units = any(work.num_units for work in mine)
            quiet_in_units = IN_UNIT if has_units else (*IN_UNIT, Kind.WHOLE)
            quiet_between = [kind for kind in Kind if kind not in quiet_in_units]
            shares.append(
                ProcessShare(
                    process=name,
                    stage=stage,
                    wall_s=wall / num_steps,
                    busy_s=sum(work.busy_s() for work in mine) / num_steps,
                    queued_s=sum(work.queued_s() for work in mine) / num_steps,
                    waiting_s=sum(work.quiet_s(quiet_in_units) for work in mine) / num_steps,
                    idle_s=sum(work.quiet_s(quiet_between) for work in mine) / num_steps,
                    absent_s=sum(max(0.0, stage_s[work.step, stage] - work.wall_s) for work in mine) / num_steps,
                    cpu_s=sum(cpu) / num_steps if len(cpu) == len(mine) else None,
                    tokens=sum(tokens) / num_steps if tokens else None,
                    num_units=sum(work.num_units for work in mine) / num_steps,
                    gaps_s=sum(work.wall_s - work.units_s for work in mine) / num_steps if has_units else 0.0,
                )
            )
    return shares


def find_imbalances(
    works: dict[str, list[list[StageWork]]], num_steps: int, *, cpu_tells: bool
) -> list[Imbalance]:
    """Return for each stage that several ranks of a pool share how unevenly it is divided, whether that matters or not.

    Args:
        works: of `all_work`.
        num_steps: steps that are looked at; what is lost is a mean over these.
        cpu_tells: whether processor time shows work: not where it is done by a device that the process polls.
    """
    found: list[Imbalance] = []
    for stage, of_steps in works.items():
        pools = {work.process.pool for works_of_step in of_steps for work in works_of_step}
        for pool in sorted(pools):
            shared = [[work for work in step if work.process.pool == pool] for step in of_steps]
            shared = [step for step in shared if len(step) > 1]
            if shared and (imbalance := _imbalance(stage, pool, shared, num_steps, cpu_tells)) is not None:
                found.append(imbalance)
    return sorted(found, key=lambda imbalance: -imbalance.lost_s)


def find_stalls(works: dict[str, list[list[StageWork]]], num_steps: int) -> list[Stall]:
    """Return by stage and culprit the time in which every process of the stage stands still, whether it matters or not."""
    stalls: list[Stall] = []
    for stage, of_steps in works.items():
        if stage in NOT_COMPUTE:
            continue
        stills = [still for found in of_steps for still in _stand_stills(found)]
        by_culprit: dict[tuple[tuple[str, ...], bool], list[_Still]] = defaultdict(list)
        for still in stills:
            by_culprit[still.processes, still.is_known].append(still)
        wall_of = {found[0].step: max(work.wall_s for work in found) for found in of_steps}
        for (names, is_known), mine in by_culprit.items():
            stalls.append(_stall(stage, names, is_known, mine, wall_of, num_steps))
    return sorted(stalls, key=lambda stall: -stall.lost_s)


def own_seconds(works: list[StageWork]) -> dict[str, float]:
    """Return by process the time for which it answers: its work, waits for a core, and when it stood still of itself."""
    own = {work.process.name: work.busy_s() + work.queued_s() for work in works}
    for still in _stand_stills(works):
        for name in still.processes:
            own[name] += still.seconds
    return own


def _work_of(process: Process, step: int, stage: str, spans: list[Span] | None) -> StageWork | None:
    """Return a process's work in a stage; `spans` are the stage's own where they are known already."""
    all_spans = process.steps.get(step, [])
    if spans is None:
        spans = top_level([span for span in all_spans if span.name == stage and span.lane == 0])
    if not spans:
        return None
    units = [span for span in all_spans if span.name in UNITS and span.lane == 0 and span.args.get("stage", stage) == stage]
    cpu = [span.cpu_s for span in spans if span.cpu_s is not None]
    micros = [unit for unit in units if unit.name == Unit.MICRO_BATCH]
    tokens = [unit.args["tokens"] for unit in micros if "tokens" in unit.args]
    leaves: list[Leaf] = []
    units_s = 0.0
    num_micros = 0
    for span in spans:
        inside = [unit for unit in units if span.contains(unit)]
        leaves += _leaves(span, inside, num_micros)
        num_micros += sum(unit.name == Unit.MICRO_BATCH for unit in inside)
        units_s += sum(unit.dur_us for unit in top_level(inside)) / 1e6
    return StageWork(
        process=process,
        stage=stage,
        step=step,
        spans=spans,
        leaves=leaves,
        num_units=len(micros) or len(units),
        units_s=units_s,
        cpu_s=sum(cpu) if len(cpu) == len(spans) else None,
        tokens=sum(tokens) if tokens else None,
    )


def _leaves(stage: Span, units: list[Span], num_before: int) -> list[Leaf]:
    """Cut one stage span into leaves; `num_before` micro-batches of the stage came in earlier spans."""
    outer = top_level(units)
    in_gaps = _rest_rates(stage, outer)
    if not outer:
        return [Leaf(stage.start_us, stage.end_us, Kind.WHOLE, *in_gaps)]
    leaves: list[Leaf] = []
    number = num_before
    at = stage.start_us
    for index, unit in enumerate(outer):
        if unit.start_us > at:
            leaves.append(Leaf(at, unit.start_us, Kind.BETWEEN if index else Kind.BEFORE, *in_gaps))
        inner = [other for other in units if unit.contains(other) and other.name == Unit.MICRO_BATCH]
        if not inner and unit.name == Unit.MICRO_BATCH:
            number += 1
            leaves.append(Leaf(unit.start_us, unit.end_us, Kind.MICRO_BATCH, *_rates(unit), number))
        else:
            around = _rest_rates(unit, inner)
            position = unit.start_us
            for micro in inner:
                number += 1
                leaves.append(Leaf(position, micro.start_us, Kind.MINI_BATCH, *around))
                leaves.append(Leaf(micro.start_us, micro.end_us, Kind.MICRO_BATCH, *_rates(micro), number))
                position = micro.end_us
            leaves.append(Leaf(position, unit.end_us, Kind.MINI_BATCH, *around))
        at = unit.end_us
    if stage.end_us > at:
        leaves.append(Leaf(at, stage.end_us, Kind.AFTER, *in_gaps))
    return [leaf for leaf in leaves if leaf.end_us > leaf.start_us]


def _rates(span: Span) -> tuple[float, float]:
    """Return the shares of a span that were busy and queued; all busy where it was not recorded, so that nobody is accused."""
    return _rest_rates(span, [])


def _rest_rates(outer: Span, inner: list[Span]) -> tuple[float, float]:
    """Return the shares busy and queued of what a span has outside of those within it."""
    rest_s = (outer.dur_us - sum(span.dur_us for span in inner)) / 1e6
    cpu = [span.cpu_s for span in inner if span.cpu_s is not None]
    if outer.cpu_s is None or len(cpu) < len(inner) or rest_s <= 0:
        return 1.0, 0.0
    busy = min(1.0, max(0.0, outer.cpu_s - sum(cpu)) / rest_s)
    queued = max(0.0, (outer.queued_s or 0.0) - sum(span.queued_s or 0.0 for span in inner)) / rest_s
    return busy, min(1.0 - busy, queued)


def _imbalance(stage: str, pool: str, shared: list[list[StageWork]], num_steps: int, cpu_tells: bool) -> Imbalance | None:
    has_cpu = cpu_tells and all(work.cpu_s is not None for step in shared for work in step)
    has_tokens = all(work.tokens is not None for step in shared for work in step)
    if not has_cpu and not has_tokens:
        return None

    def amount(work: StageWork) -> float:
        value = work.cpu_s if has_cpu else work.tokens
        assert value is not None
        return float(value)

    lost = 0.0
    slowest_of_step: list[str] = []
    totals: dict[str, float] = defaultdict(float)
    tokens: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    for step in shared:
        most = max(step, key=amount)
        mean = sum(map(amount, step)) / len(step)
        slowest_of_step.append(most.process.name)
        if has_cpu:
            # Processor seconds as wall time: the busiest rank shows how many processors a rank keeps busy.
            lost += (amount(most) - mean) / max(1.0, amount(most) / max(most.wall_s, 1e-9))
        elif amount(most):
            lost += max(work.wall_s for work in step) * (1 - mean / amount(most))
        longest = max(work.wall_s for work in step)
        for work in step:
            totals[work.process.name] += amount(work) / num_steps
            tokens[work.process.name] += (work.tokens or 0) / num_steps
            waits[work.process.name] += max(0.0, longest - work.busy_s() - work.queued_s()) / num_steps
    slowest = max(totals, key=lambda name: totals[name])
    return Imbalance(
        stage=stage,
        pool=pool,
        by="processor time" if has_cpu else "tokens",
        slowest=slowest,
        how_often=slowest_of_step.count(slowest) / len(slowest_of_step),
        ratio=_most_over_mean(totals.values()),
        work=dict(totals),
        tokens=dict(tokens) if has_tokens else None,
        tokens_ratio=_most_over_mean(tokens.values()) if has_tokens else None,
        lost_s=lost / num_steps,
        waits_s={name: seconds for name, seconds in waits.items() if name != slowest},
    )


def _most_over_mean(values: Iterable[float]) -> float:
    numbers = list(values)
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0


@dataclass(slots=True)
class _Still:
    """An interval in which nobody computes."""

    processes: tuple[str, ...]
    is_known: bool
    leaf: Leaf
    seconds: float
    step: int


_MIN_QUIET_SHARE = 0.3
"""Of an interval: with less the process works there, and waits a little in between."""
_MIN_GAP_SHARE = 0.02
"""Of a stage: shorter gaps hold nobody up."""


def _stand_stills(works: list[StageWork]) -> list[_Still]:
    """Return the time of a stage in which nothing computes or could, by who answers for it."""
    if len(works) == 1:
        name = works[0].process.name
        return [
            _Still((name,), True, leaf, leaf.seconds * leaf.quiet, works[0].step)
            for leaf in works[0].leaves
            if leaf.quiet >= _MIN_QUIET_SHARE
        ]
    return [*_waits_for_one(works), *_waits_of_all(works)]


def _waits_for_one(works: list[StageWork]) -> list[_Still]:
    """Return when a process is in a gap and does nothing, and all others, in units of work, have nothing to do either.

    They wait in a collective for it. How long is known for whole units only: as long as the least quiet of them allows.
    """
    found: list[_Still] = []
    least_s = _MIN_GAP_SHARE * max(work.wall_s for work in works)
    for work in works:
        for gap in work.leaves:
            if gap.kind in IN_UNIT or gap.quiet < _MIN_QUIET_SHARE or gap.seconds < least_s:
                continue
            others = min(_quiet_beside(gap, other) for other in works if other is not work)
            lost = min(gap.seconds * gap.quiet, others)
            if lost >= least_s:
                found.append(_Still((work.process.name,), True, gap, lost, work.step))
    return found


def _quiet_beside(gap: Leaf, other: StageWork) -> float:
    """Return for how long at most another process waits, in units of work, while one is in a gap."""
    total = 0.0
    for leaf in other.leaves:
        overlap = (min(gap.end_us, leaf.end_us) - max(gap.start_us, leaf.start_us)) / 1e6
        if overlap > 0 and leaf.kind in IN_UNIT:
            total += min(overlap, leaf.seconds * leaf.quiet)
    return total


def _waits_of_all(works: list[StageWork]) -> list[_Still]:
    """Return when all processes in the stage are in units of work, or all in gaps, and none computes.

    A process that is alone in the stage, because the others are done, answers for itself; otherwise it may be any of them.
    """
    edges: list[tuple[float, int, int, Leaf]] = []
    for index, work in enumerate(works):
        for leaf in work.leaves:
            edges += [(leaf.start_us, 1, index, leaf), (leaf.end_us, 0, index, leaf)]
    edges.sort(key=lambda edge: edge[:3])
    here: dict[int, Leaf] = {}
    num_in_gaps = 0
    found: dict[tuple[tuple[int, ...], float], _Still] = {}
    at = edges[0][0]
    for time_us, begins, index, leaf in edges:
        if time_us > at and num_in_gaps in (0, len(here)):
            quiet = min((other.quiet for other in here.values()), default=0.0)
            if quiet >= _MIN_QUIET_SHARE:
                culprits = tuple(sorted(here))
                first = here[culprits[0]]
                names = tuple(works[number].process.name for number in culprits)
                mark = _Still(names, len(culprits) == 1, first, 0.0, works[0].step)
                found.setdefault((culprits, first.start_us), mark).seconds += quiet * (time_us - at) / 1e6
        if begins:
            here[index] = leaf
            num_in_gaps += leaf.kind not in IN_UNIT
        elif here.get(index) is leaf:
            del here[index]
            num_in_gaps -= leaf.kind not in IN_UNIT
        at = time_us
    return list(found.values())


def _stall(
    stage: str, names: tuple[str, ...], is_known: bool, stills: list[_Still], wall_of: dict[int, float], num_steps: int
) -> Stall:
    longest = max(stills, key=lambda still: still.seconds)
    by_kind: dict[Kind, float] = defaultdict(float)
    for still in stills:
        by_kind[still.leaf.kind] += still.seconds
    steps = tuple(sorted({still.step for still in stills}))
    lost = sum(still.seconds for still in stills)
    return Stall(
        stage=stage,
        processes=names,
        is_known=is_known,
        where=max(by_kind, key=lambda kind: by_kind[kind]),
        lost_s=lost / num_steps,
        stage_share=lost / sum(wall_of[step] for step in steps),
        steps=steps,
        longest_s=longest.seconds,
        longest_step=longest.step,
        longest_number=longest.leaf.number,
        num_leaves=len(stills),
    )


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
    others: int = field(default=0)
    """Further processes in the stage."""


def critical_path(timeline: Timeline, step: StepSpans) -> list[PathLeg]:
    """Return the stages of a step in their order, each with the process that it takes its time from."""
    legs: list[PathLeg] = []
    for stage, spans in step.stages.items():
        works = stage_work(timeline, step, stage)
        own = own_seconds(works)
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
