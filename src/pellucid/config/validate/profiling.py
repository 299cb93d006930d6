"""Rules on profiling and the precision debugger: roles, ranks, tools, modes, stages and schedules that do not go
together, and requests that collect nothing.

`validate` in the package calls `mistakes` and `unusual`. They act in runs in which a step is profiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.config.fields import is_import_path
from pellucid.config.schema import RunConfig, msprobe_json
from pellucid.config.schema.msprobe_json import SECTION as PRECISION
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS, ProfilerConfig
from pellucid.config.validate.ranks import absent_roles
from pellucid.errors import UserError
from pellucid.stages import ROLE_OF, UNITS_OF, Stage, stages_of

_STEPS, _TOOL = "global_profiler.steps", "global_profiler.tool"
_DEBUGGER = "precision_debugger"
_TOOLS = "torch, torch_memory, nsys, npu, precision_debugger, or a class of your own as file.py:name"


@dataclass(frozen=True)
class Role:
    """A role that can be profiled."""

    name: str
    block: ProfilerConfig
    actor: ProfilerConfig
    absence: str | None
    """Why the run does not have the role; None when it has."""

    @property
    def key(self) -> str:
        """Dotted name of its `profiler` section."""
        return f"{PROFILED_SECTIONS[self.name]}.profiler"

    @property
    def mode_key(self) -> str:
        """The key that says whether whole steps or stages are captured."""
        if self.block.schedule.stages:
            return f"{self.key}.schedule.stages"
        has_switch = self.block.tool in ("nsys", "npu", "torch")
        return f"{self.key}.tool_config.{self.block.tool}.discrete" if has_switch else f"{self.key}.tool"

    def sets(self, *fields: str) -> bool:
        """Tell whether any of these fields is the role's own, and not the actor's, which ref and rollout follow."""
        mine, actors = vars(self.block), vars(self.actor)
        return self.name not in ACTOR_FOLLOWERS or any(mine[field] != actors[field] for field in fields)


def roles_of(config: RunConfig) -> list[Role]:
    """Return the roles that can be profiled, also those that the run does not have."""
    blocks, absent = config.profilers, absent_roles(config)
    return [Role(name, block, blocks["actor"], absent.get(name)) for name, block in blocks.items()]


def collecting_roles(config: RunConfig) -> list[Role]:
    """Return the roles of which something is captured."""
    return [role for role in roles_of(config) if role.block.collects and role.absence is None]


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in what a run is asked to capture."""
    profiler, collecting = config.global_profiler, collecting_roles(config)
    if not profiler.steps:
        return
    if without := [role.key for role in collecting if role.block.tool is None]:
        reason = f"is null, but steps {profiler.steps} are to be profiled ({', '.join(without)})."
        yield UserError(_TOOL, reason, f"Set it to one of {_TOOLS}.")
    for role in collecting:
        if role.name == "rollout" and config.has_replicas:
            yield from _replicas(config, role)
        yield from _ranks(config, role)
        yield from _windows(role)
    yield from _modes(config, collecting)
    settings = profiler.global_tool_config.precision_debugger
    if settings.backend == "msprobe" and any(role.block.tool == _DEBUGGER for role in collecting):
        if Stage.ROLLOUT_GENERATE in settings.stages:
            reason = "rollout_generate is captured by backend native alone."
            remedy = f"Take it out of the list, or set {PRECISION}.backend: native."
            yield UserError(f"{PRECISION}.stages", reason, remedy)
        if settings.config_path is None:
            reason = "must be set with backend: msprobe, which reads its settings from a JSON file."
            remedy = 'Name one, e.g. with {"task": "statistics", "level": "L0"}; or set backend: native.'
            yield UserError(f"{PRECISION}.config_path", reason, remedy)
        else:
            yield from msprobe_json.mistakes(settings.config_path, settings)


