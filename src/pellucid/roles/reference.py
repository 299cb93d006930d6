"""The frozen reference: the policy as it was before training, against which a KL term is measured."""

import torch

from pellucid.roles.role import Role
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import Progress, TrainingEngine
from pellucid.types import Samples


class Reference(Role):
    """Scores responses under weights that never change; `temperature` is the sampling temperature."""

    def __init__(self, engine: TrainingEngine, *, temperature: float) -> None:
        super().__init__(engine)
        self._head = LogProbHead(temperature)

    def compute_log_probs(self, samples: Samples, *, on_done: Progress | None = None) -> torch.Tensor:
        """Return the [B, T] log-probs of the responses, zero outside the mask."""
        scores = self.engine.forward(sequences_of(samples.rollouts), self._head, on_done=on_done)
        return scores.logp.cpu() * samples.mask
