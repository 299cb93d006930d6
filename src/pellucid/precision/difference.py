"""How far two tensors are apart, told from what captures keep of them: statistics, a checksum, and sums over samples.

`compare.py` and `by_sample.py` ask; the measure is `difference`.
"""

import math
from dataclasses import dataclass

import numpy as np

from pellucid.precision.dump import SampleSums, TensorStats

SAME = -1.0
"""The error of tensors that are equal bit for bit; below 0, which is that of tensors whose statistics agree."""
SCALE_FLOOR = 0.01
"""A sample's own norm counts as at least this share of what its tokens would have on average: none is judged by its noise."""
_FLOAT32_MEAN = 2.0**-22
"""Relative resolution of a mean that was kept in float32, with a little slack."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart."""

    error: float
    """Relative; `SAME` where they are equal bit for bit, inf where they cannot be compared (shape, NaN counts, integers)."""
    path: str
    """Of the leaf within its entry, e.g. `output.0`."""
    a: TensorStats
    b: TensorStats

    @property
    def dtypes_differ(self) -> bool:
        """Whether they are of different dtypes."""
        return self.a.dtype != self.b.dtype

    @property
    def what(self) -> str:
        """What differs most, in words."""
        return _parts(self.a, self.b)[1]


def difference(path: str, a: TensorStats, b: TensorStats, floor: float = 0.0, *, rounded: bool = False) -> Difference:
    """Return the relative error between two tensors.

    Equal checksums of equal dtypes make it `SAME`. Else it is the largest of

        |Σa − Σb| / s,   |‖a‖ − ‖b‖| / s,   |max a − max b| / m,   |min a − min b| / m

    with s = max(‖a‖, ‖b‖, floor) and m = max(|max|, |min|, floor / √n) of both. The first is the sensitive one: elements that are off by a
    share r each, in no common direction, move Σx by about r·‖x‖ (bf16: 2e-3; another order of float32 additions: 1e-7 to 1e-6);
    a common direction can make it larger than r, and larger than 1. Other shapes, other numbers of NaN or Inf, and integers that
    are not equal make it inf. Floats of two dtypes are compared by value. Where one side computes in another precision, rounding has
    such a common direction, and s·√n takes the place of s in the first: ‖a − b‖ / s is then at least what comes out.

    Args:
        path: of the leaf.
        a: of one capture.
        b: of the other.
        floor: least scale, where the tensor is what remains of a larger sum.
        rounded: one of the captures computes in another precision.
    """
    if a.checksum is not None and a.checksum == b.checksum and a.dtype == b.dtype and a.shape == b.shape:
        return Difference(SAME, path, a, b)
    return Difference(_parts(a, b, floor, rounded)[0], path, a, b)


def is_float(stats: TensorStats) -> bool:
    """Whether the tensor's dtype is a floating one."""
    return "float" in stats.dtype


def num_bad(stats: TensorStats) -> int:
    """Return how many NaN and Inf there are; where nobody counted, 1 if the statistics show some."""
    if stats.num_nan is not None:
        return stats.num_nan + (stats.num_inf or 0)
    return int(is_float(stats) and math.prod(stats.shape) > 0 and not math.isfinite(stats.norm))


def _parts(a: TensorStats, b: TensorStats, floor: float = 0.0, rounded: bool = False) -> tuple[float, str]:
    """Return the error and what made it."""
    if a.shape != b.shape:
        return math.inf, f"shape {list(a.shape)} against {list(b.shape)}"
    if is_float(a) != is_float(b):
        return math.inf, f"{_short(a.dtype)} against {_short(b.dtype)}"
    if math.prod(a.shape) == 0:
        return 0.0, "both are empty"
    if not is_float(a):
        return _integer_parts(a, b)
    if (reason := _bad_counts(a, b)) is not None:
        return math.inf, reason
    return max(_float_parts(a, b, floor, rounded), key=lambda part: part[0])


def _integer_parts(a: TensorStats, b: TensorStats) -> tuple[float, str]:
    for name, x, y in (("min", a.min, b.min), ("max", a.max, b.max), ("mean", a.mean, b.mean), ("norm", a.norm, b.norm)):
        if not (math.isnan(x) or math.isnan(y)) and not math.isclose(x, y, rel_tol=1e-6):
            return math.inf, f"integers differ: {name} {x:g} against {y:g}"
    if a.checksum is not None and b.checksum is not None and len(a.checksum) == len(b.checksum) and a.dtype == b.dtype:
        return math.inf, "integers differ, though not their statistics"
    return 0.0, "statistics agree"


