"""Shows comparisons and reports of captures in the terminal: the answer first, then the tables behind it; and as JSON.

Returns rich renderables; the command prints them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.precision.calls import BACKWARD, OPTIMIZER
from pellucid.precision.capture_table import SAME
from pellucid.precision.compare import Comparison, Found, Row, Samples
from pellucid.precision.divergence import Divergence, Kind

MAX_NAMES = 6
MAX_LINES = 40
"""Stages and ranks that have a line each; of more, the first and those that differ most."""


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


def comparison_renderables(result: Comparison) -> Iterator[RenderableType]:
    """Yield the parts of a comparison in the order in which they are read."""
    yield Text(f"A: {result.name_a}\nB: {result.name_b}" if result.name_b else result.name_a, style="bold")
    yield _panel(headline(result), list(explanation(result)), good=result.is_equal)
    if not result.name_b:
        yield from _report_tables(result)
        return
    if result.found is not None and result.found.divergence.kind is not Kind.INPUTS and result.jumps:
        yield _rows_table("Largest jumps: error against that of what went in", result.jumps, with_base=True)
    if result.largest:
        yield _rows_table("Largest relative errors", result.largest)
    yield _stage_table(result)
    for note in (
        _shortened(result.missing)
        + result.notes
        + _shortened([note for stage in result.stages for note in stage.notes])
    ):
        yield Text(note, style="dim")


def _report_tables(result: Comparison) -> Iterator[RenderableType]:
    if result.found is not None:
        stage = result.found.comparison
        table = _table(f"Modules with NaN or Inf, {stage.where}, in execution order", *_REPORT_COLUMNS, left=range(4))
        for row in stage.largest:
            _add(table, row.module, row.what, row.path, row.detail)
        yield table
    yield _stage_table(result)
    for note in _shortened([note for stage in result.stages for note in stage.notes]):
        yield Text(note, style="dim")


def headline(result: Comparison) -> str:
    """Return the answer in one sentence."""
    num, found = sum(stage.num_common for stage in result.stages), result.found
    if not result.name_b:
        if found is None:
            return f"No NaN and no Inf in {num:,} calls of {len(result.stages)} captures."
        return f"First NaN or Inf: {_where_found(found)}."
    if found is None:
        if result.missing:
            what = "bitwise equal" if result.max_error == SAME else f"equal within {result.rtol:g}"
            more = f" (and {len(result.missing) - 1} more)" if len(result.missing) > 1 else ""
            return f"Not all could be compared: {result.missing[0]}{more}. The {num:,} calls that both have are {what}."
        if result.max_error == SAME:
            return f"Bitwise equal: all {num:,} calls that both have."
        largest = error_text(result.max_error)
        return f"Equal within {result.rtol:g}: the largest relative error of {num:,} calls is {largest}."
    return f"First divergence: {_where_found(found)}."


def _where_found(found: Found) -> str:
    direction = "" if found.divergence.direction == OPTIMIZER else f", {found.divergence.direction}"
    return f"{subject(found.divergence)} in {found.place.moment}, {found.comparison.pass_label}{direction}"


def subject(divergence: Divergence) -> str:
    """Return what is at fault, in a few words."""
    if divergence.kind is Kind.INPUTS:
        return (
            "what comes in from outside of the model"
            if divergence.direction != BACKWARD
            else "the gradient that the loss sends back"
        )
    name = f"{divergence.module} ({divergence.module_class})" if divergence.module_class else divergence.module
    return name


def explanation(result: Comparison) -> Iterator[str]:
    """Yield what is known of the first divergence, a sentence a line."""
    found = result.found
    if found is None:
        return
    divergence, stage = found.divergence, found.comparison
    if not result.name_b:
        yield _HEALTH_REASONS[divergence.kind].format(seen_at=divergence.seen_at)
        yield f"At {divergence.entry}, {divergence.path}: {divergence.what}."
        if stage.samples is not None and stage.samples.differing:
            yield f"{_share_of(stage.samples)} hold it: {joined(stage.samples.differing)}."
        yield from ranks_text(found)
        return
    if stage.drift:
        ratio = f"{divergence.error / divergence.base:.1f}×" if divergence.base > 0 else "out of"
        grown = f"No module adds more than ten times the round-off; this one adds most, {ratio} what went in."
        adds = grown if divergence.grown else "This module adds far more than that round-off."
        yield f"The model computes in {stage.drift}: errors are expected from the first module on, and grow. {adds}"
    yield reason(divergence)
    error = error_text(divergence.error)
    yield f"At {divergence.entry}, {divergence.path}: relative error {error} ({divergence.what})."
    if stage.after_mini_batch is not None:
        number = stage.after_mini_batch
        yield f"It is so after optimizer step {number} of the stage: look at its gradients, and at the optimizer."
    if stage.first is not None:
        where, error = stage.first.module or "the inputs", error_text(stage.first.error)
        yield f"Errors pass {result.rtol:g} first, by slow growth, at {where} ({error})."
    if stage.samples is not None:
        yield samples_text(stage.samples)
    yield from stage.remarks
    yield from ranks_text(found)


def reason(divergence: Divergence) -> str:
    """Return what a divergence says about its module."""
    if divergence.kind is Kind.PARAMETERS:
        text = "Its parameters differ before it runs: an optimizer step, a checkpoint or a weight sync, not this pass."
        return f"{text} {_how_many(divergence, 'modules whose parameters differ', first=True)}"
    if divergence.grown:
        return (
            f"No module makes it alone: its inputs have an error already ({error_text(divergence.base)}), and it grows."
        )
    clean = "equal" if divergence.base <= 0 else f"within {error_text(divergence.base)}"
    is_backward = divergence.direction == BACKWARD
    match divergence.kind:
        case Kind.OPTIMIZER:
            others = _how_many(divergence, "modules whose weights differ")
            if math.isnan(divergence.base):
                return f"The weights that the optimizer makes differ; its gradients were not captured. {others}"
            made = f"The weights that the optimizer makes differ, though its gradients are {clean}"
            return f"{made}: the fault is in the optimizer. {others}"
        case Kind.OPTIMIZER_GRADIENT:
            others = _how_many(divergence, "modules whose gradients differ")
            if math.isnan(divergence.base):
                return (
                    f"The gradient that the optimizer gets differs; those of single passes were not captured. {others}"
                )
            where = "it went wrong where they are added up, reduced over ranks and clipped"
            return f"The gradient that the optimizer gets differs, each pass's is {clean}: {where}. {others}"
        case Kind.PARAMETER_GRADIENT:
            return f"The gradient of its parameters differs, while the gradient that comes in is {clean}."
        case Kind.INPUTS if is_backward:
            inputs = "advantages, old log-probabilities, mask"
            return f"The forward pass is {clean}; the loss, its inputs ({inputs}) or its scale differ."
        case Kind.INPUTS:
            return "The inputs differ already: other tokens, positions or masks. The model is not at fault."
        case Kind.INSIDE:
            what = "the gradient that comes in at" if is_backward else "the input of"
            before = f"what the modules before gave is {clean}"
            return f"Its own code, between the modules in it: {before}, {what} {divergence.seen_at} is not."
        case _:
            what = "The gradient that comes in is" if is_backward else "Its inputs and parameters are"
            return f"{what} {clean}, what it computes is not: the fault is in this module."


def _how_many(divergence: Divergence, what: str, *, first: bool = False) -> str:
    """Return whether other modules show the same."""
    differing, there = divergence.num_differing, divergence.num_with_parameters
    if differing > 1:
        return f"It is the {'first' if first else 'one that differs most'} of {differing} {what}, of {there}."
    return (
        f"No other of {there} {what.replace(' whose', ' has', 1).replace(' differ', ' that differ')}."
        if there > 1
        else ""
    )


def samples_text(samples: Samples) -> str:
    """Return whose tokens differ."""
    if not samples.differing:
        return "No prompt or response differs beyond the limit by its sums: the difference is in single elements."
    return (
        f"{_share_of(samples)} differ: {joined(samples.differing)}."
        if _is_part(samples)
        else f"{_share_of(samples)} differ."
    )


def _is_part(samples: Samples) -> bool:
    return len(samples.differing) < samples.total


def _share_of(samples: Samples) -> str:
    there = f"{samples.total} prompts and responses"
    return f"Of {there}, {len(samples.differing)}" if _is_part(samples) else f"All {there}"


def ranks_text(found: Found) -> Iterator[str]:
    """Yield which ranks have the divergence."""
    if len(found.all_ranks) < 2:
        return
    if len(found.ranks) == len(found.all_ranks):
        yield f"All {len(found.ranks)} ranks have it."
        return
    verb = "have" if len(found.ranks) > 1 else "has"
    ranks = f"Only {joined(found.ranks)} of {len(found.all_ranks)} ranks"
    yield f"{ranks} {verb} it. First elsewhere: {joined(found.later)}."


def _panel(lead: str, lines: Iterable[str], *, good: bool) -> Panel:
    text = Text(lead, style="bold")
    for line in lines:
        text.append(f"\n{line}", style="not bold")
    return Panel(text, border_style="green" if good else "red")


def _table(title: str, *columns: str, left: Iterable[int] = (0,)) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in left else "right", overflow="fold")
    return table


def _add(table: Table, *cells: str, style: str = "") -> None:
    """Add a row as it is: names of samples have colons, which rich would take for emoji."""
    table.add_row(*map(Text, cells), style=style)


def _rows_table(title: str, rows: Sequence[Row], *, with_base: bool = False) -> Table:
    """What is the same in all rows is said in the title."""
    places = {row.place for row in rows}
    alone = len(places) == 1
    has_passes = any(row.pass_label for row in rows)
    columns = [
        "module",
        "of",
        "error",
        *(["went in"] if with_base else []),
        *([] if alone else ["where"]),
        *(["pass"] if has_passes else []),
    ]
    left = {0, 1} | {index for index, column in enumerate(columns) if column in ("where", "pass")}
    table = _table(f"{title}, {places.pop()}" if alone else title, *columns, left=left)
    for row in rows:
        base, where = [error_text(row.base)] if with_base else [], [] if alone else [row.place]
        _add(
            table, row.module, row.what, error_text(row.error), *base, *where, *([row.pass_label] if has_passes else [])
        )
    return table


def _stage_table(result: Comparison) -> Table:
    stages = result.stages
    shown = list(stages)
    title = "Steps, stages and ranks"
    if len(shown) > MAX_LINES:
        worst = sorted(shown, key=lambda stage: -stage.max_error)[: MAX_LINES // 2]
        keep = {id(stage) for stage in shown[: MAX_LINES // 2] + worst}
        shown = [stage for stage in shown if id(stage) in keep]
        title += f" ({len(shown)} of {len(stages)}: the first, and the worst)"
    what = ("largest error", "first divergence") if result.name_b else ("with NaN or Inf", "first")
    table = _table(title, "step and stage", "rank", "calls", *what, left=(0, 1, 4))
    for stage in shown:
        first = "–" if stage.divergence is None else f"{subject(stage.divergence)}, {stage.pass_label}"
        style = "red" if stage.divergence is not None else ""
        size = error_text(stage.max_error) if result.name_b else f"{stage.num_bad:,}"
        _add(table, stage.place.moment, stage.place.rank_name, f"{stage.num_common:,}", size, first, style=style)
    return table


def _shortened(notes: list[str]) -> list[str]:
    return notes[:8] + ([f"and {len(notes) - 8} more notes like these"] if len(notes) > 8 else [])


_REPORT_COLUMNS = ("module", "of", "tensor", "what")
_HEALTH_REASONS = {
    Kind.OUTPUT: "What goes into it is finite, what it computes is not: the fault is in this module.",
    Kind.INSIDE: "It comes from its own code between the modules in it: it is first seen in what {seen_at} gets.",
    Kind.INPUTS: "It comes from outside of the model.",
    Kind.PARAMETERS: "Its parameters hold it before it runs: an optimizer step, a checkpoint or a weight sync.",
    Kind.PARAMETER_GRADIENT: "The gradient that comes in is finite, that of its parameters is not.",
    Kind.OPTIMIZER_GRADIENT: "Adding the gradients of the passes up, reducing them over ranks or clipping makes it.",
    Kind.OPTIMIZER: "The optimizer makes it of finite gradients.",
}


def report_json(result: Comparison) -> dict[str, Any]:
    """Return a report on single captures as plain values."""
    found = result.found
    return {
        "captures": result.name_a,
        "headline": headline(result),
        "first": None if found is None else _found_json(found),
        "stages": [
            _plain(stage.place)
            | {"rank": stage.place.rank_name, "calls": stage.num_common, "with_nan_or_inf": stage.num_bad}
            for stage in result.stages
        ],
    }


def comparison_json(result: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values: errors as numbers, "inf" where tensors cannot be compared."""
    found = result.found
    return {
        "a": result.name_a,
        "b": result.name_b,
        "rtol": result.rtol,
        "headline": headline(result),
        "bitwise_equal": result.max_error == SAME and not result.missing,
        "max_error": _plain(result.max_error),
        "first_divergence": None if found is None else _found_json(found),
        "largest": _plain(result.largest),
        "jumps": _plain(result.jumps),
        "stages": [
            _plain(stage.place)
            | {
                "rank": stage.place.rank_name,
                "calls": stage.num_common,
                "max_error": _plain(stage.max_error),
                "bitwise_equal": stage.is_same,
                "only_a": len(stage.only_a),
                "only_b": len(stage.only_b),
                "first_divergence": _plain(stage.divergence),
            }
            for stage in result.stages
        ],
        "missing": result.missing,
        "notes": [*result.notes, *(note for stage in result.stages for note in stage.notes)],
    }


def _found_json(found: Found) -> dict[str, Any]:
    stage = found.comparison
    return (
        _plain(found.place)
        | _plain(found.divergence)
        | {
            "pass": stage.pass_label,
            "reason": reason(found.divergence),
            "remarks": stage.remarks,
            "ranks": found.ranks,
            "all_ranks": found.all_ranks,
            "drift": stage.drift,
            "after_optimizer_step": stage.after_mini_batch,
            "samples": stage.samples and list(stage.samples.differing),
            "num_samples": stage.samples and stage.samples.total,
        }
    )


def _plain(value: Any) -> Any:
    """Return fields by name for a dataclass; for an error a number from 0 on, "inf", or None for nan."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else "inf" if math.isinf(value) else max(value, 0.0)
