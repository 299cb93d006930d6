"""The guard process of a run: looks for a stall, and ends a stalled run that does not end itself.

`stall.py` starts it as `python -m pellucid.observe.stall_guard RUN_DIR MAIN_THREAD BEAT_FD STACKS_FD`. It sees the
run's beats in the file BEAT_FD, and has the run dump its stacks into the file STACKS_FD. It ends when its standard
input closes.
"""

import math
import mmap
import os
import select
import sys
import time
from pathlib import Path

import psutil

from pellucid.observe.watchdog import ASKED, BEAT_BYTES, KILLED, STALL_SIGNAL, STATE, TAKEN, Memory, Stall, read_stall

_POLL_S, _SUSPENDED_S, _REACH_MAIN_S = 1.0, 5.0, 3.0
"""The last: how long the run's main thread may take to hear of the stall."""


def guard(run_dir: Path, main_thread: int, beats: int, stacks: int) -> None:
    """Return when the run ends; end it when it is stalled."""
    run, memory = psutil.Process(os.getppid()), mmap.mmap(beats, BEAT_BYTES)
    then, suspended_s, last_deadline = time.monotonic(), 0.0, math.inf
    while not _input_closes(_POLL_S):
        now = time.monotonic()
        stall, deadline = read_stall(memory, now)
        if deadline != last_deadline:
            suspended_s, last_deadline = 0.0, deadline
        if now - then > _SUSPENDED_S or _is_suspended(run):  # Ctrl-Z, or the whole machine
            suspended_s += now - then
        elif now > deadline + suspended_s:
            memory[STATE] = ASKED
            run.send_signal(STALL_SIGNAL)
            if _input_closes(_REACH_MAIN_S) or (memory[STATE] == TAKEN and unwinds(memory)):
                return
            if memory[STATE] != 0:
                memory[STATE] = KILLED
                _end(run, run_dir, stall, main_thread, stacks)
                return
        then = time.monotonic()


def unwinds(memory: Memory) -> bool:
    """Wait for the end of a run that has heard of its stall; False: its deadline for that has come."""
    while (now := time.monotonic()) < read_stall(memory, now)[1]:
        if _input_closes(_POLL_S):
            return True
    return False


def _input_closes(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])


def _is_suspended(run: psutil.Process) -> bool:
    try:
        return run.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _end(run: psutil.Process, run_dir: Path, stall: Stall, main_thread: int, stacks: int) -> None:
    # Imported when needed: until then the guard stays about as small as an interpreter can be.
    from pellucid.console import log_to
    from pellucid.files.rundir import RunDir
    from pellucid.observe.stall import end_processes, record_end, write_report

    directory = RunDir(run_dir)
    error = write_report(directory, stall, stacks, run.pid, main_thread)
    record_end(directory, run.pid, str(error))
    with log_to(directory.log):
        error.show()
    children = [process for process in run.children(recursive=True) if process.pid != os.getpid()]
    run.kill()
    end_processes(children)


if __name__ == "__main__":
    guard(Path(sys.argv[1]), *map(int, sys.argv[2:]))
