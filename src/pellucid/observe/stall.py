"""What a stalled run of one process comes to: a report with all stacks, one message, a reason in run.json, and its end.

A guard process (`stall_guard.py`) sees the beats in shared memory, and on a stall sends a signal. Its handler dumps all
stacks without the interpreter lock, and raises `StallError` in the main thread; a run that cannot do so, or does not
end then, is ended by the guard.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from pellucid.console import error_console
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rundir import RunDir
from pellucid.observe.watchdog import BEAT_BYTES, STALL_SIGNAL, Watchdog, find_stall

_NUM_FRAMES = 6
_UNWIND_S = 30.0
"""How long a stalled run may take to write its report and end, and captures, which put it off, aside."""


class StallError(BaseException):
    """Raised in the main thread of a stalled run, wherever that is; its text is one line, for run.json.

    Not an `Exception`: no handler on the way keeps it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason)
        self._message = message

    def show(self) -> None:
        """Print to standard error what the user should know."""
        error_console.print(self._message, style="red", markup=False, soft_wrap=True)


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
        self._stacks, self._beats = (tempfile.TemporaryFile(buffering=0) for _ in range(2))  # noqa: SIM115
        self._beats.truncate(BEAT_BYTES)
        self.watchdog = Watchdog(timeout_s, mmap.mmap(self._beats.fileno(), BEAT_BYTES))
        self.in_hand: Callable[[], list[str]] = list
        """Names the samples that are being worked on; set once there are models."""

    def __enter__(self) -> StallEnding:
        if self.watchdog.timeout_s is not None:
            self._handler_before = signal.signal(STALL_SIGNAL, self._raise_in_main)
            # Dumps in the signal handler itself, where no thread needs the interpreter lock; then calls that above.
            faulthandler.register(STALL_SIGNAL, self._stacks.fileno(), all_threads=True, chain=True)
            self._guard = self._start_guard()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.watchdog.timeout_s is None or isinstance(error, StallError):
            return  # the guard sees to it that a stalled run ends
        self._guard.kill()
        self._guard.wait()
        faulthandler.unregister(STALL_SIGNAL)
        signal.signal(STALL_SIGNAL, self._handler_before)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Start the guard in a session of its own, without Ctrl-C; it ends when its standard input closes."""
        files = self._beats.fileno(), self._stacks.fileno()
        arguments = [self._run_dir.path, threading.main_thread().ident, *files]
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "pellucid.observe.stall_guard", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=files,
            start_new_session=True,
        )

    def _raise_in_main(self, signal_number: int, frame: FrameType | None) -> None:
        stall, deadline = find_stall(self.watchdog.beats(), now := time.monotonic())
        if deadline > now or self.watchdog.is_stalled:  # it went on just then, or knows already
            return
        self.watchdog.is_stalled, self.watchdog.timeout_s = True, _UNWIND_S
        self.watchdog.put_off(_UNWIND_S)
        main_thread = threading.main_thread().ident or 0
        raise write_report(self._run_dir, stall, self._stacks.fileno(), os.getpid(), main_thread, self.in_hand())


def write_report(
    run_dir: RunDir, stall: str, stacks_file: int, pid: int, main_thread: int, samples: Sequence[str] = ()
) -> StallError:
    """Write `logs/stall_<time>.txt` and return what is to be raised and said.

    Args:
        run_dir: the run.
        stall: where it stands.
        stacks_file: descriptor of what faulthandler dumped of all threads of the process.
        pid: the stalled process.
        main_thread: identifier of its main thread.
        samples: what it works on, where that is known.
    """
    stacks = os.pread(stacks_file, os.fstat(stacks_file).st_size, 0).decode()
    file = run_dir.logs / datetime.now(UTC).strftime("stall_%Y%m%dT%H%M%SZ.txt")
    latest = CheckpointStore(run_dir.checkpoints).latest()
    working_on = [f"working on {', '.join(samples[:3])}{' …' if len(samples) > 3 else ''}"] if samples else []
    content = "\n".join([stall, f"process {pid}", *working_on, "", stacks])
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
    return StallError(f"stalled: {stall}; stacks in {file}", message)


def main_frames(stacks: str, main_thread: int) -> list[str]:
    """Return the innermost frames of the main thread out of a faulthandler dump, each with its line of code."""
    section = re.search(rf"hread 0x0*{main_thread:x} .*\n((?:  .*\n?)*)", stacks)
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', section[1] if section else "")
    return [
        f"  {path}:{line} in {name}: {linecache.getline(path, int(line)).strip()}"
        for path, line, name in frames[:_NUM_FRAMES]
    ] or ["  not known"]


def record_end(run_dir: RunDir, pid: int, reason: str) -> None:
    """Write why the process ended into run.json, if it has an entry there (validation alone has none)."""
    starts = run_dir.read_record()
    if starts and starts[-1]["pid"] == pid:
        run_dir.finish_record(reason)


def end_processes(processes: list[psutil.Process]) -> None:
    """Kill processes, but for multiprocessing's resource tracker, which cleans up after the others and ends."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
