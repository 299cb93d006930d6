"""Captures as one table, the join of two of them, and how far apart the rows of a join are.

A row is what was measured of a tensor: of all of it, or of the tokens of one prompt or response. What tensors are
joined by depends on what is compared: calls, or modules whose sums over samples are added up over passes and ranks.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions only when it is imported.

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pellucid.precision.calls import FORWARD, parse_name
from pellucid.precision.dump import StageDump, TensorStats, leaves

SAME = -1.0
"""The error of tensors that are equal bit for bit; below 0, which is that of tensors whose statistics agree."""
WHOLE = ""
"""In the column `tokens`: the row is of the whole tensor."""
_SCALE_FLOOR = 0.01
"""A sample's norm counts as at least this share of its tokens' average one: none is judged by its noise."""
_FLOAT32_MEAN = 2.0**-22
"""Relative resolution of a mean that was kept in float32, with a little slack."""
_STATISTICS = ("sum", "norm", "max", "min")
_KEYS = ["tensor", "tokens", "checksum"]
_SUMMED = ["size", "sum", "square_sum", "num_nan", "num_inf", "share"]
_AGGREGATES = dict.fromkeys(_SUMMED, "sum") | {"max": "max", "min": "min"}
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in _KEYS]
    + [(name, pa.float64()) for name in _AGGREGATES]
    + [(name, pa.string()) for name in ("dtype", "shape", "shard", "source")]
    + [("requires_grad", pa.bool_())]
)

@dataclass(slots=True)
class Capture:
    """A capture, what to call it, and what its sums over samples are joined by."""

    name: str
    dump: StageDump
    tokens: list[str | None] = field(default_factory=list)
    """By span of its passes whose tokens they are, e.g. `<uid> sample 1 (response)`; None leaves a span out."""


def capture_table(captures: Sequence[Capture], *, by_sample: bool = False) -> pa.Table:
    """Return the table of one side of a comparison.

    Calls of one capture are kept apart. `by_sample`, for the captures of all ranks, what forward calls of modules
    computed of the same tokens is added up, and of whole tensors only parameters are kept, put together from shards.

    Returns:
        Columns: `tensor`, `<call>|<path>`; `tokens`; number of elements `size`, `sum` Σx, `square_sum` Σx², `num_nan`
        (of sums, NaN and Inf) and `num_inf`, null where they were not counted; `share`, less than 1 where shards are
        missing; `max`, `min`; the rest as in `TensorStats`, with `shard` as text; `source`, the capture's name.
    """
    rows: list[tuple[Any, ...]] = []
    seen: set[tuple[object, ...]] = set()
    sums: list[pa.Table] = []
    for capture in captures:
        tensors: dict[str, tuple[str, TensorStats]] = {}
        for entry in capture.dump.entries:
            if (key := call_key(entry.name, by_sample=by_sample)) is None:
                continue
            for path, stats in leaves(entry):
                tensor = f"{key}|{path}"
                tensors[f"{entry.name}|{path}"] = tensor, stats
                weight = (tensor, stats.shard, stats.checksum)
                if not by_sample or (path.startswith("parameters") and weight not in seen):
                    seen.add(weight)
                    rows.append(_row(tensor, stats, capture.name, as_part=by_sample))
        if capture.dump.samples is not None:
            sums.append(_sums_over_tokens(capture, capture.dump.samples, tensors))
    whole = pa.table([list(column) for column in zip(*rows)] or [[]] * len(_SCHEMA), schema=_SCHEMA)
    table = pa.concat_tables([whole, *sums], promote_options="default")
    how = [(field.name, _AGGREGATES.get(field.name, "first")) for field in _SCHEMA if field.name not in _KEYS]
    table = table.group_by(_KEYS, use_threads=False).aggregate(how)
    table = table.rename_columns([re.sub("_(sum|max|min|first)$", "", name) for name in table.column_names])
    return table.append_column("row", pa.array(np.arange(len(table))))


def call_key(entry: str, *, by_sample: bool) -> str | None:
    """Return what a call is joined by: its name; by sample, of a module's forward calls that without their number and
    the module's class, of which an engine may have its own.
    """
    name = parse_name(entry)
    if not by_sample:
        return entry
    return f"Module.{name.label}.{FORWARD}" if name.is_module and name.direction == FORWARD else None


def _row(tensor: str, stats: TensorStats, source: str, *, as_part: bool) -> tuple[Any, ...]:
    """Return the row of a whole tensor; of one that may be put together from shards without shape and shard."""
    size, (_, num_parts) = math.prod(stats.shape), stats.shard or (0, 1)
    total, squares = (stats.mean * size, stats.norm**2) if size else (0.0, 0.0)
    return (
        tensor, WHOLE, None if as_part and stats.shard else stats.checksum, size, total, squares, stats.num_nan,
        stats.num_inf, 1 / num_parts if as_part else 1.0, stats.max if size else None, stats.min if size else None,
        stats.dtype, "" if as_part else str(list(stats.shape)), "" if as_part else str(stats.shard), source,
        stats.requires_grad,
    )  # fmt: skip


def _sums_over_tokens(capture: Capture, sums: pa.Table, tensors: Mapping[str, tuple[str, TensorStats]]) -> pa.Table:
    """Return the rows of sums over samples; `tensors` has what each tensor is joined by, and its statistics."""
    names = sums["tensor"].combine_chunks()
    known = [tensors.get(name, (None, TensorStats("", ()))) for name in names.dictionary.to_pylist()]
    lengths = np.array([span.length for one in capture.dump.about.passes for span in one.spans], dtype=np.float64)
    widths = np.array([stats.shape[-1] if stats.shape else 1 for _, stats in known], dtype=np.float64)
    table = pa.table({
        "tensor": pa.array([key for key, _ in known], pa.string()).take(names.indices),
        "tokens": pa.array(capture.tokens, pa.string()).take(sums["span"]),
        "size": lengths[sums["span"].to_numpy()] * widths[names.indices.to_numpy()],
        "sum": sums["sum"], "square_sum": sums["square_sum"], "num_nan": sums["num_bad"].cast(pa.float64()),
        "dtype": pa.array([stats.dtype for _, stats in known], pa.string()).take(names.indices),
        "source": pa.array([capture.name] * len(sums), pa.string()),
    })  # fmt: skip
    return table.filter(pc.and_(pc.is_valid(table["tensor"]), pc.is_valid(table["tokens"])))


def join(a: pa.Table, b: pa.Table) -> pa.Table:
    """Return what is in both tables, in the order of `a`; columns of `b` end in `_b`."""
    joined = a.join(b, keys=["tensor", "tokens"], join_type="inner", right_suffix="_b")
    return joined.sort_by([("row", "ascending"), ("row_b", "ascending")])


def column(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as numbers, nan for null, or as objects, None for null."""
    return table[name].combine_chunks().to_numpy(zero_copy_only=False)


