"""Compares captures: the first divergence in execution order, what it comes from, and the largest errors.

Two captures of a stage are joined call by call. Where the sides cut the same tokens into other passes, or spread them
over other ranks, sums over the tokens of each sample are joined instead; and a single capture is judged by its NaN and
Inf. All three become errors of calls, which `divergence.py` walks through, and a `StageComparison`, which `text.py`
and `heatmap.py` show.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pellucid.errors import UserError
from pellucid.precision.calls import (
    BACKWARD,
    FORWARD,
    MODULE,
    OPTIMIZER,
    PARAMETER_GRADIENTS,
    CallName,
    Calls,
    pass_label,
)
from pellucid.precision.capture_table import (
    SAME,
    is_float,
    join,
    largest_of_names,
    sample_errors,
    sample_table,
    statistics_table,
    tensor_errors,
    values,
    words,
)
from pellucid.precision.divergence import (
    CallErrors,
    Candidate,
    Divergence,
    Kind,
    Limits,
    Measured,
    Part,
    describe,
    part_of,
    walk,
)
from pellucid.precision.dump import Pass, StageDump, leaves
from pellucid.precision.matching import Place

RTOL = 1e-5
"""Twice and more what another order of float32 additions makes; captures of one machine and one number of threads are
equal.
"""
DRIFT_SHARE = 0.25
"""With so many outputs of another dtype it is the whole model that computes in it."""
ROUND_OFF = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11, "torch.float32": 2.0**-24, "torch.float64": 2.0**-53}
OTHER_ROUND_OFF = 2.0**-3
"""Round-off of a dtype that is not named above: 8 bits."""
_BIAS_FLOOR = 0.1
"""A bias's gradient sums up the gradient that comes in; where next to nothing remains, its error is judged by a share
of that.
"""

OUTPUT, INPUTS, PARAMETERS, GRADIENTS = QUANTITIES = ("output", "inputs", "parameters", "gradients")
"""What of a module is shown: of its forward calls the first three; what its backward calls read and compute."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table of errors."""

    module: str
    module_class: str
    what: str
    """Which quantity: one of `QUANTITIES`."""
    error: float
    base: float
    """The error of what went into it; nan where that was not asked."""
    entry: str
    path: str
    detail: str
    place: str
    """Step, stage and rank."""
    pass_label: str


@dataclass(frozen=True, slots=True)
class Samples:
    """Whose tokens differ at a divergence."""

    differing: tuple[str, ...]
    """`<uid> sample <n> (response)`, `<uid> (prompt)`; the largest error first."""
    total: int
    """How many prompts and responses there are."""


@dataclass(slots=True, kw_only=True)
class StageComparison:
    """What one rank's captures of one stage say, or those of all ranks together."""

    place: Place
    num_common: int
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    max_error: float = SAME
    divergence: Divergence | None = None
    first: Divergence | None = None
    """The first beyond the limit, where that is another: slow growth before the fault."""
    samples: Samples | None = None
    pass_label: str = ""
    after_mini_batch: int | None = None
    """Number of the optimizer step after which the parameters differ, counted from 1."""
    drift: str | None = None
    """`float32 against bfloat16` where most of the model computes in two dtypes."""
    largest: list[Row] = field(default_factory=list)
    jumps: list[Row] = field(default_factory=list)
    num_bad: int = 0
    """In a report, calls that hold NaN or Inf."""
    modules: dict[str, str] = field(default_factory=dict)
    """Class by label, in execution order: the rows of the heat map."""
    cells: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By label and pass the error of each of `QUANTITIES`, nan where there is none."""
    pass_labels: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What else is known of the divergence."""
    missing: list[str] = field(default_factory=list)
    """What one side lacks, or what was cut short: for that the two are not equal, whatever is in both."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether nothing is missing and all is equal bit for bit."""
        return self.max_error == SAME and not self.missing

    @property
    def where(self) -> str:
        """`step 3, actor_update, rank 0`."""
        return f"{self.place.moment}, {self.place.rank_name}"


@dataclass(slots=True)
class Found:
    """The first divergence of all, and which ranks have it."""

    place: Place
    divergence: Divergence
    comparison: StageComparison
    ranks: list[str]
    all_ranks: list[str]
    later: list[str]
    """What other ranks of the same stage show instead."""


