"""Rules on the schedule: what sampling and training that overlap leave no room for.

`validate` in the package calls `mistakes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.algo.catalog import estimator_entry
from pellucid.config.schema import RunConfig
from pellucid.errors import UserError

_ROLLOUT = "actor_rollout_ref.rollout"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting that the schedule excludes."""
    trainer, rollout, schedule = config.trainer, config.actor_rollout_ref.rollout, config.trainer.schedule
    if schedule == "sync":
        return
    beside = f"with trainer.schedule: {schedule}, which samples while it trains"
    if trainer.placement == "ray" and rollout.mode == "colocated" and not rollout.server_addresses:
        reason = f"is colocated {beside}: engines need devices of their own."
        remedy = "Set it to separate, with rollout.n_gpus_per_node; or trainer.schedule: sync."
        yield UserError(f"{_ROLLOUT}.mode", reason, remedy)
    if config.reward_model.enable and trainer.placement == "local":
        reason = f"is true {beside}: in one process the reward model would compute between the actor's passes."
        yield UserError("reward_model.enable", reason, "Set trainer.placement: ray, or trainer.schedule: sync.")
    if trainer.nan_sentinel:
        reason = f"is true {beside}: it watches one stage at a time."
        yield UserError("trainer.nan_sentinel", reason, "Set it to false, or trainer.schedule: sync.")
    for key, value in vars(rollout.simulate_mismatch).items():
        if value:
            reason = f"is {value} {beside}: the gap of stale weights is real there."
            remedy = "Remove it, or set trainer.schedule: sync."
            yield UserError(f"{_ROLLOUT}.simulate_mismatch.{key}", reason, remedy)
    estimator = config.algorithm.adv_estimator
    if schedule == "async" and "greedy_scores" in estimator_entry(estimator).needs:
        reason = f"{estimator} compares with a greedy answer of the same weights, which async sampling has none of."
        yield UserError("algorithm.adv_estimator", reason, "Set trainer.schedule: one_step_off or sync.")
