"""From a prompt to a trajectory: an agent asks the policy for turns, and what it is given in between is recorded, too.

    prompt ─► agent ─► Llm.complete, Llm.chat ─► requests to a rollout engine ─► turns ─► Rollout

The agent never touches token ids or masks: a context only grows, by exactly the tokens that the policy drew and those
that were given to it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from xxhash import xxh64_hexdigest

from pellucid.agents.chat import Chat, Message
from pellucid.agents.tools import Toolbox, ToolCall
from pellucid.errors import UserError
from pellucid.plugins import what_failed
from pellucid.rollout.requests import (
    Completion,
    Progress,
    Request,
    RolloutEngine,
    RunStream,
    SampleStream,
    SamplingParams,
    Trajectory,
    run_sync,
)
from pellucid.types import FinishReason, Outcome, Prompt, Rollout, ToolUse, Turn

Result = TypeVar("Result")
GIVEN = -1
"""Where versions of tokens stand, that of one that the policy did not draw."""


class Answers(Protocol):
    """What an agent asks: a rollout engine, or what stands before one."""

    async def generate(self, request: Request) -> Completion:
        """Answer a request."""
        ...

    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory."""


@dataclass(slots=True)
class Sample:
    """A trajectory on its way: what was drawn of it so far outlives the request, and the agent, that asked for it.

    An agent that begins again, after a kill, is given the same turns again as long as it asks for them in the same
    words; where it does not, what was drawn after that is forgotten.
    """

    prompt: Prompt
    sample: int
    """Index within the group."""
    stream: RunStream
    token_ids: Sequence[int] = ()
    """[L] sampled and given ids, and so for the next two."""
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    turns: list[Turn] = field(default_factory=list)
    """Those that have ended."""
    seconds: float = 0.0
    """Time from requests to their answers, of the turn that has not ended."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens."""
        for name, new in (("token_ids", token_ids), ("logprobs", logprobs), ("versions", versions)):
            old = getattr(self, name)
            setattr(self, name, [*old, *new] if len(old) else new)  # of ranks: views of shared memory, which stay such

    def cut(self, num_tokens: int, num_turns: int) -> None:
        """Forget what comes after so many tokens and turns."""
        if len(self.token_ids) > num_tokens:
            for name in ("token_ids", "logprobs", "versions"):
                setattr(self, name, getattr(self, name)[:num_tokens])
        del self.turns[num_turns:]

    def rollout(
        self,
        reason: FinishReason,
        text: str,
        outcome: Outcome,
        sequence: int = 0,
        of: int = 1,
        branches: tuple[Rollout, ...] = (),
    ) -> Rollout:
        """Return the trajectory, which has ended, or one of its sequences."""
        self.cut(self.turns[-1].end if self.turns else 0, len(self.turns))
        if len(self.turns) == 1 and len(self.token_ids) == self.turns[0].end - self.turns[0].start:
            sampled = b"\x01" * len(self.token_ids)
        else:
            sampled = bytes(version != GIVEN for version in self.versions)
        return Rollout(
            self.prompt,
            self.sample,
            self.token_ids,
            memoryview(sampled).cast("?"),  # a byte a token, where a list would take eight
            self.logprobs,
            self.versions,
            tuple(self.turns),
            reason,
            text,
            outcome,
            sequence,
            of,
            branches,
        )


