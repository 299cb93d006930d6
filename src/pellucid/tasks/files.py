"""Reading rows from jsonl files, parquet files and the hub; a broken file gives its name and the line.

Used by the tasks that ship as files and by `data/`. The heavy libraries are imported only when a file needs them.
"""

import json
from pathlib import Path
from typing import Any

from pellucid.errors import UserError, nearest

_HUB_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test"), "test": ("test",)}


def existing_file(path: Path, field: str) -> Path:
    """Return `path` when it is a file; otherwise raise with the nearest file name in its folder."""
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError(field, f"'{path}' is a folder.", "Name the files in it.")
    folder = path.parent
    if not folder.is_dir():
        raise UserError(field, f"the file '{path}' does not exist; neither does the folder '{folder.resolve()}'.")
    names = [entry.name for entry in folder.iterdir()]
    match = nearest(path.name, names)
    none_near = f"The folder has {len(names)} files, none with a similar name."
    remedy = f"Did you mean '{folder / match}'?" if match else none_near
    raise UserError(field, f"the file '{path}' does not exist (seen from '{Path.cwd()}').", remedy)


def read_jsonl(path: Path, field: str) -> list[dict[str, Any]]:
    """Return the rows of a jsonl file; blank lines are skipped.

    Raises:
        UserError: missing or empty file, or a line that is not a JSON object (with file and line number).
    """
    rows = []
    with existing_file(path, field).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(field, f"{place} is not valid JSON ({error}).", "Mend or remove that line.") from error
            if not isinstance(row, dict):
                remedy = 'Each line must be an object: {"prompt": ...}'
                raise UserError(field, f"{place} holds a {type(row).__name__}.", remedy)
            rows.append(row)
    if not rows:
        raise UserError(field, f"the file '{path}' holds no rows.")
    return rows


def read_parquet(path: Path, field: str) -> list[dict[str, Any]]:
    """Return the rows of a parquet file as plain Python values.

    Raises:
        UserError: missing, damaged or empty file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(existing_file(path, field)).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(field, f"'{path}' is not a whole parquet file ({error}).") from error
    if not rows:
        raise UserError(field, f"the file '{path}' holds no rows.")
    return rows


def load_hub(dataset: str, field: str, split: str, name: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of the hub data set `owner/name`, in the configuration `name` where it has several.

    `split` may be the data set's own name; `val` takes its validation split, or its test split when it has none.

    Raises:
        UserError: the hub cannot be reached, or has no such data set, configuration or split.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        available = datasets.get_dataset_split_names(dataset, name)
        chosen = next((option for option in _HUB_SPLITS.get(split, (split,)) if option in available), None)
        if chosen is None:
            reason = f"hub data set '{dataset}' has no split '{split}'; it has {', '.join(available)}."
            raise UserError(field, reason, f"Write {dataset}?split=NAME")
        return list(datasets.load_dataset(dataset, name, split=chosen))  # pyright: ignore
    except UserError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        first_line = str(error).strip().partition("\n")[0]
        reason = f"hub data set '{dataset}' cannot be read ({type(error).__name__}: {first_line})."
        remedy = "Check the name and the connection, or name a local .jsonl or .parquet file."
        raise UserError(field, reason, remedy) from error
