"""Profiling of a run: from the config to each process's request, and from what the processes wrote to the manifest.

The loop encloses each step in `RunProfiler.step`; `finish` ends it all, once the processes are gone and their files in place.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pellucid.config import RunConfig
from pellucid.config.schema.profiler import PROFILED_SECTIONS, ProfilerConfig
from pellucid.console import console, error_console, notice
from pellucid.errors import UserError
from pellucid.profiler.manifest import JOURNALS, Manifest, ProfileFailure, read_journals
from pellucid.profiler.process import ProcessProfiler
from pellucid.profiler.request import ProcessRequest, RoleRequest
from pellucid.profiler.tools import tool_class
from pellucid.profiler.window import Window
from pellucid.stages import Stage, Unit, stages_of

POOL = "policy"
"""What captures of whole steps are called after where one process holds all roles; under Ray, the policy's pool."""


def manifest_folder(run_dir: Path) -> Path:
    """Return the folder of the run's manifest, in the run's own: captures may go elsewhere, and share a folder with others'."""
    return run_dir.absolute() / "profile"


def save_folder(save_path: str | None, run_dir: Path) -> Path:
    """Return where captures go."""
    return Path(save_path).absolute() if save_path else manifest_folder(run_dir)


def rank_request(
    config: RunConfig, run_dir: Path, *, pool: str, roles: Collection[str], rank: int, num_ranks: int, device: str
) -> ProcessRequest | None:
    """Return what a rank is asked to capture; None when that is nothing."""
    chosen = _role_requests(config, run_dir, roles, rank)
    return _request(config, run_dir, f"{pool}_rank_{rank}", pool, rank, num_ranks, chosen, device)


def controller_request(config: RunConfig, run_dir: Path, roles: Collection[str], device: str) -> ProcessRequest | None:
    """Return what the controller's process, in which `roles` live, is asked to capture; None when that is nothing."""
    profiler, chosen = config.global_profiler, _role_requests(config, run_dir, roles, 0)
    wanted = profiler.controller
    if wanted is None:
        wanted = profiler.tool == "nsys" and not roles
    if wanted and profiler.tool is not None:
        discrete = any(section.captures_stages for section in config.profilers.values() if section.enable)
        chosen["controller"] = RoleRequest(profiler.tool, save_folder(profiler.save_path, run_dir), discrete)
    return _request(config, run_dir, "controller", POOL if roles else "controller", 0, 1, chosen, device)


def _request(
    config: RunConfig,
    run_dir: Path,
    process: str,
    group: str,
    rank: int,
    num_ranks: int,
    roles: dict[str, RoleRequest],
    device: str,
) -> ProcessRequest | None:
    profiler = config.global_profiler
    if not profiler.steps or not roles:
        return None
    return ProcessRequest(
        process=process,
        group=group,
        rank=rank,
        num_ranks=num_ranks,
        steps=frozenset(profiler.steps),
        roles=roles,
        journal=manifest_folder(run_dir) / JOURNALS,
        device=device,
        continuous=profiler.profile_continuous_steps,
        max_bytes=profiler.max_bytes,
        strict=profiler.strict,
        global_options=profiler.global_tool_config,
    )


def _role_requests(config: RunConfig, run_dir: Path, roles: Collection[str], rank: int) -> dict[str, RoleRequest]:
    """Return what is captured of each of a process's roles; roles of which nothing is are left out."""
    requests = {}
    for name in roles:
        section = config.profilers[name]
        selected = section.enable and (section.all_ranks or rank in section.ranks)
        windows = _windows(name, section)
        # A schedule without a stage of this role, as one that follows the actor may have, captures nothing of it.
        if selected and section.tool is not None and (windows or section.discrete or not section.captures_stages):
            folder = save_folder(section.save_path, run_dir)
            requests[name] = RoleRequest(section.tool, folder, section.discrete, windows, section.tool_config)
    return requests


def _windows(role: str, section: ProfilerConfig) -> dict[Stage, Window]:
    """Return the stages of a role that are sampled, with their windows."""
    schedule, torch = section.schedule, section.tool_config.torch
    if section.has_torch_window and role in ("actor", "critic"):
        active = None if torch.step_end is None else torch.step_end - torch.step_start
        update = Stage.ACTOR_UPDATE if role == "actor" else Stage.CRITIC_UPDATE
        return {update: Window(Unit.MINI_BATCH, skip_first=torch.step_start, active=active)}
    window = Window(
        Unit(schedule.unit), schedule.skip_first, schedule.wait, schedule.warmup, schedule.active, schedule.repeat
    )
    return {stage: window for stage in stages_of(role) if stage in schedule.stages}


