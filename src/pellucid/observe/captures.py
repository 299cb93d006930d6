"""Profiling of a run: from the config to each process's request, and from what the processes wrote to the manifest.

The loop encloses each step in `RunProfiler.step`; `finish` ends it all, once the processes are gone.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from rich.filesize import decimal as size

from pellucid.config.schema import RunConfig
from pellucid.config.schema.profiler import PROFILED_SECTIONS, ProfilerConfig, ScheduleConfig
from pellucid.console import console, error_console, notice
from pellucid.errors import UserError
from pellucid.observe.manifest import JOURNALS, Manifest, manifest_folder, read_journals
from pellucid.observe.process import WRITE, ProcessProfiler
from pellucid.observe.request import PRECISION_DEBUGGER, TO_THE_END, ProcessRequest, RoleRequest, is_strict
from pellucid.observe.tools import ToolSettings, tool_class
from pellucid.stages import Stage, stages_of

POOL = "policy"
"""What captures of whole steps are called after where one process holds all roles; under Ray, the policy's pool."""


def save_folder(save_path: str | None, run_dir: Path) -> Path:
    """Return where captures go."""
    return Path(save_path).absolute() if save_path else manifest_folder(run_dir)


def rank_request(
    config: RunConfig, run_dir: Path, *, pool: str, roles: Collection[str], rank: int, num_ranks: int, device: str
) -> ProcessRequest | None:
    """Return what a rank is asked to capture; None when that is nothing."""
    chosen = _role_requests(config, run_dir, [role for role in roles if not _is_beside(config, role)], rank)
    where = manifest_folder(run_dir) / JOURNALS, config.global_profiler, device
    return _if_any(ProcessRequest(f"{pool}_rank_{rank}", pool, rank, num_ranks, chosen, *where))


def controller_request(config: RunConfig, run_dir: Path, roles: Collection[str], device: str) -> ProcessRequest | None:
    """Return what the controller's process, in which `roles` live, is asked to capture; None when that is nothing."""
    captured = {*roles, "rollout"} if _is_beside(config, "rollout") else roles
    profiler, chosen = config.global_profiler, _role_requests(config, run_dir, captured, 0)
    wanted = profiler.controller
    if wanted is None:
        wanted = profiler.tool == "nsys" and not roles
    if wanted and profiler.tool not in (None, PRECISION_DEBUGGER):  # the controller's own stages run no model
        discrete = any(section.captures_stages for section in config.profilers.values() if section.collects)
        discrete &= profiler.tool != "nsys" or bool(roles)  # nsys records a process of its own from start to end
        chosen["controller"] = RoleRequest(profiler.tool, save_folder(profiler.save_path, run_dir), discrete)
    group, journal = POOL if roles else "controller", manifest_folder(run_dir) / JOURNALS
    return _if_any(ProcessRequest("controller", group, 0, 1, chosen, journal, profiler, device))


def _if_any(request: ProcessRequest) -> ProcessRequest | None:
    return request if request.steps and request.roles else None


def _role_requests(config: RunConfig, run_dir: Path, roles: Collection[str], rank: int) -> dict[str, RoleRequest]:
    """Return what is captured of each of a process's roles; roles of which nothing is are left out."""
    requests, precision = {}, config.global_profiler.global_tool_config.precision_debugger
    for name in roles:
        section, replicas = config.profilers[name], ()
        if section.tool is None or not section.collects:
            continue
        if _is_beside(config, name):
            replicas = tuple(range(config.num_replicas)) if section.all_ranks else tuple(section.ranks)
        elif not section.all_ranks and rank not in section.ranks:
            continue
        windows, stages = _windows(name, section), None
        # A schedule without a stage of this role, as one that follows the actor may have, captures nothing of it.
        captures = bool(windows) or section.discrete or not section.captures_stages
        if section.tool == PRECISION_DEBUGGER:
            stages = frozenset(stage for stage in stages_of(name) if precision.covers(stage))
        if captures and stages != frozenset():
            folder = save_folder(section.save_path, run_dir)
            tool, options = section.tool, section.tool_config
            requests[name] = RoleRequest(tool, folder, section.discrete, windows, options, stages, replicas)
    return requests


def _is_beside(config: RunConfig, role: str) -> bool:
    """Return whether a role's work is done by engines beside the trainer, which the controller captures."""
    return role == "rollout" and config.has_replicas


def _windows(role: str, section: ProfilerConfig) -> dict[Stage, ScheduleConfig]:
    """Return the stages of a role that are sampled, with their windows."""
    torch = section.tool_config.torch
    if section.has_torch_window and role in ("actor", "critic"):
        active = TO_THE_END if torch.step_end is None else torch.step_end - torch.step_start
        update = Stage.ACTOR_UPDATE if role == "actor" else Stage.CRITIC_UPDATE
        return {update: ScheduleConfig("mini_batch", skip_first=torch.step_start, active=active)}
    return {stage: section.schedule for stage in stages_of(role) if stage in section.schedule.stages}


