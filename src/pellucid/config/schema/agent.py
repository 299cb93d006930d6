"""Section `actor_rollout_ref.rollout.agent`: what makes trajectories of prompts, in one turn or in many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pellucid.config.fields import Alias, Needs, OrImportPath, Range, option

_AGENT = "actor_rollout_ref.rollout.agent"
_NAME = f"{_AGENT}.name"
_TURNS = Needs(_NAME, ("tools", "env"))
_TOOLS = Needs(_NAME, ("tools",))


@dataclass(frozen=True)
class AgentConfig:
    """The agent that asks the policy for turns; `response_length` counts all tokens after the prompt."""

    name: Annotated[
        Literal["single_turn", "tools", "env"],
        OrImportPath(),
        Alias("single_turn_agent", "single_turn"),
        Alias("tool_agent", "tools"),
    ] = "single_turn"
    """single_turn, tools (calls them until it answers), env (takes turns with an environment), or an own one by import
    path: `async def agent(prompt, llm, tools) -> Outcome | None`."""
    max_turns: Annotated[int, Range(ge=1)] = option(8, needs=_TURNS)
    """Most turns of the policy in a trajectory."""
    timeout_s: Annotated[float, Range(gt=0)] | None = option(None, needs=_TURNS)
    """Longest time of a trajectory in seconds; one that takes longer is masked out. null: no limit."""
    environment: Annotated[Literal["attempts", "calculator", "guess"], OrImportPath()] | None = option(
        None, needs=Needs(_NAME, ("env",))
    )
    """attempts (answers that the task's verifier finds wrong may be mended), calculator, guess, or the import path of a
    class with `reset() -> text` and `step(text) -> (text, reward, done)`, which is made with the prompt."""
    reward_at: Literal["end", "turn"] = option("end", needs=_TURNS)
    """Where rewards of turns count: all together on the last sampled token, or each on the last one of its turn."""
    tools: list[str] = option(list, needs=_TURNS)
    """What may be called: Python functions by import path (`file.py:name`), whose signature and docstring the model
    sees, and `python`, which runs code in a sandbox."""
    mcp_servers: list[str] = option(list, needs=_TURNS)
    """MCP servers whose tools may be called: commands that start one, or addresses (http://…)."""
    format: Literal["auto", "hermes", "llama3", "mistral"] = option("auto", needs=_TOOLS)
    """How the model writes calls; auto tells by its chat template."""
    max_tool_calls: Annotated[int, Range(ge=1)] | None = option(None, needs=_TURNS)
    """Most calls in a trajectory; null: no limit."""
    tool_timeout_s: Annotated[float, Range(gt=0)] = option(30.0, needs=_TURNS)
    """Longest time of a call in seconds; one that takes longer is ended, and the model is told so."""
    max_tool_output: Annotated[int, Range(ge=1)] = option(4096, needs=_TURNS)
    """Most characters of what a call gives back; the rest is cut off, and the model is told so."""
