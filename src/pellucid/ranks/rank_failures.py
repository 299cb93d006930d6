"""What can go wrong with a rank beside the user's mistakes: it raised, it died, or it stopped making progress."""

import re
from pathlib import Path


class RankFailedError(RuntimeError):
    """A rank ended the run; `where` is `actor rank 1`, `log` the file with its output."""

    def __init__(self, where: str, what: str, log: Path) -> None:
        self.where, self.what, self.log = where, what, log
        super().__init__(f"{where}: {what}\n{_tail(log)}")

    def __reduce__(self) -> tuple[type, tuple[str, str, Path]]:
        return type(self), (self.where, self.what, self.log)


class RankRaisedError(RankFailedError):
    """A role's method raised something that is no `UserError`."""


class RankDiedError(RankFailedError):
    """The process is gone: killed, out of memory, or its machine is."""


class RankStalledError(RankFailedError):
    """The process makes no progress, or does not answer."""


def _tail(log: Path, num_lines: int = 15) -> str:
    """Return the end of a rank's log, indented."""
    if not log.is_file():
        return f"  (no log at {log})"
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 8192))
        lines = handle.read().decode(errors="replace").splitlines()
    # A restarted rank goes on in the same file: what the process before it wrote is not its own.
    began = [index for index, line in enumerate(lines) if re.search(r"rank \d+ of \d+, process", line)]
    lines = lines[began[-1] if began else 0 :][-num_lines:]
    return "\n".join([f"  last lines of {log}:", *(f"  | {line}" for line in lines)])
