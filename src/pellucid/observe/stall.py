"""What a stalled run of one process comes to: a report with all stacks, one message, a reason in run.json, and its end.

Three lines of defence: the watchdog's thread raises `StallError` in the main thread; a main thread that does not end
then is ended with the process; and where a call that holds the interpreter lock keeps even the watchdog from looking, a
guard process (`stall_guard.py`), which sees the beats in shared memory, does the same from outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from pellucid.console import console, error_console
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rundir import RunDir
from pellucid.observe.watchdog import BEAT_BYTES, STALL_SIGNAL, Stall, Watchdog

_REACH_MAIN_S, _UNWIND_S = 3.0, 30.0
"""How long the main thread may take to receive `StallError`, and then to close what it has open."""
_NATIVE_STACKS_S = 20.0
_NUM_FRAMES = 6


@dataclass
class StallReport:
    """What is said of a stall, and where."""

    reason: str
    """One line, for run.json."""
    message: str
    """For the console."""
    shown: bool = False

    def show(self) -> None:
        """Print the message to standard error, once."""
        if not self.shown:
            self.shown = True
            error_console.print(self.message, style="red", markup=False, soft_wrap=True)


class StallError(BaseException):
    """Raised in the main thread of a stalled run, wherever that is. Not an `Exception`: no handler on the way keeps
    it.
    """

    def __init__(self, report: StallReport) -> None:
        super().__init__(report.reason)
        self.report = report


class StallEnding:
    """Ends this process when its run stalls: a `with` block round the loop, whose display tells `watchdog` of progress.

    The block raises `StallError` on a stall; the process must then end, and is ended should it hang on the way.

    Args:
        run_dir: gets `logs/stall_<time>.txt`.
        timeout_s: seconds without progress that make a stall; None never ends the run.
    """

    def __init__(self, run_dir: RunDir, timeout_s: float | None) -> None:
        self._run_dir = run_dir
        # Both are open until the run ends.
        self._stacks, self._beat = (tempfile.TemporaryFile(buffering=0) for _ in range(2))  # noqa: SIM115
        self._beat.truncate(BEAT_BYTES)
        self.watchdog = Watchdog(timeout_s, self._end, memory=mmap.mmap(self._beat.fileno(), BEAT_BYTES))
        self._main = threading.main_thread().ident or 0
        self._report: StallReport | None = None
        self.in_hand: Callable[[], list[str]] = list
        """Names the samples that are being worked on; set once there are models."""
        self._reached_main = threading.Event()

    def __enter__(self) -> StallEnding:
        if self.watchdog.timeout_s is not None:
            self._handler_before = signal.signal(STALL_SIGNAL, self._raise_in_main)
            # Dumps in the signal handler itself, for which no thread needs the interpreter lock; then calls the one
            # above.
            faulthandler.register(STALL_SIGNAL, self._stacks.fileno(), all_threads=True, chain=True)
            self._guard = self._start_guard()
        self.watchdog.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watchdog.__exit__()
        if self.watchdog.timeout_s is None or self.watchdog.stalled:
            return
        self._guard.kill()
        self._guard.wait()
        faulthandler.unregister(STALL_SIGNAL)
        signal.signal(STALL_SIGNAL, self._handler_before)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Start the guard in a session of its own, where Ctrl-C does not reach it; it ends when its standard input
        closes.
        """
        files = self._beat.fileno(), self._stacks.fileno()
        arguments = [self._run_dir.path, self._main, *files]
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "pellucid.observe.stall_guard", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=files,
            start_new_session=True,
        )

    def _end(self, stall: Stall) -> None:
        """End the process: first by an exception in the main thread, and if that does not help, at once."""
        try:
            self.watchdog.put_off(_NATIVE_STACKS_S + _REACH_MAIN_S + _UNWIND_S)
            self._stacks.truncate(0)
            self._stacks.seek(0)
            faulthandler.dump_traceback(self._stacks.fileno(), all_threads=True)
            stacks, samples = read_all(self._stacks.fileno()), self.in_hand()
            self._report = write_report(self._run_dir, stall, stacks, os.getpid(), self._main, samples)
            signal.pthread_kill(self._main, STALL_SIGNAL)
            if self._reached_main.wait(_REACH_MAIN_S):
                time.sleep(_UNWIND_S)
            end_processes(psutil.Process().children(recursive=True))
            record_end(self._run_dir, os.getpid(), self._report.reason)
            console.show_cursor()  # the progress display hid it
            self._report.show()
        except BaseException:
            error_console.print(traceback.format_exc(), style="red", markup=False, soft_wrap=True)
            raise
        finally:
            os._exit(1)

    def _raise_in_main(self, signal_number: int, frame: FrameType | None) -> None:
        if self._report is not None and not self._reached_main.is_set():
            self._reached_main.set()
            raise StallError(self._report)


