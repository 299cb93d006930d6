"""Notices when a run makes no progress: every stage start and every finished sample is a beat, silence for too long a stall.

The step display beats, on a terminal or not, and whoever waits for ranks. `stall.py` says what happens on a stall.
"""

from __future__ import annotations

import math
import mmap
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_LOOK_EVERY_S, _SUSPENDED_S = 1.0, 5.0

_BEAT, _TIMES = struct.Struct("=ddqqq40s"), struct.Struct("=dd")
"""When it is a stall if no beat follows, time of the beat, samples done, of all (−1: not counted), last finished step, stage."""
BEAT_BYTES = _BEAT.size
STALL_SIGNAL = signal.SIGURG
"""Makes a run dump its stacks. Ignored by default and used by nothing else, so a stray one does no harm."""


@dataclass(slots=True)
class Stall:
    """Where a run stands that makes no progress."""

    stage: str
    """The stage that began last (a `Stage` name)."""
    waited_s: float
    """Seconds since the last beat."""
    num_done: int
    """Samples that the stage has finished."""
    num_total: int | None
    """Samples that the stage is to do; None where it counts none."""
    last_step: int
    """The last finished step; 0 before the first is done."""

    def __str__(self) -> str:
        samples = "" if self.num_total is None else f" after {self.num_done} of {self.num_total} samples"
        done = f"the last finished step is {self.last_step}" if self.last_step else "no step is finished yet"
        return f"no progress for {self.waited_s:.0f} s in stage {self.stage}{samples}; {done}"


def read_beat(memory: bytes | bytearray | mmap.mmap, now: float) -> tuple[Stall, float]:
    """Return where a run stands, and the time (of `time.monotonic`) at which that is a stall; infinite if it is not watched."""
    deadline, at, num_done, num_total, last_step, stage = _BEAT.unpack_from(memory)
    return Stall(stage.rstrip(b"\0").decode(), now - at, num_done, None if num_total < 0 else num_total, last_step), deadline


def set_deadline(memory: bytearray | mmap.mmap, deadline: float) -> None:
    """Make it a stall only if no beat follows until `deadline`; infinite: watch nothing until the next beat."""
    _TIMES.pack_into(memory, 0, deadline, _TIMES.unpack_from(memory)[1])


class Watchdog:
    """Looks for a stall every second, in a thread of its own inside a `with` block.

    Time counts from a beat on; before the first one nothing is watched, so loading may take as long as it takes.

    Args:
        timeout_s: seconds without a beat that make a stall; None watches nothing and starts no thread.
        on_stall: called once, in the thread, which then ends.
        memory: BEAT_BYTES for the last beat; shared memory lets another process look, too.
        clock: monotonic seconds.
        cpu_clock: seconds of processor time of this process.
    """

    def __init__(
        self,
        timeout_s: float | None,
        on_stall: Callable[[Stall], None],
        *,
        memory: bytearray | mmap.mmap | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.timeout_s, self._on_stall = timeout_s, on_stall
        self._memory = bytearray(BEAT_BYTES) if memory is None else memory
        self._clock, self._cpu_clock = clock, cpu_clock
        self._looked, self._cpu_then = clock(), cpu_clock()
        self.stalled = False
        """Whether the thread found a stall."""
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        set_deadline(self._memory, math.inf)

    def beat(self, stage: str, num_done: int = 0, num_total: int | None = None, last_step: int = 0) -> None:
        """Say that the run is alive: a stage began, or has finished `num_done` samples by now. Takes a microsecond or two."""
        if self.timeout_s is not None:
            now, total = self._clock(), -1 if num_total is None else num_total
            _BEAT.pack_into(self._memory, 0, now + self.timeout_s, now, num_done, total, last_step, stage.encode())

    def put_off(self, seconds: float) -> None:
        """Make it a stall only if no beat follows for so long from now."""
        set_deadline(self._memory, self._clock() + seconds)

    def renew(self) -> None:
        """Say that the run is alive where it was: it waits for processes that are watched in another way."""
        now = self._clock()
        if self.timeout_s is not None and read_beat(self._memory, now)[1] < math.inf:
            _TIMES.pack_into(self._memory, 0, now + self.timeout_s, now)

    def check(self) -> Stall | None:
        """Return the stall if there is one by now. To be called every second or so: a longer silence means suspension."""
        now, cpu = self._clock(), self._cpu_clock()
        silence_s, worked_s = now - self._looked, cpu - self._cpu_then
        self._looked, self._cpu_then = now, cpu
        stall, deadline = read_beat(self._memory, now)
        # Nobody looked for long, and this process hardly computed: it was suspended (Ctrl-Z, a batch system that takes
        # turns), which is no stall. A computation that keeps this thread from looking uses the processor.
        if silence_s > _SUSPENDED_S and worked_s < 0.1 * silence_s:
            self.renew()
            return None
        return stall if now >= deadline else None

    def __enter__(self) -> Watchdog:
        if self.timeout_s is not None:
            wait_s = min(_LOOK_EVERY_S, self.timeout_s / 10)
            self._thread = threading.Thread(target=self._watch, args=(wait_s,), name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop looking; a call of `on_stall` that has begun goes on."""
        self._done.set()
        if self._thread is not None and not self.stalled:
            self._thread.join()

    def _watch(self, wait_s: float) -> None:
        while not self._done.wait(wait_s):
            stall = self.check()
            if stall is not None:
                self.stalled = True
                self._on_stall(stall)
                return
