"""The statistics of captures as tables, and how far tensors are apart in a join of two of them.

A capture (`dump.py`) becomes a pyarrow table with a row a tensor. `compare.py` joins two, or a table with its own
limits, and asks for the error of each row; sums over the tokens of each sample are joined the same way, by tensor and
sample.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pellucid.precision.dump import Entry, SampleSums, leaves

SAME = -1.0
"""The error of tensors that are equal bit for bit; below 0, which is that of tensors whose statistics agree."""
SCALE_FLOOR = 0.01
"""A sample's own norm counts as at least this share of what its tokens would have on average: none is judged by its
noise.
"""
_FLOAT32_MEAN = 2.0**-22
"""Relative resolution of a mean that was kept in float32, with a little slack."""
_SCHEMA = pa.schema(
    [("row", pa.int64()), ("call", pa.int64())]
    + [(name, pa.string()) for name in ("entry", "path", "dtype", "shape")]
    + [("size", pa.int64())]
    + [
        (name, pa.float64())
        for name in ("min", "max", "mean", "norm", "num_nan", "num_inf", "num_zero", "num_subnormal")
    ]
    + [("checksum", pa.string()), ("shard", pa.string()), ("requires_grad", pa.bool_())]
)
_STATISTICS = ("sum", "norm", "max", "min")


def statistics_table(entries: Iterable[tuple[int, str, Entry]]) -> pa.Table:
    """Return a row a tensor, in the order in which they were recorded.

    Args:
        entries: index of each call, what it is joined by, and the call; an entry's name, or its name without the
            call's number.

    Returns:
        Columns: `row`; `call`, the index; `entry` and `path`, the key; `shard` as `part/parts`; the rest as in
        `TensorStats`, with the mean as it is, counts null where they were not taken, and `size`, the number of
        elements.
    """
    rows = [
        (call, key, path, stats.dtype, str(list(stats.shape)), math.prod(stats.shape), stats.min, stats.max, stats.mean,
         stats.norm, stats.num_nan, stats.num_inf, stats.num_zero, stats.num_subnormal, stats.checksum,
         None if stats.shard is None else f"{stats.shard[0]}/{stats.shard[1]}", stats.requires_grad)
        for call, key, entry in entries
        for path, stats in leaves(entry)
    ]  # fmt: skip
    columns = list(zip(*rows)) or [()] * (len(_SCHEMA) - 1)
    return pa.table([list(range(len(rows))), *map(list, columns)], schema=_SCHEMA)


def join(a: pa.Table, b: pa.Table) -> pa.Table:
    """Return the tensors that are in both tables, in the order of `a`; columns of `b` end in `_b`."""
    joined = a.join(b, keys=["entry", "path"], join_type="inner", right_suffix="_b")
    return joined.sort_by([("row", "ascending"), ("row_b", "ascending")])


def values(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as numbers, nan for null, or as objects, None for null."""
    column = table[name].combine_chunks()
    return column.to_numpy(zero_copy_only=False)


def is_float(dtypes: Sequence[str] | np.ndarray) -> np.ndarray:
    """Return which of the dtypes, as torch prints them, are floating ones."""
    return np.array(["float" in dtype for dtype in dtypes], dtype=bool)


def tensor_errors(joined: pa.Table, floor: np.ndarray | float = 0.0, *, rounded: bool = False) -> np.ndarray:
    """Return the relative error between the two tensors of each row.

    Equal checksums of equal dtypes make it `SAME`. Else it is the largest of

        |Σa − Σb| / s,   |‖a‖ − ‖b‖| / s,   |max a − max b| / m,   |min a − min b| / m

    with s = max(‖a‖, ‖b‖, floor) and m = max(|max|, |min|, floor / √n) of both. The first is the sensitive one:
    elements that are off by a share r each, in no common direction, move Σx by about r·‖x‖ (bf16: 2e-3; another order
    of float32 additions: 1e-7 to 1e-6); a common direction can make it larger than r, and larger than 1. Other shapes,
    other numbers of NaN or Inf, and integers that are not equal make it inf. Floats of two dtypes are compared by
    value. Where one side computes in another precision, rounding has such a common direction, and s·√n takes the place
    of s in the first: ‖a − b‖ / s is then at least what comes out.

    Args:
        joined: from `join`.
        floor: least scale of each row, where the tensor is what remains of a larger sum.
        rounded: one of the captures computes in another precision.
    """
    if not len(joined):
        return np.zeros(0)
    errors = np.nanmax(_parts(joined, floor, rounded=rounded), axis=0)
    errors[_is_incomparable(joined)] = np.inf
    errors[(values(joined, "size") == 0) & (values(joined, "shape") == values(joined, "shape_b"))] = 0.0
    same = ~joined["checksum"].is_null().to_numpy(zero_copy_only=False)
    for name in ("checksum", "dtype", "shape"):
        same &= values(joined, name) == values(joined, f"{name}_b")
    return np.where(same, SAME, errors)


