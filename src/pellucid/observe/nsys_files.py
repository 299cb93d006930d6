"""What becomes of the files of nsys: it writes them under names of its own, late, and `finish` gives them theirs.

A recorded process notes each capture beside the raw files as it begins, so that what a killed process leaves is found,
too.
"""

import json
import re
import shutil
import socket
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from pellucid.observe.manifest import Journal, ProfileFailure, ProfileFile, read_journals, shown_path
from pellucid.observe.nsys_command import OwnNsys
from pellucid.observe.nsys_supervisor import EXPORT_S, STATUS, HungWatch, end, ended_problem, nsys_tree, run_watched
from pellucid.observe.tools.base import Capture, free_path

REPORT, UNCONVERTED = ".nsys-rep", ".qdstrm"
CONVERT_S, POLL_S = 600.0, 0.25
"""How long converting a file may take, and how often nsys is looked at."""
_NOTES = ".captures"
_numbers = count(1)


@dataclass(slots=True)
class Finished:
    """What `finish` found."""

    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_captures: int = 0
    """Captures that the processes began."""


def note_capture(nsys: OwnNsys, capture: Capture) -> Path:
    """Write down that a capture of this process begins, and return its future path."""
    number = next(_numbers)
    if nsys.output is None or not nsys.is_ours:
        output = nsys.output or Path.cwd() / "report1"
        return output.with_name(output.name + report_suffix())
    process = nsys.output.name.rpartition(".")[0]
    kind = "controller" if process == "controller" and nsys.capture_range is None else "worker"
    name = f"{kind}_process_{capture.pid}"
    if nsys.capture_range is not None:
        name += f".{capture.step if capture.stage is None else number}"
    path = free_path(capture.folder.absolute() / (name + report_suffix()))
    note = {"number": number, "path": str(path), "process": process, "started_at": time.time()}
    note |= {"role": capture.role, "stage": capture.stage, "step": capture.step, "call": capture.call}
    note |= {"window": capture.window, "rank": capture.rank, "num_ranks": capture.num_ranks, "pid": capture.pid}
    note |= {"host": socket.gethostname()}
    with nsys.output.with_name(nsys.output.name + _NOTES).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(note) + "\n")
    return path


def note_status(nsys: OwnNsys, status: int) -> None:
    """Write down the exit status of this process, which has nothing left to do but to end."""
    if nsys.is_ours and nsys.output is not None:
        path = nsys.output.with_name(nsys.output.name + STATUS)
        path.write_text(str(status), encoding="utf-8")


@cache
def importer() -> Path | None:
    """Return the program that makes a report of what nsys collected; None where it is not installed.

    Debian puts it where its own nsys does not look for it, so it is looked for beside every link on the way to nsys.
    """
    on_path = shutil.which("QdstrmImporter")
    if on_path is not None:
        return Path(on_path)
    found = shutil.which("nsys")
    while found is not None:
        here = Path(found)
        for program in sorted(here.parent.parent.glob("host-linux-*/QdstrmImporter")):
            return program
        found = str(here.parent / here.readlink()) if here.is_symlink() else None
    return None


@cache
def report_suffix() -> str:
    """Return the suffix of finished files on this machine."""
    nsys = shutil.which("nsys")
    # Without a program to convert it in sight, only an nsys that is a script may know of another place for one.
    is_script = nsys is not None and Path(nsys).read_bytes()[:2] == b"#!"
    return REPORT if importer() is not None or is_script else UNCONVERTED


def finish(folder: Path, journals: Path, *, all_here: bool = True) -> Finished:
    """Wait for what nsys still writes into `folder`, give the files their names, and write them down for the manifest.

    Args:
        folder: the raw files of one start of the run; it is removed.
        journals: folder of the run's journals.
        all_here: whether all recorded processes were on this machine, where it shows whether their nsys still works.
    """
    finished = Finished()
    if not folder.is_dir():
        return finished
    deadline = time.monotonic() + EXPORT_S
    watch = HungWatch(folder, lambda: [process for pid in _at_work(folder) for process in nsys_tree(pid)])
    notes = _read_notes(folder)
    while (working := _at_work(folder)) or (not all_here and not _all_there(folder, notes)):
        if time.monotonic() > deadline:
            who = f" (nsys {', '.join(map(str, working))})" if working else ""
            finished.problems.append(
                f"nsys has not finished its files within {EXPORT_S:.0f} s{who}; what comes later stays in {folder}"
            )
            break
        if watch.hung():
            finished.problems.append(ended_problem(working, hung=True))
            for pid in working:
                end(nsys_tree(pid))
            break
        time.sleep(POLL_S)
    finished.num_captures = len(notes)
    for raw in sorted(folder.iterdir()):
        if raw.suffix in (REPORT, UNCONVERTED):
            _name(raw, notes, journals, finished)
    _report_missing(notes, journals, finished)
    for path in (*folder.glob(f"*{_NOTES}"), *folder.glob(f"*{STATUS}"), *folder.glob("*.log")):
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return finished


