"""GSM8K reward for small models: 1 for the right number, 0.1 for ending with "#### <number>" as asked, else 0.

Named by `reward_model.custom_reward_function.path` in smollm2_gsm8k.yaml; `acc` is what validation counts as correct.
"""

import re
from typing import Any

from pellucid.tasks import get_task


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return the score and whether the answer is right."""
    correct = get_task("gsm8k").verify(solution_str, ground_truth, extra_info)
    formatted = re.search(r"####\s*-?[\d,.]+\s*$", solution_str) is not None
    return {"score": 1.0 if correct else 0.1 * formatted, "acc": float(correct)}
