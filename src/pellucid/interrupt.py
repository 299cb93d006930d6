"""Turns Ctrl-C and SIGTERM into a request to finish the step, write a checkpoint and leave; a second ends at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pellucid.console import console


class StopRequested(Exception):  # noqa: N818
    """The run stopped because it was asked to; `signal_number` gives the exit status 128 + n."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """Collect the number of a first SIGINT or SIGTERM for the time of the block; a second one interrupts as usual."""
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        message = "\nstopping: finishing this step, then writing a checkpoint (once more to stop at once)"
        console.print(message, markup=False)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
