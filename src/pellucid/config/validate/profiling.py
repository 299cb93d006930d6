"""Rules on profiling: roles, ranks, tools, modes and schedules that do not go together, and requests that collect nothing.

`validate` in the package calls `mistakes` and `unusual`. Rules on a role act in runs that profile it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pellucid.config.convert import hints_of
from pellucid.config.fields import is_import_path
from pellucid.config.schema import ProfilerConfig, RunConfig, ScheduleConfig
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS
from pellucid.errors import UserError
from pellucid.stages import ROLE_OF, UNITS_OF, Stage, stages_of

_GLOBAL = "global_profiler"
_STEPS, _TOOL = f"{_GLOBAL}.steps", f"{_GLOBAL}.tool"
_TOOLS = "torch, torch_memory, nsys, npu, precision_debugger, or a class of your own as file.py:name"
_TOOLS_WITH_DISCRETE = ("nsys", "npu", "torch")


@dataclass(frozen=True)
class Role:
    """A role with its `profiler` section.

    Attributes:
        copies: fields of the section that are the actor's, in a role that follows it: their mistakes are the actor's.
        missing: why the run does not have the role; None when it has.
    """

    name: str
    key: str
    block: ProfilerConfig
    copies: frozenset[str]
    missing: str | None

    @property
    def follows(self) -> bool:
        """Whether all of it is the actor's."""
        return len(self.copies) == len(dataclasses.fields(ProfilerConfig))


def roles_of(config: RunConfig) -> list[Role]:
    """Return the roles that can be profiled, also those that the run does not have."""
    actor, fields = config.actor_rollout_ref.actor.profiler, dataclasses.fields(ProfilerConfig)
    missing = {
        "ref": None
        if config.samples_kl
        else "no KL term is estimated from tokens' log-probabilities under the reference",
        "critic": None if config.has_critic else f"adv_estimator: {config.algorithm.adv_estimator} has no critic",
        "reward_model": None if config.reward_model.enable else "reward_model.enable is false",
    }
    roles = []
    for name, block in config.profilers.items():
        own, actors = vars(block), vars(actor)
        copies = [item.name for item in fields if name in ACTOR_FOLLOWERS and own[item.name] == actors[item.name]]
        roles.append(Role(name, f"{PROFILED_SECTIONS[name]}.profiler", block, frozenset(copies), missing.get(name)))
    return roles


def collecting_roles(config: RunConfig) -> list[Role]:
    """Return the roles of which something is captured."""
    return [role for role in roles_of(config) if role.block.collects and role.missing is None]


