"""Runs a stage that NaN or Inf ended again, to find out where it began.

In the run that fails, `failure_kept` saves what the stage was given and repeats it with the run's own roles, over all
ranks. Later `pellucid precision replay` makes the role again from the saved files and does the same in one process,
where what is found again is captured for `pellucid precision compare` as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pellucid import devices
from pellucid.agents.single_turn import sample_rollouts
from pellucid.build import (
    Compute,
    RoleName,
    Roles,
    choose_policy_loss,
    make_roles,
    run_tokenizer,
    torch_dtype,
)
from pellucid.config import RunConfig, load_config
from pellucid.console import notice
from pellucid.errors import NonFiniteError, UserError
from pellucid.failures import (
    CONFIG,
    WEIGHTS,
    FailingRun,
    Failure,
    GenerateCall,
    Given,
    is_repeatable,
    save_failure,
    save_finding,
)
from pellucid.ranks.rank_failures import RankFailedError
from pellucid.rollout.requests import RolloutEngine, WeightUpdate, run_sync
from pellucid.stages import PREFILL, ROLE_OF, Probes, Stage, TokenSpans, Unit
from pellucid.types import MiniBatch, Samples

if TYPE_CHECKING:
    from pellucid.precision.capture import NativeSession
    from pellucid.precision.finding import Finding

CAPTURE = "replay"


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
        if error.folder is None and not error.origin:  # not one of a stage within this one
            error.folder = None if given is None else save_failure(run, stage, step, given, error)
            finding = _locate(run, stage, step, given, error, on_done)
            if finding is not None:
                error.origin = finding.sentence()
                if error.folder is not None:
                    save_finding(error.folder, finding)
        raise


def _locate(
    run: FailingRun,
    stage: Stage,
    step: int,
    given: Given | None,
    error: NonFiniteError,
    on_done: Callable[[int], None],
) -> Finding | None:
    """Return where a failure began, from a repetition with the run's own roles; None without the sentinel."""
    sentinel = run.placement.sentinel
    if sentinel is None:
        return None
    engine = run.engine_of(stage)
    try:
        if given is not None and is_repeatable(error.quantity):
            again = stage_call(run.config, run.placement.roles, engine, stage, step, given, error.mini_batch)
            sentinel.locate(stage)
            with contextlib.suppress(NonFiniteError), sentinel.watch(stage):
                again(lambda _: on_done(0))  # a sign of life; nothing is done twice
        finding = sentinel.take_finding()
    except RankFailedError as reason:
        notice(f"{stage} of step {step} could not be repeated to find out where it goes wrong ({reason}).", style="red")
        return None
    return None if finding is None else _told(finding, stage, step, error.quantity, given, error.mini_batch)


def _told(
    finding: Finding, stage: Stage, step: int, quantity: str, given: Given | None, mini_batch: MiniBatch | None
) -> Finding:
    """Return a finding that knows its stage, and, in a loss, the tensor of the batch that brought it in."""
    finding.stage, finding.step, finding.quantity = stage, step, quantity
    if mini_batch is None or not isinstance(given, Samples):
        return finding
    from pellucid.precision.locate import with_loss_input

    batch = given.select(mini_batch.rows)
    return with_loss_input(finding, batch.tensors(), batch.rollouts)


