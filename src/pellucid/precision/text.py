"""Shows comparisons and reports of captures: the answer first, then the tables behind it; and the same as JSON.

Returns rich renderables, which the command prints and the heat map's page has, too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.precision.calls import OPTIMIZER
from pellucid.precision.capture_table import SAME
from pellucid.precision.compare import Comparison, Divergence, Row
from pellucid.precision.divergence import REASONS, Kind

MAX_NAMES = 6
MAX_NOTES = 8
MAX_STAGES = 40
"""Stages and ranks that have a line each: those with a divergence, or where there is none, all."""


def error_text(error: float) -> str:
    """Return an error as people read it."""
    if math.isnan(error):
        return "–"
    if error == SAME:
        return "bitwise equal"
    return "∞" if math.isinf(error) else f"{error:.1e}" if error else "0"


def joined(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """Return the first names and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def headline(result: Comparison) -> str:
    """Return the answer in one sentence."""
    num, one = sum(stage.num_calls for stage in result.stages), result.divergence
    if one is not None:
        what = "First divergence" if result.b else "First NaN or Inf"
        direction = "" if one.direction == OPTIMIZER else f", {one.direction}"
        return f"{what}: {subject(one)} in {one.place.moment}, {one.pass_label}{direction}."
    if result.b is None:
        return f"No NaN and no Inf in {num:,} calls of {len(result.stages)} captures."
    equal = "bitwise equal" if result.max_error == SAME else f"equal within {result.rtol:g}"
    if result.missing:
        return f"Not all could be compared: {joined(result.missing, 1)}. The {num:,} calls that both have are {equal}."
    return f"{equal.capitalize()}: the largest relative error of {num:,} calls is {error_text(result.max_error)}."


def subject(one: Divergence) -> str:
    """Return what is at fault, in a few words."""
    if one.kind in (Kind.INPUTS, Kind.LOSS):
        of_loss = "the gradient that the loss sends back"
        return of_loss if one.kind is Kind.LOSS else "what comes in from outside of the model"
    return f"{one.module} ({one.module_class})" if one.module_class else one.module


def explanation(result: Comparison) -> Iterator[str]:
    """Yield what is known of the first divergence, a sentence a line."""
    one = result.divergence
    if one is None:
        return
    if one.drift:
        times = f"{one.error / one.base:.1f}×" if one.base > 0 else "out of"
        adds = f"No module adds more than ten times the round-off; this one adds most, {times} what went in."
        adds = adds if one.grown else "This module adds far more than that round-off."
        yield f"The model computes in {one.drift}: errors are expected from the first module on, and grow. {adds}"
    if one.grown:
        yield f"No module makes it alone: its inputs have an error already ({error_text(one.base)}), and it grows."
    else:
        clean = f"within {error_text(one.base)}" if one.base > 0 else "equal" if result.b else "finite"
        clean = "not captured" if math.isnan(one.base) else clean
        reason = REASONS[one.kind].format(clean=clean, seen_at=one.seen_at)
        yield f"{reason[0].upper()}{reason[1:]}."
    if one.num_beside:
        yield f"It is so in {one.num_differing} of {one.num_beside} modules."
    size = f", relative error {error_text(one.error)}" if result.b else ""
    yield f"At {one.entry}, {one.path}: {one.what}{size}."
    if one.samples:
        yield f"It shows in {len(one.samples)} of {one.num_samples} prompts and responses: {joined(one.samples)}."
    if len(one.all_ranks) > 1:
        yield f"{len(one.ranks)} of {len(one.all_ranks)} ranks have it: {joined(one.ranks)}."


def comparison_renderables(result: Comparison) -> Iterator[RenderableType]:
    """Yield the parts of a comparison in the order in which they are read."""
    yield Text(f"A: {result.a}" + (f"\nB: {result.b}" if result.b else ""), style="bold")
    lines = "".join(f"\n{line}" for line in explanation(result))
    yield Panel(Text.assemble((headline(result), "bold"), lines), border_style="green" if result.is_equal else "red")
    if result.largest:
        title = "Largest relative errors" if result.b else "NaN and Inf"
        title = "Largest growth of relative errors" if any(stage.drift for stage in result.stages) else title
        table = _table(title, "module", "of", *(["error", "went in"] if result.b else ["what"]), "where")
        for row in result.largest:
            said = [error_text(row.error), error_text(row.base)] if result.b else [row.what]
            _add(table, row.module, row.quantity, *said, f"{row.place.where}, {row.pass_label}")
        yield table
    stages = [stage for stage in result.stages if stage.divergence] or result.stages
    title = f"{min(len(stages), MAX_STAGES)} of {len(result.stages)} stages, steps and ranks"
    table = _table(title, "where", "calls", "wrong", *(["largest error"] if result.b else []), "first")
    for stage in stages[:MAX_STAGES]:
        first = "–" if stage.divergence is None else f"{subject(stage.divergence)}, {stage.divergence.pass_label}"
        error = [error_text(stage.max_error)] if result.b else []
        _add(table, stage.place.where, f"{stage.num_calls:,}", f"{stage.num_bad:,}", *error, first)
    yield table
    for note in (result.missing + result.notes)[:MAX_NOTES]:
        yield Text(note, style="dim")
    if (more := len(result.missing) + len(result.notes) - MAX_NOTES) > 0:
        yield Text(f"and {more} more notes like these", style="dim")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row as it is: names of samples have colons, which rich would take for emoji."""
    table.add_row(*map(Text, cells))


def comparison_json(result: Comparison) -> dict[str, Any]:
    """Return a comparison or report as plain values: errors as numbers, "inf" where tensors cannot be compared."""
    stages = [
        asdict(stage.place)
        | {"calls": stage.num_calls, "wrong": stage.num_bad, "max_error": stage.max_error}
        | {"first_divergence": _flat(stage.divergence)}
        for stage in result.stages
    ]
    content = {
        "a": result.a, "b": result.b, "rtol": result.rtol,
        "headline": headline(result), "explanation": list(explanation(result)),
        "bitwise_equal": result.max_error == SAME and not result.missing, "max_error": result.max_error,
        "first_divergence": _flat(result.divergence), "largest": [_flat(row) for row in result.largest],
        "stages": stages, "missing": result.missing, "notes": result.notes,
    }  # fmt: skip
    return _plain(content)


def _flat(row: Row | None) -> dict[str, Any] | None:
    """Return the fields of a row, and those of its place."""
    return None if row is None else asdict(row) | asdict(row.place) | {"pass": row.pass_label}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; for an error a number from 0 on, "inf", or None for nan."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else "inf" if math.isinf(value) else max(value, 0.0)
