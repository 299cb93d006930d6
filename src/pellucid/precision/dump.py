"""A precision capture of one stage on one rank: what was measured where, in the order in which it ran, and its files.

Made by the captures of both backends; compare, report and digest work on it. A capture lies in
`<save_path>/step_<N>/<stage>/step<k>/rank<R>/`. `dump.json`, `construct.json` and `stack.json` have msprobe's format,
so that its own tools read them; `capture.json` says whose capture it is, `samples.parquet` holds sums over samples.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.errors import UserError
from pellucid.files.rundir import atomic_open, atomic_write
from pellucid.stages import Stage, TokenSpan

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2
DUMP, CONSTRUCT, STACK = "dump.json", "construct.json", "stack.json"
CAPTURE, SAMPLES = "capture.json", "samples.parquet"

_COUNTS = ("num_nan", "num_inf", "num_zero", "num_subnormal")
_PLACE = re.compile(r"(?:/rollout_replica(\d+))?/step_(\d+)/(\w+)/step(\d+)/rank(\d+)$")
_BELOW = re.compile(r"(profile/)?(rollout_replica\d+/)?(step_\d+/)?(\w+/)?(step\d+/)?(rank\d+/)?" + CAPTURE)
"""Where captures lie below the folder of a rank, a call, a stage, a step, a replica, below `save_path` and a run."""


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
    """`input_args`, `input_kwargs`, `output` and so on, of nested lists and dicts of `TensorStats` or plain values."""


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
    engine: str = ""
    """Whose kernels ran it; empty: the trainer's own."""
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
    return _leaves_in(entry.groups, "")


