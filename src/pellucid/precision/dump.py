"""A precision capture of one stage on one rank: what was measured where, in the order in which it ran.

Made by the captures of both backends; `dump_files.py` writes and reads it; compare, heat map and digest work on it. No
torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.stages import TokenSpan

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2


@dataclass(slots=True)
class TensorStats:
    """What is kept of one tensor; during a capture the numbers are still on the device, and nan and None here."""

    dtype: str
    """As torch prints it, e.g. `torch.float32`."""
    shape: tuple[int, ...]
    min: float = math.nan
    """nan where the tensor holds one, or is empty; so are `max`, `mean` and `norm`."""
    max: float = math.nan
    mean: float = math.nan
    norm: float = math.nan
    """L2, over all elements."""
    num_nan: int | None = None
    """None, like the counts below: not counted (captures of msprobe)."""
    num_inf: int | None = None
    num_zero: int | None = None
    num_subnormal: int | None = None
    checksum: str | None = None
    """16 hex digits of the values as stored, in their order; of msprobe's md5 captures its own 8; None: not taken."""
    requires_grad: bool = False
    shard: tuple[int, int] | None = None
    """(which part, of how many) where ranks share a tensor and this is one rank's part."""


@dataclass(slots=True)
class Entry:
    """One call: of a module or an operator, forward or backward, or the gradients of a module's own parameters."""

    name: str
    """As msprobe has it: `Module.model.norm.LlamaRMSNorm.forward.0`, `Functional.linear.3.forward`, ..."""
    parent: str | None
    """Entry of the enclosing module's call."""
    groups: dict[str, Any]
    """`input_args`, `input_kwargs`, `output` and so on. Leaves are `TensorStats` or plain values, lists and dicts
    nest.
    """


@dataclass(slots=True)
class Pass:
    """One forward pass through the model, and its backward pass."""

    unit: str
    """`micro_batch`, `prefill` or `decode_step`."""
    spans: list[TokenSpan]
    """Whose tokens it holds."""
    first_entry: int = 0
    """How many entries there were before it; of msprobe's captures that is not known."""


@dataclass(slots=True, kw_only=True)
class About:
    """Whose capture this is, and what it covers."""

    backend: str
    """`native` or `msprobe`."""
    level: str
    """`L0` modules, `L1` operators, `mix` both."""
    stage: str
    step: int
    role: str
    call: int = 0
    """Which capture of this stage within the step."""
    rank: int = 0
    num_ranks: int = 1
    device: str = ""
    dtype: str = ""
    """Of the model's weights."""
    model: str = ""
    """Its class."""
    started_at: float = 0.0
    """Seconds since 1970."""
    duration_s: float = 0.0
    complete: bool = True
    """False: the stage or the capture was cut short."""
    error: str | None = None
    """By what."""
    passes: list[Pass] = field(default_factory=list)
    mini_batches: list[int] = field(default_factory=list)
    """Index of each mini-batch's first pass; empty where there are none."""
    version: int = VERSION

    @property
    def spans(self) -> list[TokenSpan]:
        """The spans of all passes."""
        return [span for one in self.passes for span in one.spans]

    def end(self, cause: BaseException | None) -> None:
        """Note that the capture has ended now, cut short by `cause` if there is one."""
        self.duration_s = round(time.time() - self.started_at, 6)
        if cause is not None:
            self.complete, self.error = False, f"{type(cause).__name__}: {cause}"


@dataclass(slots=True)
class StageDump:
    """A capture of one stage on one rank."""

    about: About
    entries: list[Entry]
    """In execution order."""
    samples: pa.Table | None = None
    """Sums over each sample's tokens, of all tensors that have a token axis: `tensor`, `<entry name>|<path of the
    leaf>`; `span`, the number of a span among those of all passes; `sum` Σx, `square_sum` Σx², `num_bad` NaN and Inf.
    None where no tensor has one, and from msprobe.
    """
    folder: Path | None = None
    """Where it was read from."""


@dataclass(frozen=True, slots=True, order=True)
class DumpRef:
    """Where a capture of a stage on one rank lies, and which it is."""

    step: int
    stage: str
    call: int
    rank: int
    replica: int | None
    """Of a rollout engine; None: a training stage."""
    folder: Path

    @property
    def rank_name(self) -> str:
        """Return `rank 1`, or `replica 0 rank 1`."""
        return ("" if self.replica is None else f"replica {self.replica} ") + f"rank {self.rank}"


def leaves(entry: Entry) -> Iterator[tuple[str, TensorStats]]:
    """Yield the tensors of an entry with their paths, e.g. `output.0`, in the order in which they were recorded."""
    yield from _leaves_in(entry.groups, "")


def _leaves_in(node: object, path: str) -> Iterator[tuple[str, TensorStats]]:
    if isinstance(node, TensorStats):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _leaves_in(value, f"{path}.{index}" if path else str(index))
