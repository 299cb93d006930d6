"""What a stage leaves in `<run>/failures/step_N` when NaN or Inf ends it, and how it is run again to find the origin.

    failure.pt      which stage, and what it worked on: rollouts and tensors, or what was asked of the engine
    finding.json    where it began, with trainer.nan_sentinel
    weights/        the role's, as of the failure
    config.yaml     the run's

In the run that fails, `failure_kept` saves these and repeats the stage with the run's own roles, over all ranks. Later
`pellucid precision replay` makes the role again from the saved files and does the same in one process, where the pass
that is found to be wrong is kept as a capture.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError

from pellucid import devices, types
from pellucid.agents.llm import sample_rollouts
from pellucid.build import RoleName, Roles, choose_policy_loss, make_roles
from pellucid.config import RunConfig, load_config
from pellucid.console import notice
from pellucid.engine_maker import Compute
from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError, UserError
from pellucid.files.rundir import RunDir, atomic_write
from pellucid.loading import run_loop, run_tokenizer, torch_dtype
from pellucid.ranks import RankFailedError
from pellucid.rollout.requests import SamplingParams, WeightUpdate, run_sync
from pellucid.stages import ROLE_OF, Stage
from pellucid.types import MiniBatch, Prompt, Rollout, Samples

if TYPE_CHECKING:
    from pellucid.precision.sentinel import Finding
    from pellucid.ranks.placement import Placement

FAILURE, FINDING, WEIGHTS, CONFIG, CAPTURE = "failure.pt", "finding.json", "weights", "config.yaml", "replay"


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

    @property
    def is_repeatable(self) -> bool:
        """Whether what is saved is enough to repeat it: an optimizer step's state and earlier weights are gone."""
        return not self.quantity.endswith(UPDATED_WEIGHTS)

    def __str__(self) -> str:
        return f"{self.stage} of step {self.step}"


_SAVED_TYPES = [Failure, GenerateCall, SamplingParams, *filter(is_dataclass, vars(types).values())]
"""All that `failure.pt` is made of beside tensors and plain values; nothing else is ever unpickled."""


class FailingRun(Protocol):
    """What it takes of a run to save a stage that failed, and to repeat it; `run.Run` is one."""

    config: RunConfig
    run_dir: RunDir
    placement: Placement


@contextmanager
def failure_kept(
    run: FailingRun, stage: Stage, step: int, given: Given | None, on_done: Callable[[int], None]
) -> Iterator[None]:
    """Enclose a stage: where NaN or Inf ends it, what it was given is saved, and with the sentinel the place found.

    Raises:
        NonFiniteError: as the stage does, with `folder` where it could be saved, and `origin` where it could be found.
    """
    sentinel = run.placement.sentinel
    try:
        with contextlib.nullcontext() if sentinel is None else sentinel.watch(stage):
            yield
    except NonFiniteError as error:
        if error.folder is not None or error.origin:  # one of a stage within this one
            raise
        failure = Failure(stage, step, error.quantity, error.mini_batch, given)
        error.folder = save_failure(run, failure)
        finding = _locate(run, failure, on_done)
        if finding is not None:
            error.origin = finding.sentence()
            if (folder := error.folder) is not None:
                text = json.dumps({"sentence": error.origin, **asdict(finding)}, indent=2) + "\n"
                _saved("the finding", folder, lambda: atomic_write(folder / FINDING, text))
        raise


def save_failure(run: FailingRun, failure: Failure) -> Path | None:
    """Save what the stage that failed worked on; return the folder, or None where that cannot be written."""
    folder, given = run.run_dir.path / "failures" / f"step_{failure.step:06d}", failure.given
    if given is None:
        return None

    def save_work() -> None:
        if folder.exists():  # of an earlier attempt at the step
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        if run.run_dir.config_yaml.exists():
            shutil.copyfile(run.run_dir.config_yaml, folder / CONFIG)
        version = run.placement.roles.named("actor").version if failure.role == "actor" else 0
        file, work = io.BytesIO(), replace(failure, stage=failure.stage.value, given=_saveable(given), version=version)
        torch.save(work, file)
        atomic_write(folder / FAILURE, file.getvalue())  # last: a folder without it holds no failure

    def save_weights() -> None:
        (folder / WEIGHTS).mkdir()
        run.placement.roles.named(failure.role).engine.save(folder / WEIGHTS, ["model"])
        mismatch = run.placement.roles.mismatch
        if isinstance(given, GenerateCall) and mismatch is not None:
            mismatch.policy.save(folder / WEIGHTS)

    if not _saved(f"what {failure} worked on", folder, save_work):
        return None
    if not _saved(f"the {failure.role}'s weights", folder, save_weights):  # a replay starts from the model's own
        shutil.rmtree(folder / WEIGHTS, ignore_errors=True)
    return folder


