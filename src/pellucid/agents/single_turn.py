"""The simplest agent: a prompt is one request, and its answer the whole trajectory.

Prompts come from the loop, `params.n` trajectories a prompt go back to it.
"""

import asyncio
import time

from pellucid.rollout.requests import (
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
    samples = [(prompt, sample) for prompt in prompts for sample in range(params.n)]

    async def answer_all() -> list[Rollout]:
        return await asyncio.gather(*(_answer(engine, *each, params, stream, on_done) for each in samples))

    return run_sync(answer_all())


async def _answer(
    engine: RolloutEngine,
    prompt: Prompt,
    sample: int,
    params: SamplingParams,
    stream: RunStream,
    on_done: Progress | None,
) -> Rollout:
    request = Request(prompt.token_ids, params, SampleStream(stream, prompt.uid, sample), on_progress=on_done)
    start = time.perf_counter()
    answer = await engine.generate(request)
    assert answer.finish_reason != "aborted"
    return Rollout.single_turn(
        prompt,
        sample,
        answer.token_ids,
        answer.logprobs,
        answer.versions,
        answer.finish_reason,
        answer.text,
        time.perf_counter() - start,
    )
