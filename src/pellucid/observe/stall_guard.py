"""The guard process of a run: looks for a stall, and ends a stalled run that does not end itself.

`stall.py` starts it as `python -m pellucid.observe.stall_guard RUN_DIR MAIN_THREAD BEAT_FD STACKS_FD`. It sees the
run's beats in the file BEAT_FD, has the run dump its stacks into STACKS_FD, and ends when its own input closes.
"""

import mmap
import os
import select
import sys
import time
from pathlib import Path

import psutil

from pellucid.observe.watchdog import BEAT_BYTES, STALL_SIGNAL, find_stall, read_beats

_POLL_S, _REACH_MAIN_S, _SUSPENDED_S = 1.0, 3.0, 5.0
"""How often it looks; how long the run's main thread may take to hear of its stall; a pause between two looks that is
none of the run's."""


def guard(run_dir: Path, main_thread: int, beats_file: int, stacks: int) -> None:
    """Return when the run ends; end it when it is stalled."""
    run, memory = psutil.Process(os.getppid()), mmap.mmap(beats_file, BEAT_BYTES)
    then, suspended_s, was_asked, last_deadline = time.monotonic(), 0.0, False, 0.0
    while not select.select([0], [], [], _REACH_MAIN_S if was_asked else _POLL_S)[0]:  # its input closes
        try:
            is_ending, beats = read_beats(memory)
            is_stopped = run.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # Ctrl-Z
        except (ValueError, psutil.NoSuchProcess):  # it writes them at this moment; it ends
            continue
        elapsed_s, then = time.monotonic() - then, time.monotonic()
        stall, deadline = find_stall(beats, then)
        if deadline != last_deadline:  # it went on, or has heard of its stall
            suspended_s, was_asked, last_deadline = 0.0, False, deadline
        if is_stopped or elapsed_s > _SUSPENDED_S:
            suspended_s += elapsed_s
        elif then > deadline + suspended_s:
            if was_asked or is_ending:
                _end(run, run_dir, stall, main_thread, stacks)
                return
            run.send_signal(STALL_SIGNAL)
            was_asked = True


def _end(run: psutil.Process, run_dir: Path, stall: str, main_thread: int, stacks: int) -> None:
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
