"""What becomes of the files of nsys: it writes them under names of its own, late, and `finish` gives them theirs.

A recorded process notes each capture beside the raw files as it begins, so that what a killed process leaves is found,
too.
"""

import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

from pellucid.observe.manifest import Journal, ProfileFailure, read_journals, shown_path
from pellucid.observe.nsys_process import AFTER_S, DONE, Recording
from pellucid.observe.tools.base import Capture, free_path

REPORT, UNCONVERTED = ".nsys-rep", ".qdstrm"
CONVERT_S, POLL_S = 600.0, 0.1
"""How long converting a file may take, and how often is looked whether nsys is done."""
_numbers = count(1)


def note_capture(recording: Recording, capture: Capture) -> Path:
    """Write down that a capture of this process begins, and return the path that its file will have."""
    number, raw = next(_numbers), Path(recording.raw)
    if recording.capture_range is None:
        kind = "controller" if raw.name == "controller" else "worker"
        name = f"{kind}_process_{capture.pid}"
    else:
        name = f"worker_process_{capture.pid}.{capture.step if capture.stage is None else number}"
    path = free_path(capture.folder.absolute() / (name + report_suffix()))
    if recording.capture_range is None and number > 1:
        return path  # one file holds all, and is named after the first
    note = capture.file(str(path), None, "nsys", raw.name, time.time())
    Journal(raw.parent, raw.name).add(note)
    return path


@cache
def importer() -> str | None:
    """Return the program that makes a report of what nsys collected; None where it is not installed.

    It is beside the folder of nsys itself; Debian puts it where its own nsys does not look for it.
    """
    nsys, on_path = shutil.which("nsys"), shutil.which("QdstrmImporter")
    places = [Path(nsys).resolve().parents[1], Path("/usr/lib/nsight-systems")] if nsys else []
    return on_path or next(
        (str(found) for place in places for found in place.glob("host-linux-*/QdstrmImporter")), None
    )


def report_suffix() -> str:
    """Return the suffix of finished files on this machine."""
    return REPORT if importer() is not None else UNCONVERTED


def finish(folder: Path, journals: Path) -> tuple[list[Path], list[str]]:
    """Wait for what nsys still writes into `folder`, give the files their names, and write them down for the manifest.

    Args:
        folder: the raw files of one start of the run; it is removed.
        journals: folder of the run's journals.

    Returns:
        The files, and what went wrong, for the user.
    """
    notes = sorted(read_journals(folder)[0], key=lambda note: note.started_at)
    deadline = time.monotonic() + AFTER_S + CONVERT_S / 10
    while time.monotonic() < deadline and not all((folder / (note.process + DONE)).exists() for note in notes):
        time.sleep(POLL_S)
    known = {file.path: file for file in read_journals(journals)[0]}
    files, problems, captures = list[Path](), list[str](), Counter[str]()
    for note in notes:
        process, journal = note.process, Journal(journals, note.process)
        captures[process] += 1
        # With one capture nsys leaves its number out.
        names = [f"{process}.{captures[process]}", *[process] * (captures[process] == 1)]
        raws = (folder / f"{name}{suffix}" for name in names for suffix in (REPORT, UNCONVERTED))
        raw = next((path for path in raws if path.exists()), None)
        if raw is None:
            what = f"nsys wrote no file of {note.stage or 'the step'}: {Path(note.path).name}"
            problems.append(f"step {note.step}, {process}: {what}")
            journal.add(ProfileFailure(what, note.step, note.stage, note.role, note.rank, "nsys", process))
            continue
        if raw.suffix == UNCONVERTED:
            raw = _convert(raw, problems)
        path = free_path(Path(note.path).with_suffix(raw.suffix))
        path.parent.mkdir(parents=True, exist_ok=True)
        files.append(Path(shutil.move(raw, path)))
        shown = shown_path(path, journals.parent)
        # What the process itself wrote when the capture ended, if it came to that.
        more = {"units": known[shown].units, "duration_s": known[shown].duration_s} if shown in known else {}
        journal.add(replace(note, path=shown, bytes=path.stat().st_size, **more))
    shutil.rmtree(folder)  # what is left was recorded before the first step to profile
    return files, problems


def _convert(raw: Path, problems: list[str]) -> Path:
    """Make a report of what nsys collected and could not convert itself, or leave it as it is, and say so."""
    program, report, why = importer(), raw.with_suffix(REPORT), "there is no QdstrmImporter here"
    if program is not None:
        command = [program, "--force-overwrite", "--input-file", raw, "--output-file", report]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_S, check=False)
            why = f"QdstrmImporter ended with status {done.returncode}: {done.stderr[-200:]}"
        except subprocess.TimeoutExpired as error:
            why = str(error)
        if report.exists():
            return report
    how = "convert them on a machine with Nsight Systems: QdstrmImporter --input-file FILE"
    if (problem := f"files stay as nsys collected them ({UNCONVERTED}): {why}; {how}") not in problems:
        problems.append(problem)
    return raw
