"""Where the roles run: in the controller's process (`local`), or on ranks that Ray starts (`ray`)."""

import re
from pathlib import Path

from pellucid.errors import RunFailedError


class RankFailedError(RunFailedError):
    """A rank or replica died, stalled, or raised what no user can mend; the message ends with its log's last lines."""

    def __init__(self, where: str, what: str, log: Path) -> None:
        super().__init__(f"{where}: {what}\n{_tail(log)}")


def _tail(log: Path, num_lines: int = 15) -> str:
    """Return the end of a process' log, indented."""
    if not log.is_file():
        return f"  (no log at {log})"
    # A restarted process goes on in the same file: what the process before it wrote is not its own.
    *_, own = re.split(r"(?m)(?=^.*, process \d+ on )", log.read_text(errors="replace"))
    return "\n".join([f"  last lines of {log}:", *(f"  | {line}" for line in own.splitlines()[-num_lines:])])
