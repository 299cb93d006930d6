"""Rules on profiling: roles, ranks, tools, modes and schedules that do not go together, and requests that collect
nothing.

`validate` in the package calls `mistakes` and `unusual`. They act in runs in which a step is profiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pellucid.config.fields import is_import_path
from pellucid.config.schema import RunConfig
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS, ProfilerConfig
from pellucid.config.validate.effects import Changed
from pellucid.config.validate.ranks import absent_roles
from pellucid.errors import UserError
from pellucid.stages import ROLE_OF, UNITS_OF, Stage, stages_of

_GLOBAL = "global_profiler"
_STEPS, _TOOL = f"{_GLOBAL}.steps", f"{_GLOBAL}.tool"
_TOOLS = "torch, torch_memory, nsys, npu, precision_debugger, or a class of your own as file.py:name"
_HINT = "Set ranks, e.g. [0], or all_ranks: true."


@dataclass(frozen=True)
class Role:
    """A role that can be profiled."""

    name: str
    key: str
    """Dotted name of its `profiler` section."""
    block: ProfilerConfig
    actor: ProfilerConfig
    absence: str | None
    """Why the run does not have the role; None when it has."""

    def sets(self, *fields: str) -> bool:
        """Tell whether any of these fields is the role's own, and not the actor's, which ref and rollout follow."""
        mine, actors = vars(self.block), vars(self.actor)
        return self.name not in ACTOR_FOLLOWERS or any(mine[field] != actors[field] for field in fields)

    @property
    def mode_key(self) -> str:
        """The key that says whether whole steps or stages are captured."""
        if self.block.schedule.stages:
            return f"{self.key}.schedule.stages"
        has_switch = self.block.tool in ("nsys", "npu", "torch")
        return f"{self.key}.tool_config.{self.block.tool}.discrete" if has_switch else f"{self.key}.tool"


def roles_of(config: RunConfig) -> list[Role]:
    """Return the roles that can be profiled, also those that the run does not have."""
    blocks, absent = config.profilers, absent_roles(config)
    return [
        Role(name, f"{PROFILED_SECTIONS[name]}.profiler", block, blocks["actor"], absent.get(name))
        for name, block in blocks.items()
    ]


def collecting_roles(config: RunConfig) -> list[Role]:
    """Return the roles of which something is captured."""
    return [role for role in roles_of(config) if role.block.collects and role.absence is None]


def acting(config: RunConfig, changed: dict[str, Changed]) -> dict[str, Changed]:
    """Return the changed keys that are to act in this run: those of profilers only where something is captured."""
    capturing = collecting_roles(config) if config.global_profiler.steps else []
    sections = tuple(f"{role.key}." for role in capturing if role.sets("schedule"))
    return {key: change for key, change in changed.items() if ".profiler." not in key or key.startswith(sections)}


def why_not_captured(config: RunConfig, stage: Stage) -> str | None:
    """Return why nothing is captured of a stage; None when something is."""
    owner = next(role for role in roles_of(config) if role.name == ROLE_OF[stage])
    if owner.absence is not None:
        return f"does not come: {owner.absence}"
    if stage == Stage.ACTOR_COMPUTE_LOG_PROB and config.algorithm.bypass_mode:
        return "does not come with algorithm.bypass_mode: true"
    if stage == Stage.ACTOR_COMPUTE_LOG_PROB and not config.needs_old_log_probs:
        return "does not come: with one mini-batch and one epoch the update's own forward pass gives the old log-probs"
    return None if owner.block.collects else f"is not captured: {owner.key} does not ask for it (enable, ranks)"


def _captures_controller(config: RunConfig) -> bool:
    profiler = config.global_profiler
    if profiler.controller is None:
        return profiler.tool == "nsys" and config.trainer.placement == "ray"
    return profiler.controller


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in what a run is asked to capture."""
    profiler, collecting = config.global_profiler, collecting_roles(config)
    if not profiler.steps:
        return
    without = [role.key for role in collecting if role.block.tool is None]
    if without or (profiler.tool is None and _captures_controller(config)):
        reason = f"is null, but steps {profiler.steps} are to be profiled ({', '.join(without) or 'controller'})."
        yield UserError(_TOOL, reason, f"Set it to one of {_TOOLS}.")
    for role in collecting:
        yield from _ranks(config, role)
        yield from _schedule(role)
        yield from _torch(config, role)
    yield from _modes(config, collecting)


