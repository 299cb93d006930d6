"""Where NaN or Inf first appeared, as data, and the sentence that people read.

`first_bad` reads it off captures of the passes when a stage is repeated, at once in the run or later in a replay; ranks
send theirs to the controller, and `finding.json` keeps the earliest. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pellucid.precision.dump import DumpRef, StageDump

Direction = Literal["forward", "backward", "optimizer"]
HEAD, LOSS, BATCH = "the head", "the loss", "the batch"
_MAX_SHOWN = 4
_NOT_FOUND_AGAIN = (
    "the same passes, repeated at once, gave finite numbers in every module: what is made of those overflows (a sum, a "
    "norm, a softmax), or it is not reproducible (failing hardware, or a race)"
)


@dataclass(slots=True)
class Finding:
    """The first place of a pass at which a value is not finite."""

    place: str
    """A module's name in the model (`model.layers.3.mlp.down_proj`), a parameter's, or `the loss`."""
    kind: str
    """The module's class; empty for what is no module."""
    direction: Direction
    what: str
    """`NaN`, `Inf` or `NaN and Inf`."""
    cause: str
    """A clause on what is and what is not in order there: why it is this place."""
    tensor: str = ""
    """Which tensor, and how many of its values, e.g. `output.0: 3 NaN of 1,536 values`."""
    samples: list[str] = field(default_factory=list)
    """Whose tokens they belong to, e.g. `<uid> sample <n> (response)`; empty where the tensor has no token axis."""
    unit: str = ""
    """What the pass is: `micro-batch`, `prefill` or `decode step`; empty outside of passes."""
    index: int = 0
    """The pass's number among those of its kind, from 1."""
    order: tuple[int, int] = (0, 0)
    """Number of the pass, and place in it: smaller is earlier, also between ranks that run the same stage."""
    reproduced: bool = True
    """False where repeating the same passes gave finite numbers, or they could not be captured."""
    stage: str = ""
    step: int = 0
    rank: int = 0
    num_ranks: int = 1

    def sentence(self) -> str:
        """Return all of it in one sentence."""
        at = [f"{self.place} ({self.kind})" if self.kind else self.place, self.direction]
        if self.stage:
            at.append(f"of {self.stage}, step {self.step}")
        if self.num_ranks > 1:
            at.append(f"rank {self.rank}")
        if self.unit:
            at.append(f"{self.unit} {self.index}")
        at += [f"sample '{sample}'" for sample in self.samples[:_MAX_SHOWN]]
        if len(self.samples) > _MAX_SHOWN:
            at.append(f"and {len(self.samples) - _MAX_SHOWN} more")
        tensor = f" At {self.tensor}." if self.tensor else ""
        return f"{self.what} {'first ' if self.reproduced else ''}in {', '.join(at)}; {self.cause}.{tensor}"

    def as_json(self) -> dict[str, Any]:
        """Return what `finding.json` holds: the fields, and the sentence."""
        return {"sentence": self.sentence(), **asdict(self)}


def not_found_again(place: str, kind: str, what: str, direction: Direction = "forward") -> Finding:
    """Return the finding of a failure that no repetition has explained."""
    return Finding(place, kind, direction, what, _NOT_FOUND_AGAIN, reproduced=False)


def first_bad(dump: StageDump) -> Finding | None:
    """Return the first NaN or Inf of a capture in execution order, or None."""
    # Every run has findings' types at hand, and few ever read a capture.
    from pellucid.precision.compare import check_stage
    from pellucid.precision.divergence import REASONS, Kind
    from pellucid.precision.matching import place_of

    about = dump.about
    ref = DumpRef(about.step, about.stage, about.call, about.rank, None, Path())
    if (found := check_stage(place_of(ref, ref), dump).divergence) is None:
        return None
    place, kind = {"scores": HEAD, "loss": LOSS}.get(found.module, found.module), found.module_class
    if found.kind in (Kind.INPUTS, Kind.LOSS):
        place, kind = BATCH if found.kind is Kind.INPUTS else LOSS, ""
    counts, direction = found.what.partition(" of ")[0], cast(Direction, found.direction)
    kinds = " and ".join(name for name in ("NaN", "Inf") if name in counts)
    cause = REASONS[found.kind].format(clean="finite", seen_at=found.seen_at)
    tensor, order = f"{found.path}: {found.what}", (0, found.position)
    return Finding(place, kind, direction, kinds, cause, tensor, found.samples, order=order)


def earliest(findings: Iterable[Finding | None]) -> Finding | None:
    """Return the earliest of the ranks' findings, and of equals the lowest rank's; reproduced ones come first."""
    found = [finding for finding in findings if finding is not None]
    return min(found, key=lambda one: (not one.reproduced, not one.index, one.order, one.rank), default=None)