def _saved(what: str, folder: Path, save: Callable[[], None]) -> bool:
    """Save something, as far as the disk has room and ranks are still there: the failure itself matters more."""
    try:
        save()
    # Ranks that were ended answer with what they were ended for.
    except (OSError, SafetensorError, RankFailedError, NonFiniteError) as reason:
        notice(f"{what} could not be saved in {folder} ({reason}).", style="red")
        return False
    return True


def _saveable(given: Given) -> Given:
    """Return a copy of what models read of it: rows hold objects of all kinds, sequences may be views of memory."""

    def prompt(one: Prompt) -> Prompt:
        return replace(one, answer=None, extra={})

    def rollout(one: Rollout) -> Rollout:
        sequences = {name: list(values) for name, values in one.sequences().items()}
        return replace(one, prompt=prompt(one.prompt), branches=(), **sequences)

    if isinstance(given, GenerateCall):
        return replace(given, prompts=list(map(prompt, given.prompts)))
    if isinstance(given, Samples):
        return replace(given, rollouts=list(map(rollout, given.rollouts)))
    return list(map(rollout, given))


def read_failure(folder: Path) -> Failure:
    """Return what `save_failure` saved in a folder.

    Raises:
        UserError: there is no failure, or a file of it is damaged.
    """
    file, finding = folder / FAILURE, folder / FINDING
    if not file.is_file():
        remedy = "Give a folder <run>/failures/step_N that a run left behind."
        raise UserError(str(folder), f"holds no failure (no {FAILURE}).", remedy)
    try:
        with torch.serialization.safe_globals(_SAVED_TYPES):
            failure: Failure = torch.load(file, weights_only=True)
        sentence = json.loads(finding.read_text())["sentence"] if finding.is_file() else None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, KeyError, json.JSONDecodeError) as error:
        raise UserError(str(file), f"cannot be read: {type(error).__name__}: {error}") from error
    return replace(failure, stage=Stage(failure.stage), finding=sentence)


def _locate(run: FailingRun, failure: Failure, on_done: Callable[[int], None]) -> Finding | None:
    """Return where a failure began, from a repetition with the run's own roles; None without the sentinel."""
    sentinel = run.placement.sentinel
    if sentinel is None:
        return None
    try:
        if failure.given is not None and failure.is_repeatable:
            sentinel.locate(failure.stage)
            with contextlib.suppress(NonFiniteError), sentinel.watch(failure.stage):
                # A sign of life is all that is told: nothing is done twice.
                run_again(run.config, run.placement.roles, failure, lambda _: on_done(0))
        finding = sentinel.take_finding()
    except RuntimeError as reason:  # a rank that failed, or too little memory for captures: the failure matters more
        notice(f"{failure} could not be repeated to find out where it goes wrong ({reason}).", style="red")
        return None
    return None if finding is None else _told(finding, failure)


def _told(finding: Finding, failure: Failure) -> Finding:
    """Return a finding that knows its stage, and, in a loss, the tensor of the batch that brought it in."""
    from pellucid.precision.sentinel import LOSS

    finding.stage, finding.step, given = str(failure.stage), failure.step, failure.given
    if finding.place != LOSS or failure.mini_batch is None or not isinstance(given, Samples):
        return finding
    batch = given.select(failure.mini_batch.rows)
    for name, tensor in batch.tensors().items():
        bad = (~tensor.isfinite()).flatten(1).any(dim=1) if tensor.dim() > 1 else ~tensor.isfinite()
        if bad.any():
            finding.cause = f"the batch's {name} are not finite"
            finding.samples = [batch.rollouts[row].name for row in bad.nonzero()[:, 0].tolist()]
            break
    return finding


