"""Which captures are compared: of the same step, stage and rank, of all ranks together, or trainer against rollout.

From what `find_dumps` found on both sides to pairs, each at a `Place`, in the order in which they ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.errors import UserError
from pellucid.precision.dump import DumpRef, StageDump
from pellucid.stages import Stage

_STAGE_ORDER = {stage.value: index for index, stage in enumerate(Stage)}


@dataclass(frozen=True, slots=True)
class Place:
    """Which captures are compared; what ends in `_b` is B's."""

    step: int
    step_b: int
    stage: str
    stage_b: str
    call: int
    rank: int | None
    """None stands for all ranks together."""
    rank_b: int | None
    replica: int | None

    @property
    def order(self) -> tuple[int, int, int]:
        """The key that sorts places as they run."""
        return self.step, _STAGE_ORDER.get(self.stage, len(_STAGE_ORDER)), self.call

    @property
    def rank_name(self) -> str:
        """`rank 1`, `replica 0 rank 1`, `all ranks`."""
        if self.rank is None:
            return "all ranks"
        rank = f"rank {self.rank}" if self.rank == self.rank_b else f"rank {self.rank}/{self.rank_b}"
        return rank if self.replica is None else f"replica {self.replica} {rank}"

    @property
    def stage_name(self) -> str:
        """`actor_update`, or both stages where they differ."""
        return self.stage if self.stage == self.stage_b else f"{self.stage}/{self.stage_b}"

    @property
    def step_name(self) -> str:
        """`3`, or both steps where they differ."""
        return str(self.step) if self.step == self.step_b else f"{self.step}/{self.step_b}"

    @property
    def moment(self) -> str:
        """`step 3, actor_update`."""
        return f"step {self.step_name}, {self.stage_name}" + (f", capture {self.call + 1}" if self.call else "")


def place_of(a: StageDump, b: StageDump) -> Place:
    """Return the place that two captures say of themselves."""
    one, other = a.about, b.about
    return Place(one.step, other.step, one.stage, other.stage, one.call, one.rank, other.rank, None)


def place_of_ref(ref: DumpRef, other: DumpRef | None = None) -> Place:
    """Return the place of a capture, and of its partner where it has one."""
    other = other or ref
    return Place(ref.step, other.step, ref.stage, other.stage, ref.call, ref.rank, other.rank, ref.replica)


def match(a: Sequence[DumpRef], b: Sequence[DumpRef]) -> tuple[list[tuple[Place, DumpRef, DumpRef]], list[str]]:
    """Pair captures of the same step, stage, call, rank and replica.

    Where each side has but one step, stage or rank, these may differ: two steps of a run, actor against reference.

    Returns:
        The pairs in the order in which they ran, and a line for each side on what has no partner.

    Raises:
        UserError: nothing pairs.
    """

    def aspects(ref: DumpRef) -> list[object]:
        return [ref.step, ref.stage, ref.call, ref.rank, ref.replica]

    single = [len({aspects(ref)[i] for ref in a}) == 1 == len({aspects(ref)[i] for ref in b}) for i in range(5)]

    def key(ref: DumpRef) -> tuple[object, ...]:
        return tuple(None if alone else value for alone, value in zip(single, aspects(ref)))

    by_key = {key(ref): ref for ref in b}
    pairs = [(place_of_ref(ref, by_key[key(ref)]), ref, by_key[key(ref)]) for ref in a if key(ref) in by_key]
    if not pairs:
        raise UserError(
            "A, B",
            f"no capture of A has a partner in B.\nA holds {_contents(a)}\nB holds {_contents(b)}",
            "Give two folders with the same steps and stages, or a step folder of each.",
        )
    missing = _without_partner(a, b, {id(ref) for _, *both in pairs for ref in both})
    return sorted(pairs, key=lambda pair: (*pair[0].order, pair[0].replica or 0, pair[0].rank or 0)), missing


Match = tuple[Place, list[DumpRef], list[DumpRef]]
"""A stage, and the captures of all ranks of A and of B."""


