"""Tells an nsys that works from one that hangs, and ends the latter: nobody should wait ten minutes for nothing.

`nsys_launch.py` and `nsys_files.py` ask while they wait for nsys; what is known of it is what the operating system shows.
"""

import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

HUNG_S, IDLE_SHARE = 30.0, 0.05
"""An nsys hangs that has used less of a core than this for so long, without waiting for a disk; its agent polls, at about 0.01."""
LOOK_S, KILL_S = 1.0, 5.0
_NAMES = ("nsys", "QdstrmImporter")


def nsys_tree(pid: int) -> list[psutil.Process]:
    """Return an nsys, its agent, which is no child of it, and all processes below them; those of them that are left."""
    session = f"-{pid}"  # the agent's session is named after its nsys
    roots = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid == pid
        or any(part.startswith("--session-name=") and part.endswith(session) for part in process.info["cmdline"] or ())
    ]
    found: dict[int, psutil.Process] = {}
    for root in roots:
        try:
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def nsys_below() -> list[psutil.Process]:
    """Return the nsys processes, and those that convert for them, that this process started or adopted and that are at work."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name().startswith(_NAMES) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def end(processes: Collection[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone, a few seconds at most."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # other users' processes stay
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_S)


class HungWatch:
    """Watches processes, and the folder that they write into, from the first question on."""

    def __init__(self, folder: Path, processes: Callable[[], list[psutil.Process]]) -> None:
        """`processes` returns those that there are at the time."""
        self._folder, self._processes = folder, processes
        self._since = self._looked = -math.inf
        self._cpu_s: dict[int, float] = {}
        self._num_bytes = 0

    def hung(self) -> bool:
        """Tell whether for `HUNG_S` no process used the processor or waited for a disk, and the folder did not change."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        cpu_s, at_disk = {}, False
        for process in self._processes():
            try:
                times = process.cpu_times()
                at_disk = at_disk or process.status() == psutil.STATUS_DISK_SLEEP
            except psutil.Error:
                continue
            cpu_s[process.pid] = times.user + times.system
        num_bytes = _num_bytes(self._folder)
        used_s = sum(seconds - self._cpu_s.get(pid, 0.0) for pid, seconds in cpu_s.items())
        others = cpu_s.keys() != self._cpu_s.keys() or not cpu_s
        if others or at_disk or num_bytes != self._num_bytes or used_s > IDLE_SHARE * HUNG_S:
            self._since, self._cpu_s, self._num_bytes = now, cpu_s, num_bytes
        return now - self._since >= HUNG_S


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # nsys has files for a moment
            total += path.stat().st_size
    return total


def run_watched(command: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Run a program that writes into `folder`, and return its exit status and what it said.

    Raises:
        TimeoutError: it hung, or took longer than `limit_s`, and has been ended.
        OSError: it cannot be started.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        watch = HungWatch(folder, lambda: nsys_tree(process.pid))
        while True:
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                hung = watch.hung()
                if not hung and time.monotonic() < deadline:
                    continue
                end(nsys_tree(process.pid))
                process.wait()
                why = f"it did nothing for {HUNG_S:.0f} s" if hung else f"it took longer than {limit_s:.0f} s"
                raise TimeoutError(why) from None
            said.seek(0)
            return process.returncode, said.read().decode(errors="replace")
