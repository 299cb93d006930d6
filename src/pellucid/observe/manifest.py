"""What profiling wrote and what it did not: each process's journal, and the manifest that is made of them all.

A process appends to its own journal as soon as a file is there, so that nothing is lost with it; the controller reads
them all and writes `manifest.json` after every profiled step.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pellucid.console import notice
from pellucid.errors import UserError
from pellucid.files.rundir import atomic_write

JOURNALS, MANIFEST = ".journals", "manifest.json"


@dataclass(slots=True)
class ProfileFile:
    """A file that a capture wrote."""

    path: str
    """Below the manifest's folder, or absolute."""
    bytes: int | None
    """None: another process writes it, and has not finished."""
    tool: str
    role: str
    stage: str | None
    """None: the whole step."""
    step: int
    rank: int
    num_ranks: int
    pid: int
    process: str
    host: str = ""
    """Machine that wrote it; another's may be out of this one's sight."""
    call: int = 1
    """Which run of the stage within the step."""
    window: int = 1
    """Cycle of the schedule."""
    units: dict[str, Any] | None = None
    """`{unit, first, count, of}` of a capture of some units; `of` is how many the stage has."""
    started_at: float = 0.0
    """Seconds since 1970."""
    duration_s: float = 0.0


@dataclass(slots=True)
class ProfileFailure:
    """A capture that gave no file, or less than was asked for."""

    reason: str
    step: int
    stage: str | None
    role: str
    rank: int
    tool: str
    process: str


@dataclass(slots=True)
class Manifest:
    """All that profiling wrote in a run."""

    request: dict[str, Any] = field(default_factory=dict)
    """The config's profiler sections."""
    requested: list[int] = field(default_factory=list)
    profiled: list[int] = field(default_factory=list)
    """Steps that were run with profiling on."""
    files: list[ProfileFile] = field(default_factory=list)
    failures: list[ProfileFailure] = field(default_factory=list)
    complete: bool = False
    """Whether every step asked for was profiled, every file is in place, and nothing failed."""

    def write(self, folder: Path) -> Path:
        """Write `manifest.json` and return its path; that it cannot be written is said."""
        try:
            atomic_write(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            notice(f"profiling: the manifest cannot be written ({error})", style="red")
        return folder / MANIFEST

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder; an empty one where there is none.

        Raises:
            UserError: it is damaged.
        """
        path = folder / MANIFEST
        if not path.exists():
            return cls()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            files = [ProfileFile(**file) for file in content["files"]]
            failures = [ProfileFailure(**failure) for failure in content["failures"]]
            return cls(**content | {"files": files, "failures": failures})
        except (ValueError, KeyError, TypeError) as error:  # of JSON, of UTF-8, or of another version
            reason = f"is no manifest of captures ({type(error).__name__}: {error})."
            raise UserError(str(path), reason, "Move it away to look at the timeline alone.") from error


def add_entry(folder: Path, process: str, entry: ProfileFile | ProfileFailure) -> None:
    """Append an entry, a line, to the journal of a process; it is on disk as soon as it is known."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = "file" if isinstance(entry, ProfileFile) else "failure"
    with (folder / f"{process}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({kind: asdict(entry)}) + "\n")


def read_journals(folder: Path) -> tuple[list[ProfileFile], list[ProfileFailure]]:
    """Return what all processes have written down; of entries for one path the last counts. What is no entry, as half a
    line of a killed process or another version's, is left out.
    """
    files: dict[str, ProfileFile] = {}
    failures: list[ProfileFailure] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                [(kind, values)] = json.loads(line).items()
                if kind == "file":
                    files[values["path"]] = ProfileFile(**values)
                else:
                    failures.append(ProfileFailure(**values))
    return sorted(files.values(), key=lambda file: (file.step, file.started_at)), failures


def manifest_folder(run_dir: Path) -> Path:
    """Return the folder of the run's manifest, in the run's own: captures may go where others' go, too."""
    return run_dir.absolute() / "profile"


def plain_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths` and in their folders."""
    found: list[Path] = []
    for path in paths:
        found += sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]
    return found


def shown_path(path: Path, folder: Path) -> str:
    """Return a path as the manifest of `folder` names it."""
    path, folder = path.absolute(), folder.absolute()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
