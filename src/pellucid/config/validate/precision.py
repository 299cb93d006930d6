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
    profiler, users = config.global_profiler, _users(config)
    settings = profiler.global_tool_config.precision_debugger
    if profiler.steps and profiler.tool == _TOOL and profiler.controller:
        reason = f"true has no effect with {_TOOL}: no model runs there."
        yield UserError("global_profiler.controller", reason, "Remove the key.")
    if not users:
        return
    if settings.backend == "msprobe":
        if Stage.ROLLOUT_GENERATE in settings.stages:
            reason = "rollout_generate is captured by backend native alone."
            yield UserError(f"{SECTION}.stages", reason, f"Take it out of the list, or set {SECTION}.backend: native.")
        if settings.config_path is None:
            reason = "must be set with backend: msprobe, which reads its settings from a JSON file."
            remedy = 'Name one, e.g. with {"task": "statistics", "level": "L0"}; or set backend: native.'
            yield UserError(f"{SECTION}.config_path", reason, remedy)
        else:
            yield from msprobe_json.mistakes(settings.config_path, settings)


def unusual(config: RunConfig) -> Iterator[str]:
    """Yield a line for each stage and role of which nothing is captured."""
    settings, users = config.global_profiler.global_tool_config.precision_debugger, _users(config)
    for stage in map(Stage, settings.stages if users else ()):
        owner = next(role for role in roles_of(config) if role.name == ROLE_OF[stage])
        if (why := why_not_captured(config, stage)) is not None:
            yield f"{SECTION}.stages: {stage} {why}."
        elif owner.block.tool != _TOOL:
            yield f"{SECTION}.stages: {stage} is not captured: {owner.key}.tool is {owner.block.tool}."
    for role in users:
        if role.sets("enable") and not any(map(settings.covers, stages_of(role.name))):
            left_out = f"backend {settings.backend} and stages leave out {', '.join(stages_of(role.name))}"
            yield f"PROFILING COLLECTS NOTHING of {role.key}: {left_out}."


def _users(config: RunConfig) -> list[Role]:
    """Return the roles that are captured with the precision debugger."""
    roles = collecting_roles(config) if config.global_profiler.steps else []
    return [role for role in roles if role.block.tool == _TOOL]