class TrajectoryEndError(Exception):
    """Raised to an agent that asks for more than the limits of its trajectory allow."""

    def __init__(self, reason: FinishReason, failure: str = "") -> None:
        super().__init__(reason, failure)
        self.reason: FinishReason = reason
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the policy, as an agent reads it."""

    text: str
    """Without special tokens."""
    finish_reason: FinishReason
    message: Message = field(default_factory=dict)
    """The same as a message of a chat, with the calls of tools that were found in it."""
    calls: tuple[ToolCall, ...] = ()


class Llm:
    """The policy, as the agent of one trajectory asks it."""

    def __init__(
        self, engine: Answers, sample: Sample, params: SamplingParams, loop: "AgentLoop", on_done: Progress | None
    ) -> None:
        self._engine, self._sample, self.params, self._loop = engine, sample, params, loop
        self.on_progress = on_done
        self._position = self._num_turns = self._num_calls = 0
        self._answer = ""
        self._messages: list[Message] = list(sample.prompt.messages or ())
        self.reason: FinishReason = "aborted"
        """Why the last turn ended."""
        self._first: Llm = self
        self.sequences: list[Llm] = [self]
        """All of the trajectory, where this is its first: those that `fork` has begun come after it."""
        self.last: Llm = self
        """The one of them that had the last turn."""
        self.engine_error: Exception | None = None
        """What the engine raised: the run ends with it, whatever the agent makes of it."""

    @property
    def messages(self) -> list[Message]:
        """The chat so far; a copy."""
        return list(self._messages)

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self._answer

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns of this sequence."""
        return self._sample.turns[: self._num_turns]

    @property
    def sample(self) -> Sample:
        """What is recorded of this sequence."""
        return self._sample

    def tokens(self, num_turns: int) -> list[int]:
        """Return the token ids of this sequence, those that it began with among them, up to the end of a turn."""
        sample = self._sample
        return [*sample.prompt.token_ids, *sample.token_ids[: sample.turns[num_turns - 1].end]]

    def fork(self, token_ids: Sequence[int], longest: int) -> "Llm":
        """Return the policy for a further sequence of the trajectory, of which this is the first.

        Args:
            token_ids: what the sequence begins with; no loss trains on these.
            longest: how many tokens there may be, with what comes after them.
        """
        sample, prompt = self._sample, self._sample.prompt
        if list(token_ids) != prompt.token_ids:
            digest = xxh64_hexdigest(json.dumps(list(token_ids)).encode())
            text = self._loop.needed_chat.decode(token_ids, special=True)
            prompt = replace(prompt, token_ids=list(token_ids), text=text, context=digest)
        # Named by what it begins with, and not by when: branches draw the same in whatever order they come.
        same = sum(one.sample.prompt.context == prompt.context for one in self.sequences[1:])
        stream = (*sample.stream, prompt.context, same)
        params = replace(self.params, max_tokens=min(self.params.max_tokens, longest - len(token_ids)))
        fork = Llm(self._engine, Sample(prompt, sample.sample, stream), params, self._loop, self.on_progress)
        fork._first = self
        self.sequences.append(fork)
        return fork

    async def release(self) -> None:
        """Let the engine forget what it keeps for the trajectory."""
        for one in self.sequences:
            sample = one.sample
            await self._engine.release((sample.stream, sample.prompt.uid, sample.sample))

    def rollout(self, reason: FinishReason, outcome: Outcome) -> Rollout:
        """Return the trajectory, which has ended."""
        drawn = [one for one in self.sequences if one.sample.turns] or [self]
        drawn.sort(key=lambda one: one.sample.stream)
        text = self.last.text if outcome.text is None else outcome.text
        others = [
            one.sample.rollout(reason, one.text, outcome, number, len(drawn)) for number, one in enumerate(drawn[1:], 1)
        ]
        return drawn[0].sample.rollout(reason, text, outcome, 0, len(drawn), tuple(others))

    async def complete(
        self, given: Sequence[int] | str = (), *, stop: Sequence[str] = (), max_tokens: int | None = None
    ) -> Answer:
        """Return the policy's next turn after `given` tokens, or text that becomes tokens as it stands.

        `stop` holds strings that end this turn beside those of the run, and `max_tokens` is how long it may be at most.

        Raises:
            TrajectoryEndError: the trajectory has as many turns or tokens as it may have.
        """
        if isinstance(given, str):
            given = self._loop.needed_chat.encode(given)
        sample, start = self._sample, self._position + len(given)
        if self._num_turns == self._loop.max_turns:
            raise TrajectoryEndError("max_turns")
        if start >= self.params.max_tokens:
            raise TrajectoryEndError("length")
        if len(sample.token_ids) > self._position:
            between = sample.versions[self._position : start + 1]
            goes_on = list(sample.token_ids[self._position : start]) == list(given)
            if not goes_on or any((version == GIVEN) != (place < len(given)) for place, version in enumerate(between)):
                sample.cut(self._position, self._num_turns)
        if given and len(sample.token_ids) == self._position:
            sample.add(given, [0.0] * len(given), [GIVEN] * len(given))
        if self._num_turns == len(sample.turns):
            params = self.params
            if stop or max_tokens is not None:
                limit = params.max_tokens if max_tokens is None else min(params.max_tokens, start + max_tokens)
                params = replace(params, max_tokens=limit, stop=[*params.stop, *stop])
            text = await self._draw(start, params)
        else:  # it was drawn before
            turn = replace(sample.turns[self._num_turns], tool_calls=(), reward=None)
            sample.turns[self._num_turns] = turn
            text = self._loop.needed_chat.decode(sample.token_ids[start : turn.end])
        turn = sample.turns[self._num_turns]
        self._num_turns, self._position = self._num_turns + 1, turn.end
        self._answer, self.reason, self._first.last = text, turn.finish_reason, self
        return Answer(text, turn.finish_reason)

    async def _draw(self, start: int, params: SamplingParams) -> str:
        """Draw the rest of a turn, and return its text; where a request is aborted another one goes on."""
        sample, reason, text = self._sample, "aborted", ""
        while reason == "aborted":
            drawn = len(sample.token_ids)
            stream = SampleStream(sample.stream, sample.prompt.uid, sample.sample, len(sample.turns), drawn - start)
            left = replace(params, max_tokens=params.max_tokens - drawn) if drawn else params
            tokens = [*sample.prompt.token_ids, *sample.token_ids]
            keeps = self._loop.has_turns
            request = Request(tokens, left, stream, keep_cache=keeps, on_progress=self.on_progress)
            try:
                completion, seconds = await self.timed(self._engine.generate(request))
            except Exception as error:
                self._first.engine_error = error
                raise
            sample.add(completion.token_ids, completion.logprobs, completion.versions)
            sample.seconds += seconds
            reason, text = completion.finish_reason, completion.text
        sample.turns.append(Turn(start, len(sample.token_ids), reason, sample.seconds))
        sample.seconds = 0.0
        return text

    async def chat(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> Answer:
        """Return the policy's answer to a chat that goes on from `messages` of this object.

        Only what is new in it is rendered, after the tokens that are there. The turn has at most `max_tokens`.

        Raises:
            TrajectoryEndError: see `complete`; or the chat does not go on from the one that was recorded.
            UserError: the model's chat template cannot go on so.
        """
        chat, known = self._loop.needed_chat, len(self._messages)
        if list(messages[:known]) != self._messages:
            raise TrajectoryEndError(
                "agent_failed", "the agent has changed messages that the policy has answered already"
            )
        given: Sequence[int] = ()
        if self._num_turns:
            last = self._sample.token_ids[self._position - 1]
            given = chat.added(self._messages[-1], messages[known:], ended_by=last)
        elif len(messages) > known:
            given = chat.said_first(messages[known:])
        answer = await self.complete(given, max_tokens=max_tokens)
        calls: list[ToolCall] = []
        content = answer.text
        if chat.parse_calls is not None:
            turn = self._sample.turns[self._num_turns - 1]
            written = chat.decode(self._sample.token_ids[turn.start : turn.end], special=True)
            content, calls = chat.parse_calls(written, self._num_calls)
        message = chat.assistant(content, calls)
        self._messages = [*messages, message]
        return Answer(answer.text, answer.finish_reason, message, tuple(calls))

    async def say(self, text: str) -> Answer:
        """Return the policy's answer to a text, as a user's message; to none at all, where it is empty.

        Raises:
            TrajectoryEndError: see `chat`.
        """
        return await self.chat([*self._messages, *([{"role": "user", "content": text}] if text else [])])

    async def timed(self, work: Awaitable[Result], tool: str | None = None) -> tuple[Result, float]:
        """Return what a request, or a tool, gives and the seconds that it took.

        The timeline shows it, however it ends.
        """
        wall_us, began = time.time_ns() // 1000, time.perf_counter()
        try:
            result = await work
        finally:
            seconds, sample = time.perf_counter() - began, self._sample
            if self._loop.show is not None:
                about = {"uid": sample.prompt.uid, "sample": sample.sample, "turn": self._num_turns + (tool is None)}
                about |= {} if tool is None else {"tool": tool}
                self._loop.show(sample.stream, "turn" if tool is None else "tool_call", wall_us, seconds, **about)
        return result, seconds

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call tools beside each other and return their answers as messages.

        Raises:
            TrajectoryEndError: it has called as many as it may, or what a tool runs on has failed.
        """
        toolbox, limit = self._loop.toolbox, self._loop.max_tool_calls
        assert toolbox is not None, "an agent with tools has a toolbox"
        self._num_calls += len(calls)
        if limit is not None and self._num_calls > limit:
            raise TrajectoryEndError("max_turns")
        timed = (self.timed(toolbox.call(call), call.name) for call in calls)
        results = [result for result, _ in await asyncio.gather(*timed)]
        for call, result in zip(calls, results):
            self.note_use(
                ToolUse(call.name, json.dumps(call.arguments), result.content, result.seconds, result.failure)
            )
        failed = [result.content for result in results if result.failure == "infrastructure"]
        if failed:
            raise TrajectoryEndError("tool_failed", failed[0])
        return [self._loop.needed_chat.tool(call, result.content) for call, result in zip(calls, results)]

    def note_use(self, use: ToolUse) -> None:
        """Note on the last turn what it made of a tool, or of an environment."""
        turn = self._sample.turns[self._num_turns - 1]
        self._sample.turns[self._num_turns - 1] = replace(turn, tool_calls=(*turn.tool_calls, use))

    def reward_turn(self, reward: float) -> None:
        """Give the last turn a reward of its own."""
        self._sample.turns[self._num_turns - 1] = replace(self._sample.turns[self._num_turns - 1], reward=reward)


Agent = Callable[[Prompt, Llm, Any], Awaitable[Outcome | None]]
"""Makes a trajectory of a prompt, the policy and a toolbox; None: nothing to say of it, a verifier scores its last
turn."""


async def single_turn(prompt: Prompt, llm: Llm, tools: Any) -> None:
    """Let the policy answer once."""
    await llm.complete()


_NOTHING_TO_SAY = Outcome()


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """An agent, with what it needs and the limits of a trajectory."""

    agent: Agent = single_turn
    name: str = "single_turn"
    """As in the config."""
    chat: Chat | None = None
    toolbox: Toolbox | None = None
    max_turns: int | None = 1
    max_tool_calls: int | None = None
    timeout_s: float | None = None
    """Longest time of a trajectory; one that takes longer is masked out."""
    show: Callable[..., object] | None = None
    """Shows what a trajectory does on the timeline: its stream, `turn` or `tool_call`, the start in microseconds since
    1970, seconds, and what is shown with it."""
    close_agent: Callable[[], None] | None = None
    """Ends what the agent runs on."""

    @property
    def has_turns(self) -> bool:
        """Whether a trajectory may have several turns."""
        return self.max_turns != 1

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told of the tools."""
        return [] if self.toolbox is None else self.toolbox.schemas

    def close(self) -> None:
        """End what agent and tools run on."""
        if self.close_agent is not None:
            self.close_agent()
        if self.toolbox is not None:
            self.toolbox.close()

    @property
    def needed_chat(self) -> Chat:
        """What renders messages."""
        assert self.chat is not None, "an agent of several turns has one"
        return self.chat

    async def roll_out(
        self, engine: Answers, sample: Sample, params: SamplingParams, on_done: Progress | None = None
    ) -> Rollout:
        """Return the trajectory of a sample, however it ends.

        Args:
            engine: what answers.
            sample: a new one, or one that was begun.
            params: how to draw; `max_tokens` counts all tokens after the prompt, those that are given, too.
            on_done: called with 1 when it has ended, and with 0 while decoding goes on.

        Raises:
            NonFiniteError: a next-token distribution holds NaN or Inf.
        """
        each = on_done if on_done is None or not self.has_turns else lambda _: on_done(0)  # one of many requests
        llm = Llm(engine, sample, params, self, each)
        outcome, reason = _NOTHING_TO_SAY, None
        try:
            async with nullcontext() if self.timeout_s is None else asyncio.timeout(self.timeout_s):
                outcome = await self.agent(sample.prompt, llm, self.toolbox) or outcome
            reason = llm.last.reason
        except TrajectoryEndError as end:
            outcome, reason = Outcome(failure=end.failure), end.reason
        except TimeoutError:
            outcome, reason = Outcome(failure=f"the trajectory took longer than {self.timeout_s} s"), "timeout"
        except Exception as error:
            if error is llm.engine_error or isinstance(error, UserError):
                raise
            outcome, reason = Outcome(failure=what_failed(error, self.name)), "agent_failed"
        finally:
            if self.has_turns:
                await llm.release()
        if llm.engine_error is not None:
            raise llm.engine_error
        if self.has_turns and on_done is not None:
            on_done(1)
        earned = [turn.reward for turn in sample.turns if turn.reward is not None]
        if earned and outcome.rewards is None:
            outcome = replace(outcome, rewards={"environment": sum(earned)})
        return llm.rollout(reason, outcome)


SINGLE_TURN = AgentLoop()


def sample_rollouts(
    engine: RolloutEngine,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    stream: RunStream,
    on_done: Progress | None = None,
    loop: AgentLoop = SINGLE_TURN,
) -> list[Rollout]:
    """Return len(prompts) · n rollouts, prompt by prompt, sample by sample.

    Args:
        engine: what answers.
        prompts: what to answer.
        params: how to draw.
        stream: name of the random stream, e.g. ("rollout", step); each sample derives its own from it, so that a
            result does not depend on what else is in the batch.
        on_done: called with the number of rollouts just finished, and with 0 while decoding goes on.
        loop: the agent.

    Raises:
        NonFiniteError: a next-token distribution holds NaN or Inf.
    """
    samples = [Sample(prompt, sample, stream) for prompt in prompts for sample in range(params.n)]

    async def answer_all() -> list[Rollout]:
        return await asyncio.gather(*(loop.roll_out(engine, sample, params, on_done) for sample in samples))

    return run_sync(answer_all())
