"""Files of JSON objects, one a line, compressed: they appear whole or not at all, and damage to them is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

from pellucid.errors import UserError
from pellucid.files.rundir import atomic_open


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write one object a line, atomically; values that JSON does not know are written as text."""
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with atomic_open(path) as raw, compressor.stream_writer(raw, closefd=False) as compressed:
        for record in records:
            compressed.write(json.dumps(record, default=str).encode() + b"\n")


def read_lines(path: Path, remedy: str, holding: str = "") -> list[dict[str, Any]]:
    """Return the objects that `write_lines` wrote, of lines that hold a text as it is written there.

    Raises:
        UserError: the file is missing, truncated or altered; `remedy` says what to do then.
    """
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        lines = decompressor.decompress(path.read_bytes())
        if not decompressor.eof or decompressor.unused_data:
            raise UserError(str(path), "is truncated or has bytes added to it.", remedy)
        return [json.loads(line) for line in lines.splitlines() if holding.encode() in line]
    except FileNotFoundError as error:
        raise UserError(str(path), "does not exist.") from error
    except (zstandard.ZstdError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"is damaged ({error}).", remedy) from error
