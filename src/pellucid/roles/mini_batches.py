"""How a role cuts a step's batch into mini-batches, one optimizer step each, and what it reports of them.

The actor and the critic use the same cut; shuffled orders come from streams of their own.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from pellucid import seeding
from pellucid.precision.finding import LOSS, Finding
from pellucid.precision.locate import kinds_of_bad
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import MiniBatch, NonFiniteError
from pellucid.training.watch import response_tokens
from pellucid.types import Batch


def mini_batches(
    batch: Batch, *, num_groups: int, epochs: int, stream: tuple[str | int, ...] | None, seed: int
) -> Iterator[list[int]]:
    """Yield the rows of each mini-batch: `num_groups` whole groups, `epochs` times over the batch.

    Rows without a token to train on (failed or rejected samples) are left out: they cost no compute. A mini-batch of
    nothing else is skipped.

    Args:
        batch: the step's samples.
        num_groups: prompts an optimizer step.
        epochs: passes over the batch.
        stream: name of the random stream of a new order in each epoch; None keeps the order.
        seed: the run's seed.
    """
    rows_of: dict[int, list[int]] = {}
    has_tokens = batch.mask.any(dim=1).tolist()
    for row, group in enumerate(batch.group.tolist()):
        rows_of.setdefault(group, []).append(row)
    for epoch in range(epochs):
        groups = list(rows_of)
        if stream is not None:
            groups = seeding.stream(seed, *stream, epoch).permutation(groups).tolist()
        for start in range(0, len(groups), num_groups):
            rows = [row for group in groups[start : start + num_groups] for row in rows_of[group] if has_tokens[row]]
            if rows:
                yield rows


def update_each(
    rows_of_each: Iterator[list[int]], update: Callable[[MiniBatch], dict[str, float]], role: str, batch: Batch
) -> dict[str, float]:
    """Call `update` with each mini-batch and return each metric's mean over the mini-batches that have it.

    Raises:
        NonFiniteError: with the quantity under the role's name and rows counted in the batch; optimizer steps before the
            failing one stay applied.
    """
    per_step: list[dict[str, float]] = []
    for number, rows in enumerate(rows_of_each):
        try:
            per_step.append(update(MiniBatch(rows, number)))
        except NonFiniteError as error:
            finding = error.finding and with_loss_input(error.finding, batch.select(rows))
            in_batch = [rows[row] for row in error.rows]
            raise NonFiniteError(f"{role}/{error.quantity}", error.value, in_batch, finding, MiniBatch(rows, number)) from error
    names = dict.fromkeys(name for metrics in per_step for name in metrics)
    values = {name: [metrics[name] for metrics in per_step if name in metrics] for name in names}
    return {name: sum(of_each) / len(of_each) for name, of_each in values.items()}


def with_loss_input(finding: Finding, batch: Batch) -> Finding:
    """Return a finding in the loss with the name of the tensor of the mini-batch that brought it in, if one did."""
    if finding.place != LOSS or finding.direction != "forward":
        return finding
    for name, tensor in batch.tensors().items():
        # In bypass mode log-probs that no update has computed yet are NaN on purpose.
        if not tensor.is_floating_point() or name == "training_logp" or torch.isfinite(tensor).all():
            continue
        bad = ~torch.isfinite(tensor)
        tokens = [
            response_tokens(sequence, columns)
            for sequence, row in zip(sequences_of(batch.rollouts), bad.flatten(1) if bad.dim() > 1 else bad[:, None])
            if (columns := row[: len(sequence.response_ids)].nonzero()[:, 0].tolist())
        ]
        cause = f"the head's results are finite, the batch's {name} are not"
        return replace(
            finding, cause=cause, what=kinds_of_bad([tensor]), tokens=tokens, num_bad=int(bad.sum()), num_values=bad.numel()
        )
    return finding


def response_width(batch: Batch) -> int:
    """Return the longest response of `batch`: the width of the engine's [B, T] results."""
    return max(len(rollout.token_ids) for rollout in batch.rollouts)


def on_rows(tensor: torch.Tensor | None, rows: list[int], width: int, device: torch.device) -> torch.Tensor | None:
    """Return the first `width` columns of some rows of a [B, T] tensor on `device`; None stays None."""
    return None if tensor is None else tensor[rows, :width].to(device)
