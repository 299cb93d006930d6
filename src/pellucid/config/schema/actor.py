"""Sections `actor_rollout_ref.actor` and `.ref`: how the policy is updated, and the frozen model it is compared to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pellucid.algo.catalog import POLICY_LOSSES
from pellucid.config.fields import MISSING, Alias, Needs, OrImportPath, Range, option
from pellucid.config.schema.profiler import ProfilerConfig
from pellucid.config.schema.sharding import (
    FSDP,
    MEGATRON,
    FsdpConfig,
    MegatronConfig,
    RefFsdpConfig,
    RefMegatronConfig,
    Strategy,
)

Positive = Annotated[int, Range(ge=1)]
Fraction = Annotated[float, Range(ge=0, le=1)]
KlType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"]
KlLossType = Literal[KlType, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
if TYPE_CHECKING:
    LossMode = str
else:
    _HYPHENATED = [Alias(name.replace("_", "-"), name) for name in POLICY_LOSSES if "_" in name]
    LossMode = Annotated[(Literal[tuple(POLICY_LOSSES)], *_HYPHENATED, OrImportPath())]
_KL_LOSS = Needs("actor_rollout_ref.actor.use_kl_loss")
_SAMPLED_KL = Needs(
    "samples_kl",
    otherwise="while no KL term is estimated from sampled tokens (full runs the reference on the actor's "
    "micro-batches)",
    remedy="Set actor_rollout_ref.actor.use_kl_loss: true, with another kl_loss_type than full",
)
_OWN_REFERENCE = Needs(
    "has_own_reference",
    otherwise="without a reference model of its own (no KL term asks for one, or under LoRA it is the actor's base)",
    remedy="Set actor_rollout_ref.actor.use_kl_loss: true and actor_rollout_ref.model.lora_rank: 0",
)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Range(ge=0, le=10)] = 1e-6
    """Peak learning rate; 0 runs everything and changes no weight."""
    lr_warmup_steps: int | None = -1
    """Optimizer steps over which the learning rate rises from 0; negative, 0 or null defer to the ratio."""
    lr_warmup_steps_ratio: Fraction = option(
        0.0,
        needs=Needs(".warmup_is_a_ratio", otherwise="while lr_warmup_steps is above 0", remedy="Set one of the two"),
    )
    """Warm-up as a fraction of all optimizer steps, used when `lr_warmup_steps` is not positive."""
    total_training_steps: int = -1
    """Optimizer steps over which the schedule is laid out; -1 is filled in from the run's own length."""
    weight_decay: Annotated[float, Range(ge=0)] = 0.01
    """Decoupled weight decay of AdamW."""
    betas: list[Annotated[float, Range(ge=0, lt=1)]] = field(default_factory=lambda: [0.9, 0.999])
    """The two decay rates of AdamW: of the running mean of the gradient, and of its square."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after warm-up: it stays, or falls along a cosine or a line to `min_lr_ratio`."""
    min_lr_ratio: Fraction = option(0.0, needs=Needs(".lr_scheduler_type", ("cosine", "linear")))
    """Lowest learning rate of cosine and linear, as a fraction of `lr`."""

    @property
    def warmup_is_a_ratio(self) -> bool:
        """Whether the warm-up is a fraction of all steps, for want of a number of steps."""
        return self.lr_warmup_steps is None or self.lr_warmup_steps <= 0


@dataclass(frozen=True)
class CheckpointConfig:
    """What a checkpoint holds."""

    save_contents: list[CheckpointPart] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """Parts that are written: weights, optimizer state, the rest of the run's state (`extra`: schedule, data position,
    random state), and `hf_model`, a folder that transformers loads."""
    load_contents: list[CheckpointPart] = option(lambda: ["model", "optimizer", "extra"], link="${.save_contents}")
    """Parts that are read on resume; null follows `save_contents`."""
    async_save: bool = False
    """Write checkpoints in the background: training waits until the state is copied, not until it is on disk."""


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which policy loss is minimised."""

    loss_mode: LossMode = option("vanilla", needs=Needs("algorithm.loss_type", ("ppo_clip",)))
    """Form of the loss: vanilla is PPO's clipped ratio times advantage, with a dual clip; `file.py:name` is a function
    of your own."""
    clip_cov_ratio: Annotated[float, Range(gt=0, le=1)] = 0.0002
    """clip_cov: fraction of the mini-batch's tokens, at least one, whose loss is set to 0."""
    clip_cov_lb: Annotated[float, Range()] = 1.0
    """clip_cov: lowest covariance of advantage and log-probability of the tokens it draws from."""
    clip_cov_ub: Annotated[float, Range()] = 5.0
    """clip_cov: highest covariance of the tokens it draws from."""
    kl_cov_ratio: Annotated[float, Range(gt=0, le=1)] = 0.0002
    """kl_cov: fraction of the mini-batch's tokens, at least one, by highest covariance, that get a KL penalty."""
    ppo_kl_coef: Annotated[float, Range(ge=0)] = 0.1
    """kl_cov: weight of that penalty."""
    tau_pos: Annotated[float, Range(gt=0)] = 1.0
    """sapo: temperature of the soft gate where the advantage is positive."""
    tau_neg: Annotated[float, Range(gt=0)] = 1.05
    """sapo: temperature of the soft gate where the advantage is not positive."""
    dro_beta: Annotated[float, Range(ge=0)] = 0.1
    """dro: weight β of the quadratic penalty on the log-ratio."""


