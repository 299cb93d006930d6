"""Compares what two stages computed of the same tokens, though in other passes or on other ranks.

The trainer packs sequences into micro-batches, the rollout engine prefills prompts and decodes token by token: what
can be compared is the sum over each sample's tokens, module by module. From captures with `SampleSums` to a
`StageComparison`, as in `compare.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pellucid.errors import UserError
from pellucid.precision.calls import FORWARD, MODULE, Calls, parse_name
from pellucid.precision.capture_table import (
    SAME,
    join,
    largest_of_names,
    sample_errors,
    sample_table,
    statistics_table,
    tensor_errors,
    values,
    without_shards,
    words,
)
from pellucid.precision.compare import Samples, StageComparison, call_errors, cut_short, drift_between, fill
from pellucid.precision.divergence import Limits, Measured, Part, part_of
from pellucid.precision.dump import DumpRef, Entry, StageDump
from pellucid.precision.matching import Place
from pellucid.stages import Stage

RTOL = 1e-4
"""Packed and one by one, float32 sums differ by a few 1e-6 at the end of a model; bf16 by 1e-3."""
_SAMPLE = re.compile(r" sample \d+$")
_OPTIONS = "--by-sample, --rollout"

Group = tuple[str, str]
"""(sample, part); of a prompt, which all samples of a group share, the prompt's uid."""


@dataclass(frozen=True, slots=True)
class Source:
    """A capture and what to call it."""

    name: str
    dump: StageDump
    passes: int | None = None
    """Only so many first passes are compared: in those that follow the weights are others."""


def read_source(ref: DumpRef, dump: StageDump) -> Source:
    """Return a capture with its name; of an update, up to the first optimizer step."""
    starts = dump.about.mini_batches
    name = f"rank {ref.rank}" if ref.replica is None else f"replica {ref.replica} rank {ref.rank}"
    return Source(name, dump, starts[1] if len(starts) > 1 else None)


class _Side:
    """The captures of one side: its groups of tokens, and the first call of each module."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.positions: dict[Group, frozenset[int]] = {}
        """The tokens of each group that are there."""
        self.source_of: dict[Group, str] = {}
        self.calls = [_first_calls(source.dump) for source in sources]
        self._groups = self._assign()

    def _assign(self) -> list[list[list[Group | None]]]:
        """Return by source and pass the group of each span.

        It is None for tokens that another span has shown: a prompt in two micro-batches, or a filler.
        """
        spans = [
            (-span.length, number, index, at, span)
            for number, source in enumerate(self.sources)
            for index, one in enumerate(source.dump.about.passes[: source.passes])
            for at, span in enumerate(one.spans)
        ]
        groups: list[list[list[Group | None]]] = [
            [[None] * len(one.spans) for one in of.dump.about.passes] for of in self.sources
        ]
        seen: dict[Group, set[int]] = {}
        for _, number, index, at, span in sorted(spans, key=lambda found: found[:4]):
            group = (_SAMPLE.sub("", span.sample) if span.part == "prompt" else span.sample, span.part)
            tokens = set(range(span.position, span.position + span.length))
            if tokens and not tokens & (known := seen.setdefault(group, set())):
                known |= tokens
                groups[number][index][at] = group
                self.source_of.setdefault(group, self.sources[number].name)
        self.positions = {group: frozenset(tokens) for group, tokens in seen.items() if tokens}
        return groups

    def sums(self, common: Sequence[Group]) -> pa.Table:
        """Return the sums of the modules' forward calls over the groups that both sides have."""
        number_of: dict[Group | None, int] = {group: number for number, group in enumerate(common)}
        groups = [
            [np.array([number_of.get(group, -1) for group in of], dtype=np.int64) for of in passes]
            for passes in self._groups
        ]
        sums = [source.dump.samples for source in self.sources if source.dump.samples is not None]
        tokens = np.array([len(self.positions[group]) for group in common], dtype=np.float64)
        return sample_table(sums, [[_key(name) for name in one.names] for one in sums], groups, tokens)

    def entries(self, number: int) -> list[tuple[int, str, Entry]]:
        """Return the first call of each module in a capture, as `statistics_table` takes it."""
        return [(index, call, entry) for call, (index, entry) in self.calls[number].items()]

    def parameters(self, *, of_first: bool) -> tuple[pa.Table, int]:
        """Return the parameters of all captures, shards put together, and how many lack a shard.

        With `of_first` the first capture stands for all, as ranks hold the same parameters, or shards of them.
        """
        first, *others = (statistics_table(self.entries(number)) for number in range(len(self.sources)))
        if of_first:
            others = [table.filter(table["shard"].is_valid()) for table in others]
        return without_shards(_of_part(pa.concat_tables([first, *others]), Part.PARAMETERS))