def check_tools(config: RunConfig) -> RunConfig:
    """Check, before a model is loaded, that the tools asked for work here; without those that do not the run goes on.

    Returns:
        The config, profiling switched off for roles whose tool does not work.

    Raises:
        UserError: one does not work, and `global_profiler.strict` is set.
    """
    profiler = config.global_profiler
    if not profiler.steps or config.trainer.ray_address is not None:  # a cluster's ranks check for themselves
        return config
    from pellucid import devices  # brings torch, which what only reads requests does without

    device = devices.choose_device(config.trainer.device).type
    for name, section in config.profilers.items():
        if not section.enable or section.tool is None:
            continue
        request = ProcessRequest(
            "", "", 0, 1, frozenset(), {}, Path(), device, global_options=profiler.global_tool_config
        )
        try:
            tool_class(section.tool).check(request.settings(RoleRequest(section.tool, Path(), options=section.tool_config)))
        except UserError as error:
            if profiler.strict:
                raise
            notice(f"NO PROFILING of {name} with {section.tool}: {error} The run goes on without it.", style="bold red")
            config = _without(config, f"{PROFILED_SECTIONS[name]}.profiler")
    return config


def _without(section: Any, path: str) -> Any:
    """Return a section with profiling switched off for the role whose settings are at `path` below it."""
    name, _, rest = path.partition(".")
    if not name:
        return dataclasses.replace(section, enable=False)
    return dataclasses.replace(section, **{name: _without(vars(section)[name], rest)})


