"""Runs a stage that NaN or Inf ended again, to find out where it began.

In the run that fails, `failure_kept` saves what the stage was given and repeats it with the run's own roles, over all
ranks. Later `pellucid precision replay` makes the role again from the saved files and does the same in one process,
where the pass that is found to be wrong is kept as a capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid import devices
from pellucid.agents.single_turn import sample_rollouts
from pellucid.build import Compute, RoleName, Roles, choose_policy_loss, make_roles, run_tokenizer, torch_dtype
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
from pellucid.rollout.requests import WeightUpdate, run_sync
from pellucid.stages import ROLE_OF, Stage
from pellucid.types import Samples

if TYPE_CHECKING:
    from pellucid.precision.sentinel import Finding

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
        if error.folder is not None or error.origin:  # one of a stage within this one
            raise
        failure = Failure(stage, step, error.quantity, error.mini_batch, given)
        error.folder = save_failure(run, failure)
        finding = _locate(run, failure, on_done)
        if finding is not None:
            error.origin = finding.sentence()
            if error.folder is not None:
                save_finding(error.folder, finding)
        raise


def _locate(run: FailingRun, failure: Failure, on_done: Callable[[int], None]) -> Finding | None:
    """Return where a failure began, from a repetition with the run's own roles; None without the sentinel."""
    sentinel = run.placement.sentinel
    if sentinel is None:
        return None
    try:
        if failure.given is not None and is_repeatable(failure.quantity):
            again = stage_call(run.config, run.placement.roles, failure)
            sentinel.locate(failure.stage)
            with contextlib.suppress(NonFiniteError), sentinel.watch(failure.stage):
                again(lambda _: on_done(0))  # a sign of life; nothing is done twice
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
            rollouts = [batch.rollouts[row] for row in bad.nonzero()[:, 0].tolist()]
            finding.samples = [f"{rollout.prompt.uid} sample {rollout.sample}" for rollout in rollouts]
            break
    return finding


def stage_call(
    config: RunConfig, roles: Roles, failure: Failure
) -> Callable[[Callable[[int], None]], object]:
    """Return what runs a stage that failed again; its argument is called with the number of samples just finished.

    Args:
        config: the run's.
        roles: those of the stage, of this process or proxies.
        failure: which stage, and what it worked on.
    """
    stage, given, mini_batch = failure.stage, failure.given, failure.mini_batch
    if isinstance(given, GenerateCall):
        engine = roles.engine_of(failure.stage)
        assert engine is not None
        return lambda on_done: sample_rollouts(
            engine, given.prompts, given.params, stream=given.stream, on_done=on_done
        )
    role = roles.named(ROLE_OF[stage])
    if mini_batch is not None:
        return lambda on_done: role.repeat_update(given, mini_batch, step=failure.step)
    if stage is Stage.COMPUTE_RM_SCORE:
        return lambda on_done: role.score(given, on_done=on_done)
    if stage is Stage.COMPUTE_VALUES:
        return lambda on_done: role.compute_values(given, on_done=on_done)
    if stage is Stage.ACTOR_COMPUTE_LOG_PROB:
        exact_kl = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
        return lambda on_done: role.compute_log_probs(given, on_done=on_done, exact_kl=exact_kl)
    return lambda on_done: role.compute_log_probs(given, on_done=on_done)


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
        raise UserError(
            str(folder / CONFIG),
            "does not exist: the run had not begun when it failed.",
            "Run the recipe itself again.",
        )
    config, sentinel = load_config(folder / CONFIG, []).config, Sentinel()
    roles = _make_roles(config, failure, folder / WEIGHTS, device or config.trainer.device, sentinel)
    sentinel.modules_of = roles.modules_of
    stage, step = failure.stage, failure.step
    if roles.mismatch is not None and stage is Stage.ROLLOUT_GENERATE:
        roles.mismatch.policy.load(folder / WEIGHTS)
    sentinel.locate(stage)
    with contextlib.suppress(NonFiniteError), sentinel.watch(stage):
        stage_call(config, roles, failure)(lambda _: None)
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
        role.load(weights, ["model"])
    else:
        notice(f"the weights of the failure were not saved in {weights.parent}: these are the model's own")
    if roles.rollout is not None and failure.role == "actor":
        run_sync(roles.rollout.load_weights(WeightUpdate(failure.version)))
    return roles
