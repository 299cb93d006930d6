"""The rollout dump: every sample of a step in one compressed file that opens without model, tokenizer or torch.

The loop writes it after the update's log-probabilities are known; `pellucid rollouts` and the dashboard read it.
One JSON object a line, one line a sample; the zstd frame carries a checksum, so a torn or altered file is noticed.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zstandard

from pellucid.errors import UserError
from pellucid.rundir import atomic_open
from pellucid.types import Rollout


def write_rollouts(path: Path, rollouts: list[Rollout], step: int,
                   pieces: Callable[[list[int]], list[str]] | None = None) -> None:
    """Write one step's samples to `path` (`step_000001.jsonl.zst`), atomically.

    Args:
        path: the file, normally `RunDir.rollouts(step)`.
        rollouts: the samples; `training_logprobs` and `correction_weights` may be None.
        step: the step they were sampled in.
        pieces: turns token ids into one string a token, for people; None leaves `pieces` null in the file.
    """
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with atomic_open(path) as raw, compressor.stream_writer(raw, closefd=False) as compressed:
        for rollout in rollouts:
            record = _record(rollout, step, pieces(list(rollout.token_ids)) if pieces else None)
            compressed.write(json.dumps(record, default=str).encode() + b"\n")


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a dump, in the order written; the keys are those of the file (see `_record`).

    Raises:
        UserError: the file is missing, truncated or altered.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(str(path), "does not exist.") from error
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        lines = decompressor.decompress(data)
        if not decompressor.eof or decompressor.unused_data:
            raise UserError(str(path), "is truncated or has bytes added to it.", "Read another step.")
        return [json.loads(line) for line in io.BytesIO(lines)]
    except (zstandard.ZstdError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"is not a whole rollout dump ({error}).", "Read another step.") from error


def logp_gaps(record: dict[str, Any]) -> list[float] | None:
    """Return each token's |training − rollout| log-probability, or None when the training ones are missing."""
    if record["training_logprobs"] is None:
        return None
    pairs = zip(record["training_logprobs"], record["rollout_logprobs"], strict=True)
    return [abs(training - rollout) for training, rollout in pairs]


def _record(rollout: Rollout, step: int, pieces: list[str] | None) -> dict[str, Any]:
    prompt, length = rollout.prompt, len(rollout.token_ids)
    constant = len(set(rollout.versions)) == 1
    return {
        "step": step, "uid": prompt.uid, "task": prompt.task, "sample": rollout.sample,
        "prompt": prompt.text, "prompt_ids": prompt.token_ids, "answer": prompt.answer,
        "response": rollout.text, "response_ids": list(rollout.token_ids), "pieces": pieces,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward, "reward_parts": rollout.reward_parts,
        "failure": None if rollout.failure is None else dataclasses.asdict(rollout.failure),
        "mask": [int(kept) for kept in (rollout.mask if rollout.mask is not None else [rollout.failure is None] * length)],
        "rollout_logprobs": list(rollout.logprobs), "training_logprobs": _listed(rollout.training_logprobs),
        "correction_weights": _listed(rollout.correction_weights),
        **({"policy_version": rollout.versions[0]} if constant else {"policy_versions": list(rollout.versions)}),
    }


def _listed(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)