@dataclass(slots=True)
class Comparison:
    """What two sets of captures say, or a single one."""

    name_a: str
    name_b: str
    """Empty in a report on captures of their own."""
    rtol: float
    stages: list[StageComparison]
    found: Found | None
    largest: list[Row]
    """The largest errors over all stages and ranks, a row a module and quantity."""
    jumps: list[Row]
    missing: list[str]
    """Steps, stages, ranks and calls that one side lacks, and captures that were cut short."""
    notes: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether nothing diverges and nothing is missing."""
        return self.found is None and not self.missing

    @property
    def max_error(self) -> float:
        """The largest error of everything."""
        return max((stage.max_error for stage in self.stages), default=SAME)


# --- putting stages together
# --------------------------------------------------------------------------------------------


def summarise(
    stages: list[StageComparison],
    *,
    names: tuple[str, str],
    rtol: float,
    limit: int,
    missing: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Comparison:
    """Put the comparisons of stages together: the earliest divergence, its ranks, and what could not be compared.

    Raises:
        UserError: no call of A is in B.
    """
    if not any(stage.num_common for stage in stages):
        one = next((stage for stage in stages if stage.only_a and stage.only_b), None)
        example = "" if one is None else f" (in {one.place.moment}, A has e.g. {one.only_a[0]}, B {one.only_b[0]})"
        raise UserError(
            "A, B", f"no call of A is in B{example}.", "Compare captures of the same level, and of the same model."
        )
    largest = _merge_rows((row for stage in stages for row in stage.largest), lambda row: row.error)[:limit]
    jumps = _merge_rows((row for stage in stages for row in stage.jumps), lambda row: row.error / max(row.base, 1e-12))[
        :limit
    ]
    missing = [*missing, *(line for stage in stages for line in stage.missing)]
    return Comparison(*names, rtol, stages, _earliest(stages), largest, jumps, missing, list(notes))


def _earliest(stages: list[StageComparison]) -> Found | None:
    diverging = [(stage.divergence, stage) for stage in stages if stage.divergence is not None]
    if not diverging:
        return None
    divergence, first = min(diverging, key=lambda one: (*one[1].place.order, one[0].pass_index, one[0].position))
    beside = [stage for stage in stages if stage.place.order == first.place.order]
    same = [stage for stage in beside if stage.divergence is not None and _is_alike(stage.divergence, divergence)]
    later = [
        f"{stage.place.rank_name}: "
        + (f"{stage.divergence.module or 'the inputs'} ({stage.pass_label})" if stage.divergence else "nothing")
        for stage in beside
        if stage not in same
    ]
    names = [[stage.place.rank_name for stage in group] for group in (same, beside)]
    return Found(first.place, divergence, first, names[0], names[1], later)


def _is_alike(a: Divergence, b: Divergence) -> bool:
    return (a.module, a.kind, a.direction, a.pass_index) == (b.module, b.kind, b.direction, b.pass_index)


def _merge_rows(rows: Iterable[Row], size: Callable[[Row], float]) -> list[Row]:
    """Return the largest row of each module and quantity, the largest first."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        kept = best.get((row.module, row.what))
        if kept is None or size(row) > size(kept):
            best[row.module, row.what] = row
    return sorted(best.values(), key=lambda row: -size(row))


# --- from errors of tensors to what a stage shows
# -----------------------------------------------------------------------


def call_errors(
    num_calls: Iterable[int],
    call: np.ndarray,
    part: Sequence[Part],
    error: np.ndarray,
    measured: Callable[[int], Measured],
) -> dict[int, CallErrors]:
    """Return the largest error of each part of each call.

    Args:
        num_calls: indices of the calls that are on both sides.
        call: int[N] the call of each tensor.
        part: [N] which part of it the tensor is.
        error: float[N] its error.
        measured: makes the finding of a tensor.
    """
    found = {index: CallErrors() for index in num_calls}
    rank = np.array([list(Part).index(one) for one in part], dtype=np.int64)
    order = np.lexsort((np.arange(len(call)), -error, rank, call))
    previous: tuple[int, int] | None = None
    for row in order.tolist():
        if (key := (int(call[row]), int(rank[row]))) != previous:
            found[key[0]].set(part[row], measured(row))
        previous = key
    return found