def run_again(config: RunConfig, roles: Roles, failure: Failure, on_done: Callable[[int], None]) -> None:
    """Run a stage that failed again, with roles of this process or proxies; `on_done` counts samples just finished."""
    stage, given = failure.stage, failure.given
    if isinstance(given, GenerateCall):
        engine = roles.engine_of(stage)
        with closing(run_loop(config, run_tokenizer(config))) as loop:  # it mostly ends by the same failure
            sample_rollouts(engine, given.prompts, given.params, stream=given.stream, on_done=on_done, loop=loop)
        return
    role = roles.named(ROLE_OF[stage])
    if failure.mini_batch is not None:
        role.repeat_update(given, failure.mini_batch, step=failure.step)
    elif stage is Stage.COMPUTE_RM_SCORE:
        role.score(given, on_done=on_done)
    elif stage is Stage.COMPUTE_VALUES:
        role.compute_values(given, on_done=on_done)
    elif stage is Stage.ACTOR_COMPUTE_LOG_PROB:
        exact_kl = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
        role.compute_log_probs(given, on_done=on_done, exact_kl=exact_kl)
    else:
        role.compute_log_probs(given, on_done=on_done)


def replay(folder: Path, failure: Failure, device: str | None = None) -> tuple[Finding | None, Path | None]:
    """Run a stage that failed again, from its files.

    Args:
        folder: where the failure was read.
        failure: what `read_failure` returned; one that `is_repeatable`.
        device: another than the run's.

    Returns:
        Where the stage goes wrong, None where every module is finite this time; and the folder of the capture of that
        pass, None where it could not be written.

    Raises:
        UserError: the folder lacks the run's config, or the weights are of another model.
    """
    from pellucid.precision.dump import write_dump
    from pellucid.precision.sentinel import Sentinel

    if not (folder / CONFIG).is_file():
        reason = "does not exist: the run had not begun when it failed."
        raise UserError(str(folder / CONFIG), reason, "Run the recipe itself again.")
    config, sentinel = load_config(folder / CONFIG, []).config, Sentinel()
    roles = _make_roles(config, failure, folder / WEIGHTS, device or config.trainer.device, sentinel)
    sentinel.modules_of = roles.modules_of
    stage, step = failure.stage, failure.step
    if roles.mismatch is not None and stage is Stage.ROLLOUT_GENERATE:
        roles.mismatch.policy.load(folder / WEIGHTS)
    sentinel.locate(stage)
    with contextlib.suppress(NonFiniteError), sentinel.watch(stage):
        run_again(config, roles, failure, lambda _: None)
    finding, dump, capture = sentinel.take_finding(), sentinel.dump, folder / CAPTURE
    if finding is None:
        return None, None
    if dump is None:
        return _told(finding, failure), None
    dump.about.step = step
    try:
        write_dump(capture / f"step_{step}" / dump.about.stage / "step0" / "rank0", dump)
    except OSError as reason:  # the finding matters more
        notice(f"no capture of it in {capture} ({reason})")
        capture = None
    return _told(finding, failure), capture


def _make_roles(config: RunConfig, failure: Failure, weights: Path, device: str, probe: Any) -> Roles:
    """Return the roles that the stage needs, with the weights that the failing one had."""
    names: dict[str, list[RoleName]] = {
        "actor": ["actor", "rollout", "ref"] if config.needs_reference else ["actor", "rollout"],
        "ref": ["actor", "rollout", "ref"] if config.actor_rollout_ref.model.lora_rank else ["ref"],
        "critic": ["critic"],
        "reward_model": ["reward_model"],
    }
    dtype = torch_dtype(config.actor_rollout_ref.model.dtype)
    compute = Compute(devices.choose_device(device), dtype, probe=probe)
    total_steps = max(config.trainer.total_training_steps or failure.step, 1)
    tokenizer, policy_loss = run_tokenizer(config), choose_policy_loss(config)
    roles = make_roles(config, names[failure.role], tokenizer, policy_loss, compute, total_steps)
    role = roles.named(failure.role)
    role.engine.version = failure.version
    if failure.role == "ref" and config.actor_rollout_ref.model.lora_rank:  # the model as loaded, without adapters
        return roles
    if weights.is_dir():
        role.engine.load(weights, ["model"])
    else:
        notice(f"the weights of the failure were not saved in {weights.parent}: these are the model's own")
    if roles.rollout is not None and failure.role == "actor":
        run_sync(roles.rollout.load_weights(WeightUpdate(failure.version)))
    return roles
