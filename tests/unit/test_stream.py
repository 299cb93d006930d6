"""The schedule `async` towards an engine in another process, which requests may reach later than the call that pauses it."""

import asyncio

import pytest

from pellucid import stream
from pellucid.rollout.requests import run_sync


class Late:
    """Aborts the requests that are there when it is paused."""

    def __init__(self) -> None:
        self.num_pauses, self.here = 0, []

    async def generate(self, request):
        await asyncio.sleep(0.05)  # on its way
        self.here.append(asyncio.get_running_loop().create_future())
        return await self.here[-1]

    async def pause(self, requests):
        self.num_pauses += 1
        for answer in self.here:
            answer.set_result("aborted")
        self.here = []


@pytest.mark.timeout(30)
def test_a_request_that_comes_after_the_pause_is_aborted_too(monkeypatch):
    monkeypatch.setattr(stream, "AGAIN_S", 0.1)
    engine = Late()
    valve = stream._Valve(engine)

    async def stopped():
        request = asyncio.create_task(valve.generate(None))
        await asyncio.sleep(0.01)
        await valve.stop()
        return await request

    assert run_sync(stopped()) == "aborted" and engine.num_pauses == 2
