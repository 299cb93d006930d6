"""Any reasoning-gym data set as a task: `reasoning_gym:leg_counting`, `reasoning_gym:countdown`, …

The package makes the problems and scores answers itself (partial credit included); extra `[reasoning-gym]`.
"""

import importlib.util
from functools import cache
from typing import Any, ClassVar

from pellucid.errors import MissingExtraError, UserError, did_you_mean
from pellucid.tasks.task import Task

GYM_PREFIX = "reasoning_gym:"
_SPLIT_OFFSET = {"train": 0, "val": 1 << 30, "test": 1 << 31}
"""Problem i is generated from seed + i, so splits that start this far apart share no seed."""


class ReasoningGym(Task):
    """One reasoning-gym data set; its arguments are the data set's own config fields (with `seed` 0 by default)."""

    inline: ClassVar[bool] = False

    def __init__(self, dataset: str, args_type: type) -> None:
        self.name, self.dataset, self.args_type = GYM_PREFIX + dataset, dataset, args_type

    def make_rows(self, split: str, args: Any) -> list[dict[str, Any]]:
        """Generate `size` problems; the row keeps the original question and the metadata its scorer needs."""
        import reasoning_gym

        settings = {name: value for name, value in vars(args).items() if name != "seed"}
        seed = (args.seed or 0) + _SPLIT_OFFSET[split]
        try:
            problems = list(reasoning_gym.create_dataset(self.dataset, seed=seed, **settings))
        except (AssertionError, ValueError, TypeError) as error:
            raise UserError(f"task:{self.name}", f"reasoning-gym refuses these arguments ({error}).") from error
        kept = ("question", "answer", "metadata")
        return [
            {"prompt": problem["question"], "data_source": self.name, **{name: problem[name] for name in kept}}
            for problem in problems
        ]

    def verify(self, response: str, answer: Any, extra: dict[str, Any]) -> float:
        """Return reasoning-gym's score of the last `<answer>…</answer>`, or of the whole response without one."""
        from reasoning_gym.utils import extract_answer

        marked = extract_answer(response)
        entry = {"question": extra["question"], "answer": answer, "metadata": extra["metadata"]}
        return float(_scorer(self.dataset)(response.strip() if marked is None else marked, entry))


def open_gym(dataset: str) -> ReasoningGym:
    """Return the task of one reasoning-gym data set.

    Raises:
        MissingExtraError: the package is not installed.
        UserError: it has no such data set.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtraError(f"task:{GYM_PREFIX}{dataset}", "reasoning-gym", "reasoning-gym")
    import reasoning_gym  # noqa: F401  (fills the table of data sets)
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        field = f"task:{GYM_PREFIX}{dataset}"
        raise UserError(field, "reasoning-gym has no such data set.", did_you_mean(dataset, DATASETS))
    return ReasoningGym(dataset, DATASETS[dataset][1])


@cache
def _scorer(dataset: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(dataset)
