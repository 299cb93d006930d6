"""One number for all that a step computed: two runs whose digests are equal are bitwise equal in all that was captured.

Reads captures through `dump_files.py`; `pellucid precision digest` prints what it finds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.precision.dump import DumpRef, TensorStats, leaves
from pellucid.precision.dump_files import find_dumps, read_dump


@dataclass(frozen=True, slots=True)
class CaptureDigest:
    """Of one capture of a stage on one rank."""

    ref: DumpRef
    digest: str
    """16 hex digits over entries in execution order: names, and each tensor's shape, dtype and checksum; no times, no paths."""
    num_tensors: int
    complete: bool
    """False: the capture was cut short, and the digest is of what there is."""


@dataclass(frozen=True, slots=True)
class StepDigest:
    """Of all captures of a step."""

    step: int
    digest: str
    """16 hex digits."""
    stages: dict[str, str]
    """Of each stage: its digest over all calls, replicas and ranks; in the order of a step."""
    captures: list[CaptureDigest]

    @property
    def complete(self) -> bool:
        """Whether no capture was cut short."""
        return all(capture.complete for capture in self.captures)


def digest(path: Path) -> list[StepDigest]:
    """Return the digest of each captured step of a run, or of any folder that `find_dumps` takes.

    Raises:
        UserError: there are no captures there, one cannot be read, or one has tensors without a checksum.
    """
    steps: dict[int, list[CaptureDigest]] = {}
    for ref in find_dumps(path):
        steps.setdefault(ref.step, []).append(_of_capture(ref))
    return [_of_step(step, captures) for step, captures in sorted(steps.items())]


def render(steps: Iterable[StepDigest]) -> str:
    """Return a line a step: the step's digest, then each stage's; for `diff` as much as for people."""
    lines = []
    for step in steps:
        stages = "  ".join(f"{stage} {of}" for stage, of in step.stages.items())
        lines.append(f"step {step.step}  {step.digest}  {stages}" + ("" if step.complete else "  (cut short)"))
    return "\n".join(lines)


def _of_capture(ref: DumpRef) -> CaptureDigest:
    dump = read_dump(ref.folder)
    combined = _combined(text for entry in dump.entries for text in (entry.name, *_texts(entry.groups, ref.folder)))
    num_tensors = sum(1 for entry in dump.entries for _ in leaves(entry))
    return CaptureDigest(ref, combined, num_tensors, dump.about.complete)


def _texts(node: Any, folder: Path) -> Iterator[str]:
    """Yield what a node of an entry's groups adds to the digest; of nested ones their length too, so that none looks like another."""
    if isinstance(node, TensorStats):
        yield _of_tensor(node, folder)
    elif isinstance(node, dict | list):
        yield f"{type(node).__name__} of {len(node)}"
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield str(key)
            yield from _texts(value, folder)
    else:
        yield repr(node)


def _of_tensor(stats: TensorStats, folder: Path) -> str:
    if stats.checksum is None and math.prod(stats.shape) > 0:
        raise UserError(
            str(folder),
            "has tensors without a checksum; of msprobe's captures only those in its md5 mode have them.",
            'Capture with backend: native, or set "summary_mode": "md5" in the statistics section of msprobe\'s JSON.',
        )
    return f"{stats.dtype}{list(stats.shape)}{stats.checksum}{stats.shard}"


def _of_step(step: int, captures: list[CaptureDigest]) -> StepDigest:
    of_stage: dict[str, list[CaptureDigest]] = {}
    for capture in captures:
        of_stage.setdefault(capture.ref.stage, []).append(capture)
    stages = {
        stage: _combined(f"{of.ref.replica} {of.ref.call} {of.ref.rank} {of.digest}" for of in members)
        for stage, members in of_stage.items()
    }
    return StepDigest(step, _combined(f"{stage} {of}" for stage, of in stages.items()), stages, captures)


def _combined(parts: Iterable[str]) -> str:
    """Return 16 hex digits over texts, in their order."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(f"{part}\n".encode())
    return hasher.hexdigest()