def _ranks(config: RunConfig, role: Role) -> Iterator[UserError]:
    block, count = role.block, config.pool_ranks(role.name)
    unknown = [rank for rank in block.ranks if rank >= count]
    if block.ranks and block.all_ranks:
        yield UserError(f"{role.key}.ranks", f"{block.ranks} has no effect while all_ranks is true.", "Remove one.")
    elif unknown:
        reason = f"there is no rank {_listed(unknown)} among 0 to {count - 1}."
        yield UserError(f"{role.key}.ranks", reason, "Name those alone, or set all_ranks: true in place of ranks.")


def _schedule(role: Role) -> Iterator[UserError]:
    schedule, key = role.block.schedule, f"{role.key}.schedule"
    owners = (role.name, *ACTOR_FOLLOWERS) if role.name == "actor" else (role.name,)
    allowed = [str(stage) for owner in owners for stage in stages_of(owner)]
    for name in schedule.stages if role.sets("schedule") else ():
        units = [str(unit) for unit in UNITS_OF[Stage(name)]]
        if name not in allowed:
            reason = f"{name} is a stage of {ROLE_OF[Stage(name)]}, not of {role.name}."
            yield UserError(f"{key}.stages", reason, f"Stages here: {', '.join(allowed)}.")
        elif schedule.unit not in units:
            reason = f"{schedule.unit} is no unit of {name}, which is made of {' and '.join(units)} units."
            yield UserError(f"{key}.unit", reason, "Set it to one of those, or take the stage out of schedule.stages.")


def _torch(config: RunConfig, role: Role) -> Iterator[UserError]:
    options, key = role.block.tool_config.torch, f"{role.key}.tool_config.torch"
    if role.block.tool != "torch" or not role.sets("tool", "tool_config"):
        return
    if "cuda" in options.contents and config.trainer.device == "cpu":
        yield UserError(f"{key}.contents", "cuda is not there with trainer.device: cpu.", "Take it out of the list.")
    name = "step_start" if options.step_start else "step_end"
    if role.block.has_torch_window and role.name not in ("actor", "critic"):
        reason = f"has no effect: {role.name} has no update, whose mini-batches it counts."
        yield UserError(f"{key}.{name}", reason, "Remove the key.")
    elif role.block.has_torch_window and role.block.schedule.stages:
        reason = "is short for a schedule of mini-batches, and schedule.stages is set too."
        yield UserError(f"{key}.{name}", reason, "Keep one of the two.")
    elif options.step_end is not None and options.step_end <= options.step_start:
        reason = f"{options.step_end} leaves no mini-batch to capture from step_start: {options.step_start} on."
        yield UserError(f"{key}.step_end", reason, f"Set it above {options.step_start}, or to null.")


