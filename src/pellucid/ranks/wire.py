"""How payloads travel between controller and ranks: pickled, their tensors and rollouts beside them in shared memory.

The controller keeps the reference of every tensor that it has put or received, so a tensor that several roles read is
copied once, and a rank's result is handed to the next role without a copy. Ranks read the arrays where they lie.
"""

import io
import itertools
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pellucid.rollout.requests import Completion
from pellucid.types import Prompt, Rollout, Score, Turn

SENT_WITH_CALL_BYTES = 64 * 1024
"""The most bytes that travel with each rank's call; more of them are put into shared memory once."""


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
    """N rollouts of P prompts as arrays."""

    prompts: list[tuple[str, str, list[dict[str, str]] | None]]
    """[P] uid, text and messages; answers and other columns stay with the controller."""
    prompt_ids: Ragged
    prompt_of: list[int]
    """[N] index of each rollout's prompt."""
    token_ids: Ragged
    sampled: Ragged
    logprobs: Ragged
    versions: Ragged
    rest: list[tuple[int, tuple[Turn, ...], Any, str]]
    """[N] sample, turns, finish reason and text."""

    @classmethod
    def pack(cls, rollouts: list[Rollout]) -> "PackedRollouts":
        """Pack `rollouts`."""
        index_of: dict[str, int] = {}
        prompt_of = [index_of.setdefault(rollout.prompt.uid, len(index_of)) for rollout in rollouts]
        prompts = list({rollout.prompt.uid: rollout.prompt for rollout in rollouts}.values())
        return cls(
            prompts=[(prompt.uid, prompt.text, prompt.messages) for prompt in prompts],
            prompt_ids=Ragged.pack([prompt.token_ids for prompt in prompts], np.int32),
            prompt_of=prompt_of,
            token_ids=Ragged.pack([rollout.token_ids for rollout in rollouts], np.int32),
            sampled=Ragged.pack([rollout.sampled for rollout in rollouts], np.bool_),
            logprobs=Ragged.pack([rollout.logprobs for rollout in rollouts], np.float32),
            versions=Ragged.pack([rollout.versions for rollout in rollouts], np.int32),
            rest=[(rollout.sample, rollout.turns, rollout.finish_reason, rollout.text) for rollout in rollouts],
        )

    def unpack(self) -> list[Rollout]:
        """Return the rollouts, their tokens as views of the arrays."""
        prompts = [
            Prompt(uid, list(ids), text, task="", messages=messages)
            for (uid, text, messages), ids in zip(self.prompts, self.prompt_ids.views())
        ]
        views = (self.token_ids.views(), self.sampled.views(), self.logprobs.views(), self.versions.views())
        return [
            Rollout(prompts[prompt], sample, token_ids, sampled, logprobs, versions, turns, reason, text)
            for prompt, token_ids, sampled, logprobs, versions, (sample, turns, reason, text) in zip(
                self.prompt_of, *views, self.rest
            )
        ]


@dataclass(slots=True)
class PackedCompletions:
    """A rank's answers, in the order of its requests."""

    token_ids: Ragged
    logprobs: Ragged
    versions: Ragged
    rest: list[tuple[Any, str]]
    """Finish reason and text of each."""

    @classmethod
    def pack(cls, completions: list[Completion]) -> "PackedCompletions":
        """Lay the sequences of all answers end to end."""
        return cls(
            Ragged.pack([one.token_ids for one in completions], np.int32),
            Ragged.pack([one.logprobs for one in completions], np.float32),
            Ragged.pack([one.versions for one in completions], np.int32),
            [(one.finish_reason, one.text) for one in completions],
        )

    def unpack(self) -> list[Completion]:
        """Return the answers, their tokens as views of the arrays."""
        views = zip(self.token_ids.views(), self.logprobs.views(), self.versions.views(), self.rest)
        return [Completion(token_ids, logprobs, versions, *rest) for token_ids, logprobs, versions, rest in views]


@dataclass(slots=True)
class Parcel:
    """A value on its way: pickled, with references to what lies in shared memory."""

    pickled: Any
    """The bytes, or their reference where they are many: a parcel is sent to every rank."""
    refs: list[Any]


class SharedMemory:
    """Packs values for other processes and opens theirs; knows what it has put there and keeps it from being put
    twice.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._lists: dict[type, tuple[list[Any], Any]] = {}
        """The newest list of rollouts and of scores, with its reference: all payloads of a step share them."""

    def pack(self, value: Any) -> Parcel:
        """Return `value` with its tensors and lists of rollouts, scores or completions put into shared memory."""
        target = io.BytesIO()
        pickler = _Pickler(target, self._reference)
        pickler.dump(value)
        pickled = target.getvalue()
        return Parcel(pickled if len(pickled) <= SENT_WITH_CALL_BYTES else self._store.put(pickled), pickler.refs)

    def unpack(self, parcel: Parcel) -> Any:
        """Return the value; tensors and tokens are views of shared memory, so nothing may write to them."""
        stored = []
        for value, ref in zip(self._store.get(parcel.refs), parcel.refs):
            if isinstance(value, np.ndarray):
                value = view_of(value)
                self._tensors[value] = ref
            elif isinstance(value, PackedRollouts | PackedCompletions):
                value = value.unpack()
            stored.append(value)
        pickled = parcel.pickled if isinstance(parcel.pickled, bytes) else self._store.get(parcel.pickled)
        return _Unpickler(io.BytesIO(pickled), stored).load()

    def _reference(self, value: Any) -> Any:
        """Return the reference of what is better put into shared memory, None for all else."""
        if isinstance(value, torch.Tensor):
            if value not in self._tensors:
                self._tensors[value] = self._store.put(value.detach().numpy())
            return self._tensors[value]
        if type(value) is list and value and isinstance(value[0], Rollout | Score | Completion):
            kind = type(value[0])
            known, ref = self._lists.get(kind, (None, None))
            if known is not value:
                pack = {Rollout: PackedRollouts.pack, Completion: PackedCompletions.pack}.get(kind, list)
                ref = self._store.put(pack(value))
                self._lists[kind] = (value, ref)
            return ref
        return None


class _Pickler(pickle.Pickler):
    """Replaces what has a reference by its place among `refs`."""

    def __init__(self, target: io.BytesIO, reference: Any) -> None:
        super().__init__(target, protocol=5)
        self._reference = reference
        self.refs: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        ref = self._reference(obj)
        if ref is None:
            return None
        self.refs.append(ref)
        return len(self.refs) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, stored: list[Any]) -> None:
        super().__init__(source)
        self._stored = stored

    def persistent_load(self, pid: int) -> Any:
        return self._stored[pid]


def view_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the memory of a read-only array."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
