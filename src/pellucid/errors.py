"""The one exception type for mistakes a user can mend, and the nearest-name search its messages use.

Every room raises `UserError`; the command line prints it as field, reason and remedy and exits with status 2.
"""

import difflib
from collections.abc import Iterable


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

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        return UserError, (self.field, self.reason, self.remedy)


class MissingExtraError(UserError):
    """An optional package is needed but not installed; the remedy names the extra."""

    def __init__(self, field: str, package: str, extra: str) -> None:
        super().__init__(
            field,
            f"needs the package '{package}', which is not installed.",
            f"Install it with: pip install 'pellucid[{extra}]'",
        )


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice spelled most like `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the nearest choice, or the list of all choices when none is close."""
    options = list(choices)
    match = nearest(name, options)
    return f"Did you mean '{match}'?" if match else f"Valid: {', '.join(sorted(options))}."
