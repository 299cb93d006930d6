"""Section `actor_rollout_ref.rollout.agent`: what makes trajectories of prompts, in one turn or in many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pellucid.config.fields import Alias, Needs, OrImportPath, Range, option

_AGENT = "actor_rollout_ref.rollout.agent"
_NAME = f"{_AGENT}.name"
_TURNS = Needs(_NAME, ("tools", "env", "endpoint"))
_CALLS = Needs(_NAME, ("tools", "env"))
_FORMAT = Needs(_NAME, ("tools", "endpoint"))
_PROGRAM = Needs(_NAME, ("endpoint",))


@dataclass(frozen=True)
class AgentConfig:
    """The agent that asks the policy for turns; `response_length` counts all tokens after the prompt."""

    name: Annotated[
        Literal["single_turn", "tools", "env", "endpoint"],
        OrImportPath(),
        Alias("single_turn_agent", "single_turn"),
        Alias("tool_agent", "tools"),
    ] = "single_turn"
    """single_turn, tools (calls them until it answers), env (takes turns with an environment), endpoint (a program that
    asks the policy over OpenAI's API), or an own one by import path:
    `async def agent(prompt, llm, tools) -> Outcome | None`."""
    max_turns: Annotated[int, Range(ge=1)] = option(8, needs=_TURNS)
    """Most turns of the policy in a trajectory."""
    timeout_s: Annotated[float, Range(gt=0)] | None = option(None, needs=_TURNS)
    """Longest time of a trajectory in seconds; one that takes longer is masked out. null: no limit."""
    environment: Annotated[Literal["attempts", "calculator", "guess"], OrImportPath()] | None = option(
        None, needs=Needs(_NAME, ("env",))
    )
    """attempts (answers that the task's verifier finds wrong may be mended), calculator, guess, or the import path of a
    class with `reset() -> text` and `step(text) -> (text, reward, done)`, which is made with the prompt."""
    reward_at: Literal["end", "turn"] = option("end", needs=_CALLS)
    """Where rewards of turns count: all together on the last sampled token, or each on the last one of its turn (gae,
    reinforce_plus_plus, remax, and grpo, which compares the turns of a group)."""
    tools: list[str] = option(list, needs=_CALLS)
    """What may be called: Python functions by import path (`file.py:name`), whose signature and docstring the model
    sees, and `python`, which runs code in a sandbox."""
    mcp_servers: list[str] = option(list, needs=_CALLS)
    """MCP servers whose tools may be called: commands that start one, or addresses (http://…)."""
    format: Literal["auto", "hermes", "llama3", "mistral"] = option("auto", needs=_FORMAT)
    """How the model writes calls; auto tells by its chat template."""
    max_tool_calls: Annotated[int, Range(ge=1)] | None = option(None, needs=_CALLS)
    """Most calls in a trajectory; null: no limit."""
    tool_timeout_s: Annotated[float, Range(gt=0)] = option(30.0, needs=_CALLS)
    """Longest time of a call in seconds; one that takes longer is ended, and the model is told so."""
    max_tool_output: Annotated[int, Range(ge=1)] = option(4096, needs=_CALLS)
    """Most characters of what a call gives back; what is longer is cut in its middle, and the model is told so."""
    command: str | None = option(None, needs=_PROGRAM)
    """Command line of the program that is started once a trajectory, with OPENAI_BASE_URL and OPENAI_API_KEY set."""
    max_programs: Annotated[int, Range(ge=1)] = option(64, needs=_PROGRAM)
    """Most of these programs at the same time."""