def fill(
    result: StageComparison,
    calls: Calls,
    errors: dict[int, CallErrors],
    limits: Limits,
    *,
    limit: int,
    when: Callable[[int], str] = lambda index: "",
    per_pass: bool = False,
) -> Candidate | None:
    """Fill in what the errors of calls tell; return the candidate at fault, if there is one.

    Args:
        result: to be filled in.
        calls: of A.
        errors: of each call that both sides have, by index.
        limits: what counts as a divergence.
        limit: rows of the tables.
        when: returns the label of a call's pass.
        per_pass: keep the cells of the heat map by pass, not only their largest.
    """
    every = [
        (index, part, one) for index, found in errors.items() for part in Part if (one := found.part(part)) is not None
    ]
    result.max_error = max((one.error for *_, one in every), default=SAME)

    def row(candidate: Candidate) -> Row:
        name, finding = calls.names[candidate.entry], candidate.finding
        what, entry = quantity(name, candidate.part), calls.entries[candidate.entry].name
        return Row(
            name.label, name.module_class, what, finding.error, candidate.base, entry, finding.path, finding.what,
            result.where, when(candidate.entry),
        )  # fmt: skip

    found = walk(calls, errors, limits)
    if (fault := found.fault) is not None:
        result.divergence, result.pass_label = (
            describe(calls, errors, fault, limits),
            when(fault.entry) or result.pass_label,
        )
        if found.first is not None and found.first is not fault:
            result.first = describe(calls, errors, found.first, limits)
    jumps = [candidate for candidate in found.jumps if candidate.part is not Part.PARAMETERS]
    result.jumps = [row(candidate) for candidate in jumps[:limit]]
    best: dict[tuple[str, str], Candidate] = {}
    for index, part, one in every:
        key = (calls.names[index].label, quantity(calls.names[index], part))
        if one.error > 0.0 and (key not in best or one.error > best[key].finding.error):
            best[key] = Candidate(index, part, one, math.nan, 0)
    result.largest = [row(one) for one in sorted(best.values(), key=lambda one: -one.finding.error)[:limit]]
    has_modules = any(name.kind == MODULE for name in calls.names)
    for event in calls.events():
        name = calls.names[event.entry]
        if event.ends or event.entry not in errors or (has_modules and name.kind != MODULE):
            continue
        result.modules.setdefault(name.label, name.module_class)
        cell = result.cells.setdefault(
            (name.label, calls.passes[event.entry] if per_pass else 0), [math.nan] * len(QUANTITIES)
        )
        for part in Part:
            if (one := errors[event.entry].part(part)) is not None:
                at = QUANTITIES.index(quantity(name, part))
                cell[at] = float(np.fmax(cell[at], one.error))
    return fault


def quantity(name: CallName, part: Part) -> str:
    """Return which of `QUANTITIES` a part of a call is shown as."""
    if name.direction == OPTIMIZER and part is Part.OUTPUT:
        return PARAMETERS
    if name.direction != FORWARD:
        return GRADIENTS
    return {Part.INPUTS: INPUTS, Part.PARAMETERS: PARAMETERS, Part.OUTPUT: OUTPUT}[part]


def cut_short(dump: StageDump, side: str, where: str) -> list[str]:
    """Return a line on a capture that is not complete; none on one that is."""
    by = f" ({dump.about.error})" if dump.about.error else ""
    return [] if dump.about.complete else [f"{where}: the capture of {side} was cut short{by}"]


def drift_between(joined: pa.Table) -> tuple[str | None, float]:
    """Return which two precisions the sides compute in, and the round-off of the coarser; (None, 0) for the same.

    Args:
        joined: outputs of forward calls of modules.
    """
    dtypes = zip(values(joined, "dtype"), values(joined, "dtype_b"), strict=True)
    pairs = Counter(pair for pair in dtypes if is_float(pair).all())
    other = Counter({pair: count for pair, count in pairs.items() if pair[0] != pair[1]})
    if not other or other.total() < DRIFT_SHARE * pairs.total():
        return None, 0.0
    [(a, b), _], *_ = other.most_common()
    round_off = max(ROUND_OFF.get(dtype, OTHER_ROUND_OFF) for pair in other for dtype in pair)
    return f"{a.removeprefix('torch.')} against {b.removeprefix('torch.')}", round_off


# --- two captures, call by call
# -----------------------------------------------------------------------------------------


