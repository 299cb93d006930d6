"""Compares two runs stage by stage and operator by operator: what got slower, by how much, and whether that is more than noise.

Built on two reports; medians over steps, so that one odd step decides nothing.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pellucid.profiler.report.build import Report, ranges
from pellucid.profiler.report.operators import CaptureStats
from pellucid.profiler.report.verdict import seconds

MIN_STEPS = 3
"""With fewer steps on a side there is no spread to judge by."""
NOISE_ERRORS = 3.0
"""A difference of so many standard errors is more than noise."""
TOP_OPERATORS = 20
FAIL_STEP_SHARE = 0.02
"""Of A's step: a stage that lost less fails nothing, whatever its ratio."""
STEP = "step"


@dataclass(frozen=True, slots=True)
class StageChange:
    """One stage, or the whole step, in both runs. None: it did not run there."""

    name: str
    a_s: float | None
    b_s: float | None
    error_s: float | None
    """Standard error of the difference; None with too few steps."""

    @property
    def lost_s(self) -> float:
        """How much longer it takes in B."""
        return (self.b_s or 0.0) - (self.a_s or 0.0)

    @property
    def ratio(self) -> float | None:
        """B over A."""
        return self.b_s / self.a_s if self.a_s and self.b_s is not None else None

    @property
    def judgement(self) -> str:
        """Slower, faster, within noise, or why nothing can be said."""
        if self.a_s is None or self.b_s is None:
            return "only in B" if self.a_s is None else "only in A"
        if self.error_s is None:
            return "too few steps to tell"
        if abs(self.lost_s) <= NOISE_ERRORS * self.error_s:
            return "within noise"
        return "slower" if self.lost_s > 0 else "faster"


@dataclass(frozen=True, slots=True)
class OperatorChange:
    """One operator in the captures of one stage in both runs, self time a capture (a unit of work, where these were sampled)."""

    name: str
    what: str
    a_s: float
    b_s: float

    @property
    def lost_s(self) -> float:
        """How much longer it takes in B."""
        return self.b_s - self.a_s

    @property
    def ratio(self) -> float | None:
        """B over A."""
        return self.b_s / self.a_s if self.a_s else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from run A to run B; the largest loss first."""

    name_a: str
    name_b: str
    about_a: str
    about_b: str
    headline: str
    step: StageChange
    stages: tuple[StageChange, ...]
    operators: tuple[OperatorChange, ...]
    notes: tuple[str, ...]

    def failures(self, limit: float) -> list[StageChange]:
        """Return what is slower than `limit` times A beyond noise: the step, and stages that lost a noticeable part of it."""
        least = FAIL_STEP_SHARE * (self.step.a_s or 0.0)
        return [
            row
            for row in self.stages
            if row.judgement == "slower" and row.ratio is not None and row.ratio > limit and (row is self.step or row.lost_s >= least)
        ]


def compare(a: Report, b: Report) -> Comparison:
    """Compare two runs over the steps that both have, or where they share none over all of each."""
    common = sorted(set(a.chosen.numbers) & set(b.chosen.numbers))
    notes = [f"{side}: {caveat}" for side, report in (("A", a), ("B", b)) for caveat in report.caveats]
    if not common:
        notes.append("The runs have no step in common; the medians are of all steps of each.")
    step = _change(STEP, _steps(a, common), _steps(b, common))
    names = dict.fromkeys([*(row.stage for row in a.stages), *(row.stage for row in b.stages)])
    rows = [_change(name, _stage(a, name, common), _stage(b, name, common)) for name in names]
    rows += [
        _change(name, _between(a, name), _between(b, name))
        for name in dict.fromkeys([*(row.stage for row in a.between), *(row.stage for row in b.between)])
    ]
    operators = _operators(a.captures, b.captures)
    if not operators and (a.captures or b.captures):
        notes.append("No stage has captures of the torch tool in both runs, so operators are not compared.")
    return Comparison(
        name_a=str(a.run),
        name_b=str(b.run),
        about_a=_about(a, common),
        about_b=_about(b, common),
        headline=_headline(step, rows),
        step=step,
        stages=(step, *sorted(rows, key=lambda row: -row.lost_s)),
        operators=tuple(operators),
        notes=tuple(notes),
    )


def _about(report: Report, common: list[int]) -> str:
    return f"step {ranges(common or report.chosen.numbers)} on {report.device}"


def _headline(step: StageChange, rows: list[StageChange]) -> str:
    assert step.a_s is not None and step.b_s is not None and step.ratio is not None
    sizes = f"a step takes {seconds(step.b_s)} instead of {seconds(step.a_s)} ({step.ratio:.2f}×)"
    slower = [row for row in sorted(rows, key=lambda row: -row.lost_s) if row.judgement == "slower"]
    if step.judgement == "slower":
        most = f"; {slower[0].name} lost most, {seconds(slower[0].lost_s)}" if slower else ""
        return f"B is slower: {sizes}{most}."
    if step.judgement == "faster":
        return f"B is faster: {sizes}."
    if step.judgement == "within noise":
        return f"No clear difference: {sizes}, within the spread over steps."
    return f"Too few steps to tell: {sizes}."


def _change(name: str, a: Sequence[float], b: Sequence[float]) -> StageChange:
    error = None
    if len(a) >= MIN_STEPS and len(b) >= MIN_STEPS:
        error = math.hypot(_median_error(a), _median_error(b))
    return StageChange(name, statistics.median(a) if a else None, statistics.median(b) if b else None, error)


def _median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, by the median absolute deviation: 1.4826 · MAD · 1.2533 / √n."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return 1.4826 * 1.2533 * spread / math.sqrt(len(values))


def _steps(report: Report, common: list[int]) -> list[float]:
    return [step.wall_s for step in report.chosen.steps if not common or step.step in common]


def _stage(report: Report, name: str, common: list[int]) -> list[float]:
    return [
        value
        for row in report.stages
        if row.stage == name
        for step, value in zip(row.steps, row.seconds)
        if not common or step in common
    ]


def _between(report: Report, name: str) -> list[float]:
    return [value for row in report.between if row.stage == name for value in row.seconds]


def _operators(a: list[CaptureStats], b: list[CaptureStats]) -> list[OperatorChange]:
    times_a, times_b = _mean_times(a), _mean_times(b)
    rows = [
        OperatorChange(name, what, times_a[what].get(name, 0.0), times_b[what].get(name, 0.0))
        for what in times_a.keys() & times_b.keys()
        for name in times_a[what].keys() | times_b[what].keys()
    ]
    return sorted(rows, key=lambda row: (-abs(row.lost_s), row.name, row.what))[:TOP_OPERATORS]


def _mean_times(captures: Iterable[CaptureStats]) -> dict[str, dict[str, float]]:
    """Return by stage and operator the mean self time of a capture, or of a unit where captures are of some units."""
    totals: dict[str, dict[str, float]] = {}
    parts: dict[str, float] = {}
    for capture in captures:
        units = capture.file.units
        key = f"{capture.what}, one {units['unit']}" if units else capture.what
        parts[key] = parts.get(key, 0.0) + (units["count"] if units else 1)
        for operator in capture.operators:
            by_name = totals.setdefault(key, {})
            by_name[operator.name] = by_name.get(operator.name, 0.0) + operator.self_s
    return {what: {name: total / parts[what] for name, total in by_name.items()} for what, by_name in totals.items()}