def _parts(joined: pa.Table, floor: np.ndarray | float, *, rounded: bool) -> np.ndarray:
    """Return the errors [4, rows] of sum, norm, max and min; 0 where a statistic is NaN or Inf on both sides."""
    size = np.maximum(values(joined, "size"), 1).astype(np.float64)
    a, b = ({name: values(joined, name + side) for name in ("min", "max", "mean", "norm")} for side in ("", "_b"))
    counted = ~np.isnan(values(joined, "num_nan")) & ~np.isnan(values(joined, "num_nan_b"))
    with np.errstate(invalid="ignore", divide="ignore"):
        slack = np.where(counted, 0.0, _FLOAT32_MEAN * size * np.fmax(np.abs(a["mean"]), np.abs(b["mean"])))
        norm = np.fmax(np.fmax(a["norm"], b["norm"]), floor)
        extremes = [np.abs(side[name]) for side in (a, b) for name in ("min", "max")]
        largest = np.fmax(np.fmax.reduce(extremes), floor / np.sqrt(size))
        distance = np.fmax(0.0, np.abs(a["mean"] - b["mean"]) * size - slack)
        parts = np.stack([
            distance / (norm * np.sqrt(size) if rounded else norm), np.abs(a["norm"] - b["norm"]) / norm,
            np.abs(a["max"] - b["max"]) / largest, np.abs(a["min"] - b["min"]) / largest,
        ])  # fmt: skip
    is_whole = ~is_float(values(joined, "dtype"))
    parts[:, is_whole] = np.where(parts[:, is_whole] > 1e-6, np.inf, 0.0)
    return np.nan_to_num(parts, nan=0.0, posinf=np.inf)


def _is_incomparable(joined: pa.Table) -> np.ndarray:
    """Return the rows whose tensors differ in shape, kind or number of NaN and Inf, or hold other integers."""
    dtype, dtype_b = values(joined, "dtype"), values(joined, "dtype_b")
    floats, floats_b = is_float(dtype), is_float(dtype_b)
    bad = (values(joined, "shape") != values(joined, "shape_b")) | (floats != floats_b)
    norm, norm_b = values(joined, "norm"), values(joined, "norm_b")
    other = (np.isnan(norm) != np.isnan(norm_b)) | (np.isinf(norm) != np.isinf(norm_b))
    for name in ("num_nan", "num_inf"):
        count, count_b = values(joined, name), values(joined, f"{name}_b")
        other |= ~np.isnan(count) & ~np.isnan(count_b) & (count != count_b)
    sums, sums_b = values(joined, "checksum"), values(joined, "checksum_b")
    alike = np.array([x is not None and y is not None and len(x) == len(y) for x, y in zip(sums, sums_b)], dtype=bool)
    integers_differ = alike & (dtype == dtype_b) & (sums != sums_b)
    return bad | np.where(floats, other, integers_differ)


def words(joined: pa.Table, row: int, *, rounded: bool = False) -> str:
    """Return what differs most in a row of `join`."""
    one = joined.slice(row, 1)
    both = one.to_pylist()[0]

    def against(name: str, form: str = "") -> str:
        return f"{both[name]:{form}} against {both[f'{name}_b']:{form}}"

    if both["shape"] != both["shape_b"]:
        return f"shape {against('shape')}"
    floats = is_float([both["dtype"], both["dtype_b"]])
    if floats[0] != floats[1]:
        return against("dtype").replace("torch.", "")
    if not both["size"]:
        return "both are empty"
    for name, kind in (("num_nan", "NaN"), ("num_inf", "Inf")):
        if None not in (both[name], both[f"{name}_b"]) and both[name] != both[f"{name}_b"]:
            return f"{both[name]:,.0f} {kind} against {both[f'{name}_b']:,.0f}"
    if math.isfinite(both["norm"]) != math.isfinite(both["norm_b"]):
        return f"norm {against('norm', 'g')}"
    parts = _parts(one, 0.0, rounded=rounded)[:, 0]
    largest = _STATISTICS[int(parts.argmax())]
    both |= {f"sum{side}": both[f"mean{side}"] * both[f"size{side}"] for side in ("", "_b")}
    if not floats[0]:
        return (
            f"integers differ: {largest} {against(largest, 'g')}"
            if parts.any()
            else "integers differ, though not their statistics"
        )
    return f"{largest} {against(largest, '.6g')}"


def without_shards(table: pa.Table) -> tuple[pa.Table, int]:
    """Put tensors together whose parts are in several rows; return the table, and how many lack a part.

    What comes of parts has no checksum, and the shape `[size]`.
    """
    parts_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in table.filter(table["shard"].is_valid()).to_pylist():
        parts_of.setdefault((row["entry"], row["path"]), []).append(row)
    if not parts_of:
        return table, 0
    whole: list[dict[str, Any]] = []
    for rows in parts_of.values():
        by_part = {row["shard"]: row for row in rows}
        if len(by_part) < int(rows[0]["shard"].partition("/")[2]):
            continue
        there = [row for row in by_part.values() if row["size"]]  # a rank's part may be empty
        size = sum(row["size"] for row in there)
        whole.append(rows[0] | {
            "shape": f"[{size}]", "size": size, "checksum": None, "shard": None,
            "min": min(row["min"] for row in there), "max": max(row["max"] for row in there),
            "mean": sum(row["mean"] * row["size"] for row in there) / size,
            "norm": math.sqrt(sum(row["norm"] ** 2 for row in there)),
            "num_nan": sum(row["num_nan"] or 0 for row in there), "num_inf": sum(row["num_inf"] or 0 for row in there),
        })  # fmt: skip
    plain = table.filter(table["shard"].is_null())
    return pa.concat_tables([plain, pa.Table.from_pylist(whole, schema=_SCHEMA)]), len(parts_of) - len(whole)


