"""The roles as the loop sees them when they live on ranks: each method is a call to a worker group.

Arguments and results go over as references into shared memory (`wire.py`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pellucid.build import RoleName
from pellucid.precision.finding import Finding, earliest
from pellucid.ranks.group import WorkerGroup
from pellucid.rollout.requests import Completion, EngineStats, PauseMode, Request, Trajectory, WeightUpdate
from pellucid.stages import ROLE_OF, Stage
from pellucid.training.protocol import Progress


class RemoteSentinel:
    """The NaN sentinels of the ranks as one.

    Args:
        group_of: the group of each role.
    """

    def __init__(self, group_of: Mapping[RoleName, WorkerGroup]) -> None:
        self._group_of = group_of
        self._failed: WorkerGroup | None = None

    def watch(self, stage: Stage | None) -> AbstractContextManager[None]:
        """Return a context that does nothing: each rank watches what it is called for itself."""
        return nullcontext()

    def locate(self, stage: Stage) -> None:
        """Let the ranks of a stage look for the place where it goes wrong when it runs next."""
        self._failed = self._group_of[ROLE_OF.get(stage, "rollout")]  # pyright: ignore[reportArgumentType]
        self._failed.ask("locate_nan", stage)

    def take_finding(self) -> Finding | None:
        """Return the earliest of the ranks' findings."""
        groups = set(self._group_of.values()) if self._failed is None else {self._failed}
        self._failed = None
        return earliest(finding for group in groups for finding in group.ask("take_finding"))


class RemoteRole:
    """A role that runs on the ranks of `group`: it has every method of the role there."""

    modules: tuple[torch.nn.Module, ...] = ()
    in_hand: tuple[str, ...] = ()

    def __init__(self, name: RoleName, group: WorkerGroup) -> None:
        self._name: RoleName = name
        self._group = group
        self.version = 0
        """Number of optimizer steps that made the current weights."""
        self._flops = self._flops_taken = 0.0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments, **options: self._call(method, *arguments, **options)

    def _call(self, method: str, *arguments: Any, on_done: Progress | None = None, **options: Any) -> Any:
        """Call the method on all ranks and return rank 0's result; a rank's working directory may be another."""
        arguments = tuple(value.absolute() if isinstance(value, Path) else value for value in arguments)
        first = self._group.run(self._name, method, *arguments, on_done=on_done, **options)[0]
        self.version, self._flops = first.versions[self._name], first.flops[self._name]
        return first.value

    def take_flops(self) -> float:
        """Return the arithmetic done since the last call, on all ranks together."""
        done, self._flops_taken = self._flops - self._flops_taken, self._flops
        return done

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        self._call("start_saving", folder, contents)
        return self._group.wait_for_save


class RemoteRolloutEngine:
    """A replica of the native engine on every rank, each answering its part of the requests that come together."""

    modules: tuple[torch.nn.Module, ...] = ()

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._requests: list[Request] = []
        """Those that the next call will take along."""
        self._call: asyncio.Task[list[Completion]] | None = None
        """That call, until it begins."""
        self._version = self._num_tokens = 0

    @property
    def in_hand(self) -> list[str]:
        """Return nothing: the ranks themselves say what they decode."""
        return []

    async def generate(self, request: Request) -> Completion:
        """Answer a request in one call with all others made in the same turn of the event loop."""
        if self._call is None:
            self._call = asyncio.get_running_loop().create_task(self._answer())
        place = len(self._requests)
        self._requests.append(request)
        return (await self._call)[place]

    async def _answer(self) -> list[Completion]:
        """Return the answers to all requests; a sample's random numbers are its own, so the number of ranks changes
        none.
        """
        requests, self._requests, self._call = self._requests, [], None
        num_ranks = len(self._group)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault((request.stream.run, request.stream.uid), []).append(index)
        # By length, dealt out in turn: long prompts, and the long answers that follow them, are spread over the ranks.
        order = sorted(groups.values(), key=lambda group: len(requests[group[0]].token_ids), reverse=True)
        parts = [[index for group in order[rank::num_ranks] for index in group] for rank in range(num_ranks)]
        sent = [[replace(requests[index], on_progress=None) for index in part] for part in parts]
        listeners = {request.on_progress for request in requests if request.on_progress is not None}

        def tell_all(num_done: int) -> None:
            for listener in listeners:
                listener(num_done)

        on_done = tell_all if listeners else None
        outcomes = self._group.run("rollout", "generate", sent, on_done=on_done)
        answers: dict[int, Completion] = {}
        for part, outcome in zip(parts, outcomes):
            answers |= zip(part, outcome.value)
        self._num_tokens += sum(len(answer.token_ids) for answer in answers.values())
        return [answers[index] for index in range(len(requests))]

    async def load_weights(self, update: WeightUpdate) -> None:
        """Let each replica take its trainer's weights."""
        self._group.run("rollout", "load_weights", update)
        self._version = update.version

    async def release(self, trajectory: Trajectory) -> None:
        """Do nothing: no cache is kept between two calls."""

    async def pause(self, requests: PauseMode) -> None:
        """Do nothing: between two calls the replicas answer nothing."""

    async def resume(self) -> None:
        """Do nothing, as `pause`."""

    async def sleep(self) -> None:
        """Do nothing: replicas free their caches when they have answered."""

    async def wake(self) -> None:
        """Do nothing, as `sleep`."""

    async def start_profile(self, folder: Path) -> None:
        """Do nothing: the profilers of the ranks capture their replicas."""

    async def stop_profile(self) -> list[Path]:
        """Return nothing, as `start_profile`."""
        return []

    def stats(self) -> EngineStats:
        """Return what the controller knows of the replicas between two calls."""
        return EngineStats(
            running=0,
            waiting=len(self._requests),
            kept=0,
            cache_share=0.0,
            computed_tokens=0,
            reused_tokens=0,
            sampled_tokens=self._num_tokens,
            tokens_per_s=0.0,
            version=self._version,
        )
