"""Built-in tasks: each makes problems (row dictionaries) and verifies a response to them.

`data/` opens them through `task:NAME?key=value`; `reward/` scores with `verify` when no custom reward function is set.
"""

from pellucid.errors import UserError, did_you_mean
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.gsm8k import Gsm8k
from pellucid.tasks.guess import Guess
from pellucid.tasks.gym import GYM_PREFIX, open_gym
from pellucid.tasks.math import Math
from pellucid.tasks.task import Task

__all__ = ["TASKS", "Task", "get_task"]

TASKS: dict[str, Task] = {
    "arithmetic": Arithmetic(),
    "gsm8k": Gsm8k(),
    "guess": Guess(),
    "math": Math(),
    "openai/gsm8k": Gsm8k(),  # the data source name in verl's prepared parquet files
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), Math()),
}


def get_task(name: str) -> Task:
    """Return the task called `name`, or the reasoning-gym data set for `reasoning_gym:<dataset>`.

    Raises:
        UserError: no such task or data set; the nearest name is in the message.
        MissingExtraError: a reasoning-gym name without the package.
    """
    if name.startswith(GYM_PREFIX):
        return open_gym(name.removeprefix(GYM_PREFIX))
    if name not in TASKS:
        choices = [*TASKS, f"{GYM_PREFIX}<dataset>"]
        raise UserError(f"task:{name}", "there is no such task.", did_you_mean(name, choices))
    return TASKS[name]