def _captures_controller(config: RunConfig) -> bool:
    profiler = config.global_profiler
    if profiler.controller is None:
        return profiler.tool == "nsys" and config.trainer.placement == "ray"
    return profiler.controller


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in what a run is asked to capture, one a key; in a run that profiles no step there are none."""
    if config.global_profiler.steps:
        first: dict[str, UserError] = {}
        for error in _mistakes(config):
            first.setdefault(error.field, error)
        yield from first.values()


def _mistakes(config: RunConfig) -> Iterator[UserError]:
    collecting = collecting_roles(config)
    yield from _without_tool(config, collecting)
    for role in roles_of(config):
        if role.block.enable and role.missing is not None and not role.follows:
            yield UserError(
                f"{role.key}.enable",
                f"true has no effect: {role.missing}.",
                "Set it to false, or remove the key." if role.name != "ref" else "Set it to false.",
            )
    for role in collecting:
        yield from _ranks(config, role)
        yield from _schedule(role)
        yield from _torch(config, role)
    yield from _modes(config, collecting)
    yield from _shared_processes(config, collecting)


def _without_tool(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    without = [role.key for role in collecting if role.block.tool is None]
    if config.global_profiler.tool is None and _captures_controller(config):
        without.append(f"{_GLOBAL}.controller")
    if without:
        yield UserError(
            _TOOL,
            f"is null, but steps {config.global_profiler.steps} are to be profiled ({', '.join(without)}).",
            f"Set it to one of {_TOOLS}.",
        )


def _ranks(config: RunConfig, role: Role) -> Iterator[UserError]:
    block, key = role.block, f"{role.key}.ranks"
    if block.ranks and block.all_ranks and not {"ranks", "all_ranks"} <= role.copies:
        yield UserError(key, f"{block.ranks} has no effect while all_ranks is true.", "Remove one of the two.")
    elif (unknown := _unknown_ranks(config, role)) and "ranks" not in role.copies:
        what = "engine" if role.name == "rollout" else "rank"
        count = config.pool_ranks(role.name)
        there = f"one {what}, 0" if count == 1 else f"{count} {what}s, 0 to {count - 1}"
        yield UserError(
            key,
            f"there is no {what} {_listed(unknown)}: {role.name} has {there}.",
            "Name those alone, or set all_ranks: true in place of ranks.",
        )


def _unknown_ranks(config: RunConfig, role: Role) -> list[int]:
    if role.block.all_ranks:
        return []
    return [rank for rank in role.block.ranks if rank >= config.pool_ranks(role.name)]


def _schedule(role: Role) -> Iterator[UserError]:
    schedule, key = role.block.schedule, f"{role.key}.schedule"
    if "schedule" in role.copies:
        return
    if not schedule.stages:
        for item in dataclasses.fields(ScheduleConfig):
            value = vars(schedule)[item.name]
            if item.name != "stages" and value != item.default:
                example = f"[{', '.join(_stages_allowed(role.name)[-1:])}]"
                yield UserError(
                    f"{key}.{item.name}",
                    f"{value} has no effect while schedule.stages is empty.",
                    f"Name the stages, e.g. stages: {example}.",
                )
        return
    allowed = _stages_allowed(role.name)
    for name in schedule.stages:
        units = [str(unit) for unit in UNITS_OF[Stage(name)]]
        if name not in allowed:
            yield UserError(
                f"{key}.stages",
                f"{name} is a stage of {ROLE_OF[Stage(name)]}, not of {role.name}.",
                f"Stages here: {', '.join(allowed)}.",
            )
        elif schedule.unit not in units:
            yield UserError(
                f"{key}.unit",
                f"{schedule.unit} is no unit of {name}, which is made of {' and '.join(units)} units.",
                f"Set it to {' or '.join(units)}, or take the stage out of schedule.stages.",
            )


def _stages_allowed(role: str) -> tuple[str, ...]:
    """Return the stages that a role's schedule may name: its own, in the actor's also those of its followers."""
    return tuple(
        str(stage) for name in (role, *(ACTOR_FOLLOWERS if role == "actor" else ())) for stage in stages_of(name)
    )


def _torch(config: RunConfig, role: Role) -> Iterator[UserError]:
    options, key = role.block.tool_config.torch, f"{role.key}.tool_config.torch"
    if role.block.tool != "torch" or {"tool", "tool_config"} <= role.copies:
        return
    if "cuda" in options.contents and config.trainer.device == "cpu":
        yield UserError(f"{key}.contents", "cuda is not there with trainer.device: cpu.", "Take it out of the list.")
    if not role.block.has_torch_window:
        return
    name = "step_start" if options.step_start else "step_end"
    if role.name not in ("actor", "critic"):
        reason = f"has no effect: {role.name} has no update, whose mini-batches it counts."
        yield UserError(f"{key}.{name}", reason, "Remove the key.")
    elif role.block.schedule.stages:
        yield UserError(
            f"{key}.{name}",
            "is short for a schedule of mini-batches, and schedule.stages is set too.",
            "Keep one of the two.",
        )
    elif options.step_end is not None and options.step_end <= options.step_start:
        yield UserError(
            f"{key}.step_end",
            f"{options.step_end} leaves no mini-batch to capture from step_start: {options.step_start} on.",
            f"Set it above {options.step_start}, or to null.",
        )


def _modes(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    """Yield a mistake where some roles are captured by step and others by stage, and where the engine cannot be."""
    by_stage = [role for role in collecting if role.block.captures_stages]
    by_step = [role for role in collecting if not role.block.captures_stages]
    actor = config.actor_rollout_ref.actor.profiler
    alone = [role for role in by_step if role.name == "rollout" and role.block != actor]
    for role in alone:
        yield UserError(
            _mode_key(role),
            "the rollout engine has captures of its own, which begin and end with its stage (discrete); it goes along with "
            "captures of whole steps only by the actor's settings.",
            "Set discrete: true for all roles, or remove the rollout's own profiler keys.",
        )
    by_step = [role for role in by_step if role not in alone]
    if by_stage and by_step:
        odd, others = sorted((by_stage, by_step), key=lambda roles: (len(roles), roles[0].name == "actor"))
        yield UserError(
            _mode_key(odd[0]),
            f"{_names(odd)} {_mode(odd[0])}, but {_names(others)} {_mode(others[0])}: all roles must agree.",
            "Set discrete (or a schedule) for all of them, or for none.",
        )
    if by_stage and config.global_profiler.profile_continuous_steps:
        yield UserError(
            f"{_GLOBAL}.profile_continuous_steps",
            f"true has no effect: {_names(by_stage)} {_mode(by_stage[0])}, and no capture is longer than its stage.",
            "Set it to false, or capture whole steps.",
        )


def _mode(role: Role) -> str:
    return "captured stage by stage" if role.block.captures_stages else "captured by whole steps"


def _mode_key(role: Role) -> str:
    """Return the key that puts a role in its mode."""
    if role.block.schedule.stages:
        return f"{role.key}.schedule.stages"
    if role.block.tool in _TOOLS_WITH_DISCRETE:
        return f"{role.key}.tool_config.{role.block.tool}.discrete"
    return f"{role.key}.tool"


def _shared_processes(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    """Yield a mistake for roles of one process that ask for different captures of the same whole step."""
    by_step = [role for role in collecting if not role.block.captures_stages]
    for index, role in enumerate(by_step):
        before = next((other for other in by_step[:index] if _meet(config, role, other)), None)
        if before is not None and (name := _difference(role.block, before.block)) is not None:
            yield UserError(
                f"{role.key}.{name}",
                f"differs from {before.key}.{name}, but one capture of the process they share holds the whole step.",
                "Set both alike, or discrete: true for a capture of each stage.",
            )
    profiler = config.global_profiler
    if by_step and config.trainer.placement == "local" and _captures_controller(config):
        block = by_step[0].block
        own = dataclasses.replace(block, tool=profiler.tool, save_path=profiler.save_path)
        if (name := _difference(block, own)) is not None:
            yield UserError(
                f"{by_step[0].key}.{name}",
                f"differs from {_GLOBAL}.{name}, by which the controller is captured, and they share a process.",
                "Set both alike.",
            )


def _meet(config: RunConfig, one: Role, other: Role) -> bool:
    """Tell whether a process holds both roles and is captured for both."""
    pools = config.trainer.resource_pools
    if one.name in pools or other.name in pools:
        return False
    ranks = [set(range(config.num_ranks)) if role.block.all_ranks else set(role.block.ranks) for role in (one, other)]
    return bool(ranks[0] & ranks[1])


def _difference(one: ProfilerConfig, other: ProfilerConfig) -> str | None:
    """Return the first key of those that a capture of a whole step can have only once, and that differ."""
    if one.tool != other.tool:
        return "tool"
    if one.save_path != other.save_path:
        return "save_path"
    mine, others = vars(one.tool_config), vars(other.tool_config)
    names = [one.tool] if one.tool in mine else list(mine)
    return next((f"tool_config.{name}" for name in names if mine[name] != others[name]), None)


def unusual(config: RunConfig, changed: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each part of the request that collects nothing.

    Args:
        config: the whole config.
        changed: what `effects.changed_keys` found.
    """
    steps = config.global_profiler.steps
    if not steps:
        asked = [
            key for key in changed if key.startswith(f"{_GLOBAL}.") and key not in (_STEPS, f"{_GLOBAL}.save_path")
        ]
        asked = [f"{role.key}.enable" for role in roles_of(config) if role.block.enable and not role.follows] + asked
        if asked:
            yield f"Nothing is profiled: {_STEPS} is {'null' if steps is None else '[]'}, so these wait: {', '.join(asked)}"
        return
    if idle := [role.key for role in roles_of(config) if role.block.enable and not role.block.collects]:
        yield (
            f"PROFILING COLLECTS NOTHING of {', '.join(idle)}: enable is true, but ranks is [] and all_ranks is false. "
            "Set ranks, e.g. [0], or all_ranks: true. (Captures of whole steps, where there are any, hold all roles of a process.)"
        )
    elif not collecting_roles(config) and not _captures_controller(config):
        yield (
            f"PROFILING COLLECTS NOTHING: {_STEPS} is {steps}, but no role is profiled. Set a role's profiler.enable: true "
            "and profiler.ranks, e.g. actor_rollout_ref.actor.profiler."
        )
    total = config.trainer.total_training_steps
    if total is not None and (late := [step for step in steps if step > total]):
        yield f"{_STEPS}: {_listed(late)} will not be profiled: the run ends with step {total}."
    for role in collecting_roles(config):
        if (
            (unknown := _unknown_ranks(config, role))
            and "ranks" in role.copies
            and role.name in config.trainer.resource_pools
        ):
            yield f"{role.key}.ranks follows the actor's, and {role.name} has no {_listed(unknown)} in its own pool."
        yield from _stages_without_capture(config, role)
    yield from _settings_of_other_tools(config, changed)