def compare_by_sample(
    a: Sequence[Source], b: Sequence[Source], place: Place, *, rtol: float = RTOL, limit: int = 20
) -> StageComparison:
    """Compare the same tokens in captures of two stages, all ranks together.

    Args:
        a: one side's captures, one a rank; execution order is that of the first.
        b: the other's.
        place: what they are of.
        rtol: see `sample_errors`; an engine's weights must be the trainer's bit for bit, and one alone must be
            equal if the others are.
        limit: rows of the tables.

    Raises:
        UserError: a capture has no sums over samples, or no sample is in both.
    """
    for source in (*a, *b):
        if source.dump.samples is None:
            reason = f"the capture of {source.name} ({source.dump.about.backend}) has no sums over samples."
            raise UserError(_OPTIONS, reason, "Capture with precision_debugger.backend: native.")
    one, other = _Side(a), _Side(b)
    common = [group for group in one.positions if one.positions[group] == other.positions.get(group)]
    if not common:
        counts = f"({len(one.positions)} and {len(other.positions)} parts of samples)"
        reason = f"{place.moment}: the two sides have no sample with the same tokens in common {counts}."
        raise UserError(_OPTIONS, reason, "Capture both stages of the same step, whole, on all ranks.")
    calls, own = Calls(a[0].dump), one.calls[0]
    twins = {call: entry for others in reversed(other.calls) for call, (_, entry) in others.items()}
    outputs_a = _of_part(statistics_table(one.entries(0)), Part.OUTPUT)
    outputs = join(outputs_a, statistics_table((0, call, entry) for call, entry in twins.items()))
    drift, round_off = drift_between(outputs)
    widths = {
        f"{row['entry']}|{row['path']}": _width(row["shape"]) for row in statistics_table(one.entries(0)).to_pylist()
    }
    errors = sample_errors(one.sums(common), other.sums(common), None if drift is None else widths)

    weights, weight_errors, num_unsure = _weight_errors(one, other, rtol)
    num_same, is_copy = int((weight_errors == SAME).sum()), place.stage_b == Stage.ROLLOUT_GENERATE != place.stage
    tensors = largest_of_names(errors)
    all_names, sample_error, group = (values(errors, name) for name in ("name", "error", "group"))
    keys = [(name.rpartition("|")[0], name.rpartition("|")[2]) for name in all_names[tensors]]
    entries = [*values(weights, "entry"), *(entry for entry, _ in keys)]
    paths = [*values(weights, "path"), *(path for _, path in keys)]
    all_errors = np.concatenate([weight_errors, sample_error[tensors]])
    rows = [row for row, entry in enumerate(entries) if entry in own and entry in twins]

    def measured(number: int) -> Measured:
        row = rows[number]
        if row < len(weights):
            return Measured(float(all_errors[row]), paths[row], lambda: words(weights, row))
        at = int(tensors[row - len(weights)])
        (sample, part), sums = common[group[at]], [errors[name][at].as_py() for name in ("sum_sum", "sum_sum_b")]
        text = f"sum {sums[0]:.6g} against {sums[1]:.6g} over the {part} of {sample}"
        return Measured(float(all_errors[row]), paths[row], lambda: text)

    call = np.array([own[entries[row]][0] for row in rows], dtype=np.int64)
    parts = [part_of(calls.names[index], paths[row]) for index, row in zip(call.tolist(), rows)]
    both = [index for call_name, (index, _) in own.items() if call_name in twins]
    found = call_errors(both, call, parts, all_errors[rows], measured)
    for of_call in found.values():
        of_call.exact_parameters = drift is None and (is_copy or 2 * num_same > len(weights))
    known = {name for calls_of in one.calls for name in calls_of}
    result = StageComparison(
        place=place,
        num_common=len(found),
        only_a=[entry.name for name, (_, entry) in own.items() if name not in twins],
        only_b=[entry.name for name, entry in twins.items() if name not in known],
        drift=drift,
        pass_label=f"{sum(part == 'response' for _, part in common)} samples",
        pass_labels=["all passes"],
    )
    limits = Limits(rtol, floor=round_off)
    fault = fill(result, calls, found, limits, limit=limit)
    if fault is not None and fault.part is not Part.PARAMETERS:
        name = f"{calls.names[fault.entry].every_call}|{fault.finding.path}"
        _name_samples(result, errors, np.flatnonzero(all_names == name), common, other, rtol)
    sides = (("A", a), ("B", b))
    result.missing = [
        line
        for side, sources in sides
        for source in sources
        for line in cut_short(source.dump, side, f"{place.moment}, {source.name}")
    ]
    prompts = sum(part == "prompt" for _, part in common)
    result.notes.append(f"{place.moment}: over the tokens of {prompts} prompts and {len(common) - prompts} responses.")
    alone = (len(one.positions) - len(common), len(other.positions) - len(common))
    if any(alone):
        result.notes.append(
            "Not compared, as the other side has not the same tokens of them: "
            f"{alone[0]} parts of samples of A, {alone[1]} of B."
        )
    if num_unsure:
        result.notes.append(f"{num_unsure} parameters were not compared: not all of their shards were captured.")
    # A trainer and an engine run the model in other ways; two runs of one stage do not.
    lines = [f"{place.moment}: {line}" for line in _not_called(result)]
    (result.missing if place.stage == place.stage_b else result.notes).extend(lines)
    return result


