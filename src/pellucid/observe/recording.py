"""Recording with nsys: which processes of a run start under it.

`pellucid train` calls `run_recorded` before it loads anything; the Ray placement starts ranks with `RecordedRanks`.
"""

import importlib.metadata
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pellucid.config.schema import RunConfig
from pellucid.console import console, error_console, notice
from pellucid.errors import UserError
from pellucid.observe import nsys_process
from pellucid.observe.captures import controller_request, finish, save_folder
from pellucid.observe.manifest import JOURNALS, ProfileFailure, add_entry, manifest_folder, read_journals, shown_path
from pellucid.observe.nsys_process import AFTER_S, DONE, PROBLEM, VARIABLE, own_recording, record
from pellucid.observe.request import ProcessRequest
from pellucid.observe.tools.base import free_path
from pellucid.observe.tools.nsys import CAPTURE_RANGE, DOMAIN, NSYS_KEY, REPORT, UNCONVERTED, check_nsys, importer

RAW_PREFIX = "nsys-in-progress-"
"""How folders begin in which nsys writes, below `save_path`; one a start of the run, until its files have names."""
_MAIN = (
    "import sys; sys.argv[0] = 'pellucid'; from pellucid.cli.main import main; "
    "from pellucid.observe.nsys_process import run_and_tell; run_and_tell(main)"
)
_OURS = ("output", "force-overwrite", "session-new")
_GPU_TRACES = ("cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "nvvideo")
_GPU_OPTIONS = ("cuda", "gpu")
CONVERT_S, POLL_S = 600.0, 0.1
"""How long converting a file may take, and how often is looked whether nsys is done."""
_INJECTED = ("QUADD_", "NSYS_", "NVTX_INJECTION", "CUDA_INJECTION", "CUBLAS_NVTX", "CUBLASXT_NVTX", "CUPTI_", VARIABLE)


def run_recorded(config: RunConfig, arguments: list[str]) -> int | None:
    """Run `pellucid train` with these arguments under nsys, if the config wants this process recorded and nothing
    records it yet.

    Returns:
        The exit status of that run, whose files are in place; None: the caller is to go on itself, maybe unrecorded.
    """
    run_dir = Path(config.trainer.default_local_dir)
    local = config.trainer.placement == "local"
    request = controller_request(config, run_dir, tuple(config.profilers) if local else (), "cpu")
    if config.trainer.val_only or own_recording() is not None or not _wants_nsys(request):
        return None
    try:
        check_nsys()
    except UserError:
        return None  # `check_tools` finds the same, and says what follows from it
    command = _command(config, "worker" if local else "controller", cuda=has_cuda(config.trainer.device))
    raw, began = _raw_folder(config, run_dir), time.time()
    # As the installed command does, without the current folder among the places of modules.
    status, problem = record(command, raw / "controller", [sys.executable, "-P", "-c", _MAIN, *arguments])
    captured = _finish_files(raw, run_dir)
    if status is None and local:  # Ray's ranks would inherit it
        os.environ[PROBLEM] = problem  # for `check_tools`
    elif problem:
        _say_problems([problem])
    # Otherwise the run did not come to a profiled step, and what earlier starts left has been dealt with.
    if captured:
        finish(config, run_dir, since=began)
    return status


def say_if_recorded() -> bool:
    """Tell whether `run_recorded` started this process, and so ends the run's profiling; say which process it is."""
    if own_recording() is None:
        return False
    console.print(f"controller: process {os.getpid()} on {socket.gethostname()}, recorded by nsys", markup=False)
    return True


def _command(config: RunConfig, process: str, *, cuda: bool) -> list[str]:
    """Return the nsys command for a `worker` or the `controller`, after saying what was changed in it."""
    nsys = config.global_profiler.global_tool_config.nsys
    options = nsys.controller_nsight_options if process == "controller" else nsys.worker_nsight_options
    command, notices = nsys_command(options, f"{process}_nsight_options", cuda=cuda)
    for line in notices:
        notice(line)
    return command


def _wants_nsys(request: ProcessRequest | None) -> bool:
    return request is not None and any(role.tool == "nsys" for role in request.roles.values())


def _raw_folder(config: RunConfig, run_dir: Path) -> Path:
    folder = save_folder(config.global_profiler.save_path, run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    raw = Path(tempfile.mkdtemp(prefix=RAW_PREFIX, dir=folder))
    raw.chmod(0o755)  # ranks may be other users' processes
    return raw


def _finish_files(raw: Path, run_dir: Path) -> bool:
    """Put the files of nsys in place, say where they are, and return whether anything was captured."""
    files, problems = place_files(raw, manifest_folder(run_dir) / JOURNALS)
    _say_problems(problems)
    if files:
        places = ", ".join(dict.fromkeys(str(path.parent) for path in files))
        console.print(f"nsys wrote {len(files)} files into {places}", markup=False, soft_wrap=True)
    return bool(files or problems)


def _say_problems(problems: list[str]) -> None:
    for problem in problems:
        error_console.print(f"profiling: {problem}", style="red", markup=False)


class RecordedRanks:
    """The ranks of one start of a Ray placement that are recorded."""

    def __init__(self, config: RunConfig, run_dir: Path, device: str) -> None:
        self._config, self._run_dir, self._device = config, run_dir, device
        self._raw: Path | None = None

    def python(self, process: str, request: ProcessRequest | None) -> str | None:
        """Return what Ray is to start a rank with in place of `python`; None where it is not recorded."""
        if not _wants_nsys(request):
            return None
        command = _command(self._config, "worker", cuda=self._device == "cuda")
        if self._raw is None:
            self._raw = _raw_folder(self._config, self._run_dir)
        settings = json.dumps({"nsys": command, "raw": str(self._raw / process)})
        return shlex.join([sys.executable, "-P", nsys_process.__file__, settings])

    def finish(self) -> None:
        """Wait until nsys has written the files of the ranks, which have ended, and put them in place."""
        if self._raw is not None:
            _finish_files(self._raw, self._run_dir)
            self._raw = None


def start_unrecorded_children() -> None:
    """Let processes that are started from now on run outside of the nsys that records this one."""
    if own_recording() is None:
        return
    import nvtx

    nvtx.mark("controller", domain=DOMAIN)  # connects this process itself, which needs the same variables
    for name in [name for name in os.environ if name.startswith(_INJECTED)]:
        del os.environ[name]
    libraries = os.environ.pop("LD_PRELOAD", "").split(":")
    if kept := [path for path in libraries if path and "nsight" not in path and "nsys" not in path]:
        os.environ["LD_PRELOAD"] = ":".join(kept)


def nsys_command(
    options: Mapping[str, str | int | bool | None], field_name: str, *, cuda: bool
) -> tuple[list[str], list[str]]:
    """Return `nsys profile` with options as the config states them, and what of them was changed for this machine.

    Args:
        options: long options of `nsys profile` without dashes, and their values.
        field_name: the key below `global_tool_config.nsys` that they are from.
        cuda: whether the process works with CUDA; without, what needs it is left out or replaced.

    Raises:
        UserError: an option is not the user's to set.
    """
    for name in _OURS:
        if name in options:
            reason = "cannot be set: the files get their names when they are complete."
            raise UserError(f"{NSYS_KEY}.{field_name}.{name}", reason, "Set global_profiler.save_path.")
    # Python's own work shows in the ranges; without rights that containers seldom give, sampling stops nsys.
    chosen = {"sample": "none", "cpuctxsw": "none", "wait": "primary"} | dict(options)
    notices = [] if cuda else _without_gpu(chosen)
    if chosen.get("capture-range") not in (None, "none"):
        if chosen["capture-range"] == "nvtx":
            chosen.setdefault("nvtx-capture", f"{CAPTURE_RANGE}@{DOMAIN}")
        chosen.setdefault("kill", "none")
        if chosen.get("capture-range-end") is None:
            chosen["capture-range-end"] = "repeat"
    arguments = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in chosen.items()
        if value is not None
    ]
    return ["nsys", "profile", "--force-overwrite=true", *arguments], notices


def _without_gpu(chosen: dict[str, str | int | bool | None]) -> list[str]:
    """Take out what needs CUDA, and return one line that says so."""
    out = [name for name in chosen if name.startswith(_GPU_OPTIONS)]
    for name in out:
        del chosen[name]
    traces = str(chosen.get("trace") or "nvtx").split(",")
    kept = [trace for trace in traces if not trace.startswith(_GPU_TRACES)]
    out = [trace for trace in traces if trace not in kept] + out
    chosen["trace"] = ",".join(kept if "nvtx" in kept else [*kept, "nvtx"])
    changes = [f"nsys records without {', '.join(out)}"] if out else []
    if chosen.get("capture-range") == "cudaProfilerApi":
        chosen["capture-range"] = "nvtx"
        changes.append("captures begin and end with an NVTX range")
    return [f"no CUDA here: {'; '.join(changes)}"] if changes else []


def has_cuda(device: str) -> bool:
    """Return whether a process for `trainer.device` works with CUDA here, without importing torch."""
    if device != "auto":
        return device.startswith("cuda")
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    return driver and not importlib.metadata.version("torch").endswith("+cpu")


def place_files(folder: Path, journals: Path) -> tuple[list[Path], list[str]]:
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
        process = note.process
        captures[process] += 1
        # With one capture nsys leaves its number out.
        names = [f"{process}.{captures[process]}", *[process] * (captures[process] == 1)]
        raws = (folder / f"{name}{suffix}" for name in names for suffix in (REPORT, UNCONVERTED))
        raw = next((path for path in raws if path.exists()), None)
        if raw is None:
            what = f"nsys wrote no file of {note.stage or 'the step'}: {Path(note.path).name}"
            problems.append(f"step {note.step}, {process}: {what}")
            failure = ProfileFailure(what, note.step, note.stage, note.role, note.rank, "nsys", process)
            add_entry(journals, process, failure)
            continue
        if raw.suffix == UNCONVERTED:
            raw = _convert(raw, problems)
        path = free_path(Path(note.path).with_suffix(raw.suffix))
        path.parent.mkdir(parents=True, exist_ok=True)
        files.append(Path(shutil.move(raw, path)))
        shown = shown_path(path, journals.parent)
        # What the process itself wrote when the capture ended, if it came to that.
        more = {"units": known[shown].units, "duration_s": known[shown].duration_s} if shown in known else {}
        add_entry(journals, process, replace(note, path=shown, bytes=path.stat().st_size, **more))
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
