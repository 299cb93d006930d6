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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.errors import UserError
from pellucid.files.rundir import atomic_open, atomic_write
from pellucid.precision.dump import VERSION, About, DumpRef, Entry, Pass, SampleSums, StageDump, TensorStats
from pellucid.stages import ROLE_OF, Stage, TokenSpan

DUMP, CONSTRUCT, STACK = "dump.json", "construct.json", "stack.json"
CAPTURE, SAMPLES = "capture.json", "samples.npz"
OURS = "pellucid"
"""Key of our version in `dump.json`; msprobe's own files do not have it."""

_COUNTS = ("num_nan", "num_inf", "num_zero", "num_subnormal")
_WHOLE_NUMBERS = ("torch.int", "torch.uint", "torch.bool")
_PLACE = re.compile(r"(?:/rollout_replica(\d+))?/step_(\d+)/(\w+)/step(\d+)/rank(\d+)$")
_STEPS = "step_*/*/step*/rank*"
_BELOW = ("", "rank*", "step*/rank*", "*/step*/rank*", _STEPS, f"rollout_replica*/{_STEPS}", f"profile/{_STEPS}",
          f"profile/rollout_replica*/{_STEPS}")  # fmt: skip
"""Where captures lie below the folder of a rank, a call, a stage, a step, a replica, below `save_path` and a run."""
_AGAIN = "Capture the stage again, or give another folder."


# --- writing ---------------------------------------------------------------------------------------------------------


def write_dump(folder: Path, dump: StageDump) -> list[Path]:
    """Write a capture; an earlier one in the same folder is replaced.

    Returns:
        The files, in the order in which they were written; with the last, `capture.json`, the capture is whole.

    Raises:
        ValueError: two entries have one name, or there are sums of an entry that is not there.
        OSError: the disk is full, or the folder cannot be written to.
    """
    positions = {entry.name: index for index, entry in enumerate(dump.entries)}
    if len(positions) < len(dump.entries):
        twice = next(entry.name for index, entry in enumerate(dump.entries) if positions[entry.name] != index)
        raise ValueError(f"two entries are called '{twice}'")
    sums = None if dump.samples is None else _sum_arrays(dump.samples, positions)
    for name in (CAPTURE, SAMPLES):
        (folder / name).unlink(missing_ok=True)
    atomic_write(folder / DUMP, _dump_text(dump))
    atomic_write(folder / CONSTRUCT, _a_key_a_line(_parents(dump.entries)))
    atomic_write(folder / STACK, _a_key_a_line(_stacks(dump.entries)))
    files = [folder / DUMP, folder / CONSTRUCT, folder / STACK]
    if sums is not None:
        with atomic_open(folder / SAMPLES) as handle:
            np.savez(handle, allow_pickle=False, **sums)
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
    head = {
        "task": "statistics",
        "level": dump.about.level,
        "framework": "pytorch",
        "dump_data_dir": None,
        OURS: VERSION,
    }
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
    if node is None:
        return None
    value = node if isinstance(node, bool | int | float | str) else str(node)
    return {"type": type(node).__name__, "value": value}


def _written_tensor(stats: TensorStats) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": "torch.Tensor", "dtype": stats.dtype, "shape": stats.shape}
    leaf |= {"Max": stats.max, "Min": stats.min, "Mean": stats.mean, "Norm": stats.norm}
    whole = stats.dtype.startswith(_WHOLE_NUMBERS)
    if whole or 0 in stats.shape:  # NaN is a value only of floats
        leaf |= {name: None for name in ("Max", "Min", "Mean", "Norm") if math.isnan(leaf[name])}
    if whole:
        kind = bool if stats.dtype == "torch.bool" else int
        leaf |= {name: kind(leaf[name]) for name in ("Max", "Min") if leaf[name] is not None}
    leaf["requires_grad"] = stats.requires_grad
    unsaid = None if stats.checksum is None else 0  # where elements are counted, most counts are 0
    counts = (stats.num_nan, stats.num_inf, stats.num_zero, stats.num_subnormal)
    leaf |= {name: count for name, count in zip(_COUNTS, counts) if count != unsaid}
    if stats.checksum is not None:
        leaf["checksum"] = stats.checksum
    if stats.shard is not None:
        leaf["shard"] = stats.shard
    return leaf


