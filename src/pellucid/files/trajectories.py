"""Trajectories that wait for their step, in a checkpoint: whole or begun, with their scores, and no weights touched.

A schedule that samples ahead writes them and reads them again; one JSON object a line, compressed. Prompts are named,
not stored: the data set of a resumed run has them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pellucid.types import Outcome, Prompt, RewardFailure, Rollout, Score, ToolUse, Turn


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return all of a rollout but its prompt, as plain JSON values."""
    sequences, prompt = {name: list(values) for name, values in rollout.sequences().items()}, rollout.prompt
    return sequences | {
        "sample": rollout.sample,
        "turns": list(map(dataclasses.asdict, rollout.turns)),
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "outcome": dataclasses.asdict(rollout.outcome),
        "sequence": rollout.sequence,
        "num_sequences": rollout.num_sequences,
        "branches": [rollout_record(branch) for branch in rollout.branches],
        "begun": {name: getattr(prompt, name) for name in ("token_ids", "text", "context")} if prompt.context else {},
    }


def read_rollout(record: dict[str, Any], prompt: Prompt) -> Rollout:
    """Return the rollout of `prompt` that `rollout_record` described."""
    turns, outcome = tuple(map(read_turn, record.pop("turns"))), Outcome(**record.pop("outcome"))
    branches = tuple(read_rollout(branch, prompt) for branch in record.pop("branches"))
    prompt = dataclasses.replace(prompt, **record.pop("begun"))
    return Rollout(prompt, turns=turns, outcome=outcome, branches=branches, **record)


def newest_version(record: dict[str, Any]) -> int:
    """Return the newest version that drew a token of a rollout's record, −1 where none did."""
    return max(max(part["versions"], default=-1) for part in (record, *record["branches"]))


def read_turn(record: dict[str, Any]) -> Turn:
    """Return the turn whose fields a record has."""
    return Turn(**dict(record, tool_calls=tuple(ToolUse(**use) for use in record["tool_calls"])))


def score_record(score: Score) -> dict[str, Any]:
    """Return a score as plain JSON values."""
    return dataclasses.asdict(score)


def read_score(record: dict[str, Any]) -> Score:
    """Return the score that `score_record` described."""
    failure = record["failure"]
    return Score(record["reward"], record["parts"], None if failure is None else RewardFailure(**failure))
