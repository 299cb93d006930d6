"""Compares captures: the first divergence in execution order, what it comes from, and the largest errors.

Both sides become tables that are joined: call by call, or, where they cut the same tokens into other passes or spread
them over other ranks, by module and sample. A single capture is judged by its NaN and Inf in the same way. What comes
of it, a `Comparison`, `text.py` shows.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions only when it is imported.

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pellucid.errors import UserError
from pellucid.precision.calls import BACKWARD, OPTIMIZER, PARAMETER_GRADIENTS, Calls
from pellucid.precision.capture_table import (
    SAME,
    WHOLE,
    Capture,
    call_key,
    capture_table,
    column,
    join,
    what_differs,
    with_errors,
    with_nan_as_errors,
)
from pellucid.precision.divergence import (
    Change,
    Changes,
    Kind,
    Limits,
    Part,
    beside,
    first_fault,
    kind_of,
    part_of,
    quantity,
    walk,
)
from pellucid.precision.dump import StageDump, read_dump
from pellucid.precision.matching import (
    Place,
    captures,
    pairs_of,
    place_of,
    read_captures,
    tokens_of_passes,
    tokens_of_samples,
    trainer_and_rollout,
)
from pellucid.stages import Stage

RTOL = 1e-5
"""Twice and more what another order of float32 additions makes; on one machine captures are equal."""
RTOL_BY_SAMPLE = 1e-4
"""Packed and one by one, float32 sums differ by a few 1e-6 at the end of a model; bf16 by 1e-3."""
DRIFT_SHARE = 0.25
"""With so many outputs of another dtype it is the whole model that computes in it."""
ROUND_OFF = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11, "torch.float32": 2.0**-24, "torch.float64": 2.0**-53}
_GRADIENT_OF_BIAS = rf"\.({PARAMETER_GRADIENTS}[.|]|{OPTIMIZER}\.\d+\|input).*bias"
"""The sum of the gradient that comes in, which is compared itself; where it cancels, the bias's own is noise."""
_MAX_ROWS = 20
Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True)
class Row:
    """A line of the table of errors: where, what, and how far apart."""

    place: Place
    pass_index: int
    pass_label: str
    module: str
    """Its path in the model, or an operator."""
    module_class: str
    quantity: str
    """output, inputs, parameters or gradients."""
    direction: str
    """forward, backward or optimizer."""
    entry: str
    path: str
    error: float
    """Relative; `SAME`, 0 or more; inf where the two cannot be compared, and in a report."""
    base: float
    """The error of what went into it; nan where that was not captured."""
    growth: float
    """How many times the base the error is."""
    what: str
    """What differs most, in words."""


@dataclass(slots=True, kw_only=True)
class Divergence(Row):
    """Where two captures go apart, or where a single one has its first NaN or Inf; `module` is the one at fault."""

    kind: Kind
    seen_at: str
    """The module whose tensor shows it."""
    grown: bool
    """No module made it: it grew over many."""
    drift: str | None
    """`float32 against bfloat16` where most of the model computes in two dtypes."""
    num_differing: int
    """Of weights and their gradients: modules that show it in the same pass or optimizer step."""
    num_beside: int
    """Of how many."""
    position: int
    """Among all that happens in the capture; earlier is less."""
    samples: list[str]
    """`<uid> sample <n> (response)`, `<uid> (prompt)` whose tokens differ; the largest error first."""
    num_samples: int
    """How many prompts and responses there are."""
    ranks: list[str]
    """That have it; call by call set when all stages are put together."""
    all_ranks: list[str]


