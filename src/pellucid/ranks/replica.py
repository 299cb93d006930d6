"""A rollout engine in a process of its own that Ray starts: `ReplicaHost` there, `RemoteReplica` in the controller.

Any engine that gets its weights through a transport is hosted alike. The controller's calls are awaits on the actor,
which answers all of them beside each other; what the engine does meanwhile is asked for twice a second.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from typing_extensions import override

from pellucid import devices
from pellucid.engines import make_replica
from pellucid.ranks import RankFailedError
from pellucid.ranks.entry import Place, ProcessSpec, log, share_of_cores, this_place
from pellucid.ranks.group import POLL_S, Member, WorkerGroup, cause_of
from pellucid.ranks.worker import Progress
from pellucid.rollout.forwarded import ForwardedEngine
from pellucid.rollout.requests import Completion, EngineStats, Request, RolloutEngine
from pellucid.rollout.transports import WeightsDifferError

REQUESTS_AT_ONCE = 100_000
"""Calls that an actor takes in before it answers; the engine has limits of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec(ProcessSpec):
    """What makes a process the replica that it is."""

    index: int


class ReplicaHost:
    """The process of a replica; a Ray actor whose calls share one event loop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._engine: RolloutEngine | None = None
        self.spans = spec.recorder()

    async def ask(self, work: Callable[["ReplicaHost"], Any]) -> Any:
        """Do what the controller asks for beside the engine's methods, in a thread."""
        return await asyncio.to_thread(work, self)

    def start(self) -> Place:
        """Turn to the run's folders, and return where the process is.

        Raises:
            UserError: the machine does not see the run's folders.
        """
        self._log_file = self._spec.enter()
        return this_place()

    def make(self, processes_on: dict[str, int], shared: Sequence[str]) -> None:
        """Make the engine.

        Args:
            processes_on: how many processes that compute at once each machine has.
            shared: the GPUs or NPUs of all ranks, in their order, where replicas share them; empty where Ray has given
                this one some of its own.
        """
        spec, size = self._spec, self._spec.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if shared:
            os.environ[devices.VISIBLE[spec.device]] = ",".join(shared[spec.index * size :][:size])
        threads = share_of_cores(processes_on)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that the engine starts
        with self.spans.span("make_engine"):
            self._engine = make_replica(spec.config)
        log.info("the engine is up")

    async def call(self, method: str, *arguments: Any) -> tuple[Any, EngineStats]:
        """Call a method of the engine; returns its result, and what the engine does then.

        Raises:
            Exception: whatever the method raised; its traceback is in the log.
        """
        assert self._engine is not None
        try:
            if method == "load_weights":
                with self.spans.span(method):
                    result = await self._engine.load_weights(*arguments)
            else:
                result = await getattr(self._engine, method)(*arguments)
        except Exception:
            log.exception("%s failed", method)
            raise
        return result, self._engine.stats()

    async def look(self) -> EngineStats:
        """Return what the engine does at this moment."""
        assert self._engine is not None
        return self._engine.stats()

    async def progress(self, _: int) -> Progress:
        """Return a sign of life, as a rank does."""
        return Progress()

    def leave(self) -> None:
        """End the engine's own processes and close the files."""
        if self._engine is not None:
            self._engine.close()
        self.spans.close()
        log.info("done")


class RemoteReplica(ForwardedEngine):
    """The engine of a `ReplicaHost`, as the controller sees it.

    Its process counts as stalled when it does not answer for `group.stall_timeout_s`, or samples no token.

    Args:
        group: the hosts of all replicas, which end together.
        member: the host of this one.
    """

    def __init__(self, group: WorkerGroup, member: Member) -> None:
        super().__init__()
        self._group, self._member = group, member
        self._watch: asyncio.Task[None] | None = None

    @override
    async def _call(self, method: str, *arguments: Any) -> Any:
        call = self._member.handle.call.remote(method, *arguments)
        try:
            result, stats = await call
            self._hear(stats)
            return result
        except asyncio.CancelledError:
            ray.cancel(call)
            raise
        except (RayActorError, RayTaskError) as error:
            cause = cause_of(self._member, error)
            if isinstance(error, RayTaskError) and isinstance(error.cause, WeightsDifferError):
                cause = error.cause  # `ReplicaSet` names the replica
            if isinstance(cause, RankFailedError):
                self._group.end(cause)
            raise cause from error

    def _hear(self, stats: EngineStats) -> None:
        """Note what the replica does, if no newer weights are known of: answers overtake each other."""
        if stats.version >= self._stats.version:
            self._stats = stats

    @override
    async def generate(self, request: Request) -> Completion:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._look_on())
        return await super().generate(request)

    async def _look_on(self) -> None:
        """Look at the replica while it has requests, tell those who wait that it decodes, and end it if it stalls."""
        moved_at, limit_s = time.monotonic(), self._group.stall_timeout_s
        while self._under_way:
            await asyncio.sleep(POLL_S)
            before, doing = self._stats.sampled_tokens, "it does not answer"
            look = asyncio.wrap_future(self._member.handle.look.remote().future())
            await asyncio.wait({look}, timeout=limit_s)
            if look.done():
                if look.exception() is not None:
                    return  # its death shows in the requests
                self._hear(look.result())
                doing = f"it works on {self.in_hand[0] if self.in_hand else 'nothing'}"
            self._group.heartbeat()
            if self._stats.sampled_tokens != before:
                moved_at = time.monotonic()
                self._tell()
            waited_s = time.monotonic() - moved_at
            if limit_s is not None and waited_s > limit_s:
                what = f"no progress in generate for {waited_s:.0f} s: {doing}"
                with suppress(RankFailedError):  # which those raise who wait for answers
                    self._group.end(RankFailedError(self._member.name, what, self._member.log))
                return
