"""Row sources: jsonl and parquet files, hub data sets (`owner/name`) and tasks (`task:NAME?key=value&key=value`).

`load_rows` turns the value of `data.train_files` or `data.val_files` into one list of row dictionaries.
"""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pellucid.errors import UserError, did_you_mean
from pellucid.tasks import get_task
from pellucid.tasks.files import existing_file, load_hub, read_jsonl, read_parquet

TASK_PREFIX = "task:"
READERS = {".jsonl": read_jsonl, ".parquet": read_parquet}


def load_rows(files: str | Sequence[str], field: str, split: str) -> list[dict[str, Any]]:
    """Return the rows of one source, or of several one after the other.

    Args:
        files: a path, hub id or `task:` URI, or a list of them. `?split=NAME` on a hub id or task picks another split,
            `?name=CONFIG` a hub data set's configuration.
        field: the config key that names them, for the error text.
        split: `train`, `val` or `test`; ignored by files.

    Returns:
        Row dictionaries; each has a `data_source`, which is the source's name unless the row brings its own.

    Raises:
        UserError: a missing, damaged or empty file, an unknown task, argument, format or hub data set.
    """
    sources = [files] if isinstance(files, str) else list(files)
    if not sources:
        raise UserError(field, "the list is empty.", "Name at least one file, hub id or task.")
    return [row for source in sources for each in _expanded(source) for row in _load_source(each, field, split)]


def hub_names(files: str | Sequence[str]) -> list[str]:
    """Return which of the sources are on the hub."""
    sources = [files] if isinstance(files, str) else files
    return [name for name in sources if not name.startswith(TASK_PREFIX) and _looks_like_hub_id(name)]


def _expanded(source: str) -> list[str]:
    """Return the files that a pattern such as `$HOME/data/*.parquet` stands for, in order; anything else as it is."""
    if source.startswith(TASK_PREFIX):
        return [source]
    path = os.path.expanduser(os.path.expandvars(source))
    return sorted(glob.glob(path)) or [path] if set(path) & set("*[") else [path]


def _load_source(source: str, field: str, split: str) -> list[dict[str, Any]]:
    if source.startswith(TASK_PREFIX):
        name, args = _parse_query(source.removeprefix(TASK_PREFIX), field)
        return get_task(name).rows(args.pop("split", split), **args)
    if _looks_like_hub_id(source):
        name, args = _parse_query(source, field)
        if unknown := [key for key in args if key not in ("name", "split")]:
            reason = f"'{source}': a hub data set has no argument '{unknown[0]}'."
            raise UserError(field, reason, did_you_mean(unknown[0], ("name", "split")))
        rows = load_hub(name, field, args.get("split", split), args.get("name"))
    else:
        path = existing_file(Path(source).expanduser(), field)
        if path.suffix not in READERS:
            reason = f"'{source}': files that end in '{path.suffix}' are not read."
            raise UserError(field, reason, f"Convert it to {' or '.join(READERS)}.")
        name, rows = path.stem, READERS[path.suffix](path, field)
    for row in rows:
        row.setdefault("data_source", name)
    return rows


def _looks_like_hub_id(source: str) -> bool:
    """Say whether `source` reads `owner/name` and cannot be meant as a path here."""
    base = source.partition("?")[0]
    owner, _, name = base.partition("/")
    is_path = base.startswith((".", "~", "/")) or Path(base).exists() or Path(base).suffix in READERS
    return bool(owner and name) and "/" not in name and not is_path and not Path(owner).is_dir()


def _parse_query(uri: str, field: str) -> tuple[str, dict[str, str]]:
    """Split `NAME?key=value&key=value`; a plus sign stays a plus sign, `%26` is an ampersand."""
    name, _, query = uri.partition("?")
    args: dict[str, str] = {}
    for part in query.split("&") if query else []:
        key, equals, value = part.partition("=")
        if not equals or not key or key in args:
            problem = "given twice" if key in args else "not key=value"
            raise UserError(field, f"'{uri}': '{part}' is {problem}.", "Write task:NAME?key=value&key=value")
        args[key] = unquote(value)
    return name, args
