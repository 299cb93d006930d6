"""Requests that another thread or process answers: their names, and progress callbacks, each called in its own loop."""

import asyncio
import contextlib
from collections.abc import Iterator

from pellucid.rollout.requests import Request


class RequestsUnderWay:
    """All requests that wait for their answers; callers may be in several threads."""

    def __init__(self) -> None:
        self._requests: dict[object, tuple[asyncio.AbstractEventLoop, Request]] = {}
        """Each with the loop that it came from; one request may be asked twice."""

    @property
    def names(self) -> list[str]:
        """Names of the trajectories that the requests belong to."""
        return [request.stream.name for _, request in list(self._requests.values())]

    @contextlib.contextmanager
    def noted(self, request: Request) -> Iterator[None]:
        """Keep a request among them while the block runs, at the end of which its callback hears of its answer."""
        key = object()
        self._requests[key] = asyncio.get_running_loop(), request
        try:
            yield
        finally:
            del self._requests[key]
        if request.on_progress is not None:
            request.on_progress(1)

    def tell(self) -> None:
        """Tell each callback once that decoding goes on; from any thread."""
        for loop, listener in {(loop, request.on_progress) for loop, request in list(self._requests.values())}:
            if listener is not None:
                with contextlib.suppress(RuntimeError):  # its last request ended, and the loop with it
                    loop.call_soon_threadsafe(listener, 0)
