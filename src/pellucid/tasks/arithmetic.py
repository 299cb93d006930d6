"""Arithmetic on two whole numbers, in levels of difficulty; every problem has one integer as its answer.

Problems are generated; which split one belongs to follows from a hash of the problem itself, so a held-out problem is
held out at every level, size, seed and style. The row's `answer` doubles as the target text of supervised fine-tuning.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pellucid.errors import UserError
from pellucid.tasks.numbers import numbers_in
from pellucid.tasks.task import Task

LEVELS: dict[int, tuple[int, str]] = {
    1: (1, "+"),
    2: (2, "+"),
    3: (2, "+-"),
    4: (3, "+-"),
    5: (2, "+-*"),
    6: (3, "+-*"),
}
"""level → (most digits of an operand, operations)."""

STYLES = ("plain", "chat", "calls")
DEFAULT_SIZE = 2000
_ENUMERABLE = 1 << 18


@dataclass(slots=True)
class ArithmeticArgs:
    """Arguments of `task:arithmetic`."""

    level: int = 1
    """1 … 6, see `LEVELS`: 1 is `a+b` with one digit each, 6 is + - * with up to three."""
    ops: str | None = None
    """Operations out of `+-*`, in place of the level's."""
    digits: int | None = None
    """Most digits of an operand, in place of the level's."""
    size: int | None = None
    """Number of distinct problems; by default 2000, or all there are when the split has fewer."""
    seed: int = 0
    """Chooses and orders the problems; the splits do not depend on it."""
    style: str = "plain"
    """`plain` is "12+7=" (the built-in model); `chat` is a question in words that asks for the number only; `calls` are
    examples to learn from of how a calculator is used: answers, calls, and what is said to a result, a third each."""


class Arithmetic(Task):
    """Two operands, one operation: "12+7=" → "19"."""

    name = "arithmetic"
    args_type = ArithmeticArgs

    def make_rows(self, split: str, args: ArithmeticArgs) -> list[dict[str, Any]]:
        """Return `size` distinct problems of the split; differences may be negative."""
        digits, ops = self._checked(args)
        in_split = (p for p in _distinct_problems(digits, ops, random.Random(args.seed)) if split_of(*p) == split)
        rows = [self._row(*one, args, n) for n, one in enumerate(islice(in_split, args.size or DEFAULT_SIZE))]
        if args.size and len(rows) < args.size:
            split_has = f"with {digits}-digit operands and '{ops}' the {split} split has {len(rows)}."
            reason = f"size={args.size} problems asked for, but {split_has}"
            raise UserError("task:arithmetic", reason, "Lower size, or raise level or digits.")
        return rows

    def _row(self, a: int, op: str, b: int, args: ArithmeticArgs, number: int) -> dict[str, Any]:
        plain, chat = f"{a}{op}{b}=", f"What is {a} {op} {b}? Answer with the number only."
        answer = str({"+": a + b, "-": a - b, "*": a * b}[op])
        shown = {
            "plain": [(plain, answer)],
            "chat": [(chat, answer)],
            "calls": [(plain, answer), (plain, plain), (f"{plain}{plain}<eos>{answer}=", answer)],
        }[args.style]
        prompt, said = shown[number % len(shown)]
        row = {"prompt": prompt, "answer": said, "data_source": self.name}
        return {**row, "style": args.style, "level": args.level}

    def _checked(self, args: ArithmeticArgs) -> tuple[int, str]:
        """Return (digits, ops) after checking every argument."""
        digits, ops = LEVELS.get(args.level, (1, "+"))
        digits = digits if args.digits is None else args.digits
        ops = ops if args.ops is None else args.ops
        size_is_fine = args.size is None or (isinstance(args.size, int) and args.size > 0)
        rules = {
            f"level={args.level} does not exist: levels are {min(LEVELS)} to {max(LEVELS)}.": args.level in LEVELS,
            f"digits={digits} is out of range: give a whole number from 1 to 9.": digits in range(1, 10),
            f"ops='{ops}' is not understood: write operations out of '+-*'.": bool(re.fullmatch(r"[-+*]+", str(ops))),
            f"size={args.size} is not a positive whole number.": size_is_fine,
            f"style='{args.style}' does not exist: styles are {', '.join(STYLES)}.": args.style in STYLES,
        }
        for reason, holds in rules.items():
            if not holds:
                raise UserError("task:arithmetic", reason)
        return digits, "".join(dict.fromkeys(ops))

    def verify(self, response: str, answer: Any, extra: dict[str, Any]) -> float:
        """Return 1.0 for the right integer, else 0.0.

        Style `plain`: the whole response, spaces aside, must be the number. Style `chat`: the last number on the first
        line that is not blank counts, so "12 + 7 = 19." is right and a line of afterthoughts changes nothing.
        """
        if extra.get("style", "plain") == "plain":
            return float(response.strip() == str(answer))
        lines = response.strip().splitlines()
        found = numbers_in(lines[0]) if lines else []
        return float(bool(found) and found[-1] == int(answer))


def split_of(a: int, op: str, b: int) -> str:
    """Return the split a problem belongs to: 80% train, 10% val, 10% test; a+b and b+a always share one."""
    first, second = sorted((a, b)) if op in "+*" else (a, b)
    tenth = int.from_bytes(hashlib.blake2b(f"{first}{op}{second}".encode(), digest_size=8).digest(), "big") % 10
    return {0: "val", 1: "test"}.get(tenth, "train")


def _distinct_problems(digits: int, ops: str, rng: random.Random) -> Iterator[tuple[int, str, int]]:
    """Yield distinct problems in random order: all of them when they can be listed, else at least half of them."""
    base = 10**digits
    for index in _random_order(len(ops) * base * base, rng):
        pair, op = divmod(index, len(ops))
        yield pair // base, ops[op], pair % base


def _random_order(total: int, rng: random.Random) -> Iterator[int]:
    if total <= _ENUMERABLE:
        order = list(range(total))
        rng.shuffle(order)
        yield from order
        return
    seen: set[int] = set()
    while len(seen) < total // 2:
        index = rng.randrange(total)
        if index not in seen:
            seen.add(index)
            yield index
