"""Runs the stage that NaN or Inf ended again, alone and in one process, with the NaN sentinel on.

`pellucid precision replay` calls it with a folder that `failures.py` wrote. What is found again is captured for
`pellucid precision compare` as well.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pellucid import devices
from pellucid.config import RunConfig, load_config
from pellucid.console import notice
from pellucid.controller.build import with_mismatch
from pellucid.controller.failures import CONFIG, WEIGHTS, Failure, GenerateCall
from pellucid.controller.make_roles import (
    Compute,
    RoleName,
    Roles,
    choose_policy_loss,
    make_roles,
    run_tokenizer,
    torch_dtype,
)
from pellucid.errors import UserError
from pellucid.profiler.probe import PREFILL, TokenSpans
from pellucid.roles.actor import Actor
from pellucid.roles.base import Role
from pellucid.roles.critic import Critic
from pellucid.rollout.native import MismatchedEngine, NativeRolloutEngine
from pellucid.stages import ROLE_OF, Stage, Unit
from pellucid.training.protocol import NonFiniteError
from pellucid.types import Batch

if TYPE_CHECKING:
    from pellucid.precision.capture import NativeSession

CAPTURE = "replay"


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it."""

    error: NonFiniteError | None
    """As the run raised it, with its finding; None where all is finite this time."""
    own_weights: bool
    """Whether the role's weights were those of the failure, and not the model's own."""
    capture: Path | None
    """Folder of the capture; None where nothing was found, or it could not be written."""


def replay(folder: Path, failure: Failure, device: str | None = None) -> Replayed:
    """Run the stage that failed again.

    Args:
        folder: where the failure was read.
        failure: it; one that `is_repeatable`.
        device: another than the run's.

    Raises:
        UserError: the folder lacks the run's config, or the weights are of another model.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(str(folder / CONFIG), "does not exist: the run had not begun when it failed.", "Run the recipe itself again.")
    config = load_config(folder / CONFIG, []).config
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, nan_sentinel=True))
    hearing = _Hearing()
    compute = Compute(
        devices.choose_device(device or config.trainer.device),
        torch_dtype(config.actor_rollout_ref.model.dtype),
        probe=hearing,
        nan_sentinel=True,
    )
    roles = _make_roles(config, failure, compute)
    own_weights = _load_weights(config, roles, failure, folder / WEIGHTS)
    stage = _stage(config, roles, failure, folder / WEIGHTS)
    error = _outcome(stage)
    if error is None:
        return Replayed(None, own_weights, None)
    if error.finding is not None:
        error.finding.stage, error.finding.step, error.finding.quantity = failure.stage, failure.step, error.quantity
    watched = [roles.actor, roles.rollout, roles.reference, roles.critic, roles.reward_model]
    for role in watched:  # what repeats the passes must not be captured, too
        if isinstance(role, Role | NativeRolloutEngine):
            role.watch_for_nan(False)
    capture = folder / CAPTURE
    try:
        with hearing.captured(_session(roles, failure, capture, compute)):
            _outcome(_stage(config, roles, failure, folder / WEIGHTS))
    except _NotCapturedError as reason:  # the finding matters more
        notice(f"no whole capture of it in {capture} ({reason})")
        return Replayed(error, own_weights, None)
    return Replayed(error, own_weights, capture)


def _outcome(stage: Callable[[], object]) -> NonFiniteError | None:
    try:
        stage()
    except NonFiniteError as error:
        return error
    return None


def _make_roles(config: RunConfig, failure: Failure, compute: Compute) -> Roles:
    """Return the roles that the stage needs."""
    names: dict[str, list[RoleName]] = {
        "actor": ["actor", "rollout", *(["ref"] if config.needs_reference else [])],  # pyright: ignore[reportAssignmentType]
        "ref": ["actor", "rollout", "ref"] if config.actor_rollout_ref.model.lora_rank else ["ref"],
        "critic": ["critic"],
        "reward_model": ["reward_model"],
    }
    total_steps = config.trainer.total_training_steps or failure.step
    tokenizer = run_tokenizer(config)
    return make_roles(config, names[failure.role], tokenizer, choose_policy_loss(config), compute, max(total_steps, 1))


def _load_weights(config: RunConfig, roles: Roles, failure: Failure, folder: Path) -> bool:
    """Give the role the weights that it had; return whether they were saved."""
    role = roles.named(failure.role)  # pyright: ignore[reportArgumentType]
    assert isinstance(role, Role)
    role.engine.version = failure.version
    is_base = failure.role == "ref" and bool(config.actor_rollout_ref.model.lora_rank)  # the model as loaded, without adapters
    if not is_base and folder.is_dir():
        role.load(folder, ["model"])
    if roles.rollout is not None and failure.role == "actor":
        roles.rollout.sync_weights()
    return is_base or folder.is_dir()


def _stage(config: RunConfig, roles: Roles, failure: Failure, weights: Path) -> Callable[[], object]:
    """Return what runs the stage."""
    given, role = failure.given, roles.named(failure.role)  # pyright: ignore[reportArgumentType]
    if isinstance(given, GenerateCall):
        engine = roles.rollout
        assert engine is not None
        if failure.stage is Stage.ROLLOUT_GENERATE:
            engine = with_mismatch(config, engine)
        if isinstance(engine, MismatchedEngine):
            engine.load(weights)
        return lambda: engine.generate(given.prompts, given.params, stream=given.stream)
    if not isinstance(given, Batch):
        return lambda: role.score(given)
    if isinstance(role, Actor | Critic) and failure.mini_batch is not None:
        mini_batch = failure.mini_batch
        return lambda: role.repeat_update(given, mini_batch, step=failure.step)
    if isinstance(role, Critic):
        return lambda: role.compute_values(given)
    if isinstance(role, Actor):
        exact_kl = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
        return lambda: role.compute_log_probs(given, exact_kl=exact_kl)
    return lambda: role.compute_log_probs(given)


def _session(roles: Roles, failure: Failure, folder: Path, compute: Compute) -> "NativeSession":
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


class _Hearing:
    """A probe that tells a capture, while there is one, of passes; see `Probe`."""

    def __init__(self) -> None:
        self._session: NativeSession | None = None

    @contextmanager
    def captured(self, session: "NativeSession") -> Iterator[None]:
        """Let `session` capture what runs inside the block.

        Raises:
            _NotCapturedError: whatever went wrong: a hook, a full disk, a folder for reading alone.
        """
        try:
            session.begin()
            self._session = session
            try:
                yield
            finally:
                self._session = None
                session.end()
        except Exception as error:
            raise _NotCapturedError(f"{type(error).__name__}: {error}") from error

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """See `Probe.unit`."""
        if self._session is not None and spans is not None:
            self._session.begin_pass(spans, unit)
        yield
        if self._session is not None and unit is Unit.MINI_BATCH:
            self._session.end_mini_batch()

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """See `Probe.forward_pass`."""
        if self._session is not None:
            self._session.begin_pass(spans, PREFILL)
        yield

    def results(self, **tensors: torch.Tensor | None) -> None:
        """See `Probe.results`."""
        if self._session is not None:
            self._session.results({name: tensor for name, tensor in tensors.items() if tensor is not None})
