"""The payloads that travel between rooms. Each stage hands on a type of its own, and each field has one writer.

    Prompt ─► Rollout ─► Score ─► Samples ─► Experience ─► TrainBatch
    data      agent      reward   produce    learn: log-probs,  learn: advantages,
                                             values             correction

Worked example, one group of two samples for the prompt "2+3=" (ids 5 14 6 16), the answer digit 8, end-of-text 1; the
second one called a calculator, whose answer (ids 7 7) was given to it:

    prompt   = Prompt(uid="arithmetic:train:7", token_ids=[5, 14, 6, 16], text="2+3=", task="arithmetic", answer="5")
    rollouts = [Rollout.single_turn(prompt, 0, [8, 1], [-0.2, -0.01], [3, 3], "stop", "5"),
                Rollout(prompt, 1, token_ids=[9, 7, 7, 1], sampled=[True, False, False, True], logprobs=[-1.9, 0, 0,
                -0.4],
                        versions=[3, -1, -1, 3], turns=(Turn(0, 1, "stop"), Turn(3, 4, "stop")), finish_reason="stop",
                        text="…")]
    samples  = Samples.pad(rollouts, [Score(1.0), Score(0.0)])     # B = 2, T = 4
    samples.mask          == [[1, 1, 0, 0], [1, 0, 0, 1]]
    samples.rollout_logp  == [[-0.2, -0.01, 0, 0], [-1.9, 0, 0, -0.4]]

Shapes: B samples, T tokens after the prompt (right-padded). Padding and given tokens are 0 in every float tensor and
False in every mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    import torch

FailureKind = Literal["exception", "timeout", "wrong_type"]
FinishReason = Literal["stop", "length", "max_turns", "tool_failed", "agent_failed", "timeout", "aborted"]


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
    messages: list[dict[str, Any]] | None = None
    """The raw chat, kept only with `data.return_raw_chat` and for agents that go on with it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, handed to the reward function."""
    context: str = ""
    """Digest of `token_ids` where an agent has begun a sequence of the trajectory with others than the row's."""

    @property
    def name(self) -> str:
        """What tells its tokens from those of others."""
        return f"{self.uid} context {self.context}" if self.context else self.uid


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a turn made of a tool, or of an environment, whose name is then `environment`."""

    name: str
    arguments: str
    """As JSON, or as the policy wrote them."""
    result: str
    """The text that was given back."""
    seconds: float = field(default=0.0, compare=False)
    failure: str = ""
    """Its kind, where it did not do what was asked: malformed, unknown_tool, error, timeout, infrastructure."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the rollout engine and its answer, as part of a trajectory."""

    start: int
    """Index of the turn's first sampled token in the trajectory's `token_ids`."""
    end: int
    """Index after its last one."""
    finish_reason: FinishReason
    seconds: float = field(default=0.0, compare=False)
    """Wall time from request to answer."""
    tool_calls: tuple[ToolUse, ...] = ()
    """What it called, in order."""
    reward: float | None = None
    """What an environment gave for it; None where rewards are for whole trajectories."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent says of its trajectory when it has ended."""

    rewards: dict[str, float] | None = None
    """Rewards by name, whose sum is the trajectory's; None where a verifier or reward function is to score it."""
    columns: dict[str, Any] = field(default_factory=dict)
    """More that is worth knowing of it: goes into the rollout dump, and to the reward function."""
    failure: str = ""
    """Why it is worth nothing to learn from, e.g. a tool that could not run; such a sample is masked out."""
    text: str | None = None
    """What a verifier scores; None: the last turn."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory exactly as it happened: what the policy sampled, and what tools or users gave in between.

    Token ids are never made from text again. All sequences are [L] over everything after the prompt; those that come
    from other processes are views of shared memory.
    """

    prompt: Prompt
    sample: int
    """Index within the group, 0 … n−1."""
    token_ids: Sequence[int]
    """[L] sampled and given ids in order, the end-of-text id included where it was sampled."""
    sampled: Sequence[bool]
    """[L] True where the policy drew the token: the loss mask."""
    logprobs: Sequence[float]
    """[L] log-probability of each sampled id under the sampling policy (temperature-scaled); 0 where given."""
    versions: Sequence[int]
    """[L] version of the weights that drew each token (0 before the first update); −1 where given."""
    turns: tuple[Turn, ...]
    finish_reason: FinishReason
    text: str = ""
    """Decoded response without special tokens; of several turns the last one."""
    outcome: Outcome = Outcome()
    sequence: int = 0
    """Index among the sequences of its trajectory, which share group, reward and advantage."""
    num_sequences: int = 1
    """How many there are: more than one where an agent has held several chats, or changed the past of one."""
    branches: tuple[Rollout, ...] = ()
    """Of the first sequence, until rewards are known, the others."""

    @classmethod
    def single_turn(
        cls,
        prompt: Prompt,
        sample: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: FinishReason,
        text: str = "",
        seconds: float = 0.0,
    ) -> Rollout:
        """Return the trajectory of one answer, of which every token was sampled."""
        turns = (Turn(0, len(token_ids), finish_reason, seconds),)
        sampled = memoryview(b"\x01" * len(token_ids)).cast("?")  # a byte a token, where a list would take eight
        return cls(prompt, sample, token_ids, sampled, logprobs, versions, turns, finish_reason, text)

    def sequences(self) -> dict[str, Sequence[Any]]:
        """Return the [L] sequences, by field name."""
        return {name: getattr(self, name) for name in ("token_ids", "sampled", "logprobs", "versions")}

    @property
    def parts(self) -> tuple[Rollout, ...]:
        """All sequences of the trajectory."""
        return (self, *self.branches)

    @property
    def name(self) -> str:
        """What people call the sample."""
        name = f"{self.prompt.uid} sample {self.sample}"
        return f"{name} sequence {self.sequence}" if self.sequence else name

    @property
    def num_sampled(self) -> int:
        """Return the number of sampled tokens: the length of the response wherever lengths are counted."""
        return sum(turn.end - turn.start for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A reward call that broke twice; the sample is masked out of training, never scored as zero."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Score:
    """What the reward made of a rollout."""

    reward: float | None
    """Outcome reward; None after a failure."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components and extra numbers that the reward function returned."""
    failure: RewardFailure | None = None


@dataclass(frozen=True)
class Samples:
    """B scored rollouts as right-padded [B, T] tensors: what `produce` hands to `learn`."""

    rollouts: list[Rollout]
    scores: list[Score]
    mask: torch.Tensor
    """[B, T] bool, True at sampled tokens; the row of a sample whose reward failed is all False."""
    rollout_logp: torch.Tensor
    """[B, T] float32 log-probs of the rollout policy."""
    token_rewards: torch.Tensor
    """[B, T] float32; an outcome reward sits on the sample's last sampled token."""
    group: torch.Tensor
    """[B] int64 index of the sample's prompt within the batch."""
    greedy_scores: torch.Tensor | None = None
    """[B] float32 reward of the greedy answer to the sample's prompt; None where the estimator needs none."""
    reward_components: torch.Tensor | None = None
    """[B, K] float32 named parts of the reward; None where the estimator needs none."""

    @classmethod
    def pad(
        cls, rollouts: list[Rollout], scores: list[Score], *, by_turn: bool = False, **baselines: torch.Tensor | None
    ) -> Samples:
        """Pad `rollouts` to [B, T]; rows whose reward failed are masked out.

        Args:
            rollouts: the samples, group by group.
            scores: one a rollout.
            by_turn: whether rewards of turns sit on the last tokens of these, and not together on the sample's.
            baselines: `greedy_scores` and `reward_components`, where the advantage estimator needs them.
        """
        import torch

        lengths = [len(rollout.token_ids) for rollout in rollouts]
        shape = (len(rollouts), max(lengths, default=0))
        mask, logp, rewards = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape), torch.zeros(shape)
        # The same memory: lists and views of other memory are copied into it once.
        logp_BT, mask_BT = logp.numpy(), mask.numpy()
        group_of: dict[str, int] = {}
        group = torch.tensor([group_of.setdefault(rollout.prompt.uid, len(group_of)) for rollout in rollouts])
        for row, (rollout, score, length) in enumerate(zip(rollouts, scores, lengths)):
            logp_BT[row, :length] = rollout.logprobs
            if score.failure is None and rollout.num_sampled:
                mask_BT[row, :length] = rollout.sampled
                own = [(turn.end - 1, turn.reward) for turn in rollout.turns if by_turn and turn.reward is not None]
                for place, reward in own:
                    rewards[row, place] = reward
                last = max(turn.end for turn in rollout.turns) - 1
                rewards[row, last] += (score.reward or 0.0) - sum(reward for _, reward in own)
        return cls(rollouts, scores, mask, logp, rewards, group, **baselines)

    def __len__(self) -> int:
        return len(self.rollouts)

    def select(self, rows: list[int]) -> Self:
        """Return the batch of the given rows, in that order, with T unchanged."""
        index = self.group.new_tensor(rows)
        lists = {name: [getattr(self, name)[row] for row in rows] for name in ("rollouts", "scores")}
        return dataclasses.replace(self, **lists, **{name: tensor[index] for name, tensor in self.tensors().items()})

    def turn_ends(self) -> torch.Tensor:
        """Return [B, T] bool, True at the last token of each turn that has a reward, and of each row's last turn."""
        import torch

        ends = torch.zeros_like(self.mask)
        for row, rollout in enumerate(self.rollouts):
            earning = [turn for turn in rollout.turns[:-1] if turn.reward is not None]
            ends[row, [turn.end - 1 for turn in (*earning, *rollout.turns[-1:])]] = True
        return ends

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are set, by field name; the first dimension of each is B."""
        import torch

        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step's part of a batch."""

    rows: list[int]
    """Its rows of the batch."""
    number: int
    """How many mini-batches of the update came before it."""


