"""The profiler of one process: decides when its tools start and stop, and writes down what they wrote.

The controller and every rank have one. The loop, or the rank's calls, tell it of steps and stages; engines tell it of
units of work, which count for the stage of the task that they run in. Outside of profiled steps it only records spans.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.filesize import decimal as size

from pellucid.config.schema.profiler import ScheduleConfig
from pellucid.errors import RunFailedError, UserError
from pellucid.observe.manifest import ProfileFailure, ProfileFile, add_entry, plain_files, shown_path
from pellucid.observe.request import ProcessRequest, RoleRequest, num_units, unit_action
from pellucid.observe.spans import SpanRecorder
from pellucid.observe.tools import Capture, KeptInPartError, TensorTool, Tool, tool_class
from pellucid.stages import PREFILL, ROLE_OF, UNITS_OF, Stage, TokenSpans, Unit

if TYPE_CHECKING:
    import torch

    from pellucid.rollout.requests import RolloutEngine

Result = TypeVar("Result")
WRITE = "write_profile"
"""Span of what profiling itself takes: to start tools, and to write files."""

_WHY_ABSENT = {
    Stage.ACTOR_COMPUTE_LOG_PROB: "With one mini-batch and one epoch the update's own pass gives the old log-probs.",
    Stage.ACTOR_UPDATE: "The policy rests during trainer.critic_warmup.",
}


class ProfilerError(RunFailedError):
    """Profiling failed, and `global_profiler.strict` asks for the run to end then."""


class _LeftOutError(Exception):
    """Why there is no capture, or less of it than was asked for, in words for the user."""


@dataclass(slots=True, eq=False)
class _Open:
    """A capture that has begun."""

    capture: Capture
    role: RoleRequest
    tool: Tool
    started_at: float
    collecting: bool
    """False while it warms up."""
    listens: bool = True
    """False once the tool has failed to mark a range, or to look at a pass."""
    thread: int = field(default_factory=threading.get_ident)


@dataclass(slots=True, eq=False)
class _StageRun:
    """One stage under way, in the task that entered it."""

    stage: Stage
    step: int
    role: RoleRequest | None
    """Whose settings ask for captures of the stage; None: nobody's."""
    window: ScheduleConfig | None = None
    """Which units are captured; None: all of the stage."""
    opened: _Open | None = None
    """Its own capture."""
    engines: list[_Open] = field(default_factory=list)
    """Those of engines that it samples with, which have processes of their own."""
    num_units: int = 0
    """Units of the schedule's kind that have begun."""
    first_unit: int = 0
    """Number of the first one in the capture."""
    cycle: int = 0
    failed: bool = False
    """A capture could not begin; the others are not tried."""
    files: list[ProfileFile] = field(default_factory=list)
    in_mini_batch: bool = False


_current: ContextVar[_StageRun | None] = ContextVar("stage_run", default=None)


