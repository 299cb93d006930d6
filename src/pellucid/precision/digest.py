"""One number for all that a step computed: two runs whose digests are equal are bitwise equal in all that was captured.

Reads the files of captures; `pellucid precision digest` prints what it finds.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from pellucid.errors import UserError
from pellucid.precision.dump import CAPTURE, DUMP, find_dumps

_ADDED_UP = re.compile(rb'"(Max|Min|Mean|Norm)": ?[^,]+,')
"""Statistics that follow from the values: their last bits depend on what added them up, and checksums tell all."""


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
        UserError: there are no captures there, or one has tensors without a checksum.
    """
    of_step: dict[int, dict[str, list[str]]] = {}
    cut_short: set[int] = set()
    for ref in find_dumps(path):
        text, about = (ref.folder / DUMP).read_bytes(), json.loads((ref.folder / CAPTURE).read_bytes())
        if about["backend"] == "msprobe" and b'"md5"' not in text:
            reason = "has tensors without a checksum; of msprobe's captures only those in its md5 mode have them."
            remedy = 'Capture with backend: native, or set "summary_mode": "md5" in the statistics section of its JSON.'
            raise UserError(str(ref.folder), reason, remedy)
        own = f"{ref.replica} {ref.call} {ref.rank} {_hash(_ADDED_UP.sub(b'', text))}"
        of_step.setdefault(ref.step, {}).setdefault(ref.stage, []).append(own)
        cut_short |= set() if about["complete"] else {ref.step}
    digests = []
    for step, captures in sorted(of_step.items()):
        stages = {stage: _hash("\n".join(members).encode()) for stage, members in captures.items()}
        digests.append(StepDigest(step, _hash(repr(stages).encode()), stages, step not in cut_short))
    return digests


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
