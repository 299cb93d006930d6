"""GSM8K: grade-school word problems with one number as the answer.

Reads `train.jsonl`/`test.jsonl` (fields `question`, `answer`) from a folder, or the hub data set `openai/gsm8k`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.tasks.files import load_hub, read_jsonl
from pellucid.tasks.numbers import numbers_in, to_number
from pellucid.tasks.task import Task

HUB_ID = "openai/gsm8k"
FOLDERS = ("shared/data/gsm8k", "../shared/data/gsm8k", "data/gsm8k")
INSTRUCTION = 'Think step by step, and end with a last line of the form "#### <number>".'


@dataclass(slots=True)
class Gsm8kArgs:
    """Arguments of `task:gsm8k`."""

    path: str = ""
    """A folder with `train.jsonl` and `test.jsonl`, or one such file; by default one of `FOLDERS`, or the hub."""


class Gsm8k(Task):
    """Word problem → number after `####`; `val` and `test` are both the official test file."""

    name = "gsm8k"
    args_type = Gsm8kArgs

    def make_rows(self, split: str, args: Gsm8kArgs) -> list[dict[str, Any]]:
        """Return one row a problem: the question with its instruction, the final number, the worked `solution`."""
        rows: list[dict[str, Any]] = []
        for index, problem in enumerate(self._problems("train" if split == "train" else "test", args.path)):
            if not {"question", "answer"} <= problem.keys():
                reason = f"row {index} has the fields {', '.join(problem)}."
                raise UserError("task:gsm8k", reason, "It needs 'question' and 'answer'.")
            final = to_number(problem["answer"].rpartition("####")[2])
            if final is None:
                reason = f"the answer of row {index} has no number after '####'."
                raise UserError("task:gsm8k", reason, "Mend or remove that row.")
            prompt = f"{problem['question']}\n{INSTRUCTION}"
            row = {"prompt": prompt, "answer": str(final), "data_source": self.name, "solution": problem["answer"]}
            rows.append(row)
        return rows

    def _problems(self, part: str, path: str) -> list[dict[str, Any]]:
        """Return the raw rows of `train` or `test` from the given path, the usual folders or the hub."""
        for place in map(Path, [path] if path else FOLDERS):
            file = (place if place.suffix == ".jsonl" else place / f"{part}.jsonl").expanduser()
            if path or file.is_file():
                return read_jsonl(file, "task:gsm8k?path")
        return load_hub(HUB_ID, "task:gsm8k?path", part, name="main")

    def verify(self, response: str, answer: Any, extra: dict[str, Any]) -> float:
        """Return 1.0 when the number after the last `####` (without one: the last number of all) equals the answer."""
        if (expected := to_number(answer)) is None:
            raise ValueError(f"the row's answer holds no number: {answer!r}")
        _, marker, tail = response.rpartition("####")
        found = numbers_in(tail)
        return float(bool(found) and found[0 if marker else -1] == expected)