@dataclass(slots=True, kw_only=True)
class StageComparison:
    """What one rank's captures of one stage say, or those of all ranks together."""

    place: Place
    num_calls: int
    """That both sides have."""
    max_error: float
    divergence: Divergence | None
    drift: str | None
    largest: list[Row]
    modules: dict[str, tuple[float, str]]
    """The heat map: by module the largest error, and of what it is."""
    missing: list[str] = field(default_factory=list)
    """What one side lacks, or what was cut short: for that the two are not equal, whatever is in both."""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What two sets of captures say, or a single one."""

    a: str
    b: str | None
    """None in a report on captures of their own."""
    rtol: float
    stages: list[StageComparison]
    divergence: Divergence | None
    largest: list[Row]
    """The largest errors, or where dtypes differ the largest growth, a row a module and quantity."""
    missing: list[str]
    """Steps, stages, ranks and calls that one side lacks, and captures that were cut short."""
    notes: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether nothing diverges and nothing is missing."""
        return self.divergence is None and not self.missing

    @property
    def max_error(self) -> float:
        """The largest error of everything."""
        return max((stage.max_error for stage in self.stages), default=SAME)


def compare_folders(
    a: Path,
    b: Path | None,
    *,
    step: int | None = None,
    stage: str | None = None,
    rank: int | None = None,
    by_sample: bool = False,
    rtol: float | None = None,
    track: Callable[[Any], Iterable[Any]] = iter,
) -> Comparison:
    """Compare the captures below two folders; with no `b`, a run's trainer with its rollout engine, by sample.

    Args:
        a: a run, its profile folder, or the folder of a step, a stage or a rank in it.
        b: what to compare with.
        step: compare this step alone; so with `stage` and `rank`.
        stage: its name.
        rank: its number.
        by_sample: compare the same tokens over ranks and micro-batches of any number.
        rtol: the largest relative error that is none; None: `RTOL`, by sample `RTOL_BY_SAMPLE`.
        track: wraps the pairs that are gone through, for a progress bar.

    Raises:
        UserError: there are no such captures, or none that can be compared.
    """
    by_sample = by_sample or b is None
    if b is None:
        sides = trainer_and_rollout(captures(a, step, None, rank), stage)
        names = [f"{a}, {side[0].stage}" for side in sides]
    else:
        sides, names = [captures(side, step, stage, rank) for side in (a, b)], [str(a), str(b)]
    pairs, missing = pairs_of(sides[0], sides[1], by_sample=by_sample)
    rtol = (RTOL_BY_SAMPLE if by_sample else RTOL) if rtol is None else rtol
    stages = [
        compare_stage(place, read_captures(mine), read_captures(theirs), by_sample=by_sample, rtol=rtol)
        for place, mine, theirs in track(pairs)
    ]
    return summarise(stages, names[0], names[1], rtol=rtol, missing=missing)


def check_folder(
    a: Path,
    *,
    step: int | None = None,
    stage: str | None = None,
    rank: int | None = None,
    track: Callable[[Any], Iterable[Any]] = iter,
) -> Comparison:
    """Look at the captures below a folder on their own; the arguments are those of `compare_folders`.

    Raises:
        UserError: there are no such captures.
    """
    refs = captures(a, step, stage, rank)
    stages = [check_stage(place_of(ref, ref), read_dump(ref.folder)) for ref in track(refs)]
    return summarise(stages, str(a), None, rtol=0.0)


def summarise(
    stages: list[StageComparison], a: str, b: str | None, *, rtol: float, missing: Sequence[str] = ()
) -> Comparison:
    """Put the comparisons of stages together: the earliest divergence, its ranks, and what could not be compared.

    Raises:
        UserError: no call of A is in B.
    """
    missing = [*missing, *(line for stage in stages for line in stage.missing)]
    if not any(stage.num_calls for stage in stages):
        reason = f"no call of A is in B ({'; '.join(missing[:2])})."
        raise UserError("A, B", reason, "Compare captures of the same level, and of the same model.")
    found = [stage.divergence for stage in stages if stage.divergence is not None]
    first = min(found, key=lambda one: (*one.place.order, one.position), default=None)
    if first is not None and not first.all_ranks:

        def mark(one: Divergence) -> tuple[object, ...]:
            return one.place.order, one.module, one.kind, one.direction, one.pass_index

        first.ranks = [one.place.rank for one in found if mark(one) == mark(first)]
        first.all_ranks = [stage.place.rank for stage in stages if stage.place.order == first.place.order]
    drifts = any(stage.drift for stage in stages)
    rows = (row for stage in stages for row in stage.largest)
    largest = _best(rows, lambda row: (row.module, row.quantity), lambda row: row.growth if drifts else row.error)
    notes = [note for stage in stages for note in stage.notes]
    return Comparison(
        a=a, b=b, rtol=rtol, stages=stages, divergence=first, largest=largest, missing=missing, notes=notes
    )


