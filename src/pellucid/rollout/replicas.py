"""The rollout engines beside the trainer as one: requests are spread over them, and each of them gets every update.

The trainer calls it as it calls an engine; the replicas are engines in processes of their own, or proxies of them.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from pathlib import Path

from pellucid.errors import NonFiniteError
from pellucid.rollout.requests import (
    Completion,
    EngineStats,
    PauseMode,
    Request,
    RolloutEngine,
    RunStream,
    SampleStream,
    SamplingParams,
    Trajectory,
    WeightUpdate,
)
from pellucid.rollout.transports import Verify, WeightHandle, WeightsDifferError, is_verified

NUM_PROBED = 160
"""Tokens of the request that looks for a stale cache: more than a block of any engine's cache holds."""
_ONE_TOKEN, _FIRST = SamplingParams(max_tokens=1, do_sample=False), 1 << 30
NUM_REMEMBERED = 100_000
"""Groups whose replica is remembered; of one that is forgotten, later turns begin with an empty cache."""


class ReplicaSet(RolloutEngine):
    """Several engines, which hold the same weights, as one.

    Args:
        replicas: the engines by name.
        send: puts the trainer's weights where the replicas can read them, for the time of a `with` block; its argument
            says whether with digests.
        verify: which updates the replicas compare with what they serve.
        max_tokens: the longest request that a replica has room for; 0 leaves their caches unchecked.
    """

    def __init__(
        self,
        replicas: Mapping[str, RolloutEngine],
        send: Callable[[bool], AbstractContextManager[WeightHandle]],
        verify: Verify = "first",
        max_tokens: int = 0,
    ) -> None:
        self.replicas, self._send = dict(replicas), send
        self._probe = [0] * min(NUM_PROBED, max_tokens - 1)
        self._paused = False
        self._verify: Verify = verify
        self._num_updates = 0
        self._running = Counter[str]()
        self._replica_of = OrderedDict[tuple[RunStream, str], str]()
        self._weight_bytes = 0

    @property
    def in_hand(self) -> list[str]:
        """Names of the trajectories that are being decoded at this moment."""
        return [name for engine in self.replicas.values() for name in engine.in_hand]

    def _replica(self, run: RunStream, uid: str) -> str:
        """Return the replica of a group, whose samples share the cache of their prompt: at first the idlest one."""
        name = self._replica_of.pop((run, uid), None) or min(self.replicas, key=self._running.__getitem__)
        self._replica_of[run, uid] = name  # as the newest
        if len(self._replica_of) > NUM_REMEMBERED:
            self._replica_of.popitem(last=False)
        return name

    async def generate(self, request: Request) -> Completion:
        """Answer a request."""
        name = self._replica(request.stream.run, request.stream.uid)
        self._running[name] += 1
        try:
            return await self.replicas[name].generate(request)
        finally:
            self._running[name] -= 1

    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory."""
        run, uid, _ = trajectory
        await self.replicas[self._replica(run, uid)].release(trajectory)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Give every replica the trainer's weights of this moment.

        Raises:
            WeightsDifferError: a replica serves other weights, or another version.
        """
        verify = is_verified(self._verify, self._num_updates)
        # A cache can be stale from the second update on.
        probed = self._num_updates > 0 and is_verified(self._verify, self._num_updates - 1) and not self._paused
        if probed:
            await self._all(self._probe_cache)
        with self._send(verify) as handle:
            await self._all(lambda engine: engine.load_weights(replace(update, handle=handle, verify=verify)))
        self._weight_bytes += handle.num_bytes
        for name, engine in self.replicas.items():
            if (served := engine.stats().version) != update.version:
                raise WeightsDifferError("policy version", str(update.version), str(served), name)
        if probed:
            await self._all(lambda engine: self._probe_cache(engine, update.version))
        self._num_updates += 1

    async def _probe_cache(self, engine: RolloutEngine, version: int | None = None) -> None:
        """Ask a replica for a token, and hold it against it when it finds the question in its cache under `version`.

        Weights that are NaN are told of by those who sample.
        """
        if not self._probe:
            return
        request = Request(self._probe, _ONE_TOKEN, SampleStream(("probe",), "cache", 0), _FIRST)
        with suppress(NonFiniteError):
            answer = await engine.generate(request)
            if version is not None and answer.reused_tokens:
                found = f"{answer.reused_tokens} tokens that the old weights computed"
                raise WeightsDifferError("prefix cache", f"version {version}", found)

    async def _all(self, call: Callable[[RolloutEngine], Awaitable[object]]) -> None:
        """Await a call to each replica, all at once."""

        async def named(name: str, engine: RolloutEngine) -> None:
            try:
                await call(engine)
            except WeightsDifferError as error:
                raise WeightsDifferError(error.name, error.sent, error.held, name) from error

        await asyncio.gather(*(named(name, engine) for name, engine in self.replicas.items()))

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding until `resume`."""
        await self._all(lambda engine: engine.pause(requests))
        self._paused = True

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        self._paused = False
        await self._all(lambda engine: engine.resume())

    async def sleep(self) -> None:
        """Give the devices' memory back."""
        await self._all(lambda engine: engine.sleep())

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._all(lambda engine: engine.wake())

    async def start_profile(self, folder: Path, skip_steps: int = 0, num_steps: int | None = None) -> None:
        """Record a trace of each replica into a folder of its own."""
        for name, engine in self.replicas.items():
            place = folder / name.replace(" ", "_")
            place.mkdir(exist_ok=True)
            await engine.start_profile(place, skip_steps, num_steps)

    async def stop_profile(self) -> list[Path]:
        """End the traces and return their files."""
        return [file for engine in self.replicas.values() for file in await engine.stop_profile()]

    def stats(self) -> EngineStats:
        """Return the sums over the replicas, the mean share of their caches, and the oldest version that one serves."""
        each = list(self.replica_stats().values())
        sums = {field.name: sum(getattr(one, field.name) for one in each) for field in fields(EngineStats)}
        cache_share, version = sums["cache_share"] / len(each), min(one.version for one in each)
        own = {"cache_share": cache_share, "version": version, "weight_bytes": self._weight_bytes}
        return EngineStats(**sums | own)

    def replica_stats(self) -> dict[str, EngineStats]:
        """Return what each replica does at this moment."""
        return {name: engine.stats() for name, engine in self.replicas.items()}

    def close(self) -> None:
        """End the replicas' processes."""
        for engine in self.replicas.values():
            engine.close()
