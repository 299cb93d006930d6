"""The process that outlives a killed one for a moment and ends what that had started and would leave behind.

Ray's agents try for a minute to report the death of their server to a controller that is gone, and vLLM's engine core
waits for ever for requests of a process that is dead.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

LOOK_EVERY_S = 0.2


class ProcessGuard:
    """Kills the processes that it was told of when it is closed, or with the death of this process, however that comes.

    Where the system cannot hold on to a process (all but Linux) it does nothing.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if hasattr(os, "pidfd_open"):
            command = [sys.executable, "-P", "-S", __file__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def watch(self, pids: Iterable[int]) -> None:
        """Add processes, by their ids."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"".join(b"%d\n" % pid for pid in pids))
            self._process.stdin.flush()

    @contextlib.contextmanager
    def watching_children(self) -> Iterator[None]:
        """Add the processes that this one starts, by Python's `multiprocessing`, while the block runs."""
        known, over = set(multiprocessing.active_children()), threading.Event()

        def look() -> None:
            while not over.wait(LOOK_EVERY_S):
                watch_new()

        def watch_new() -> None:
            new = set(multiprocessing.active_children()) - known
            known.update(new)
            self.watch(child.pid for child in new if child.pid is not None)

        looking = threading.Thread(target=look, name="process guard", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
            watch_new()

    def close(self) -> None:
        """End those that are alive."""
        if self._process is not None:
            self._process.communicate()  # closes its standard input


def _guard() -> None:
    held = []
    for line in sys.stdin:
        with contextlib.suppress(ProcessLookupError):
            held.append(os.pidfd_open(int(line)))  # unlike its number, this never comes to mean another process
    for descriptor in held:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


if __name__ == "__main__":
    _guard()
