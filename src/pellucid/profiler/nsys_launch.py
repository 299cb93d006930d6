"""Runs a program under nsys as if it ran alone: its output, the signals for it and its exit status pass through.

nsys leaves as soon as it has recorded the last capture, while the program goes on, so its own exit status says nothing then. The
process that calls `supervise` therefore adopts what nsys leaves behind, and waits for both.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from pellucid.profiler.nsys_command import NUM_TRIES, NsysCommand, end_tree
from pellucid.profiler.nsys_files import EXPORT_S

_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ended:
    """How a supervised program ended."""

    status: int
    """Its exit status; 128 + n when signal n killed it."""
    started: bool
    """Whether nsys came as far as starting it."""


def supervise(command: NsysCommand, output: Path, program: Sequence[str], log: Path) -> Ended:
    """Run a program under nsys to its end, and to the end of nsys.

    Args:
        command: nsys and its options.
        output: where nsys writes, see `NsysCommand.of`.
        program: the program and its arguments; it gets this process's output streams.
        log: file for what nsys itself says.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as said, _forwarding() as forward:
        status = 1
        for _ in range(NUM_TRIES):
            nsys, pid, alive = _start(command, output, program, said)
            if pid is not None:
                forward(pid)
                return Ended(_wait(nsys.pid, pid, alive), started=True)
            os.close(alive)
            status = _exit_status(nsys.wait())
    return Ended(status, started=False)


def _start(
    command: NsysCommand, output: Path, program: Sequence[str], log: IO[str]
) -> tuple[subprocess.Popen[bytes], int | None, int]:
    """Start nsys.

    Returns:
        nsys; the program's process id once that has started, None when nsys ended before; and what to write to when it has ended.
    """
    out, err = os.dup(1), os.dup(2)
    told, tell = os.pipe()
    lives, alive = os.pipe()
    os.umask(umask := os.umask(0))
    child = [sys.executable, str(Path(__file__).with_name("nsys_child.py"))]
    try:
        nsys = subprocess.Popen(
            command.of(output, [*child, *map(str, (umask, out, err, tell, lives)), *program]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(out, err, tell, lives),
            start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
        )
    finally:
        for descriptor in (out, err, tell, lives):
            os.close(descriptor)
    with os.fdopen(told) as answer:
        line = answer.readline()
    return nsys, int(line) if line else None, alive


def _wait(nsys: int, program: int, alive: int) -> int:
    """Wait for the program and for all nsys processes below this one, and return the program's exit status."""
    launcher = _parent(program)
    statuses: dict[int, int] = {}
    over_at: float | None = None
    while True:
        _reap(statuses)
        if not psutil.pid_exists(program):
            if over_at is None:
                over_at = time.monotonic()
                _say_over(alive)
            if not _nsys_below():
                break
            if time.monotonic() - over_at > EXPORT_S:
                end_tree(nsys)
        time.sleep(_POLL_S)
    _reap(statuses)
    # Its launcher ends as the program does, and nsys as its launcher, unless it has left before.
    return next((statuses[pid] for pid in (program, launcher, nsys) if pid in statuses), 1)


def _say_over(alive: int) -> None:
    with suppress(BrokenPipeError):  # the process that listens was killed, too
        os.write(alive, b".")
    os.close(alive)


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


def _reap(statuses: dict[int, int]) -> None:
    """Add the exit status of each child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        statuses[pid] = _exit_status(os.waitstatus_to_exitcode(status))


def _nsys_below() -> bool:
    """Tell whether an nsys process that this one has started, or adopted, still works."""
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name().startswith("nsys") and child.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def _exit_status(code: int) -> int:
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding() -> Iterator[Callable[[int], None]]:
    """Hand signals on to the program for the time of the block; those that come before it is known, once it is."""
    target: list[int] = []
    early: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not target:
            early.append(number)
            return
        try:
            os.kill(target[0], number)
        except ProcessLookupError:
            return  # it has ended; nsys is still at its files

    def forward(pid: int) -> None:
        target.append(pid)
        for number in early:
            handle(number, None)

    previous = {number: signal.signal(number, handle) for number in _FORWARDED}
    try:
        yield forward
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
