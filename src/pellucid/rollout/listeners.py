"""Progress callbacks of requests that another thread or process answers, each called in the loop it came from."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from pellucid.rollout.requests import Progress, Request


class ProgressListeners:
    """The callbacks of all requests under way."""

    def __init__(self) -> None:
        self._listeners: Counter[tuple[asyncio.AbstractEventLoop, Progress]] = Counter()
        """Callbacks with the loop they belong to, each with the number of its requests that are under way."""

    @contextlib.contextmanager
    def hearing(self, request: Request) -> Iterator[None]:
        """Let the callback of a request hear of progress while the block runs, and of its answer at the end."""
        if (progress := request.on_progress) is None:
            yield
            return
        listener = asyncio.get_running_loop(), progress
        self._listeners[listener] += 1
        try:
            yield
        finally:
            self._listeners[listener] -= 1
            if not self._listeners[listener]:
                del self._listeners[listener]
        progress(1)

    def tell(self) -> None:
        """Tell all that decoding goes on; from any thread."""
        for loop, listener in list(self._listeners):
            with contextlib.suppress(RuntimeError):  # its last request ended, and the loop with it
                loop.call_soon_threadsafe(listener, 0)
