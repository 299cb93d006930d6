"""Turns Ctrl-C and SIGTERM into a request to finish the step, write a checkpoint and leave; a second ends at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from pellucid.console import console


class StopRequested(Exception):  # noqa: N818
    """The run stopped because it was asked to; `signal_number` gives the exit status 128 + n."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


@dataclass(slots=True)
class StopFlag:
    """Whether a signal asked the run to stop, and which."""

    signal_number: int = 0

    @property
    def requested(self) -> bool:
        """True once a signal has come."""
        return self.signal_number != 0


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn the first SIGINT or SIGTERM into a flag for the time of the block; the second one interrupts as usual."""
    flag = StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.requested:
            raise KeyboardInterrupt
        flag.signal_number = number
        message = "\nstopping: finishing this step, then writing a checkpoint (once more to stop at once)"
        console.print(message, markup=False)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
