"""Recording with nsys: which processes of a run start under it, and what becomes of their files.

`pellucid train` calls `run_recorded` before it loads anything; the Ray placement starts ranks with `RecordedRanks`.
"""

import faulthandler
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pellucid.config.schema import RunConfig
from pellucid.console import console, error_console, notice
from pellucid.errors import UserError
from pellucid.files.rundir import RunDir
from pellucid.observe import nsys_supervisor
from pellucid.observe.captures import controller_request, finish, save_folder
from pellucid.observe.manifest import JOURNALS, manifest_folder
from pellucid.observe.nsys_command import (
    OPTIONS_KEY,
    RAW_PREFIX,
    NsysCommand,
    check_options,
    has_cuda,
    nsys_command,
    num_captures,
    own_nsys,
)
from pellucid.observe.nsys_files import Finished, note_status
from pellucid.observe.nsys_files import finish as finish_files
from pellucid.observe.nsys_supervisor import HUNG_S, supervise
from pellucid.observe.request import ProcessRequest

_MAIN = (
    "import sys; sys.argv[0] = 'pellucid'; from pellucid.cli.main import main; "
    "from pellucid.observe.recording import noting_the_end; noting_the_end(main)"
)
_INJECTED = ("QUADD_", "NSYS_", "NVTX_INJECTION", "CUDA_INJECTION", "CUBLAS_NVTX", "CUBLASXT_NVTX", "CUPTI_")


def run_recorded(config: RunConfig, arguments: list[str]) -> int | None:
    """Run `pellucid` with these arguments under nsys, if the config wants this process recorded and nothing records it
    yet.

    Returns:
        The exit status of that run, whose files are in place; None: the caller is to go on itself, unrecorded where
        nsys fails.
    """
    run_dir = Path(config.trainer.default_local_dir)
    command = _own_command(config, run_dir)
    if command is None:
        return None
    for line in command.notices:
        notice(line)
    raw, began = _raw_folder(config, run_dir), time.time()
    log = RunDir(run_dir).logs / "nsys.log"
    # As the installed command does, without the current folder among the places of modules.
    program = [sys.executable, "-P", "-c", _MAIN, *arguments]
    ended = supervise(command.arguments, raw / "controller.%p", program, log)
    finished = finish_files(raw, manifest_folder(run_dir) / JOURNALS)
    if not ended.started:
        message = f"profiling: nsys did not start the run (status {ended.status}, see {log}), which goes on without it"
        error_console.print(message, style="red", markup=False)
        return None
    for problem in ended.problems:
        error_console.print(f"profiling: {problem}", style="red", markup=False)
    _tell(finished)
    # Otherwise the run did not come to a profiled step, and what earlier starts left has been dealt with.
    if finished.num_captures:
        finish(config, run_dir, since=began)
    return ended.status


def noting_the_end(main: Callable[[], None]) -> None:
    """Run the command in the process that nsys records, and note its exit status, as what follows, Python's own
    exit, may hang.
    """
    nsys, status = own_nsys(), 1  # read now, since nsys may leave before
    try:
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        if nsys is not None:
            note_status(nsys, status)
            faulthandler.dump_traceback_later(HUNG_S / 2, exit=False)  # what it hangs in


def say_if_recorded() -> bool:
    """Tell whether `run_recorded` started this process, and so ends the run's profiling; say which process it is."""
    nsys = own_nsys()
    if nsys is None or not nsys.is_ours:
        return False
    console.print(f"controller: process {os.getpid()} on {socket.gethostname()}, recorded by nsys", markup=False)
    return True


def _own_command(config: RunConfig, run_dir: Path) -> NsysCommand | None:
    """Return how the controller's process is to be started; None where it is not to be recorded, or is already."""
    local = config.trainer.placement == "local"
    request = controller_request(config, run_dir, tuple(config.profilers) if local else (), "cpu")
    if config.trainer.val_only or not _wants_nsys(request) or own_nsys() is not None:
        return None
    options = config.global_profiler.global_tool_config.nsys
    cuda = has_cuda(config.trainer.device)
    try:
        check_options(options, cuda=cuda)
    except UserError:
        return None  # `check_tools` finds the same, and says what follows from it
    if local:
        return _worker_command(config, request, cuda=cuda)
    return nsys_command(
        options.controller_nsight_options, f"{OPTIONS_KEY}.controller_nsight_options", cuda=cuda, num_captures=None
    )


def _worker_command(config: RunConfig, request: ProcessRequest | None, *, cuda: bool) -> NsysCommand:
    assert request is not None
    options = config.global_profiler.global_tool_config.nsys.worker_nsight_options
    captures = num_captures(request, stages_repeat=config.algorithm.filter_groups.enable)
    return nsys_command(options, f"{OPTIONS_KEY}.worker_nsight_options", cuda=cuda, num_captures=captures)


def _wants_nsys(request: ProcessRequest | None) -> bool:
    return request is not None and any(role.tool == "nsys" for role in request.roles.values())


def _raw_folder(config: RunConfig, run_dir: Path) -> Path:
    folder = save_folder(config.global_profiler.save_path, run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=RAW_PREFIX, dir=folder))


def _tell(finished: Finished) -> None:
    for problem in finished.problems:
        error_console.print(f"profiling: {problem}", style="red", markup=False)
    if finished.files:
        places = ", ".join(dict.fromkeys(str(path.parent) for path in finished.files))
        console.print(f"nsys wrote {len(finished.files)} files into {places}", markup=False, soft_wrap=True)


class RecordedRanks:
    """The ranks of one start of a Ray placement that are recorded."""

    def __init__(self, config: RunConfig, run_dir: Path, device: str) -> None:
        self._config, self._run_dir, self._device = config, run_dir, device
        self._raw: Path | None = None

    def python(self, process: str, request: ProcessRequest | None) -> str | None:
        """Return what Ray is to start a rank with in place of `python`; None where it is not recorded."""
        if not _wants_nsys(request):
            return None
        command = _worker_command(self._config, request, cuda=self._device == "cuda")
        for line in command.notices:
            notice(line)
        if self._raw is None:
            self._raw = _raw_folder(self._config, self._run_dir)
            self._raw.chmod(0o755)  # ranks may be other users' processes
        raw, log = self._raw / f"{process}.%p", self._raw / f"{process}.log"
        settings = json.dumps({"nsys": command.arguments, "output": str(raw), "log": str(log)})
        return shlex.join([sys.executable, "-P", nsys_supervisor.__file__, settings])

    def finish(self, *, all_here: bool) -> None:
        """Wait until nsys has written the files of the ranks, which have ended, and put them in place."""
        if self._raw is not None:
            _tell(finish_files(self._raw, manifest_folder(self._run_dir) / JOURNALS, all_here=all_here))
            self._raw = None


def start_unrecorded_children() -> None:
    """Let processes that are started from now on run outside of the nsys that records this one."""
    if own_nsys() is None:
        return
    import nvtx

    nvtx.mark("controller", domain="pellucid")  # connects this process itself, which needs the same variables
    for name in [name for name in os.environ if name.startswith(_INJECTED)]:
        del os.environ[name]
    kept = [
        part
        for part in os.environ.pop("LD_PRELOAD", "").split(":")
        if part and "nsight" not in part and "nsys" not in part
    ]
    if kept:
        os.environ["LD_PRELOAD"] = ":".join(kept)