def stage_call(
    config: RunConfig,
    roles: Roles,
    engine: RolloutEngine | None,
    stage: Stage,
    step: int,
    given: Given,
    mini_batch: MiniBatch | None,
) -> Callable[[Callable[[int], None]], object]:
    """Return what runs a stage again; its argument is called with the number of samples just finished.

    Args:
        config: the run's.
        roles: those of the stage, of this process or proxies.
        engine: samples again where the stage does.
        stage: which.
        step: the step that it belongs to.
        given: what it worked on.
        mini_batch: the one that failed, in an update; those before it are in the weights.
    """
    if isinstance(given, GenerateCall):
        assert engine is not None
        return lambda on_done: sample_rollouts(
            engine, given.prompts, given.params, stream=given.stream, on_done=on_done
        )
    role = roles.named(ROLE_OF[stage])  # pyright: ignore[reportArgumentType]
    if mini_batch is not None:
        return lambda on_done: role.repeat_update(given, mini_batch, step=step)
    if stage is Stage.COMPUTE_RM_SCORE:
        return lambda on_done: role.score(given, on_done=on_done)
    if stage is Stage.COMPUTE_VALUES:
        return lambda on_done: role.compute_values(given, on_done=on_done)
    if stage is Stage.ACTOR_COMPUTE_LOG_PROB:
        exact_kl = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
        return lambda on_done: role.compute_log_probs(given, on_done=on_done, exact_kl=exact_kl)
    return lambda on_done: role.compute_log_probs(given, on_done=on_done)


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay of saved files."""

    finding: Finding | None
    """Where the stage goes wrong; None where all is finite this time."""
    own_weights: bool
    """Whether the role's weights were those of the failure, and not the model's own."""
    capture: Path | None
    """Folder of the capture; None where nothing was found, or it could not be written."""


def replay(folder: Path, failure: Failure, device: str | None = None) -> Replayed:
    """Run a stage that failed again, from its files.

    Args:
        folder: where the failure was read.
        failure: what `read_failure` returned; one that `is_repeatable`.
        device: another than the run's.

    Raises:
        UserError: the folder lacks the run's config, or the weights are of another model.
    """
    from pellucid.precision.sentinel import Sentinel

    if not (folder / CONFIG).is_file():
        raise UserError(
            str(folder / CONFIG),
            "does not exist: the run had not begun when it failed.",
            "Run the recipe itself again.",
        )
    config = load_config(folder / CONFIG, []).config
    sentinel, capturing = Sentinel(), _CaptureProbe()
    compute = Compute(
        devices.choose_device(device or config.trainer.device),
        torch_dtype(config.actor_rollout_ref.model.dtype),
        probe=Probes([sentinel, capturing]),
    )
    roles = _make_roles(config, failure, compute)
    sentinel.modules_of = roles.modules_of
    own_weights = _load_weights(config, roles, failure, folder / WEIGHTS)

    def again() -> None:
        """Run the stage, with the rollout engine in the state of the failure."""
        engine = roles.rollout
        if roles.mismatch is not None and failure.stage is Stage.ROLLOUT_GENERATE:
            engine = roles.mismatch.engine
            roles.mismatch.policy.load(folder / WEIGHTS)
        given, mini_batch = failure.given, failure.mini_batch
        stage_call(config, roles, engine, failure.stage, failure.step, given, mini_batch)(lambda _: None)

    sentinel.locate(failure.stage)
    with contextlib.suppress(NonFiniteError), sentinel.watch(failure.stage):
        again()
    finding = sentinel.take_finding()
    if finding is None or not finding.reproduced:
        return Replayed(None, own_weights, None)
    finding = _told(finding, failure.stage, failure.step, failure.quantity, failure.given, failure.mini_batch)
    capture = folder / CAPTURE
    try:
        with contextlib.suppress(NonFiniteError), capturing.captured(_session(roles, failure, capture, compute)):
            again()
    except _NotCapturedError as reason:  # the finding matters more
        notice(f"no whole capture of it in {capture} ({reason})")
        return Replayed(finding, own_weights, None)
    return Replayed(finding, own_weights, capture)


def _make_roles(config: RunConfig, failure: Failure, compute: Compute) -> Roles:
    """Return the roles that the stage needs."""
    names: dict[str, list[RoleName]] = {
        "actor": ["actor", "rollout", "ref"] if config.needs_reference else ["actor", "rollout"],
        "ref": ["actor", "rollout", "ref"] if config.actor_rollout_ref.model.lora_rank else ["ref"],
        "critic": ["critic"],
        "reward_model": ["reward_model"],
    }
    total_steps = config.trainer.total_training_steps or failure.step
    tokenizer = run_tokenizer(config)
    return make_roles(config, names[failure.role], tokenizer, choose_policy_loss(config), compute, max(total_steps, 1))


def _load_weights(config: RunConfig, roles: Roles, failure: Failure, folder: Path) -> bool:
    """Give the role the weights that it had; return whether they were saved."""
    role: Any = roles.named(failure.role)  # pyright: ignore[reportArgumentType]
    role.engine.version = failure.version
    is_base = failure.role == "ref" and bool(
        config.actor_rollout_ref.model.lora_rank
    )  # the model as loaded, without adapters
    if not is_base and folder.is_dir():
        role.load(folder, ["model"])
    if roles.rollout is not None and failure.role == "actor":
        run_sync(roles.rollout.load_weights(WeightUpdate(failure.version)))
    return is_base or folder.is_dir()


def _session(roles: Roles, failure: Failure, folder: Path, compute: Compute) -> NativeSession:
    from pellucid.precision.capture import NativeSession
    from pellucid.precision.dump import About
    from pellucid.precision.naming import class_name

    stage = Stage.ROLLOUT_GENERATE if isinstance(failure.given, GenerateCall) else failure.stage
    models = roles.modules_of(stage)
    about = About(
        backend="native",
        level="L0",
        stage=stage,
        step=failure.step,
        role=ROLE_OF[stage],
        device=compute.device.type,
        dtype=str(next(models[0].parameters()).dtype),
        model=class_name(models[0]),
    )
    return NativeSession(models, folder / f"step_{failure.step}" / stage / "step0" / "rank0", about)


class _NotCapturedError(Exception):
    """There is no capture, or a part of one."""


class _CaptureProbe:
    """A probe that tells a capture, while there is one, of passes."""

    def __init__(self) -> None:
        self._session: NativeSession | None = None

    @contextmanager
    def captured(self, session: NativeSession) -> Iterator[None]:
        """Let `session` capture what runs inside the block.

        Raises:
            NonFiniteError: as the block does.
            _NotCapturedError: whatever else went wrong: a hook, a full disk, a folder for reading alone.
        """
        failure: NonFiniteError | None = None
        try:
            session.begin()
            self._session = session
            try:
                yield
            except NonFiniteError as error:
                failure = error
            finally:
                self._session = None
                session.end()
        except Exception as error:
            raise _NotCapturedError(f"{type(error).__name__}: {error}") from error
        if failure is not None:
            raise failure

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """Tell the capture that a pass begins, or that a mini-batch has ended."""
        if self._session is not None and spans is not None:
            self._session.begin_pass(spans, unit)
        yield
        if self._session is not None and unit is Unit.MINI_BATCH:
            self._session.end_mini_batch()

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """Tell the capture that a prefill begins."""
        if self._session is not None:
            self._session.begin_pass(spans, PREFILL)
        yield

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Tell the capture of a head's results."""
        if self._session is not None:
            self._session.results({name: tensor for name, tensor in tensors.items() if tensor is not None})

    def loss(self, value: torch.Tensor) -> None:
        """Leave a loss alone: captures hold none."""
