"""What a run's profile holds: its manifest, its files, and the ranges in its traces."""

import gzip
import json
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

KEPT = ("manifest.json", ".journals")


def manifest(run_dir: Path) -> dict[str, Any]:
    """Return the manifest, after checking that it names the files that are there and no others."""
    folder = run_dir / "profile"
    content = json.loads((folder / "manifest.json").read_text())
    named = {(folder / file["path"]).resolve(): file["bytes"] for file in content["files"]}
    there = {
        path.resolve(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not set(path.relative_to(folder).parts) & set(KEPT)
    }
    outside = {path: size for path, size in named.items() if not path.is_relative_to(folder.resolve())}
    assert named == there | outside
    assert all(path.stat().st_size == size for path, size in outside.items())
    return content


def ranges(path: Path) -> Counter[str]:
    """Return how often each stage and unit is a range of a torch trace."""
    names = Counter(event["name"] for event in trace(path)["traceEvents"] if event.get("cat") == "user_annotation")
    return Counter({name: count for name, count in names.items() if "#" not in name})


def nsys_ranges(report: Path, folder: Path) -> Counter[str]:
    """Return how often each NVTX range is in a report of nsys; of those that a killed process left open, too."""
    database = folder / f"{report.name}.sqlite"
    command = ["nsys", "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
    subprocess.run(command, check=True, capture_output=True)
    texts = "SELECT coalesce(text, (SELECT value FROM StringIds WHERE id = textId)) FROM NVTX_EVENTS"
    with sqlite3.connect(database) as tables:
        return Counter(text for (text,) in tables.execute(texts) if text)


def trace(path: Path) -> dict[str, Any]:
    """Return a torch trace."""
    return json.loads(gzip.decompress(path.read_bytes()))


def captured(content: dict[str, Any]) -> set[tuple[int, str | None, int]]:
    """Return step, stage and rank of each file of a manifest."""
    return {(file["step"], file["stage"], file["rank"]) for file in content["files"]}
