"""The one place console output goes through: two shared rich consoles, their log file, and notices printed once a run.

Commands and the loop print through `console`; libraries log. Progress bars are made by `progress()`, all alike.
"""

import io
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, NewLine
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pellucid.errors import UserError

_log = Console(file=io.StringIO(), force_terminal=False, color_system=None, width=200, soft_wrap=True, highlight=False)
"""What both consoles print, as plain text; kept in memory until `log_to` names a file for it."""


class _LoggedConsole(Console):
    """A console whose output the log gets too, save for what only moves the cursor or redraws a progress bar."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print to the terminal, and to the log where there is one."""
        super().print(*objects, **options)
        if not any(isinstance(item, Control | NewLine) for item in objects):
            _log.print(*objects, **options)


console = _LoggedConsole(highlight=False)
error_console = _LoggedConsole(stderr=True, highlight=False)

_said: set[str] = set()


@contextmanager
def log_to(path: Path, *, goes_on: bool = False) -> Iterator[None]:
    """Append to `path` a line with time and command, and what the process has printed and prints until the block ends.

    `goes_on` leaves the line out, where an earlier block of the same command has written it.

    An exception that ends the block is added, with its traceback unless it is the user's mistake, because it is printed
    after the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    early = _log.file
    assert isinstance(early, io.StringIO), "one log at a time"
    with path.open("a", encoding="utf-8", buffering=1) as file:
        if not goes_on:
            file.write(f"=== {datetime.now(UTC).isoformat(timespec='seconds')} {shlex.join(sys.argv)}\n")
        file.write(early.getvalue())
        _log.file = file
        try:
            yield
        except Exception as error:
            file.write(f"{error}\n" if isinstance(error, UserError) else traceback.format_exc())
            raise
        finally:
            _log.file = io.StringIO()


def notice(message: str, *, style: str = "yellow", about: str | None = None) -> None:
    """Print one line; it, or another one `about` the same, is not repeated in this process."""
    if (about or message) not in _said:
        _said.add(about or message)
        console.print(message, style=style, markup=False)


def progress(*, transient: bool = False) -> Progress:
    """Return a progress display with a bar, counts, elapsed time and time left."""
    bar = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    return Progress(*bar, *times, console=console, transient=transient)
