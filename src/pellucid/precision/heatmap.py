"""Draws a comparison as one page: what the command says, and by stage modules in execution order by steps.

A static page of tables: the browser's own search finds a module, a cell's tooltip has the number.
"""

import io
import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from pellucid.precision.capture_table import SAME
from pellucid.precision.compare import Comparison
from pellucid.precision.text import comparison_renderables, error_text

_ASSETS = Path(__file__).parents[1] / "assets"


def level(error: float) -> str:
    """Return the class of a cell's colour: one a factor of ten from 1e-8 to 1."""
    if error == SAME:
        return "same"
    return "broken" if math.isinf(error) else f"e{min(max(math.ceil(math.log10(max(error, 1e-9))), -8), 0) + 8}"


def heatmap_page(result: Comparison) -> str:
    """Return the page."""
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
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined)
    environment.filters["level"] = level
    template = environment.get_template("precision_heatmap.html.j2")
    return template.render(result=result, said=said, stages=stages, first=result.divergence)
