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
from typing_extensions import override

from pellucid.build import RoleName
from pellucid.precision.sentinel import Finding, earliest
from pellucid.ranks.group import WorkerGroup
from pellucid.ranks.worker import RankWorker
from pellucid.rollout.requests import Completion, EngineStats, Request, RolloutEngine, WeightUpdate
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
        self._failed.ask("locate_nan", lambda rank: rank.sentinel and rank.sentinel.locate(stage))

    def take_finding(self) -> Finding | None:
        """Return the earliest of the ranks' findings."""

        def taken(rank: RankWorker) -> Finding | None:
            return rank.sentinel and rank.sentinel.take_finding()

        groups = set(self._group_of.values()) if self._failed is None else {self._failed}
        self._failed = None
        return earliest(finding for group in groups for finding in group.ask("take_finding", taken))


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
        self.version, self._flops = first.version, first.flops
        return first.value

    def take_flops(self) -> float:
        """Return the arithmetic done since the last call, on all ranks together."""
        done, self._flops_taken = self._flops - self._flops_taken, self._flops
        return done

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        self._call("start_saving", folder, contents)
        return self._group.wait_for_save


class RemoteRolloutEngine(RolloutEngine):
    """A replica of the native engine on every rank, each answering its part of the requests that come together.

    The replicas answer nothing between two calls and keep nothing for the next one, so that `pause`, `sleep`, `release`
    and their like do nothing. The ranks themselves say what they decode, and their profilers capture their replicas.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._requests: list[Request] = []
        """Those that the next call will take along."""
        self._call: asyncio.Task[list[Completion]] | None = None
        """That call, until it begins."""
        self._version = self._num_tokens = 0

    @property
    @override
    def modules(self) -> tuple[torch.nn.Module, ...]:
        return ()

    @property
    @override
    def in_hand(self) -> list[str]:
        return []

    @override
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
        answers: dict[int, Completion] = {}
        for part, outcome in zip(parts, self._group.run("rollout", "generate", sent, on_done=on_done)):
            answers |= zip(part, outcome.value)
        self._num_tokens += sum(len(answer.token_ids) for answer in answers.values())
        return [answers[index] for index in range(len(requests))]

    @override
    async def load_weights(self, update: WeightUpdate) -> None:
        self._group.run("rollout", "load_weights", update)
        self._version = update.version

    @override
    async def stop_profile(self) -> list[Path]:
        return []

    @override
    def stats(self) -> EngineStats:
        """Return what the controller knows of the replicas between two calls."""
        return EngineStats(waiting=len(self._requests), sampled_tokens=self._num_tokens, version=self._version)
