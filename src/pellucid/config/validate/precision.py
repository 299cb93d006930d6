"""Rules on the precision debugger: its backend, its stages and msprobe's JSON file, and stages of which nothing is captured.

`validate` in the package calls `mistakes` and `unusual`. They act in runs in which a role is captured with the tool.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import RunConfig, msprobe_json
from pellucid.config.schema.msprobe_json import SECTION
from pellucid.config.validate.profiling import Role, collecting_roles, roles_of
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
            yield UserError(
                f"{SECTION}.stages",
                "rollout_generate is captured by backend native alone; msprobe measures the models that are trained.",
                f"Take it out of the list, or set {SECTION}.backend: native.",
            )
        if settings.gather:
            yield UserError(
                f"{SECTION}.gather",
                "true has no effect with backend msprobe, which measures what each rank holds.",
                f"Set it to false, or {SECTION}.backend: native.",
            )
        if settings.config_path is None:
            yield UserError(
                f"{SECTION}.config_path",
                "must be set with backend: msprobe, which reads its settings from a JSON file.",
                f'Name one, e.g. with {{"task": "statistics", "level": "L0"}}; or set {SECTION}.backend: native.',
            )
    if settings.gather and settings.backend == "native":
        yield from _gather_mistakes(config)
    if settings.config_path is not None:
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
        yield UserError(
            field, "fsdp keeps parameters as slices of one flat shard, which cannot be gathered one by one.", "Set strategy: fsdp2."
        )
    for role in _users(config):
        if not (role.block.all_ranks or set(role.block.ranks) >= set(range(num_ranks))):
            yield UserError(
                field,
                f"gathers from all {num_ranks} ranks, and {role.key} captures {role.block.ranks} alone: the others would be waited for.",
                f"Set {role.key}.all_ranks: true.",
            )


def unusual(config: RunConfig) -> Iterator[str]:
    """Yield a line for each stage and role of which nothing is captured."""
    users = _users(config)
    if not config.global_profiler.steps or not users:
        return
    settings = config.global_profiler.global_tool_config.precision_debugger
    reasons = {stage: why for stage in settings.stages if (why := _absence(config, Stage(stage))) is not None}
    captured = [
        stage
        for role in users
        for stage in stages_of(role.name)
        if settings.covers(stage) and _absence(config, stage) is None
    ]
    if not captured:
        why = "; ".join(f"{stage} {why}" for stage, why in reasons.items())
        why = why or f"backend {settings.backend} and stages leave nothing of {', '.join(role.name for role in users)}"
        yield f"PROFILING COLLECTS NOTHING: {SECTION}: {why}."
        return
    for stage, why in reasons.items():
        yield f"{SECTION}.stages: {stage} {why}."
    for role in users:
        if role.copies >= {"enable"} or any(settings.covers(stage) for stage in stages_of(role.name)):
            continue
        if role.name == "rollout" and settings.backend == "msprobe":
            why = "backend msprobe measures the models that are trained"
        else:
            why = f"{SECTION}.stages has none of {', '.join(stages_of(role.name))}"
        yield f"PROFILING COLLECTS NOTHING of {role.key}: {why}."
    for role in users:
        if "schedule" not in role.copies:
            left_out = [stage for stage in role.block.schedule.stages if not settings.covers(stage)]
            yield from (
                f"{role.key}.schedule.stages: {stage} is not captured: {SECTION} leaves it out." for stage in left_out
            )


def _users(config: RunConfig) -> list[Role]:
    """Return the roles that are captured with the precision debugger."""
    return [role for role in collecting_roles(config) if role.block.tool == _TOOL]


def _absence(config: RunConfig, stage: Stage) -> str | None:
    """Return why nothing is captured of a stage that is asked for; None when something is."""
    owner = next(role for role in roles_of(config) if role.name == ROLE_OF[stage])
    if owner.missing is not None:
        return f"does not come: {owner.missing}"
    if stage == Stage.ACTOR_COMPUTE_LOG_PROB and config.algorithm.bypass_mode:
        return "does not come with algorithm.bypass_mode: true"
    if stage == Stage.ACTOR_COMPUTE_LOG_PROB and not config.needs_old_log_probs:
        return "does not come: with one mini-batch and one epoch the update's own forward pass gives the old log-probs"
    if not owner.block.collects:
        return f"is not captured: {owner.key} does not ask for it (enable, ranks)"
    if owner.block.tool != _TOOL:
        return f"is not captured: {owner.key}.tool is {owner.block.tool}"
    return None
