"""A reward function of one's own: 1 for the right answer, and a little for saying no more than the number.

Named by `reward_model.custom_reward_function.path: examples/plugins/brief_answer.py`; its parts serve gdpo as well.
"""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return the score, whether the answer is right (`acc`), and the score's two parts."""
    right = float(solution_str.strip() == str(ground_truth))
    brief = float(len(solution_str.strip()) <= len(str(ground_truth)))
    return {"score": right + 0.1 * brief, "acc": right, "right": right, "brief": brief}
