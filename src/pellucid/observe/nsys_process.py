"""Runs a program under nsys as if it ran alone: its output, the signals for it and its exit status pass through.

The controller calls `record`; Ray starts a rank as `python nsys_process.py SETTINGS ARGUMENTS…` in place of
`python ARGUMENTS…`. nsys starts a small process of ours, which starts the program and tells through a pipe how it
ended: whatever nsys does or fails to do afterwards, the status is known. Files get their names in `recording.py`.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import psutil

START_S, NUM_STARTS = 20.0, 2
"""How long nsys, which now and then hangs there, may take to start the program, and how often that is tried. Ray waits
a minute for a rank."""
AFTER_S = 180.0
"""How long program and nsys together may take to end once the program's work is done."""
VARIABLE = "PELLUCID_NSYS"
"""Environment variable by which a recorded process knows its `Recording`."""
PROBLEM = "PELLUCID_NSYS_PROBLEM"
"""Environment variable by which a process that should be recorded knows why it is not."""
DONE, LOG = ".done", ".log"


@dataclass(frozen=True, slots=True)
class Recording:
    """How nsys records a process."""

    raw: str
    """What the names of its files begin with: a folder and the name of the process."""
    capture_range: str | None
    """`cudaProfilerApi`, `nvtx`, …; None: it records from start to end."""
    pipe: int
    """Descriptor to which the process may write its exit status before it ends."""


@cache
def own_recording() -> Recording | None:
    """Return how nsys records this process; None where it does not. Of the controller, the ranks are not told."""
    settings = os.environ.get(VARIABLE)
    return None if settings is None else Recording(**json.loads(settings))


def record(nsys: Sequence[str], raw: Path, program: Sequence[str], after_s: float = AFTER_S) -> tuple[int | None, str]:
    """Run a program under nsys to its end, and to the end of nsys, which is killed where that takes too long.

    Args:
        nsys: `nsys profile` and its options, without the output.
        raw: what the names of its files begin with; `<raw>.log` gets what nsys says, `<raw>.done` comes last.
        program: the program and its arguments; it gets this process's output streams.
        after_s: seconds that nsys may take once the program has ended.

    Returns:
        The program's exit status, 128 + n where signal n killed it, None where nsys did not start it; and what went
        wrong, for the user.
    """
    status, problem = None, ""
    for number in range(NUM_STARTS):
        status, problem = _record(nsys, raw, program, after_s, f"pellucid-{os.getpid()}-{number}")
        if status is not None:
            break
    _beside(raw, DONE).touch()
    return status, problem


def _record(
    nsys: Sequence[str], raw: Path, program: Sequence[str], after_s: float, session: str
) -> tuple[int | None, str]:
    """Do what `record` does, trying once, with a session of nsys of that name."""
    told, tell = os.pipe()
    lives, alive = os.pipe()
    os.umask(umask := os.umask(0))
    inherited = (os.dup(1), os.dup(2), tell, lives)
    child = [sys.executable, "-P", __file__, "--child", *map(str, (umask, *inherited)), *program]
    ranges = [option.partition("=")[2] for option in nsys if option.startswith("--capture-range=")]
    own = Recording(str(raw), next((name for name in ranges if name != "none"), None), tell)
    with _beside(raw, LOG).open("w") as log:
        process = subprocess.Popen(
            [*nsys, f"--session-new={session}", f"--output={raw}", *child],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
            env=os.environ | {VARIABLE: json.dumps(asdict(own))},
        )
    for descriptor in inherited:
        os.close(descriptor)
    status, problem = None, ""
    try:
        pid = _read(told, time.monotonic() + START_S)
        if pid is None:
            lines = map(str.strip, _beside(raw, LOG).read_text(errors="replace").splitlines())
            said = " ".join(line for line in lines if line and not line.startswith(("usage:", "Try ")))
            return None, f"nsys did not start the program: {said[:400] or 'it hung'}"
        with _handing_on_signals(pid):
            status = _read(told, None)
            deadline = time.monotonic() + after_s
            while (later := _read(told, deadline)) is not None:
                status = later
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                problem = f"{after_s:.0f} s after the run nsys was still at work, and was killed; its files are kept"
        return 1 if status is None else status, problem
    finally:
        os.close(alive)  # kills the program if it is still there
        os.close(told)
        _kill(process, session)


def _beside(raw: Path, suffix: str) -> Path:
    return raw.with_name(raw.name + suffix)


def _read(pipe: int, deadline: float | None) -> int | None:
    """Return the next number from the pipe; None at its end, or after the deadline."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not select.select([pipe], [], [], left)[0]:
        return None
    answer = os.read(pipe, 4)
    return int.from_bytes(answer) if answer else None


def _kill(process: subprocess.Popen[bytes], session: str) -> None:
    """Kill what is left of nsys: its own process group, and the agent, which has left that."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for other in psutil.process_iter(["cmdline"]):
            if f"--session-name={session}" in (other.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    other.kill()
        process.wait()


@contextmanager
def _handing_on_signals(pid: int) -> Iterator[None]:
    """Hand signals that ask for an end on to the program."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has ended; nsys is still at its files
            os.kill(pid, number)

    previous = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def be_started_by_nsys(umask: int, out: int, err: int, tell: int, lives: int, program: Sequence[str]) -> int:
    """Run the program without what nsys changes for it, tell its process id and its exit status, and return that.

    The program is killed when the process that records it, which holds the other end of `lives`, is gone.
    """
    os.umask(umask)
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=[tell])
    os.write(tell, child.pid.to_bytes(4))
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())

    def kill_with_recorder() -> None:
        os.read(lives, 1)
        child.kill()

    threading.Thread(target=kill_with_recorder, daemon=True).start()
    status = child.wait()
    status = status if status >= 0 else 128 - status
    os.write(tell, status.to_bytes(4))
    return status


def run_and_tell(main: Callable[[], None]) -> None:
    """Run a command in a process that nsys records, and tell its exit status before its exit: nsys may hang there."""
    recording, status = own_recording(), 1
    assert recording is not None
    os.set_inheritable(recording.pipe, False)
    try:
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        os.write(recording.pipe, status.to_bytes(4))


def main() -> None:
    """Be the process that nsys starts, or the one that records a rank; on a machine without nsys the rank alone."""
    if sys.argv[1] == "--child":
        sys.exit(be_started_by_nsys(*map(int, sys.argv[2:7]), program=sys.argv[7:]))
    settings, program = json.loads(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    if shutil.which("nsys") is not None:
        status, problem = record(settings["nsys"], Path(settings["raw"]), program)
        if status is not None:
            sys.stderr.write(f"profiling: {problem}\n" if problem else "")
            sys.exit(status)
        os.environ[PROBLEM] = problem
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