def _replicas(config: RunConfig, role: Role) -> Iterator[UserError]:
    """Yield what cannot be captured of engines that have processes of their own."""
    engine, block, schedule = config.actor_rollout_ref.rollout.name, role.block, role.block.schedule
    off = f"or set {role.key}.enable: false; all other stages are captured."
    if config.actor_rollout_ref.rollout.server_addresses:
        yield UserError(f"{role.key}.enable", "servers somewhere else are not captured.", "Set it to false.")
    elif engine == "sglang":
        reason = "sglang samples in processes of its own, which are not captured in this version."
        yield UserError(f"{role.key}.enable", reason, "Set it to false; all other stages are captured.")
    elif block.tool == _DEBUGGER:
        level = config.global_profiler.global_tool_config.precision_debugger.level
        if engine != "vllm" or not config.actor_rollout_ref.rollout.enforce_eager or level not in (None, "L0"):
            reason = "of engines beside the trainer vllm alone shows its modules: with enforce_eager, at level L0."
            yield UserError(f"{role.key}.tool", reason, f"Change these, {off}")
    elif block.tool != "torch":
        reason = f"{block.tool} sees nothing of engines in processes of their own, as those of {engine} are here."
        yield UserError(f"{role.key}.tool", reason, f"Set it to torch, {off}")
    elif not block.captures_stages:
        reason = "an engine in processes of its own has captures of its own, and these are of stages."
        yield UserError(role.mode_key, reason, f"Set it to true, {off}")
    elif "rollout_generate" in schedule.stages:
        if engine != "vllm":
            reason = f"{engine} counts no decode steps where it has a process of its own."
            yield UserError(f"{role.key}.schedule.stages", reason, f"Leave rollout_generate out, {off}")
        for name, only in (("unit", "decode_step"), ("warmup", 0), ("repeat", 1)):
            if (value := vars(schedule)[name]) != only:
                reason = f"{value} cannot be: {engine}'s own profiler leaves steps out and records steps, once."
                yield UserError(f"{role.key}.schedule.{name}", reason, f"Set it to {only}.")


def _ranks(config: RunConfig, role: Role) -> Iterator[UserError]:
    beside = role.name == "rollout" and config.has_replicas
    ranks, count = role.block.ranks, config.num_replicas if beside else config.pool_ranks(role.name)
    if ranks and role.block.all_ranks:
        yield UserError(f"{role.key}.ranks", f"{ranks} has no effect while all_ranks is true.", "Remove one.")
    elif unknown := [rank for rank in ranks if rank >= count]:
        what = "replica" if beside else "rank"
        reason = f"there is no {what} {', '.join(map(str, unknown))} among 0 to {count - 1}."
        yield UserError(f"{role.key}.ranks", reason, "Name those alone, or set all_ranks: true in place of ranks.")


def _windows(role: Role) -> Iterator[UserError]:
    """Yield the mistakes in which units of a stage are captured."""
    schedule, torch, key = role.block.schedule, role.block.tool_config.torch, f"{role.key}.schedule"
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
    if role.block.has_torch_window and role.sets("tool", "tool_config"):
        window = f"{role.key}.tool_config.torch.{'step_start' if torch.step_end is None else 'step_end'}"
        if role.name not in ("actor", "critic") or schedule.stages:
            reason = (
                "has no effect: it counts the mini-batches of an update, where no schedule.stages say what to count."
            )
            yield UserError(window, reason, "Remove the key.")
        elif torch.step_end is not None and torch.step_end <= torch.step_start:
            reason = f"leaves no mini-batch to capture from {torch.step_start} to before {torch.step_end}."
            yield UserError(window, reason, f"Set step_end above {torch.step_start}, or to null.")


def _modes(config: RunConfig, collecting: list[Role]) -> Iterator[UserError]:
    """Yield a mistake where roles that share a process are to be captured in ways that exclude each other."""
    by_stage = [role for role in collecting if role.block.captures_stages]
    by_step = [role for role in collecting if not role.block.captures_stages]
    if alone := next((role for role in by_step if role.name == "rollout" and role.block != role.actor), None):
        reason = "the rollout engine goes along with whole steps only by the actor's keys; its own are of stages."
        remedy = "Set discrete: true for all roles, or remove the rollout's own profiler keys."
        yield UserError(alone.mode_key, reason, remedy)
        by_step.remove(alone)
    if by_stage and by_step:
        odd = min(by_stage, by_step, key=lambda roles: (len(roles), roles[0].name == "actor"))
        names = [" and ".join(role.name for role in roles) for roles in (by_stage, by_step)]
        reason = f"stages are captured of {names[0]}, whole steps of {names[1]}: all roles must agree."
        yield UserError(odd[0].mode_key, reason, "Set discrete (or a schedule) for all of them, or for none.")
    if by_stage and config.global_profiler.profile_continuous_steps:
        reason = "true has no effect where stages are captured: no capture is longer than its stage."
        remedy = "Set it to false, or capture whole steps."
        yield UserError("global_profiler.profile_continuous_steps", reason, remedy)
    sharing = [role for role in by_step if role.name not in config.trainer.resource_pools]
    for role in sharing[1:]:
        first, own = (_capture(each.block) for each in (sharing[0], role))
        if name := next((name for name, value in own.items() if first.get(name, value) != value), None):
            reason = f"differs from {sharing[0].key}, but one capture of the process they share holds the whole step."
            remedy = "Set both alike, or discrete: true for a capture of each stage."
            yield UserError(f"{role.key}.{name}", reason, remedy)


