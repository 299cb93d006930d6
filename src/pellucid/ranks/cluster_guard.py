"""The process that outlives a killed controller for a moment and ends what is left of the run's own Ray cluster.

`start_guard` starts it from the controller. Ray's agents would try for a minute to report the death of their server to
a controller that is gone; they have nothing else to do by then.
"""

import contextlib
import os
import signal
import subprocess
import sys


def start_guard(pids: list[int]) -> subprocess.Popen[bytes] | None:
    """Start the guard of these processes; None where the system cannot hold on to a process (all but Linux).

    It kills those that are alive when its standard input ends: when the returned process' `stdin` is closed, or with
    the death of this process, however that comes.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    command = [sys.executable, "-P", "-S", __file__, *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _guard(pids: list[int]) -> None:
    held = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            held.append(os.pidfd_open(pid))  # unlike its number, this never comes to mean another process
    sys.stdin.read()
    for descriptor in held:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


if __name__ == "__main__":
    _guard([int(word) for word in sys.argv[1:]])
