"""The exceptions that the command line prints as one message, and the nearest-name search their texts use.

Every room raises `UserError` for a mistake that the user can mend (status 2), and `RunFailedError` for what ends a run
although its input is right (status 1). Engines and the NaN sentinel raise `NonFiniteError` (status 1): the run saves
what the stage worked on.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pellucid.types import MiniBatch

UPDATED_WEIGHTS = "norm of the updated weights"
"""The quantity that is not finite where an optimizer step itself spoiled the weights."""
NORMALISER = "the normaliser of a next-token distribution"
"""The quantity that is not finite where no token can be drawn."""


class UserError(ValueError):
    """A mistake in the user's input: which field, why it cannot work, and what to do about it.

    Args:
        field: the config key, file or option at fault, spelled as the user spells it.
        reason: one sentence that says what is wrong, with the offending value.
        remedy: one sentence that says what to do; empty when the reason already says it.
    """

    def __init__(self, field: str, reason: str, remedy: str = "") -> None:
        self.field, self.reason, self.remedy = field, reason, remedy
        super().__init__(f"{field}: {reason}" + (f" {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return UserError, (self.field, self.reason, self.remedy)


class MissingExtraError(UserError):
    """An optional package is needed but not installed; the remedy names the extra."""

    def __init__(self, field: str, package: str, extra: str) -> None:
        reason = f"needs the package '{package}', which is not installed."
        super().__init__(field, reason, f"Install it with: pip install 'pellucid[{extra}]'")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class RunFailedError(RuntimeError):
    """A run cannot go on although its input is right; the message says why, and the run's log has the traceback."""


class NonFiniteError(RuntimeError):
    """NaN or Inf in a loss, gradient, weight, logit or a module's output: which quantity, and the rows it was found in.

    Args:
        quantity: what is not finite.
        value: NaN or Inf.
        rows: of the batch, or of the mini-batch until a role counts them in the batch.
        mini_batch: which rows were trained on, in an update.
    """

    def __init__(self, quantity: str, value: float, rows: list[int], mini_batch: MiniBatch | None = None) -> None:
        super().__init__(quantity, value, rows)
        self.quantity, self.value, self.rows, self.mini_batch = quantity, value, rows, mini_batch
        self.origin = ""
        """A sentence that says where it began, once a repetition has shown that."""
        self.folder: Path | None = None
        """The folder that holds what it was computed from, once that is saved."""

    def __str__(self) -> str:
        at = f" at samples {self.rows[:8]}{'…' if len(self.rows) > 8 else ''}" if self.rows else ""
        origin = f". {self.origin.removesuffix('.')}" if self.origin else ""
        return f"{self.quantity} is {self.value}{at}{origin}"

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[Any, ...]]:
        return NonFiniteError, (self.quantity, self.value, self.rows, self.mini_batch)


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice spelled most like `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the nearest choice, or the list of all choices when none is close."""
    options = list(choices)
    match = nearest(name, options)
    return f"Did you mean '{match}'?" if match else f"Valid: {', '.join(sorted(options))}."