def _read_notes(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the captures of each process, by the stem of its raw files and their number."""
    notes = {}
    for path in folder.glob(f"*{_NOTES}"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                note = json.loads(line)
            except json.JSONDecodeError:  # the process was killed while it wrote
                continue
            notes[path.stem, note["number"]] = note
    return notes


def _at_work(folder: Path) -> list[int]:
    """Return the nsys processes of this machine that write into `folder`."""
    found = []
    for process in psutil.process_iter(["name", "cmdline", "status"]):
        info = process.info
        if (
            info["name"] == "nsys"
            and info["status"] != psutil.STATUS_ZOMBIE
            and any(str(folder) in part for part in info["cmdline"] or ())
        ):
            found.append(process.pid)
    return found


def _all_there(folder: Path, notes: dict[tuple[str, int], dict[str, Any]]) -> bool:
    """Tell whether every process that noted a capture has a file, and none has grown for a moment."""

    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix in (REPORT, UNCONVERTED)}

    before = sizes()
    time.sleep(4 * POLL_S)
    stems = {stem for stem, _ in notes}
    return before == sizes() and all(any(name.startswith(f"{stem}.") for name in before) for stem in stems)


def _name(raw: Path, notes: dict[tuple[str, int], dict[str, Any]], journals: Path, finished: Finished) -> None:
    """Convert a raw file if that is still to be done, and move it to its place."""
    match = re.fullmatch(r"([^.]+\.\d+)(?:\.(\d+))?", raw.stem)
    if match is None:
        return
    stem, number = match[1], int(match[2] or 1)
    note = notes.get((stem, number))
    if note is None:  # recorded from start to end, and the run ended before the first step to profile
        raw.unlink()
        return
    target = Path(note["path"])
    if raw.suffix == UNCONVERTED:
        raw = _convert(raw, finished) or raw
    path = free_path(target.with_suffix(raw.suffix))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(raw, path)
    except OSError as error:
        finished.problems.append(f"{raw} cannot become {path}: {error}")
        return
    finished.files.append(path)
    _write_down(path, note, journals)


def _convert(raw: Path, finished: Finished) -> Path | None:
    """Make a report of what nsys collected and could not convert itself; None if that cannot be done here either."""
    program, report = importer(), raw.with_suffix(REPORT)
    how = f"Convert it on a machine with Nsight Systems: QdstrmImporter --input-file {raw.name}"
    if program is None:
        problem = f"there is no QdstrmImporter here, so files stay as nsys collected them ({UNCONVERTED}). {how}"
        if not any("QdstrmImporter here" in said for said in finished.problems):
            finished.problems.append(problem)
        return None
    command = [str(program), "--force-overwrite", "--input-file", str(raw), "--output-file", str(report)]
    try:
        status, output = run_watched(command, raw.parent, CONVERT_S)
        failed = status != 0 or not report.exists()
        said = (output.strip().splitlines() or [f"status {status}"])[-1]
    except OSError as error:  # a time-out among them
        failed, said = True, str(error)
    if failed:
        finished.problems.append(f"{raw.name} stays as nsys collected it: {said}. {how}")
        return None
    raw.unlink()
    return report


def _write_down(path: Path, note: dict[str, Any], journals: Path) -> None:
    """Add a file to the journal of its process, over what the process itself wrote of it, if it came to that."""
    values = {name: value for name, value in note.items() if name not in ("number", "path")}
    shown, size = shown_path(path, journals.parent), path.stat().st_size
    known = {file.path: file for file in read_journals(journals)[0]}
    # What a process that is recorded from start to end wrote last is of its last step, and the note of its first.
    written = {"units": known[shown].units, "duration_s": known[shown].duration_s} if shown in known else {}
    Journal(journals, note["process"]).add(ProfileFile(path=shown, bytes=size, tool="nsys", **values, **written))


def _report_missing(notes: dict[tuple[str, int], dict[str, Any]], journals: Path, finished: Finished) -> None:
    """Say of which captures there is no file."""
    seen = {path.stem for path in finished.files}
    for note in notes.values():
        path = Path(note["path"])
        if path.stem in seen:
            continue
        seen.add(path.stem)
        reason = f"nsys wrote no file of {note['stage'] or 'the step'}: {path.name}"
        values = {name: note[name] for name in ("step", "stage", "role", "rank", "process")}
        Journal(journals, note["process"]).add(ProfileFailure(reason, tool="nsys", **values))
        finished.problems.append(f"step {note['step']}, {note['process']}: {reason}")
