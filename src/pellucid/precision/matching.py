"""Which captures are compared, of the same step, stage and rank or of all ranks together, and which of their tokens.

From what `find_dumps` found on both sides to pairs, in the order in which they ran.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from pellucid.errors import UserError
from pellucid.precision.capture_table import Capture
from pellucid.precision.dump import DumpRef, StageDump, find_dumps, read_dump
from pellucid.stages import Stage

_STAGES = list(map(str, Stage))
_SAMPLE = re.compile(r" sample \d+$")


@dataclass(frozen=True, slots=True)
class Place:
    """Which captures are compared; texts name both sides where B's is another: `step 1/2`."""

    step: int
    """Of A, as the stage."""
    stage: str
    call: int
    moment: str
    """`step 3, actor_update`."""
    rank: str
    """`rank 1`, `replica 0 rank 1`, `all ranks`."""

    @property
    def order(self) -> tuple[int, int, int]:
        """The key that sorts places as they run."""
        return self.step, _STAGES.index(self.stage), self.call

    @property
    def where(self) -> str:
        """`step 3, actor_update, rank 0`."""
        return f"{self.moment}, {self.rank}"


def place_of(a: DumpRef, b: DumpRef, *, all_ranks: bool = False) -> Place:
    """Return the place of a capture of A and its partner, or of those of all ranks."""
    both = ((a.step, b.step), (a.stage, b.stage), (a.rank_name, b.rank_name))
    step, stage, rank = (str(one) if one == other else f"{one}/{other}" for one, other in both)
    moment = f"step {step}, {stage}" + (f", capture {a.call + 1}" if a.call else "")
    return Place(a.step, a.stage, a.call, moment, "all ranks" if all_ranks else rank)


def captures(
    path: Path, step: int | None = None, stage: str | None = None, rank: int | None = None
) -> list[DumpRef]:
    """Return the captures below a path that are of a step, a stage and a rank; None takes all.

    Raises:
        UserError: there are none, or none of that step, stage or rank.
    """
    refs = find_dumps(path)
    for name, wanted in (("step", step), ("stage", stage), ("rank", rank)):
        there = dict.fromkeys(map(attrgetter(name), refs))
        if wanted is not None and wanted not in there:
            reason = f"'{path}' has no capture of {name} {wanted}."
            raise UserError(f"--{name}", reason, f"It has: {', '.join(map(str, there))}.")
    return [ref for ref in refs if step in (None, ref.step) and stage in (None, ref.stage) and rank in (None, ref.rank)]


def read_captures(refs: Sequence[DumpRef]) -> list[Capture]:
    """Read the captures of one side."""
    return [Capture(ref.rank_name, read_dump(ref.folder)) for ref in refs]


def pairs_of(
    a: Sequence[DumpRef], b: Sequence[DumpRef], *, by_sample: bool
) -> tuple[list[tuple[Place, list[DumpRef], list[DumpRef]]], list[str]]:
    """Pair captures of the same step, stage, call, rank and replica; by sample those of all ranks together.

    Where each side has but one step, stage or rank, these may differ: two steps of a run, actor against reference.

    Returns:
        What is compared with what, in the order in which it ran, and a line for each side on what has no partner.

    Raises:
        UserError: nothing pairs.
    """
    names = ["step", "stage", "call"] + ([] if by_sample else ["rank", "replica"])
    names = [name for name in names if not all(len({getattr(ref, name) for ref in side}) == 1 for side in (a, b))]
    groups: list[dict[tuple[object, ...], list[DumpRef]]] = [{}, {}]
    for group, side in zip(groups, (a, b)):
        for ref in side:
            group.setdefault(tuple(getattr(ref, name) for name in names), []).append(ref)
    pairs = [
        (place_of(mine[0], groups[1][key][0], all_ranks=by_sample), mine, groups[1][key])
        for key, mine in groups[0].items()
        if key in groups[1]
    ]
    if not pairs:
        reason = f"no capture of A has a partner in B.\nA holds {_contents(a)}\nB holds {_contents(b)}"
        raise UserError("A, B", reason, "Give two folders with the same steps and stages, or a step folder of each.")
    alone = [[ref for key in of.keys() - other.keys() for ref in of[key]] for of, other in (groups, groups[::-1])]
    missing = [f"only in {side}: {_contents(refs)}" for side, refs in zip("AB", alone) if refs]
    return sorted(pairs, key=lambda pair: pair[0].order), missing


