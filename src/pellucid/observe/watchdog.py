"""Notices when a stage makes no progress: its start and every finished sample is a beat, silence for too long a stall.

Each stage under way has an entry of its own, beside one for the time between stages. `Run.stage` opens them, and
whoever waits for ranks renews them. `stall.py` says what happens on a stall; its guard process reads the entries in
shared memory.
"""

from __future__ import annotations

import math
import mmap
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_LOOK_EVERY_S, _SUSPENDED_S = 1.0, 5.0

_ENTRY, _TIMES = struct.Struct("=ddqqq40s"), struct.Struct("=dd")
"""When it is a stall if no beat follows, time of the beat, samples done, of all (−1: not counted), last finished
step, stage."""
NUM_ENTRIES = 32
"""Entry 0 is for the time between stages; the others are for stages, of which more than that are not watched at
once."""
BEAT_BYTES = NUM_ENTRIES * _ENTRY.size
STALL_SIGNAL = signal.SIGURG
"""Makes a run dump its stacks. Ignored by default and used by nothing else, so a stray one does no harm."""
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


def set_deadlines(memory: Memory, deadline: float) -> None:
    """Make a stall of what is watched, or of the time between stages, only if no beat follows until `deadline`.

    An infinite deadline watches nothing until the next beat.
    """
    for offset in range(0, BEAT_BYTES, _ENTRY.size):
        current, beat_at = _TIMES.unpack_from(memory, offset)
        if current < math.inf or offset == 0:
            _TIMES.pack_into(memory, offset, deadline, beat_at)


class StageWatch:
    """The entry of one stage under way."""

    def __init__(
        self,
        watchdog: Watchdog,
        index: int | None,
        stage: str,
        num_total: int | None,
        last_step: int,
        outer: StageWatch | None,
    ) -> None:
        self._watchdog, self._index, self._stage, self._outer = watchdog, index, stage, outer
        self._num_total, self._last_step = num_total, last_step

    def beat(self, num_done: int = 0) -> None:
        """Note that the stage is at work, and has finished `num_done` samples by now; so the stages round it are
        alive, too.
        """
        if self._index is not None:
            self._watchdog.write(self._index, self._stage, num_done, self._num_total, self._last_step)
        self.renew_outer()

    def renew(self) -> None:
        """Note that the stage is alive where it was: it waits for processes that are watched in another way."""
        if self._index is not None:
            self._watchdog.renew_entry(self._index)
        self.renew_outer()

    def renew_outer(self) -> None:
        """Note that the stages round this one are alive."""
        if self._outer is not None:
            self._outer.renew()


_current: ContextVar[StageWatch | None] = ContextVar("watched_stage", default=None)


class Watchdog:
    """Looks for a stall every second, in a thread of its own inside a `with` block.

    Time counts from the first stage on; before that nothing is watched, so loading may take as long as it takes.

    Args:
        timeout_s: seconds without a beat that make a stall; None watches nothing and starts no thread.
        on_stall: called once, in the thread, which then ends.
        memory: BEAT_BYTES for the entries; shared memory lets another process look, too.
        clock: monotonic seconds.
        cpu_clock: seconds of processor time of this process.
    """

    def __init__(
        self,
        timeout_s: float | None,
        on_stall: Callable[[Stall], None],
        *,
        memory: Memory | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.timeout_s, self._on_stall = timeout_s, on_stall
        self._memory = bytearray(BEAT_BYTES) if memory is None else memory
        self._clock, self._cpu_clock = clock, cpu_clock
        self._looked, self._cpu_then = clock(), cpu_clock()
        self.stalled = False
        """Whether the thread found a stall."""
        self._free = list(range(NUM_ENTRIES - 1, 0, -1))
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        for offset in range(0, BEAT_BYTES, _ENTRY.size):
            _TIMES.pack_into(self._memory, offset, math.inf, 0.0)

    @contextmanager
    def stage(self, name: str, num_total: int | None = None, last_step: int = 0) -> Iterator[StageWatch]:
        """Watch the enclosed stage, which may run beside others; nested stages keep those round them alive.

        Args:
            name: a `Stage` name.
            num_total: samples that the stage is to do; None where it counts none.
            last_step: the last finished step.
        """
        index = self._free.pop() if self._free and self.timeout_s is not None else None
        watch = StageWatch(self, index, name, num_total, last_step, outer := _current.get())
        watch.beat()
        _current.set(watch)
        try:
            yield watch
        finally:
            _current.set(outer)
            if index is not None:
                self.write(0, name, 0, None, last_step)
                _TIMES.pack_into(self._memory, index * _ENTRY.size, math.inf, 0.0)
                self._free.append(index)
            watch.renew_outer()

    def write(self, index: int, stage: str, num_done: int, num_total: int | None, last_step: int) -> None:
        """Write a beat into an entry; it takes a microsecond or two."""
        if self.timeout_s is not None:
            now, total = self._clock(), -1 if num_total is None else num_total
            deadline = now + self.timeout_s
            _ENTRY.pack_into(
                self._memory, index * _ENTRY.size, deadline, now, num_done, total, last_step, stage.encode()
            )

    def renew_entry(self, index: int) -> None:
        """Note that what an entry is of is alive where it was, if it is watched."""
        now, offset = self._clock(), index * _ENTRY.size
        if self.timeout_s is not None and _TIMES.unpack_from(self._memory, offset)[0] < math.inf:
            _TIMES.pack_into(self._memory, offset, now + self.timeout_s, now)

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
        """Make it a stall only if no beat follows for so long from now."""
        set_deadlines(self._memory, self._clock() + seconds)

    def check(self) -> Stall | None:
        """Return the stall if there is one by now. To be called every second or so: a longer silence means
        suspension.
        """
        now, cpu = self._clock(), self._cpu_clock()
        silence_s, worked_s = now - self._looked, cpu - self._cpu_then
        self._looked, self._cpu_then = now, cpu
        stall, deadline = read_stall(self._memory, now)
        # Nobody looked for long, and this process hardly computed: it was suspended (Ctrl-Z, a batch system that takes
        # turns), which is no stall. A computation that keeps this thread from looking uses the processor.
        if silence_s > _SUSPENDED_S and worked_s < 0.1 * silence_s:
            for index in range(NUM_ENTRIES):
                self.renew_entry(index)
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
