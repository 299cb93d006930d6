"""How payloads travel between controller and ranks: pickled, their tensors and rollouts beside them in shared memory.

The controller keeps the reference of every tensor that it has put or received, so a tensor that several roles read is
copied once, and a rank's result is handed to the next role without a copy. Ranks read the arrays where they lie.
"""

import dataclasses
import io
import itertools
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pellucid.rollout.requests import Completion
from pellucid.types import Rollout, Score

SENT_WITH_CALL_BYTES = 64 * 1024
"""The most bytes that travel with each rank's call; more of them are put into shared memory once."""
_COLUMNS = {"token_ids": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32}
"""The sequences of rollouts and completions, and how each is stored."""


@dataclass(slots=True)
class PackedSequences:
    """Rollouts or completions, their sequences laid end to end."""

    rest: list[Any]
    """[N] the objects with empty sequences; of their prompts, what only the controller reads is left out."""
    offsets: np.ndarray
    """[N + 1] where each one's sequences begin; the last entry is the end."""
    columns: dict[str, np.ndarray]
    """[sum of lengths] by field name."""

    @classmethod
    def pack(cls, items: list[Any]) -> "PackedSequences":
        """Lay the sequences of `items` end to end."""
        offsets = np.zeros(len(items) + 1, dtype=np.int64)
        np.cumsum([len(item.token_ids) for item in items], out=offsets[1:])
        kinds = {field.name: _COLUMNS[field.name] for field in dataclasses.fields(items[0]) if field.name in _COLUMNS}
        columns = {name: np.empty(offsets[-1], dtype=kind) for name, kind in kinds.items()}
        empty, prompts, rest = dict.fromkeys(columns, ()), dict[str, Any](), list[Any]()
        for item, (start, end) in zip(items, itertools.pairwise(offsets)):
            for name, column in columns.items():
                column[start:end] = getattr(item, name)
            item = dataclasses.replace(item, **empty)
            if isinstance(item, Rollout):
                name = item.prompt.name
                if name not in prompts:
                    prompts[name] = dataclasses.replace(item.prompt, task="", answer=None, extra={})
                item = dataclasses.replace(item, prompt=prompts[name], branches=())
            rest.append(item)
        return cls(rest, offsets, columns)

    def unpack(self) -> list[Any]:
        """Return the objects, their sequences as views of the arrays; iterating one gives Python numbers."""
        views = {name: column.data for name, column in self.columns.items()}
        return [
            dataclasses.replace(item, **{name: view[start:end] for name, view in views.items()})
            for item, (start, end) in zip(self.rest, itertools.pairwise(self.offsets.tolist()))
        ]


@dataclass(slots=True)
class Parcel:
    """A value on its way: pickled, with references to what lies in shared memory."""

    pickled: Any
    """The bytes, or their reference where they are many: a parcel is sent to every rank."""
    refs: list[Any]


class SharedMemory:
    """Packs values for other processes and opens theirs; keeps what it has put there from being put twice.

    Args:
        store: has Ray's `put` and `get`.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._lists: dict[type, tuple[list[Any], Any]] = {}
        """The newest list of rollouts and of scores, with its reference: all payloads of a step share them."""

    def pack(self, value: Any) -> Parcel:
        """Return `value` with its tensors and lists of rollouts, scores or completions put into shared memory."""
        refs: list[Any] = []

        def place_of(obj: Any) -> int | None:
            """Return the place among `refs` of what has a reference."""
            if (ref := self._reference(obj)) is None:
                return None
            refs.append(ref)
            return len(refs) - 1

        target = io.BytesIO()
        pickler = pickle.Pickler(target, protocol=5)
        pickler.persistent_id = place_of
        pickler.dump(value)
        pickled = target.getvalue()
        return Parcel(pickled if len(pickled) <= SENT_WITH_CALL_BYTES else self._store.put(pickled), refs)

    def unpack(self, parcel: Parcel) -> Any:
        """Return the value; tensors and tokens are views of shared memory, so nothing may write to them."""
        stored = []
        for value, ref in zip(self._store.get(parcel.refs), parcel.refs):
            if isinstance(value, np.ndarray):
                value = view_of(value)
                self._tensors[value] = ref
            elif isinstance(value, PackedSequences):
                value = value.unpack()
            stored.append(value)
        pickled = parcel.pickled if isinstance(parcel.pickled, bytes) else self._store.get(parcel.pickled)
        unpickler = pickle.Unpickler(io.BytesIO(pickled))
        unpickler.persistent_load = stored.__getitem__
        return unpickler.load()

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
                ref = self._store.put(value if kind is Score else PackedSequences.pack(value))
                self._lists[kind] = (value, ref)
            return ref
        return None


def view_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the memory of a read-only array."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
