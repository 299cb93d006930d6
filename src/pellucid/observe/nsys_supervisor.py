"""Runs a program under nsys as if it ran alone: its output, the signals for it and its exit status pass through.

The controller calls `supervise`; Ray starts a rank as `python nsys_supervisor.py SETTINGS ARGUMENTS…` in place of
`python ARGUMENTS…`. nsys leaves as soon as it has recorded the last capture, while the program goes on, so its own exit
status says nothing then: the supervisor adopts what nsys leaves behind and waits for both. An nsys that hangs is ended:
nobody waits ten minutes for nothing.
"""

import ctypes
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

HUNG_S, IDLE_SHARE = 30.0, 0.05
"""An nsys hangs that has used less of a core than this for so long, without waiting for a disk; its agent polls, at
about 0.01."""
LOOK_S, KILL_S, POLL_S = 1.0, 5.0, 0.1
EXPORT_S = 600.0
"""How long an nsys that works may take to write its files once its program has ended."""
NUM_TRIES = 3
"""nsys itself fails to start now and then, before it has started the program."""
STATUS = ".status"
_NAMES = ("nsys", "QdstrmImporter")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Ended:
    """How a supervised program ended."""

    status: int
    """Its exit status; 128 + n when signal n killed it."""
    started: bool
    """Whether nsys came as far as starting it."""
    problems: list[str] = field(default_factory=list)
    """What did not end by itself."""