def _stages_without_capture(config: RunConfig, role: Role) -> Iterator[str]:
    """Yield a line for each stage of a schedule that does not come, or whose role does not go by the schedule."""
    if "schedule" in role.copies:
        return
    roles = {other.name: other for other in roles_of(config)}
    for name in role.block.schedule.stages:
        owner, key = roles[ROLE_OF[Stage(name)]], f"{role.key}.schedule.stages"
        if name == Stage.ACTOR_COMPUTE_LOG_PROB and config.algorithm.bypass_mode:
            yield f"{key}: {name} does not come with algorithm.bypass_mode: true."
        elif owner.missing is not None:
            yield f"{key}: {name} does not come: {owner.missing}."
        elif not owner.block.collects:
            yield f"{key}: {name} is not captured: {owner.key} does not ask for it (enable, ranks)."
        elif name not in owner.block.schedule.stages:
            yield f"{key}: {name} is captured by {owner.key}.schedule, which differs."


def _settings_of_other_tools(config: RunConfig, changed: dict[str, Any]) -> Iterator[str]:
    """Yield a line that names the settings of tools that are not used."""
    idle: list[str] = []
    known = hints_of(type(config.actor_rollout_ref.actor.profiler.tool_config))
    for role in collecting_roles(config):
        tool, prefix = role.block.tool or "", f"{role.key}.tool_config."
        if "tool_config" in role.copies or is_import_path(tool):
            continue
        others = tuple(f"{prefix}{name}." for name in known if name != tool)
        idle += [key for key in changed if key.startswith(others)]
    used = _tools_in_use(config)
    prefix = f"{_GLOBAL}.global_tool_config."
    if not any(is_import_path(tool) for tool in used):
        idle += [
            key for key in changed if key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] not in used
        ]
    if idle and used:
        yield f"Settings of tools that are not used here ({', '.join(sorted(used))} is), without effect: {', '.join(idle)}"


def _tools_in_use(config: RunConfig) -> set[str]:
    tools = {role.block.tool for role in collecting_roles(config)}
    return {tool for tool in (*tools, config.global_profiler.tool if _captures_controller(config) else None) if tool}


def _names(roles: list[Role]) -> str:
    return f"{' and '.join(role.name for role in roles)} {'is' if len(roles) == 1 else 'are'}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
