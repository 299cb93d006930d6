"""Rules on profiling: roles, ranks, tools, modes and schedules that do not go together, and requests that collect
nothing.

`validate` in the package calls `mistakes` and `unusual`. Rules on a role act in runs that profile it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pellucid.config.fields import is_import_path
from pellucid.config.schema import RunConfig
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS, ProfilerConfig
from pellucid.config.validate import effects
from pellucid.config.validate.effects import Changed
from pellucid.errors import UserError
from pellucid.stages import ROLE_OF, UNITS_OF, Stage, stages_of

_GLOBAL = "global_profiler"
_STEPS, _TOOL = f"{_GLOBAL}.steps", f"{_GLOBAL}.tool"
_TOOLS = "torch, torch_memory, nsys, npu, precision_debugger, or a class of your own as file.py:name"
_TOOLS_WITH_DISCRETE = ("nsys", "npu", "torch")


@dataclass(frozen=True)
class Role:
    """A role that can be profiled."""

    name: str
    key: str
    """Dotted name of its `profiler` section."""
    block: ProfilerConfig
    copies: frozenset[str]
    """Fields of the section that are the actor's, in a role that follows it: their mistakes are the actor's."""
    missing: str | None
    """Why the run does not have the role; None when it has."""

    @property
    def follows(self) -> bool:
        """Whether all of it is the actor's."""
        return len(self.copies) == len(dataclasses.fields(ProfilerConfig))


def roles_of(config: RunConfig) -> list[Role]:
    """Return the roles that can be profiled, also those that the run does not have."""
    blocks = config.profilers
    actor = vars(blocks["actor"])
    missing: dict[str, str] = {}
    if not config.samples_kl:
        missing["ref"] = "no KL term is estimated from tokens' log-probabilities under the reference"
    if not config.has_critic:
        missing["critic"] = f"adv_estimator: {config.algorithm.adv_estimator} has no critic"
    if not config.reward_model.enable:
        missing["reward_model"] = "reward_model.enable is false"
    return [
        Role(
            name,
            f"{PROFILED_SECTIONS[name]}.profiler",
            block,
            frozenset(field for field in actor if name in ACTOR_FOLLOWERS and vars(block)[field] == actor[field]),
            missing.get(name),
        )
        for name, block in blocks.items()
    ]


def collecting_roles(config: RunConfig) -> list[Role]:
    """Return the roles of which something is captured."""
    return [role for role in roles_of(config) if role.block.collects and role.missing is None]


def why_not_captured(config: RunConfig, stage: Stage) -> str | None:
    """Return why nothing is captured of a stage; None when something is."""
    owner = next(role for role in roles_of(config) if role.name == ROLE_OF[stage])
    if owner.missing is not None:
        return f"does not come: {owner.missing}"
    if stage == Stage.ACTOR_COMPUTE_LOG_PROB and config.algorithm.bypass_mode:
        return "does not come with algorithm.bypass_mode: true"
    if stage == Stage.ACTOR_COMPUTE_LOG_PROB and not config.needs_old_log_probs:
        return "does not come: with one mini-batch and one epoch the update's own forward pass gives the old log-probs"
    if not owner.block.collects:
        return f"is not captured: {owner.key} does not ask for it (enable, ranks)"
    return None


def _captures_controller(config: RunConfig) -> bool:
    profiler = config.global_profiler
    if profiler.controller is None:
        return profiler.tool == "nsys" and config.trainer.placement == "ray"
    return profiler.controller


def mistakes(config: RunConfig, changed: dict[str, Changed]) -> Iterator[UserError]:
    """Yield the mistakes in what a run is asked to capture, one a key; in a run that profiles no step there are
    none.
    """
    if config.global_profiler.steps:
        first: dict[str, UserError] = {}
        for error in _mistakes(config, changed):
            first.setdefault(error.field, error)
        yield from first.values()


