"""Looks at a capture on its own: the first NaN or Inf and what it comes from.

A tensor that holds NaN or Inf counts as infinitely wrong, and the rest is as in a comparison; `text.py` shows it.
"""

import numpy as np

from pellucid.precision.calls import BACKWARD, PARAMETER_GRADIENTS, Calls, pass_label
from pellucid.precision.capture_table import SAME, is_float, statistics_table, values
from pellucid.precision.compare import Samples, StageComparison, call_errors, fill
from pellucid.precision.divergence import Divergence, Kind, Limits, Measured, part_of
from pellucid.precision.dump import StageDump
from pellucid.precision.matching import Place


def check_dump(dump: StageDump, place: Place, *, limit: int = 20) -> StageComparison:
    """Look at one capture; `largest` of the result are its modules with NaN or Inf, in execution order."""
    calls = Calls(dump)
    table = statistics_table((index, entry.name, entry) for index, entry in enumerate(dump.entries))
    call, paths = values(table, "call"), values(table, "path")
    column = {name: values(table, name) for name in ("size", "norm", "max", "min", "num_nan", "num_inf")}
    uncounted, num_nan = np.isnan(column["num_nan"]), np.nan_to_num(column["num_nan"])
    shows = is_float(values(table, "dtype")) & (column["size"] > 0) & ~np.isfinite(column["norm"])
    bad = np.where(uncounted, shows, num_nan + np.nan_to_num(column["num_inf"]) > 0)
    # Masks are made of −Inf; NaN is wrong everywhere.
    bad = np.where(["mask" in path for path in paths], num_nan > 0, bad).astype(bool)
    errors = np.where(bad, np.inf, SAME)
    units = [one.unit for one in dump.about.passes]
    result = StageComparison(place=place, num_common=len(dump.entries), num_bad=len(set(call[bad].tolist())))

    def counts(row: int) -> str:
        """Return how many NaN and Inf of how many values."""
        one = {name: of[row] for name, of in column.items()}
        if uncounted[row]:
            return f"norm {one['norm']:g}, max {one['max']:g}, min {one['min']:g}"
        kinds = [f"{one[name]:,.0f} {kind}" for name, kind in (("num_nan", "NaN"), ("num_inf", "Inf")) if one[name]]
        return f"{' and '.join(kinds)} of {one['size']:,} values"

    def measured(row: int) -> Measured:
        return Measured(float(errors[row]), paths[row], lambda: counts(row))

    parts = [part_of(calls.names[index], path) for index, path in zip(call, paths)]
    found, limits = call_errors(range(len(dump.entries)), call, parts, errors, measured), Limits(rtol=0.0)
    fill(result, calls, found, limits, limit=limit, when=lambda index: pass_label(units, calls.passes[index]))
    if result.divergence is not None:
        result.samples = _bad_samples(dump, result.divergence)
    if not dump.about.complete:
        result.notes.append(f"{result.where}: the capture is not complete ({dump.about.error or 'cut short'})")
    return result


def _bad_samples(dump: StageDump, divergence: Divergence) -> Samples | None:
    """Return the samples with NaN or Inf in the tensor in which they first are."""
    sums, key = dump.samples, f"{divergence.entry}|{divergence.path}"
    if divergence.kind is Kind.PARAMETER_GRADIENT:  # which is a sum over samples; what the module sends back is not
        key = f"{divergence.entry.replace(f'.{PARAMETER_GRADIENTS}.', f'.{BACKWARD}.')}|output.0"
    if sums is None or key not in sums.names:
        return None
    row = sums.names.index(key)
    spans = dump.about.passes[int(sums.pass_index[row])].spans
    counts = sums.num_bad[sums.first[row] : sums.first[row + 1]]
    differing = [f"{span.sample} ({span.part})" for span, count in zip(spans, counts.tolist()) if count]
    return Samples(tuple(dict.fromkeys(differing)), len({(span.sample, span.part) for span in spans}))
