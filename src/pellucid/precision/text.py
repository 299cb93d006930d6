"""Shows comparisons and reports of captures: the answer first, then the tables behind it.

As rich renderables, which the command prints, as JSON, and as a static page with a heat map, modules by steps: the
browser's own search finds a module, a cell's tooltip has the number.
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template
from rich.console import Console, RenderableType
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
        what = first_mark(one) if result.b else "First NaN or Inf"
        direction = "" if one.direction == OPTIMIZER else f", {one.direction}"
        return f"{what}: {subject(one)} in {one.place.moment}, {one.pass_label}{direction}."
    if result.b is None:
        return f"No NaN and no Inf in {num:,} calls of {len(result.stages)} captures."
    equal = "bitwise equal" if result.max_error == SAME else f"equal within {result.rtol:g}"
    if result.missing:
        return f"Not all could be compared: {joined(result.missing, 1)}. The {num:,} calls that both have are {equal}."
    return f"{equal.capitalize()}: the largest relative error of {num:,} calls is {error_text(result.max_error)}."


def first_mark(one: Divergence) -> str:
    """Return what the module that is named first is: where all modules round, it is not the first with an error."""
    return "Errors grow most" if one.drift and one.grown else "First divergence"


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
        most = f"of those in {one.place.moment} this one adds most, {times} what went in"
        adds = f"No module adds more than ten times the round-off; {most}."
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
        yield _table(title, ["module", "of", *(["error", "went in"] if result.b else ["what"]), "where"], [
            [row.module, row.quantity, *([error_text(row.error), error_text(row.base)] if result.b else [row.what]),
             f"{row.place.where}, {row.pass_label}"]
            for row in result.largest
        ])  # fmt: skip
    stages = [stage for stage in result.stages if stage.divergence] or result.stages
    title = f"{min(len(stages), MAX_STAGES)} of {len(result.stages)} stages, steps and ranks"
    yield _table(title, ["where", "calls", "largest error", "first"], [
        [stage.place.where, f"{stage.num_calls:,}", error_text(stage.max_error) if result.b else "–",
         f"{subject(stage.divergence)}, {stage.divergence.pass_label}" if stage.divergence else "–"]
        for stage in stages[:MAX_STAGES]
    ])  # fmt: skip
    notes = result.missing + result.notes
    more = [f"and {len(notes) - MAX_NOTES} more notes like these"] if len(notes) > MAX_NOTES else []
    yield Text("\n".join(notes[:MAX_NOTES] + more), style="dim")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of rows as they are: names of samples have colons, which rich would take for emoji."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1))
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def comparison_json(result: Comparison) -> dict[str, Any]:
    """Return a comparison or report as plain values: errors as numbers, "inf" where tensors cannot be compared."""
    stages = [
        asdict(stage.place)
        | {"calls": stage.num_calls, "max_error": stage.max_error, "first_divergence": _flat(stage.divergence)}
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


# --- heat map -------------------------------------------------------------------------------------------------------

_HEAT_MAP = Path(__file__).parents[1] / "assets" / "precision_heatmap.html.j2"


def level(error: float) -> str:
    """Return the class of a cell's colour: one a factor of ten from 1e-8 to 1."""
    if error == SAME:
        return "same"
    return "broken" if math.isinf(error) else f"e{min(max(math.ceil(math.log10(max(error, 1e-9))), -8), 0) + 8}"


def heatmap_page(result: Comparison) -> str:
    """Return what `comparison_renderables` shows, and by stage the errors of modules in execution order by steps."""
    stages: dict[str, dict[str, dict[int, tuple[float, str]]]] = {}
    """By stage, module and step the largest error over ranks and quantities, and where it is."""
    for stage in result.stages:
        rows, step = stages.setdefault(stage.place.stage, {}), stage.place.step
        for module, (error, quantity) in stage.modules.items():
            told = f"{module}, step {step}: {quantity} {error_text(error)}, {stage.place.rank}"
            row = rows.setdefault(module, {})
            row[step] = max(row.get(step, (error, told)), (error, told), key=lambda one: one[0])
    console = Console(file=io.StringIO(), record=True, width=180)
    console.print(*comparison_renderables(result))
    said = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    template = Template(_HEAT_MAP.read_text(encoding="utf-8"), autoescape=True, undefined=StrictUndefined)
    first, mark = result.divergence, first_mark(result.divergence) if result.divergence else ""
    return template.render(result=result, said=said, stages=stages, first=first, mark=mark, level=level)
