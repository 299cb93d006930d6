"""Runs a program under nsys as if it ran alone: its output, the signals for it and its exit status pass through.

nsys leaves as soon as it has recorded the last capture, while the program goes on, so its own exit status says nothing then. The
process that calls `supervise` therefore adopts what nsys leaves behind, and waits for both.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from pellucid.profiler.nsys_command import NUM_TRIES, NsysCommand
from pellucid.profiler.nsys_files import EXPORT_S, ended_problem, noted_status
from pellucid.profiler.nsys_watch import HUNG_S, HungWatch, end, nsys_below, nsys_tree

_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """How a supervised program ended."""

    status: int
    """Its exit status; 128 + n when signal n killed it."""
    started: bool
    """Whether nsys came as far as starting it."""
    problems: list[str] = field(default_factory=list)
    """What did not end by itself."""


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
                return _wait(nsys.pid, pid, alive, output)
            os.close(alive)
            status = _exit_status(nsys.wait())
    return Ended(status, started=False)


def _start(
    command: NsysCommand, output: Path, program: Sequence[str], log: IO[str]
) -> tuple[subprocess.Popen[bytes], int | None, int]:
    """Start nsys.

    Returns:
        nsys; the program's process id once that has started, None when nsys ended, or hung, before; and what to write to when it
        has ended.
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
    watch = HungWatch(output.parent, lambda: nsys_tree(nsys.pid))
    while not select.select([told], [], [], _POLL_S)[0]:
        if watch.hung():
            end(nsys_tree(nsys.pid))
    with os.fdopen(told) as answer:
        line = answer.readline()
    return nsys, int(line) if line else None, alive


def _wait(nsys: int, program: int, alive: int, output: Path) -> Ended:
    """Wait for the program and for all nsys processes below this one, but for none of them longer than it gets anywhere."""
    launcher, problems = _parent(program), list[str]()
    statuses: dict[int, int] = {}
    _wait_for_program(program, output, statuses, problems)
    _say_over(alive)
    _wait_for_nsys(output.parent, statuses, problems)
    # Its launcher ends as the program does, and nsys as its launcher, unless it has left before.
    status = next((statuses[pid] for pid in (program, launcher, nsys) if pid in statuses), noted_status(output, program))
    return Ended(1 if status is None else status, started=True, problems=problems)


def _wait_for_program(pid: int, output: Path, statuses: dict[int, int], problems: list[str]) -> None:
    """Wait until the program has ended, even if nobody reaps it: its launcher may wait for what itself waits for this process."""
    try:
        program = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    watch = HungWatch(output.parent, lambda: [program, *nsys_below()])
    while _runs(program):
        _reap(statuses)
        status = noted_status(output, pid)
        if status is not None and watch.hung():
            problems.append(f"the run was over, but its process {pid} did not end: nothing happened in {HUNG_S:.0f} s. It was ended.")
            with suppress(psutil.NoSuchProcess):
                program.kill()
            statuses[pid] = status
            return
        time.sleep(_POLL_S)
    if (status := _zombie_status(pid)) is not None:
        statuses[pid] = status


def _wait_for_nsys(folder: Path, statuses: dict[int, int], problems: list[str]) -> None:
    deadline = time.monotonic() + EXPORT_S
    watch = HungWatch(folder, nsys_below)
    while working := nsys_below():
        _reap(statuses)
        hung = watch.hung()
        if hung or time.monotonic() > deadline:
            problems.append(ended_problem([nsys.pid for nsys in working], hung=hung))
            end(working)  # and reaps them, as their status then says nothing
            break
        time.sleep(_POLL_S)
    _reap(statuses)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _zombie_status(pid: int) -> int | None:
    """Return the exit status of a process that has ended and that nobody has reaped; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _exit_status(os.waitstatus_to_exitcode(int(fields[-1]))) if fields[0] == "Z" else None


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
        statuses.setdefault(pid, _exit_status(os.waitstatus_to_exitcode(status)))


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
