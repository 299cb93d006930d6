"""The JSON config of msprobe, as far as it can be judged without msprobe: its form, and what the run decides itself.

`precision_debugger.config_path` names it; `validate/profiling.py` reports what is wrong with it. What msprobe makes of
its own keys, `precision/msprobe.py` asks msprobe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pellucid.config.schema.profiler import PrecisionDebuggerConfig, PrecisionLevel
from pellucid.errors import UserError

SECTION = "global_profiler.global_tool_config.precision_debugger"
_CHOICES: dict[str, tuple[str, ...]] = {"task": ("statistics", "tensor"), "level": get_args(PrecisionLevel)}
_DECIDED = {
    "step": "global_profiler.steps says which steps are captured",
    "rank": "each role's profiler.ranks says which ranks are captured",
    "dump_path": "global_profiler.save_path says where captures go",
    "dump_enable": "global_profiler.steps and the stages say when captures begin and end",
    "load": "a capture leaves what the run computes as it is",
}
"""Keys of msprobe → why they stay empty here."""


def read_json(path: str | Path) -> dict[str, Any]:
    """Return what the file holds.

    Raises:
        UserError: it is not there, cannot be read, or holds no JSON object.
    """
    field, remedy = f"{SECTION}.config_path", 'Name a JSON file, e.g. with {"task": "statistics", "level": "L0"}.'
    if Path(path).suffix != ".json":
        raise UserError(field, f"{path} does not end in .json, and msprobe reads no other file.", remedy)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(field, f"{Path(path).absolute()} cannot be read: {error.strerror or error}.", remedy) from error
    except ValueError as error:
        raise UserError(field, f"{path} is not valid JSON ({error}).", "Mend the file.") from error
    if not isinstance(content, dict):
        raise UserError(field, f"{path} holds no JSON object.", remedy)
    return content


def mistakes(path: str, settings: PrecisionDebuggerConfig) -> Iterator[UserError]:
    """Yield what is wrong with a file that goes with `settings`, its keys named after the file."""
    try:
        content = read_json(path)
    except UserError as error:
        yield error
        return
    for key, why in _DECIDED.items():
        if content.get(key) not in (None, [], "", {}):
            reason = f"{json.dumps(content[key])} is not for this file to say: {why}."
            yield UserError(f"{path}, {key}", reason, "Take it out.")
    for key, choices in _CHOICES.items():
        if content.get(key) not in (None, *choices):
            yield UserError(f"{path}, {key}", f"{json.dumps(content[key])} is not one of {' | '.join(choices)}.")
    level = content.get("level")
    if level in _CHOICES["level"] and settings.level not in (None, level):
        reason = f"is {settings.level}, and {path} has level {level}."
        yield UserError(f"{SECTION}.level", reason, "Remove one of the two.")
