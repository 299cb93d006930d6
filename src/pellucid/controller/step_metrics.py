"""The numbers a step reports beside what its stages return: sizes, gaps between policies, ages, speed.

Called by `step.py` and the loop with a step's batch; every name is defined in `metrics/table.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pellucid.algo.correction import correct, out_of_range
from pellucid.algo.mismatch import mismatch_metrics
from pellucid.console import notice
from pellucid.controller.build import Run
from pellucid.stages import Stage
from pellucid.types import Batch


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return scores and lengths of the sampled batch."""
    lengths = torch.tensor([float(len(rollout.token_ids)) for rollout in batch.rollouts])
    prompts = torch.tensor([float(len(rollout.prompt.token_ids)) for rollout in batch.rollouts])
    scores = torch.tensor([rollout.reward for rollout in batch.rollouts if rollout.reward is not None])
    cut = sum(rollout.finish_reason == "length" for rollout in batch.rollouts) / len(batch)
    return (
        {"response_length/clip_ratio": cut}
        | spread("critic/score", scores)
        | spread("response_length", lengths)
        | spread("prompt_length", prompts)
    )


def policy_gap_metrics(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Return how far the rollout policy is from the training policy, where the correction did not measure it already."""
    training_logp = _training_log_probs(run, batch)
    if training_logp is None or not run.config.actor_rollout_ref.rollout.calculate_log_probs:
        return {}
    mask = batch.mask & training_logp.isfinite()
    with run.stage(Stage.CORRECTION, step):
        if run.correction is None:
            return mismatch_metrics(training_logp, batch.rollout_logp, mask)
        return correct(training_logp.nan_to_num(), batch.rollout_logp, mask, run.correction).metrics


def warn_of_mismatch(run: Run, metrics: dict[str, float]) -> None:
    """Say once a run, for each metric, that it left its healthy range and what helps."""
    for name, message in out_of_range(metrics):
        if name not in run.warned:
            run.warned.add(name)
            notice(message)


def annotate_rollouts(run: Run, batch: Batch) -> None:
    """Put the training policy's log-probs, the applied weights and the final mask into the rollouts, for the dump."""
    training_logp = _training_log_probs(run, batch)
    weights = batch.correction_weights
    if weights is None and run.corrects:
        weights = batch.mask.float()  # rejection alone: a token counts or it does not
    for row, rollout in enumerate(batch.rollouts):
        length = len(rollout.token_ids)
        rollout.mask = _values(batch.mask, row, length)
        if rollout.failure is None and training_logp is not None and bool(training_logp[row, :length].isfinite().all()):
            rollout.training_logprobs = _values(training_logp, row, length)
        if weights is not None:
            rollout.correction_weights = _values(weights, row, length)


def _values(tensor: torch.Tensor, row: int, length: int) -> Sequence[Any]:
    """Return the first values of a row where they lie: a list of them would take nine times the memory."""
    return tensor[row, :length].numpy().data


def _training_log_probs(run: Run, batch: Batch) -> torch.Tensor | None:
    """Return the [B, T] log-probs of the policy before the update; in bypass mode `old_logp` is the rollout policy's."""
    return batch.training_logp if run.config.algorithm.bypass_mode else batch.old_logp


def staleness_metrics(run: Run, batch: Batch) -> dict[str, float]:
    """Return how many updates ago the tokens about to be trained on were sampled: 0 in this synchronous loop."""
    ages = run.actor.version - np.concatenate([np.asarray(rollout.versions) for rollout in batch.rollouts])
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


_TRAINING_STAGES = (
    Stage.ACTOR_COMPUTE_LOG_PROB,
    Stage.REF_COMPUTE_LOG_PROB,
    Stage.COMPUTE_VALUES,
    Stage.COMPUTE_RM_SCORE,
    Stage.CRITIC_UPDATE,
    Stage.ACTOR_UPDATE,
)


def speed_metrics(run: Run, num_tokens: float) -> dict[str, float]:
    """Return timings since the last call, throughput and utilisation.

    Args:
        run: whose spans and engines are read and reset.
        num_tokens: prompt and response tokens of the step's samples.
    """
    timings = run.spans.step_timings()
    training_s = sum(timings.get(f"timing_s/{stage}", 0.0) for stage in _TRAINING_STAGES)
    flops, placement = run.placement.roles.take_flops(), run.placement
    step_s = timings["timing_s/step"]
    return (
        timings
        | {
            "perf/time_per_step": step_s,
            "perf/throughput": num_tokens / step_s / placement.num_ranks,
            "perf/mfu": flops / training_s / placement.peak_flops() if training_s else 0.0,
        }
        | placement.memory_gb()
    )


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return mean, max and min of the values under `name`, nothing when there are none."""
    if not values.numel():
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
