"""Rules on the precision debugger: its backend, its stages and msprobe's JSON file, and stages of which nothing is
captured.

`validate` in the package calls `mistakes` and `unusual`. They act in runs in which a role is captured with the tool.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import RunConfig, msprobe_json
from pellucid.config.schema.msprobe_json import SECTION
from pellucid.config.validate.profiling import Role, collecting_roles, roles_of, why_not_captured
from pellucid.errors import UserError
from pellucid.stages import ROLE_OF, Stage, stages_of

_TOOL = "precision_debugger"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in what the precision debugger is asked for."""
    if not config.global_profiler.steps:
        return
    if config.global_profiler.tool == _TOOL and config.global_profiler.controller:
        yield UserError(
            "global_profiler.controller", f"true has no effect with {_TOOL}: no model runs there.", "Remove the key."
        )
    if not _users(config):
        return
    settings = config.global_profiler.global_tool_config.precision_debugger
    if settings.backend == "msprobe":
        if Stage.ROLLOUT_GENERATE in settings.stages:
            reason = (
                "rollout_generate is captured by backend native alone; msprobe measures the models that are trained."
            )
            yield UserError(f"{SECTION}.stages", reason, f"Take it out of the list, or set {SECTION}.backend: native.")
        if settings.gather:
            reason = "true has no effect with backend msprobe, which measures what each rank holds."
            yield UserError(f"{SECTION}.gather", reason, f"Set it to false, or {SECTION}.backend: native.")
        if settings.config_path is None:
            reason = "must be set with backend: msprobe, which reads its settings from a JSON file."
            remedy = 'Name one, e.g. with {"task": "statistics", "level": "L0"}; or set backend: native.'
            yield UserError(f"{SECTION}.config_path", reason, remedy)
    if settings.gather and settings.backend == "native":
        yield from _gather_mistakes(config)
    if settings.config_path is not None and settings.backend == "native":
        reason = f"{settings.config_path} has no effect with backend: native, which reads no file."
        yield UserError(f"{SECTION}.config_path", reason, f"Set {SECTION}.backend: msprobe, or remove the key.")
    elif settings.config_path is not None:
        try:
            content = msprobe_json.read_json(settings.config_path)
        except UserError as error:
            yield error
        else:
            yield from msprobe_json.mistakes(settings.config_path, content, settings)


def _gather_mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield why whole parameters cannot be gathered: all ranks must take part, and there must be shards to gather."""
    field, trainer = f"{SECTION}.gather", config.trainer
    num_ranks = trainer.n_gpus_per_node * trainer.nnodes
    if trainer.placement == "local" or num_ranks == 1:
        yield UserError(field, "true has no effect in one process, which holds whole parameters.", "Set it to false.")
        return
    if config.actor_rollout_ref.actor.strategy != "fsdp2":
        reason = "fsdp keeps parameters as slices of one flat shard, which cannot be gathered one by one."
        yield UserError(field, reason, "Set strategy: fsdp2.")
    for role in _users(config):
        if not (role.block.all_ranks or set(role.block.ranks) >= set(range(num_ranks))):
            reason = (
                f"gathers from all {num_ranks} ranks, which would wait: {role.key} captures {role.block.ranks} alone."
            )
            yield UserError(field, reason, f"Set {role.key}.all_ranks: true.")


def unusual(config: RunConfig) -> Iterator[str]:
    """Yield a line for each stage and role of which nothing is captured."""
    if not config.global_profiler.steps:
        return
    settings, users = config.global_profiler.global_tool_config.precision_debugger, _users(config)
    for stage in settings.stages if users else ():
        if (why := _absence(config, Stage(stage))) is not None:
            yield f"{SECTION}.stages: {stage} {why}."
    for role in users:
        captured = [stage for stage in stages_of(role.name) if settings.covers(stage)]
        if not captured and "enable" not in role.copies:
            left_out = f"backend {settings.backend} and stages leave out {', '.join(stages_of(role.name))}"
            yield f"PROFILING COLLECTS NOTHING of {role.key}: {left_out}."


def _users(config: RunConfig) -> list[Role]:
    """Return the roles that are captured with the precision debugger."""
    return [role for role in collecting_roles(config) if role.block.tool == _TOOL]


def _absence(config: RunConfig, stage: Stage) -> str | None:
    """Return why the tool captures nothing of a stage that is asked for; None when it captures something."""
    owner = next(role for role in roles_of(config) if role.name == ROLE_OF[stage])
    why = why_not_captured(config, stage)
    if why is None and owner.block.tool != _TOOL:
        return f"is not captured: {owner.key}.tool is {owner.block.tool}"
    return why