class HungWatch:
    """Watches processes, and the folder that they write into, from the first question on."""

    def __init__(self, folder: Path, processes: Callable[[], list[psutil.Process]]) -> None:
        """`processes` returns those that there are at the time."""
        self._folder, self._processes = folder, processes
        self._since = self._looked = -math.inf
        self._cpu_s: dict[int, float] = {}
        self._num_bytes = 0

    def hung(self) -> bool:
        """Tell whether for `HUNG_S` no process used the processor or waited for a disk, and the folder did not
        change.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        cpu_s, at_disk = {}, False
        for process in self._processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                at_disk = at_disk or process.status() == psutil.STATUS_DISK_SLEEP
                cpu_s[process.pid] = times.user + times.system
        num_bytes = 0
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # nsys has files for a moment
                num_bytes += path.stat().st_size
        used_s = sum(seconds - self._cpu_s.get(pid, 0.0) for pid, seconds in cpu_s.items())
        others = cpu_s.keys() != self._cpu_s.keys() or not cpu_s
        if others or at_disk or num_bytes != self._num_bytes or used_s > IDLE_SHARE * HUNG_S:
            self._since, self._cpu_s, self._num_bytes = now, cpu_s, num_bytes
        return now - self._since >= HUNG_S


def nsys_tree(pid: int) -> list[psutil.Process]:
    """Return an nsys, its agent, which is no child of it, and all processes below them; those of them that are left."""
    session = f"-{pid}"  # the agent's session is named after its nsys
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if process.pid == pid or any(word.startswith("--session-name=") and word.endswith(session) for word in words):
            with suppress(psutil.NoSuchProcess):
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def nsys_below() -> list[psutil.Process]:
    """Return the nsys processes, and those that convert for them, that this process started or adopted and that are
    at work.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name().startswith(_NAMES) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def end(processes: Collection[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone, a few seconds at most."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # other users' processes stay
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_S)


def ended_problem(pids: Iterable[int], *, hung: bool) -> str:
    """Return what to tell of nsys processes that had to be ended."""
    how = f"hung, doing nothing for {HUNG_S:.0f} s" if hung else f"had not finished its files within {EXPORT_S:.0f} s"
    return (
        f"nsys ({', '.join(map(str, pids))}) {how} after its program had ended, and was ended; what it had written is "
        "kept"
    )


def run_watched(command: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Run a program that writes into `folder`, and return its exit status and what it said.

    Raises:
        TimeoutError: it hung, or took longer than `limit_s`, and has been ended.
        OSError: it cannot be started.
    """
    deadline = time.monotonic() + limit_s
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    watch = HungWatch(folder, lambda: nsys_tree(process.pid))
    while True:
        try:
            said, _ = process.communicate(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            hung = watch.hung()
            if hung or time.monotonic() > deadline:
                end(nsys_tree(process.pid))
                process.communicate()
                why = f"it did nothing for {HUNG_S:.0f} s" if hung else f"it took longer than {limit_s:.0f} s"
                raise TimeoutError(why) from None
        else:
            return process.returncode, said.decode(errors="replace")


def noted_status(output: Path, pid: int) -> int | None:
    """Return the status that a process noted before its exit, which may hang; None: it still works, or was killed at
    it.

    Args:
        output: where its nsys writes, with `%p` for its process id.
        pid: its process id.
    """
    path = output.with_name(output.name.replace("%p", str(pid)) + STATUS)
    noted = path.read_text(encoding="utf-8") if path.exists() else ""
    return int(noted) if noted else None


def supervise(nsys: Sequence[str], output: Path, program: Sequence[str], log: Path) -> Ended:
    """Run a program under nsys to its end, and to the end of nsys.

    Args:
        nsys: `nsys profile` and its options, without `--output`.
        output: where nsys writes, without extension; `%p` becomes the program's process id.
        program: the program and its arguments; it gets this process's output streams.
        log: file for what nsys itself says.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    status = 1
    with log.open("a") as said, _forwarding() as forward:
        for _ in range(NUM_TRIES):
            process, pid, alive = _start([*nsys, f"--output={output}"], output.parent, program, said)
            if pid is not None:
                forward(pid)
                return _wait(process.pid, pid, alive, output)
            os.close(alive)
            status = _exit_status(process.wait())
    return Ended(status, started=False)


def _start(
    nsys: list[str], folder: Path, program: Sequence[str], log: IO[str]
) -> tuple[subprocess.Popen[bytes], int | None, int]:
    """Start nsys.

    Returns:
        nsys; the program's process id once that has started, None when nsys ended, or hung, before; and what to write
        to when it has ended.
    """
    out, err = os.dup(1), os.dup(2)
    told, tell = os.pipe()
    lives, alive = os.pipe()
    os.umask(umask := os.umask(0))
    inherited = (out, err, tell, lives)
    child = [sys.executable, "-P", __file__, "--child", *map(str, (umask, *inherited))]
    process = subprocess.Popen(
        [*nsys, *child, *program],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=inherited,
        start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
    )
    for descriptor in inherited:
        os.close(descriptor)
    watch = HungWatch(folder, lambda: nsys_tree(process.pid))
    while not select.select([told], [], [], POLL_S)[0]:
        if watch.hung():
            end(nsys_tree(process.pid))
    with os.fdopen(told) as answer:
        line = answer.readline()
    return process, int(line) if line else None, alive


def become(umask: int, out: int, err: int, tell: int, alive: int, program: Sequence[str]) -> None:
    """Undo, in the process that nsys starts, what nsys changes for it; tell its process id; and run the program in
    it.
    """
    os.umask(umask)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.write(tell, b"%d\n" % os.getpid())
    for descriptor in (out, err, tell):
        os.close(descriptor)
    pid = os.getpid()
    if os.fork():
        os.close(alive)
        os.execvp(program[0], list(program))
    # The process that stays behind kills the program when the supervisor, which holds the pipe's other end, is killed.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(alive, 1):  # a byte says that the program has ended
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _wait(nsys: int, program: int, alive: int, output: Path) -> Ended:
    """Wait for the program and for all nsys processes below this one, but for none of them longer than it gets
    anywhere.
    """
    launcher = None
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(program).ppid()
    statuses, problems = dict[int, int](), list[str]()
    _wait_for_program(program, output, statuses, problems)
    with suppress(BrokenPipeError):  # the process that listens was killed, too
        os.write(alive, b".")
    os.close(alive)
    deadline, watch = time.monotonic() + EXPORT_S, HungWatch(output.parent, nsys_below)
    while working := nsys_below():
        _reap(statuses)
        hung = watch.hung()
        if hung or time.monotonic() > deadline:
            problems.append(ended_problem([process.pid for process in working], hung=hung))
            end(working)  # and reaps them, as their status then says nothing
            break
        time.sleep(POLL_S)
    _reap(statuses)
    # Its launcher ends as the program does, and nsys as its launcher, unless it has left before.
    status = next(
        (statuses[pid] for pid in (program, launcher, nsys) if pid in statuses), noted_status(output, program)
    )
    return Ended(1 if status is None else status, started=True, problems=problems)


def _wait_for_program(pid: int, output: Path, statuses: dict[int, int], problems: list[str]) -> None:
    """Wait until the program has ended, even if nobody reaps it: its launcher may wait for what itself waits for
    this process.
    """
    try:
        program = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    watch = HungWatch(output.parent, lambda: [program, *nsys_below()])
    while _runs(program):
        _reap(statuses)
        status = noted_status(output, pid)
        if status is not None and watch.hung():
            problems.append(
                f"the run was over, but its process {pid} did not end: nothing happened in {HUNG_S:.0f} s. It was "
                "ended."
            )
            with suppress(psutil.NoSuchProcess):
                program.kill()
            statuses[pid] = status
            return
        time.sleep(POLL_S)
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            statuses[pid] = _exit_status(os.waitstatus_to_exitcode(int(fields[-1])))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reap(statuses: dict[int, int]) -> None:
    """Add the exit status of each child that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses.setdefault(ended[0], _exit_status(os.waitstatus_to_exitcode(ended[1])))


def _exit_status(code: int) -> int:
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding() -> Iterator[Callable[[int], None]]:
    """Hand signals on to the program whose process id is given; those that come before it is known, once it is."""
    targets: list[int] = []
    early: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if targets:
            with suppress(ProcessLookupError):  # it has ended; nsys is still at its files
                os.kill(targets[0], number)
        else:
            early.append(number)

    def forward(pid: int) -> None:
        targets.append(pid)
        for number in early:
            handle(number, None)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield forward
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main() -> None:
    """Be the process that nsys starts, or a rank's supervisor."""
    if sys.argv[1] == "--child":
        become(*map(int, sys.argv[2:7]), program=sys.argv[7:])
    settings, program = json.loads(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    if shutil.which("nsys") is not None:  # without it on this machine a rank works all the same, and says so
        ended = supervise(settings["nsys"], Path(settings["output"]), program, Path(settings["log"]))
        if ended.started:
            for problem in ended.problems:
                sys.stderr.write(f"profiling: {problem}\n")
            sys.exit(ended.status)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
