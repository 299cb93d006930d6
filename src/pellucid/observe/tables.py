"""Tables and figures for people: in the terminal, and as one page that loads nothing."""

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PAGE_COLUMNS = 220
"""Width of a page, in characters."""


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, num_texts: int = 1) -> Table:
    """Return a table of which the first columns are texts, and the others figures."""
    shown = Table(
        title=f"\n{title}", title_style="bold", title_justify="left", header_style="dim",
        box=None, padding=(0, 1), collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for index, column in enumerate(columns):
        is_text = index < num_texts
        folds = index == num_texts - 1  # on a narrow terminal the last text gives way
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=not folds, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def page(parts: Iterable[RenderableType]) -> str:
    """Return what the terminal would show as HTML that loads nothing."""
    shown = Console(record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    for part in parts:
        shown.print(part)
    return shown.export_html()


def seconds(value: float) -> str:
    """Return a duration in the unit that suits it: `4 min 5 s`, `12.3 s`, `45.0 ms`, `6.10 µs`."""
    if value < 5e-7:
        return "0 s"
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    factor, unit = next(((factor, unit) for factor, unit in ((1, "s"), (1e-3, "ms")) if value >= factor), (1e-6, "µs"))
    shown = value / factor
    return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2}f} {unit}"