@dataclass(frozen=True)
class LogProbs:
    """What a policy makes of the tokens of a batch."""

    logp: torch.Tensor
    """[B, T] float32 log-probability of each token."""
    exact_kl: torch.Tensor | None = None
    """[B, T] float32 exact KL from the reference's distribution; None unless asked for."""


@dataclass(frozen=True)
class Experience(Samples):
    """Samples with what the training side makes of them before any update."""

    old_logp: torch.Tensor | None = None
    """[B, T] float32 log-probs of the old policy; None: the update's own forward pass is the old policy."""
    ref_logp: torch.Tensor | None = None
    """[B, T] float32 log-probs of the frozen reference; None without a KL term that samples."""
    reward_kl: torch.Tensor | None = None
    """[B, T] float32 KL that the rewards are penalised by; None without such a penalty."""
    values: torch.Tensor | None = None
    """[B, T] float32 the critic's value of the state before each token; None without a critic."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch(Experience):
    """Experience with what the losses train on."""

    advantages: torch.Tensor
    """[B, T] float32."""
    returns: torch.Tensor
    """[B, T] float32."""
    loss_mask: torch.Tensor
    """[B, T] bool: `mask` without what the correction rejected."""
    correction_weights: torch.Tensor | None = None
    """[B, T] float32 rollout-correction weights of the policy loss; None where no correction is applied."""


@dataclass(frozen=True)
class ActorUpdate:
    """What an update of the policy gives back."""

    metrics: dict[str, float]
    training_logp: torch.Tensor | None
    """[B, T] float32 log-probs just before a row's first update, NaN in rows that were not trained on; None where
    nothing computed them."""
    entropy: torch.Tensor | None = None
    """[B, T] float32 entropies in nats at the same moment; None where the policy was not updated."""
