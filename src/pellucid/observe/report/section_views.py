"""Sections of lines and tables: the one model of what is shown, in the terminal and as one page that loads nothing."""

import html
import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table as TextTable
from rich.text import Text

PAGE_COLUMNS = 220
"""Width of a page, in characters."""
_STYLES = {"lead": "bold", "remedy": "cyan", "caveat": "yellow", "note": "dim"}
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>{{stylesheet}} body {{{{ margin: 24px; font: 13px/1.4 monospace; }}}}</style></head>
<body><pre>{{code}}</pre></body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text."""

    text: str
    style: str = ""
    """lead, finding, remedy, caveat or note."""


@dataclass(slots=True)
class Table:
    """Cells of text; `left` says which columns are not figures."""

    columns: tuple[str, ...]
    left: tuple[int, ...] = (0,)
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Append a row."""
        self.rows.append(cells)


Part = Line | Table


@dataclass(slots=True)
class Section:
    """What is read together under one heading."""

    title: str
    parts: list[Part]
    boxed: bool = False
    """Whether it stands out: it is the answer."""


@dataclass(slots=True)
class Document:
    """All that is shown of a report."""

    title: str
    sections: list[Section]


def renderables(document: Document) -> Iterator[RenderableType]:
    """Yield a document's parts for the terminal, in the order in which they are read."""
    for section in document.sections:
        lines = [Text(part.text, style=_STYLES.get(part.style, "")) for part in section.parts if isinstance(part, Line)]
        if section.boxed:
            yield Panel(Group(*lines), title=section.title, title_align="left")
            continue
        yield Text(section.title, style="bold")
        for part in section.parts:
            if isinstance(part, Table):
                yield _text_table(part)
        yield from lines


def _text_table(table: Table) -> TextTable:
    shown = TextTable(header_style="dim", box=None, padding=(0, 1))
    for index, column in enumerate(table.columns):
        is_text = index in table.left
        least = 16 if column == "stage" else None
        shown.add_column(
            column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold", min_width=least
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def page(document: Document) -> str:
    """Return a document as HTML that loads nothing."""
    shown = Console(record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    for part in renderables(document):
        shown.print(part)
    title = html.escape(document.title).replace("{", "{{").replace("}", "}}")
    return shown.export_html(code_format=_PAGE.format(title=title))