class ProcessProfiler:
    """Records what one process does, stage by stage; several may be under way at once, each in a task of its own.

    A tool that records the whole process, as most do, has one capture at a time: a stage that begins while another's is
    being taken gets none, which is said and written down. Tools that look at tensors capture stages of different
    threads side by side.

    Args:
        spans: the process's span recorder.
        request: what is to be captured here; None: nothing.
        say: shows a line of what goes wrong to the user, or logs it.
        on_write: called before files are written, which may take minutes without a sign of life.
    """

    def __init__(
        self,
        spans: SpanRecorder,
        request: ProcessRequest | None,
        say: Callable[[str], None],
        on_write: Callable[[], object] = lambda: None,
    ) -> None:
        self.spans, self.request, self._say, self._on_write = spans, request, say, on_write
        self.models_of: Callable[[Stage], tuple[torch.nn.Module, ...]] = lambda stage: ()
        """The modules that a stage runs in this process."""
        self.replicas: Mapping[str, RolloutEngine] = {}
        """The engines in processes of their own that rollouts are sampled with, in the order of their numbers."""
        self.writing = False
        """Whether a tool writes its files at this moment."""
        self._runs: list[_StageRun] = []
        """The stages under way."""
        self._whole: _Open | None = None
        """The capture of whole steps."""
        self._opened: list[_Open] = []
        """All captures that are being taken."""
        self._calls: Counter[tuple[int, Stage]] = Counter()
        """How often each stage of a step has been captured."""
        self._bytes, self._largest = 0, 0
        self._given_up: set[str] = set()
        """Tools with which nothing more is captured: they do not work here, or the budget is spent."""
        self._lock = threading.RLock()
        """Held while captures begin and end, in whichever thread."""

    @property
    def at(self) -> tuple[Stage, int] | None:
        """The stage that the calling task is in, and its step."""
        run = _current.get()
        return None if run is None else (run.stage, run.step)

    def begin_step(self, step: int) -> None:
        """Begin to capture, if this is one of the steps asked for."""
        request = self.request
        if request is not None and step in request.steps and self._whole is None and (role := request.whole_step):
            self._whole = self._begin(role, self._capture(role, request.group, step))

    def end_step(self, step: int, *, last: bool) -> None:
        """Write what is captured, unless the next step shares the capture and this one is not the `last` that runs.

        Of stages that a schedule names and that have not run it is said why.
        """
        request = self.request
        if request is None:
            return
        if last or not (request.config.profile_continuous_steps and step + 1 in request.steps):
            whole, self._whole = self._whole, None
            self._end(whole)
        absent = [(role, stage) for role in request.roles.values() for stage in role.windows]
        for role, stage in absent if step in request.steps and sys.exception() is None else ():
            if not self._calls[step, stage]:
                with self._guarded("", self._capture(role, ROLE_OF[stage], step, stage), role):
                    why = _WHY_ABSENT.get(stage, "")
                    raise _LeftOutError(f"no file of {stage}: the stage did not run in this step. {why}".rstrip())

    def flush(self) -> None:
        """End the captures that are being taken, if there are any: what follows may be the end of the process."""
        for opened in list(self._opened):
            self._end(opened)
        self._whole = None

    @contextmanager
    def stage(self, stage: Stage, step: int) -> Iterator[None]:
        """Enclose a stage of the calling task: a span, and within profiled steps a capture or a range in one."""
        run, before = _StageRun(stage, step, self._role_of(stage, step)), _current.get()
        self._runs.append(run)
        _current.set(run)
        try:
            if run.role is not None:
                self._calls[step, stage] += 1
                run.window = None if run.role.replicas else run.role.windows.get(stage)
                if run.role.replicas:
                    run.engines = self._begin_engines(run, run.role)
                elif run.window is None:
                    run.opened = self._begin(run.role, self._capture(run.role, ROLE_OF[stage], step, stage))
            try:
                with self.spans.span(stage, step=step), self._range(run, stage):
                    yield
            finally:
                for opened in run.engines:
                    self._end(opened)
                if run.window is None:
                    self._end(run.opened)
                else:
                    self._end_window(run, run.window)
        finally:
            self._runs.remove(run)
            _current.set(before)

    def _role_of(self, stage: Stage, step: int) -> RoleRequest | None:
        """Return whose settings ask for captures of a stage of its own; None: nobody's."""
        if self.request is None or step not in self.request.steps:
            return None
        role = self.request.roles.get(ROLE_OF.get(stage, ""))
        return role if role is not None and role.captures(stage) else None

    def _run_of(self, unit: Unit) -> _StageRun | None:
        """Return the stage that a unit belongs to: its task's; of a thread without one the only one with such units."""
        run = _current.get()
        if run is not None:
            return run
        with_such_units = [run for run in tuple(self._runs) if unit in UNITS_OF.get(run.stage, ())]
        return with_such_units[0] if len(with_such_units) == 1 else None

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """Enclose a pass that is no unit of its own, which tools that look at tensors hear of."""
        self._show(self._run_of(Unit.DECODE_STEP), lambda tool: tool.begin_pass(spans, PREFILL))
        yield

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Tell tools that look at tensors what an output head has made of a pass."""
        known = {name: value for name, value in tensors.items() if value is not None}
        self._show(self._run_of(Unit.MICRO_BATCH), lambda tool: tool.results(known))

    def loss(self, value: torch.Tensor) -> None:
        """Leave a loss alone: no tool looks at losses."""

    def _show(self, run: _StageRun | None, event: Callable[[TensorTool], object]) -> None:
        """Let a tool that looks at a stage's tensors know of an event, if one collects at this moment."""
        opened = None if run is None else run.opened
        if opened is None or not opened.collecting or not opened.listens:
            return
        if isinstance(tool := opened.tool, TensorTool):
            self._tell(opened, "look at a pass", lambda: event(tool))

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """Enclose a unit of work; passes and mini-batches are spans.

        Decoding steps are too many for that, and turns are shown trajectory by trajectory.
        """
        run = self._run_of(unit)
        if run is None:
            yield
            return
        action = self._begin_unit(run) if self._counts(run, unit) else ""
        is_span = unit in (Unit.MICRO_BATCH, Unit.MINI_BATCH)
        shown = self.spans.detail(unit, stage=run.stage, step=run.step, **args) if is_span else nullcontext()
        outside, run.in_mini_batch = run.in_mini_batch, run.in_mini_batch or unit is Unit.MINI_BATCH
        try:
            with shown, self._range(run, unit):
                if spans is not None:
                    self._show(run, lambda tool: tool.begin_pass(spans, unit))
                yield
            if unit is Unit.MINI_BATCH:
                self._show(run, lambda tool: tool.end_mini_batch())
        finally:
            run.in_mini_batch = outside
            if action == "RECORD_AND_SAVE":
                self._end_cycle(run)

    @staticmethod
    def _counts(run: _StageRun, unit: Unit) -> bool:
        """Tell whether a unit is one of those that the stage's schedule counts.

        Of an update's passes only those within a mini-batch do: some losses take one more to choose tokens.
        """
        if run.window is None or run.window.unit != unit:
            return False
        return unit is not Unit.MICRO_BATCH or run.in_mini_batch or Unit.MINI_BATCH not in UNITS_OF[run.stage]

    def _begin_unit(self, run: _StageRun) -> str:
        """Begin what the stage's schedule has for the next unit, and return its action."""
        assert run.role is not None and run.window is not None
        number, action = run.num_units, unit_action(run.window, run.num_units)
        run.num_units += 1
        if action == "NONE" or run.failed:
            return action
        if run.opened is None:
            run.first_unit, run.cycle = number, run.cycle + 1
            capture = self._capture(run.role, ROLE_OF[run.stage], run.step, run.stage, window=run.cycle)
            run.opened = self._begin(run.role, capture, warm_up=action == "WARMUP")
            run.failed = run.opened is None
        elif action != "WARMUP" and not run.opened.collecting:
            run.first_unit = number
            run.failed = not self._collect(run.opened)
            run.opened = None if run.failed else run.opened
        return action

    def _end_cycle(self, run: _StageRun) -> None:
        """End the capture of a cycle of units, if there is one."""
        assert run.window is not None
        opened, run.opened = run.opened, None
        units = {"unit": run.window.unit, "first": run.first_unit}
        run.files += self._end(opened, units | {"count": run.num_units - run.first_unit})

    def _end_window(self, run: _StageRun, window: ScheduleConfig) -> None:
        """The stage has ended: add to its files how many units it had, and say so if the window asked for more."""
        assert run.role is not None
        early = sys.exception() is not None
        self._end_cycle(run)
        for file in run.files:
            assert file.units is not None
            file.units["of"] = run.num_units
            self._write_down(file)
        if run.num_units < num_units(window) and not run.failed:
            ended = "ended early, after" if early else "has only"
            capture = self._capture(run.role, ROLE_OF[run.stage], run.step, run.stage)
            asked = f"the schedule of {window.unit} asks for {num_units(window)} units"
            with self._guarded("", capture, run.role):
                raise _LeftOutError(f"{asked}, and the stage {ended} {run.num_units}")

    @contextmanager
    def _range(self, run: _StageRun, name: str) -> Iterator[None]:
        """Show the enclosed block as a range in the stage's own capture, or in that of the whole step."""
        opened = run.opened or self._whole
        with ExitStack() as marked:
            if opened is not None and opened.collecting and opened.listens:
                self._tell(opened, "mark a range", lambda: marked.enter_context(opened.tool.range(name)))
            yield

    def _tell(self, opened: _Open, doing: str, action: Callable[[], object]) -> None:
        """Tell a tool of something; one that fails at it hears no more in this capture."""
        with self._guarded(doing, opened.capture, opened.role):
            action()
            return
        opened.listens = False

    def _capture(self, role: RoleRequest, name: str, step: int, stage: Stage | None = None, window: int = 1) -> Capture:
        request = self.request
        assert request is not None
        folder = role.folder / f"rollout_replica{request.rank}" if stage is Stage.ROLLOUT_GENERATE else role.folder
        call = 1 if stage is None else self._calls[step, stage]
        models = () if stage is None else self.models_of(stage)
        return Capture(
            folder, name, step, stage, request.rank, request.num_ranks, call=call, window=window, models=models
        )

    def _begin_engines(self, run: _StageRun, role: RoleRequest) -> list[_Open]:
        """Begin captures of the engines that a role asks for; of a window, these count its steps themselves."""
        capture = self._capture(role, ROLE_OF[run.stage], run.step, run.stage)
        if (window := role.windows.get(run.stage)) is not None:
            capture = replace(capture, skip_steps=window.skip_first + window.wait, num_steps=window.active)
        opened = []
        for number, engine in enumerate(self.replicas.values()):
            if number in role.replicas:
                folder = role.folder / f"rollout_replica{number}"
                mine = replace(capture, folder=folder, rank=number, num_ranks=len(self.replicas), engine=engine)
                opened.append(self._begin(role, mine))
        return [one for one in opened if one is not None]

    def _begin(self, role: RoleRequest, capture: Capture, *, warm_up: bool = False) -> _Open | None:
        """Begin a capture, or its warm-up; None where that did not work."""
        assert self.request is not None
        if role.tool in self._given_up:
            return None
        with self._lock, self.spans.detail(WRITE, step=capture.step), self._guarded("start", capture, role):
            self._check_budget()
            kind = tool_class(role.tool, of_engine=capture.engine is not None)
            settings = self.request.settings(role)
            kind.check(settings)
            tool = kind(settings)
            if capture.engine is None:
                self._check_alone(role, tool)
            capture.folder.mkdir(parents=True, exist_ok=True)
            (tool.warm_up if warm_up else tool.start)(capture)
            opened = _Open(capture, role, tool, time.time(), collecting=not warm_up)
            self._opened.append(opened)
            return opened
        return None

    def _check_budget(self) -> None:
        """See whether another capture like the largest so far fits the budget."""
        assert self.request is not None
        limit = self.request.config.max_bytes
        if self._bytes + self._largest > limit:
            self._given_up |= {other.tool for other in self.request.roles.values()}
            more = f", and another capture takes {size(self._largest)}" if self._bytes <= limit else ""
            spent = f"global_profiler.max_bytes ({size(limit)}) is spent: {size(self._bytes)} written{more}"
            raise _LeftOutError(f"{spent}; nothing more is captured")

    def _check_alone(self, role: RoleRequest, tool: Tool) -> None:
        """See whether there is a capture beside which this tool cannot record."""
        at_tensors = isinstance(tool, TensorTool)
        for other in self._opened:
            alike = isinstance(other.tool, TensorTool) == at_tensors
            if alike and other.capture.engine is None and not (at_tensors and other.thread != threading.get_ident()):
                what = "the whole step" if other.capture.stage is None else f"stage {other.capture.stage}"
                reason = f"{role.tool} records a process as a whole, and {what} was being recorded"
                raise _LeftOutError(f"{reason}: this capture is left out")

    def _collect(self, opened: _Open) -> bool:
        """Let a tool that has warmed up collect; return whether that worked."""
        opened.collecting, opened.started_at = True, time.time()
        capture = opened.capture
        with self._lock, self.spans.detail(WRITE, step=capture.step), self._guarded("start", capture, opened.role):
            opened.tool.start(capture)
            return True
        self._opened.remove(opened)
        return False

    def _end(self, opened: _Open | None, units: dict[str, str | int] | None = None) -> list[ProfileFile]:
        """End a capture if it is still being taken, write down its files and return their entries."""
        entries: list[ProfileFile] = []
        with self._lock:
            if opened is None or opened not in self._opened:
                return entries
            self._opened.remove(opened)
            ended_at = time.time()
            self._on_write()
            with self.spans.detail(WRITE, step=opened.capture.step), self._guarded("stop", opened.capture, opened.role):
                self.writing = True
                try:
                    paths = opened.tool.stop()
                except KeptInPartError as error:
                    entries += self._write_down_files(opened, error.files, ended_at, units)
                    raise
                finally:
                    self.writing = False
                if opened.collecting:
                    entries += self._write_down_files(opened, paths, ended_at, units)
                    if not entries:
                        raise _LeftOutError(f"{opened.role.tool} wrote no file")
        return entries

    def _write_down_files(
        self, opened: _Open, paths: list[Path], ended_at: float, units: dict[str, str | int] | None
    ) -> list[ProfileFile]:
        """Write down the files of a capture that has ended, and return their entries."""
        assert self.request is not None
        request, entries = self.request, list[ProfileFile]()
        for path in plain_files(map(Path, paths)):
            shown, written = shown_path(path, request.journal.parent), path.stat().st_size if path.exists() else None
            entry = opened.capture.file(shown, written, opened.role.tool, request.process, opened.started_at)
            entry.units, entry.duration_s = units, round(ended_at - opened.started_at, 6)
            self._write_down(entry)
            entries.append(entry)
        num_bytes = sum(entry.bytes or 0 for entry in entries)
        self._bytes, self._largest = self._bytes + num_bytes, max(self._largest, num_bytes)
        return entries

    @contextmanager
    def _guarded(self, doing: str, capture: Capture, role: RoleRequest) -> Iterator[None]:
        """Say and write down what a tool raises in the block, which ends the run only under `strict`, and then not in
        place of an exception that is on its way already.
        """
        assert self.request is not None
        ending = sys.exception() is not None
        try:
            yield
        except ProfilerError:
            raise
        except Exception as error:
            plain = isinstance(error, (UserError, _LeftOutError))
            reason = str(error) if plain else f"{role.tool} failed to {doing}: {type(error).__name__}: {error}"
            if isinstance(error, UserError):  # it will not work the next time, either
                self._given_up.add(role.tool)
            about = (capture.step, capture.stage, capture.role, capture.rank, role.tool, self.request.process)
            self._write_down(ProfileFailure(reason, *about))
            where = f"step {capture.step}, {capture.stage or 'the whole step'}, rank {capture.rank}"
            self._say(f"profiling {where}: {reason}")
            if self.request.strict and not ending:
                raise ProfilerError(f"{reason} (global_profiler.strict ends the run)") from error

    def _write_down(self, entry: ProfileFile | ProfileFailure) -> None:
        assert self.request is not None
        try:
            add_entry(self.request.journal, self.request.process, entry)
        except OSError as error:
            self._say(f"profiling: the journal cannot be written ({error}); the manifest will lack an entry")
