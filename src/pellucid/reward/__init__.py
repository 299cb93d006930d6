"""Scoring rollouts: a task's verifier or the user's function, each call with a time-out and typed failures."""

from pellucid.reward.scorer import Scorer, ScoreStats, make_scorer

__all__ = ["ScoreStats", "Scorer", "make_scorer"]
