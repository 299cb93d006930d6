"""The roles as the loop sees them when they live on ranks: the same methods, each one a call to a worker group.

A batch goes over as references into shared memory; what the role computes for it comes back the same way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pellucid.controller.make_roles import RoleName
from pellucid.controller.placement.group import WorkerGroup
from pellucid.controller.placement.wire import PackedRollouts, SampledRollouts
from pellucid.profiler.tools.base import Tool
from pellucid.rollout.protocol import SamplingParams
from pellucid.training.protocol import Progress
from pellucid.types import Batch, Prompt, Rollout


class RemoteRole:
    """A role that runs on the ranks of `group`."""

    name: RoleName

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.version = 0
        """Number of optimizer steps that made the current weights."""
        self._flops = self._flops_taken = 0.0

    def _run(self, method: str, *arguments: Any, on_done: Progress | None = None, **options: Any) -> Any:
        """Call the method on all ranks and return rank 0's result; a `Batch` among the arguments gets what it computed."""
        shared = self._group.shared
        sent = [shared.share(value) if isinstance(value, Batch) else value for value in arguments]
        first = self._group.run(self.name, method, *sent, on_done=on_done, **options)[0]
        for value in arguments:
            if isinstance(value, Batch):
                shared.receive(value, first.tensors)
        self.version, self._flops = first.versions[self.name], first.flops[self.name]
        return first.value

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """See `ScoringRole.save`."""
        self._run("save", folder.absolute(), contents)

    def take_flops(self) -> float:
        """See `ScoringRole.take_flops`."""
        done, self._flops_taken = self._flops - self._flops_taken, self._flops
        return done


class RemoteTrainedRole(RemoteRole):
    """See `TrainedRole`."""

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """See `TrainedRole.start_saving`."""
        self._run("start_saving", folder.absolute(), contents)
        return self._group.wait_for_save

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """See `TrainedRole.load`."""
        self._run("load", folder.absolute(), contents)


class RemoteActor(RemoteTrainedRole):
    """See `PolicyRole`."""

    name = "actor"

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None, *, exact_kl: bool = False) -> None:
        """See `PolicyRole.compute_log_probs`."""
        self._run("compute_log_probs", batch, on_done=on_done, exact_kl=exact_kl)

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """See `PolicyRole.update`."""
        return self._run("update", batch, on_done=on_done, step=step)

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """See `PolicyRole.save_hf`."""
        self._run("save_hf", self._group.shared.put(tokenizer), folder.absolute())


class RemoteReference(RemoteRole):
    """See `ReferenceRole`."""

    name = "ref"

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None) -> None:
        """See `ReferenceRole.compute_log_probs`."""
        self._run("compute_log_probs", batch, on_done=on_done)


class RemoteCritic(RemoteTrainedRole):
    """See `CriticRole`."""

    name = "critic"

    def compute_values(self, batch: Batch, on_done: Progress | None = None) -> None:
        """See `CriticRole.compute_values`."""
        self._run("compute_values", batch, on_done=on_done)

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """See `CriticRole.update`."""
        return self._run("update", batch, on_done=on_done, step=step)


class RemoteRewardModel(RemoteRole):
    """See `RewardRole`."""

    name = "reward_model"

    def score(self, rollouts: list[Rollout], on_done: Progress | None = None) -> list[float]:
        """See `RewardRole.score`."""
        return self._run("score", self._group.shared.put(PackedRollouts.pack(rollouts, with_text=True)), on_done=on_done)


class RemoteRolloutEngine:
    """The native engine on every rank, each sampling for its part of the prompts. See `RolloutEngine`."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        stream: tuple[str | int, ...],
        on_done: Progress | None = None,
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`; a sample's random numbers are its own, so the number of ranks changes none."""
        num_ranks = len(self._group)
        # By length, dealt out in turn: long prompts, and the long answers that follow them, are spread over the ranks.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids), reverse=True)
        parts = [order[rank::num_ranks] for rank in range(num_ranks)]
        sent = [[_asked(prompts[index]) for index in part] for part in parts]
        outcomes = self._group.run("rollout", "generate", self._group.shared.put(sent), params, stream=stream, on_done=on_done)
        groups: dict[int, list[Rollout]] = {}
        for part, outcome in zip(parts, outcomes):
            sampled: SampledRollouts = outcome.value
            rollouts = sampled.unpack([prompts[index] for index in part], params.n)
            groups |= {index: rollouts[at * params.n : (at + 1) * params.n] for at, index in enumerate(part)}
        return [rollout for index in range(len(prompts)) for rollout in groups[index]]

    def capture_tool(self, tool: Tool) -> Tool:
        """See `RolloutEngine.capture_tool`; the engines are on the ranks, whose own profilers capture them."""
        return tool

    def sync_weights(self) -> None:
        """See `RolloutEngine.sync_weights`."""
        self._group.run("rollout", "sync_weights")


def _asked(prompt: Prompt) -> Prompt:
    """Return what an engine needs of a prompt."""
    return Prompt(prompt.uid, prompt.token_ids, text="", task=prompt.task)
