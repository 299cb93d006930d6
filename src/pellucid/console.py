"""The one place console output goes through: a shared rich console and the notices printed once a run.

Commands and the loop print through `console`; libraries log. Progress bars are made by `progress()` so that all look alike.
"""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False)

_said: set[str] = set()


def notice(message: str, *, style: str = "yellow") -> None:
    """Print one line; a line already printed in this process is not repeated."""
    if message not in _said:
        _said.add(message)
        console.print(message, style=style, markup=False)


def progress(*, transient: bool = False) -> Progress:
    """Return a progress display with a bar, counts, elapsed time and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}"),
        console=console,
        transient=transient,
    )
