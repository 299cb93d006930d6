"""Shows comparisons and reports of captures in the terminal: the answer first, then the tables behind it; and as JSON.

Returns rich renderables; the command prints them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.precision.calls import BACKWARD, OPTIMIZER
from pellucid.precision.compare import Comparison, Found, Place, Row, Samples, StageComparison
from pellucid.precision.difference import SAME
from pellucid.precision.divergence import Divergence, Kind
from pellucid.precision.health import Health

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
    yield Text(f"A: {result.name_a}\nB: {result.name_b}", style="bold")
    yield _panel(headline(result), list(explanation(result)), good=result.is_equal)
    if result.found is not None and result.found.divergence.kind is not Kind.INPUTS and result.jumps:
        yield _rows_table("Largest jumps: error against that of what went in", result.jumps, with_base=True)
    if result.largest:
        yield _rows_table("Largest relative errors", result.largest)
    yield _stage_table(result.stages, result.rtol)
    for note in _shortened(result.missing) + result.notes + _shortened([note for stage in result.stages for note in stage.notes]):
        yield Text(note, style="dim")


def headline(result: Comparison) -> str:
    """Return the answer in one sentence."""
    num = sum(stage.num_common for stage in result.stages)
    if result.found is None:
        if result.missing:
            what = "bitwise equal" if result.max_error == SAME else f"equal within {result.rtol:g}"
            more = f" (and {len(result.missing) - 1} more)" if len(result.missing) > 1 else ""
            return f"Not all could be compared: {result.missing[0]}{more}. The {num:,} calls that both have are {what}."
        if result.max_error == SAME:
            return f"Bitwise equal: all {num:,} calls that both have."
        return f"Equal within {result.rtol:g}: the largest relative error of {num:,} calls is {error_text(result.max_error)}."
    found = result.found
    return f"First divergence: {subject(found.divergence)} in {found.place.moment}, {_moment(found.comparison.pass_label, found.divergence)}."


def _moment(pass_label: str, divergence: Divergence) -> str:
    return pass_label if divergence.direction == OPTIMIZER else f"{pass_label}, {divergence.direction}"


def subject(divergence: Divergence) -> str:
    """Return what is at fault, in a few words."""
    if divergence.kind is Kind.INPUTS:
        return "what comes in from outside of the model" if divergence.direction != BACKWARD else "the gradient that the loss sends back"
    name = f"{divergence.module} ({divergence.module_class})" if divergence.module_class else divergence.module
    return name


def explanation(result: Comparison) -> Iterator[str]:
    """Yield what is known of the first divergence, a sentence a line."""
    found = result.found
    if found is None:
        return
    divergence, stage = found.divergence, found.comparison
    if stage.drift:
        yield (
            f"The model computes in {stage.drift}: errors are expected from the first module on, and grow. "
            + (f"No module adds more than ten times the round-off; this one adds most, {ratio_text(divergence)} what went in."
               if divergence.grown else "This module adds far more than that round-off.")
        )  # fmt: skip
    yield reason(divergence)
    yield f"At {divergence.entry}, {divergence.path}: relative error {error_text(divergence.error)} ({divergence.what})."
    if stage.after_mini_batch is not None:
        yield f"It is so after optimizer step {stage.after_mini_batch} of the stage: look at its gradients, and at the optimizer."
    if stage.first is not None:
        yield f"Errors pass {result.rtol:g} first, by slow growth, at {stage.first.module or 'the inputs'} ({error_text(stage.first.error)})."
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
        return f"No module makes it alone: its inputs have an error already ({error_text(divergence.base)}), and it grows."
    clean = "equal" if divergence.base <= 0 else f"within {error_text(divergence.base)}"
    is_backward = divergence.direction == BACKWARD
    match divergence.kind:
        case Kind.OPTIMIZER:
            others = _how_many(divergence, "modules whose weights differ")
            if math.isnan(divergence.base):
                return f"The weights that the optimizer makes differ; its gradients were not captured. {others}"
            return f"The weights that the optimizer makes differ, though its gradients are {clean}: the fault is in the optimizer. {others}"
        case Kind.OPTIMIZER_GRADIENT:
            others = _how_many(divergence, "modules whose gradients differ")
            if math.isnan(divergence.base):
                return f"The gradient that the optimizer gets differs; those of single passes were not captured. {others}"
            where = "it went wrong where they are added up, reduced over ranks and clipped"
            return f"The gradient that the optimizer gets differs, each pass's is {clean}: {where}. {others}"
        case Kind.PARAMETER_GRADIENT:
            return f"The gradient of its parameters differs, while the gradient that comes in is {clean}."
        case Kind.INPUTS if is_backward:
            return f"The forward pass is {clean}; the loss, its inputs (advantages, old log-probabilities, mask) or its scale differ."
        case Kind.INPUTS:
            return "The inputs differ already: other tokens, positions or masks. The model is not at fault."
        case Kind.INSIDE:
            what = "the gradient that comes in at" if is_backward else "the input of"
            return f"Its own code, between the modules in it: what the modules before gave is {clean}, {what} {divergence.seen_at} is not."
        case _:
            what = "The gradient that comes in is" if is_backward else "Its inputs and parameters are"
            return f"{what} {clean}, what it computes is not: the fault is in this module."


def _how_many(divergence: Divergence, what: str, *, first: bool = False) -> str:
    """Return whether other modules show the same."""
    differing, there = divergence.num_differing, divergence.num_with_parameters
    if differing > 1:
        return f"It is the {'first' if first else 'one that differs most'} of {differing} {what}, of {there}."
    return f"No other of {there} {what.replace(' whose', ' has', 1).replace(' differ', ' that differ')}." if there > 1 else ""


def ratio_text(divergence: Divergence) -> str:
    """Return how many times the error of what went in the error is."""
    return f"{divergence.error / divergence.base:.1f}×" if divergence.base > 0 else "out of"


def samples_text(samples: Samples) -> str:
    """Return whose tokens differ."""
    if not samples.differing:
        return "No prompt or response differs beyond the limit by its sums: the difference is in single elements."
    return f"{_share_of(samples)} differ: {joined(samples.differing)}." if _is_part(samples) else f"{_share_of(samples)} differ."


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
    yield f"Only {joined(found.ranks)} of {len(found.all_ranks)} ranks {verb} it. First elsewhere: {joined(found.later)}."


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
    columns = ["module", "of", "error", *(["went in"] if with_base else []), *([] if alone else ["where"]), *(["pass"] if has_passes else [])]
    left = {0, 1} | {index for index, column in enumerate(columns) if column in ("where", "pass")}
    table = _table(f"{title}, {places.pop()}" if alone else title, *columns, left=left)
    for row in rows:
        base, where = [error_text(row.base)] if with_base else [], [] if alone else [row.place]
        _add(table, row.module, row.what, error_text(row.error), *base, *where, *([row.pass_label] if has_passes else []))
    return table


def _stage_table(stages: Sequence[StageComparison], rtol: float) -> Table:
    shown = list(stages)
    title = "Steps, stages and ranks"
    if len(shown) > MAX_LINES:
        worst = sorted(shown, key=lambda stage: -stage.max_error)[: MAX_LINES // 2]
        keep = {id(stage) for stage in shown[: MAX_LINES // 2] + worst}
        shown = [stage for stage in shown if id(stage) in keep]
        title += f" ({len(shown)} of {len(stages)}: the first, and the worst)"
    table = _table(title, "step and stage", "rank", "calls", "largest error", "first divergence", left=(0, 1, 4))
    for stage in shown:
        first = "–" if stage.divergence is None else f"{subject(stage.divergence)}, {stage.pass_label}"
        style = "red" if stage.divergence is not None else ""
        _add(table, stage.place.moment, stage.place.rank_name, f"{stage.num_common:,}", error_text(stage.max_error), first, style=style)
    return table


def _shortened(notes: list[str]) -> list[str]:
    return notes[:8] + ([f"and {len(notes) - 8} more notes like these"] if len(notes) > 8 else [])


def health_renderables(health: Health) -> Iterator[RenderableType]:
    """Yield the parts of a report on single captures in the order in which they are read."""
    first = health.first
    yield Text(health.name, style="bold")
    yield _panel(health_headline(health), list(_health_explanation(health)), good=first is None)
    for stage in [first] if first is not None else []:
        table = _table(f"Modules with NaN or Inf, {stage.place.moment}, {stage.place.rank_name}, in execution order", *_UNUSUAL, left=range(4))
        for row in stage.bad:
            _add(table, row.module, row.direction, row.path, row.what)
        yield table
    if unusual := [(stage, row) for stage in health.stages for row in stage.unusual]:
        unusual.sort(key=lambda found: -found[1].weight)
        table = _table("Large values, zeros, subnormal numbers", *_UNUSUAL, "where", left=range(5))
        seen: set[tuple[str, str]] = set()
        for stage, row in unusual:
            if (row.module, row.path) not in seen and len(seen) < 20:
                seen.add((row.module, row.path))
                _add(table, row.module, row.direction, row.path, row.what, f"{stage.place.moment}, {stage.place.rank_name}")
        yield table
    table = _table("Steps, stages and ranks", "step and stage", "rank", "calls", "with NaN or Inf", "first", left=(0, 1, 4))
    for stage in health.stages[:MAX_LINES]:
        at = f"{subject(stage.divergence)}, {stage.pass_label}" if stage.divergence else "–"
        _add(table, stage.place.moment, stage.place.rank_name, f"{stage.num_calls:,}", f"{stage.num_bad_calls:,}", at)
    yield table
    for stage in health.stages:
        if stage.note:
            yield Text(f"{stage.place.moment}, {stage.place.rank_name}: {stage.note}", style="dim")


_UNUSUAL = ("module", "pass", "tensor", "what")


def health_headline(health: Health) -> str:
    """Return the answer in one sentence."""
    first = health.first
    if first is None or first.divergence is None:
        return f"No NaN and no Inf in {sum(stage.num_calls for stage in health.stages):,} calls of {len(health.stages)} captures."
    return f"First NaN or Inf: {subject(first.divergence)} in {first.place.moment}, {_moment(first.pass_label, first.divergence)}."


def _health_explanation(health: Health) -> Iterator[str]:
    first = health.first
    if first is None or first.divergence is None:
        return
    divergence = first.divergence
    yield _HEALTH_REASONS[divergence.kind].format(seen_at=divergence.seen_at)
    yield f"At {divergence.entry}, {divergence.path}: {divergence.what}."
    if first.samples is not None and first.samples.differing:
        yield f"{_share_of(first.samples)} hold it: {joined(first.samples.differing)}."
    all_ranks = [stage.place.rank_name for stage in health.stages if stage.place.order == first.place.order]
    if len(all_ranks) > 1:
        yield f"Ranks with NaN or Inf in this stage: {joined(health.ranks)}, of {len(all_ranks)}."


_HEALTH_REASONS = {
    Kind.OUTPUT: "What goes into it is finite, what it computes is not: the fault is in this module.",
    Kind.INSIDE: "It comes from its own code between the modules in it: it is first seen in what {seen_at} gets.",
    Kind.INPUTS: "It comes from outside of the model.",
    Kind.PARAMETERS: "Its parameters hold it before it runs: an optimizer step, a checkpoint or a weight sync.",
    Kind.PARAMETER_GRADIENT: "The gradient that comes in is finite, that of its parameters is not.",
    Kind.OPTIMIZER_GRADIENT: "Adding up the gradients of the passes, reducing them over ranks or clipping them makes it.",
    Kind.OPTIMIZER: "The optimizer makes it of finite gradients.",
}


def comparison_json(result: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values: errors as numbers, "inf" where tensors cannot be compared."""
    found = result.found
    first: dict[str, Any] | None = None
    if found is not None:
        stage = found.comparison
        first = _place_json(found.place) | _divergence_json(found.divergence) | {
            "pass": stage.pass_label, "reason": reason(found.divergence), "remarks": stage.remarks,
            "ranks": found.ranks, "all_ranks": found.all_ranks, "drift": stage.drift, "after_optimizer_step": stage.after_mini_batch,
            "samples": list(stage.samples.differing) if stage.samples else None, "num_samples": stage.samples.total if stage.samples else None,
        }  # fmt: skip
    return {
        "a": result.name_a, "b": result.name_b, "rtol": result.rtol, "headline": headline(result),
        "bitwise_equal": result.max_error == SAME and not result.missing, "max_error": _number(result.max_error), "first_divergence": first,
        "largest": [_row_json(row) for row in result.largest], "jumps": [_row_json(row) for row in result.jumps],
        "stages": [
            _place_json(stage.place) | {
                "rank": stage.place.rank_name, "calls": stage.num_common, "max_error": _number(stage.max_error),
                "bitwise_equal": stage.is_same, "only_a": len(stage.only_a), "only_b": len(stage.only_b),
                "first_divergence": _divergence_json(stage.divergence) if stage.divergence else None,
            }
            for stage in result.stages
        ],
        "missing": result.missing,
        "notes": [*result.notes, *(note for stage in result.stages for note in stage.notes)],
    }  # fmt: skip


