"""The guard process of a run: ends it when its own watchdog cannot, because a call keeps Python's interpreter lock.

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

from pellucid.observe.watchdog import BEAT_BYTES, STALL_SIGNAL, Stall, read_stall, set_deadlines

_POLL_S, _SUSPENDED_S = 1.0, 5.0
_LATER_S = 3.0
"""How much later than the watchdog the guard takes a silence for a stall."""
_DUMP_S = 1.0


def guard(run_dir: Path, main_thread: int, beat: int, stacks: int) -> None:
    """Return when the run ends; end it when it is stalled."""
    run, memory = psutil.Process(os.getppid()), mmap.mmap(beat, BEAT_BYTES)
    then, suspended_s, last_deadline = time.monotonic(), 0.0, math.inf
    while not _input_closes(_POLL_S):
        now = time.monotonic()
        stall, deadline = read_stall(memory, now)
        if deadline != last_deadline:
            suspended_s, last_deadline = 0.0, deadline
        if now - then > _SUSPENDED_S or _is_suspended(run):
            suspended_s += now - then
        elif now > deadline + suspended_s + _LATER_S:
            # A call that looks for signals, as the matching of a regular expression does, lets the watchdog have the
            # lock for a moment when one comes; that must not begin what it could not bring to an end.
            set_deadlines(memory, math.inf)
            run.send_signal(STALL_SIGNAL)
            if _input_closes(_DUMP_S):
                return
            if read_stall(memory, now)[1] == math.inf:
                _end(run, run_dir, stall, main_thread, stacks)
                return
        then = time.monotonic()


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
    from pellucid.observe.stall import end_processes, read_all, record_end, write_report

    directory = RunDir(run_dir)
    report = write_report(directory, stall, read_all(stacks), run.pid, main_thread)
    record_end(directory, run.pid, report.reason)
    with log_to(directory.log):
        report.show()
    children = [process for process in run.children(recursive=True) if process.pid != os.getpid()]
    run.kill()
    end_processes(children)


if __name__ == "__main__":
    guard(Path(sys.argv[1]), *map(int, sys.argv[2:]))
