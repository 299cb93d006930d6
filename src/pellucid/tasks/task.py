"""What every task offers: rows of problems for a split, and a verifier for a response.

A task's arguments are the fields of a dataclass, so that an unknown name is refused with the nearest valid one.
"""

import ast
from abc import ABC, abstractmethod
from dataclasses import Field, fields
from typing import Any, ClassVar

from pellucid.errors import UserError, did_you_mean

SPLITS = ("train", "val", "test")


class Task(ABC):
    """A source of problems together with its verifier."""

    name: str
    """The rows' `data_source`, and the name after `task:`."""
    inline: ClassVar[bool] = True
    """True when `verify` is pure and takes microseconds: it then runs in the caller's process."""
    args_type: type
    """Dataclass of the arguments that `rows` takes."""

    def rows(self, split: str, **args: Any) -> list[dict[str, Any]]:
        """Return the split's problems, in a fixed order that depends on the arguments alone.

        Args:
            split: `train`, `val` or `test`.
            args: fields of `args_type`; text (as in a URI) is converted to the field's type.

        Returns:
            Dictionaries with `prompt`, `answer`, `data_source` and the task's extra columns.

        Raises:
            UserError: an unknown split or argument, or a value out of range.
        """
        if split not in SPLITS:
            raise UserError(f"task:{self.name}", f"there is no split '{split}'.", did_you_mean(split, SPLITS))
        known = {field.name: field for field in fields(self.args_type)}
        for name in args:
            if name not in known:
                raise UserError(f"task:{self.name}", f"there is no argument '{name}'.", did_you_mean(name, known))
        typed = {name: self._convert(known[name], value) for name, value in args.items()}
        return self.make_rows(split, self.args_type(**typed))

    def _convert(self, field: Field, value: Any) -> Any:
        """Return URI text as the type of the field's default: a number, true/false, or the text itself."""
        if not isinstance(value, str) or isinstance(field.default, str):
            return value
        try:
            converted = ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(value, value))
        except (ValueError, SyntaxError):
            converted = value
        if isinstance(field.default, int | float) and not isinstance(converted, int | float):
            reason = f"argument '{field.name}' must be a {type(field.default).__name__}, not '{value}'."
            raise UserError(f"task:{self.name}", reason)
        return converted

    def require(self) -> None:  # noqa: B027  (most need nothing)
        """Check that what `verify` needs is installed.

        Raises:
            MissingExtraError: it is not.
        """

    @abstractmethod
    def make_rows(self, split: str, args: Any) -> list[dict[str, Any]]:
        """Return the rows for checked arguments (an `args_type`)."""

    @abstractmethod
    def verify(self, response: str, answer: Any, extra: dict[str, Any]) -> float | dict[str, Any]:
        """Score one decoded response against the row's answer; `extra` holds the row's other columns."""
