"""Looks at captures on their own: the first NaN or Inf and what it comes from, and modules with unusual values.

From `find_dumps` to `text.py`; nothing is compared.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pellucid.precision.calls import FORWARD, Calls, pass_label
from pellucid.precision.compare import Place, Samples
from pellucid.precision.difference import SAME, is_float, num_bad
from pellucid.precision.divergence import CallErrors, Divergence, Limits, Part, describe, part_of, walk
from pellucid.precision.dump import DumpRef, StageDump, TensorStats, leaves

MANY = 0.5
"""Share of zeros that is worth a line."""
MANY_SUBNORMAL = 0.01
LARGE = 1e4
"""Largest absolute value that is worth a line: float16 ends at 6.5e4."""


@dataclass(frozen=True, slots=True)
class _Bad:
    """A tensor with NaN or Inf, measured as infinitely wrong."""

    path: str
    stats: TensorStats
    error: float

    @property
    def what(self) -> str:
        return counts_text(self.stats)


@dataclass(frozen=True, slots=True)
class Unusual:
    """A tensor that stands out."""

    module: str
    direction: str
    path: str
    what: str
    weight: float
    """More is stranger."""


@dataclass(slots=True)
class StageHealth:
    """What one rank's capture of one stage shows."""

    place: Place
    num_calls: int
    num_bad_calls: int
    """Calls that hold NaN or Inf."""
    divergence: Divergence | None
    """The first of them in execution order."""
    pass_label: str
    samples: Samples | None
    bad: list[Unusual]
    """Modules with NaN or Inf, in execution order."""
    unusual: list[Unusual] = field(default_factory=list)
    """Outputs of forward calls."""
    note: str = ""


@dataclass(slots=True)
class Health:
    """What all captures show."""

    name: str
    stages: list[StageHealth]

    @property
    def first(self) -> StageHealth | None:
        """The earliest with NaN or Inf."""
        with_bad = [stage for stage in self.stages if stage.divergence is not None]
        return min(with_bad, key=_when, default=None)

    @property
    def ranks(self) -> list[str]:
        """Ranks that have NaN or Inf in the stage where it first is."""
        first = self.first
        if first is None:
            return []
        return [stage.place.rank_name for stage in self.stages if stage.place.order == first.place.order and stage.divergence is not None]


def _when(stage: StageHealth) -> tuple[int, ...]:
    assert stage.divergence is not None
    return (*stage.place.order, stage.divergence.pass_index, stage.divergence.position)


def check_captures(
    refs: Sequence[DumpRef],
    read: Callable[[DumpRef], StageDump],
    *,
    name: str,
    limit: int = 20,
    on_capture: Callable[[DumpRef], None] = lambda ref: None,
) -> Health:
    """Look at captures one by one."""
    stages: list[StageHealth] = []
    for ref in refs:
        on_capture(ref)
        place = Place(ref.step, ref.step, ref.stage, ref.stage, ref.call, ref.rank, ref.rank, ref.replica)
        stages.append(check_dump(read(ref), place, limit=limit))
    return Health(name, stages)


def check_dump(dump: StageDump, place: Place, *, limit: int = 20) -> StageHealth:
    """Look at one capture."""
    calls = Calls(dump)
    errors: dict[int, CallErrors] = {}
    bad: list[Unusual] = []
    unusual: list[Unusual] = []
    for index, (entry, name) in enumerate(zip(dump.entries, calls.names)):
        found = errors[index] = CallErrors()
        worst: _Bad | None = None
        for path, stats in leaves(entry):
            one = _Bad(path, stats, float("inf") if _is_bad(path, stats) else SAME)
            found.take(part_of(name, path), one)
            if one.error > 0:
                worst = worst or one
            elif name.direction == FORWARD and part_of(name, path) is Part.OUTPUT and (strange := _strange(stats)) is not None:
                unusual.append(Unusual(name.label, name.direction, path, *strange))
        if worst is not None:
            bad.append(Unusual(name.label, name.direction, worst.path, worst.what, 1.0))
    limits = Limits(rtol=0.0)
    fault = walk(calls, errors, limits).fault
    divergence = describe(calls, errors, fault, limits) if fault is not None else None
    units = [one.unit for one in dump.about.passes]
    return StageHealth(
        place=place,
        num_calls=len(dump.entries),
        num_bad_calls=len(bad),
        divergence=divergence,
        pass_label=pass_label(units, divergence.pass_index) if divergence is not None else "",
        samples=_bad_samples(dump, divergence) if divergence is not None else None,
        bad=_one_a_module(bad)[:limit],
        unusual=sorted(_one_a_module(unusual), key=lambda row: -row.weight)[:limit],
        note="" if dump.about.complete else f"the capture is not complete ({dump.about.error or 'cut short'})",
    )


def counts_text(stats: TensorStats) -> str:
    """Return how many NaN and Inf of how many values."""
    size = int(np.prod(stats.shape))
    if stats.num_nan is None:
        return f"norm {stats.norm:g}, max {stats.max:g}, min {stats.min:g}"
    counts = [f"{count:,} {kind}" for count, kind in ((stats.num_nan, "NaN"), (stats.num_inf or 0, "Inf")) if count]
    return f"{' and '.join(counts)} of {size:,} values"


def _is_bad(path: str, stats: TensorStats) -> bool:
    """Masks are made of −Inf; NaN is wrong everywhere."""
    if "mask" in path:
        return bool(stats.num_nan)
    return num_bad(stats) > 0


def _strange(stats: TensorStats) -> tuple[str, float] | None:
    """Return what stands out of a finite tensor, and how much."""
    size = int(np.prod(stats.shape))
    if not is_float(stats) or size < 2:
        return None
    largest = max(abs(stats.max), abs(stats.min))
    if largest >= LARGE:
        return f"largest value {largest:.3g}", largest
    if stats.num_subnormal and stats.num_subnormal >= MANY_SUBNORMAL * size:
        return f"{stats.num_subnormal / size:.0%} subnormal", stats.num_subnormal / size
    if stats.num_zero and stats.num_zero >= MANY * size:
        return ("all zero" if stats.num_zero == size else f"{stats.num_zero / size:.0%} zeros"), 0.1 * stats.num_zero / size
    return None


def _one_a_module(rows: Iterable[Unusual]) -> list[Unusual]:
    kept: dict[tuple[str, str], Unusual] = {}
    for row in rows:
        key = (row.module, row.direction)
        if key not in kept or row.weight > kept[key].weight:
            kept[key] = row
    return list(kept.values())


def _bad_samples(dump: StageDump, divergence: Divergence) -> Samples | None:
    """Return the samples with NaN or Inf in the tensor in which they first are."""
    sums, key = dump.samples, f"{divergence.entry}|{divergence.path}"
    if sums is None or key not in sums.names:
        return None
    row = sums.names.index(key)
    spans = dump.about.passes[int(sums.pass_index[row])].spans
    counts = sums.num_bad[sums.first[row] : sums.first[row + 1]]
    differing = [f"{span.sample} ({span.part})" for span, count in zip(spans, counts.tolist()) if count]
    return Samples(tuple(dict.fromkeys(differing)), len({(span.sample, span.part) for span in spans}))
