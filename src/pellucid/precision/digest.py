"""One number for all that a step computed: two runs whose digests are equal are bitwise equal in all that was captured.

Reads captures through `dump_files.py`; `pellucid precision digest` prints what it finds.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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

    def __str__(self) -> str:
        """Return the step's digest, then each stage's, in a line for `diff` as much as for people."""
        stages = "  ".join(f"{stage} {of}" for stage, of in self.stages.items())
        return f"step {self.step}  {self.digest}  {stages}" + ("" if self.complete else "  (cut short)")


def digest(path: Path) -> list[StepDigest]:
    """Return the digest of each captured step of a run, or of any folder that `find_dumps` takes.

    Raises:
        UserError: there are no captures there, one cannot be read, or one has tensors without a checksum.
    """
    refs_of: dict[int, list[DumpRef]] = {}
    for ref in find_dumps(path):
        refs_of.setdefault(ref.step, []).append(ref)
    return [_of_step(step, refs) for step, refs in sorted(refs_of.items())]


def _of_step(step: int, refs: list[DumpRef]) -> StepDigest:
    of_stage: dict[str, list[str]] = {}
    complete = True
    for ref in refs:
        dump = read_dump(ref.folder)
        bits = partial(_bits, ref.folder)
        own = _combined(json.dumps([entry.name, entry.groups], default=bits) for entry in dump.entries)
        of_stage.setdefault(ref.stage, []).append(f"{ref.replica} {ref.call} {ref.rank} {own}")
        complete &= dump.about.complete
    stages = {stage: _combined(members) for stage, members in of_stage.items()}
    return StepDigest(step, _combined(f"{stage} {of}" for stage, of in stages.items()), stages, complete)


def _bits(folder: Path, stats: TensorStats) -> str:
    """Return what of a tensor in an entry is part of the digest."""
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
