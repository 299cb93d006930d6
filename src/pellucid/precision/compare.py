"""Compares captures call by call: the first divergence in execution order, what it comes from, and the largest errors.

`compare_captures` takes what `find_dumps` found on both sides; `text.py` and `heatmap.py` show the result.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

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
from pellucid.precision.difference import SAME, Difference, difference, is_float, span_errors
from pellucid.precision.divergence import (
    CallErrors,
    Candidate,
    Divergence,
    Kind,
    Limits,
    Measured,
    Part,
    Walk,
    describe,
    part_of,
    walk,
)
from pellucid.precision.dump import DumpRef, Entry, Pass, StageDump, TensorStats, leaves
from pellucid.stages import Stage

RTOL = 1e-5
"""Twice and more what another order of float32 additions makes; captures of one machine and one number of threads are equal."""
DRIFT_SHARE = 0.25
"""With so many outputs of another dtype it is the whole model that computes in it."""
ROUND_OFF = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11, "torch.float32": 2.0**-24, "torch.float64": 2.0**-53}
OTHER_ROUND_OFF = 2.0**-3
"""Of a dtype that is not named above: 8 bits."""
_BIAS_FLOOR = 0.1
"""A bias's gradient sums up the gradient that comes in; where next to nothing remains, its error is judged by a share of that."""

OUTPUT, INPUTS, PARAMETERS, GRADIENTS = QUANTITIES = ("output", "inputs", "parameters", "gradients")
"""What of a module is shown: of its forward calls the first three; what its backward calls read and compute."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which captures are compared."""

    step: int
    """A's."""
    step_b: int
    stage: str
    stage_b: str
    call: int
    rank: int | None
    """None: all ranks together."""
    rank_b: int | None
    replica: int | None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts places as they run."""
        return self.step, _STAGE_ORDER.get(self.stage, len(_STAGE_ORDER)), self.call

    @property
    def rank_name(self) -> str:
        """`rank 1`, `replica 0 rank 1`, `all ranks`."""
        if self.rank is None:
            return "all ranks"
        rank = f"rank {self.rank}" if self.rank == self.rank_b else f"rank {self.rank}/{self.rank_b}"
        return rank if self.replica is None else f"replica {self.replica} {rank}"

    @property
    def moment(self) -> str:
        """`step 3, actor_update`."""
        step = f"step {self.step}" if self.step == self.step_b else f"step {self.step}/{self.step_b}"
        stage = self.stage if self.stage == self.stage_b else f"{self.stage}/{self.stage_b}"
        return f"{step}, {stage}" + (f", capture {self.call + 1}" if self.call else "")


_STAGE_ORDER = {stage.value: index for index, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table of errors."""

    module: str
    module_class: str
    what: str
    """Which quantity: one of `QUANTITIES`."""
    error: float
    base: float
    """Of what went into it; nan: not asked."""
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
    """What one rank's captures of one stage say."""

    place: Place
    num_common: int
    only_a: list[str]
    only_b: list[str]
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
    num_other_dtype: int = 0
    """Tensors of another dtype."""
    largest: list[Row] = field(default_factory=list)
    jumps: list[Row] = field(default_factory=list)
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
    """What two sets of captures say."""

    name_a: str
    name_b: str
    rtol: float
    stages: list[StageComparison]
    found: Found | None
    largest: list[Row]
    """Over all stages and ranks, a row a module and quantity."""
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
        """Over everything."""
        return max((stage.max_error for stage in self.stages), default=SAME)


