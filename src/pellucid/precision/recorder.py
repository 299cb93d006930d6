"""What a native capture has seen so far: entries in execution order, and tensors as rows of statistics on the device.

Hooks of modules and operators (`capture.py`) add to it; `dump` turns it into what is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from pellucid.precision.dump import Entry, Pass, TensorStats, leaves
from pellucid.precision.statistics import Measurer, Spans
from pellucid.stages import TokenSpan

if TYPE_CHECKING:
    import pyarrow as pa


class Recorder:
    """Collects the entries of one capture on one device."""

    def __init__(self, device: torch.device) -> None:
        self._measurer = Measurer(device)
        self._entries: list[Entry] = []
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, TensorStats]] = {}
        self._measured: list[tuple[TensorStats, int | None]] = []
        """By row of the statistics what they are to be filled into; for sums over tokens the pass that they are of."""
        self.passes: list[Pass] = []
        self._spans: Spans | None = None
        self._num_tokens: int | None = None
        """Length of the token axis of the pass in hand; None until the model has read its ids."""

    def begin_pass(self, unit: str, spans: list[TokenSpan]) -> None:
        """What follows belongs to another pass."""
        self.passes.append(Pass(unit, spans, len(self._entries)))
        self._spans = self._num_tokens = None
        self._seen.clear()

    def add(self, name: str, parent: str | None, groups: dict[str, Any]) -> Entry:
        """Append an entry of the pass in hand, and return it."""
        self._entries.append(Entry(name, parent, groups))
        return self._entries[-1]

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
        if self._num_tokens is None and self.passes and tensor.dim() == 2 and not tensor.is_floating_point():
            num_tokens = self._num_tokens = tensor.numel()  # of the ids, which a pass reads first
            if spans := self.passes[-1].spans:
                bounds = np.array([(span.start, span.start + span.length) for span in spans])
                self._spans = Spans(bounds, num_tokens)
        shape = tensor.shape
        has_tokens = len(shape) > 1 and self._num_tokens == (shape[0] if len(shape) == 2 else shape[0] * shape[1])
        spans = self._spans if of_tokens and has_tokens else None
        self._measurer.measure(tensor, spans)
        stats = TensorStats(str(tensor.dtype), tuple(shape), requires_grad=tensor.requires_grad, shard=shard)
        self._measured.append((stats, None if spans is None else len(self.passes) - 1))
        return stats

    def dump(self) -> tuple[list[Entry], pa.Table | None]:
        """Copy the numbers from the device, once; return the entries with their statistics, and `StageDump.samples`."""
        import pyarrow as pa  # runs that capture nothing do without

        found = self._measurer.fetch()
        row_of: dict[int, int] = {}
        for row, (stats, _) in enumerate(self._measured):
            row_of[id(stats)] = row
            stats.min, stats.max, stats.mean, stats.norm = found.floats[row].tolist()
            stats.num_nan, stats.num_inf, stats.num_zero, stats.num_subnormal, checksum = found.counts[row].tolist()
            stats.checksum = f"{checksum % (1 << 64):016x}"
        first_span = np.cumsum([0, *(len(one.spans) for one in self.passes)])
        names, spans, sums = list[str](), list[np.ndarray](), list[np.ndarray]()
        for entry in self._entries:
            for path, stats in leaves(entry):
                row = row_of[id(stats)]
                if (number := self._measured[row][1]) is not None:
                    names.append(f"{entry.name}|{path}")
                    sums.append(found.spans_of[row])
                    spans.append(first_span[number] + np.arange(len(sums[-1])))
        if not names:
            return self._entries, None
        indices = np.repeat(np.arange(len(names), dtype=np.int32), [len(part) for part in sums])
        total, square_sum, num_bad = np.concatenate(sums).T
        return self._entries, pa.table({
            "tensor": pa.DictionaryArray.from_arrays(indices, names), "span": np.concatenate(spans),
            "sum": total, "square_sum": square_sum, "num_bad": num_bad.astype(np.int64),
        })  # fmt: skip