def _weight_errors(a: _Side, b: _Side, rtol: float) -> tuple[pa.Table, np.ndarray, int]:
    """Return the joined parameters, the error of each, and how many could not be compared.

    What has no checksum, as it was put together from shards, is equal if its statistics are within `rtol`.
    """
    (table_a, lacking_a), (table_b, lacking_b) = a.parameters(of_first=True), b.parameters(of_first=False)
    joined = join(table_a, table_b)
    same_size = values(joined, "size") == values(joined, "size_b")
    joined = joined.filter(pa.array(same_size, pa.bool_()))
    joined = joined.set_column(joined.column_names.index("shape_b"), "shape_b", joined["shape"])
    errors = tensor_errors(joined)
    sums = zip(values(joined, "checksum"), values(joined, "checksum_b"))
    unsure = np.array([None in pair for pair in sums], dtype=bool)
    agree = unsure & (errors <= rtol) & (values(joined, "dtype") == values(joined, "dtype_b"))
    return joined, np.where(agree, SAME, errors), lacking_a + lacking_b + int((~same_size).sum())


def _name_samples(
    result: StageComparison, errors: pa.Table, rows: np.ndarray, common: Sequence[Group], b: _Side, rtol: float
) -> None:
    """Say whose tokens differ in a tensor, in which part of a sample, and which captures of B computed them."""
    error, group = values(errors, "error"), values(errors, "group")
    order = rows[np.argsort(-error[rows], kind="stable")]
    differing = [common[int(group[row])] for row in order if error[row] > rtol]
    result.samples = Samples(tuple(f"{sample} ({part})" for sample, part in differing), len(rows))
    parts, there = {part for _, part in differing}, {part for _, part in common}
    if len(parts) == 1 and len(there) == 2:
        names = ["responses (decoding)", "prompts (prefill)"]
        only, other = names if parts == {"response"} else reversed(names)
        result.remarks.append(f"Only {only} differ; {other} agree.")
    sources, all_names = {b.source_of[group] for group in differing}, {source.name for source in b.sources}
    if len(b.sources) > 1:
        which = "all" if sources == all_names else f"only {', '.join(sorted(sources))} of the {len(all_names)}"
        where = "engines" if result.place.stage_b == Stage.ROLLOUT_GENERATE else "ranks of B"
        result.remarks.append(f"What differs was computed by {which} {where}.")


def _not_called(result: StageComparison) -> list[str]:
    sides = (("B", result.only_a), ("A", result.only_b))
    labels = [(side, [parse_name(name).label for name in names]) for side, names in sides if names]
    return [
        f"not called in {side}: {', '.join(of[:5])}" + (f" and {len(of) - 5} more" if len(of) > 5 else "")
        for side, of in labels
    ]


def _first_calls(dump: StageDump) -> dict[str, tuple[int, Entry]]:
    """Return by name the first forward call of every module, with its index."""
    found: dict[str, tuple[int, Entry]] = {}
    for index, entry in enumerate(dump.entries):
        name = parse_name(entry.name)
        if name.kind == MODULE and name.direction == FORWARD:
            found.setdefault(name.every_call, (index, entry))
    return found


def _key(name: str) -> str | None:
    """Return what the sums of a tensor are joined by: its module and path, without the number of the call."""
    entry, _, path = name.partition("|")
    call = parse_name(entry)
    return f"{call.every_call}|{path}" if call.kind == MODULE and call.direction == FORWARD else None


def _of_part(table: pa.Table, part: Part) -> pa.Table:
    """Return the tensors of a forward call's outputs, or of its parameters."""
    return table.filter(pa.array([path.startswith(part.value) for path in table["path"].to_pylist()], pa.bool_()))


def _width(shape: str) -> int:
    """Return the length of the last axis of a shape as the table writes it."""
    last = shape.strip("[]").rpartition(",")[2].strip()
    return int(last) if last else 1