class Ranks(Protocol):
    """The processes beside the controller's own that may be asked for captures."""

    profile_requests: list[ProcessRequest]

    def begin_profiled_step(self, step: int) -> None:
        """Let the ranks that are asked for captures begin."""
        ...

    def end_profiled_step(self, step: int) -> None:
        """Let them write their captures, as far as they are alive."""
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
        self, config: RunConfig, run_dir: Path, process: ProcessProfiler, ranks: Ranks, first_step: int, total_steps: int
    ) -> None:
        self._config, self._ranks, self._total_steps = config, ranks, total_steps
        self.process = process
        self.folder = manifest_folder(run_dir)
        own = [] if process.request is None else [process.request]
        self._requests = [*own, *ranks.profile_requests]
        self._steps = frozenset(config.global_profiler.steps or ()) if self._requests else frozenset[int]()
        self._unfinished: list[tuple[int, set[Stage]]] = []
        """Steps whose captures are not written yet, and the stages that ran in them."""
        self._said = 0
        late = sorted(step for step in self._steps if step > total_steps)
        if late and config.trainer.total_training_steps is None:  # else it was said when the config was checked
            notice(f"global_profiler.steps: {late} will not be profiled: the run ends with step {total_steps}.")
        done = Manifest.read(self.folder).profiled
        if early := sorted(step for step in self._steps if step < first_step and step not in done):
            notice(f"global_profiler.steps: {early} will not be profiled: the run goes on from step {first_step}.")
        if self._requests:
            _say_where(self._requests)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Enclose a step: what is captured in it is written, and the manifest brought up to date, however the block ends."""
        spans, process = self.process.spans, self.process
        if step not in self._steps:
            with spans.span("step", step=step):
                yield
            return
        self._ranks.begin_profiled_step(step)
        process.begin_step(step)
        try:
            with spans.span("step", step=step):
                yield
        finally:
            self._unfinished.append((step, set(process.ran)))
            with spans.detail("write_profile", step=step):
                process.end_step(step)
                self._ranks.end_profiled_step(step)
                if not (self._config.global_profiler.profile_continuous_steps and step + 1 in self._steps):
                    self.write_manifest()

    def write_manifest(self) -> None:
        """Write the manifest, and say what is new in it: files and sizes, and what went wrong."""
        done, self._unfinished = self._unfinished, []
        steps = {step for step, _ in done}
        try:
            manifest = make_manifest(self._config, self.folder, steps)
            for entry in self._missing(done, manifest):
                manifest.failures.append(entry)
            manifest.complete = manifest.complete and not manifest.failures
            path = manifest.write(self.folder)
        except OSError as error:
            notice(f"profiling: the manifest cannot be written ({error})", style="red")
            return
        for failure in manifest.failures[self._said :]:
            if failure.process != "controller" or "no file" in failure.reason:  # the controller's own were said at once
                error_console.print(
                    f"profiling: {failure.process}, step {failure.step}: {failure.reason}", style="red", markup=False
                )
        self._said = len(manifest.failures)
        new = [file for file in manifest.files if file.step in steps]
        if new:
            size = sum(file.bytes or 0 for file in new)
            left = [step for step in self._steps if step > max(steps) and step <= self._total_steps]
            more = f"; the {len(left)} to come take about {size * len(left) / 1e6:,.1f} MB more" if left else ""
            console.print(
                f"profiled step {', '.join(map(str, sorted(steps)))}: {len(new)} files, {size / 1e6:,.1f} MB{more} ({path})",
                markup=False,
            )

    def _missing(self, done: list[tuple[int, set[Stage]]], manifest: Manifest) -> Iterator[ProfileFailure]:
        """Yield a failure for each capture that was asked for, gave no file, and left no word why."""
        there = {(file.process, file.step, file.stage) for file in manifest.files}
        there |= {(failure.process, failure.step, failure.stage) for failure in manifest.failures}
        stopped = {failure.process for failure in manifest.failures}
        for number, (step, ran) in enumerate(done):
            for request in self._requests:
                wanted: list[tuple[str, Stage | None, RoleRequest]] = []
                if (whole := request.whole_step) is not None and (number == 0 or not request.continuous):
                    wanted.append((request.group, None, whole))
                for name, role in request.roles.items():
                    stages = stages_of(name) if role.discrete else tuple(role.windows)
                    wanted += [(name, stage, role) for stage in stages if stage in ran]
                for name, stage, role in wanted:
                    if (request.process, step, stage) not in there and request.process not in stopped:
                        what = "the step" if stage is None else stage
                        reason = f"no file of {what}: the process ended before it was written, or did not run the stage"
                        yield ProfileFailure(reason, step, stage, name, request.rank, role.tool, request.process)


def make_manifest(config: RunConfig, folder: Path, profiled: Collection[int]) -> Manifest:
    """Return the manifest of what the journals hold, with earlier starts of the run and the steps `profiled` since."""
    before = Manifest.read(folder)
    files, failures = read_journals(folder / JOURNALS)
    requested = sorted(set(config.global_profiler.steps or ()))
    steps = sorted({*before.profiled, *profiled})
    # What only the controller noticed is in no journal.
    failures += [failure for failure in before.failures if failure not in failures]
    kept = [file for file in files if file.bytes is None or (folder / file.path).exists()]
    complete = set(requested) <= set(steps) and not failures and all(file.bytes is not None for file in kept)
    request: dict[str, object] = {"global_profiler": dataclasses.asdict(config.global_profiler)}
    request |= {name: dataclasses.asdict(section) for name, section in config.profilers.items() if section.enable}
    return Manifest(request, requested, steps, kept, failures, complete)


def finish(config: RunConfig, run_dir: Path) -> None:
    """Write the last manifest and run the user's hook, once all processes have ended and their files are in place."""
    folder = manifest_folder(run_dir)
    if not config.global_profiler.steps or not (folder / JOURNALS).exists():
        return
    manifest = make_manifest(config, folder, ())
    never = sorted(set(manifest.requested) - set(manifest.profiled))
    path = manifest.write(folder)
    if never:
        notice(f"profiling: step {', '.join(map(str, never))} never came; profiled: {manifest.profiled or 'none'}")
    unwritten = [file.path for file in manifest.files if file.bytes is None]
    if unwritten:
        notice(f"profiling: these files were never written: {', '.join(unwritten)}", style="red")
    if manifest.files:
        console.print(f"profile: {path}\n  pellucid profile report {run_dir}", markup=False)
    if (command := config.global_profiler.finish_hook_cmd) is not None:
        saved = save_folder(config.global_profiler.save_path, run_dir)
        _run_hook(command, config.global_profiler.finish_hook_timeout_s, run_dir, saved, path)


def _run_hook(command: str, timeout_s: float, run_dir: Path, folder: Path, manifest: Path) -> None:
    """Run the user's command; that it fails is said and changes nothing."""
    places = {
        "PELLUCID_RUN_DIR": str(run_dir.absolute()),
        "PELLUCID_PROFILE_DIR": str(folder),
        "PELLUCID_MANIFEST": str(manifest),
    }
    try:
        done = subprocess.run(
            command, shell=True, env=os.environ | places, timeout=timeout_s, stdout=sys.stderr, check=False
        )
    except subprocess.TimeoutExpired:
        notice(f"global_profiler.finish_hook_cmd was ended after {timeout_s:g} s: {command}", style="red")
        return
    if done.returncode:
        notice(f"global_profiler.finish_hook_cmd ended with status {done.returncode}: {command}", style="red")


def _say_where(requests: list[ProcessRequest]) -> None:
    steps = sorted(requests[0].steps)
    folders = ", ".join(dict.fromkeys(str(role.folder) for request in requests for role in request.roles.values()))
    parts = []
    for request in requests:
        tools = ", ".join(dict.fromkeys(role.tool for role in request.roles.values()))
        parts.append(f"{request.process} ({', '.join(request.roles)}; {tools})")
    console.print(f"profiling steps {steps} of {'; '.join(parts)} into {folders}", markup=False)