def trainer_and_rollout(refs: Sequence[DumpRef], step: int | None, stage: str | None) -> tuple[list[Match], list[str]]:
    """Choose of each step the training stage that runs the rollout's tokens with the same weights, and the rollout.

    Args:
        refs: of a run.
        step: which; None takes all that have both.
        stage: the training stage; None takes actor_compute_log_prob where it was captured, else actor_update.

    Returns:
        The pairs in the order of the steps, and notes on the steps that have not both.

    Raises:
        UserError: no step has both, or the stage is the rollout itself.
    """
    if stage == Stage.ROLLOUT_GENERATE:
        raise UserError(
            "--stage",
            f"--rollout compares a training stage with {stage}, not {stage} with itself.",
            "Name a training stage.",
        )
    found: list[Match] = []
    without: list[int] = []
    stages = [stage] if stage else [str(Stage.ACTOR_COMPUTE_LOG_PROB), str(Stage.ACTOR_UPDATE)]
    for number in [step] if step is not None else sorted({ref.step for ref in refs}):
        here = [ref for ref in refs if ref.step == number and ref.call == 0]
        rollout = [ref for ref in here if ref.stage == Stage.ROLLOUT_GENERATE]
        name = next((name for name in stages if any(ref.stage == name for ref in here)), None)
        if not rollout or name is None:
            without.append(number)
            continue
        place = Place(number, number, name, str(Stage.ROLLOUT_GENERATE), 0, None, None, None)
        found.append((place, [ref for ref in here if ref.stage == name], rollout))
    names = " or ".join(stages)
    if found:
        steps = ", ".join(map(str, without))
        return found, [f"step {steps}: {names} and rollout_generate were not both captured"] if without else []
    raise UserError(
        "--rollout",
        f"{names} and rollout_generate were not both captured in {f'step {step}' if step is not None else 'any step'}.",
        "Enable the profiler of the actor and of the rollout, and list both in precision_debugger.stages or none.",
    )


def same_stages(a: Sequence[DumpRef], b: Sequence[DumpRef]) -> tuple[list[Match], list[str]]:
    """Pair the captures of all ranks stage by stage; where each side has but one step, these may differ.

    Returns:
        The pairs in the order in which they ran, and a line for each side on what has no partner.

    Raises:
        UserError: no stage is in both.
    """
    steps = [sorted({ref.step for ref in side}) for side in (a, b)]
    alone = len(steps[0]) == len(steps[1]) == 1
    found: list[Match] = []
    for step, stage, call in sorted({(ref.step, ref.stage, ref.call) for ref in a}):
        step_b = steps[1][0] if alone else step
        mine = [ref for ref in a if (ref.step, ref.stage, ref.call) == (step, stage, call)]
        theirs = [ref for ref in b if (ref.step, ref.stage, ref.call) == (step_b, stage, call)]
        if theirs:
            found.append((Place(step, step_b, stage, stage, call, None, None, None), mine, theirs))
    if not found:
        raise UserError(
            "--by-sample", "no stage was captured in the same step of both.", "Give two runs, or a step folder of each."
        )
    missing = _without_partner(a, b, {id(ref) for _, mine, theirs in found for ref in (*mine, *theirs)})
    return sorted(found, key=lambda one: one[0].order), missing


def _without_partner(a: Sequence[DumpRef], b: Sequence[DumpRef], paired: set[int]) -> list[str]:
    """Return a line on the captures of each side that have no partner; none where all have one."""
    sides = [(side, [ref for ref in refs if id(ref) not in paired]) for side, refs in (("A", a), ("B", b))]
    return [f"only in {side}: {_contents(refs)}" for side, refs in sides if refs]


def _contents(refs: Sequence[DumpRef]) -> str:
    if not refs:
        return "nothing"
    steps = sorted({ref.step for ref in refs})
    shown = ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")
    stages = ", ".join(sorted({ref.stage for ref in refs}, key=lambda stage: _STAGE_ORDER.get(stage, 99)))
    ranks = ", ".join(map(str, sorted({ref.rank for ref in refs})))
    return f"step {shown}; {stages}; rank {ranks}"