def _capture(block: ProfilerConfig) -> dict[str, Any]:
    """Return what a capture of a whole step can have only once; a tool of the user's own may read any settings."""
    options = vars(block.tool_config).get(block.tool or "", block.tool_config)
    return {"tool": block.tool, "save_path": block.save_path, f"tool_config.{block.tool}": options}


def unusual(config: RunConfig, changed: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each part of the request that collects nothing.

    Args:
        config: the whole config.
        changed: what `changed_keys` found.
    """
    profiler, collecting = config.global_profiler, collecting_roles(config)
    if not profiler.steps:
        asked = [key for key in changed if key.endswith(".profiler.enable") or key.startswith("global_profiler.")]
        if waiting := [key for key in asked if key not in (_STEPS, "global_profiler.save_path")]:
            yield f"Nothing is profiled: {_STEPS} is null or empty, so these wait: {', '.join(waiting)}"
        return
    wanted = [role for role in roles_of(config) if role.block.enable]
    for role in wanted:
        if role.absence is not None and role.sets("enable", "ranks", "all_ranks"):
            yield f"PROFILING COLLECTS NOTHING of {role.key}: {role.absence}."
    if idle := [role.key for role in wanted if not role.block.collects and role.absence is None]:
        hint = "ranks is [] and all_ranks is false. Set ranks, e.g. [0], or all_ranks: true."
        yield f"PROFILING COLLECTS NOTHING of {', '.join(idle)}: {hint}"
    elif not collecting and not (profiler.controller or profiler.tool == "nsys"):  # nsys records the controller
        hint = "Set a role's profiler.enable: true and profiler.ranks, e.g. actor_rollout_ref.actor.profiler."
        yield f"PROFILING COLLECTS NOTHING: {_STEPS} is {profiler.steps}, but no role is profiled. {hint}"
    total = config.trainer.total_training_steps or math.inf
    if late := [str(step) for step in profiler.steps if step > total]:
        yield f"{_STEPS}: {', '.join(late)} will not be profiled: the run ends with step {total}."
    for role in collecting:
        key = f"{role.key}.schedule.stages"
        yield from _uncaptured(key, role.block.schedule.stages if role.sets("schedule") else [], collecting)
        contents = role.block.tool_config.npu.contents
        if role.block.tool == "npu" and contents and "cpu" not in contents:
            yield f"{role.key}.tool_config.npu.contents: cpu is added, without which nothing is captured."
    used = {str(profiler.tool), *(str(role.block.tool) for role in collecting)}
    idle = [key for key in changed if (tool := key.partition("tool_config.")[2].partition(".")[0]) and tool not in used]
    if idle and collecting and not any(map(is_import_path, used)):
        yield f"Settings of tools that are not used here, without effect: {', '.join(idle)}"
    debugged = [role for role in collecting if role.block.tool == _DEBUGGER]
    settings = profiler.global_tool_config.precision_debugger
    yield from _uncaptured(f"{PRECISION}.stages", settings.stages if debugged else [], debugged)
    for role in debugged:
        if role.sets("enable") and not any(map(settings.covers, stages_of(role.name))):
            left_out = f"backend {settings.backend} and stages leave out {', '.join(stages_of(role.name))}"
            yield f"PROFILING COLLECTS NOTHING of {role.key}: {left_out}."


def _uncaptured(key: str, stages: Sequence[str], collecting: list[Role]) -> Iterator[str]:
    """Yield a line for each stage that `key` names and that belongs to none of the collecting roles."""
    for stage in stages:
        if (owner := ROLE_OF[Stage(stage)]) not in {role.name for role in collecting}:
            yield f"{key}: {stage} is not captured: the run has no {owner}, or its profiler does not ask for it."
