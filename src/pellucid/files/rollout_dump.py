"""The rollout dump: every sample of a step in one compressed file that opens without model, tokenizer or torch.

The loop writes it after the update's log-probabilities are known; `pellucid rollouts` and the dashboard read it.
One JSON object a line, one line a sample; the zstd frame carries a checksum, so a torn or altered file is noticed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.files.json_lines import read_lines, write_lines
from pellucid.types import Rollout, Score

if TYPE_CHECKING:  # the dump opens without torch
    import torch


def write_rollouts(
    path: Path,
    rollouts: list[Rollout],
    scores: list[Score],
    step: int,
    *,
    mask: torch.Tensor | None = None,
    training_logp: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    correction_weights: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    pieces: Callable[[list[int]], list[str]] | None = None,
) -> None:
    """Write one step's samples to `path` (`step_000001.jsonl.zst`), atomically.

    Args:
        path: the file, normally `RunDir.rollouts(step)`.
        rollouts: the samples.
        scores: one a sample.
        step: the step they were sampled in.
        mask: [B, T] bool, which tokens were trained on; None: all sampled ones of samples that have a reward.
        training_logp: [B, T] log-probs under the training policy; NaN where it computed none.
        entropy: [B, T] entropies of the training policy, in nats; NaN where it computed none.
        correction_weights: [B, T] what the policy loss was multiplied by.
        advantages: [B, T] what each token was credited with.
        pieces: turns token ids into one string a token, for people; None leaves `pieces` null in the file.
    """

    def values(tensor: torch.Tensor | None, row: int) -> list[Any] | None:
        return None if tensor is None else tensor[row, : len(rollouts[row].token_ids)].tolist()

    def measured(tensor: torch.Tensor | None, row: int) -> list[Any] | None:  # None: not known of every token
        found = values(tensor, row)
        known = found is not None and scores[row].failure is None and all(map(math.isfinite, found))
        return found if known else None

    def records() -> Iterator[dict[str, Any]]:
        for row, (rollout, score) in enumerate(zip(rollouts, scores)):
            trained = values(mask, row)
            if trained is None:
                trained = [bool(sampled) and score.failure is None for sampled in rollout.sampled]
            yield _record(rollout, score, step) | {
                "pieces": pieces(list(rollout.token_ids)) if pieces else None,
                "mask": [int(kept) for kept in trained],
                "training_logprobs": measured(training_logp, row),
                "entropies": measured(entropy, row),
                "correction_weights": values(correction_weights, row),
                "advantages": values(advantages, row),
            }

    write_lines(path, records())


def read_rollouts(path: Path, uid: str | None = None) -> list[dict[str, Any]]:
    """Return the samples of a dump, in the order written; the keys are those of the file (see `_record`).

    Args:
        path: the file.
        uid: of this prompt alone, which is faster than all of them.

    Raises:
        UserError: the file is missing, truncated or altered.
    """
    return read_lines(path, "Read another step.", "" if uid is None else f'"uid": {json.dumps(uid)}')


def sampled_tokens(record: dict[str, Any]) -> list[int]:
    """Return a sample's mask over its response: 1 where the policy drew the token, 0 where a tool or user gave it."""
    return record.get("sampled") or [1] * len(record["rollout_logprobs"])


def logp_gaps(record: dict[str, Any]) -> list[float] | None:
    """Return each sampled token's |training − rollout| log-probability, or None when the training ones are missing."""
    if record["training_logprobs"] is None:
        return None
    tokens = zip(record["training_logprobs"], record["rollout_logprobs"], sampled_tokens(record), strict=True)
    return [abs(training - rollout) for training, rollout, sampled in tokens if sampled]


def _record(rollout: Rollout, score: Score, step: int) -> dict[str, Any]:
    """Return what a sample is by itself.

    `sampled` is there only where tokens were given to it, and `turns` where there is more of them than one answer.
    """
    prompt = rollout.prompt
    versions = list(rollout.versions)
    record = {
        "step": step, "uid": prompt.uid, "task": prompt.task, "sample": rollout.sample,
        "prompt": prompt.text, "prompt_ids": prompt.token_ids, "answer": prompt.answer,
        "response": rollout.text, "response_ids": list(rollout.token_ids),
        "finish_reason": rollout.finish_reason,
        "reward": score.reward, "reward_parts": score.parts,
        "failure": None if score.failure is None else dataclasses.asdict(score.failure),
        "rollout_logprobs": list(rollout.logprobs),
        **({"policy_version": versions[0]} if len(set(versions)) == 1 else {"policy_versions": versions}),
    }  # fmt: skip
    if rollout.outcome.columns:
        record["columns"] = rollout.outcome.columns  # apart: an agent's may be called as the file's own
    if rollout.num_sequences > 1:
        record |= {"sequence": rollout.sequence, "num_sequences": rollout.num_sequences}
    if rollout.num_sampled < len(rollout.token_ids):
        record["sampled"] = [int(sampled) for sampled in rollout.sampled]
    if len(rollout.turns) > 1 or any(turn.tool_calls for turn in rollout.turns) or "sampled" in record:
        record["turns"] = [dataclasses.asdict(turn) for turn in rollout.turns]
    return record
