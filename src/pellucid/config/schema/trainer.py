"""Section `trainer`: how long a run is, where it runs, what it logs and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pellucid.config.fields import Alias, Needs, Range, option
from pellucid.config.schema.alerts import AlertConfig

Positive = Annotated[int, Range(ge=1)]
Frequency = Annotated[int, Alias(0, -1), Range(ge=-1)]
CRITIC = Needs(
    "has_critic",
    otherwise="with adv_estimator: {0.algorithm.adv_estimator}, which has no critic",
    remedy="Set adv_estimator: gae",
)
"""What keys need that only estimators with a critic read."""
_RAY = Needs("trainer.placement", ("ray",))
_VALIDATION = Needs("data.val_files")
TrackerName = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


@dataclass(frozen=True)
class BaseTrainerConfig:
    """What reinforcement learning and supervised fine-tuning both have."""

    total_epochs: Positive = 1
    """Passes over the training rows."""
    total_training_steps: Positive | None = None
    """Steps of the run; null derives them from `total_epochs`."""
    project_name: str = "pellucid"
    """First part of the run's folder, and the project name in trackers."""
    experiment_name: str = "run"
    """Second part of the run's folder, and the run's name in trackers."""
    logger: list[TrackerName] = field(default_factory=lambda: ["console", "tensorboard"])
    """Where metrics go; `metrics.jsonl` in the run's folder is always written."""
    default_local_dir: str = option(
        "outputs/pellucid/run", link="outputs/${trainer.project_name}/${trainer.experiment_name}"
    )
    """The run's folder: resolved config, metrics, rollouts and checkpoints."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where tensors live; auto takes cuda, then npu, then cpu."""
    save_freq: Frequency = -1
    """Steps between checkpoints; -1 or 0 saves only at the end."""
    test_freq: Frequency = option(-1, needs=_VALIDATION)
    """Steps between validations; -1 or 0 validates only at the end, when there are validation rows."""
    keep_best: str | None = None
    """Metric whose best step is kept as a checkpoint beside the newest ones, e.g. `val/gsm8k/accuracy`;
    `pellucid export --best` takes it."""
    keep_best_mode: Literal["max", "min"] = option("max", needs=Needs(".keep_best"))
    """Whether its largest or smallest value is the best."""
    early_stopping_patience: Positive | None = option(None, needs=Needs(".keep_best"))
    """The run ends once that metric was measured so many times without getting better; null: never."""
    seed: int = 0
    """The run's seed; every random stream is derived from it."""


@dataclass(frozen=True)
class TrainerConfig(BaseTrainerConfig):
    """The reinforcement-learning run."""

    n_gpus_per_node: Positive = 1
    """Ranks on one machine: processes with a GPU each, or with cores of their own where the device is a CPU."""
    nnodes: Positive = 1
    """Machines; the run has n_gpus_per_node × nnodes ranks."""
    placement: Literal["local", "ray"] = "local"
    """Where the roles run: local keeps them in one process, ray spreads them over ranks, each a process."""
    ray_address: str | None = option(None, needs=_RAY)
    """Ray cluster to join, `auto` (the one this machine belongs to) or `host:port`; null starts one on this machine for
    the run."""
    resource_pools: dict[Literal["ref", "critic", "reward_model"], Positive] = option(dict, needs=_RAY)
    """Ranks of their own for roles among ref, critic and reward_model, beside the policy's, e.g. `{critic: 2}`; the
    other roles share the policy's ranks."""
    balance_batch: bool = option(True, needs=_RAY)
    """Choose the samples of each rank so that all have about as many tokens."""
    stall_timeout_s: Annotated[float, Range(gt=0)] | None = 1800.0
    """Seconds without progress after which the run ends and says where it stood, with all stacks; null: never."""
    max_restarts: Annotated[int, Range(ge=0)] = option(0, needs=_RAY)
    """Times the run starts again by itself from its last checkpoint after a rank died or stalled."""
    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """Whether sampling and training take turns (sync), sample the next step's batch while this one is trained on
    (one_step_off), or go on beside each other without waiting (async)."""
    max_staleness: Annotated[int, Range(ge=1)] = option(1, needs=Needs(".schedule", ("async",)))
    """Most updates between the oldest token of a sample and the update that trains on it; also how many batches beside
    the next one may be under way."""
    critic_warmup: Annotated[int, Range(ge=0)] = option(0, needs=CRITIC)
    """Steps at the start in which only the critic learns and the policy rests."""
    val_before_train: bool = True
    """Validate before the first step, so that the curve has a starting point."""
    val_only: bool = option(False, needs=_VALIDATION)
    """Validate once and stop, without training."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Where a run starts: auto from the newest checkpoint of its folder, disable from the beginning, resume_path from
    `resume_from_path`."""
    resume_from_path: str | None = option(None, needs=Needs(".resume_mode", ("resume_path",)))
    """Checkpoint folder (`…/global_step_N`) to resume from; goes with `resume_mode: resume_path`."""
    max_actor_ckpt_to_keep: Positive | None = None
    """Newest checkpoints to keep; null keeps all."""
    nan_sentinel: bool = False
    """Watch each stage for the first NaN or Inf: on a hit its batch is saved, the passes are repeated with every
    module watched, and module, stage, rank and sample are named; `pellucid precision replay` captures it."""
    alerts: list[AlertConfig] | None = field(default_factory=list)
    """Conditions on metrics that you want to hear of, beside those that every run looks at, e.g.
    `[{metric: actor/entropy, below: 0.1, steps: 3, action: stop}]`; null: none, and those neither."""
    dump_rollouts: bool = True
    """Write each step's prompts, responses, rewards and log-probabilities to the run's folder."""
    log_val_generations: Annotated[int, Range(ge=0)] = 10
    """The first so many samples of each validation are a table in TensorBoard, wandb, MLflow or Trackio."""


@dataclass(frozen=True)
class SftTrainerConfig(BaseTrainerConfig):
    """The supervised fine-tuning run."""

    resume_mode: Literal["auto", "disable"] = "auto"
    """Where a run starts: auto from the newest checkpoint of its folder, disable from the beginning."""
    max_ckpt_to_keep: Positive | None = None
    """Newest checkpoints to keep; null keeps all."""
