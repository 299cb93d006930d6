"""Files that an option of a command asks for, such as a page or JSON; they land whole or not at all."""

import errno
import os
from pathlib import Path

from pellucid.console import console
from pellucid.errors import UserError
from pellucid.files.rundir import atomic_write


def write_output(path: Path, text: str, option: str, shown: str) -> None:
    """Write the file that `option` names and print its path after the word `shown`.

    Raises:
        UserError: the path is a folder, or the user may not write there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        atomic_write(path, text)
    except (IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError) as error:
        reason = f"'{path}' cannot be written ({error.strerror})."
        raise UserError(option, reason, "Name a file in a folder of yours.") from error
    console.print(f"{shown}: {path}", markup=False, soft_wrap=True)
