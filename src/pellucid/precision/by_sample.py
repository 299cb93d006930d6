"""Compares what two stages computed of the same tokens, though they cut them into other passes or spread them over other ranks.

The trainer packs sequences into micro-batches, the rollout engine prefills prompts and decodes token by token: what can be compared
is the sum over each sample's tokens, module by module. From captures with `SampleSums` to a `StageComparison` like that of `compare.py`.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pellucid.errors import UserError
from pellucid.precision.calls import FORWARD, MODULE, Calls, parse_name
from pellucid.precision.compare import (
    QUANTITIES,
    Place,
    Row,
    Samples,
    StageComparison,
    cut_short,
    drift_of,
    only_in,
    quantity,
    round_off,
)
from pellucid.precision.difference import SAME, SCALE_FLOOR, Difference, difference, sum_errors
from pellucid.precision.divergence import CallErrors, Candidate, Limits, Part, describe, part_of, walk
from pellucid.precision.dump import DumpRef, Entry, StageDump, TensorStats, leaves
from pellucid.stages import Stage

RTOL = 1e-4
"""Packed and one by one, float32 sums differ by a few 1e-6 at the end of a model; bf16 by 1e-3."""
_SAMPLE = re.compile(r" sample \d+$")

Group = tuple[str, str]
"""(sample, part); of a prompt, which all samples of a group share, the prompt's uid."""


@dataclass(frozen=True, slots=True)
class Source:
    """A capture and what to call it."""

    name: str
    dump: StageDump
    passes: int | None = None
    """Only so many first passes: in those that follow the weights are others."""


class _Table:
    """Σx, Σx² and the number of NaN and Inf by tensor (row) and group (column), over all captures of one side."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.rows: dict[str, int] = {}
        """By module and path of the leaf, without the number of the call."""
        self.groups: dict[Group, int] = {}
        self.positions: dict[Group, frozenset[int]] = {}
        self.source_of: dict[Group, str] = {}
        columns = self._assign(sources)
        parts = [self._flatten(source, columns[number]) for number, source in enumerate(sources)]
        shape = (len(self.rows), len(self.groups))
        flat, sums, squares, bad = (np.concatenate(arrays) for arrays in zip(*parts))
        self.sum, self.square_sum, self.num_bad = (
            np.bincount(flat, weights, shape[0] * shape[1]).reshape(shape) for weights in (sums, squares, bad)
        )
        self.is_there = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape) > 0

    def _assign(self, sources: Sequence[Source]) -> list[list[np.ndarray]]:
        """Return by source and pass the column of each span, −1 for tokens that another span has shown: a prompt in two
        micro-batches, or one that stands in for missing work.
        """
        spans = [
            (-span.length, number, index, at, span)
            for number, source in enumerate(sources)
            for index, one in enumerate(source.dump.about.passes[: source.passes])
            for at, span in enumerate(one.spans)
        ]
        columns = [[np.full(len(one.spans), -1) for one in source.dump.about.passes] for source in sources]
        seen: dict[Group, set[int]] = {}
        for _, number, index, at, span in sorted(spans, key=lambda found: found[:4]):
            group = (_SAMPLE.sub("", span.sample) if span.part == "prompt" else span.sample, span.part)
            tokens = set(range(span.position, span.position + span.length))
            if tokens and not tokens & (known := seen.setdefault(group, set())):
                known |= tokens
                columns[number][index][at] = self.groups.setdefault(group, len(self.groups))
                self.source_of.setdefault(group, sources[number].name)
        self.positions = {group: frozenset(tokens) for group, tokens in seen.items()}
        return columns

    def _flatten(self, source: Source, columns: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return the flat index and the sums of every span that counts."""
        samples = source.dump.samples
        assert samples is not None
        chosen, rows = [], []
        for row, name in enumerate(samples.names):
            entry, _, path = name.partition("|")
            call = parse_name(entry)
            if call.kind == MODULE and call.direction == FORWARD:
                chosen.append(row)
                rows.append(self.rows.setdefault(f"{call.every_call}|{path}", len(self.rows)))
        at = np.array(chosen, dtype=np.int64)
        counts = samples.first[at + 1] - samples.first[at]
        column = np.concatenate([columns[index] for index in samples.pass_index[at]]) if len(at) else np.zeros(0, np.int64)
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        place = np.repeat(samples.first[at], counts) + inside
        keep = column >= 0
        flat = np.repeat(np.array(rows, dtype=np.int64), counts) * len(self.groups) + column
        return flat[keep], samples.sum[place][keep], samples.square_sum[place][keep], samples.num_bad[place][keep].astype(np.float64)


