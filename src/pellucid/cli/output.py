"""Files that an option of a command asks for: a page, JSON. The command makes the text; it lands whole or not at all."""

import errno
import os
from pathlib import Path

from pellucid.console import console
from pellucid.errors import UserError
from pellucid.rundir import atomic_write


def write_output(path: Path, text: str, option: str, shown: str) -> None:
    """Write the file that `option` names and say where it is, as `shown`.

    Raises:
        UserError: there is a folder, or no right to write there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        atomic_write(path, text)
    except (IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError) as error:
        raise UserError(option, f"'{path}' cannot be written ({error.strerror}).", "Name a file in a folder of yours.") from error
    console.print(f"{shown}: {path}", markup=False, soft_wrap=True)