def _parents(entries: Iterable[Entry]) -> dict[str, str | None]:
    """Return the content of `construct.json`, as with msprobe without gradients of parameters, which have no parent."""
    return {
        entry.name: entry.parent
        for entry in entries
        if entry.parent is not None or ".parameters_grad." not in f"{entry.name}."
    }


def _stacks(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the content of `stack.json`: every stack once, with the entries that it led to."""
    names: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if entry.stack:
            names.setdefault(entry.stack, []).append(entry.name)
    return {str(number): [of, stack] for number, (stack, of) in enumerate(names.items())}


def _sum_arrays(sums: SampleSums, positions: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the arrays of `samples.npz`: a name as the position of its entry and the number of its path."""
    split = [name.rpartition("|") for name in sums.names]
    unknown = next((entry for entry, _, _ in split if entry not in positions), None)
    if unknown is not None:
        raise ValueError(f"there are sums of '{unknown}', and no such entry")
    paths = {path: number for number, path in enumerate(dict.fromkeys(path for _, _, path in split))}
    bad = np.flatnonzero(sums.num_bad)
    return {
        "entry": np.array([positions[entry] for entry, _, _ in split], np.int32),
        "path": np.array([paths[path] for _, _, path in split], np.int32),
        "paths": np.array(list(paths), np.str_),
        "pass_index": sums.pass_index,
        "first": sums.first,
        "sum": sums.sum,
        "square_sum": sums.square_sum,
        "bad": bad,
        "num_bad": sums.num_bad[bad],
    }


# --- reading ---------------------------------------------------------------------------------------------------------


def read_dump(folder: Path) -> StageDump:
    """Read a capture, or one that msprobe itself wrote.

    Without `capture.json`, `about` is what the path says. Of msprobe's tensors nothing is counted, and a checksum is
    there only if its `summary_mode` was `md5`.

    Raises:
        UserError: the folder holds no capture, a file is torn or is something else, or neither file nor path says
            whose it is.
    """
    if not (folder / DUMP).is_file():
        raise UserError(str(folder), f"holds no precision capture (no {DUMP}).", "Give the folder of a rank's capture.")
    head, data = _read(folder / DUMP, lambda path: _read_head(_read_json(path)))
    parents = _read(folder / CONSTRUCT, _read_json) if (folder / CONSTRUCT).exists() else {}
    stacks = _read(folder / STACK, lambda path: _stack_of(_read_json(path))) if (folder / STACK).exists() else {}
    entries = _read(folder / DUMP, lambda _: [
        Entry(name, parents.get(name), {key: _read_node(node) for key, node in groups.items()}, stacks.get(name, ()))
        for name, groups in data.items()
    ])  # fmt: skip
    about = read_about(folder) if (folder / CAPTURE).exists() else _about_from_path(folder, head)
    samples = _read(folder / SAMPLES, lambda path: _read_sums(path, entries)) if (folder / SAMPLES).exists() else None
    return StageDump(about, entries, samples, folder)


def read_about(folder: Path) -> About:
    """Read `capture.json`.

    Raises:
        UserError: it is torn, or is something else.
    """
    return _read(folder / CAPTURE, lambda path: _about_from(_read_json(path)))


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    """Return what `read` makes of a file.

    Raises:
        UserError: the file is torn, or is something else.
    """
    try:
        return read(path)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(str(path), f"is torn, or no file of a precision capture ({why}).", _AGAIN) from error
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror or error}).", _AGAIN) from error


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise TypeError(f"a JSON {type(content).__name__}, not an object")
    return content


