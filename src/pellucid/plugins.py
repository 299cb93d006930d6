"""Import-path plug-ins: `package.module:name` or `path/to/file.py:name` becomes the Python object.

Used by custom rewards, datasets, estimators and losses; every failure names the config key that asked for it.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.errors import NonFiniteError, UserError, did_you_mean


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
            remedy = "Give a path relative to the current folder, or an absolute one."
            raise UserError(field, f"the file '{path}' does not exist.", remedy)
        module_name = f"pellucid_plugin_{path.stem}"
        loader_spec = importlib.util.spec_from_file_location(module_name, path)
        assert loader_spec is not None and loader_spec.loader is not None
        module = importlib.util.module_from_spec(loader_spec)
        sys.modules[module_name] = module
        try:
            loader_spec.loader.exec_module(module)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if not isinstance(error, SyntaxError):
                what += place_in_user_code(error, spec)
            raise UserError(field, f"the file '{path}' fails when it is imported ({what}).", "Mend it.") from error
    else:
        try:
            module = importlib.import_module(module_spec)
        except ImportError as error:
            reason = f"the module '{module_spec}' cannot be imported ({error})."
            raise UserError(field, reason, "Is it on PYTHONPATH?") from error
    if name not in vars(module):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise UserError(field, f"'{module_spec}' has no '{name}'.", did_you_mean(name, public))
    return vars(module)[name]


@contextmanager
def user_code(spec: str, field: str) -> Iterator[None]:
    """Run the body, a call of the object that `spec` names, and turn what it raises into one message.

    Args:
        spec: the import path, as in `load_object`.
        field: the config key, for the error text.

    Raises:
        UserError: the user's code raised; the message names the error and its file and line there.
    """
    try:
        yield
    except (UserError, NonFiniteError):
        raise
    except Exception as error:
        place = place_in_user_code(error, spec)
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UserError(field, f"'{spec}' fails ({said}{place}).", "Mend the function.") from error


def place_in_user_code(error: BaseException, spec: str) -> str:
    """Return `, line N of file`, the deepest frame in the file that `spec` names; nothing where no frame is in it."""
    module = spec.rpartition(":")[0]
    path = Path(module).expanduser() if module.endswith(".py") else Path(sys.modules[module].__file__ or "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    return f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
