"""Import-path plug-ins: `package.module:name` or `path/to/file.py:name` becomes the Python object.

Used by custom rewards, datasets, estimators and losses; every failure names the config key that asked for it.
"""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from pellucid.errors import UserError, did_you_mean


def load_object(spec: str, field: str) -> Any:
    """Return the object that `spec` names.

    Args:
        spec: `pkg.mod:name` or `file.py:name`.
        field: the config key, for the error text.

    Raises:
        UserError: the spec has no colon, the file or module is missing or fails to import, or the name is not in it.
    """
    module_spec, _, name = spec.rpartition(":")
    if not module_spec or not name:
        raise UserError(
            field, f"'{spec}' is not an import path.", "Write it as 'package.module:name' or 'file.py:name'."
        )
    if module_spec.endswith(".py"):
        path = Path(module_spec).expanduser().resolve()
        if not path.is_file():
            raise UserError(
                field,
                f"the file '{path}' does not exist.",
                "Give a path relative to the current folder, or an absolute one.",
            )
        module_name = f"pellucid_plugin_{path.stem}"
        loader_spec = importlib.util.spec_from_file_location(module_name, path)
        assert loader_spec is not None and loader_spec.loader is not None
        module = importlib.util.module_from_spec(loader_spec)
        sys.modules[module_name] = module
        try:
            loader_spec.loader.exec_module(module)
        except Exception as error:
            place = "" if isinstance(error, SyntaxError) else f", line {traceback.extract_tb(error.__traceback__)[-1].lineno}"
            raise UserError(
                field, f"the file '{path}' fails when it is imported ({type(error).__name__}: {error}{place}).", "Mend the file."
            ) from error
    else:
        try:
            module = importlib.import_module(module_spec)
        except ImportError as error:
            raise UserError(
                field, f"the module '{module_spec}' cannot be imported ({error}).", "Is it on PYTHONPATH?"
            ) from error
    if name not in vars(module):
        raise UserError(
            field,
            f"'{module_spec}' has no '{name}'.",
            did_you_mean(name, [n for n in vars(module) if not n.startswith("_")]),
        )
    return vars(module)[name]
