"""How batches and rollouts travel between controller and ranks: as arrays in shared memory, each put there once.

The controller keeps the reference of every tensor that it has put or received, so a tensor that several roles read is copied
once, and a rank's result is handed to the next role without a copy. Ranks read the arrays where they lie.
"""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pellucid.types import Batch, Prompt, Rollout


class ObjectStore(Protocol):
    """Ray's object store, as far as it is used here."""

    def put(self, value: Any, /) -> Any:
        """Copy `value` into shared memory and return its reference."""
        ...

    def get(self, refs: Any, /) -> Any:
        """Return the values of references; arrays are views of shared memory."""
        ...


@dataclass(slots=True)
class Ragged:
    """Sequences of unequal length, end to end."""

    values: np.ndarray
    """[sum of lengths]."""
    offsets: np.ndarray
    """[N + 1] where each begins; the last entry is the end."""

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int] | Sequence[float]], dtype: Any) -> "Ragged":
        """Lay `sequences` end to end as `dtype`."""
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
        values = np.empty(offsets[-1], dtype=dtype)
        for start, end, sequence in zip(offsets, offsets[1:], sequences):
            values[start:end] = sequence
        return cls(values, offsets)

    def views(self) -> list[memoryview]:
        """Return each sequence where it lies; iterating one gives Python numbers."""
        view = self.values.data
        bounds = self.offsets.tolist()
        return [view[start:end] for start, end in itertools.pairwise(bounds)]


@dataclass(slots=True)
class PackedRollouts:
    """N rollouts of P prompts; where only a role's model reads them, without texts."""

    uids: list[str]
    """[P]"""
    prompt_ids: Ragged
    prompt_of: np.ndarray
    """[N] index of each rollout's prompt."""
    sample: np.ndarray
    """[N]"""
    token_ids: Ragged
    texts: list[tuple[str, list[dict[str, str]] | None]] | None = None
    """[P] text and messages of the prompts."""
    responses: list[str] | None = None
    """[N] text of the responses."""

    @classmethod
    def pack(cls, rollouts: list[Rollout], *, with_text: bool = False) -> "PackedRollouts":
        """Pack what a role's model needs of `rollouts`; `with_text` also what a reward model with its own tokenizer reads."""
        index_of: dict[str, int] = {}
        prompt_of = [index_of.setdefault(rollout.prompt.uid, len(index_of)) for rollout in rollouts]
        prompts = list({rollout.prompt.uid: rollout.prompt for rollout in rollouts}.values())
        return cls(
            uids=[prompt.uid for prompt in prompts],
            prompt_ids=Ragged.pack([prompt.token_ids for prompt in prompts], np.int32),
            prompt_of=np.array(prompt_of, dtype=np.int32),
            sample=np.array([rollout.sample for rollout in rollouts], dtype=np.int32),
            token_ids=Ragged.pack([rollout.token_ids for rollout in rollouts], np.int32),
            texts=[(prompt.text, prompt.messages) for prompt in prompts] if with_text else None,
            responses=[rollout.text for rollout in rollouts] if with_text else None,
        )

    def unpack(self) -> list[Rollout]:
        """Return the rollouts, their tokens as views of the arrays; what was not packed is empty."""
        texts = self.texts or [("", None)] * len(self.uids)
        prompts = [
            Prompt(uid, list(ids), text, task="", messages=messages)
            for uid, ids, (text, messages) in zip(self.uids, self.prompt_ids.views(), texts)
        ]
        responses = self.responses or [""] * len(self.sample)
        return [
            Rollout(prompts[prompt], sample, token_ids, [], [], "stop", text)
            for prompt, sample, token_ids, text in zip(
                self.prompt_of.tolist(), self.sample.tolist(), self.token_ids.views(), responses
            )
        ]


@dataclass(slots=True)
class SampledRollouts:
    """What one rank sampled for its part of the prompts, in their order; the prompts themselves the controller has."""

    token_ids: Ragged
    logprobs: Ragged
    versions: Ragged
    finish_reasons: list[Literal["stop", "length"]]
    texts: list[str]

    @classmethod
    def pack(cls, rollouts: list[Rollout]) -> "SampledRollouts":
        """Pack a rank's samples."""
        return cls(
            Ragged.pack([rollout.token_ids for rollout in rollouts], np.int32),
            Ragged.pack([rollout.logprobs for rollout in rollouts], np.float32),
            Ragged.pack([rollout.versions for rollout in rollouts], np.int32),
            [rollout.finish_reason for rollout in rollouts],
            [rollout.text for rollout in rollouts],
        )

    def unpack(self, prompts: list[Prompt], n: int) -> list[Rollout]:
        """Return `n` rollouts for each of `prompts`, their tokens as views of the arrays."""
        fields = (self.token_ids.views(), self.logprobs.views(), self.versions.views(), self.finish_reasons, self.texts)
        return [
            Rollout(prompts[index // n], index % n, *values)  # pyright: ignore[reportArgumentType]
            for index, values in enumerate(zip(*fields))
        ]


@dataclass(slots=True)
class SharedBatch:
    """A `Batch` as references into shared memory."""

    rollouts: Any
    """Reference of `PackedRollouts`."""
    tensors: dict[str, Any]
    """References of [B, …] arrays by the field's name."""


class SharedTensors:
    """Which tensors of the controller lie in shared memory, and under which reference."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._refs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def put(self, value: Any) -> Any:
        """Put something that is used once."""
        return self._store.put(value)

    def share(self, batch: Batch) -> SharedBatch:
        """Return references for `batch`, putting only what is not there yet."""
        # A batch's `group` is made with its rollouts and never replaced, so it stands for them.
        if batch.group not in self._packed:
            self._packed[batch.group] = self._store.put(PackedRollouts.pack(batch.rollouts))
        return SharedBatch(
            self._packed[batch.group], {name: self._share_tensor(tensor) for name, tensor in batch.tensors().items()}
        )

    def _share_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor not in self._refs:
            self._refs[tensor] = self._store.put(tensor.detach().numpy())
        return self._refs[tensor]

    def receive(self, batch: Batch, tensors: dict[str, Any]) -> None:
        """Set the tensors that a role has computed, from their references, as views of shared memory."""
        for name, array in zip(tensors, self._store.get(list(tensors.values()))):
            tensor = view_of(array)
            self._refs[tensor] = tensors[name]
            setattr(batch, name, tensor)


def open_batch(shared: SharedBatch, store: ObjectStore) -> Batch:
    """Return the batch on a rank: its tensors and tokens are views of shared memory, so nothing may write to them."""
    packed, *arrays = store.get([shared.rollouts, *shared.tensors.values()])
    tensors = {name: view_of(array) for name, array in zip(shared.tensors, arrays)}
    return Batch(packed.unpack(), **tensors)


def view_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the memory of a read-only array."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