def trainer_and_rollout(refs: Sequence[DumpRef], stage: str | None) -> tuple[list[DumpRef], list[DumpRef]]:
    """Choose the training stage that runs the rollout's tokens, and the rollout, in the steps that have both.

    Where `stage` is None, it is actor_compute_log_prob if that was captured, else actor_update.

    Raises:
        UserError: no step has both.
    """
    stages = [stage] if stage else [str(Stage.ACTOR_COMPUTE_LOG_PROB), str(Stage.ACTOR_UPDATE)]
    for name in stages:
        sides = [[ref for ref in refs if ref.call == 0 and ref.stage == of] for of in (name, Stage.ROLLOUT_GENERATE)]
        steps = {ref.step for ref in sides[0]} & {ref.step for ref in sides[1]}
        if steps and name != Stage.ROLLOUT_GENERATE:
            return [ref for ref in sides[0] if ref.step in steps], [ref for ref in sides[1] if ref.step in steps]
    raise UserError(
        "--rollout",
        f"{' or '.join(stages)} and, to compare it with, rollout_generate were not both captured; there is "
        f"{_contents(refs)}.",
        "Enable the profiler of the actor and of the rollout, and list both in precision_debugger.stages or none.",
    )


def _contents(refs: Sequence[DumpRef]) -> str:
    """Return the steps, stages and ranks of captures."""
    steps, ranks = (", ".join(map(str, sorted({getattr(ref, name) for ref in refs}))) for name in ("step", "rank"))
    stages = ", ".join(sorted({ref.stage for ref in refs}, key=_STAGES.index))
    return f"step {steps}; {stages}; rank {ranks}"


def tokens_of_passes(dump: StageDump, other: StageDump) -> list[str | None]:
    """Return whose tokens the spans of a capture hold, for passes that hold the same in the other."""
    others = [one.spans for one in other.about.passes]
    return [
        f"{span.sample} ({span.part})" if others[number : number + 1] == [one.spans] else None
        for number, one in enumerate(dump.about.passes)
        for span in one.spans
    ]


def tokens_of_samples(captures: Sequence[Capture]) -> dict[str, set[int]]:
    """Set whose tokens the spans of captures hold, each token once, and return the positions that there are of each.

    A prompt, which all samples of a group share, goes by its uid. Tokens that another span has shown are left out: a
    prompt in two micro-batches, or a filler; so are, in an update, those of passes after the first optimizer step.
    """
    spans = []
    for number, capture in enumerate(captures):
        about = capture.dump.about
        capture.tokens = [None] * len(about.spans)
        last = about.passes[about.mini_batches[1] :] if len(about.mini_batches) > 1 else []
        before = about.spans[: len(about.spans) - sum(len(one.spans) for one in last)]
        spans += [(-span.length, number, at, span) for at, span in enumerate(before)]
    positions: dict[str, set[int]] = {}
    for _, number, at, span in sorted(spans, key=lambda one: one[:3]):
        whose = _SAMPLE.sub("", span.sample) if span.part == "prompt" else span.sample
        seen = positions.setdefault(f"{whose} ({span.part})", set())
        tokens = range(span.position, span.position + span.length)
        if tokens and seen.isdisjoint(tokens):
            seen.update(tokens)
            captures[number].tokens[at] = f"{whose} ({span.part})"
    return {name: tokens for name, tokens in positions.items() if tokens}
