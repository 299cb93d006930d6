"""The numbers a step reports beside what its stages return: gaps between policies, ages, speed.

Called by `learn.py` and the loop with a step's batch; every name is defined in `metrics/definitions.py`.
"""

import numpy as np
import torch

from pellucid.algo.correction import correct, out_of_range
from pellucid.console import notice
from pellucid.run import RlRun, Run
from pellucid.stages import Stage
from pellucid.types import Samples, TrainBatch


def policy_gap_metrics(
    run: RlRun, batch: TrainBatch, training_logp: torch.Tensor | None, step: int
) -> dict[str, float]:
    """Return how far the rollout policy is from the training policy, where the correction did not measure it already.

    Rows that `training_logp` [B, T] holds NaN for were not trained on, and are left out.
    """
    if training_logp is None or not run.config.actor_rollout_ref.rollout.calculate_log_probs:
        return {}
    mask = batch.loss_mask & ~training_logp.isnan()
    with run.stage(Stage.CORRECTION, step):
        return correct(training_logp, batch.rollout_logp, mask, run.config.algorithm).metrics


def warn_of_mismatch(run: RlRun, metrics: dict[str, float]) -> None:
    """Say once a run, for each metric, that it left its healthy range and what helps."""
    for name, message in out_of_range(metrics):
        if name not in run.warned:
            run.warned.add(name)
            notice(message)


def staleness_metrics(run: RlRun, samples: Samples) -> dict[str, float]:
    """Return how many updates ago the tokens about to be trained on were sampled: 0 in a synchronous loop."""
    versions = np.concatenate([np.asarray(rollout.versions) for rollout in samples.rollouts])
    ages = run.actor.version - versions[versions >= 0]  # −1: given, not sampled
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
