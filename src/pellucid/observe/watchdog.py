"""What a run tells of its progress: its start and each finished sample is a beat of a stage, long silence a stall.

`Run.stage` opens a watch for each stage, and whoever waits for ranks renews them all. The guard process of
`stall_guard.py` reads them in shared memory, as JSON.
"""

from __future__ import annotations

import json
import math
import mmap
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

BEAT_BYTES = 1 << 14
STALL_SIGNAL = signal.SIGURG
"""By which the guard asks a run to end. Ignored by default and used by nothing else, so a stray one does no harm."""
_MAX_STAGES = 32
"""More than that are not watched at once."""
_BEAT_S = 0.1
"""Beats that say nothing new are this far apart."""


class Beat(NamedTuple):
    """The last sign of life of one stage; times are of `time.monotonic`."""

    deadline: float
    """When it is a stall if no beat follows."""
    beat_at: float
    stage: str
    """Its name and how far it is; between stages, of the one that ended last."""
    last_step: int
    """The last finished step; 0 before the first is done."""


def find_stall(beats: list[Beat], now: float) -> tuple[str, float]:
    """Return where the stage stands that stalls first, and when it does; infinity where none is watched."""
    first = min(beats, default=Beat(math.inf, now, "", 0))
    beside = " and ".join(beat.stage.partition(" ")[0] for beat in beats if beat is not first)
    done = f"the last finished step is {first.last_step}" if first.last_step else "no step is finished yet"
    where = first.stage + (f", beside {beside}" if beside else "")
    return f"no progress for {now - first.beat_at:.0f} s in stage {where}; {done}", first.deadline


class StageWatch:
    """Hears of the progress of one stage under way."""

    def __init__(self, watchdog: Watchdog, name: str, num_total: int | None, last_step: int) -> None:
        self._watchdog, self._name, self._num_total, self._last_step = watchdog, name, num_total, last_step
        self._num_done, self._outer = 0, _current.get()
        self.beat_at, self.deadline = 0.0, math.inf

    def beat(self, num_done: int = 0) -> None:
        """Note that the stage has finished `num_done` samples by now; it and the stages round it are alive."""
        if num_done != self._num_done or self._watchdog.clock() >= self.beat_at + _BEAT_S:
            self._num_done = num_done
            self.renew()

    def renew(self) -> None:
        """Note that the stage is alive where it was: it waits for processes that are watched in another way."""
        if self._watchdog.timeout_s is not None:
            self.beat_at = self._watchdog.clock()
            self.deadline = self.beat_at + self._watchdog.timeout_s
            self._watchdog.write()
        if self._outer is not None:
            self._outer.renew()

    @property
    def last(self) -> Beat:
        """The last beat."""
        samples = "" if self._num_total is None else f" after {self._num_done} of {self._num_total} samples"
        return Beat(self.deadline, self.beat_at, self._name + samples, self._last_step)


_current: ContextVar[StageWatch | None] = ContextVar("watched_stage", default=None)


class Watchdog:
    """Notes the progress of a run's stages where its guard looks for a stall.

    Time counts from the first stage on; before that nothing is watched, so loading may take as long as it takes.

    Args:
        timeout_s: seconds without a beat that make a stall; None watches nothing.
        memory: BEAT_BYTES for the beats, shared with the guard.
        clock: monotonic seconds.
    """

    def __init__(
        self, timeout_s: float | None, memory: mmap.mmap | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s, self.clock, self._memory = timeout_s, clock, memory
        self.is_stalled = False
        """Whether the run has heard of its stall, and ends."""
        self._stages: list[StageWatch] = []
        self._between: list[StageWatch] = []
        """The time between stages, under the name of the last one; none before the first."""
        self._lock = threading.RLock()  # a signal handler may find its own thread within

    @contextmanager
    def stage(self, name: str, num_total: int | None = None, last_step: int = 0) -> Iterator[StageWatch]:
        """Watch the enclosed stage, which may run beside others; nested stages keep those round them alive.

        Args:
            name: a `Stage` name.
            num_total: samples that the stage is to do; None where it counts none.
            last_step: the last finished step.
        """
        watch, outer = StageWatch(self, name, num_total, last_step), _current.get()
        self._stages.append(watch)
        watch.renew()
        _current.set(watch)
        try:
            yield watch
        finally:
            _current.set(outer)
            self._stages.remove(watch)
            self._between = [StageWatch(self, name, None, last_step)]
            self._between[0].renew()

    def renew(self) -> None:
        """Note that the calling task is alive: it waits for processes that are watched in another way."""
        watch = _current.get()
        for alive in self._between if watch is None else [watch]:
            alive.renew()

    def put_off(self, seconds: float) -> None:
        """Make it a stall only if no beat follows for so long."""
        for watch in self._stages or self._between:
            watch.deadline = self.clock() + seconds
        self.write()

    def beats(self) -> list[Beat]:
        """Return the last beats of what is watched: the stages under way, or else the time between stages."""
        return [watch.last for watch in tuple(self._stages or self._between)]

    def write(self) -> None:
        """Write the beats to where the guard reads them."""
        if self._memory is not None:
            with self._lock:
                content = json.dumps([self.is_stalled, self.beats()[:_MAX_STAGES]])
                self._memory[:] = content.encode().ljust(BEAT_BYTES)


def read_beats(memory: mmap.mmap) -> tuple[bool, list[Beat]]:
    """Return whether the run knows that it is stalled, and its beats.

    Raises:
        ValueError: they are being written at this moment.
    """
    is_stalled, beats = json.loads(memory[:])
    return is_stalled, [Beat(*beat) for beat in beats]
