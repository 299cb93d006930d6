"""Pellucid: reinforcement-learning post-training of language models with everything visible.

Importing the package is cheap on purpose: torch is loaded by the rooms that need it, and by the first use of a function
named here.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pellucid.api import Run, RunConfig, RunRecord, evaluate, generate, load_config, open_run, prepare, train

__all__ = ["Run", "RunConfig", "RunRecord", "evaluate", "generate", "load_config", "open_run", "prepare", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pellucid' has no attribute '{name}'")
    from pellucid.threads import yield_while_waiting

    yield_while_waiting()  # before torch is there
    from pellucid import api

    return vars(api)[name]
