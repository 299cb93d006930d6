"""How a role cuts a step's batch into mini-batches, one optimizer step each, and what it reports of them.

The actor and the critic use the same cut; shuffled orders come from streams of their own.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import overload

import torch

from pellucid import seeding
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.errors import NonFiniteError
from pellucid.types import MiniBatch, TrainBatch


def mini_batches(
    batch: TrainBatch, config: ActorConfig | CriticConfig, role: str, *, seed: int, step: int
) -> Iterator[MiniBatch]:
    """Yield the mini-batches of `ppo_mini_batch_size` whole groups, `ppo_epochs` times over the batch.

    Rows without a token to train on (failed or rejected samples) are left out: they cost no compute. A mini-batch of
    nothing else is skipped. Where `config` says so, each epoch has an order of its own, from a stream named by `role`,
    the run's `seed` and the `step`.
    """
    rows_of: dict[int, list[int]] = {}
    has_tokens = batch.loss_mask.any(dim=1).tolist()
    for row, group in enumerate(batch.group.tolist()):
        rows_of.setdefault(group, []).append(row)
    number, size = 0, config.ppo_mini_batch_size
    for epoch in range(config.ppo_epochs):
        groups = list(rows_of)
        if config.shuffle:
            groups = seeding.stream(seed, f"{role}_shuffle", step, epoch).permutation(groups).tolist()
        for start in range(0, len(groups), size):
            rows = [row for group in groups[start : start + size] for row in rows_of[group] if has_tokens[row]]
            if rows:
                yield MiniBatch(rows, number)
                number += 1


def update_each(
    parts: Iterable[MiniBatch], update: Callable[[MiniBatch], dict[str, float]], role: str
) -> dict[str, float]:
    """Call `update` with each mini-batch and return each metric's mean over the mini-batches that have it.

    Raises:
        NonFiniteError: with the quantity under the role's name and rows counted in the batch; optimizer steps before
            the failing one stay applied.
    """
    per_step: list[dict[str, float]] = []
    for part in parts:
        try:
            per_step.append(update(part))
        except NonFiniteError as error:
            in_batch = [part.rows[row] for row in error.rows]
            raise NonFiniteError(f"{role}/{error.quantity}", error.value, in_batch, part) from error
    names = dict.fromkeys(name for metrics in per_step for name in metrics)
    values = {name: [metrics[name] for metrics in per_step if name in metrics] for name in names}
    return {name: sum(of_each) / len(of_each) for name, of_each in values.items()}


def response_width(batch: TrainBatch) -> int:
    """Return the longest response of `batch`: the width of the engine's [B, T] results."""
    return max(len(rollout.token_ids) for rollout in batch.rollouts)


@overload
def on_rows(tensor: torch.Tensor, rows: list[int], width: int, device: torch.device) -> torch.Tensor: ...
@overload
def on_rows(tensor: torch.Tensor | None, rows: list[int], width: int, device: torch.device) -> torch.Tensor | None: ...
def on_rows(tensor: torch.Tensor | None, rows: list[int], width: int, device: torch.device) -> torch.Tensor | None:
    """Return the first `width` columns of some rows of a [B, T] tensor on `device`; None stays None."""
    return None if tensor is None else tensor[rows, :width].to(device)
