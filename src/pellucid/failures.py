"""What a stage leaves in `<run>/failures/step_N` when NaN or Inf ends it, for `pellucid precision replay`.

    failure.json           stage, step, mini-batch; what was to be sampled
    finding.json           where it began, with trainer.nan_sentinel
    rollouts.jsonl.zst     the samples
    batch.safetensors      their [B, …] tensors
    weights/               the role's, as of the failure
    config.yaml            the run's

`replay.py` writes it when a stage of a run fails, and reads it to run that stage again.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pellucid.console import notice
from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError, UserError
from pellucid.files.rollout_dump import read_rollouts, write_rollouts
from pellucid.files.rundir import atomic_write
from pellucid.ranks.rank_failures import RankFailedError
from pellucid.rollout.requests import SamplingParams
from pellucid.stages import ROLE_OF, Stage
from pellucid.types import Experience, MiniBatch, Prompt, RewardFailure, Rollout, Samples, Score, TrainBatch, Turn

if TYPE_CHECKING:
    from pellucid.config import RunConfig
    from pellucid.files.rundir import RunDir
    from pellucid.precision.sentinel import Finding
    from pellucid.ranks import Placement
    from pellucid.training.common.models import TokenPieces

FAILURE, FINDING, ROLLOUTS, TENSORS, WEIGHTS, CONFIG = (
    "failure.json", "finding.json", "rollouts.jsonl.zst", "batch.safetensors", "weights", "config.yaml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What was asked of a rollout engine."""

    prompts: list[Prompt]
    params: SamplingParams
    stream: tuple[str | int, ...]


Given = Samples | list[Rollout] | GenerateCall
"""What a stage works on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A stage that NaN or Inf ended."""

    stage: Stage
    step: int
    quantity: str
    """What was not finite."""
    mini_batch: MiniBatch | None
    """The optimizer step, in an update."""
    given: Given | None
    """What the stage worked on; None where that is not known."""
    version: int = 0
    """Of the actor's weights, as they were saved."""
    finding: str | None = None
    """Where it began, with the NaN sentinel, as it was saved."""

    @property
    def role(self) -> str:
        """Whose model ran: `actor` for rollouts, too."""
        return ROLE_OF.get(self.stage, "actor").replace("rollout", "actor")

    def __str__(self) -> str:
        return f"{self.stage} of step {self.step}"


class FailingRun(Protocol):
    """What it takes of a run to save a stage that failed, and to repeat it; `run.Run` is one."""

    config: RunConfig
    run_dir: RunDir
    placement: Placement
    token_pieces: TokenPieces


def is_repeatable(quantity: str) -> bool:
    """Tell whether what is saved is enough to repeat it: an optimizer step's state and earlier weights are gone.

    Args:
        quantity: that was not finite, as `NonFiniteError` has it.
    """
    return not quantity.endswith(UPDATED_WEIGHTS)


def save_failure(run: FailingRun, failure: Failure) -> Path | None:
    """Save what the stage that failed worked on; return the folder, or None where that cannot be written."""
    folder = run.run_dir.path / "failures" / f"step_{failure.step:06d}"
    if failure.given is None or not _saved(f"what {failure} worked on", folder, lambda: _save(run, failure, folder)):
        return None

    def save_weights() -> None:
        (folder / WEIGHTS).mkdir()
        run.placement.roles.named(failure.role).save(folder / WEIGHTS, ["model"])
        mismatch = run.placement.roles.mismatch
        if isinstance(failure.given, GenerateCall) and mismatch is not None:
            mismatch.policy.save(folder / WEIGHTS)

    if not _saved(f"the {failure.role}'s weights", folder, save_weights):  # a replay starts from the model's own
        shutil.rmtree(folder / WEIGHTS, ignore_errors=True)
    return folder


def save_finding(folder: Path, finding: Finding) -> None:
    """Save where it began beside the failure, as far as the disk has room."""
    text = json.dumps(finding.as_json(), indent=2) + "\n"
    _saved("the finding", folder, lambda: atomic_write(folder / FINDING, text))


def _saved(what: str, folder: Path, save: Callable[[], None]) -> bool:
    """Save something, as far as the disk has room and ranks are still there: the failure itself matters more."""
    try:
        save()
    # Ranks that were ended answer with what they were ended for.
    except (OSError, SafetensorError, RankFailedError, NonFiniteError) as reason:
        notice(f"{what} could not be saved in {folder} ({reason}).", style="red")
        return False
    return True