def read_all(file: int) -> str:
    """Return what a file holds, without moving the position at which its next dump is written."""
    return os.pread(file, os.fstat(file).st_size, 0).decode()


def write_report(
    run_dir: RunDir, stall: Stall, stacks: str, pid: int, main_thread: int, samples: Sequence[str] = ()
) -> StallReport:
    """Write `logs/stall_<time>.txt` and return what to say of it.

    Args:
        run_dir: the run.
        stall: where it stands.
        stacks: all threads of the process, as faulthandler dumps them.
        pid: the stalled process; py-spy, where it is installed, adds the native frames.
        main_thread: identifier of its main thread.
        samples: what it works on, where that is known.
    """
    file = run_dir.logs / datetime.now(UTC).strftime("stall_%Y%m%dT%H%M%SZ.txt")
    latest = CheckpointStore(run_dir.checkpoints).latest()
    working_on = [f"working on {', '.join(samples[:3])}{' …' if len(samples) > 3 else ''}"] if samples else []
    content = "\n".join([str(stall), f"process {pid}", *working_on, "", stacks + _native_stacks(pid)])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        where = f"all stacks: {file}"
    except OSError as error:
        where = f"{file} cannot be written ({error.strerror}); all stacks:\n{content}"
    message = "\n".join(
        [
            f"the run is stalled: {stall}",
            *working_on,
            "where its main thread is, innermost call first:",
            *main_frames(stacks, main_thread),
            where,
            f"the last checkpoint is {'none' if latest is None else f'step {latest}'}; start the same command again to "
            "continue from there. For stages that just take long, raise trainer.stall_timeout_s (null: no limit).",
        ]
    )
    return StallReport(f"stalled: {stall}; stacks in {file}", message)


def main_frames(stacks: str, main_thread: int) -> list[str]:
    """Return the innermost frames of the main thread out of a faulthandler dump, each with its line of code."""
    section = re.search(rf"hread 0x0*{main_thread:x} .*\n((?:  .*\n?)*)", stacks)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', section[1] if section else "")
    return [
        f"  {path}:{line} in {name}: {linecache.getline(path, int(line)).strip()}"
        for path, line, name in frames[:_NUM_FRAMES]
    ] or ["  not known"]


def _native_stacks(pid: int) -> str:
    """Return the process's stacks with native frames by py-spy, or nothing where that is not installed."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent)
    if program is None:
        return ""
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NATIVE_STACKS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"\npy-spy: {error}\n"
    return f"\nwith native frames:\n{done.stdout or done.stderr}"


def record_end(run_dir: RunDir, pid: int, reason: str) -> None:
    """Write why the process ended into run.json, if it has an entry there (validation alone has none)."""
    starts = run_dir.read_record()
    if starts and starts[-1]["pid"] == pid:
        run_dir.finish_record(reason)


def end_processes(processes: list[psutil.Process]) -> None:
    """Terminate processes, and kill those that are still there after two seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=2.0)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # multiprocessing's resource tracker ignores SIGTERM: it cleans up after the others when they are gone, and
            # ends.
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
