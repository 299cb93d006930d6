"""Scoring rollouts: a task's verifier or the user's function, each call with a time-out and typed failures."""

from pellucid.reward.scorer import Scorer, make_scorer

__all__ = ["Scorer", "make_scorer"]