@dataclass(frozen=True, slots=True)
class _SampleError:
    """The largest error of a tensor among the groups."""

    path: str
    error: float
    group: Group
    a: float
    b: float
    """Sums over the group's tokens."""

    @property
    def what(self) -> str:
        return f"sum {self.a:.6g} against {self.b:.6g} over the {self.group[1]} of {self.group[0]}"


Match = tuple[Place, list[DumpRef], list[DumpRef]]
"""A stage, and the captures of all ranks of A and of B."""


def trainer_and_rollout(refs: Sequence[DumpRef], step: int | None, stage: str | None) -> tuple[list[Match], list[str]]:
    """Choose what is compared: of each step the training stage that runs the tokens of the rollout with the same weights, and the
    rollout.

    Args:
        refs: of a run.
        step: which; None: all that have both.
        stage: the training stage; actor_compute_log_prob where it was captured, else actor_update.

    Returns:
        The pairs in the order of the steps, and notes on the steps that have not both.

    Raises:
        UserError: no step has both, or the stage is the rollout itself.
    """
    if stage == Stage.ROLLOUT_GENERATE:
        raise UserError("--stage", f"--rollout compares a training stage with {stage}, not {stage} with itself.", "Name a training stage.")
    found: list[Match] = []
    without: list[int] = []
    stages = [stage] if stage else [str(Stage.ACTOR_COMPUTE_LOG_PROB), str(Stage.ACTOR_UPDATE)]
    for number in [step] if step is not None else sorted({ref.step for ref in refs}):
        here = [ref for ref in refs if ref.step == number and ref.call == 0]
        rollout = [ref for ref in here if ref.stage == Stage.ROLLOUT_GENERATE]
        name = next((name for name in stages if any(ref.stage == name for ref in here)), None)
        if not rollout or name is None:
            without.append(number)
            continue
        place = Place(number, number, name, str(Stage.ROLLOUT_GENERATE), 0, None, None, None)
        found.append((place, [ref for ref in here if ref.stage == name], rollout))
    if found:
        names = " or ".join(stages)
        return found, [f"step {', '.join(map(str, without))}: {names} and rollout_generate were not both captured"] if without else []
    where = f"step {step}" if step is not None else "any step"
    raise UserError(
        "--rollout",
        f"{' or '.join(stages)} and rollout_generate were not both captured in {where}.",
        "Enable the profiler of the actor and of the rollout, and list both in precision_debugger.stages, or leave that empty.",
    )


def same_stages(a: Sequence[DumpRef], b: Sequence[DumpRef]) -> tuple[list[Match], list[str]]:
    """Pair the captures of all ranks of one side with all of the other's, stage by stage; where each side is one step, whichever.

    Returns:
        The pairs in the order in which they ran, and a line for each side on what has no partner.

    Raises:
        UserError: no stage is in both.
    """
    steps = [sorted({ref.step for ref in side}) for side in (a, b)]
    alone = len(steps[0]) == len(steps[1]) == 1
    found: list[Match] = []
    for step, stage, call in sorted({(ref.step, ref.stage, ref.call) for ref in a}):
        step_b = steps[1][0] if alone else step
        mine = [ref for ref in a if (ref.step, ref.stage, ref.call) == (step, stage, call)]
        theirs = [ref for ref in b if (ref.step, ref.stage, ref.call) == (step_b, stage, call)]
        if theirs:
            found.append((Place(step, step_b, stage, stage, call, None, None, None), mine, theirs))
    if not found:
        raise UserError("--by-sample", "no stage was captured in the same step of both.", "Give two runs, or a step folder of each.")
    paired = {id(ref) for _, mine, theirs in found for ref in (*mine, *theirs)}
    missing = [line for side, refs in (("A", a), ("B", b)) for line in only_in(side, [ref for ref in refs if id(ref) not in paired])]
    return sorted(found, key=lambda one: one[0].order), missing


def read_source(ref: DumpRef, dump: StageDump) -> Source:
    """Return a capture with its name; of an update, up to the first optimizer step."""
    starts = dump.about.mini_batches
    name = f"rank {ref.rank}" if ref.replica is None else f"replica {ref.replica} rank {ref.rank}"
    return Source(name, dump, starts[1] if len(starts) > 1 else None)


