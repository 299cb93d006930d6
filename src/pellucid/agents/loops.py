"""From `rollout.agent` to the agent of a run: one turn, tools, an environment, or a function of the user's."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from pellucid.agents.chat import FIELD, Chat
from pellucid.agents.environments import ENVIRONMENTS, Environment
from pellucid.agents.llm import Agent, AgentLoop, Llm
from pellucid.config.schema.agent import AgentConfig
from pellucid.errors import UserError
from pellucid.plugins import load_object
from pellucid.types import Outcome, Prompt, ToolUse

MOST_THREADS = 256
"""Environments that work at the same time, of those that are no coroutines."""


async def tools(prompt: Prompt, llm: Llm, toolbox: Any) -> None:
    """Let the policy call tools until it calls none."""
    messages = llm.messages
    while (answer := await llm.chat(messages)).calls:
        messages = [*llm.messages, *await llm.call_tools(answer.calls)]


def in_environment(make: Callable[[Prompt], Environment]) -> Agent:
    """Return the agent that takes turns with the environments that `make` makes."""
    threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="environment")

    async def call(method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await asyncio.get_running_loop().run_in_executor(threads, method, *arguments)

    async def environment(prompt: Prompt, llm: Llm, toolbox: Any) -> Outcome | None:
        async def begin() -> tuple[Environment, str]:
            world = await call(make, prompt)
            return world, await call(world.reset)

        ((world, said), _), is_done = await llm.timed(begin(), "environment.reset"), False
        while not is_done:
            answer = await llm.say(said)
            (said, reward, is_done), seconds = await llm.timed(call(world.step, answer.text), "environment")
            llm.note_use(ToolUse("environment", answer.text, said, seconds))
            llm.reward_turn(float(reward))

    return environment


@dataclass(frozen=True, slots=True)
class _Agent:
    make: Callable[[AgentConfig], Agent]
    roles: Sequence[str]
    """Of the messages that it adds to a chat."""


def _environment(section: AgentConfig) -> Agent:
    name, field = section.environment, f"{FIELD}.environment"
    if name is None:
        reason = "is not set, and the agent takes turns with one."
        raise UserError(field, reason, f"Take one of {', '.join(ENVIRONMENTS)}, or one of your own.")
    return in_environment(ENVIRONMENTS[name] if name in ENVIRONMENTS else load_object(name, field))


AGENTS = {
    "tools": _Agent(lambda _: tools, ("tool",)),
    "env": _Agent(_environment, ("user",)),
}
"""By `rollout.agent.name`, beside `single_turn` and import paths."""


def make_loop(
    section: AgentConfig,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    *,
    templated: bool,
    system_prompt: str | None,
) -> AgentLoop:
    """Return the agent of a run with its limits.

    Args:
        section: `rollout.agent`.
        tokenizer: the model's.
        eos_token_ids: ids that end a turn.
        templated: whether prompts are rendered by the tokenizer's chat template.
        system_prompt: what they begin with, if anything.

    Raises:
        UserError: the agent or environment cannot be loaded, or the model's chat template cannot go on from its turns.
    """
    toolbox = None
    chat = Chat(tokenizer, eos_token_ids, templated=templated, system_prompt=system_prompt)
    if section.name in AGENTS:
        entry = AGENTS[section.name]
        chat.check(entry.roles)
        agent = entry.make(section)
    else:
        agent = load_object(section.name, f"{FIELD}.name")
    return AgentLoop(agent, section.name, chat, toolbox, section.max_turns, None, section.timeout_s)
