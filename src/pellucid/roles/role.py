"""What every role has in common: the engine that holds its model, saves and loads it, its version, its arithmetic."""

import torch

from pellucid.training.protocol import TrainingEngine


class Role:
    """A job in a step, done by `engine`."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self._flops_taken = 0.0

    @property
    def version(self) -> int:
        """Number of optimizer steps that made the current weights."""
        return self.engine.version

    def take_flops(self) -> float:
        """Return the arithmetic done since the last call, on all ranks together."""
        done, self._flops_taken = self.engine.flops - self._flops_taken, self.engine.flops
        return done

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model, or each chunk of one that is cut into several."""
        return self.engine.modules

    @property
    def in_hand(self) -> list[str]:
        """The samples that the engine is working on at this moment."""
        return self.engine.in_hand
