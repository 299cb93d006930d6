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
from pellucid.precision.dump import DumpRef, TensorStats
from pellucid.precision.dump_files import find_dumps, read_dump


@dataclass(frozen=True, slots=True)
class StepDigest:
    """What all captures of a step come to."""

    step: int
    digest: str
    """16 hex digits over entries in execution order: names, and each tensor's shape, dtype and checksum."""
    stages: dict[str, str]
    """The digest of each stage over all calls, replicas and ranks; in the order of a step."""
    complete: bool
    """False where a capture was cut short: the digest is of what there is."""


def digest(path: Path) -> list[StepDigest]:
    """Return the digest of each captured step of a run, or of any folder that `find_dumps` takes.

    Raises:
        UserError: there are no captures there, one cannot be read, or one has tensors without a checksum.
    """
    refs_of: dict[int, list[DumpRef]] = {}
    for ref in find_dumps(path):
        refs_of.setdefault(ref.step, []).append(ref)
    return [_of_step(step, refs) for step, refs in sorted(refs_of.items())]


def render(steps: Iterable[StepDigest]) -> str:
    """Return a line a step: the step's digest, then each stage's; for `diff` as much as for people."""
    lines = []
    for step in steps:
        stages = "  ".join(f"{stage} {of}" for stage, of in step.stages.items())
        lines.append(f"step {step.step}  {step.digest}  {stages}" + ("" if step.complete else "  (cut short)"))
    return "\n".join(lines)


def _of_step(step: int, refs: list[DumpRef]) -> StepDigest:
    of_stage: dict[str, list[str]] = {}
    complete = True
    for ref in refs:
        dump = read_dump(ref.folder)
        texts = (text for entry in dump.entries for text in (entry.name, *_texts(entry.groups, ref.folder)))
        of_stage.setdefault(ref.stage, []).append(f"{ref.replica} {ref.call} {ref.rank} {_combined(texts)}")
        complete &= dump.about.complete
    stages = {stage: _combined(members) for stage, members in of_stage.items()}
    return StepDigest(step, _combined(f"{stage} {of}" for stage, of in stages.items()), stages, complete)


def _texts(node: Any, folder: Path) -> Iterator[str]:
    """Yield what a node of an entry's groups adds to the digest; nested ones add their length, to tell them apart."""
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


def _combined(parts: Iterable[str]) -> str:
    """Return 16 hex digits over texts, in their order."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(f"{part}\n".encode())
    return hasher.hexdigest()
