"""The vocabulary the schema is written in: ranges, alias words, what a field follows and what it needs to act.

The sections in `schema/` use these; `convert.py` and `validate/` enforce them and `describe.py` prints them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, ge, gt, le, lt
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
        return abs(value) < float("inf") and all(compare(value, bound) for _, compare, bound in self._bounds())

    def __str__(self) -> str:
        return " and ".join(f"{sign} {bound:g}" for sign, _, bound in self._bounds())

    def _bounds(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        every = ((">", gt, self.gt), ("≥", ge, self.ge), ("<", lt, self.lt), ("≤", le, self.le))
        return [(sign, compare, bound) for sign, compare, bound in every if bound is not None]


@dataclass(frozen=True)
class Alias:
    """Another spelling of a value."""

    word: str | int | None
    means: Any


@dataclass(frozen=True)
class OrImportPath:
    """Beside a `Literal`: a user's own function is allowed too, as `package.module:name` or `file.py:name`."""

    def __str__(self) -> str:
        return "or an import path"


def yaml_word(value: Any) -> str:
    """Return a value as it is written in YAML, text without quotes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_import_path(text: str) -> bool:
    """Tell whether `text` has the form of an import path; whether it leads anywhere is found out on loading."""
    return re.fullmatch(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*", text) is not None


@dataclass(frozen=True)
class Needs:
    """What must hold for a field to act: another key of the config has one of some values, or is switched on."""

    key: str
    """Dotted key or property of the root; a leading dot means the field's own section."""
    values: tuple[str, ...] = ()
    """Values with which the field acts, a function of the user's among them; empty: all but false, null, 0 and []."""
    otherwise: str = ""
    """Why the field does nothing, after "has no effect"; `{0.a.b}` stands for a key. Empty: made from key and value."""
    remedy: str = ""
    """What to set so that the field acts; empty: made from key and values."""

    def missing(self, root: Any, section: str) -> tuple[str, str] | None:
        """Return why a field of `section` does nothing under the config `root`, and the remedy; None where it acts."""
        key = f"{section}{self.key}" if self.key.startswith(".") else self.key
        value: Any = attrgetter(key.lstrip("."))(root)
        if value in self.values or (is_import_path(str(value)) if self.values else value):
            return None
        why = (
            f"with {key.rpartition('.')[2]}: {value}"
            if self.values
            else f"while {key} is {yaml_word(value) or 'empty'}"
        )
        wanted = " or ".join(self.values) or "true"
        remedy = f"Set {key}: {wanted}" if self.values or value is False else f"Set {key}"
        return self.otherwise.format(root) or why, self.remedy or remedy


def option(
    default: Any,
    *,
    link: str | None = None,
    needs: Needs | tuple[Needs, ...] = (),
    follows: tuple[str, type] | None = None,
) -> Any:
    """Return a dataclass field that says more than its type and default.

    Args:
        default: the value, or a callable that makes it (a section's class, `list`).
        link: the interpolation that supplies the value until the key is set, e.g. `${trainer.seed}`; null means
            "follow" too. `default` is what it gives when everything is at its default, for objects built in code.
        needs: what must hold for the field, or for all of the section, to act; to change one that does not is an error.
        follows: another section, and the class whose fields both have; each of them links to the other section's.
    """
    metadata = {"link": link, "needs": (needs,) if isinstance(needs, Needs) else needs, "follows": follows}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
