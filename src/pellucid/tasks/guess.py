"""Find a number by asking: the environment `guess` answers each guess with `+` or `-`."""

import random
from dataclasses import dataclass
from typing import Any

from pellucid.errors import UserError
from pellucid.tasks.numbers import numbers_in
from pellucid.tasks.task import SPLITS, Task


@dataclass(slots=True)
class GuessArgs:
    """Arguments of `task:guess`."""

    highest: int = 15
    """The number is one of 0 … highest."""
    size: int = 2000
    """Number of problems, in each of which it is drawn anew."""
    seed: int = 0
    style: str = "plain"
    """`plain` is "0-15:" (the built-in model); `chat` says in words what to do."""


class Guess(Task):
    """A range, in which a number is to be found."""

    name = "guess"
    args_type = GuessArgs

    def make_rows(self, split: str, args: GuessArgs) -> list[dict[str, Any]]:
        """Return problems with numbers drawn at random; those of splits are drawn apart."""
        if args.style not in ("plain", "chat"):
            raise UserError("task:guess", f"style='{args.style}' does not exist: styles are plain and chat.")
        if args.highest < 1 or args.size < 1:
            raise UserError("task:guess", "highest and size must be positive whole numbers.")
        words = (
            f"I think of a whole number from 0 to {args.highest}. Guess it; I answer + where it is larger than your "
            "guess, and - where it is smaller. Say one number a turn and nothing else."
        )
        prompt = f"0-{args.highest}:" if args.style == "plain" else words
        drawn = random.Random(f"{args.seed} {SPLITS.index(split)}")
        answers = [str(drawn.randint(0, args.highest)) for _ in range(args.size)]
        return [{"prompt": prompt, "answer": answer, "data_source": self.name} for answer in answers]

    def verify(self, response: str, answer: Any, extra: dict[str, Any]) -> float:
        """Return 1.0 for the number itself, else 0.0: what a guess without environment is worth."""
        return float(numbers_in(response)[-1:] == [int(answer)])
