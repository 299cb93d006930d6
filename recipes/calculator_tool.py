"""A tool for smollm2_gsm8k_tools.yaml: what the model is told of it comes from the signature and the docstring."""

from pellucid.agents.environments import calculate


def calculator(expression: str) -> str:
    """Compute an expression of numbers, + - * / and brackets.

    Args:
        expression: What to compute, e.g. "(12 + 7) * 3".
    """
    return calculate(expression)
