"""Import-path plug-ins: `package.module:name` or `path/to/file.py:name` becomes the Python object.

Used by custom rewards, datasets, estimators and losses; every failure names the config key that asked for it.
"""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from pellucid.errors import UserError, did_you_mean


def load_object(spec: str, field: str) -> Any:
    """Return the function or class that `spec` names.

    Args:
        spec: `pkg.mod:name` or `file.py:name`.
        field: the config key, for the error text.

    Raises:
        UserError: the spec has no colon, the file or module is missing or fails to import, or the name is not in it,
            or not to be called.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        remedy = "Write it as 'package.module:name' or 'file.py:name'."
        raise UserError(field, f"'{spec}' is not an import path.", remedy)
    path = Path(place).expanduser().resolve() if place.endswith(".py") else None
    there = Path(place).expanduser()
    if path is None and (there.is_file() or (there.exists() and not place.isidentifier())):  # else it may be a package
        raise UserError(field, f"'{place}' is no Python file.", "Name one that ends in .py, or package.module:name.")
    if path is not None and not path.is_file():
        remedy = "Give a path relative to the current folder, or an absolute one."
        raise UserError(field, f"the file '{path}' does not exist.", remedy)
    try:
        module = importlib.import_module(place) if path is None else _run_file(path)
    except (Exception, SystemExit) as error:
        reason = f"'{place}' fails when it is imported ({what_failed(error, spec)})."
        raise UserError(field, reason, "Mend it, or put its folder on PYTHONPATH.") from error
    if name not in vars(module):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise UserError(field, f"'{place}' has no '{name}'.", did_you_mean(name, public))
    found = vars(module)[name]
    if not callable(found):
        raise UserError(field, f"'{spec}' is of type {type(found).__name__}, not a function.", "Name a function.")
    return found


def _run_file(path: Path) -> ModuleType:
    name = f"pellucid_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def what_failed(error: BaseException, spec: str) -> str:
    """Return type and message of what a user's code raised, and the line of the file that `spec` names it came from."""
    module = spec.rpartition(":")[0]
    if not module.endswith(".py"):
        module = (module in sys.modules and sys.modules[module].__file__) or ""
    path = Path(module).expanduser().resolve()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    place = f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return f"{type(error).__name__}{': ' * bool(str(error))}{error}{place}"
