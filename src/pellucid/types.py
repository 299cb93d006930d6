"""The payloads that travel between rooms: `Prompt` (data), `Rollout` (engine and reward), `Batch` (training).

Worked example, one group of two samples for the prompt "2+3=" (ids 5 14 6 16), the answer digit 8, end-of-text 1:

    prompt   = Prompt(uid="arithmetic:train:7", token_ids=[5, 14, 6, 16], text="2+3=", task="arithmetic", answer="5")
    rollouts = [Rollout(prompt, sample=0, token_ids=[8, 1], logprobs=[-0.2, -0.01], versions=[3, 3], finish_reason="stop"),
                Rollout(prompt, sample=1, token_ids=[9, 4, 1], logprobs=[-1.9, -2.3, -0.4], versions=[3, 3, 3], ...)]
    batch    = Batch.from_rollouts(rollouts)     # B = 2, T = 3
    batch.mask          == [[1, 1, 0], [1, 1, 1]]
    batch.rollout_logp  == [[-0.2, -0.01, 0], [-1.9, -2.3, -0.4]]

Shapes: B samples, T response tokens (right-padded). Padding is 0 in every float tensor and False in `mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FailureKind = Literal["exception", "timeout", "wrong_type"]


@dataclass(slots=True)
class Prompt:
    """One problem to answer, already templated and tokenised."""

    uid: str
    """Stable name of the row, e.g. `gsm8k:train:12`; random streams and group identity derive from it."""
    token_ids: list[int]
    """[L_prompt] ids that the engine sees, chat template included."""
    text: str
    """The templated text that `token_ids` came from, for people."""
    task: str
    """Which task or data source the row belongs to: metric group and verifier."""
    answer: Any = None
    """Ground truth handed to the reward; None when the reward needs none."""
    messages: list[dict[str, str]] | None = None
    """The raw chat, kept only with `data.return_raw_chat`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, handed to the reward function."""


@dataclass(slots=True)
class RewardFailure:
    """A reward call that broke twice; the sample is masked out of training, never scored as zero."""

    kind: FailureKind
    message: str


@dataclass(slots=True)
class Rollout:
    """One sampled response, exactly as sampled (ids are never re-tokenised from text)."""

    prompt: Prompt
    sample: int
    """Index within the group, 0 … n−1."""
    token_ids: Sequence[int]
    """[L] sampled ids, the end-of-text id included when it was sampled; from other processes a view of shared memory."""
    logprobs: Sequence[float]
    """[L] log-probability of each sampled id under the sampling policy: temperature-scaled, full vocabulary."""
    versions: Sequence[int]
    """[L] version of the policy weights that produced each token (0 before the first update)."""
    finish_reason: Literal["stop", "length"]
    text: str = ""
    """Decoded response without special tokens."""
    reward: float | None = None
    """Outcome reward; None before scoring or after a failure."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named components and extra numbers the reward function returned."""
    failure: RewardFailure | None = None
    training_logprobs: Sequence[float] | None = None
    """[L] log-probability of the same ids under the training engine's policy."""
    mask: Sequence[bool] | None = None
    """[L] whether the token was trained on, after failures and rejection; None before the update."""
    correction_weights: Sequence[float] | None = None
    """[L] weight of each token in the policy loss, where rollout correction was applied."""


@dataclass(slots=True)
class Batch:
    """B samples as right-padded [B, T] tensors, plus the ragged rollouts they came from."""

    rollouts: list[Rollout]
    mask: torch.Tensor
    """[B, T] bool, True where a response token trains; a failed sample's row is all False."""
    rollout_logp: torch.Tensor
    """[B, T] float32 log-probs of the rollout policy."""
    token_rewards: torch.Tensor
    """[B, T] float32; an outcome reward sits on the sample's last token."""
    group: torch.Tensor
    """[B] int64 index of the sample's prompt within the batch."""
    old_logp: torch.Tensor | None = None
    """[B, T] float32 log-probs of the training policy before the update; None when the update's own forward supplies them."""
    training_logp: torch.Tensor | None = None
    """[B, T] float32 log-probs just before a row's first update, where `old_logp` is the rollout policy's (bypass mode)."""
    ref_logp: torch.Tensor | None = None
    """[B, T] float32 log-probs of the frozen reference; None without a KL term that samples."""
    exact_kl: torch.Tensor | None = None
    """[B, T] float32 exact KL from the reference's distribution; None unless the reward is penalised by it."""
    values: torch.Tensor | None = None
    """[B, T] float32 the critic's value of the state before each token; None without a critic."""
    greedy_scores: torch.Tensor | None = None
    """[B] float32 reward of the greedy response to the sample's prompt; None unless the estimator needs it (ReMax)."""
    reward_components: torch.Tensor | None = None
    """[B, K] float32 named parts of the reward; None unless the estimator needs them (GDPO)."""
    correction_weights: torch.Tensor | None = None
    """[B, T] float32 rollout-correction weights of the policy loss; None where no correction is applied."""
    advantages: torch.Tensor | None = None
    """[B, T] float32."""
    returns: torch.Tensor | None = None
    """[B, T] float32."""

    @classmethod
    def from_rollouts(cls, rollouts: list[Rollout]) -> Batch:
        """Pad `rollouts` to [B, T]; rows whose reward failed are masked out."""
        import torch

        lengths = [len(rollout.token_ids) for rollout in rollouts]
        shape = (len(rollouts), max(lengths, default=0))
        mask, logp, rewards = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape), torch.zeros(shape)
        logp_BT = logp.numpy()  # the same memory: lists and views of other memory are copied into it once
        group_of: dict[str, int] = {}
        group = torch.tensor([group_of.setdefault(rollout.prompt.uid, len(group_of)) for rollout in rollouts])
        for row, (rollout, length) in enumerate(zip(rollouts, lengths)):
            logp_BT[row, :length] = rollout.logprobs
            if rollout.failure is None and length:
                mask[row, :length] = True
                rewards[row, length - 1] = rollout.reward or 0.0
        return cls(rollouts, mask, logp, rewards, group)

    def __len__(self) -> int:
        return len(self.rollouts)

    def select(self, rows: list[int]) -> Batch:
        """Return the batch of the given rows, in that order, with T unchanged."""
        index = self.group.new_tensor(rows)
        picked = dict.fromkeys(_OPTIONAL_TENSORS) | {name: tensor[index] for name, tensor in self.tensors().items()}
        return Batch(rollouts=[self.rollouts[row] for row in rows], **picked)  # pyright: ignore[reportArgumentType]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are set, by field name; the first dimension of each is B."""
        return {name: value for name in _TENSORS if (value := getattr(self, name)) is not None}


_OPTIONAL_TENSORS = (
    "old_logp",
    "training_logp",
    "ref_logp",
    "exact_kl",
    "values",
    "greedy_scores",
    "reward_components",
    "correction_weights",
    "advantages",
    "returns",
)
_TENSORS = ("mask", "rollout_logp", "token_rewards", "group", *_OPTIONAL_TENSORS)
