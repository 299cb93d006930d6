"""Trajectories of several turns with the native engine: what ends them, what fails, what goes on after a kill, and what
their turns cost.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_cases import (
    CHAT,
    ECHO,
    EOS,
    STREAM,
    TOKENIZER,
    drawn,
    prompt_of,
    some_prompts,
    trainer_of,
)
from test_rollout_engine import make_engine

from pellucid.agents.environments import Calculator, Guess, calculate
from pellucid.agents.llm import AgentLoop, Sample, TrajectoryEndError, sample_rollouts
from pellucid.agents.loops import in_environment
from pellucid.config import RunConfig
from pellucid.config.schema.data import DataConfig
from pellucid.config.schema.trainer import TrainerConfig
from pellucid.errors import RunFailedError
from pellucid.rollout.requests import SamplingParams, run_sync
from pellucid.run import _show_on
from pellucid.types import Outcome, Prompt, Samples, Score

PARAMS = SamplingParams(n=2, max_tokens=60)
LONG = SamplingParams(max_tokens=200)
NUMBER = Prompt("n", TOKENIZER.encode("0-15:"), "0-15:", "guess", "7")


@pytest.fixture(scope="module")
def trainer():
    return trainer_of("tied")


@pytest.fixture(scope="module")
def engine(trainer):
    return make_engine(trainer)


def loop_of(agent, **limits) -> AgentLoop:
    return AgentLoop(agent, "an agent", CHAT, **{"max_turns": None} | limits)


def sampled(engine, agent, params=PARAMS, **limits):
    return sample_rollouts(engine, some_prompts(3), params, stream=STREAM, loop=loop_of(agent, **limits))


async def twice(prompt, llm, tools):
    await llm.complete()
    await llm.complete("+1=")


async def for_ever(prompt, llm, tools):
    while True:
        await llm.complete("+")


def test_limits_end_a_trajectory_at_a_whole_turn(engine):
    for rollout in sampled(engine, for_ever, max_turns=3):
        assert rollout.finish_reason in ("max_turns", "length")
        assert rollout.turns[-1].end == len(rollout.token_ids) <= 60
    assert {rollout.finish_reason for rollout in sampled(engine, for_ever, replace(PARAMS, ignore_eos=True))} == {"length"}


def test_an_agent_that_fails_or_hangs_is_masked_and_ends_no_other(engine):
    async def fails(prompt, llm, tools):
        await llm.complete()
        if prompt.uid == "p0":
            raise KeyError("city")
        if prompt.uid == "p1":
            await asyncio.sleep(60)

    began = time.monotonic()
    rollouts = sampled(engine, fails, timeout_s=5)
    assert time.monotonic() - began < 40
    assert [rollout.finish_reason for rollout in rollouts[:4]] == ["agent_failed"] * 2 + ["timeout"] * 2
    assert "KeyError: 'city'" in rollouts[0].outcome.failure and "longer than 5 s" in rollouts[2].outcome.failure
    assert not rollouts[4].outcome.failure
    assert all(len(rollout.token_ids) for rollout in rollouts), "what was drawn is there to be looked at"


def test_what_the_engine_raises_ends_the_run_whatever_the_agent_makes_of_it(engine):
    class Gone:
        async def generate(self, request):
            raise RunFailedError("the engine is gone")

        async def release(self, trajectory):
            pass

    async def swallows(prompt, llm, tools):
        with suppress(RunFailedError):
            await llm.complete()

    with pytest.raises(RunFailedError, match="gone"):
        run_sync(loop_of(swallows).roll_out(Gone(), Sample(NUMBER, 0, STREAM), PARAMS))


def test_a_trajectory_without_turns_has_no_tokens_and_a_row_without_mask(engine):
    async def nothing(prompt, llm, tools):
        return Outcome(failure="there was nothing to do")

    rollout = sampled(engine, nothing)[0]
    samples = Samples.pad([rollout, *sampled(engine, twice)[:1]], [Score(None), Score(1.0)])
    assert len(rollout.token_ids) == 0 and not samples.mask[0].any() and samples.mask[1].any()


def test_rewards_of_turns_sit_at_the_end_or_where_they_were_given(engine):
    [rollout] = sample_rollouts(engine, [prompt_of(5, "a")], replace(PARAMS, n=1), stream=STREAM, loop=ECHO)
    rewards = [turn.reward for turn in rollout.turns]
    score = Score(sum(rewards) + 0.5)
    samples = Samples.pad([rollout], [score], by_turn=True)
    at_turns = samples.token_rewards[0]
    at_end = Samples.pad([rollout], [score]).token_rewards[0]
    ends = [turn.end - 1 for turn in rollout.turns]
    assert at_turns[ends].tolist() == [*rewards[:-1], rewards[-1] + 0.5] and at_turns.count_nonzero() <= len(ends)
    assert samples.turn_ends()[0].nonzero().flatten().tolist() == ends
    assert at_end.count_nonzero() == 1 and at_end[ends[-1]] == score.reward


def test_a_turn_computes_nothing_of_the_turns_before_it_again(engine):
    before = engine.stats()
    rollouts = sample_rollouts(engine, some_prompts(3), PARAMS, stream=("rollout", 9), loop=ECHO)
    computed = engine.stats().computed_tokens - before.computed_tokens
    prompts = sum(len(rollout.prompt.token_ids) for rollout in rollouts)
    given = sum(len(rollout.token_ids) - rollout.num_sampled for rollout in rollouts)
    last = sum(len(rollout.turns) - 1 for rollout in rollouts)  # the last token of a turn goes in with what follows
    assert computed <= prompts + given + last
    assert engine.stats().kept == 0


def test_nothing_is_kept_of_a_turn_that_was_given_up(engine):
    async def given_up():
        loop, params = loop_of(twice), SamplingParams(max_tokens=200, ignore_eos=True)
        task = asyncio.ensure_future(loop.roll_out(engine, Sample(NUMBER, 0, STREAM), params))
        await drawn(engine, 5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await loop.roll_out(engine, Sample(NUMBER, 1, STREAM), PARAMS)

    run_sync(given_up())
    assert engine.stats().kept == 0


def test_a_trajectory_that_was_begun_goes_on_with_the_same_tokens(engine):
    whole = run_sync(ECHO.roll_out(engine, Sample(NUMBER, 0, STREAM), LONG))
    assert len(whole.turns) == 3
    for num_tokens in range(0, len(whole.token_ids) + 1, 7):
        begun = Sample(NUMBER, 0, STREAM)
        begun.add(*(list(values)[:num_tokens] for values in (whole.token_ids, whole.logprobs, whole.versions)))
        begun.turns = [turn for turn in whole.turns if turn.end <= num_tokens]
        again = run_sync(ECHO.roll_out(engine, begun, LONG))
        assert list(again.token_ids) == list(whole.token_ids) and again.turns == whole.turns
        assert again.logprobs == pytest.approx(list(whole.logprobs), abs=1e-4)


def test_an_agent_that_goes_another_way_after_a_kill_forgets_what_came_then(engine):
    whole = run_sync(ECHO.roll_out(engine, Sample(NUMBER, 0, STREAM), LONG))
    begun = Sample(NUMBER, 0, STREAM, whole.token_ids, whole.logprobs, whole.versions, list(whole.turns))

    async def other(prompt, llm, tools):
        await llm.say("(2)")
        await llm.say("*")

    rollout = run_sync(loop_of(other).roll_out(engine, begun, LONG))
    first = whole.turns[0].end
    assert list(rollout.token_ids[:first]) == list(whole.token_ids[:first]) and len(rollout.turns) == 2
    assert list(rollout.token_ids[first : rollout.turns[1].start]) == TOKENIZER.encode("*")


def test_a_chat_whose_past_is_changed_fails(engine):
    async def edits(prompt, llm, tools):
        await llm.say("1")
        await llm.chat([{"role": "user", "content": "2"}, *llm.messages[1:], {"role": "user", "content": "3"}])

    assert "changed messages" in sampled(engine, edits)[0].outcome.failure


def test_an_environment_may_be_made_of_coroutines(engine):
    class Slow(Guess):
        async def step(self, text):
            await asyncio.sleep(0.01)
            return "", 0.25, True

    [rollout, _] = sample_rollouts(engine, [NUMBER], PARAMS, stream=STREAM, loop=loop_of(in_environment(Slow)))
    assert rollout.outcome.rewards == {"environment": 0.25} and rollout.turns[0].tool_calls[0].seconds >= 0.01


def test_what_a_trajectory_does_is_shown_however_it_ends(engine):
    class Hangs(Guess):
        async def step(self, text):
            if len(spans) > 4:
                await asyncio.sleep(60)
            return "?", 0.0, False

    spans = []

    def show(stream, name, wall_us, seconds, **about):
        spans.append((stream, name, about.get("tool"), about["uid"], about["sample"], about["turn"]))
        assert abs(wall_us / 1e6 + seconds - time.time()) < 5

    loop = replace(loop_of(in_environment(Hangs), timeout_s=5), show=show)
    [rollout] = sample_rollouts(engine, [NUMBER], replace(PARAMS, n=1), stream=STREAM, loop=loop)
    kinds = [("tool_call", "environment.reset", 0)]
    kinds += [each for turn in (1, 2) for each in (("turn", None, turn), ("tool_call", "environment", turn))]
    kinds += [("turn", None, 3), ("tool_call", "environment", 3)]
    assert spans == [(STREAM, name, tool, "n", 0, turn) for name, tool, turn in kinds]
    assert rollout.finish_reason == "timeout" and len(rollout.turns) == 3


@pytest.mark.parametrize(
    ("schedule", "stream", "step"),
    [("sync", ("rollout", 7, 2), 7), ("sync", ("greedy", 7), 7), ("async", ("rollout", 7, "c1", 0), 2), ("sync", ("validate", "c1", 0), None)],
)
def test_what_is_shown_stands_under_the_step_that_it_is_for(schedule, stream, step):
    config = RunConfig(data=DataConfig(train_batch_size=4), trainer=TrainerConfig(schedule=schedule))
    spans = SimpleNamespace(record_call=lambda *args, **about: shown.append((args, about)))
    shown = []
    _show_on(spans, config)(stream, "turn", 5, 0.5, uid="a")
    assert shown == [(("turn", 5, 0.5), {"uid": "a"} | ({} if step is None else {"step": step}))]


def test_guess_says_where_the_number_is():
    world = Guess(NUMBER)
    assert [world.step(text) for text in ("3", "8+", "?", "7")] == [
        ("+", 0.0, False), ("-", 0.0, False), ("?", 0.0, False), ("", 1.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("12*7", "84"), ("(3+4)*-2", "-14"), ("1/4", "0.25"), ("1/0", "?"), ("9**9", "?"), ("", "?"), ("a", "?"), ("(" * 500, "?")],
)
def test_a_calculator_computes_arithmetic_alone(asked, answer):
    assert calculate(asked) == answer


def test_a_calculator_answers_until_something_else_is_said():
    world = Calculator(Prompt("a", [], "12*7=", "arithmetic", "84"))
    assert [world.step(text) for text in ("12*7=", "84")] == [("84=", 0.0, False), ("", 1.0, True)]


def test_no_agent_goes_on_after_its_limit(engine):
    raised = []

    async def goes_on(prompt, llm, tools):
        await llm.complete()
        for _ in range(3):
            try:
                await llm.complete()
            except TrajectoryEndError as end:
                raised.append(end.reason)

    assert [len(rollout.turns) for rollout in sampled(engine, goes_on, max_turns=1)] == [1] * 6
    assert set(raised) == {"max_turns"} and EOS == 1
