"""Pellucid: reinforcement-learning post-training of language models with everything visible.

Importing the package is cheap on purpose: torch is loaded by the rooms that need it, never here.
"""

__version__ = "0.1.0"
