"""An engine that runs somewhere else, as its caller sees it: every method becomes a call that travels there.

`EngineProcess` sends the calls through a pipe, `RemoteReplica` of `ranks/` as calls of a Ray actor, and
`InferenceRolloutEngine` into the event loop of vLLM or SGLang.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pellucid.rollout.requests import (
    Completion,
    EngineStats,
    PauseMode,
    Request,
    RolloutEngine,
    Trajectory,
    WeightUpdate,
)


class ForwardedEngine(RolloutEngine):
    """Forwards its methods by `_call`, which also keeps `_stats` as the engine last gave them."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._under_way: dict[object, tuple[asyncio.AbstractEventLoop, Request]] = {}
        """Requests that wait for their answers, each with the loop that it came from; one may be asked twice. Callers
        may be in several threads."""

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine where it runs, and return or raise what it does."""
        ...

    @property
    def in_hand(self) -> list[str]:
        """Names of the trajectories that are being decoded at this moment."""
        return [request.stream.name for _, request in list(self._under_way.values())]

    @contextmanager
    def _noted(self, request: Request) -> Iterator[None]:
        """Keep a request among them while the block runs, at the end of which its callback hears of its answer."""
        key = object()
        self._under_way[key] = asyncio.get_running_loop(), request
        try:
            yield
        finally:
            del self._under_way[key]
        if request.on_progress is not None:
            request.on_progress(1)

    def _tell(self) -> None:
        """Tell each callback once, in its own loop, that decoding goes on; from any thread."""
        for loop, listener in {(loop, request.on_progress) for loop, request in list(self._under_way.values())}:
            if listener is not None:
                with suppress(RuntimeError):  # its last request ended, and the loop with it
                    loop.call_soon_threadsafe(listener, 0)

    async def generate(self, request: Request) -> Completion:
        """Answer a request together with all others that are under way."""
        with self._noted(request):
            return await self._call("generate", replace(request, on_progress=None))

    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory."""
        await self._call("release", trajectory)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take over the weights that a transport delivers."""
        await self._call("load_weights", update)

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding until `resume`."""
        await self._call("pause", requests)

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        await self._call("resume")

    async def sleep(self) -> None:
        """Give the cache's memory back."""
        await self._call("sleep")

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._call("wake")

    async def start_profile(self, folder: Path, skip_steps: int = 0, num_steps: int | None = None) -> None:
        """Record traces where it runs."""
        await self._call("start_profile", folder.absolute(), skip_steps, num_steps)

    async def look_inside(self, function: str, *arguments: Any) -> list[Any]:
        """Call a function where the model is."""
        return await self._call("look_inside", function, *arguments)

    async def stop_profile(self) -> list[Path]:
        """End the recording and return its files."""
        return await self._call("stop_profile")

    def stats(self) -> EngineStats:
        """Return what the engine last said of itself."""
        return self._stats
