"""What ends a run because of one of its ranks; free of Ray, so that every run can catch it."""

import re
from pathlib import Path

from pellucid.errors import RunFailedError


class RankFailedError(RunFailedError):
    """A rank died, stalled, or raised what no user can mend; the message ends with the last lines of its log."""

    def __init__(self, where: str, what: str, log: Path) -> None:
        super().__init__(f"{where}: {what}\n{_tail(log)}")


def _tail(log: Path, num_lines: int = 15) -> str:
    """Return the end of a rank's log, indented."""
    if not log.is_file():
        return f"  (no log at {log})"
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 8192))
        text = handle.read().decode(errors="replace")
    # A restarted rank goes on in the same file: what the process before it wrote is not its own.
    began = [match.start() for match in re.finditer(r"rank \d+ of \d+, process", text)]
    lines = text[began[-1] if began else 0 :].splitlines()[-num_lines:]
    return "\n".join([f"  last lines of {log}:", *(f"  | {line}" for line in lines)])
