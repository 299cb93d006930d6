"""The files of a precision capture: written by the captures of both backends, read by compare, heat map and digest.

A capture lies in `<save_path>/step_<N>/<stage>/step<k>/rank<R>/`. `dump.json`, `construct.json` and `stack.json` have
msprobe's format, so that its own tools read them; `capture.json` says whose capture it is, `samples.npz` holds sums
sample by sample.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.errors import UserError
from pellucid.files.rundir import atomic_open, atomic_write
from pellucid.precision.dump import VERSION, About, DumpRef, Entry, Pass, SampleSums, StageDump, TensorStats
from pellucid.stages import Stage, TokenSpan

DUMP, CONSTRUCT, STACK = "dump.json", "construct.json", "stack.json"
CAPTURE, SAMPLES = "capture.json", "samples.npz"

_COUNTS = ("num_nan", "num_inf", "num_zero", "num_subnormal")
_SUMS = ("pass_index", "first", "sum", "square_sum", "num_bad")
_FLOATING = ("torch.float", "torch.bfloat", "torch.complex")
_PLACE = re.compile(r"(?:/rollout_replica(\d+))?/step_(\d+)/(\w+)/step(\d+)/rank(\d+)$")
_BELOW = re.compile(r"(profile/)?(rollout_replica\d+/)?(step_\d+/)?(\w+/)?(step\d+/)?(rank\d+/)?" + CAPTURE)
"""Where captures lie below the folder of a rank, a call, a stage, a step, a replica, below `save_path` and a run."""


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
    atomic_write(folder / DUMP, _dump_text(dump))
    # As with msprobe without gradients of parameters, which have no parent.
    is_call = {entry.name: entry.parent for entry in dump.entries if ".parameters_grad." not in f"{entry.name}."}
    atomic_write(folder / CONSTRUCT, _a_key_a_line(is_call))
    atomic_write(folder / STACK, "{}\n")
    files = [folder / DUMP, folder / CONSTRUCT, folder / STACK]
    if dump.samples is not None:
        with atomic_open(folder / SAMPLES) as handle:
            names = np.frombuffer("\n".join(dump.samples.names).encode(), np.uint8)
            arrays = {name: getattr(dump.samples, name) for name in _SUMS}
            np.savez_compressed(handle, allow_pickle=False, names=names, **arrays)
        files.append(folder / SAMPLES)
    return [*files, write_about(folder, dump.about)]


def write_about(folder: Path, about: About) -> Path:
    """Write `capture.json` alone, beside files that msprobe itself wrote."""
    content = {field.name: getattr(about, field.name) for field in fields(about)}
    samples = dict.fromkeys(span.sample for one in about.passes for span in one.spans)
    indices = {sample: index for index, sample in enumerate(samples)}
    content["samples"] = list(samples)
    content["passes"] = [
        {"unit": one.unit, "spans": [[indices[s.sample], s.part, s.start, s.length, s.position] for s in one.spans]}
        for one in about.passes
    ]
    atomic_write(folder / CAPTURE, _a_key_a_line(content))
    return folder / CAPTURE


def _dump_text(dump: StageDump) -> str:
    head = {"task": "statistics", "level": dump.about.level, "framework": "pytorch", "dump_data_dir": None}
    data = _a_key_a_line({entry.name: _written(entry.groups) for entry in dump.entries})
    return f'{json.dumps(head)[:-1]}, "data": {data.rstrip()}}}\n'


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
    if 0 in stats.shape or not stats.dtype.startswith(_FLOATING):  # NaN is a value only of floats
        numbers = {name: None if math.isnan(number) else number for name, number in numbers.items()}
    # Where elements are counted, most counts are 0.
    unsaid = {**dict.fromkeys(_COUNTS, None if stats.checksum is None else 0), "checksum": None, "shard": None}
    said = {name: value for name, none in unsaid.items() if (value := getattr(stats, name)) != none}
    leaf = {"type": "torch.Tensor", "dtype": stats.dtype, "shape": stats.shape, **numbers}
    return {**leaf, "requires_grad": stats.requires_grad, **said}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_dump(folder: Path) -> StageDump:
    """Read a capture. Of msprobe's tensors nothing is counted, and a checksum is there only in its md5 mode.

    Raises:
        UserError: the folder holds no capture, or a file is torn or is something else.
    """
    if not (folder / CAPTURE).is_file():
        reason = f"holds no whole capture (no {CAPTURE})."
        raise UserError(str(folder), reason, "Give the folder of a rank's capture.")
    parents = _read(folder / CONSTRUCT, _read_json) if (folder / CONSTRUCT).exists() else {}
    entries = _read(folder / DUMP, lambda path: [
        Entry(name, parents.get(name), {key: _read_node(node) for key, node in groups.items()})
        for name, groups in _read_json(path)["data"].items()
    ])  # fmt: skip
    samples = _read(folder / SAMPLES, _read_sums) if (folder / SAMPLES).exists() else None
    return StageDump(_read(folder / CAPTURE, lambda path: _about_from(_read_json(path))), entries, samples, folder)


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    """Return what `read` makes of a file.

    Raises:
        UserError: the file is torn, or is something else.
    """
    try:
        return read(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        reason = f"is torn, or no file of a capture ({type(error).__name__}: {error})."
        raise UserError(str(path), reason, "Capture the stage again, or give another folder.") from error


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise TypeError(f"a JSON {type(content).__name__}, not an object")
    return content


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
    shard = leaf.get("shard")
    return TensorStats(
        leaf["dtype"],
        tuple(leaf["shape"]),
        **{name: math.nan if number is None else float(number) for name, number in numbers.items()},
        **{name: leaf.get(name, unsaid) for name in _COUNTS},
        checksum=checksum,
        requires_grad=leaf.get("requires_grad", False),
        shard=None if shard is None else (shard[0], shard[1]),
    )


def _about_from(content: dict[str, Any]) -> About:
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, and {VERSION} is read")
    content["stage"] = str(Stage(content["stage"]))
    samples = content.pop("samples")
    passes = [
        Pass(one["unit"], [TokenSpan(samples[sample], *place) for sample, *place in one["spans"]])
        for one in content.pop("passes")
    ]
    return About(**content, passes=passes)


def _read_sums(path: Path) -> SampleSums:
    with np.load(path, allow_pickle=False) as arrays:
        names = bytes(arrays["names"]).decode().split("\n")
        return SampleSums(names, *(arrays[name] for name in _SUMS))


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
        raise UserError(
            str(path),
            "holds no precision capture." if path.is_dir() else "there is no such folder.",
            "Give a run with global_profiler.tool: precision_debugger, the run's global_profiler.save_path where it "
            "set one, or a folder of a step, stage or rank.",
        )
    return sorted(
        refs, key=lambda ref: (ref.step, order.index(ref.stage), ref.replica or 0, ref.call, ref.rank, ref.folder)
    )
