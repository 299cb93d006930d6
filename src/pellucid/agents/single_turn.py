"""The simplest agent: a prompt is one request, and its answer the whole trajectory.

Prompts come from the loop, `params.n` trajectories a prompt go back to it.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pellucid.rollout.requests import (
    Completion,
    Progress,
    Request,
    RolloutEngine,
    RunStream,
    SampleStream,
    SamplingParams,
    run_sync,
)
from pellucid.types import Prompt, Rollout


def sample_rollouts(
    engine: RolloutEngine,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    stream: RunStream,
    on_done: Progress | None = None,
) -> list[Rollout]:
    """Return len(prompts) · n rollouts, prompt by prompt, sample by sample.

    Args:
        engine: what answers.
        prompts: what to answer.
        params: how to draw.
        stream: name of the random stream, e.g. ("rollout", step); each sample derives its own from it, so that a
            result does not depend on what else is in the batch.
        on_done: called with the number of rollouts just finished, and with 0 while decoding goes on.

    Raises:
        NonFiniteError: a next-token distribution holds NaN or Inf.
    """
    samples = [Sample(prompt, sample, stream) for prompt in prompts for sample in range(params.n)]

    async def answer_all() -> list[Rollout]:
        return await asyncio.gather(*(answer(engine, sample, params, on_done) for sample in samples))

    return run_sync(answer_all())


@dataclass(slots=True)
class Sample:
    """A trajectory on its way: what was drawn of it so far outlives the request that drew it."""

    prompt: Prompt
    sample: int
    """Index within the group."""
    stream: RunStream
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    seconds: float = 0.0
    """Time from requests to their answers."""


class Answers(Protocol):
    """What an agent asks: a rollout engine, or what stands before one."""

    async def generate(self, request: Request) -> Completion:
        """Answer a request."""
        ...


async def answer(
    engine: Answers, sample: Sample, params: SamplingParams, on_done: Progress | None = None
) -> Rollout:
    """Return the trajectory of a sample; where its request is aborted, another one goes on from the drawn tokens."""
    prompt, reason = sample.prompt, "aborted"
    text = ""
    while reason == "aborted":
        drawn, start = len(sample.token_ids), time.perf_counter()
        stream = SampleStream(sample.stream, prompt.uid, sample.sample, position=drawn)
        left = replace(params, max_tokens=params.max_tokens - drawn) if drawn else params
        tokens = [*prompt.token_ids, *sample.token_ids]
        completion = await engine.generate(Request(tokens, left, stream, on_progress=on_done))
        for name in ("token_ids", "logprobs", "versions"):
            new = getattr(completion, name)  # of ranks: views of shared memory, which stay such
            setattr(sample, name, [*getattr(sample, name), *new] if drawn else new)
        sample.seconds += time.perf_counter() - start
        reason, text = completion.finish_reason, completion.text
    return Rollout.single_turn(
        prompt,
        sample.sample,
        sample.token_ids,
        sample.logprobs,
        sample.versions,
        reason,
        text,
        sample.seconds,
    )
