"""Draws a comparison as one page: modules in execution order by steps, coloured by relative error.

From a `Comparison` to HTML; the template `assets/precision_heatmap.html.j2` draws on a canvas, so hundreds of modules
by a hundred steps stay quick.
"""

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pellucid.precision.calls import FORWARD
from pellucid.precision.capture_table import SAME
from pellucid.precision.compare import GRADIENTS, INPUTS, OUTPUT, PARAMETERS, QUANTITIES, Comparison, StageComparison
from pellucid.precision.divergence import Divergence, Kind
from pellucid.precision.text import error_text, explanation, headline, joined

_ASSETS = Path(__file__).parents[1] / "assets"
MAX_ROWS = 2000
"""Rows of the picture; a capture of operators alone can have more."""
NOT_CAPTURED, EQUAL, AGREES, BROKEN = 0, 1, 2, 65535
"""Codes of a cell: no value; equal bit for bit; equal statistics; NaN counts, shapes or integers that differ."""
_FIRST, _PER_DECADE, _LOWEST = 3, 1000, -30.0


def code(error: float) -> int:
    """Return an error as the page stores it: a thousand steps a factor of ten."""
    if math.isnan(error):
        return NOT_CAPTURED
    if error == SAME:
        return EQUAL
    if error <= 10.0**_LOWEST:
        return AGREES
    if math.isinf(error):
        return BROKEN
    return min(_FIRST + round((math.log10(error) - _LOWEST) * _PER_DECADE), BROKEN - 1)


@dataclass(frozen=True, slots=True)
class _Column:
    order: tuple[int, ...]
    label: str
    about: str
    group: str
    """What columns next to each other have in common: the stage."""
    nth: int
    """Of its group."""


def heatmap_page(result: Comparison) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["error"] = error_text
    template = environment.get_template("precision_heatmap.html.j2")
    notes = result.missing + result.notes + [note for stage in result.stages for note in stage.notes]
    return template.render(
        result=result,
        headline=headline(result),
        explanation=list(explanation(result)),
        notes=notes[:20],
        data=_data(result),
        quantities=QUANTITIES,
    )


def _data(result: Comparison) -> dict[str, Any]:
    """Return what the page's script draws: names, and by stage and rank a matrix [rows × columns] a quantity."""
    rows, classes = _rows(result.stages)
    keys = {stage_key: None for stage in result.stages for stage_key in _columns(stage, result)}
    columns = sorted(keys, key=lambda column: column.order)
    at_row, at_column = {name: row for row, name in enumerate(rows)}, {column: at for at, column in enumerate(columns)}
    layers: dict[tuple[str, str], np.ndarray] = {}
    for stage in result.stages:
        key = (stage.place.stage_name, stage.place.rank_name)
        matrix = layers.setdefault(key, np.zeros((len(QUANTITIES), len(rows), len(columns)), dtype="<u2"))
        of_pass = _columns(stage, result)
        for (label, number), cell in stage.cells.items():
            if (row := at_row.get(label)) is not None:
                column = at_column[of_pass[number if len(of_pass) > 1 else 0]]
                matrix[:, row, column] = np.maximum(matrix[:, row, column], [code(error) for error in cell])
    return {
        "rows": rows,
        "classes": classes,
        "columns": [{"label": one.label, "about": one.about, "group": one.group, "nth": one.nth} for one in columns],
        "quantities": list(QUANTITIES),
        "layers": [
            {"stage": stage, "rank": rank, "planes": [_packed(plane) for plane in matrix]}
            for (stage, rank), matrix in layers.items()
        ],
        "first": _first(result, at_row, at_column),
        "rtol": result.rtol,
        "code": {"first": _FIRST, "perDecade": _PER_DECADE, "lowest": _LOWEST},
    }


def _packed(plane: np.ndarray) -> str:
    """Return a matrix as base64; empty where nothing was captured."""
    return base64.b64encode(plane.tobytes()).decode() if plane.any() else ""


def _columns(stage: StageComparison, result: Comparison) -> list[_Column]:
    """Return the columns that a stage fills: of several steps one each; of a single step one a pass."""
    place = stage.place
    if len({other.place.step for other in result.stages}) > 1:
        label = place.step_name
        return [_Column((place.step,), label, f"step {label}", "", place.step)]
    return [
        _Column((*place.order, number), str(number + 1), f"{place.moment}, {label}", stage.place.stage_name, number)
        for number, label in enumerate(stage.pass_labels)
    ]


def _rows(stages: list[StageComparison]) -> tuple[list[str], list[str]]:
    """Return the modules of all stages in execution order; what only later stages have follows the one before it."""
    order: list[str] = []
    classes: dict[str, str] = {}
    for stage in stages:
        missing = [name for name in stage.modules if name not in classes]
        if not missing:
            continue
        classes |= {name: stage.modules[name] for name in missing}
        if not order:
            order = missing
            continue
        after: dict[str | None, list[str]] = {}
        last: str | None = None
        known = set(order)
        for name in stage.modules:
            if name in known:
                last = name
            else:
                after.setdefault(last, []).append(name)
        order = after.get(None, []) + [name for old in order for name in (old, *after.get(old, []))]
    return order[:MAX_ROWS], [classes[name] for name in order[:MAX_ROWS]]


def _first(result: Comparison, at_row: dict[str, int], at_column: dict[_Column, int]) -> dict[str, Any] | None:
    """Return where the first divergence is in the picture."""
    found = result.found
    if found is None:
        return None
    divergence = found.divergence
    row = at_row.get(divergence.module, at_row.get(divergence.seen_at))
    columns = _columns(found.comparison, result)
    column = columns[divergence.pass_index] if len(columns) > divergence.pass_index else columns[0]
    return {"row": row, "column": at_column[column], "stage": found.place.stage_name, "ranks": joined(found.ranks),
            "of": _quantity_of(divergence)}  # fmt: skip


def _quantity_of(divergence: Divergence) -> str:
    """Return the quantity that shows a divergence."""
    if divergence.kind in (Kind.PARAMETERS, Kind.OPTIMIZER):
        return PARAMETERS
    if divergence.direction != FORWARD:
        return GRADIENTS
    return INPUTS if divergence.kind in (Kind.INPUTS, Kind.INSIDE) else OUTPUT
