"""Section `actor_rollout_ref.rollout.agent`: what makes trajectories of prompts, in one turn or in many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pellucid.config.fields import Alias, Needs, OrImportPath, Range, option

_AGENT = "actor_rollout_ref.rollout.agent"
_NAME = f"{_AGENT}.name"
_TURNS = Needs(_NAME, ("tools", "env"))


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
