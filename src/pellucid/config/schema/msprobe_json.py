"""The JSON config of msprobe, as far as it can be judged without msprobe: form, known keys, and what the run decides
itself.

`precision_debugger.config_path` names it; `load.py` takes its level, and `validate/precision.py` reports what is wrong
with it. What msprobe makes of its keys' values it says when the first capture begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pellucid.config.schema.profiler import PrecisionDebuggerConfig, PrecisionLevel
from pellucid.errors import UserError, did_you_mean

SECTION = "global_profiler.global_tool_config.precision_debugger"
LEVELS: tuple[str, ...] = get_args(PrecisionLevel)
TASKS = ("statistics", "tensor")
_OTHER_TASKS = ("acc_check", "structure", "diff_check", "exception_dump", "nan_check")
_DECIDED = {
    "step": "global_profiler.steps says which steps are captured",
    "rank": "each role's profiler.ranks says which ranks are captured",
    "dump_path": "global_profiler.save_path says where captures go",
    "dump_enable": "global_profiler.steps and the stages say when captures begin and end",
    "load": "a capture leaves what the run computes as it is",
}
"""Keys of msprobe → why they stay empty here."""
_OPTIONS = ("extra_info", "async_dump", "precision", "risk_level", "custom_op_namespaces")
_TASK_OPTIONS = ("scope", "list", "data_mode", "slice", "summary_mode", "tensor_list")
_KEYS = ("task", "level", *_DECIDED, *_OPTIONS, *TASKS, *_OTHER_TASKS)


def read_json(path: str | Path) -> dict[str, Any]:
    """Return what the file holds.

    Raises:
        UserError: it is not there, cannot be read, or holds no JSON object.
    """
    field = f"{SECTION}.config_path"
    if Path(path).suffix != ".json":
        raise UserError(
            field, f"{path} does not end in .json, and msprobe reads no other file.", "Name msprobe's JSON file."
        )
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        here = "" if Path(path).is_absolute() else f" (seen from {Path.cwd()})"
        why = f"{path} cannot be read: {error.strerror or error}{here}."
        raise UserError(field, why, "Name msprobe's JSON file.") from error
    except ValueError as error:
        raise UserError(field, f"{path} is not valid JSON ({error}).", "Mend the file.") from error
    if not isinstance(content, dict):
        raise UserError(field, f"{path} holds no JSON object.", 'Begin with {"task": "statistics", "level": "L0"}.')
    return content


def mistakes(path: str, content: dict[str, Any], settings: PrecisionDebuggerConfig) -> Iterator[UserError]:
    """Yield what is wrong with a file's content, each by the file's name and the key in it."""

    def mistake(key: str, reason: str, remedy: str) -> UserError:
        return UserError(f"{path}, {key}", reason, remedy)

    for key in content:
        if key not in _KEYS:
            yield mistake(key, "msprobe reads no such key here.", did_you_mean(key, _KEYS))
    for key, why in _DECIDED.items():
        if content.get(key) not in (None, [], "", {}):
            yield mistake(key, f"{_shown(content[key])} is not for this file to say: {why}.", "Take it out.")
    task = content.get("task", "statistics")
    if task not in TASKS:
        yield mistake("task", f"{_shown(task)} is not one of {' | '.join(TASKS)}.", "Set it to statistics.")
        return
    level = content.get("level")
    if level is not None and level not in LEVELS:
        yield mistake("level", f"{_shown(level)} is not one of {' | '.join(LEVELS)}.", "Set it to L0.")
    elif level is not None and settings.level not in (None, level):
        yield UserError(
            f"{SECTION}.level", f"is {settings.level}, and {path} has level {level}.", "Remove one of the two."
        )
    options = content.get(task) or {}
    if not isinstance(options, dict):
        yield mistake(task, f"{_shown(options)} is no JSON object.", f'Write "{task}": {{}}.')
        return
    for key in options:
        if key not in _TASK_OPTIONS:
            yield mistake(f"{task}.{key}", "msprobe reads no such key here.", did_you_mean(key, _TASK_OPTIONS))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
