"""The frozen reference: the policy as it was before training, against which a KL term is measured."""

from pellucid.roles.base import Role
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import Progress, TrainingEngine
from pellucid.types import Batch


class Reference(Role):
    """Scores responses under weights that never change; `temperature` is the sampling temperature."""

    def __init__(self, engine: TrainingEngine, *, temperature: float) -> None:
        super().__init__(engine)
        self._temperature = temperature

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None) -> None:
        """Set `batch.ref_logp`."""
        scores = self.engine.forward(sequences_of(batch.rollouts), LogProbHead(self._temperature), on_done=on_done)
        assert scores.logp is not None
        batch.ref_logp = scores.logp.cpu() * batch.mask
