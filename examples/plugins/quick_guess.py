"""An agent: the policy guesses a number, is told whether it is larger, and is rewarded for guessing it early."""

from typing import Any

from pellucid.agents.llm import Llm
from pellucid.types import Outcome, Prompt


async def quick_guess(prompt: Prompt, llm: Llm, tools: Any) -> Outcome:
    """Answer each of four guesses with `+` or `-`; each wrong one costs a quarter of the reward."""
    said = ""
    for wrong in range(4):
        answer = await llm.complete(said)
        if answer.text == prompt.answer:
            return Outcome({"found": 1 - wrong / 4}, {"guesses": wrong + 1})
        is_less = answer.text.isdigit() and int(answer.text) < int(prompt.answer)
        said = "+" if is_less else "-"
    return Outcome({"found": 0.0}, {"guesses": 4})