def _leaves_in(node: object, path: str) -> Iterator[tuple[str, TensorStats]]:
    if isinstance(node, TensorStats):
        yield path[1:], node
    elif isinstance(node, dict | list | tuple):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves_in(value, f"{path}.{key}")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_dump(folder: Path, dump: StageDump) -> list[Path]:
    """Write a capture; an earlier one in the same folder is replaced.

    Returns:
        The files, in the order in which they were written; with the last, `capture.json`, the capture is whole.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    assert len({entry.name for entry in dump.entries}) == len(dump.entries), "two entries have one name"
    for name in (CAPTURE, SAMPLES):
        (folder / name).unlink(missing_ok=True)
    head = {"task": "statistics", "level": dump.about.level, "framework": "pytorch", "dump_data_dir": None}
    data = _a_key_a_line({entry.name: _written(entry.groups) for entry in dump.entries})
    atomic_write(folder / DUMP, f'{json.dumps(head)[:-1]}, "data": {data.rstrip()}}}\n')
    # As with msprobe without gradients of parameters, which have no parent.
    is_call = {entry.name: entry.parent for entry in dump.entries if ".parameters_grad." not in f"{entry.name}."}
    atomic_write(folder / CONSTRUCT, _a_key_a_line(is_call))
    atomic_write(folder / STACK, "{}\n")
    files = [folder / DUMP, folder / CONSTRUCT, folder / STACK]
    if dump.samples is not None:
        import pyarrow.parquet as pq  # runs that capture nothing do without

        with atomic_open(folder / SAMPLES) as handle:
            pq.write_table(dump.samples, handle, compression="zstd")
        files.append(folder / SAMPLES)
    return [*files, write_about(folder, dump.about)]


def write_about(folder: Path, about: About) -> Path:
    """Write `capture.json` alone, beside files that msprobe itself wrote."""
    content = {field.name: getattr(about, field.name) for field in fields(about)}
    samples = dict.fromkeys(span.sample for one in about.passes for span in one.spans)
    indices = {sample: index for index, sample in enumerate(samples)}
    content["samples"] = list(samples)
    content["passes"] = [
        {"unit": one.unit, "first_entry": one.first_entry,
         "spans": [[indices[s.sample], s.part, s.start, s.length, s.position] for s in one.spans]}
        for one in about.passes
    ]  # fmt: skip
    atomic_write(folder / CAPTURE, _a_key_a_line(content))
    return folder / CAPTURE


def _a_key_a_line(content: Mapping[str, Any]) -> str:
    encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode
    return "{\n" + ",\n".join(f"{encode(key)}: {encode(value)}" for key, value in content.items()) + "\n}\n"


def _written(node: Any) -> Any:
    """Return what is written of a group: tensors as statistics, other values with their type, as msprobe does."""
    if isinstance(node, TensorStats):
        return _written_tensor(node)
    if isinstance(node, dict):
        return {str(key): _written(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_written(value) for value in node]
    return None if node is None else {"type": type(node).__name__, "value": node}


def _written_tensor(stats: TensorStats) -> dict[str, Any]:
    numbers = {"Max": stats.max, "Min": stats.min, "Mean": stats.mean, "Norm": stats.norm}
    numbers = {name: None if math.isnan(of) and not stats.num_nan else of for name, of in numbers.items()}
    # Where elements are counted, most counts are 0.
    unsaid = {**dict.fromkeys(_COUNTS, None if stats.checksum is None else 0), "checksum": None, "shard": None}
    said = {name: value for name, none in unsaid.items() if (value := getattr(stats, name)) != none}
    about = {"type": "torch.Tensor", "dtype": stats.dtype, "shape": stats.shape}
    return {**about, **numbers, "requires_grad": stats.requires_grad, **said}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_dump(folder: Path) -> StageDump:
    """Read a capture. Of msprobe's tensors nothing is counted, and a checksum is there only in its md5 mode.

    Raises:
        UserError: the folder holds no capture, or a file is torn or is something else.
    """
    if not (folder / CAPTURE).is_file():
        reason = f"holds no whole capture (no {CAPTURE})."
        raise UserError(str(folder), reason, "Give the folder of a rank's capture.")
    import pyarrow.parquet as pq

    try:
        about, parents = _read_about(folder), json.loads((folder / CONSTRUCT).read_bytes())
        entries = [
            Entry(name, parents.get(name), {key: _read_node(node) for key, node in groups.items()})
            for name, groups in json.loads((folder / DUMP).read_bytes())["data"].items()
        ]
        samples = pq.read_table(folder / SAMPLES) if (folder / SAMPLES).exists() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"has a file that is torn, or of no capture ({type(error).__name__}: {error})."
        raise UserError(str(folder), reason, "Capture the stage again, or give another folder.") from error
    return StageDump(about, entries, samples)


def _read_node(node: Any) -> Any:
    if isinstance(node, dict):
        if not isinstance(node.get("type"), str):
            return {key: _read_node(value) for key, value in node.items()}
        return _read_tensor(node) if "shape" in node else node.get("value")
    return [_read_node(value) for value in node] if isinstance(node, list) else node


def _read_tensor(leaf: dict[str, Any]) -> TensorStats:
    # An exclusive or of all words (`0x...`) is the same in any order: no checksum.
    checksum = leaf.get("checksum") or (None if str(leaf.get("md5")).startswith("0x") else leaf.get("md5"))
    unsaid = 0 if "checksum" in leaf else None
    numbers = {name.lower(): leaf.get(name) for name in ("Min", "Max", "Mean", "Norm")}
    shard = tuple(leaf["shard"]) if "shard" in leaf else None
    return TensorStats(
        leaf["dtype"], tuple(leaf["shape"]), checksum=checksum, shard=shard,
        requires_grad=leaf.get("requires_grad", False),
        **{name: math.nan if number is None else float(number) for name, number in numbers.items()},
        **{name: leaf.get(name, unsaid) for name in _COUNTS},
    )  # fmt: skip


def _read_about(folder: Path) -> About:
    content = json.loads((folder / CAPTURE).read_bytes())
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, and {VERSION} is read")
    content["stage"] = str(Stage(content["stage"]))
    samples = content.pop("samples")
    passes = [
        Pass(one["unit"], [TokenSpan(samples[sample], *place) for sample, *place in one["spans"]], one["first_entry"])
        for one in content.pop("passes")
    ]
    return About(**content, passes=passes)


# --- finding ---------------------------------------------------------------------------------------------------------


def find_dumps(path: Path) -> list[DumpRef]:
    """Return the whole captures below a run, a `save_path`, a step, a stage or a rank, in order of step and stage.

    Raises:
        UserError: there are none.
    """
    files = [file for file in path.rglob(CAPTURE) if _BELOW.fullmatch(file.relative_to(path).as_posix())]
    order, refs = [str(stage) for stage in Stage], list[DumpRef]()
    for folder in (file.parent.resolve() for file in files):
        place = _PLACE.search(folder.as_posix())
        if place is not None and place[3] in order:
            replica, step, stage, call, rank = place.groups()
            of_replica = None if replica is None else int(replica)
            refs.append(DumpRef(int(step), stage, int(call), int(rank), of_replica, folder))
    if not refs:
        reason = "holds no precision capture." if path.is_dir() else "there is no such folder."
        remedy = "Give a run with global_profiler.tool: precision_debugger, its save_path, or a folder below."
        raise UserError(str(path), reason, remedy)
    return sorted(
        refs, key=lambda ref: (ref.step, order.index(ref.stage), ref.replica or 0, ref.call, ref.rank, ref.folder)
    )