def compare_dumps(
    a: StageDump, b: StageDump, place: Place, *, rtol: float = RTOL, limit: int = 20, per_pass: bool = False
) -> StageComparison:
    """Compare two captures of a stage on one rank.

    Args:
        a: the one.
        b: the other.
        place: which they are.
        rtol: the largest relative error that is none; see `tensor_errors`.
        limit: rows of the tables.
        per_pass: keep the cells of the heat map by pass, not only their largest.
    """
    calls, names_b = Calls(a), {entry.name for entry in b.entries}
    alike = a.about.backend == b.about.backend
    # Backends count some operators otherwise, so that a number may stand for two calls.
    common = [
        i for i, name in enumerate(calls.names) if a.entries[i].name in names_b and (alike or name.kind == MODULE)
    ]
    joined = join(
        statistics_table((index, a.entries[index].name, a.entries[index]) for index in common),
        statistics_table((0, entry.name, entry) for entry in b.entries),
    )
    same_shard = values(joined, "shard") == values(joined, "shard_b")
    num_other_shards = int((~same_shard).sum())
    joined = joined.filter(pa.array(same_shard, pa.bool_()))
    call, paths = values(joined, "call"), values(joined, "path")
    parts = [part_of(calls.names[index], path) for index, path in zip(call, paths)]
    is_output = [
        part is Part.OUTPUT and calls.names[index].kind == MODULE and calls.names[index].direction == FORWARD
        for index, part in zip(call, parts)
    ]
    drift, round_off = drift_between(joined.filter(pa.array(is_output, pa.bool_())))
    errors = tensor_errors(joined, _bias_floors(calls, call, paths), rounded=drift is not None)
    sums = _Spans(a, b) if drift is None else None
    if sums is not None:
        entries = values(joined, "entry")
        over = np.array([sums.largest.get(f"{entry}|{path}", SAME) for entry, path in zip(entries, paths)])
        errors = np.where(errors == SAME, SAME, np.maximum(errors, over)) if len(errors) else errors

    def measured(row: int) -> Measured:
        return Measured(float(errors[row]), paths[row], lambda: words(joined, row, rounded=drift is not None))

    found = call_errors(common, call, parts, errors, measured)
    if drift is None:
        _ask_for_equal_parameters(calls, joined, parts, errors, found)
    units = [one.unit for one in a.about.passes]
    labels = [pass_label(units, index) for index in range(max(len(units), max(calls.passes, default=-1) + 1))]
    num_steps = len({name.call for name in calls.names if name.direction == OPTIMIZER})

    def when(index: int) -> str:
        """Return in which pass or optimizer step a call is."""
        name = calls.names[index]
        return (
            f"optimizer step {name.call + 1} of {num_steps}"
            if name.direction == OPTIMIZER
            else labels[calls.passes[index]]
        )

    names_a = set(calls.index_of)
    result = StageComparison(
        place=place,
        num_common=len(common),
        only_a=[entry.name for entry in a.entries if entry.name not in names_b],
        only_b=[entry.name for entry in b.entries if entry.name not in names_a],
        drift=drift,
        pass_labels=labels,
    )
    fill(result, calls, found, Limits(rtol, floor=round_off), limit=limit, when=when, per_pass=per_pass)
    if (divergence := result.divergence) is not None:
        result.samples = None if sums is None else sums.samples(divergence, rtol)
        if divergence.kind is Kind.PARAMETERS:
            done = [number for number, start in enumerate(a.about.mini_batches) if 0 < start <= divergence.pass_index]
            result.after_mini_batch = done[-1] if done else None
    # What msprobe does not record of what a native capture has, and the reverse, is no fault.
    sides = (("A", result.only_a), ("B", result.only_b))
    lines = [
        f"{result.where}: {len(names):,} calls are only in {side}, e.g. {names[0]}" for side, names in sides if names
    ]
    (result.missing if alike or not common else result.notes).extend(lines)
    result.missing += cut_short(a, "A", result.where) + cut_short(b, "B", result.where)
    num_other = int((values(joined, "dtype") != values(joined, "dtype_b")).sum())
    if num_other and not drift:
        result.notes.append(f"{result.where}: {num_other:,} of {len(joined):,} tensors are of another dtype in B")
    if num_other_shards:
        result.notes.append(
            f"{result.where}: {num_other_shards:,} tensors are other ranks' parts, or cut otherwise: not compared"
        )
    passes = zip(a.about.passes, b.about.passes)
    if (other := next((index for index, (one, two) in enumerate(passes) if one.spans != two.spans), None)) is not None:
        whose = " against ".join(_whose(dump.about.passes[other]) for dump in (a, b))
        result.notes.append(
            f"{result.where}: from {labels[other]} on, the passes hold other tokens: {whose}; try --by-sample"
        )
    return result


def _whose(one: Pass) -> str:
    names = list(dict.fromkeys(span.sample for span in one.spans))
    return f"{sum(span.length for span in one.spans):,} of {', '.join(names[:2])}{', …' if len(names) > 2 else ''}"