def check_tools(config: RunConfig) -> None:
    """Say, before a model is loaded, which of the tools asked for do not work here; the run goes on without those.

    Raises:
        UserError: one does not work, and `global_profiler.strict` is set or it is the precision debugger, whose
            captures are what a run that asks for them is for.
    """
    if not config.global_profiler.steps or config.trainer.ray_address is not None:  # a cluster's ranks check themselves
        return
    unusable = unusable_tools(config)
    tools = {config.profilers[name].tool for name in unusable}
    if unusable and (PRECISION_DEBUGGER in tools or is_strict(config.global_profiler, tools)):
        raise next(iter(unusable.values()))
    for why in dict.fromkeys(map(str, unusable.values())):
        roles = [name for name, error in unusable.items() if str(error) == why]
        notice(f"NO PROFILING of {', '.join(roles)}: {why} The run goes on without it.", style="bold red")


def unusable_tools(config: RunConfig) -> dict[str, UserError]:
    """Return why the tool of a role that is to be captured does not work on this machine, for each such role."""
    from pellucid import devices  # brings torch, which what only reads requests does without

    device, found = devices.choose_device(config.trainer.device).type, dict[str, UserError]()
    for name, section in config.profilers.items():
        if not section.collects or section.tool is None:
            continue
        settings = ToolSettings(section.tool_config, config.global_profiler.global_tool_config, device)
        try:
            tool_class(section.tool).check(settings)
        except UserError as error:
            found[name] = error
    return found


class Ranks(Protocol):
    """The processes beside the controller's own that may be asked for captures."""

    profile_requests: list[ProcessRequest]

    def begin_profiled_step(self, step: int) -> None:
        """Let the ranks that are asked for captures begin."""
        ...

    def end_profiled_step(self, step: int, *, last: bool) -> None:
        """Let those that are alive write their captures; after the `last` step also what the next would share."""
        ...


class RunProfiler:
    """Profiling as the loop sees it.

    Args:
        config: the run's.
        run_dir: the run's folder.
        process: the profiler of the controller's own process.
        ranks: the other processes.
        first_step: the first step of this start of the run.
        total_steps: the run's last step.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        process: ProcessProfiler,
        ranks: Ranks,
        first_step: int,
        total_steps: int,
    ) -> None:
        self._config, self._ranks, self.process = config, ranks, process
        self.folder = manifest_folder(run_dir)
        own = [] if process.request is None else [process.request]
        self._requests = [*own, *ranks.profile_requests]
        self._steps = set[int]()
        """The steps that are profiled in this start of the run."""
        self._unwritten: list[int] = []
        """Steps whose captures are not in the manifest yet."""
        if self._requests:
            self._steps = {step for step in config.global_profiler.steps or () if first_step <= step <= total_steps}
            Manifest.read(self.folder)  # a damaged one is better said now than after the first profiled step
            self._say_what()

    def _say_what(self) -> None:
        """Say what will be captured, and of which roles with settings of their own nothing is."""
        requests = self._requests
        parts = [
            f"{request.process} ({', '.join(request.roles)}; "
            f"{', '.join(dict.fromkeys(role.tool for role in request.roles.values()))})"
            for request in requests
        ]
        folders = dict.fromkeys(str(role.folder) for request in requests for role in request.roles.values())
        said = f"profiling steps {sorted(requests[0].steps)} of {'; '.join(parts)} into {', '.join(folders)}"
        console.print(said, markup=False, soft_wrap=True)
        captured = {name for request in requests for name in request.roles}
        for name, section in self._config.profilers.items():
            follows = section == self._config.actor_rollout_ref.actor.profiler
            if section.collects and name not in captured and not follows:
                why = "its schedule names no stage of it, or the run has no such role"
                notice(f"{PROFILED_SECTIONS[name]}.profiler: nothing of {name} is captured: {why}.")

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Enclose a step: however the block ends, what is captured is written, and the manifest brought up to date.

        Raises:
            ProfilerError: a capture failed, and `global_profiler.strict` is set.
        """
        with ExitStack() as ending:
            if step in self._steps:
                ending.push(lambda kind, error, trace: self._end(step, failed=kind is not None))
                self._ranks.begin_profiled_step(step)
                self.process.begin_step(step)
            with self.process.spans.span("step", step=step):
                yield

    def _end(self, step: int, *, failed: bool) -> None:
        """Write what was captured of a step; each part of it is tried, whatever happens in the others."""
        goes_on = self._config.global_profiler.profile_continuous_steps and step + 1 in self._steps
        last = failed or not goes_on
        self._unwritten.append(step)
        with ExitStack() as parts, self.process.spans.detail(WRITE, step=step):
            if last:
                parts.callback(self._write_manifest)
            parts.callback(self._ranks.end_profiled_step, step, last=last)
            parts.callback(self.process.end_step, step, last=last)

    def _write_manifest(self) -> None:
        """Write the manifest, and say what is new in it: files and sizes, and what went wrong on the ranks."""
        done, self._unwritten = self._unwritten, []
        known = Manifest.read(self.folder).failures
        manifest = make_manifest(self._config, self.folder, done)
        path = manifest.write(self.folder)
        for failure in manifest.failures:
            if failure not in known and failure.process != "controller":  # the controller's own were said at once
                what = f"profiling: {failure.process}, step {failure.step}: {failure.reason}"
                error_console.print(what, style="red", markup=False)
        if new := [file for file in manifest.files if file.step in done]:
            num_bytes = sum(file.bytes or 0 for file in new)
            left = [step for step in self._steps if step > max(done)]
            to_come = f"; the {len(left)} to come take about {size(num_bytes * len(left))} more"
            more = to_come if left and num_bytes else ""
            if late := sum(file.bytes is None for file in new):
                more += f"; {late} are written when the run is over"
            said = f"profiled step {', '.join(map(str, done))}: {len(new)} files, {size(num_bytes)}{more} ({path})"
            console.print(said, markup=False, soft_wrap=True)