def _mistakes(config: RunConfig, changed: dict[str, Changed]) -> Iterator[UserError]:
    collecting = collecting_roles(config)
    yield from _without_tool(config, collecting)
    for role in roles_of(config):
        if role.block.enable and role.missing is not None and not role.follows:
            yield UserError(f"{role.key}.enable", f"true has no effect: {role.missing}.", "Set it to false.")
    for role in collecting:
        yield from _ranks(config, role)
        if "schedule" not in role.copies:
            own = {key: change for key, change in changed.items() if key.startswith(f"{role.key}.schedule.")}
            yield from effects.mistakes(config, own)
            yield from _schedule(role)
        yield from _torch(config, role)
    yield from _modes(config, collecting)
    yield from _shared_processes(config, collecting)


def _without_tool(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    without = [role.key for role in collecting if role.block.tool is None]
    if config.global_profiler.tool is None and _captures_controller(config):
        without.append(f"{_GLOBAL}.controller")
    if without:
        reason = f"is null, but steps {config.global_profiler.steps} are to be profiled ({', '.join(without)})."
        yield UserError(_TOOL, reason, f"Set it to one of {_TOOLS}.")


def _ranks(config: RunConfig, role: Role) -> Iterator[UserError]:
    block, key = role.block, f"{role.key}.ranks"
    if block.ranks and block.all_ranks and not {"ranks", "all_ranks"} <= role.copies:
        yield UserError(key, f"{block.ranks} has no effect while all_ranks is true.", "Remove one of the two.")
        return
    what, count = "engine" if role.name == "rollout" else "rank", config.pool_ranks(role.name)
    unknown = [] if block.all_ranks else [rank for rank in block.ranks if rank >= count]
    if unknown and "ranks" not in role.copies:
        there = f"one {what}, 0" if count == 1 else f"{count} {what}s, 0 to {count - 1}"
        reason = f"there is no {what} {_listed(unknown)}: {role.name} has {there}."
        yield UserError(key, reason, "Name those alone, or set all_ranks: true in place of ranks.")


def _schedule(role: Role) -> Iterator[UserError]:
    schedule, key, allowed = role.block.schedule, f"{role.key}.schedule", _stages_allowed(role.name)
    for name in schedule.stages:
        units = [str(unit) for unit in UNITS_OF[Stage(name)]]
        if name not in allowed:
            reason = f"{name} is a stage of {ROLE_OF[Stage(name)]}, not of {role.name}."
            yield UserError(f"{key}.stages", reason, f"Stages here: {', '.join(allowed)}.")
        elif schedule.unit not in units:
            reason = f"{schedule.unit} is no unit of {name}, which is made of {' and '.join(units)} units."
            remedy = f"Set it to {' or '.join(units)}, or take the stage out of schedule.stages."
            yield UserError(f"{key}.unit", reason, remedy)


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
        reason = "is short for a schedule of mini-batches, and schedule.stages is set too."
        yield UserError(f"{key}.{name}", reason, "Keep one of the two.")
    elif options.step_end is not None and options.step_end <= options.step_start:
        reason = f"{options.step_end} leaves no mini-batch to capture from step_start: {options.step_start} on."
        yield UserError(f"{key}.step_end", reason, f"Set it above {options.step_start}, or to null.")


def _modes(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    """Yield a mistake where some roles are captured by step and others by stage, and where the engine cannot be."""
    by_stage = [role for role in collecting if role.block.captures_stages]
    by_step = [role for role in collecting if not role.block.captures_stages]
    actor = config.actor_rollout_ref.actor.profiler
    alone = [role for role in by_step if role.name == "rollout" and role.block != actor]
    for role in alone:
        reason = "the rollout engine has captures of its own, and goes along with whole steps only by the actor's keys."
        remedy = "Set discrete: true for all roles, or remove the rollout's own profiler keys."
        yield UserError(_mode_key(role), reason, remedy)
    by_step = [role for role in by_step if role not in alone]
    if by_stage and by_step:
        odd, others = sorted((by_stage, by_step), key=lambda roles: (len(roles), roles[0].name == "actor"))
        reason = f"{_names(odd)} {_mode(odd[0])}, but {_names(others)} {_mode(others[0])}: all roles must agree."
        yield UserError(_mode_key(odd[0]), reason, "Set discrete (or a schedule) for all of them, or for none.")
    if by_stage and config.global_profiler.profile_continuous_steps:
        reason = (
            f"true has no effect: {_names(by_stage)} {_mode(by_stage[0])}, and no capture is longer than its stage."
        )
        yield UserError(f"{_GLOBAL}.profile_continuous_steps", reason, "Set it to false, or capture whole steps.")


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
    """Yield a mistake for roles on the policy's ranks that ask for different captures of the same whole step."""
    by_step = [role for role in collecting if not role.block.captures_stages]
    blocks = {role.key: role.block for role in by_step if role.name not in config.trainer.resource_pools}
    if blocks and config.trainer.placement == "local" and _captures_controller(config):
        profiler, block = config.global_profiler, next(iter(blocks.values()))
        own = dataclasses.replace(block, tool=profiler.tool, save_path=profiler.save_path)
        blocks = {_GLOBAL: own, **blocks}
    for (other, before), (key, block) in pairwise(blocks.items()):
        if (name := _difference(block, before)) is not None:
            reason = f"differs from {other}.{name}, but one capture of the process they share holds the whole step."
            yield UserError(f"{key}.{name}", reason, "Set both alike, or discrete: true for a capture of each stage.")


def _difference(one: ProfilerConfig, other: ProfilerConfig) -> str | None:
    """Return the first key of those that a capture of a whole step can have only once, and that differ."""
    if one.tool != other.tool:
        return "tool"
    if one.save_path != other.save_path:
        return "save_path"
    mine, others = vars(one.tool_config), vars(other.tool_config)
    names = [one.tool] if one.tool in mine else list(mine)
    return next((f"tool_config.{name}" for name in names if mine[name] != others[name]), None)


def unusual(config: RunConfig, changed: dict[str, Changed]) -> Iterator[str]:
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
            yield (
                f"Nothing is profiled: {_STEPS} is {'null' if steps is None else '[]'}, so these wait: "
                f"{', '.join(asked)}"
            )
        return
    if idle := [role.key for role in roles_of(config) if role.block.enable and not role.block.collects]:
        yield (
            f"PROFILING COLLECTS NOTHING of {', '.join(idle)}: enable is true, but ranks is [] and all_ranks is false. "
            "Set ranks, e.g. [0], or all_ranks: true. (Captures of whole steps, where there are any, hold "
            "all roles of a process.)"
        )
    elif not collecting_roles(config) and not _captures_controller(config):
        yield (
            f"PROFILING COLLECTS NOTHING: {_STEPS} is {steps}, but no role is profiled. Set a role's "
            "profiler.enable: true "
            "and profiler.ranks, e.g. actor_rollout_ref.actor.profiler."
        )
    total = config.trainer.total_training_steps
    if total is not None and (late := [step for step in steps if step > total]):
        yield f"{_STEPS}: {_listed(late)} will not be profiled: the run ends with step {total}."
    for role in collecting_roles(config):
        for name in role.block.schedule.stages if "schedule" not in role.copies else ():
            if (why := why_not_captured(config, Stage(name))) is not None:
                yield f"{role.key}.schedule.stages: {name} {why}."
    yield from _settings_of_other_tools(config, changed)


def _settings_of_other_tools(config: RunConfig, changed: dict[str, Changed]) -> Iterator[str]:
    """Yield a line that names the settings of tools that are not used; a tool of the user's own may read any."""
    collecting = collecting_roles(config)
    used = {role.block.tool for role in collecting if role.block.tool is not None}
    if _captures_controller(config) and config.global_profiler.tool is not None:
        used.add(config.global_profiler.tool)
    sections = [f"{role.key}.tool_config." for role in collecting if "tool_config" not in role.copies]
    sections.append(f"{_GLOBAL}.global_tool_config.")
    idle = [
        key
        for key in changed
        for section in sections
        if key.startswith(section) and key.removeprefix(section).split(".")[0] not in used
    ]
    if idle and used and not any(map(is_import_path, used)):
        tools = ", ".join(sorted(used))
        yield f"Settings of tools that are not used here ({tools} is), without effect: {', '.join(idle)}"


def _names(roles: list[Role]) -> str:
    return f"{' and '.join(role.name for role in roles)} {'is' if len(roles) == 1 else 'are'}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