# --- sums over samples
# --------------------------------------------------------------------------------------------------


def sample_table(
    sums: Sequence[SampleSums],
    names: Sequence[Sequence[str | None]],
    groups: Sequence[Sequence[np.ndarray]],
    tokens: np.ndarray,
) -> pa.Table:
    """Return the sums of one side, over all of its captures; spans of one group are added up.

    Args:
        sums: of each capture.
        names: of each capture's tensors what they are joined by; None leaves one out.
        groups: of each capture by pass the group of each span; −1 leaves one out.
        tokens: [groups] tokens of each.

    Returns:
        Columns: the tensor's `name` and the `group` of tokens, one row for each pair; `tokens`, how many there are;
        `sum_sum` Σx, `square_sum_sum` Σx², `num_bad_sum` NaN and Inf.
    """
    nothing = np.zeros(0, dtype=np.int64)
    spans = pa.concat_tables(
        pa.table({
            "name": pa.array(np.repeat(np.array(its_names, dtype=object), np.diff(one.first)), pa.string()),
            "group": np.concatenate([nothing, *(its_groups[index] for index in one.pass_index)]),
            "sum": one.sum, "square_sum": one.square_sum, "num_bad": one.num_bad,
        })
        for one, its_names, its_groups in zip(sums, names, groups, strict=True)
    )  # fmt: skip
    is_chosen = spans["name"].is_valid().to_numpy() & (values(spans, "group") >= 0)
    spans = spans.filter(pa.array(is_chosen, pa.bool_()))
    columns = [(name, "sum") for name in ("sum", "square_sum", "num_bad")]
    table = spans.group_by(["name", "group"], use_threads=False).aggregate(columns)
    return table.append_column("tokens", pa.array(tokens[values(table, "group")], pa.float64()))


def sample_errors(a: pa.Table, b: pa.Table, widths: dict[str, int] | None = None) -> pa.Table:
    """Join two tables of sums by tensor and group, in the order of both, and add the column `error`.

    The error is max(|ΔΣx|, |Δ‖x‖|) / max(‖a‖, ‖b‖, floor): inf where the numbers of NaN and Inf differ, 0 where there
    are some on both sides.

    Args:
        a: one side, from `sample_table`.
        b: the other; groups have the same numbers. Its columns end in `_b`.
        widths: where one side computes in another precision, elements a token of each tensor: ΔΣx is then divided by
            √n, as in `tensor_errors`.
    """
    joined = a.join(b, keys=["name", "group"], join_type="inner", right_suffix="_b")
    joined = joined.sort_by([("name", "ascending"), ("group", "ascending")])
    tokens, square_a, square_b = (values(joined, name) for name in ("tokens", "square_sum_sum", "square_sum_sum_b"))
    names, key = np.unique(values(joined, "name").astype(str), return_inverse=True)
    squares = np.maximum(square_a, square_b)
    finite = np.where(np.isfinite(squares), squares, 0.0)
    mean_square = np.bincount(key, finite) / np.maximum(np.bincount(key, tokens), 1.0)
    floor = SCALE_FLOOR * np.sqrt(mean_square[key] * tokens)
    shrink: np.ndarray | float = 1.0
    if widths is not None:
        width = np.array([widths.get(name, 1) for name in names.tolist()], dtype=np.float64)
        shrink = np.sqrt(np.maximum(tokens * width[key], 1.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        norm_a, norm_b = np.sqrt(square_a), np.sqrt(square_b)
        moved = np.abs(values(joined, "sum_sum") - values(joined, "sum_sum_b"))
        distance = np.maximum(moved / shrink, np.abs(norm_a - norm_b))
        errors = distance / np.maximum(np.maximum(norm_a, norm_b), floor)
    errors = np.where((distance == 0) | np.isnan(errors), 0.0, errors)
    bad_a, bad_b = values(joined, "num_bad_sum"), values(joined, "num_bad_sum_b")
    errors = np.where(bad_a != bad_b, np.inf, np.where((bad_a > 0) & (bad_b > 0), 0.0, errors))
    return joined.append_column("error", pa.array(errors, pa.float64()))


def largest_of_names(errors: pa.Table) -> np.ndarray:
    """Return int64[tensors], the row of `sample_errors` with each tensor's largest error, the first of equal ones."""
    names, error = values(errors, "name").astype(str), values(errors, "error")
    order = np.lexsort((-error, names))
    return order[np.unique(names[order], return_index=True)[1]]