def _modes(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    """Yield a mistake where roles that share a process are to be captured in ways that exclude each other."""
    by_stage = [role for role in collecting if role.block.captures_stages]
    by_step = [role for role in collecting if not role.block.captures_stages]
    alone = [role for role in by_step if role.name == "rollout" and role.block != role.actor]
    for role in alone:
        reason = "the rollout engine goes along with whole steps only by the actor's keys; its own are of stages."
        remedy = "Set discrete: true for all roles, or remove the rollout's own profiler keys."
        yield UserError(role.mode_key, reason, remedy)
        by_step.remove(role)
    if by_stage and by_step:
        odd = min(by_stage, by_step, key=lambda roles: (len(roles), roles[0].name == "actor"))
        names = [" and ".join(role.name for role in roles) for roles in (by_stage, by_step)]
        reason = f"stages are captured of {names[0]}, whole steps of {names[1]}: all roles must agree."
        yield UserError(odd[0].mode_key, reason, "Set discrete (or a schedule) for all of them, or for none.")
    if by_stage and config.global_profiler.profile_continuous_steps:
        reason = "true has no effect where stages are captured: no capture is longer than its stage."
        yield UserError(f"{_GLOBAL}.profile_continuous_steps", reason, "Set it to false, or capture whole steps.")
    shared = {role.key: _capture(role.block) for role in by_step if role.name not in config.trainer.resource_pools}
    if shared and config.trainer.placement == "local" and _captures_controller(config):
        own = {"tool": config.global_profiler.tool, "save_path": config.global_profiler.save_path}
        shared = {_GLOBAL: own, **shared}
    for (other, before), (key, own) in pairwise(shared.items()):
        if name := next((name for name in own.keys() & before.keys() if own[name] != before[name]), None):
            reason = f"differs from {other}.{name}, but one capture of the process they share holds the whole step."
            yield UserError(f"{key}.{name}", reason, "Set both alike, or discrete: true for a capture of each stage.")


def _capture(block: ProfilerConfig) -> dict[str, Any]:
    """Return what a capture of a whole step can have only once; a tool of the user's own may read any settings."""
    options = vars(block.tool_config)
    return {
        "tool": block.tool,
        "save_path": block.save_path,
        f"tool_config.{block.tool}": options.get(block.tool or "", block.tool_config),
    }


def unusual(config: RunConfig, changed: dict[str, Changed]) -> Iterator[str]:
    """Yield a line for each part of the request that collects nothing.

    Args:
        config: the whole config.
        changed: what `effects.changed_keys` found.
    """
    steps, roles = config.global_profiler.steps, [role for role in roles_of(config) if role.block.enable]
    if not steps:
        asked = [f"{role.key}.enable" for role in roles if role.sets("enable")]
        asked += [key for key in changed if key.startswith(f"{_GLOBAL}.") and not key.endswith((_STEPS, "save_path"))]
        if asked:
            yield f"Nothing is profiled: {_STEPS} is null or empty, so these wait: {', '.join(asked)}"
        return
    for role in roles:
        if role.absence is not None and role.sets("enable", "ranks", "all_ranks"):
            yield f"PROFILING COLLECTS NOTHING of {role.key}: {role.absence}."
    collecting = collecting_roles(config)
    if idle := [role.key for role in roles if not role.block.collects and role.absence is None]:
        yield f"PROFILING COLLECTS NOTHING of {', '.join(idle)}: ranks is [] and all_ranks is false. {_HINT}"
    elif not collecting and not _captures_controller(config):
        yield (
            f"PROFILING COLLECTS NOTHING: {_STEPS} is {steps}, but no role is profiled. Set a role's "
            "profiler.enable: true and profiler.ranks, e.g. actor_rollout_ref.actor.profiler."
        )
    total = config.trainer.total_training_steps
    if total is not None and (late := [step for step in steps if step > total]):
        yield f"{_STEPS}: {_listed(late)} will not be profiled: the run ends with step {total}."
    for role in collecting:
        for name in role.block.schedule.stages if role.sets("schedule") else ():
            if (why := why_not_captured(config, Stage(name))) is not None:
                yield f"{role.key}.schedule.stages: {name} {why}."
    used = {role.block.tool for role in collecting}
    for role in collecting:
        contents = role.block.tool_config.npu.contents
        if role.block.tool == "npu" and contents and "cpu" not in contents:
            yield f"{role.key}.tool_config.npu.contents: cpu is added, without which nothing is captured."
    if _captures_controller(config):
        used.add(config.global_profiler.tool)
    sections = (_GLOBAL, *(role.key for role in collecting if role.sets("tool_config")))
    idle = [
        key
        for key in changed
        if (match := re.match(r"(.+)\.(?:global_)?tool_config\.(\w+)\.", key))
        and match[1] in sections
        and match[2] not in used
    ]
    if idle and collecting and not any(is_import_path(str(tool)) for tool in used):
        yield f"Settings of tools that are not used here, without effect: {', '.join(idle)}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
