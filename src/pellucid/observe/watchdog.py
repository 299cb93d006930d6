"""What a run tells of its progress: its start and every finished sample is a beat of a stage, silence for too long a
stall.

Each stage under way has an entry of its own, beside one for the time between stages. `Run.stage` opens them, and
whoever waits for ranks renews them. The guard process of `stall.py` reads the entries in shared memory.
"""

from __future__ import annotations

import math
import mmap
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_ENTRY, _TIMES = struct.Struct("=ddqqq40s"), struct.Struct("=dd")
"""When it is a stall if no beat follows, time of the beat, samples done, of all (−1: not counted), last finished
step, stage."""
NUM_ENTRIES = 32
"""Entry 0 is for the time between stages; the others are for stages, of which more than that are not watched at
once."""
STATE = NUM_ENTRIES * _ENTRY.size
"""Place of the byte that says who deals with a stall: 0 nobody, or one of the following."""
ASKED, TAKEN, KILLED = 1, 2, 3
"""The guard has asked the run to end itself; the run does; the guard ends it."""
BEAT_BYTES = STATE + 1
STALL_SIGNAL = signal.SIGURG
"""By which the guard asks. Ignored by default and used by nothing else, so a stray one does no harm."""
Memory = bytearray | mmap.mmap


@dataclass(slots=True)
class Stall:
    """Where a run stands that makes no progress."""

    stage: str
    """The stage that is stuck (a `Stage` name); between stages, the one that ended last."""
    waited_s: float
    """Seconds since the last beat."""
    num_done: int
    """Samples that the stage has finished."""
    num_total: int | None
    """Samples that the stage is to do; None where it counts none."""
    last_step: int
    """The last finished step; 0 before the first is done."""
    beside: list[str] = field(default_factory=list)
    """Other stages that are under way."""

    def __str__(self) -> str:
        samples = "" if self.num_total is None else f" after {self.num_done} of {self.num_total} samples"
        beside = f", beside {' and '.join(self.beside)}" if self.beside else ""
        done = f"the last finished step is {self.last_step}" if self.last_step else "no step is finished yet"
        return f"no progress for {self.waited_s:.0f} s in stage {self.stage}{samples}{beside}; {done}"


def read_stall(memory: Memory, now: float) -> tuple[Stall, float]:
    """Return the stage that stalls first, and the time (of `time.monotonic`) at which it does; infinite if none is
    watched.
    """
    entries = [_ENTRY.unpack_from(memory, index * _ENTRY.size) for index in range(NUM_ENTRIES)]
    stages = [entry for entry in entries[1:] if entry[0] < math.inf]
    first = min(stages or entries[:1], key=lambda entry: entry[0])
    deadline, beat_at, num_done, num_total, last_step, name = first
    beside = [entry[5].rstrip(b"\0").decode() for entry in stages if entry is not first]
    stage, total = name.rstrip(b"\0").decode(), None if num_total < 0 else num_total
    return Stall(stage, now - beat_at, num_done, total, last_step, beside), deadline


class StageWatch:
    """The entry of one stage under way."""

    def __init__(
        self, watchdog: Watchdog, index: int | None, about: tuple[str, int | None, int], outer: StageWatch | None
    ) -> None:
        self._watchdog, self._index, self._about, self._outer = watchdog, index, about, outer

    def beat(self, num_done: int = 0) -> None:
        """Note that the stage is at work, and has finished `num_done` samples by now; so the stages round it are
        alive, too.
        """
        if self._index is not None:
            self._watchdog.write(self._index, num_done, *self._about)
        if self._outer is not None:
            self._outer.renew()

    def renew(self) -> None:
        """Note that the stage is alive where it was: it waits for processes that are watched in another way."""
        if self._index is not None:
            self._watchdog.renew_entry(self._index)
        if self._outer is not None:
            self._outer.renew()


_current: ContextVar[StageWatch | None] = ContextVar("watched_stage", default=None)


class Watchdog:
    """Notes the progress of a run's stages where its guard looks for a stall.

    Time counts from the first stage on; before that nothing is watched, so loading may take as long as it takes.

    Args:
        timeout_s: seconds without a beat that make a stall; None watches nothing.
        memory: BEAT_BYTES for the entries, shared with the guard.
        clock: monotonic seconds.
    """

    def __init__(
        self, timeout_s: float | None, memory: Memory | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s, self._clock = timeout_s, clock
        self._memory = bytearray(BEAT_BYTES) if memory is None else memory
        self._free = list(range(NUM_ENTRIES - 1, 0, -1))
        for index in range(NUM_ENTRIES):
            self._set_times(index, math.inf, 0.0)

    @contextmanager
    def stage(self, name: str, num_total: int | None = None, last_step: int = 0) -> Iterator[StageWatch]:
        """Watch the enclosed stage, which may run beside others; nested stages keep those round them alive.

        Args:
            name: a `Stage` name.
            num_total: samples that the stage is to do; None where it counts none.
            last_step: the last finished step.
        """
        index = self._free.pop() if self._free and self.timeout_s is not None else None
        watch = StageWatch(self, index, (name, num_total, last_step), outer := _current.get())
        watch.beat()
        _current.set(watch)
        try:
            yield watch
        finally:
            _current.set(outer)
            if index is not None:
                self.write(0, 0, name, None, last_step)
                self._set_times(index, math.inf, 0.0)
                self._free.append(index)
            if outer is not None:
                outer.renew()

    def write(self, index: int, num_done: int, stage: str, num_total: int | None, last_step: int) -> None:
        """Write a beat into an entry; it takes a microsecond or two."""
        if self.timeout_s is not None:
            now, total = self._clock(), -1 if num_total is None else num_total
            about = (now + self.timeout_s, now, num_done, total, last_step, stage.encode())
            _ENTRY.pack_into(self._memory, index * _ENTRY.size, *about)

    def renew_entry(self, index: int) -> None:
        """Note that what an entry is of is alive where it was, if it is watched."""
        if self.timeout_s is not None and self._times(index)[0] < math.inf:
            now = self._clock()
            self._set_times(index, now + self.timeout_s, now)

    def renew(self) -> None:
        """Note that the calling task, in whichever stage, is alive: it waits for processes that are watched in
        another way.
        """
        watch = _current.get()
        if watch is None:
            self.renew_entry(0)
        else:
            watch.renew()

    def put_off(self, seconds: float) -> None:
        """Make it a stall of what is watched, or of the time between stages, only if no beat follows for so long."""
        for index in range(NUM_ENTRIES):
            deadline, beat_at = self._times(index)
            if index == 0 or deadline < math.inf:
                self._set_times(index, self._clock() + seconds, beat_at)

    def _times(self, index: int) -> tuple[float, float]:
        deadline, beat_at = _TIMES.unpack_from(self._memory, index * _ENTRY.size)
        return deadline, beat_at

    def _set_times(self, index: int, deadline: float, beat_at: float) -> None:
        _TIMES.pack_into(self._memory, index * _ENTRY.size, deadline, beat_at)