def compare_by_sample(a: Sequence[Source], b: Sequence[Source], place: Place, *, rtol: float = RTOL, limit: int = 20) -> StageComparison:
    """Compare the same tokens in captures of two stages, all ranks together.

    Args:
        a: one side's captures, one a rank; execution order is that of the first.
        b: the other's.
        place: what they are of.
        rtol: see `difference.sum_errors`; an engine's weights must be the trainer's bit for bit, and one alone must be equal if the
            others are.
        limit: rows of the tables.

    Raises:
        UserError: a capture has no sums over samples, or no sample is in both.
    """
    for source in (*a, *b):
        if source.dump.samples is None:
            raise UserError(
                "--by-sample, --rollout", f"the capture of {source.name} ({source.dump.about.backend}) has no sums over samples.",
                "Capture with precision_debugger.backend: native.",
            )  # fmt: skip
    return _BySample(a, b, place, rtol).result(limit)


class _BySample:
    def __init__(self, a: Sequence[Source], b: Sequence[Source], place: Place, rtol: float) -> None:
        self.a, self.b, self.place = a, b, place
        self.table_a, self.table_b = _Table(a), _Table(b)
        self.groups = [
            group for group in self.table_a.groups if self.table_a.positions[group] == self.table_b.positions.get(group)
        ]
        if not self.groups:
            raise UserError(
                "--by-sample, --rollout",
                f"{place.moment}: the two sides have no sample with the same tokens in common "
                f"({len(self.table_a.groups)} and {len(self.table_b.groups)} parts of samples).",
                "Capture both stages of the same step, whole, on all ranks.",
            )
        self.calls = Calls(a[0].dump)
        self.names = list(self.table_a.rows)
        self.dtypes: Counter[tuple[str, str]] = Counter()
        self.num_same = self.num_weights = 0
        """How many parameters are equal, and were compared."""
        self.unsure = 0
        """Parameters that could not be compared."""
        self.calls_a = [_first_calls(source.dump) for source in a]
        self.calls_b = [_first_calls(source.dump) for source in b]
        self.widths = self._count_dtypes()
        self.drift = drift_of(self.dtypes)
        is_drift = self.drift is not None
        self.matrix = self._matrix()
        self.errors = self._errors(rtol)
        other = [pair for pair in self.dtypes if pair[0] != pair[1]]
        floor = max(map(round_off, other), default=0.0) if is_drift else 0.0
        self.limits = Limits(rtol, floor=floor)
        is_copy = place.stage_b == Stage.ROLLOUT_GENERATE != place.stage
        exact = not is_drift and (is_copy or 2 * self.num_same > self.num_weights)
        for found in self.errors.values():
            found.exact_parameters = exact

    def _count_dtypes(self) -> dict[str, int]:
        """Count the dtypes of what modules put out on both sides, and return by tensor how many elements a token has."""
        widths: dict[str, int] = {}
        for index, entry in self.calls_a[0].values():
            call = self.calls.names[index].every_call
            twin = next((dict(leaves(other[call][1])) for other in self.calls_b if call in other), {})
            for path, stats in leaves(entry):
                widths[f"{call}|{path}"] = stats.shape[-1] if stats.shape else 1
                if part_of(self.calls.names[index], path) is Part.OUTPUT and path in twin:
                    self.dtypes[stats.dtype, twin[path].dtype] += 1
        return widths

    def _matrix(self) -> np.ndarray:
        """Return the errors [tensors of A, common groups], nan where one side has nothing."""
        a, b = self.table_a, self.table_b
        columns_a = np.array([a.groups[group] for group in self.groups])
        columns_b = np.array([b.groups[group] for group in self.groups])
        errors = np.full((len(self.names), len(self.groups)), np.nan)
        common = [name for name in self.names if name in b.rows]
        if not common:
            return errors
        rows_a, rows_b = (np.array([table.rows[name] for name in common]) for table in (a, b))
        at_a, at_b = np.ix_(rows_a, columns_a), np.ix_(rows_b, columns_b)
        tokens = np.array([len(a.positions[group]) for group in self.groups], dtype=np.float64)
        squares = np.maximum(a.square_sum[at_a], b.square_sum[at_b])
        finite = np.where(np.isfinite(squares), squares, 0.0)
        floor = SCALE_FLOOR * np.sqrt(finite.sum(axis=1, keepdims=True) / tokens.sum() * tokens)
        widths = np.array([self.widths.get(name, 1) for name in common])[:, None]
        shrink = np.sqrt(np.maximum(tokens * widths, 1.0)) if self.drift else 1.0
        found = sum_errors(a.sum[at_a], a.square_sum[at_a], a.num_bad[at_a], b.sum[at_b], b.square_sum[at_b], b.num_bad[at_b], floor, shrink)
        errors[rows_a] = np.where(a.is_there[at_a] & b.is_there[at_b], found, np.nan)
        return errors

    def _errors(self, rtol: float) -> dict[int, CallErrors]:
        """Return the errors of the first call of each module."""
        result: dict[int, CallErrors] = {}
        for index, entry in self.calls_a[0].values():
            name = self.calls.names[index]
            found = CallErrors()
            twins = [other[name.every_call][1] for other in self.calls_b if name.every_call in other]
            leaves_b = [dict(leaves(twin)) for twin in twins]
            for path, stats in leaves(entry):
                part = part_of(name, path)
                if part is Part.PARAMETERS:
                    for measured in self._parameter(name.every_call, path, stats, leaves_b, rtol):
                        found.take(part, measured)
                elif (measured := self._tensor(name.every_call, path)) is not None:
                    found.take(part, measured)
            if twins:
                result[index] = found
        return result

    def _tensor(self, call: str, path: str) -> _SampleError | None:
        row = self.table_a.rows.get(f"{call}|{path}")
        if row is None or np.isnan(self.matrix[row]).all():
            return None
        column = int(np.nanargmax(self.matrix[row]))
        group = self.groups[column]
        at_b = self.table_b.rows[f"{call}|{path}"], self.table_b.groups[group]
        sums = float(self.table_a.sum[row, self.table_a.groups[group]]), float(self.table_b.sum[at_b])
        return _SampleError(path, float(self.matrix[row, column]), group, *sums)

    def _parameter(self, call: str, path: str, stats: TensorStats, leaves_b: list[dict[str, TensorStats]], rtol: float) -> list[Difference]:
        """Return the difference to each of B's captures. What has no checksum, as it was put together from shards, is equal if its
        statistics are within `rtol`.
        """
        whole_a = _whole([dict(leaves(calls[call][1])).get(path) for calls in self.calls_a if call in calls]) if stats.shard else stats
        found: list[Difference] = []
        for stats_b in (one[path] for one in leaves_b if path in one):
            whole_b = _whole([one.get(path) for one in leaves_b]) if stats_b.shard else stats_b
            if whole_a is None or whole_b is None or math.prod(whole_a.shape) != math.prod(whole_b.shape):
                self.unsure += 1
                continue
            measured = difference(path, replace(whole_a, shape=whole_b.shape), whole_b)
            has_checksums = whole_a.checksum is not None and whole_b.checksum is not None
            if not has_checksums and measured.error <= rtol and not measured.dtypes_differ:
                measured = replace(measured, error=SAME)
            self.num_same += measured.error == SAME
            self.num_weights += 1
            found.append(measured)
        return found

    def result(self, limit: int) -> StageComparison:
        findings = [finding for found in self.errors.values() for part in Part if (finding := found.part(part)) is not None]
        result = StageComparison(
            place=self.place,
            num_common=len(self.errors),
            only_a=[self.calls.entries[index].name for index, _ in self.calls_a[0].values() if index not in self.errors],
            only_b=self._only_b(),
            max_error=max((finding.error for finding in findings), default=SAME),
            drift=self.drift,
            pass_label=f"{len({group[0] for group in self.groups if group[1] == 'response'})} samples",
            pass_labels=["all passes"],
        )
        found = walk(self.calls, self.errors, self.limits)
        if found.fault is not None:
            result.divergence = describe(self.calls, self.errors, found.fault, self.limits)
            if found.first is not None and found.first is not found.fault:
                result.first = describe(self.calls, self.errors, found.first, self.limits)
            self._add_samples(result, found.fault)
        result.jumps = [self._row(candidate) for candidate in found.jumps if candidate.part is not Part.PARAMETERS][:limit]
        result.largest = self._largest(limit)
        for index, errors in self.errors.items():
            name = self.calls.names[index]
            result.modules[name.label] = name.module_class
            cell = result.cells[name.label, 0] = [math.nan] * len(QUANTITIES)
            for part in Part:
                if (finding := errors.part(part)) is not None:
                    cell[QUANTITIES.index(quantity(name, part))] = finding.error
        result.missing = [
            line
            for side, sources in (("A", self.a), ("B", self.b))
            for source in sources
            for line in cut_short(source.dump, side, f"{self.place.moment}, {source.name}")
        ]
        result.notes = self._notes()
        # A trainer and an engine run the model in other ways; two runs of one stage do not.
        lines = [f"{self.place.moment}: {line}" for line in self._not_called(result)]
        (result.missing if self.place.stage == self.place.stage_b else result.notes).extend(lines)
        return result

    def _only_b(self) -> list[str]:
        """Return B's modules that no capture of A called, by their first call."""
        known = {call for calls in self.calls_a for call in calls}
        return list(dict.fromkeys(entry.name for calls in self.calls_b for call, (_, entry) in calls.items() if call not in known))

    def _not_called(self, result: StageComparison) -> list[str]:
        sides = (("B", result.only_a), ("A", result.only_b))
        labels = [(side, [parse_name(name).label for name in names]) for side, names in sides if names]
        return [f"not called in {side}: {', '.join(of[:5])}" + (f" and {len(of) - 5} more" if len(of) > 5 else "") for side, of in labels]

    def _add_samples(self, result: StageComparison, fault: Candidate) -> None:
        if fault.part is Part.PARAMETERS:
            return
        name = self.calls.names[fault.entry]
        errors = self.matrix[self.table_a.rows[f"{name.every_call}|{fault.finding.path}"]]
        differing = [self.groups[at] for at in np.argsort(-np.nan_to_num(errors, nan=-1.0), kind="stable") if errors[at] > self.limits.rtol]
        result.samples = Samples(tuple(f"{sample} ({part})" for sample, part in differing), int((~np.isnan(errors)).sum()))
        parts, there = {part for _, part in differing}, {part for _, part in self.groups}
        if len(parts) == 1 and len(there) == 2:
            only, other = ("responses (decoding)", "prompts (prefill)") if parts == {"response"} else ("prompts (prefill)", "responses (decoding)")
            result.remarks.append(f"Only {only} differ; {other} agree.")
        sources = {self.table_b.source_of[group] for group in differing}
        if len(self.b) > 1:
            all_names = {source.name for source in self.b}
            which = "all" if sources == all_names else f"only {', '.join(sorted(sources))} of the {len(all_names)}"
            where = "engines" if self.place.stage_b == Stage.ROLLOUT_GENERATE else "ranks of B"
            result.remarks.append(f"What differs was computed by {which} {where}.")

    def _row(self, candidate: Candidate) -> Row:
        name = self.calls.names[candidate.entry]
        finding = candidate.finding
        return Row(
            name.label,
            name.module_class,
            quantity(name, candidate.part),
            finding.error,
            candidate.base,
            self.calls.entries[candidate.entry].name,
            finding.path,
            finding.what,
            self.place.moment,
            "",
        )

    def _largest(self, limit: int) -> list[Row]:
        rows = [
            self._row(Candidate(index, part, finding, math.nan, 0))
            for index, found in self.errors.items()
            for part in Part
            if (finding := found.part(part)) is not None and finding.error > 0
        ]
        return sorted(rows, key=lambda row: -row.error)[:limit]

    def _notes(self) -> list[str]:
        prompts = sum(part == "prompt" for _, part in self.groups)
        notes = [f"{self.place.moment}: over the tokens of {prompts} prompts and {len(self.groups) - prompts} responses."]
        alone = (len(self.table_a.groups) - len(self.groups), len(self.table_b.groups) - len(self.groups))
        if any(alone):
            notes.append(f"Not compared, as the other side has not the same tokens of them: {alone[0]} parts of samples of A, {alone[1]} of B.")
        if self.unsure:
            notes.append(f"{self.unsure} parameters were not compared: not all of their shards were captured.")
        return notes