def _bad_counts(a: TensorStats, b: TensorStats) -> str | None:
    for name, x, y in (("NaN", a.num_nan, b.num_nan), ("Inf", a.num_inf, b.num_inf)):
        if x is not None and y is not None and x != y:
            return f"{x:,} {name} against {y:,}"
    if math.isnan(a.norm) != math.isnan(b.norm) or math.isinf(a.norm) != math.isinf(b.norm):
        return f"norm {a.norm:g} against {b.norm:g}"
    return None


def _float_parts(a: TensorStats, b: TensorStats, floor: float, rounded: bool) -> list[tuple[float, str]]:
    """Return (error, words) of each statistic; those that are NaN or Inf on both sides say nothing."""
    size = math.prod(a.shape)
    norm = max(a.norm, b.norm, floor)
    largest = max(*(abs(value) for value in (a.max, a.min, b.max, b.min)), floor / math.sqrt(size))
    kept_in_float32 = a.num_nan is None or b.num_nan is None  # msprobe's
    slack = _FLOAT32_MEAN * size * max(abs(a.mean), abs(b.mean)) if kept_in_float32 else 0.0
    shrink = math.sqrt(size) if rounded else 1.0
    parts = [
        (max(0.0, abs(a.mean - b.mean) * size - slack), norm * shrink, f"sum {a.mean * size:.6g} against {b.mean * size:.6g}"),
        (abs(a.norm - b.norm), norm, f"norm {a.norm:.6g} against {b.norm:.6g}"),
        (abs(a.max - b.max), largest, f"max {a.max:.6g} against {b.max:.6g}"),
        (abs(a.min - b.min), largest, f"min {a.min:.6g} against {b.min:.6g}"),
    ]
    return [(0.0 if distance == 0 or math.isnan(distance) else distance / scale, words) for distance, scale, words in parts]


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def sum_errors(
    sum_a: np.ndarray,
    square_a: np.ndarray,
    bad_a: np.ndarray,
    sum_b: np.ndarray,
    square_b: np.ndarray,
    bad_b: np.ndarray,
    floor: np.ndarray,
    shrink: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Return the relative errors of sums over samples, of one shape: max(|ΔΣx| / shrink, |Δ‖x‖|) / max(‖a‖, ‖b‖, floor); inf where
    the numbers of NaN and Inf differ, 0 where there are some on both sides. See `difference` on `shrink`, 1 or √n.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        norm_a, norm_b = np.sqrt(square_a), np.sqrt(square_b)
        distance = np.maximum(np.abs(sum_a - sum_b) / shrink, np.abs(norm_a - norm_b))
        errors = distance / np.maximum(np.maximum(norm_a, norm_b), floor)
    errors = np.where((distance == 0) | np.isnan(errors), 0.0, errors)
    return np.where(bad_a != bad_b, np.inf, np.where((bad_a > 0) & (bad_b > 0), 0.0, errors))


def span_errors(a: SampleSums, b: SampleSums, rows_a: np.ndarray, rows_b: np.ndarray, lengths: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors of tensors span by span.

    Args:
        a: of one capture.
        b: of the other.
        rows_a: [K] rows of tensors in `a`.
        rows_b: [K] the same tensors' rows in `b`, with as many spans each.
        lengths: for each of a's passes the number of tokens of each span.

    Returns:
        [S] errors, all spans of the first tensor, then of the second and so on; [K+1] where each tensor's begin.
    """
    counts = a.first[rows_a + 1] - a.first[rows_a]
    starts = np.concatenate([[0], np.cumsum(counts)])
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    at_a, at_b = np.repeat(a.first[rows_a], counts) + inside, np.repeat(b.first[rows_b], counts) + inside
    squares = np.maximum(a.square_sum[at_a], b.square_sum[at_b])
    tokens = np.concatenate([lengths[index] for index in a.pass_index[rows_a]]) if len(rows_a) else np.zeros(0)
    owner = np.repeat(np.arange(len(rows_a)), counts)
    finite = np.where(np.isfinite(squares), squares, 0.0)
    mean_square = np.bincount(owner, finite, len(rows_a)) / np.maximum(np.bincount(owner, tokens, len(rows_a)), 1.0)
    floor = SCALE_FLOOR * np.sqrt(mean_square[owner] * tokens)
    errors = sum_errors(
        a.sum[at_a], a.square_sum[at_a], a.num_bad[at_a], b.sum[at_b], b.square_sum[at_b], b.num_bad[at_b], floor
    )
    return errors, starts
