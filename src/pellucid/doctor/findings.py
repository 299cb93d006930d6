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

    @classmethod
    def judged(cls, name: str, found: str, remedy: str, status: Status = "warning") -> "Finding":
        """Return a finding that is of `status` if there is a remedy, and ok if there is none."""
        return cls(name, found, status if remedy else "ok", remedy)

    @classmethod
    def of_error(cls, name: str, error: UserError) -> "Finding":
        """Return a mistake that another part of the package found, as a problem."""
        return cls(name, error.reason, "problem", error.remedy or f"Set {error.field} to something else.")