def _bias_floors(calls: Calls, call: np.ndarray, paths: np.ndarray) -> np.ndarray:
    """Return the least scale of each tensor's error; a bias's gradient has that of the gradient that it sums up."""

    def floor(index: int, path: str) -> float:
        backward = calls.backward_of(index) if "bias" in path else None
        if backward is None:
            return 0.0
        norms = [stats.norm for name, stats in leaves(calls.entries[backward]) if name.startswith("input")]
        return _BIAS_FLOOR * max((norm for norm in norms if math.isfinite(norm)), default=0.0)

    return np.array([floor(index, path) for index, path in zip(call.tolist(), paths)], dtype=np.float64)


def _ask_for_equal_parameters(
    calls: Calls, joined: pa.Table, parts: Sequence[Part], errors: np.ndarray, found: dict[int, CallErrors]
) -> None:
    """Where most trained parameters are equal bit for bit, one that is not is at fault, however small its error."""

    def moment(index: int) -> tuple[str, int]:
        name = calls.names[index]
        return name.direction, name.call if name.direction == OPTIMIZER else calls.passes[index]

    weights: dict[tuple[str, int], list[tuple[bool, bool]]] = {}
    columns = zip(
        values(joined, "call").tolist(), parts, values(joined, "checksum"), values(joined, "requires_grad"), errors
    )
    for index, part, checksum, is_trained, error in columns:
        is_made = calls.names[index].direction == OPTIMIZER and part is Part.OUTPUT
        if checksum is not None and (part is Part.PARAMETERS or is_made):
            weights.setdefault(moment(index), []).append((bool(is_trained), error == SAME))
    exact: dict[tuple[str, int], bool] = {}
    for key, of_moment in weights.items():
        trained = [same for is_trained, same in of_moment if is_trained] or [same for _, same in of_moment]
        exact[key] = 2 * sum(trained) > len(trained)
    for index, one in found.items():
        one.exact_parameters = exact.get(moment(index), False)


class _Spans:
    """Errors span by span, of the passes that hold the same tokens on both sides."""

    def __init__(self, a: StageDump, b: StageDump) -> None:
        self.largest: dict[str, float] = {}
        """The largest error over the spans of each tensor, by `<entry>|<path>`."""
        self._passes = a.about.passes
        if a.samples is None or b.samples is None:
            return
        # A group is a span of a pass of A.
        sizes = [len(one.spans) for one in a.about.passes]
        starts = np.cumsum([0, *sizes])
        alike = [one.spans == two.spans for one, two in zip(a.about.passes, b.about.passes)]
        groups = [np.arange(start, start + size) for start, size in zip(starts, sizes)]
        self._spans = [span for one in a.about.passes for span in one.spans]
        tokens = np.array([span.length for span in self._spans], dtype=np.float64)

        def table(dump: StageDump) -> pa.Table:
            assert dump.samples is not None
            of = [
                groups[i] if i < len(alike) and alike[i] else np.full(len(one.spans), -1)
                for i, one in enumerate(dump.about.passes)
            ]
            return sample_table([dump.samples], [dump.samples.names], [of], tokens)

        self._errors = sample_errors(table(a), table(b))
        largest = self._errors.take(largest_of_names(self._errors))
        self.largest = dict(zip(values(largest, "name"), values(largest, "error").tolist()))

    def samples(self, divergence: Divergence, rtol: float) -> Samples | None:
        """Return whose tokens differ in the tensor at which a divergence shows."""
        key = f"{divergence.entry}|{divergence.path}"
        if divergence.kind is Kind.PARAMETER_GRADIENT:  # which is a sum over samples; what the module sends back is not
            key = f"{divergence.entry.replace(f'.{PARAMETER_GRADIENTS}.', f'.{BACKWARD}.')}|output.0"
        if key not in self.largest or divergence.kind is Kind.PARAMETERS:
            return None
        of_tensor = self._errors.filter(pa.array(values(self._errors, "name") == key, pa.bool_()))
        errors, spans = values(of_tensor, "error"), [self._spans[group] for group in values(of_tensor, "group")]
        order = [at for at in np.argsort(-errors, kind="stable").tolist() if errors[at] > rtol]
        differing = dict.fromkeys(f"{spans[at].sample} ({spans[at].part})" for at in order)
        return Samples(tuple(differing), len({(span.sample, span.part) for span in spans}))