def with_errors(joined: pa.Table, *, rounded: bool = False) -> pa.Table:
    """Add to a join the relative `error` of each row, and `largest`, the statistic that differs most.

    Equal checksums of equal dtypes make it `SAME`, for the tensor's samples, too. Else it is the largest of

        |Σa − Σb| / s,   |‖a‖ − ‖b‖| / s,   |max a − max b| / m,   |min a − min b| / m

    with s = max(‖a‖, ‖b‖, floor) and m = max(|max|, |min|, floor / √n) of both. The first is the sensitive one:
    elements that are off by a share r each, in no common direction, move Σx by about r·‖x‖ (bf16: 2e-3; another order
    of float32 additions: 1e-7 to 1e-6); a common direction can make it larger than r, and larger than 1. Other shapes,
    other numbers of NaN or Inf, and integers that are not equal make it inf. Floats of two dtypes are compared by
    value. Where one side computes in another precision (`rounded`), rounding has such a common direction, and s·√n
    takes the place of s in the first: ‖a − b‖ / s is then at least what comes out.
    """
    numeric = ("size", "sum", "square_sum", "max", "min", "num_nan", "num_inf")
    a, b = ({name: column(joined, name + side) for name in numeric} for side in ("", "_b"))
    is_whole, size = column(joined, "tokens") == WHOLE, np.maximum(a["size"], 1.0)
    tensor = joined["tensor"].combine_chunks().dictionary_encode().indices.to_numpy()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for side in (a, b):
            side["norm"] = np.sqrt(side["square_sum"])
        norm = np.fmax(a["norm"], b["norm"])
        squares = np.where(~is_whole & np.isfinite(norm), norm**2, 0.0)
        mean_square = np.bincount(tensor, squares) / np.maximum(np.bincount(tensor, ~is_whole * size), 1.0)
        floor = np.where(is_whole, 0.0, _SCALE_FLOOR * np.sqrt(mean_square[tensor] * size))
        norm = np.fmax(norm, floor)
        extremes = [np.abs(side[name]) for side in (a, b) for name in ("min", "max")]
        largest = np.fmax(np.fmax.reduce(extremes), floor / np.sqrt(size))
        is_counted = ~np.isnan(a["num_nan"]) & ~np.isnan(b["num_nan"])
        slack = np.where(is_counted, 0.0, _FLOAT32_MEAN * np.fmax(np.abs(a["sum"]), np.abs(b["sum"])))
        parts = np.stack([
            np.fmax(0.0, np.abs(a["sum"] - b["sum"]) - slack) / (norm * np.sqrt(size) if rounded else norm),
            np.abs(a["norm"] - b["norm"]) / norm,
            np.abs(a["max"] - b["max"]) / largest, np.abs(a["min"] - b["min"]) / largest,
        ])  # fmt: skip
    parts = np.nan_to_num(parts, nan=0.0, posinf=np.inf)
    integers = [pc.match_substring_regex(joined[name], r"^torch\.(int|uint|bool)") for name in ("dtype", "dtype_b")]
    is_integer, other_kind = (one.to_numpy() for one in integers)
    broken = (is_integer != other_kind) | (is_whole & (~_alike(joined, "shape") | (a["size"] != b["size"])))
    broken |= (np.isnan(a["norm"]) != np.isnan(b["norm"])) | (np.isinf(a["norm"]) != np.isinf(b["norm"]))
    broken |= is_counted & ((a["num_nan"] != b["num_nan"]) | (a["num_inf"] != b["num_inf"]) & is_whole)
    is_checked = pc.and_(pc.is_valid(joined["checksum"]), pc.is_valid(joined["checksum_b"])).to_numpy()
    checksum_differs = is_checked & _alike(joined, "dtype") & ~_alike(joined, "checksum")
    broken |= is_integer & ((parts > 1e-6).any(axis=0) | checksum_differs)
    is_same = _alike(joined, "checksum") & _alike(joined, "dtype") & _alike(joined, "shape")
    same_tensors = np.bincount(tensor, is_same) > 0
    errors = np.where(broken, np.inf, parts.max(axis=0))
    errors = np.where(is_same | (~is_whole & same_tensors[tensor]), SAME, errors)
    joined = joined.append_column("error", pa.array(errors))
    return joined.append_column("largest", pa.array(parts.argmax(axis=0)))


