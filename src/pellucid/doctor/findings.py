"""What a check reports: what it looked at, what it found, and one remedy where something is wrong."""

from dataclasses import dataclass
from typing import Literal

from pellucid.errors import UserError

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    """What was looked at, e.g. `memory`."""
    found: str
    """What is there, and what is needed where that is known."""
    status: Status = "ok"
    """A problem ends the run, or keeps it from starting; a warning makes it slow or may end it later."""
    remedy: str = ""
    """One sentence that says what to do; empty when all is well."""

    def __post_init__(self) -> None:
        assert (self.status == "ok") == (self.remedy == ""), f"{self.name}: a remedy goes with a warning or a problem"

    @classmethod
    def of_error(cls, name: str, error: UserError) -> "Finding":
        """Return a mistake that another part of the package found, as a problem."""
        return cls(name, error.reason, "problem", error.remedy or f"Set {error.field} to something else.")


def size(num_bytes: float) -> str:
    """Return bytes as text with a binary unit, e.g. `1.5 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, e.g. `1 rank` or `2 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"
