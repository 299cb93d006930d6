"""What a native capture has seen so far: entries in execution order, and tensors as rows of statistics on the device.

Hooks of modules (`capture.py`) and of operators (`operators.py`) add to it; `dump` turns it into what is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from pellucid.precision.dump import Entry, Pass, SampleSums, TensorStats, leaves
from pellucid.precision.statistics import Measurer, Rows, Spans
from pellucid.stages import TokenSpan


class Recorder:
    """Collects the entries of one capture on one device."""

    def __init__(self, device: torch.device) -> None:
        self._measurer = Measurer(device)
        self._entries: list[tuple[Entry, int]] = []
        """Each with the pass that it belongs to."""
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, TensorStats]] = {}
        self._measured: dict[int, tuple[TensorStats, int, bool]] = {}
        """By identity the statistics to be filled in, their row, and whether it has sums for each span of the pass."""
        self.passes: list[Pass] = []
        self._spans: Spans | None = None
        self._num_tokens: int | None = None
        """Length of the token axis of the pass in hand; None until the model has read its ids."""

    def begin_pass(self, unit: str, spans: list[TokenSpan]) -> None:
        """What follows belongs to another pass."""
        self.passes.append(Pass(unit, spans))
        self._spans = self._num_tokens = None
        self._seen.clear()

    def add(self, name: str, parent: str | None, groups: dict[str, Any]) -> Entry:
        """Append an entry of the pass in hand, and return it."""
        entry = Entry(name, parent, groups)
        self._entries.append((entry, len(self.passes) - 1))
        return entry

    def measure(self, values: Any) -> Any:
        """Return nested arguments with statistics, still to be filled in, for each tensor; objects by their type."""
        if isinstance(values, torch.Tensor):
            return self.leaf(values)
        if isinstance(values, list | tuple):
            return [self.measure(value) for value in values]
        if isinstance(values, dict):
            return {str(name): self.measure(value) for name, value in values.items()}
        if values is None or isinstance(values, bool | int | float | str):
            return values
        return f"<{type(values).__name__}>"

    def leaf(
        self, tensor: torch.Tensor, shard: tuple[int, int] | None = None, *, of_tokens: bool = True
    ) -> TensorStats:
        """Measure a tensor, unless that has been done: what one module computes another reads.

        Args:
            tensor: any; of a sharded one this rank's part is measured.
            shard: which part it is, of how many.
            of_tokens: whether it may have a token axis; parameters and their gradients have none, whatever their shape.
        """
        of_tokens = of_tokens and not isinstance(tensor, torch.nn.Parameter)
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.is_inference():  # such tensors do not count their versions: a change in place would go unseen
            return self._measure(tensor, shard, of_tokens)
        storage = tensor.untyped_storage()
        # As long as the weak reference is kept, no other storage can get this address.
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._seen.get(key)
        if known is None or known[0].expired():
            known = self._seen[key] = StorageWeakRef(storage), self._measure(tensor, shard, of_tokens)
        return known[1]

    def _measure(self, tensor: torch.Tensor, shard: tuple[int, int] | None, of_tokens: bool) -> TensorStats:
        if self._num_tokens is None:
            self._learn_num_tokens(tensor)
        spans = self._spans if of_tokens and self._has_token_axis(tensor) else None
        row = self._measurer.measure(tensor.detach(), spans)
        stats = TensorStats(str(tensor.dtype), tuple(tensor.shape), requires_grad=tensor.requires_grad, shard=shard)
        self._measured[id(stats)] = stats, row, spans is not None
        return stats

    def _learn_num_tokens(self, ids: torch.Tensor) -> None:
        """Learn from the ids, which a pass reads first, how long its token axis is."""
        if not self.passes or ids.is_floating_point() or ids.dim() != 2:
            return
        self._num_tokens = num_tokens = ids.numel()
        if spans := self.passes[-1].spans:
            starts, lengths = zip(*((span.start, span.length) for span in spans), strict=True)
            self._spans = Spans(np.array(starts), np.array(lengths), num_tokens)

    def _has_token_axis(self, tensor: torch.Tensor) -> bool:
        shape = tensor.shape
        if len(shape) == 2:
            return shape[0] == self._num_tokens
        return len(shape) > 2 and shape[0] * shape[1] == self._num_tokens

    def dump(self) -> tuple[list[Entry], SampleSums | None]:
        """Copy the numbers from the device, once, and return the entries with their statistics filled in."""
        rows = self._measurer.fetch()
        for stats, row, _ in self._measured.values():
            _fill_in(stats, row, rows)
        names, passes, parts = list[str](), list[int](), list[np.ndarray]()
        for entry, pass_index in self._entries:
            for path, stats in leaves(entry):
                _, row, by_sample = self._measured[id(stats)]
                if by_sample:
                    names.append(f"{entry.name}|{path}")
                    passes.append(pass_index)
                    parts.append(rows.spans_of[row])
        entries = [entry for entry, _ in self._entries]
        if not names:
            return entries, None
        first = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        total, square_sum, num_bad = np.concatenate(parts).T
        pass_index = np.array(passes, dtype=np.int64)
        return entries, SampleSums(names, pass_index, first, total, square_sum, num_bad.astype(np.int64))


def _fill_in(stats: TensorStats, row: int, rows: Rows) -> None:
    stats.min, stats.max, stats.mean, stats.norm = rows.floats[row].tolist()
    stats.num_nan, stats.num_inf, stats.num_zero, stats.num_subnormal, checksum = rows.counts[row].tolist()
    stats.checksum = f"{checksum % (1 << 64):016x}"
