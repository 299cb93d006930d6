"""Competition mathematics: any data set whose answer is a formula, checked by the package math-verify; extra `[math]`.

Reads a jsonl or parquet file, or a hub data set (MATH-500 by default); two formulas are equal when they mean the same.
"""

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pellucid.errors import MissingExtraError, UserError
from pellucid.tasks.files import load_hub, read_jsonl, read_parquet
from pellucid.tasks.task import Task

HUB_ID = "HuggingFaceH4/MATH-500"
INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


@dataclass(slots=True)
class MathArgs:
    """Arguments of `task:math`."""

    path: str = HUB_ID
    """A .jsonl or .parquet file, or a hub id; AIME, AMC, Minerva and others come in the same form."""
    question: str = "problem"
    """Column of the question."""
    answer: str = "answer"
    """Column of the answer: LaTeX or a number."""


class Math(Task):
    """Question → formula in a LaTeX box; the gold answer is parsed as LaTeX, and as a plain expression."""

    name = "math"
    inline: ClassVar[bool] = False  # simplifying a formula may take seconds
    args_type = MathArgs

    def require(self) -> None:
        """Check that math-verify is installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("task:math", "math-verify", "math")

    def make_rows(self, split: str, args: MathArgs) -> list[dict[str, Any]]:
        """Return one row a problem: the question with its instruction, and the answer."""
        self.require()
        path, field = Path(args.path).expanduser(), "task:math?path"
        read = {".jsonl": read_jsonl, ".parquet": read_parquet}.get(path.suffix)
        problems = load_hub(args.path, field, split) if read is None else read(path, field)
        for index, problem in enumerate(problems):
            if missing := [name for name in (args.question, args.answer) if name not in problem]:
                reason = f"row {index} has no column '{missing[0]}', but {', '.join(problem)}."
                raise UserError("task:math", reason, "Name it: task:math?question=COLUMN&answer=COLUMN")
        return [
            {
                "prompt": f"{problem[args.question]}\n{INSTRUCTION}",
                "answer": str(problem[args.answer]),
                "data_source": self.name,
            }
            for problem in problems
        ]

    def verify(self, response: str, answer: Any, extra: dict[str, Any]) -> float:
        """Return 1.0 when the response's last formula equals the answer."""
        from math_verify import parse, verify

        # Its own time-outs need the main thread's alarm, and it warns without; the scorer ends what takes too long.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
        return float(verify(gold, parse(response, parsing_timeout=0), timeout_seconds=0))