@dataclass(frozen=True)
class UpdateConfig:
    """How an update is cut into optimizer steps and passes; the critic follows the actor in it."""

    strategy: Strategy = MISSING
    """Training engine that holds the model: fsdp2, which is PyTorch's FSDP2 (fsdp means the same), or megatron, which
    is megatron-core. It must be set."""
    ppo_mini_batch_size: Positive = 256
    """Prompts per optimizer step; with `rollout.n` samples each, a mini-batch has prompts × n samples."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Samples in one forward and backward pass; it changes memory and speed, never the gradient. When this is null and
    `use_dynamic_bsz` is false, micro-batches are formed by tokens."""
    use_dynamic_bsz: bool = False
    """Form micro-batches by tokens (`ppo_max_token_len_per_gpu`) rather than by a fixed number of samples."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """Most tokens in one micro-batch when `use_dynamic_bsz` is true; at least the longest prompt plus response."""
    ppo_epochs: Positive = 1
    """Passes over each step's samples."""
    shuffle: bool = False
    """Shuffle the prompts into new mini-batches for each of the `ppo_epochs`."""


@dataclass(frozen=True)
class TrainedConfig(UpdateConfig):
    """What actor and critic each have of their own."""

    fsdp_config: FsdpConfig = option(FsdpConfig, needs=FSDP)
    """How the model is spread over its ranks by FSDP2."""
    megatron: MegatronConfig = option(MegatronConfig, needs=MEGATRON)
    """How the model is spread over its ranks by megatron-core."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses become one number, always over the whole mini-batch; unless it is set, the policy losses
    gspo, sapo and geo_mean take seq-mean-token-mean, the one they are defined with."""
    grad_clip: Annotated[float, Range(gt=0)] = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it."""


@dataclass(frozen=True)
class ActorConfig(TrainedConfig):
    """The policy update."""

    clip_ratio: Annotated[float, Range(gt=0)] = 0.2
    """PPO clip range ε: a probability ratio beyond 1 ± ε gives no further gradient."""
    clip_ratio_low: Annotated[float, Range(gt=0, le=1)] = option(0.2, link="${.clip_ratio}")
    """Clip range below 1; null follows `clip_ratio`."""
    clip_ratio_high: Annotated[float, Range(gt=0)] = option(0.2, link="${.clip_ratio}")
    """Clip range above 1; null follows `clip_ratio`."""
    clip_ratio_c: Annotated[float, Range(gt=1)] = 3.0
    """Dual clip: for negative advantages the loss stops growing once the ratio exceeds this."""
    loss_scale_factor: Annotated[float, Range(gt=0)] | None = option(
        None, needs=Needs(".loss_agg_mode", ("seq-mean-token-sum-norm",))
    )
    """Divisor of `seq-mean-token-sum-norm`; null takes `data.max_response_length`."""
    entropy_coeff: Annotated[float, Range()] = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add the KL divergence to the frozen reference model to the loss."""
    kl_loss_coef: Annotated[float, Range(ge=0)] = option(0.001, needs=_KL_LOSS)
    """Weight of that KL term."""
    kl_loss_type: KlLossType = option("low_var_kl", needs=_KL_LOSS)
    """Estimator of that KL term: kl = k1, mse = k2, low_var_kl = k3; full is exact over the vocabulary; a trailing +
    keeps the value and takes k2's gradient."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """The form of the policy loss."""
    use_torch_compile: bool = True
    """Let `torch.compile` fuse the actor's log-probabilities and entropies on CUDA, where Triton and a C compiler are
    installed; on other devices nothing is compiled."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What a checkpoint holds."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiling of the policy update and of the policy's own log-probabilities; ref and rollout follow it."""


@dataclass(frozen=True)
class RefConfig:
    """Log-probabilities under the frozen reference model, used with a KL term."""

    fsdp_config: RefFsdpConfig = option(
        RefFsdpConfig, needs=(FSDP, _OWN_REFERENCE), follows=("actor_rollout_ref.actor.fsdp_config", RefFsdpConfig)
    )
    """How the reference model is spread over its ranks by FSDP2; what is not set here follows the actor."""
    megatron: RefMegatronConfig = option(
        RefMegatronConfig,
        needs=(MEGATRON, _OWN_REFERENCE),
        follows=("actor_rollout_ref.actor.megatron", RefMegatronConfig),
    )
    """How the reference model is spread over its ranks by megatron-core; what is not set here follows the actor."""
    log_prob_micro_batch_size_per_gpu: Positive | None = option(
        None, link="${actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}", needs=_SAMPLED_KL
    )
    """Samples in one forward pass; null follows the actor."""
    log_prob_use_dynamic_bsz: bool = option(False, link="${actor_rollout_ref.actor.use_dynamic_bsz}", needs=_SAMPLED_KL)
    """Form the forward passes by tokens; null follows the actor."""
    log_prob_max_token_len_per_gpu: Positive = option(
        16384, link="${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}", needs=_SAMPLED_KL
    )
    """Most tokens in one forward pass; null follows the actor."""
    profiler: ProfilerConfig = option(ProfilerConfig, follows=("actor_rollout_ref.actor.profiler", ProfilerConfig))
    """Profiling of the reference model; what is not set here follows the actor's block."""
