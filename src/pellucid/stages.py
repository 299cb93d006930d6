"""The names of a step's parts: stages, the roles they belong to, and the units of work that they are made of.

Spans, timing metrics, profiler captures, precision stages and the watchdog all use these; the config's rules read the tables.
"""

from enum import StrEnum


class Stage(StrEnum):
    """The named parts of a step."""

    ROLLOUT_GENERATE = "rollout_generate"
    REWARD = "reward"
    ACTOR_COMPUTE_LOG_PROB = "actor_compute_log_prob"
    REF_COMPUTE_LOG_PROB = "ref_compute_log_prob"
    COMPUTE_VALUES = "compute_values"
    COMPUTE_RM_SCORE = "compute_rm_score"
    ADVANTAGE = "advantage"
    CORRECTION = "correction"
    CRITIC_UPDATE = "critic_update"
    ACTOR_UPDATE = "actor_update"
    WEIGHT_SYNC = "weight_sync"
    VALIDATE = "validate"
    SAVE_CHECKPOINT = "save_checkpoint"


class Unit(StrEnum):
    """Parts of a stage that repeat; a profiler's schedule counts them."""

    MICRO_BATCH = "micro_batch"
    """One forward pass, and in an update its backward pass."""
    MINI_BATCH = "mini_batch"
    """All micro-batches of an optimizer step, and the step itself."""
    DECODE_STEP = "decode_step"
    """One token for every row that is being sampled."""


ROLE_OF: dict[Stage, str] = {
    Stage.ROLLOUT_GENERATE: "rollout",
    Stage.ACTOR_COMPUTE_LOG_PROB: "actor",
    Stage.REF_COMPUTE_LOG_PROB: "ref",
    Stage.COMPUTE_VALUES: "critic",
    Stage.COMPUTE_RM_SCORE: "reward_model",
    Stage.CRITIC_UPDATE: "critic",
    Stage.ACTOR_UPDATE: "actor",
    Stage.REWARD: "controller",
    Stage.ADVANTAGE: "controller",
    Stage.CORRECTION: "controller",
}
"""Whose profiler settings a stage follows. The others (weight sync, validation, checkpoints) show in whole-step captures."""

UNITS_OF: dict[Stage, tuple[Unit, ...]] = {
    Stage.ROLLOUT_GENERATE: (Unit.DECODE_STEP,),
    Stage.ACTOR_COMPUTE_LOG_PROB: (Unit.MICRO_BATCH,),
    Stage.REF_COMPUTE_LOG_PROB: (Unit.MICRO_BATCH,),
    Stage.COMPUTE_VALUES: (Unit.MICRO_BATCH,),
    Stage.COMPUTE_RM_SCORE: (Unit.MICRO_BATCH,),
    Stage.CRITIC_UPDATE: (Unit.MICRO_BATCH, Unit.MINI_BATCH),
    Stage.ACTOR_UPDATE: (Unit.MICRO_BATCH, Unit.MINI_BATCH),
}
"""What a stage is made of; a schedule with another unit cannot act there."""


def stages_of(role: str) -> tuple[Stage, ...]:
    """Return the stages that follow a role's profiler settings, in the order of a step."""
    return tuple(stage for stage in Stage if ROLE_OF.get(stage) == role)
