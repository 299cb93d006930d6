"""The protocol of rollout engines: requests with token ids in, completions with token ids, log-probs and versions out.

Agents make requests; `native` answers them in the process of the trainer, and other engines join with the same methods.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import torch

from pellucid.errors import UserError
from pellucid.rollout.transports import WeightHandle

Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Called after each step of an engine with the number of requests that it finished; 0 says that decoding goes on."""
RunStream = tuple[str | int, ...]
"""Names the random numbers of one call to an agent, e.g. ("rollout", step)."""
Trajectory = tuple[RunStream, str, int]
"""Names one sample of a prompt: run stream, uid and index within the group."""
PauseMode = Literal["finish", "keep", "abort"]


@dataclass(slots=True)
class SamplingParams:
    """How responses are drawn."""

    n: int = 1
    """Responses to a prompt: an agent makes as many requests, an engine draws one for each."""
    max_tokens: int = 128
    """Most tokens of an answer."""
    temperature: float = 1.0
    """Logits are divided by it before sampling; also scales the recorded log-probs."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    do_sample: bool = True
    """False takes the most likely token."""
    ignore_eos: bool = False
    """Run to max_tokens whatever is sampled."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer; the text is cut before them, the ids stay as sampled."""


@dataclass(frozen=True, slots=True)
class SampleStream:
    """Names the random numbers of a request; a name gives the same numbers in any batch, process or resumed run."""

    run: RunStream
    uid: str
    """The prompt's."""
    sample: int
    """Index of the trajectory within its group."""
    turn: int = 0
    """Turns of the trajectory before this one."""
    position: int = 0
    """Tokens of this turn that were drawn before: an aborted request goes on after them with the same numbers."""

    @property
    def trajectory(self) -> Trajectory:
        """Return the name of the trajectory that the request belongs to."""
        return self.run, self.uid, self.sample

    @property
    def name(self) -> str:
        """Return what people call the trajectory."""
        return f"{self.uid} sample {self.sample}"


@dataclass(frozen=True, slots=True)
class Request:
    """One token sequence that an engine is asked to continue."""

    token_ids: Sequence[int]
    """[L] everything before the answer; the last `stream.position` of them belong to the answer already."""
    params: SamplingParams
    stream: SampleStream
    priority: int = 0
    """Of the requests that wait, those with the highest priority are taken first, and of these the oldest."""
    keep_cache: bool = False
    """Keep what was computed for this trajectory: a request that begins with these tokens and the answer may follow.

    The engine forgets it when that request does not ask for it again, at `release`, and when its weights change.
    """
    on_progress: Progress | None = field(default=None, compare=False)
    """Requests that share the callback get one call a step."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's answer to a request. Sequences are [L] over the tokens drawn for this request."""

    token_ids: Sequence[int]
    """The ids as sampled, the end-of-text id included where it was sampled."""
    logprobs: Sequence[float]
    """Log-probability of each id under the sampling policy: temperature-scaled, full vocabulary."""
    versions: Sequence[int]
    """Version of the weights that drew each token."""
    finish_reason: Literal["stop", "length", "aborted"]
    text: str
    """The whole answer from its position 0 on, without special tokens and cut before a stop string."""
    reused_tokens: int = 0
    """Tokens before the answer that the engine found in its cache, where it says so."""


@dataclass(slots=True)
class EngineStats:
    """What an engine does at this moment, and what it has done since it was made; it counts on in one of its own."""

    running: int = 0
    """Requests that have begun, those of `prefilling` among them."""
    prefilling: int = 0
    """Requests whose tokens before the answer are run through the model."""
    waiting: int = 0
    kept: int = 0
    """Trajectories that may come back and whose cache is kept."""
    cache_share: float = 0
    """Share of the allocated cache that holds tokens."""
    computed_tokens: int = 0
    """Tokens before answers that were run through the model."""
    reused_tokens: int = 0
    """Tokens before answers that were found in the cache."""
    sampled_tokens: int = 0
    preemptions: int = 0
    """Times that a running request gave its cache back, for want of room, and waited again."""
    answered: int = 0
    """Requests that were answered, without aborted ones."""
    queue_s: float = 0
    """Seconds that the answered requests waited before the engine began with them, added up."""
    prefill_s: float = 0
    """Seconds from there to their first tokens."""
    decode_s: float = 0
    """Seconds from there to their last ones."""
    tokens_per_s: float = 0
    """Sampled tokens over the seconds in which the engine decoded."""
    weight_bytes: int = 0
    """Bytes of weights that a transport has brought."""
    version: int = 0
    """Version of the weights that the next token will be drawn from."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights for an engine."""

    version: int
    handle: WeightHandle | None = None
    """Where a transport has put them; None where the engine takes them from the trainer in its own process."""
    verify: bool = False
    """Compare what the engine serves afterwards with what was sent."""


