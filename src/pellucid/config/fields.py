"""The vocabulary the schema is written in: ranges, lengths, alias words, defaults that follow another key.

The sections in `schema/` use these; `convert.py` enforces them and `describe.py` prints them.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

MISSING: Any = "???"
"""Default of a key that the user must set."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `gt`/`lt` exclude the bound itself."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def holds(self, value: float) -> bool:
        """Tell whether `value` is within the bounds; NaN and infinities never are."""
        return (
            abs(value) != float("inf")
            and value == value
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        bounds = ((">", self.gt), ("≥", self.ge), ("<", self.lt), ("≤", self.le))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Length:
    """Exact number of entries of a list."""

    count: int

    def holds(self, value: list[Any]) -> bool:
        """Tell whether the list has that many entries."""
        return len(value) == self.count

    def __str__(self) -> str:
        return f"with {self.count} entries"


@dataclass(frozen=True)
class Alias:
    """Another spelling of a choice; `said` is the notice printed when it is used, empty for none."""

    word: str | int | None
    means: Any
    said: str = ""


@dataclass(frozen=True)
class Refused:
    """Words that users of other systems know and this version does not act on, and what to write instead."""

    words: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class OrImportPath:
    """Beside a `Literal`: a user's own function is allowed too, as `package.module:name` or `file.py:name`."""

    def __str__(self) -> str:
        return "or an import path"


def is_import_path(text: str) -> bool:
    """Tell whether `text` has the form of an import path; whether it leads anywhere is found out on loading."""
    return re.fullmatch(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*", text) is not None


def link(target: str) -> dict[str, str]:
    """Return the metadata of a field whose value follows another key unless it is set; null means "follow" too.

    Args:
        target: the interpolation that supplies the value, e.g. `${trainer.seed}`. The field's own default is what it
            gives when everything is at its default, for objects built in code.
    """
    return {"link": target}


NULL_IS_OFF = {"null_is_off": True}
"""Metadata of a section that users may set to null, which leaves all its keys at their defaults."""
NULL_FOLLOWS = {**NULL_IS_OFF, "follows": True}
"""Metadata of a section that takes what is not set from another section, all of it when it is null."""


def link_of(item: dataclasses.Field[Any]) -> str | None:
    """Return the interpolation that a field follows, else None."""
    return item.metadata.get("link")


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Return the default as a YAML value: interpolation, `???` or plain value (sections excluded)."""
    if (link := link_of(item)) is not None:
        return link
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