def health_json(health: Health) -> dict[str, Any]:
    """Return a report on single captures as plain values."""
    first = health.first
    return {
        "captures": health.name, "headline": health_headline(health),
        "first": None if first is None or first.divergence is None else _place_json(first.place) | _divergence_json(first.divergence) | {
            "pass": first.pass_label, "ranks": health.ranks,
            "samples": list(first.samples.differing) if first.samples else None,
        },
        "stages": [
            _place_json(stage.place) | {"rank": stage.place.rank_name, "calls": stage.num_calls, "with_nan_or_inf": stage.num_bad_calls}
            for stage in health.stages
        ],
    }  # fmt: skip


def _place_json(place: Place) -> dict[str, Any]:
    return {"step": place.step, "step_b": place.step_b, "stage": place.stage, "stage_b": place.stage_b, "call": place.call}


def _divergence_json(divergence: Divergence) -> dict[str, Any]:
    return {
        "kind": str(divergence.kind), "module": divergence.module, "class": divergence.module_class, "direction": divergence.direction,
        "entry": divergence.entry, "tensor": divergence.path, "error": _number(divergence.error), "error_before": _number(divergence.base),
        "what": divergence.what, "pass_index": divergence.pass_index, "grown": divergence.grown, "seen_at": divergence.seen_at or None,
    }  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "module": row.module, "class": row.module_class, "of": row.what, "error": _number(row.error), "error_before": _number(row.base),
        "entry": row.entry, "tensor": row.path, "what": row.detail, "where": row.place, "pass": row.pass_label,
    }  # fmt: skip


def _number(error: float) -> float | str | None:
    if math.isnan(error):
        return None
    return "inf" if math.isinf(error) else max(error, 0.0)
