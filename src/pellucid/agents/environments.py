"""Environments, which answer what the policy says with words and a reward; `loops.py` lets the two take turns."""

import ast
import operator
from collections.abc import Callable
from typing import Protocol

from pellucid.tasks import get_task
from pellucid.tasks.numbers import numbers_in
from pellucid.types import Prompt


class Environment(Protocol):
    """One trajectory's world. A class, or function, that makes it of the trajectory's `Prompt` can be named in
    `rollout.agent.environment` by import path; methods may be coroutines, and others run in threads.
    """

    def reset(self) -> str:
        """Return what is said before the first turn, beyond the prompt; mostly nothing."""
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return what is said to the policy's `text`, the turn's reward, and whether this was the last turn."""
        ...


class Attempts:
    """Any task as an environment: an answer that its verifier finds wrong may be mended, with less reward each time.

    For reasoning-gym's data sets, arithmetic and others; the data source of a row names its task.
    """

    DISCOUNT = 0.8
    """Share of the reward that is left with each further attempt."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt, self._num_tried, self._earned = prompt, 0, 0.0

    def reset(self) -> str:
        """Say nothing beyond the problem."""
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Verify an answer; the rewards of the turns add up to that of the last attempt, with what is left of it."""
        score = _verified(self._prompt, text)
        earned, before = score * self.DISCOUNT**self._num_tried, self._earned
        self._num_tried, self._earned = self._num_tried + 1, earned
        return ("", earned - before, True) if score >= 1 else ("That is not right. Try again.", earned - before, False)


class Calculator:
    """An arithmetic problem with a calculator: a turn that ends with `=` is computed, any other is the answer."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def reset(self) -> str:
        """Say nothing beyond the problem."""
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Compute, or score the answer."""
        asked = text.strip()
        if asked.endswith("="):
            return f"{calculate(asked[:-1])}=", 0.0, False
        return "", _verified(self._prompt, text), True


class Guess:
    """A number to be found (`task:guess`): each guess is answered with `+` where it is larger, with `-` where not."""

    def __init__(self, prompt: Prompt) -> None:
        self._number = int(prompt.answer)

    def reset(self) -> str:
        """Say nothing beyond the range."""
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Compare a guess; what holds no number is answered with `?`."""
        found = numbers_in(text)
        if not found:
            return "?", 0.0, False
        if found[-1] == self._number:
            return "", 1.0, True
        return "+" if self._number > found[-1] else "-", 0.0, False


ENVIRONMENTS: dict[str, tuple[Callable[[Prompt], Environment], bool]] = {
    "attempts": (Attempts, False),
    "calculator": (Calculator, True),
    "guess": (Guess, True),
}
"""By `rollout.agent.environment`, and whether it answers in microseconds: then it is asked at once, and a run can be
repeated bit for bit; what threads answer comes in whatever order.
"""


def _verified(prompt: Prompt, text: str) -> float:
    verdict = get_task(prompt.task).verify(text, prompt.answer, prompt.extra)
    return float(verdict["score"] if isinstance(verdict, dict) else verdict)


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, `+ - * /` and brackets, or `?` where it is none.

    Example:
        >>> calculate("(3+4)*12")
        '84'
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("no arithmetic")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):.15g}"
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return "?"