def _read_head(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return content, content.pop("data")


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
    shard = leaf.get("shard")
    return TensorStats(
        dtype=leaf["dtype"],
        shape=tuple(leaf["shape"]),
        min=_number(leaf.get("Min")),
        max=_number(leaf.get("Max")),
        mean=_number(leaf.get("Mean")),
        norm=_number(leaf.get("Norm")),
        num_nan=leaf.get("num_nan", unsaid),
        num_inf=leaf.get("num_inf", unsaid),
        num_zero=leaf.get("num_zero", unsaid),
        num_subnormal=leaf.get("num_subnormal", unsaid),
        checksum=checksum,
        requires_grad=leaf.get("requires_grad", False),
        shard=None if shard is None else (shard[0], shard[1]),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _stack_of(content: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return each entry's stack."""
    return {name: stack for names, frames in content.values() for stack in [tuple(frames)] for name in names}


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


def _about_from_path(folder: Path, head: dict[str, Any]) -> About:
    """Return what the path says of a capture that says nothing itself: msprobe's, or one of ours that was cut short."""
    ref = _ref_from_path(folder)
    if ref is None:
        raise UserError(
            str(folder),
            f"has no {CAPTURE}, and its path does not say of which step, stage and rank it is.",
            "Keep captures in folders step_<N>/<stage>/step<k>/rank<R>.",
        )
    ours = OURS in head
    return About(
        backend="native" if ours else "msprobe",
        level=head.get("level", ""),
        stage=ref.stage,
        step=ref.step,
        role=ROLE_OF.get(Stage(ref.stage), ""),
        call=ref.call,
        rank=ref.rank,
        num_ranks=len(list(folder.resolve().parent.glob("rank*"))),
        complete=not ours,
        error=f"{CAPTURE} is missing: the process ended while it wrote" if ours else None,
    )


def _read_sums(path: Path, entries: list[Entry]) -> SampleSums:
    with np.load(path, allow_pickle=False) as arrays:
        num_bad = np.zeros(len(arrays["sum"]), np.int64)
        num_bad[arrays["bad"]] = arrays["num_bad"]
        paths = arrays["paths"].tolist()
        names = [f"{entries[index].name}|{paths[number]}" for index, number in zip(arrays["entry"], arrays["path"])]
        return SampleSums(names, arrays["pass_index"], arrays["first"], arrays["sum"], arrays["square_sum"], num_bad)


# --- finding ---------------------------------------------------------------------------------------------------------


def find_dumps(path: Path) -> list[DumpRef]:
    """Return the captures below a run, a `save_path`, a step, a stage or a rank, in order of step and stage.

    Raises:
        UserError: there are none.
    """
    if not path.is_dir():
        raise UserError(str(path), "there is no such folder.", "Give a run's folder, or one of its captures.")
    folders = {file.parent.resolve() for below in _BELOW for file in path.glob(f"{below}/{DUMP}".lstrip("/"))}
    if not folders:
        raise UserError(
            str(path),
            "holds no precision capture.",
            "Give a run with global_profiler.tool: precision_debugger, the run's global_profiler.save_path where it "
            "set one, or a folder of a step, stage or rank.",
        )
    refs = [_ref_from_path(folder) or _ref_from_about(folder) for folder in folders]
    order = [str(stage) for stage in Stage]
    return sorted(
        refs, key=lambda ref: (ref.step, order.index(ref.stage), ref.replica or 0, ref.call, ref.rank, ref.folder)
    )


def _ref_from_path(folder: Path) -> DumpRef | None:
    folder = folder.resolve()
    place = _PLACE.search(folder.as_posix())
    if place is None or place[3] not in list(Stage):
        return None
    replica, step, stage, call, rank = place.groups()
    return DumpRef(int(step), stage, int(call), int(rank), None if replica is None else int(replica), folder)


def _ref_from_about(folder: Path) -> DumpRef:
    """Return which capture one is that was moved elsewhere."""
    about = read_dump(folder).about if not (folder / CAPTURE).exists() else read_about(folder)
    return DumpRef(about.step, about.stage, about.call, about.rank, None, folder)