class RolloutEngine(Protocol):
    """Continues token sequences with samples from the policy. Many requests at once are many awaits.

    An engine that keeps nothing between requests inherits `pause`, `sleep` and their like, which then do nothing.
    """

    replicas: Mapping[str, "RolloutEngine"] = MappingProxyType({})
    """The engines in processes of their own that this one stands for, by name; none where the caller's own samples."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The models that sample in this process, for observers to attach to; empty where they run in another one."""
        return ()

    @property
    def in_hand(self) -> list[str]:
        """Names of the trajectories that are being decoded in this process at this moment."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Answer a request.

        Raises:
            NonFiniteError: a next-token distribution holds NaN or Inf; every request under way raises it.
            UserError: the trajectory's cache is kept, and the request does not begin with its tokens.
        """
        ...

    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory, which has ended; nothing where none is kept."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """Sample from new weights from the next token on; running requests go on with them.

        Nothing that was computed with the old ones is used for requests that begin later. A caller who wants running
        requests to end first, or to be drawn anew, calls `pause` with `finish` or `abort`, and `resume` afterwards.

        Raises:
            WeightsDifferError: the digest of a tensor differs from the one that was sent.
        """
        ...

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding until `resume`; requests that come meanwhile wait.

        Args:
            requests: what happens to those under way: `finish` returns when the running ones are answered, `keep`
                leaves all as they are, and `abort` answers all, waiting ones too, with what was drawn so far.
        """

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def sleep(self) -> None:
        """Give the cache's memory back, kept trajectories included. No request may be running."""

    async def wake(self) -> None:
        """Undo `sleep`."""

    async def start_profile(self, folder: Path, skip_steps: int = 0, num_steps: int | None = None) -> None:
        """Record a trace of the engine's own processes, to be written into `folder`.

        Args:
            folder: it exists, on this host or on storage that is shared with the engine's.
            skip_steps: steps of the engine that are left out first.
            num_steps: steps that are recorded then; None: all until `stop_profile`.

        Raises:
            UserError: the engine cannot.
        """

    async def stop_profile(self) -> list[Path]:
        """End the trace and return its files."""
        ...

    async def look_inside(self, function: str, *arguments: Any) -> list[Any]:
        """Call a function of `module:name` with each worker of the engine and plain arguments, and return its results.

        Raises:
            UserError: the engine has no workers that can be reached so.
        """
        reason = f"{type(self).__name__} does not let hooks into the processes of its engine."
        raise UserError("actor_rollout_ref.rollout.profiler", reason, "Set enable: false.")

    def stats(self) -> EngineStats:
        """Return what the engine does at this moment; any thread may ask."""
        ...

    def replica_stats(self) -> dict[str, EngineStats]:
        """Return the same of each replica, by its name."""
        return {"replica 0": self.stats()}

    def close(self) -> None:
        """End the engine's own processes."""


def cut_at_stop(text: str, stop: Iterable[str]) -> str:
    """Return the text before the first of the stop strings in it."""
    return text[: min((place for one in stop if (place := text.find(one)) >= 0), default=len(text))]


async def generate_all(engine: RolloutEngine, requests: Iterable[Request]) -> list[Completion]:
    """Return the answers to many requests at once, in their order."""
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def run_sync(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return what a coroutine does, from code that is not asynchronous itself."""
    return asyncio.run(coroutine)


async def end_other_tasks() -> None:
    """Cancel every other task of the running event loop, which is about to be closed, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
