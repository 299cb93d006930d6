"""What every role has in common: the engine that holds its model, its state on disk, its version and its arithmetic."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

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

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the asked-for parts (`model`, `optimizer`) into `folder`."""
        self.engine.save(folder, contents)

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        return self.engine.start_saving(folder, contents)

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a folder that transformers loads, adapters merged in."""
        self.engine.save_hf(tokenizer, folder)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from `folder`."""
        self.engine.load(folder, contents)