def match(a: Sequence[DumpRef], b: Sequence[DumpRef]) -> tuple[list[tuple[Place, DumpRef, DumpRef]], list[str]]:
    """Pair captures of the same step, stage, call, rank and replica. Where each side has but one step, stage or rank, these are
    paired though they differ: two steps of a run, actor against reference.

    Returns:
        The pairs in the order in which they ran, and a line for each side on what has no partner.

    Raises:
        UserError: nothing pairs.
    """

    def aspects(ref: DumpRef) -> list[object]:
        return [ref.step, ref.stage, ref.call, ref.rank, ref.replica]

    single = [len({aspects(ref)[i] for ref in a}) == 1 == len({aspects(ref)[i] for ref in b}) for i in range(5)]

    def key(ref: DumpRef) -> tuple[object, ...]:
        return tuple(None if alone else value for alone, value in zip(single, aspects(ref)))

    by_key = {key(ref): ref for ref in b}
    pairs = [
        (Place(x.step, y.step, x.stage, y.stage, x.call, x.rank, y.rank, x.replica), x, y)
        for x in a
        if (y := by_key.get(key(x))) is not None
    ]
    if not pairs:
        raise UserError(
            "A, B",
            f"no capture of A has a partner in B.\nA holds {_contents(a)}\nB holds {_contents(b)}",
            "Give two folders with the same steps and stages, or a step folder of each.",
        )
    paired_b = {id(y) for _, _, y in pairs}
    keys_b = set(by_key)
    missing = only_in("A", [ref for ref in a if key(ref) not in keys_b]) + only_in("B", [ref for ref in b if id(ref) not in paired_b])
    return sorted(pairs, key=lambda pair: (*pair[0].order, pair[0].replica or 0, pair[0].rank or 0)), missing


def only_in(side: str, refs: Sequence[DumpRef]) -> list[str]:
    """Return a line on the captures of a side that have no partner; none where all have one."""
    return [f"only in {side}: {_contents(refs)}"] if refs else []


def _contents(refs: Sequence[DumpRef]) -> str:
    if not refs:
        return "nothing"
    steps = sorted({ref.step for ref in refs})
    shown = ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")
    stages = ", ".join(sorted({ref.stage for ref in refs}, key=lambda stage: _STAGE_ORDER.get(stage, 99)))
    ranks = ", ".join(map(str, sorted({ref.rank for ref in refs})))
    return f"step {shown}; {stages}; rank {ranks}"


def compare_captures(
    pairs: Iterable[tuple[Place, DumpRef, DumpRef]],
    read: Callable[[DumpRef], StageDump],
    *,
    names: tuple[str, str],
    rtol: float = RTOL,
    limit: int = 20,
    per_pass: bool = False,
    missing: Sequence[str] = (),
    on_pair: Callable[[Place], None] = lambda place: None,
) -> Comparison:
    """Compare pairs of captures, one pair in memory at a time.

    Args:
        pairs: from `match`.
        read: reads one.
        names: of A and B, for the reader.
        rtol: the largest relative error that is none; see `difference`.
        limit: rows of the tables.
        per_pass: keep the cells of the heat map by pass, not only their largest.
        missing: what `match` found no partner for.
        on_pair: hears of each pair before it is read.

    Raises:
        UserError: no call of A is in B.
    """
    stages: list[StageComparison] = []
    for place, ref_a, ref_b in pairs:
        on_pair(place)
        stages.append(compare_dumps(read(ref_a), read(ref_b), place, rtol=rtol, limit=limit, per_pass=per_pass))
    return summarise(stages, names=names, rtol=rtol, limit=limit, missing=missing)