def _best(items: Iterable[Item], key: Callable[[Item], object], size: Callable[[Item], float]) -> list[Item]:
    """Return the largest item of each key, the largest first; so many as a table has rows."""
    best: dict[object, Item] = {}
    for item in items:
        if size(item) > size(best.setdefault(key(item), item)):
            best[key(item)] = item
    return sorted(best.values(), key=size, reverse=True)[:_MAX_ROWS]


# --- one stage -------------------------------------------------------------------------------------------------------


def compare_stage(
    place: Place, a: Sequence[Capture], b: Sequence[Capture], *, by_sample: bool = False, rtol: float = RTOL
) -> StageComparison:
    """Compare captures of a stage, in the order in which the first of `a` ran.

    Args:
        place: which they are.
        a: one capture; by sample, those of all ranks.
        b: the other side.
        by_sample: compare forward calls of modules by the sums over the tokens that both sides have, not call by call.
        rtol: the largest relative error that is none; an engine's weights must be the trainer's bit for bit.

    Raises:
        UserError: by sample, a capture has no sums over samples, or no sample is in both.
    """
    notes = _choose_samples(place, a, b) if by_sample else []
    if not by_sample:
        a[0].tokens, b[0].tokens = tokens_of_passes(a[0].dump, b[0].dump), tokens_of_passes(b[0].dump, a[0].dump)
    joined = join(capture_table(a, by_sample=by_sample), capture_table(b, by_sample=by_sample))
    is_part = pc.less(pc.min_element_wise(joined["share"], joined["share_b"]), 0.99)
    is_part = pc.fill_null(pc.or_(is_part, pc.not_equal(joined["shard"], joined["shard_b"])), False)
    if num_parts := pc.sum(is_part).as_py():
        notes.append(f"{place.where}: {num_parts:,} tensors were not compared: their shards differ, or are missing")
    joined = joined.filter(pc.invert(pc.or_(is_part, pc.match_substring_regex(joined["tensor"], _GRADIENT_OF_BIAS))))
    drift, round_off = _drift(joined)
    if drift and not by_sample:  # a sample's own rounding says less than that of all
        joined = joined.filter(pc.equal(joined["tokens"], WHOLE))
    calls, joined = Calls(a[0].dump), with_errors(joined, rounded=drift is not None)
    keys_a, keys_b = (_call_keys(side, by_sample=by_sample) for side in (a, b))
    call_of = {key: at for key, at in _call_keys(a[:1], by_sample=by_sample).items() if key in keys_b}
    is_engine = by_sample and b[0].dump.about.stage == Stage.ROLLOUT_GENERATE != a[0].dump.about.stage
    found = _largest_errors(calls, call_of, joined, has_copy=is_engine and not drift)
    result = _stage_comparison(place, calls, joined, found, Limits(rtol, round_off), drift=drift, by_sample=by_sample)
    sides = (("A", [key for key in keys_a if key not in keys_b]), ("B", [key for key in keys_b if key not in keys_a]))
    lacking = [f"{place.where}: {len(keys):,} calls are only in {side}, e.g. {keys[0]}" for side, keys in sides if keys]
    is_fault = not is_engine or not call_of  # an engine runs the model in other ways
    result.missing = lacking if is_fault else []
    for side, capture in (*(("A", one) for one in a), *(("B", one) for one in b)):
        result.missing += _cut_short(capture.dump, f"{place.moment}, {capture.name} of {side}")
    result.notes = notes + ([] if is_fault else lacking)
    return result