def make_manifest(config: RunConfig, folder: Path, profiled: Collection[int]) -> Manifest:
    """Return the manifest of what the journals hold, with earlier starts of the run and the steps `profiled` since."""
    before = Manifest.read(folder)
    files, failures = read_journals(folder / JOURNALS)
    requested = sorted(set(config.global_profiler.steps or ()))
    steps = sorted({*before.profiled, *profiled})
    here = socket.gethostname()
    kept = [file for file in files if file.bytes is None or file.host != here or (folder / file.path).exists()]
    complete = set(requested) <= set(steps) and not failures and all(file.bytes is not None for file in kept)
    request: dict[str, object] = {"global_profiler": dataclasses.asdict(config.global_profiler)}
    request |= {name: dataclasses.asdict(section) for name, section in config.profilers.items() if section.enable}
    return Manifest(request, requested, steps, kept, failures, complete)


def finish(config: RunConfig, run_dir: Path, *, since: float) -> None:
    """Write the last manifest and run the user's hook, once all processes have ended and their files are in place.

    Args:
        config: the run's.
        run_dir: the run's folder.
        since: when this start of the run began, in seconds since 1970; the hook runs if it has captured something.
    """
    folder = manifest_folder(run_dir)
    if not config.global_profiler.steps or config.trainer.val_only:
        return
    manifest = make_manifest(config, folder, ())
    path = manifest.write(folder)
    if never := sorted(set(manifest.requested) - set(manifest.profiled)):
        notice(f"profiling: step {', '.join(map(str, never))} never came; profiled: {manifest.profiled or 'none'}")
    if unwritten := [file.path for file in manifest.files if file.bytes is None]:
        notice(f"profiling: these files were never written: {', '.join(unwritten)}", style="red")
    if manifest.files:
        reader = "precision" if any(file.tool == PRECISION_DEBUGGER for file in manifest.files) else "profile"
        console.print(f"profile: {path}\n  pellucid {reader} report {run_dir}", markup=False, soft_wrap=True)
    command = config.global_profiler.finish_hook_cmd
    if command is not None and any(file.started_at >= since for file in manifest.files):
        saved = save_folder(config.global_profiler.save_path, run_dir)
        _run_hook(command, config.global_profiler.finish_hook_timeout_s, run_dir, saved, path)


def _run_hook(command: str, timeout_s: float, run_dir: Path, folder: Path, manifest: Path) -> None:
    """Run the user's command; that it fails is said and changes nothing."""
    about = {"RUN_DIR": run_dir.absolute(), "PROFILE_DIR": folder, "MANIFEST": manifest}
    environment = os.environ | {f"PELLUCID_{name}": str(path) for name, path in about.items()}
    # In a session of its own, so that what the command has started ends with it.
    with subprocess.Popen(command, shell=True, env=environment, stdout=sys.stderr, start_new_session=True) as hook:
        try:
            ended = f"ended with status {hook.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(hook.pid, signal.SIGKILL)
            ended = f"was ended after {timeout_s:g} s"
    if hook.returncode:
        notice(f"global_profiler.finish_hook_cmd {ended}: {command}", style="red")