def summarise(
    stages: list[StageComparison],
    *,
    names: tuple[str, str],
    rtol: float,
    limit: int,
    missing: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Comparison:
    """Put the comparisons of stages together: the earliest divergence, which ranks have it, and what could not be compared.

    Raises:
        UserError: no call of A is in B.
    """
    if not any(stage.num_common for stage in stages):
        one = next((stage for stage in stages if stage.only_a and stage.only_b), None)
        example = "" if one is None else f" (in {one.place.moment}, A has e.g. {one.only_a[0]}, B {one.only_b[0]})"
        raise UserError("A, B", f"no call of A is in B{example}.", "Compare captures of the same level, and of the same model.")
    largest = _merge_rows((row for stage in stages for row in stage.largest), lambda row: row.error)[:limit]
    jumps = _merge_rows((row for stage in stages for row in stage.jumps), _ratio)[:limit]
    missing = [*missing, *(line for stage in stages for line in stage.missing)]
    return Comparison(*names, rtol, stages, _earliest(stages), largest, jumps, missing, list(notes))


def _earliest(stages: list[StageComparison]) -> Found | None:
    diverging = [stage for stage in stages if stage.divergence is not None]
    if not diverging:
        return None

    def when(stage: StageComparison) -> tuple[int, ...]:
        assert stage.divergence is not None
        return (*stage.place.order, stage.divergence.pass_index, stage.divergence.position)

    first = min(diverging, key=when)
    assert first.divergence is not None
    beside = [stage for stage in stages if stage.place.order == first.place.order]
    same = [stage for stage in beside if _is_alike(stage.divergence, first.divergence)]
    later = [
        f"{stage.place.rank_name}: " + (f"{stage.divergence.module or 'the inputs'} ({stage.pass_label})" if stage.divergence else "nothing")
        for stage in beside
        if stage not in same
    ]
    return Found(
        first.place, first.divergence, first, [stage.place.rank_name for stage in same], [stage.place.rank_name for stage in beside], later
    )


def _is_alike(a: Divergence | None, b: Divergence) -> bool:
    return a is not None and (a.module, a.kind, a.direction, a.pass_index) == (b.module, b.kind, b.direction, b.pass_index)


def _ratio(row: Row) -> float:
    return row.error / max(row.base, 1e-12)


def _merge_rows(rows: Iterable[Row], size: Callable[[Row], float]) -> list[Row]:
    """Return the largest row of each module and quantity, the largest first."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        kept = best.get((row.module, row.what))
        if kept is None or size(row) > size(kept):
            best[row.module, row.what] = row
    return sorted(best.values(), key=lambda row: -size(row))


def compare_dumps(a: StageDump, b: StageDump, place: Place, *, rtol: float = RTOL, limit: int = 20, per_pass: bool = False) -> StageComparison:
    """Compare two captures of a stage."""
    return _Pair(a, b, place, rtol).result(limit, per_pass)


def place_of(a: StageDump, b: StageDump) -> Place:
    """Return the place that two captures say of themselves."""
    return Place(a.about.step, b.about.step, a.about.stage, b.about.stage, a.about.call, a.about.rank, b.about.rank, None)


class _Pair:
    """Two captures of a stage on one rank, and the errors between them."""

    def __init__(self, a: StageDump, b: StageDump, place: Place, rtol: float) -> None:
        self.a, self.b, self.place = a, b, place
        self.calls = Calls(a)
        self._entries_b = {entry.name: entry for entry in b.entries}
        self.drift = _drift(a, self._entries_b)
        self._sample_errors = {} if self.drift else _sample_errors(a, b)
        self.errors: dict[int, CallErrors] = {}
        self.dtypes: Counter[tuple[str, str]] = Counter()
        """Of outputs of forward calls of modules, A's and B's."""
        self._num_other_dtype = self._num_other_shards = self._num_leaves = 0
        self._weights: defaultdict[tuple[str, int], list[tuple[bool, bool]]] = defaultdict(list)
        """By moment, of each parameter whether it is trained, and whether it is equal bit for bit."""
        for index, name in enumerate(self.calls.names):
            if a.about.backend != b.about.backend and name.kind != MODULE:
                continue  # they count some operators otherwise, so that a number may stand for two calls
            if (other := self._entries_b.get(a.entries[index].name)) is not None:
                self.errors[index] = self._compare_call(index, name, dict(leaves(other)))
        floor = max(map(round_off, self.dtypes), default=0.0) if self.drift else 0.0
        self.limits = Limits(rtol, floor=floor)
        if not floor:
            self._ask_for_equal_parameters()

    def _compare_call(self, index: int, name: CallName, leaves_b: dict[str, TensorStats]) -> CallErrors:
        errors = CallErrors()
        entry = self.a.entries[index]
        floor = self._bias_floor(index) if name.direction == PARAMETER_GRADIENTS else 0.0
        for path, stats in leaves(entry):
            other = leaves_b.get(path)
            if other is None:
                continue
            if stats.shard != other.shard:
                self._num_other_shards += 1
                continue
            part = part_of(name, path)
            found = difference(path, stats, other, floor if "bias" in path else 0.0, rounded=self.drift is not None)
            if found.error != SAME and (by_sample := self._sample_errors.get(f"{entry.name}|{path}", SAME)) > found.error:
                found = Difference(by_sample, path, stats, found.b)
            errors.take(part, found)
            self._num_leaves += 1
            self._num_other_dtype += found.dtypes_differ
            if stats.checksum is not None and _is_weight(name, part):
                self._weights[self._moment(index)].append((stats.requires_grad, found.error == SAME))
            elif part is Part.OUTPUT and name.direction == FORWARD and is_float(stats) and is_float(found.b):
                self.dtypes[stats.dtype, found.b.dtype] += 1
        return errors

    def _moment(self, index: int) -> tuple[str, int]:
        name = self.calls.names[index]
        return name.direction, name.call if name.direction == OPTIMIZER else self.calls.passes[index]

    def _ask_for_equal_parameters(self) -> None:
        """Where most of the trained parameters are equal bit for bit, one that is not is at fault, however small its error."""
        exact: dict[tuple[str, int], bool] = {}
        for moment, weights in self._weights.items():
            trained = [same for is_trained, same in weights if is_trained] or [same for _, same in weights]
            exact[moment] = 2 * sum(trained) > len(trained)
        for index, found in self.errors.items():
            found.exact_parameters = exact.get(self._moment(index), False)

    def _bias_floor(self, index: int) -> float:
        backward = self.calls.backward_of(index)
        if backward is None:
            return 0.0
        norms = [stats.norm for path, stats in leaves(self.a.entries[backward]) if path.startswith("input")]
        return _BIAS_FLOOR * max((norm for norm in norms if math.isfinite(norm)), default=0.0)

    def result(self, limit: int, per_pass: bool) -> StageComparison:
        names_a = set(self.calls.index_of)
        result = StageComparison(
            place=self.place,
            num_common=len(self.errors),
            only_a=[entry.name for entry in self.a.entries if entry.name not in self._entries_b],
            only_b=[entry.name for entry in self.b.entries if entry.name not in names_a],
            max_error=max((found.error for found in self._findings()), default=SAME),
            drift=self.drift,
            num_other_dtype=self._num_other_dtype,
        )
        units = [one.unit for one in self.a.about.passes]
        result.pass_labels = [pass_label(units, index) for index in range(max(len(units), max(self.calls.passes, default=-1) + 1))]
        found = walk(self.calls, self.errors, self.limits)
        if found.fault is not None:
            self._explain(result, found, found.fault)
        jumps = [candidate for candidate in found.jumps if candidate.part is not Part.PARAMETERS]
        result.jumps = [self._row(candidate, result) for candidate in jumps[:limit]]
        result.largest = self._largest(result, limit)
        self._fill_cells(result, per_pass)
        result.missing, result.notes = self._missing(result), self._notes(result)
        return result

    def _findings(self) -> Iterator[Measured]:
        return (finding for found in self.errors.values() for part in Part if (finding := found.part(part)) is not None)

    def _explain(self, result: StageComparison, found: Walk, fault: Candidate) -> None:
        divergence = describe(self.calls, self.errors, fault, self.limits)
        result.divergence, result.pass_label = divergence, self._when(fault.entry, result)
        if found.first is not None and found.first is not fault:
            result.first = describe(self.calls, self.errors, found.first, self.limits)
        result.samples = self._samples(divergence)
        if divergence.kind is Kind.PARAMETERS:
            done = [number for number, start in enumerate(self.a.about.mini_batches) if 0 < start <= divergence.pass_index]
            result.after_mini_batch = done[-1] if done else None

    def _samples(self, divergence: Divergence) -> Samples | None:
        key = f"{divergence.entry}|{divergence.path}"
        if divergence.kind is Kind.PARAMETER_GRADIENT:  # which is a sum over samples; what the module sends back is not
            key = f"{divergence.entry.replace(f'.{PARAMETER_GRADIENTS}.', f'.{BACKWARD}.')}|output.0"
        a, b = self.a.samples, self.b.samples
        if a is None or b is None or key not in self._sample_errors or divergence.kind is Kind.PARAMETERS:
            return None
        row_a, row_b = a.names.index(key), b.names.index(key)
        errors, _ = span_errors(a, b, np.array([row_a]), np.array([row_b]), _lengths(self.a))
        spans = self.a.about.passes[int(a.pass_index[row_a])].spans
        order = np.argsort(-errors, kind="stable")
        differing = [f"{spans[at].sample} ({spans[at].part})" for at in order.tolist() if errors[at] > self.limits.rtol]
        return Samples(tuple(dict.fromkeys(differing)), len({(span.sample, span.part) for span in spans}))

    def _row(self, candidate: Candidate, result: StageComparison) -> Row:
        name = self.calls.names[candidate.entry]
        return Row(
            name.label,
            name.module_class,
            quantity(name, candidate.part),
            candidate.finding.error,
            candidate.base,
            self.a.entries[candidate.entry].name,
            candidate.finding.path,
            candidate.finding.what,
            f"{self.place.moment}, {self.place.rank_name}",
            self._when(candidate.entry, result),
        )

    def _when(self, index: int, result: StageComparison) -> str:
        """Return in which pass or optimizer step a call is."""
        if self.calls.names[index].direction != OPTIMIZER:
            return result.pass_labels[self.calls.passes[index]]
        steps = {name.call for name in self.calls.names if name.direction == OPTIMIZER}
        return f"optimizer step {self.calls.names[index].call + 1} of {len(steps)}"

    def _largest(self, result: StageComparison, limit: int) -> list[Row]:
        best: dict[tuple[str, str], Candidate] = {}
        for index, found in self.errors.items():
            name = self.calls.names[index]
            for part in Part:
                finding = found.part(part)
                if finding is None or finding.error <= 0.0:
                    continue
                key = (name.label, quantity(name, part))
                if key not in best or finding.error > best[key].finding.error:
                    best[key] = Candidate(index, part, finding, math.nan, 0)
        ordered = sorted(best.values(), key=lambda candidate: -candidate.finding.error)
        return [self._row(candidate, result) for candidate in ordered[:limit]]

    def _fill_cells(self, result: StageComparison, per_pass: bool) -> None:
        has_modules = any(name.kind == MODULE for name in self.calls.names)
        for event in self.calls.events():
            name = self.calls.names[event.entry]
            if event.ends or event.entry not in self.errors or (has_modules and name.kind != MODULE):
                continue
            result.modules.setdefault(name.label, name.module_class)
            key = (name.label, self.calls.passes[event.entry] if per_pass else 0)
            cell = result.cells.setdefault(key, [math.nan] * len(QUANTITIES))
            found = self.errors[event.entry]
            for part in Part:
                if (finding := found.part(part)) is not None:
                    at = QUANTITIES.index(quantity(name, part))
                    cell[at] = finding.error if math.isnan(cell[at]) else max(cell[at], finding.error)

    @property
    def _record_alike(self) -> bool:
        """Whether both sides record the same calls; msprobe does not record all that a native capture has, nor the reverse."""
        return self.a.about.backend == self.b.about.backend

    def _missing(self, result: StageComparison) -> list[str]:
        lines = self._only_in(result) if self._record_alike or not result.num_common else []
        for side, dump in (("A", self.a), ("B", self.b)):
            lines += cut_short(dump, side, f"{self.place.moment}, {self.place.rank_name}")
        return lines

    def _only_in(self, result: StageComparison) -> list[str]:
        where = f"{self.place.moment}, {self.place.rank_name}"
        sides = (("A", result.only_a), ("B", result.only_b))
        return [f"{where}: {len(names):,} calls are only in {side}, e.g. {names[0]}" for side, names in sides if names]

    def _notes(self, result: StageComparison) -> list[str]:
        where = f"{self.place.moment}, {self.place.rank_name}"
        notes = self._only_in(result) if not self._record_alike and result.num_common else []
        if result.num_other_dtype and not self.drift:
            notes.append(f"{where}: {result.num_other_dtype:,} of {self._num_leaves:,} tensors are of another dtype in B")
        if self._num_other_shards:
            notes.append(f"{where}: {self._num_other_shards:,} tensors are other ranks' parts, or cut otherwise, and were not compared")
        passes = zip(self.a.about.passes, self.b.about.passes)
        if (other := next((index for index, (one, two) in enumerate(passes) if one.spans != two.spans), None)) is not None:
            whose = " against ".join(_whose(dump.about.passes[other]) for dump in (self.a, self.b))
            notes.append(f"{where}: from {result.pass_labels[other]} on, the passes hold other tokens: {whose}; try --by-sample")
        return notes


def cut_short(dump: StageDump, side: str, where: str) -> list[str]:
    """Return a line on a capture that is not complete; none on one that is."""
    by = f" ({dump.about.error})" if dump.about.error else ""
    return [] if dump.about.complete else [f"{where}: the capture of {side} was cut short{by}"]


def round_off(pair: tuple[str, str]) -> float:
    """Return the relative error that computing in the coarser of two dtypes makes; 0 if they are the same."""
    return max(ROUND_OFF.get(dtype, OTHER_ROUND_OFF) for dtype in pair) if pair[0] != pair[1] else 0.0


def quantity(name: CallName, part: Part) -> str:
    """Return which of `QUANTITIES` a part of a call is shown as."""
    if name.direction == OPTIMIZER and part is Part.OUTPUT:
        return PARAMETERS
    if name.direction != FORWARD:
        return GRADIENTS
    return {Part.INPUTS: INPUTS, Part.PARAMETERS: PARAMETERS, Part.OUTPUT: OUTPUT}[part]


def _is_weight(name: CallName, part: Part) -> bool:
    return part is Part.PARAMETERS or (name.direction == OPTIMIZER and part is Part.OUTPUT)


def _whose(one: Pass) -> str:
    names = list(dict.fromkeys(span.sample for span in one.spans))
    return f"{sum(span.length for span in one.spans):,} of {', '.join(names[:2])}{', …' if len(names) > 2 else ''}"


def _lengths(dump: StageDump) -> list[np.ndarray]:
    return [np.array([span.length for span in one.spans], dtype=np.float64) for one in dump.about.passes]


def drift_of(dtypes: Counter[tuple[str, str]]) -> str | None:
    """Return which two precisions the sides compute in, from the dtypes (A's, B's) of what modules put out; None: the same."""
    other = Counter({pair: count for pair, count in dtypes.items() if pair[0] != pair[1]})
    if not other or other.total() < DRIFT_SHARE * dtypes.total():
        return None
    [(a, b), _], *_ = other.most_common()
    return f"{a.removeprefix('torch.')} against {b.removeprefix('torch.')}"


def _drift(a: StageDump, entries_b: dict[str, Entry]) -> str | None:
    dtypes: Counter[tuple[str, str]] = Counter()
    for entry in a.entries:
        if (other := entries_b.get(entry.name)) is None or not entry.name.startswith(MODULE) or f".{FORWARD}." not in entry.name:
            continue
        leaves_b = dict(leaves(other))
        for path, stats in leaves(entry):
            if path.startswith(Part.OUTPUT) and path in leaves_b and is_float(stats) and is_float(leaves_b[path]):
                dtypes[stats.dtype, leaves_b[path].dtype] += 1
    return drift_of(dtypes)


def _sample_errors(a: StageDump, b: StageDump) -> dict[str, float]:
    """Return by name of a tensor the largest error over its samples, of those whose passes hold the same tokens on both sides."""
    if a.samples is None or b.samples is None:
        return {}
    alike = [one.spans == other.spans for one, other in zip(a.about.passes, b.about.passes)]
    rows_b = {name: row for row, name in enumerate(b.samples.names)}
    pairs: list[tuple[int, int]] = []
    for row, (name, index) in enumerate(zip(a.samples.names, a.samples.pass_index.tolist())):
        other = rows_b.get(name)
        if other is not None and index < len(alike) and alike[index] and int(b.samples.pass_index[other]) == index:
            pairs.append((row, other))
    if not pairs:
        return {}
    rows = np.array(pairs)
    errors, starts = span_errors(a.samples, b.samples, rows[:, 0], rows[:, 1], _lengths(a))
    result: dict[str, float] = defaultdict(lambda: SAME)
    has_spans = starts[1:] > starts[:-1]
    largest = np.maximum.reduceat(errors, starts[:-1][has_spans]) if has_spans.any() else np.zeros(0)
    for row, error in zip(rows[has_spans, 0].tolist(), largest.tolist()):
        result[a.samples.names[row]] = error
    return dict(result)