def check_stage(place: Place, dump: StageDump) -> StageComparison:
    """Look for NaN and Inf in one capture; `largest` of the result are its modules that have some, in their order."""
    calls = Calls(dump)
    table = with_nan_as_errors(capture_table([Capture("", dump, tokens_of_passes(dump, dump))]))
    result = _stage_comparison(place, calls, table, _largest_errors(calls, calls.index_of, table), Limits(0.0))
    result.notes = _cut_short(dump, place.where)
    return result


def _choose_samples(place: Place, a: Sequence[Capture], b: Sequence[Capture]) -> list[str]:
    """Let sums be joined by the samples of which both sides have the same tokens; return notes on them.

    Raises:
        UserError: a capture has no sums over samples, or no sample is in both.
    """
    for capture in (*a, *b):
        if capture.dump.samples is None:
            reason = f"the capture of {capture.name} ({capture.dump.about.backend}) has no sums over samples."
            raise UserError("--by-sample, --rollout", reason, "Capture with precision_debugger.backend: native.")
    positions_a, positions_b = (tokens_of_samples(side) for side in (a, b))
    common = {name for name, positions in positions_a.items() if positions_b.get(name) == positions}
    if not common:
        reason = f"{place.moment}: the two sides have no sample with the same tokens in common."
        raise UserError("--by-sample, --rollout", reason, "Capture both stages of the same step, whole, on all ranks.")
    for capture in a:
        capture.tokens = [name if name in common else None for name in capture.tokens]
    num_responses = sum(name.endswith("(response)") for name in common)
    notes = [f"{place.moment}: over the tokens of {len(common) - num_responses} prompts and {num_responses} responses."]
    if alone := len(positions_a.keys() | positions_b.keys()) - len(common):
        notes.append(f"{place.moment}: {alone} prompts and responses have not the same tokens on both sides")
    return notes


def _call_keys(captures: Sequence[Capture], *, by_sample: bool) -> dict[str, int]:
    """Return what the calls of captures are joined by, with the index of the first of each."""
    keys: dict[str, int] = {}
    for capture in captures:
        for index, entry in enumerate(capture.dump.entries):
            if (key := call_key(entry.name, by_sample=by_sample)) is not None:
                keys.setdefault(key, index)
    return keys


def _cut_short(dump: StageDump, where: str) -> list[str]:
    """Return a line on a capture that is not complete; none on one that is."""
    by = f" ({dump.about.error})" if dump.about.error else ""
    return [] if dump.about.complete else [f"{where}: the capture was cut short{by}"]


def _drift(joined: pa.Table) -> tuple[str | None, float]:
    """Return which two precisions the sides compute in, and the round-off of the coarser; (None, 0) for the same."""
    is_output = pc.match_substring_regex(joined["tensor"], r"^Module\..*\.forward(\.\d+)?\|output")
    outputs = joined.filter(is_output).group_by(["dtype", "dtype_b"]).aggregate([([], "count_all")]).to_pylist()
    floats = [one for one in outputs if "float" in one["dtype"] and "float" in one["dtype_b"]]
    other = [one for one in floats if one["dtype"] != one["dtype_b"]]
    if not other or sum(one["count_all"] for one in other) < DRIFT_SHARE * sum(one["count_all"] for one in floats):
        return None, 0.0
    most = max(other, key=lambda one: one["count_all"])
    round_off = max(ROUND_OFF.get(one[name], 2.0**-3) for one in other for name in ("dtype", "dtype_b"))  # 8 bits
    return f"{most['dtype']} against {most['dtype_b']}".replace("torch.", ""), round_off