def _alike(joined: pa.Table, name: str) -> np.ndarray:
    """Return where both sides of a join have the same value, and have one."""
    return pc.fill_null(pc.equal(joined[name], joined[f"{name}_b"]), False).to_numpy()


def with_nan_as_errors(table: pa.Table) -> pa.Table:
    """Add to a table an infinite `error` where a tensor holds NaN or Inf, and `SAME` elsewhere."""
    num_nan, num_inf = column(table, "num_nan"), np.nan_to_num(column(table, "num_inf"))
    is_float = pc.match_substring(table["dtype"], "float").to_numpy()
    is_bad = np.where(np.isnan(num_nan), is_float & ~np.isfinite(column(table, "square_sum")), num_nan + num_inf > 0)
    # Masks are made of −Inf; NaN is wrong everywhere.
    is_mask = pc.match_substring_regex(table["tensor"], r"\|.*mask").to_numpy()
    is_bad = np.where(is_mask, (num_nan > 0) & (column(table, "tokens") == WHOLE), is_bad)
    return table.append_column("error", pa.array(np.where(is_bad, np.inf, SAME)))


def what_differs(table: pa.Table, row: int) -> str:
    """Return what differs most in a row of `with_errors`; of `with_nan_as_errors` how many NaN and Inf there are."""
    [one] = table.slice(row, 1).to_pylist()
    over = f" over {one['tokens']}" if one["tokens"] else ""
    if "sum_b" not in one:
        counts = [f"{one[name]:,.0f} {kind}" for name, kind in (("num_nan", "NaN"), ("num_inf", "Inf")) if one[name]]
        return f"{' and '.join(counts) or 'some'} of {one['size']:,.0f} values{over}"
    if math.isinf(one["error"]):
        for name in ("shape", "num_nan", "num_inf", "dtype"):
            if one[name] != one[f"{name}_b"] and None not in (one[name], one[f"{name}_b"]):
                return f"{name} {one[name]} against {one[f'{name}_b']}{over}"
    for side in ("", "_b"):
        one[f"norm{side}"] = math.sqrt(one[f"square_sum{side}"])
    name = _STATISTICS[one["largest"]]
    return f"{name} {one[name]:.6g} against {one[f'{name}_b']:.6g}{over}"
