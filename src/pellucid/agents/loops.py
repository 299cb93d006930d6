"""From `rollout.agent` to the agent of a run: one turn, tools, an environment, or a function of the user's."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pellucid.agents.chat import FIELD, Chat, ParseCalls
from pellucid.agents.endpoint import Endpoint
from pellucid.agents.environments import ENVIRONMENTS, Environment
from pellucid.agents.llm import Agent, AgentLoop, Llm
from pellucid.agents.tool_formats import FORMATS, guess_format, parse, parse_with_template
from pellucid.agents.tools import Toolbox, load_tools
from pellucid.config.schema.agent import AgentConfig
from pellucid.console import notice
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


def in_environment(make: Callable[[Prompt], Environment], *, at_once: bool = False) -> Agent:
    """Return the agent that takes turns with the environments that `make` makes, asked `at_once` or in threads."""
    threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="environment")

    async def call(method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        if at_once:
            return method(*arguments)
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
    make, at_once = ENVIRONMENTS[name] if name in ENVIRONMENTS else (load_object(name, field), False)
    return in_environment(make, at_once=at_once)


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
    longest: int,
    logs: Path,
) -> AgentLoop:
    """Return the agent of a run with its limits.

    Args:
        section: `rollout.agent`.
        tokenizer: the model's.
        eos_token_ids: ids that end a turn.
        templated: whether prompts are rendered by the tokenizer's chat template.
        system_prompt: what they begin with, if anything.
        longest: tokens that a sequence may have, those that it begins with included.
        logs: folder for what the programs of agents write to their standard error.

    Raises:
        UserError: the agent or environment cannot be loaded, or the model's chat template cannot go on from its turns.
    """
    parse_calls = _parser(section, tokenizer)
    if section.name == "endpoint":
        chat = Chat(tokenizer, eos_token_ids, None, parse_calls, templated=templated, system_prompt=system_prompt)
        endpoint = Endpoint(section, chat, longest, logs)
        return AgentLoop(endpoint, section.name, chat, max_turns=None, close_agent=endpoint.close)
    named = section.tools or section.mcp_servers
    if named and parse_calls is None:
        reason = "the model's chat template does not show how it writes calls of tools."
        raise UserError(f"{FIELD}.format", reason, f"Set it to one of {', '.join(FORMATS)}.")
    if section.name == "tools" and not named:
        raise UserError(f"{FIELD}.tools", "is empty, and the agent calls tools.", "Name some, e.g. [python].")
    given = entry.make(section) if (entry := AGENTS.get(section.name)) else load_object(section.name, f"{FIELD}.name")
    toolbox = _toolbox(section) if named else None
    try:
        schemas = toolbox.schemas if toolbox else []
        found = parse_calls if named else None
        chat = Chat(tokenizer, eos_token_ids, schemas, found, templated=templated, system_prompt=system_prompt)
        if entry is not None:
            chat.check(entry.roles)
        if schemas and not chat.names_tools:
            notice(f"{FIELD}.tools: the chat template names no tools to the model; data.system_prompt can.")
    except UserError:
        if toolbox is not None:
            toolbox.close()
        raise
    limits = section.max_turns, section.max_tool_calls, section.timeout_s
    return AgentLoop(given, section.name, chat, toolbox, *limits)


def _toolbox(section: AgentConfig) -> Toolbox:
    output = section.max_tool_output
    tools = load_tools(section.tools, section.mcp_servers, max_output_chars=output)
    return Toolbox(tools, timeout_s=section.tool_timeout_s, max_output_chars=output)


def _parser(section: AgentConfig, tokenizer: PreTrainedTokenizerBase) -> ParseCalls | None:
    """Return what finds the calls in a turn's text, given how many the trajectory has made before.

    None where nothing says how the model writes them.
    """
    if section.format == "auto" and tokenizer.response_template:
        return lambda text, number: parse_with_template(tokenizer, text, first_id=number)
    template = tokenizer.chat_template
    name = section.format if section.format != "auto" else guess_format(template if isinstance(template, str) else "")
    return None if name is None else partial(parse, name)
