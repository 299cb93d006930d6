"""What a stage leaves behind when NaN or Inf ends it, in `<run>/failures/step_N`: all that `pellucid precision replay` needs.

    failure.json           stage, step, role, rows; what was to be sampled
    finding.json           where it began, with trainer.nan_sentinel
    rollouts.jsonl.zst     the samples
    batch.safetensors      their [B, …] tensors
    weights/               the role's, as of the failure
    config.yaml            the run's

`Run.stage` writes it, `replay.py` reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pellucid.console import notice
from pellucid.controller.placement.failures import RankFailedError
from pellucid.errors import UserError
from pellucid.rollout.native import MismatchedEngine
from pellucid.rollout.protocol import SamplingParams
from pellucid.rollout_dump import read_rollouts, write_rollouts
from pellucid.rundir import atomic_write
from pellucid.stages import ROLE_OF, Stage
from pellucid.training.protocol import MiniBatch, NonFiniteError
from pellucid.training.watch import WEIGHTS as UPDATED_WEIGHTS
from pellucid.types import Batch, Prompt, Rollout

if TYPE_CHECKING:
    from pellucid.controller.build import Run

FAILURE, FINDING, ROLLOUTS, TENSORS, WEIGHTS, CONFIG = (
    "failure.json", "finding.json", "rollouts.jsonl.zst", "batch.safetensors", "weights", "config.yaml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What was asked of a rollout engine."""

    prompts: list[Prompt]
    params: SamplingParams
    stream: tuple[str | int, ...]


Given = Batch | list[Rollout] | GenerateCall
"""What a stage works on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A stage that NaN or Inf ended, as it is on disk."""

    stage: Stage
    step: int
    role: str
    """Whose model ran: `actor` for rollouts, too."""
    quantity: str
    rows: list[int]
    mini_batch: MiniBatch | None
    """The optimizer step, in an update."""
    version: int
    """Of the weights."""
    given: Given
    finding: str | None
    """Its sentence, with the NaN sentinel."""


def is_repeatable(quantity: str) -> bool:
    """Tell whether what is saved is enough to repeat it: an optimizer step cannot be, its state and the weights before it are gone.

    Args:
        quantity: that was not finite, as `NonFiniteError` has it.
    """
    return not quantity.endswith(UPDATED_WEIGHTS)


@contextlib.contextmanager
def failure_kept(run: Run, stage: Stage, step: int, given: Given | None) -> Iterator[None]:
    """Enclose a stage: NaN or Inf that ends it is told where it was, and what it worked on is saved.

    Raises:
        NonFiniteError: as the stage does, with a finding that knows stage and step, and `folder` if it could be saved.
    """
    try:
        yield
    except NonFiniteError as error:
        if error.finding is not None:
            error.finding.stage, error.finding.step, error.finding.quantity = stage, step, error.quantity
        if given is not None and error.folder is None:
            folder = run.run_dir.path / "failures" / f"step_{step:06d}"
            try:
                _save(run, stage, step, given, error, folder)
                error.folder = folder
            except (OSError, SafetensorError) as reason:  # the failure itself matters more
                notice(f"what {stage} of step {step} worked on could not be saved in {folder} ({reason}).", style="red")
        raise


def _save(run: Run, stage: Stage, step: int, given: Given, error: NonFiniteError, folder: Path) -> None:
    if folder.exists():  # of an earlier attempt at the step
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    rollouts = given.rollouts if isinstance(given, Batch) else given if isinstance(given, list) else []
    if rollouts:
        write_rollouts(folder / ROLLOUTS, rollouts, step, pieces=run.token_pieces)
    if isinstance(given, Batch):
        save_file({name: tensor.clone() for name, tensor in given.tensors().items()}, folder / TENSORS)
    role = ROLE_OF.get(stage, "actor").replace("rollout", "actor")
    record: dict[str, Any] = {
        "stage": stage,
        "step": step,
        "role": role,
        "quantity": error.quantity,
        "rows": error.rows,
        "mini_batch": error.mini_batch and dataclasses.asdict(error.mini_batch),
        "version": run.actor.version if role == "actor" else 0,
        "messages": {one.prompt.uid: one.prompt.messages for one in rollouts if one.prompt.messages is not None},
        "generate": None,
    }
    if isinstance(given, GenerateCall):
        asked = [{"uid": prompt.uid, "token_ids": prompt.token_ids, "task": prompt.task} for prompt in given.prompts]
        record["generate"] = {"prompts": asked, "params": dataclasses.asdict(given.params), "stream": given.stream}
    if error.finding is not None:
        atomic_write(folder / FINDING, json.dumps(error.finding.as_json(), indent=2) + "\n")
    if run.run_dir.config_yaml.exists():
        shutil.copyfile(run.run_dir.config_yaml, folder / CONFIG)
    atomic_write(folder / FAILURE, json.dumps(record, indent=2) + "\n")  # last: a folder without it holds no failure
    _save_weights(run, role, folder / WEIGHTS, sampling=isinstance(given, GenerateCall))


def _save_weights(run: Run, role: Any, folder: Path, *, sampling: bool) -> None:
    """Save the weights, as far as the ranks are still there and the disk has room: the failure itself matters more."""
    try:
        folder.mkdir()
        run.placement.roles.named(role).save(folder, ["model"])
        if sampling and isinstance(run.rollout_engine, MismatchedEngine):
            run.rollout_engine.save(folder)
    # Ranks that were ended answer with what they were ended for.
    except (OSError, SafetensorError, RankFailedError, NonFiniteError) as error:
        if folder.exists():
            shutil.rmtree(folder)
        notice(f"the {role}'s weights could not be saved in {folder} ({error}); a replay starts from the model's own.", style="red")


def read_failure(folder: Path) -> Failure:
    """Return what `failure_kept` saved in a folder.

    Raises:
        UserError: there is no failure, or a file of it is missing or damaged.
    """
    file = folder / FAILURE
    if not file.is_file():
        raise UserError(
            str(folder), f"holds no failure (no {FAILURE}).", "Give a folder <run>/failures/step_N that a run left behind."
        )
    try:
        record = json.loads(file.read_text())
        mini_batch = record["mini_batch"]
        return Failure(
            Stage(record["stage"]),
            record["step"],
            record["role"],
            record["quantity"],
            record["rows"],
            None if mini_batch is None else MiniBatch(**mini_batch),
            record["version"],
            _read_given(folder, record),
            json.loads((folder / FINDING).read_text())["sentence"] if (folder / FINDING).is_file() else None,
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
    rollouts = []
    for row in read_rollouts(folder / ROLLOUTS):
        own = Prompt(row["uid"], row["prompt_ids"], row["prompt"], row["task"], row["answer"], record["messages"].get(row["uid"]))
        prompt = prompts_of.setdefault(own.uid, own)
        versions = row.get("policy_versions") or [row["policy_version"]] * len(row["response_ids"])
        logprobs = row["rollout_logprobs"]
        rollouts.append(
            Rollout(prompt, row["sample"], row["response_ids"], logprobs, versions, row["finish_reason"], row["response"])
        )
    if not (folder / TENSORS).is_file():
        return rollouts
    return Batch(rollouts=rollouts, **load_file(folder / TENSORS))