def _largest_errors(calls: Calls, call_of: Mapping[str, int], table: pa.Table, *, has_copy: bool = False) -> Changes:
    """Return the largest error of each part of the calls in `call_of`; a copy's weights are asked to be the same."""
    tensors, errors = table["tensor"].combine_chunks().dictionary_encode(), column(table, "error")
    numbers = tensors.indices.to_numpy()
    order = np.lexsort((-errors, numbers))  # of each tensor the largest error first
    largest = order[np.unique(numbers[order], return_index=True)[1]].tolist()
    found: Changes = {index: {} for index in call_of.values()}
    for tensor, row in zip(tensors.dictionary.to_pylist(), largest):
        entry, _, path = tensor.rpartition("|")
        if (index := call_of.get(entry)) is not None:
            part, error = part_of(calls.names[index], path), float(errors[row])
            if part not in found[index] or error > found[index][part].error:
                is_weight = has_copy and part is Part.PARAMETERS and table["checksum"][row].is_valid
                found[index][part] = Change(index, part, error, row, exact=is_weight)
    return found


def _stage_comparison(
    place: Place, calls: Calls, table: pa.Table, found: Changes, limits: Limits,
    *, drift: str | None = None, by_sample: bool = False,
) -> StageComparison:  # fmt: skip
    """Return what the errors of a stage show; `drift` says which two dtypes most of the model computes in."""
    names, changes = calls.names, list(walk(calls, found))

    def row_of(one: Change) -> dict[str, Any]:
        """Return the fields of a `Row`."""
        name = names[one.call]
        return {
            "place": place, "pass_index": calls.passes[one.call],
            "pass_label": "all passes" if by_sample else calls.label(one.call),
            "module": name.label, "module_class": name.module_class, "quantity": quantity(name, one.part),
            "direction": BACKWARD if name.direction == PARAMETER_GRADIENTS else name.direction,
            "entry": calls.entries[one.call].name, "path": table["tensor"][one.row].as_py().rpartition("|")[2],
            "error": one.error, "base": one.base, "growth": limits.growth(one), "what": what_differs(table, one.row),
        }  # fmt: skip

    divergence, fault = None, first_fault(calls, changes, limits)
    if fault is not None:
        row = row_of(fault)
        kind, owner = kind_of(calls, fault)
        name, at_fault = names[fault.call], names[owner]
        tensor = table["tensor"][fault.row].as_py()
        if kind is Kind.PARAMETER_GRADIENT:  # which is a sum over samples; what the module sends back is not
            tensor = f"{name.other(BACKWARD)}|output.0"
        rows = table.filter(pc.equal(table["tensor"], tensor)).sort_by([("error", "descending"), ("row", "ascending")])
        differing = rows.filter(pc.greater(rows["error"], limits.rtol))
        samples, all_samples = ([one for one in of["tokens"].to_pylist() if one != WHOLE] for of in (differing, rows))
        by_rank = by_sample and kind is not Kind.PARAMETERS
        ranks, all_ranks = (sorted(set(of["source_b"].to_pylist())) if by_rank else [] for of in (differing, rows))
        is_of_weights = kind is Kind.PARAMETERS or name.direction in (PARAMETER_GRADIENTS, OPTIMIZER)
        near = beside(calls, changes, fault) if is_of_weights else []
        row |= {"module": at_fault.label, "module_class": at_fault.module_class}
        divergence = Divergence(
            **row, kind=kind, seen_at=name.label, grown=not limits.is_made(fault) and math.isfinite(fault.error),
            drift=drift, num_differing=sum(map(limits.exceeds, near)), num_beside=len(near), position=fault.position,
            samples=samples, num_samples=len(all_samples), ranks=ranks, all_ranks=all_ranks,
        )  # fmt: skip
    best = _best(
        (one for one in changes if one.error > 0.0 and not (drift and one.part is Part.PARAMETERS)),
        lambda one: (names[one.call].label, quantity(names[one.call], one.part)),
        limits.growth if drift else lambda one: one.error,
    )
    modules: dict[str, tuple[float, str]] = {}
    for one in changes:
        name = names[one.call]
        if name.is_module:
            modules[name.label] = max(modules.get(name.label, (SAME, "")), (one.error, quantity(name, one.part)))
    return StageComparison(
        place=place,
        num_calls=len(found),
        max_error=max((one.error for one in changes), default=SAME),
        divergence=divergence,
        drift=drift,
        largest=[Row(**row_of(one)) for one in best],
        modules=modules,
    )