def _save(run: FailingRun, failure: Failure, folder: Path) -> None:
    if folder.exists():  # of an earlier attempt at the step
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    given, generate = failure.given, None
    rollouts = given.rollouts if isinstance(given, Samples) else given if isinstance(given, list) else []
    if rollouts:
        scores = given.scores if isinstance(given, Samples) else [Score(None)] * len(rollouts)
        write_rollouts(folder / ROLLOUTS, rollouts, scores, failure.step, pieces=run.token_pieces)
    if isinstance(given, Samples):
        save_file({name: tensor.clone() for name, tensor in given.tensors().items()}, folder / TENSORS)
    if isinstance(given, GenerateCall):
        asked = [{"uid": prompt.uid, "token_ids": prompt.token_ids, "task": prompt.task} for prompt in given.prompts]
        generate = {"prompts": asked, "params": dataclasses.asdict(given.params), "stream": given.stream}
    record: dict[str, Any] = {
        "stage": failure.stage,
        "step": failure.step,
        "quantity": failure.quantity,
        "mini_batch": failure.mini_batch and dataclasses.asdict(failure.mini_batch),
        "version": run.placement.roles.named("actor").version if failure.role == "actor" else 0,
        "messages": {one.prompt.uid: one.prompt.messages for one in rollouts if one.prompt.messages is not None},
        "generate": generate,
    }
    if run.run_dir.config_yaml.exists():
        shutil.copyfile(run.run_dir.config_yaml, folder / CONFIG)
    atomic_write(folder / FAILURE, json.dumps(record, indent=2) + "\n")  # last: a folder without it holds no failure


def read_failure(folder: Path) -> Failure:
    """Return what `save_failure` saved in a folder.

    Raises:
        UserError: there is no failure, or a file of it is missing or damaged.
    """
    file = folder / FAILURE
    if not file.is_file():
        raise UserError(
            str(folder),
            f"holds no failure (no {FAILURE}).",
            "Give a folder <run>/failures/step_N that a run left behind.",
        )
    try:
        record = json.loads(file.read_text())
        mini_batch, finding = record["mini_batch"], folder / FINDING
        return Failure(
            Stage(record["stage"]),
            record["step"],
            record["quantity"],
            None if mini_batch is None else MiniBatch(**mini_batch),
            _read_given(folder, record),
            record["version"],
            json.loads(finding.read_text())["sentence"] if finding.is_file() else None,
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(str(file), f"cannot be read: {type(error).__name__}: {error}") from error


def _read_given(folder: Path, record: dict[str, Any]) -> Given:
    if (call := record["generate"]) is not None:
        prompts = [Prompt(one["uid"], one["token_ids"], text="", task=one["task"]) for one in call["prompts"]]
        return GenerateCall(prompts, SamplingParams(**call["params"]), tuple(call["stream"]))
    prompts_of: dict[str, Prompt] = {}
    rollouts: list[Rollout] = []
    scores: list[Score] = []
    for row in read_rollouts(folder / ROLLOUTS):
        uid, length = row["uid"], len(row["response_ids"])
        own = Prompt(uid, row["prompt_ids"], row["prompt"], row["task"], row["answer"], record["messages"].get(uid))
        prompt = prompts_of.setdefault(uid, own)
        rollouts.append(
            Rollout(
                prompt,
                row["sample"],
                row["response_ids"],
                list(map(bool, row.get("sampled", [1] * length))),
                row["rollout_logprobs"],
                row.get("policy_versions") or [row["policy_version"]] * length,
                tuple(map(_turn, row["turns"])) if "turns" in row else (Turn(0, length, row["finish_reason"]),),
                row["finish_reason"],
                row["response"],
            )
        )
        failure = row["failure"] and RewardFailure(**row["failure"])
        scores.append(Score(row["reward"], row["reward_parts"], failure))
    if not (folder / TENSORS).is_file():
        return rollouts
    tensors = load_file(folder / TENSORS)
    kind = TrainBatch if "advantages" in tensors else Experience
    return kind(rollouts, scores, **tensors)


def _turn(record: dict[str, Any]) -> Turn:
    fields: dict[str, Any] = record | {"tool_calls": tuple(record["tool_calls"])}
    return Turn(**fields)