def _first_calls(dump: StageDump) -> dict[str, tuple[int, Entry]]:
    """Return by name the first forward call of every module, with its index."""
    found: dict[str, tuple[int, Entry]] = {}
    for index, entry in enumerate(dump.entries):
        name = parse_name(entry.name)
        if name.kind == MODULE and name.direction == FORWARD:
            found.setdefault(name.every_call, (index, entry))
    return found


def _whole(shards: Sequence[TensorStats | None]) -> TensorStats | None:
    """Put the statistics of a tensor's shards together; None if some are missing."""
    by_part = {stats.shard[0]: stats for stats in shards if stats is not None and stats.shard is not None}
    parts = list(by_part.values())
    if not parts or any(stats.shard is None or len(by_part) < stats.shard[1] for stats in parts):
        return None
    parts = [stats for stats in parts if math.prod(stats.shape)]  # a rank's part may be empty
    sizes = [math.prod(stats.shape) for stats in parts]
    return TensorStats(
        dtype=parts[0].dtype,
        shape=(sum(sizes),),
        min=min(stats.min for stats in parts),
        max=max(stats.max for stats in parts),
        mean=sum(stats.mean * size for stats, size in zip(parts, sizes)) / sum(sizes),
        norm=math.sqrt(sum(stats.norm**2 for stats in parts)),
        num_nan=sum(stats.num_nan or 0 for stats in parts),
        num_inf=sum(stats.num_inf or 0 for stats in parts),
        requires_grad=parts[0].requires_grad,
    )
