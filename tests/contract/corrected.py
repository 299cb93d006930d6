"""A small off-policy batch with rollout log-probs, and actors of every loss over it: for the tests of corrected updates."""

import re
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import CPU, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from pellucid.algo.catalog import loss_entry
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.config.schema.actor import ActorConfig, PolicyLossConfig
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.roles.actor import Actor, ActorSettings
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import sequences_of
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Prompt, RewardFailure, Rollout, Samples, Score, TrainBatch, Turn

TEMPERATURE = 0.8
WHOLE = MicroBatching(None, None)
CUTS = {
    "whole": WHOLE,
    "one-by-one": MicroBatching(None, 1),
    "tokens": MicroBatching(30, None),
}
# Group and response length of each sample; the prompts have 5, 3 and 8 tokens.
_SAMPLES = [(0, 6), (2, 4), (0, 1), (1, 9), (2, 7), (0, 3)]
_TURNS = ["ssggss", "sggs", "s", "sssggssgg", "ssggsss", "gss"]
"""What was sampled of each, where tokens are given."""
FAILED = 4


def engine_of(model: PreTrainedModel, cut: MicroBatching = WHOLE, *, lr: float = 1e-3) -> FsdpEngine:
    """A training engine whose AdamW (β₁ = 0) keeps the last gradient as its first moment, unclipped."""
    optimizer = ScheduledAdamW(dict(model.named_parameters()), Schedule(lr, 0, 100), 0.01, (0.0, 0.999), 1e9)
    return FsdpEngine(model, optimizer, cut, device=CPU, dtype=torch.float32)


def tiny_engine(cut: MicroBatching = WHOLE, *, lr: float = 1e-3, scale: float = 0.1) -> FsdpEngine:
    return engine_of(tiny_model("llama", scale=scale), cut, lr=lr)


def gradient(engine: FsdpEngine, folder: Path) -> torch.Tensor:
    """The last gradient as one vector."""
    folder.mkdir(exist_ok=True)
    engine.save(folder, ["optimizer"])
    state = load_file(folder / "optimizer.safetensors")
    return torch.cat([state[name].flatten() for name in sorted(state) if name.endswith(".exp_avg")])


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def trajectory(prompt: Prompt, row: int, sampled: str) -> Rollout:
    """A rollout of random tokens: those where `sampled` has an s were drawn, the others given, and every run of s is a turn."""
    turns = tuple(Turn(found.start(), found.end(), "stop") for found in re.finditer("s+", sampled))
    mask = [letter == "s" for letter in sampled]
    versions = [0 if drawn else -1 for drawn in mask]
    return Rollout(prompt, row, tokens(len(mask), row), mask, [0.0] * len(mask), versions, turns, "stop")


def some_batch(engine: FsdpEngine, *, gap: float = 0.3, spread: float = 0.3, given: bool = False) -> TrainBatch:
    """Three groups, one failed sample, advantages; π_old is `spread` away from the engine's policy, π_rollout `gap` from π_old.

    With `given`, trajectories hold tokens that were not sampled: in the middle, first and last.
    """
    prompts = {group: Prompt(f"p{group}", tokens(length, 100 + group), "", "t") for group, length in enumerate((5, 3, 8))}
    rollouts = [
        trajectory(prompts[group], row, _TURNS[row] if given else "s" * length) for row, (group, length) in enumerate(_SAMPLES)
    ]
    scores = [Score(0.0)] * len(rollouts)
    scores[FAILED] = Score(None, failure=RewardFailure("timeout", ""))
    samples = Samples.pad(rollouts, scores)
    logp = engine.forward(sequences_of(rollouts), LogProbHead(TEMPERATURE)).logp
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(logp.shape, generator=generator) for _ in range(4)]
    old_logp = (logp + spread * noise[0]) * samples.mask
    return TrainBatch(
        **vars(samples) | {"rollout_logp": (old_logp + gap * noise[1]) * samples.mask},
        old_logp=old_logp,
        ref_logp=(logp + 0.3 * noise[2]) * samples.mask,
        advantages=noise[3] * samples.mask,
        returns=torch.zeros_like(logp),
        loss_mask=samples.mask,
    )


@cache
def own_batch(**options) -> TrainBatch:
    """`some_batch` of a new `tiny_engine`, the same object each time."""
    return some_batch(tiny_engine(), **options)


def config_of(loss: str, **options) -> ActorConfig:
    """The actor section for a loss, with selections large enough for a few dozen tokens."""
    mode = "seq-mean-token-mean" if loss_entry(loss).sequence_mean else options.pop("mode", "token-mean")
    options.pop("mode", None)
    policy_loss = PolicyLossConfig(loss_mode=loss, clip_cov_ratio=0.2, clip_cov_lb=0.02, kl_cov_ratio=0.2)  # pyright: ignore[reportArgumentType]
    return ActorConfig(strategy="fsdp2", ppo_mini_batch_size=8, loss_agg_mode=mode, policy_loss=policy_loss, **options)


def correction_keys(rules=(), **keys) -> AlgorithmConfig:
    """Section `algorithm` with weights that are applied; keys without their `rollout_is_`."""
    return AlgorithmConfig(rollout_is=True, rollout_rs=list(rules), **{f"rollout_is_{key}": value for key, value in keys.items()})


def actor_of(engine: FsdpEngine, loss: str, *, bypass=None, exact_kl_to=None, **options) -> Actor:
    settings = ActorSettings(
        PolicyLoss.named(loss), temperature=TEMPERATURE, max_response_length=12, seed=0, bypass=bypass, exact_kl_to=exact_kl_to
    )
    return Actor(engine, config_of(loss, **options), settings)


def weights_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
