"""`pellucid chat`: a person talks to a model or a run's last checkpoint, which calls the tools it was trained with.

What the person says goes to the policy as an agent's messages do, and what is answered is shown while it is drawn.
"""

import asyncio
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from pellucid.cli.evaluate import Device, LikeRecipe, Model
from pellucid.cli.rollouts import tool_line, visible
from pellucid.console import console
from pellucid.errors import UserError

if TYPE_CHECKING:
    from pellucid.agents.chat import Chat, Message
    from pellucid.agents.llm import AgentLoop, Llm
    from pellucid.rollout.requests import SamplingParams
    from pellucid.trained import Asked

AGAIN, END = "/new", "/end"


def chat(
    model: Model,
    recipe: LikeRecipe = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token each time.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 512,
    device_name: Device = "auto",
) -> None:
    """Talk to a model, in its chat template where it has one; a run has the tools that it was trained with.

    [bold]pellucid chat outputs/pellucid/demo[/bold]
    """
    from pellucid.rollout.requests import SamplingParams
    from pellucid.trained import load_asked

    asked = load_asked(model, recipe, device_name)
    section = asked.config.actor_rollout_ref.rollout.agent
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature or 1.0, do_sample=temperature > 0)
    with closing(_loop(asked)) as loop:
        tools = ", ".join(schema["function"]["name"] for schema in loop.schemas)
        about = f", with the tools {tools}" if tools else ""
        console.print(f"{model}{about}. {AGAIN} begins another chat, {END} or Ctrl-D ends.", style="dim", markup=False)
        if section.name in ("env", "endpoint"):
            console.print(f"You take the place of what it was trained with ({section.name}).", style="dim")
        with asyncio.Runner() as runner:
            while runner.run(_talk(asked, loop, params)):
                console.print("A new chat.", style="dim")


def _loop(asked: "Asked") -> "AgentLoop":
    """Return the tools of the run or recipe, without the limits of its trajectories."""
    from pellucid.agents.chat import Chat
    from pellucid.agents.llm import AgentLoop
    from pellucid.data.prompts import uses_template
    from pellucid.loading import run_loop

    data, section = asked.config.data, asked.config.actor_rollout_ref.rollout.agent
    if section.tools or section.mcp_servers:
        loop = replace(run_loop(asked.config, asked.tokenizer), max_turns=None, max_tool_calls=None)
    else:
        templated = uses_template(asked.tokenizer, data.chat_template)
        chat = Chat(asked.tokenizer, asked.eos_token_ids, templated=templated, system_prompt=data.system_prompt)
        loop = AgentLoop(chat=chat, max_turns=None)
    try:
        loop.needed_chat.check(["user"])
    except UserError:
        loop.close()
        raise
    return loop


async def _talk(asked: "Asked", loop: "AgentLoop", params: "SamplingParams") -> bool:
    """Hold one chat, and tell whether another one is to follow."""
    from pellucid.agents.llm import Llm, Sample, TrajectoryEndError
    from pellucid.types import Prompt

    chat, engine, system = loop.needed_chat, asked.engine, asked.config.data.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    llm: Llm | None = None
    while (said := _ask()) not in (AGAIN, END):
        messages = [*messages, {"role": "user", "content": said}]
        if llm is None:
            begun = Prompt("chat", _start(asked, chat, messages), said, "", messages=messages)
            most = replace(params, max_tokens=asked.max_tokens - len(begun.token_ids))
            llm = Llm(engine, Sample(begun, 0, ("chat",)), most, loop, None)
        try:
            messages = await _answered(llm, chat, messages, params.max_tokens, asked)
        except TrajectoryEndError as end:
            full = f"The chat is full: the model takes {asked.max_tokens} tokens. {AGAIN} begins another one."
            console.print(end.failure or full, style="red", markup=False)
            messages = llm.messages
    if llm is not None:
        await llm.release()
    return said == AGAIN


def _ask() -> str:
    """Return what the person says."""
    while True:
        try:
            said = console.input(Text("> ", style="green")).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return END
        if said:
            return said


def _start(asked: "Asked", chat: "Chat", messages: "list[Message]") -> list[int]:
    from pellucid.data.prompts import encode_texts, uses_template

    if uses_template(asked.tokenizer, asked.config.data.chat_template):
        return chat.start(messages)
    return encode_texts([messages[0]["content"]], asked.tokenizer, templated=False)[0]


async def _answered(
    llm: "Llm", chat: "Chat", messages: "list[Message]", longest: int, asked: "Asked"
) -> "list[Message]":
    """Show the model's turns up to one without calls of tools, and return the chat with them."""
    while True:
        with Live(console=console, refresh_per_second=12, transient=True) as live:

            def show(_: int, live: Live = live) -> None:
                for row in asked.engine.decoder.rows:
                    live.update(Text(visible(chat.decode(row.answer))))

            llm.on_progress = show
            answer = await llm.chat(messages, max_tokens=longest)
        cut = " …" if answer.finish_reason == "length" else ""
        console.print(Text(visible(answer.text) + cut, style="bold"))
        if not answer.calls:
            return llm.messages
        messages = [*llm.messages, *await llm.call_tools(answer.calls)]
        for use in llm.turns[-1].tool_calls:
            console.print(tool_line(asdict(use)))
