"""The profiler of one process: decides when its tools start and stop, and writes down what they wrote.

The controller and every rank have one. The loop, or the rank's calls, tell it of steps and stages; engines tell it of
units of work, which count for the stage of the task that they run in. Outside of profiled steps it only records spans.
"""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pellucid.errors import RunFailedError, UserError
from pellucid.observe.manifest import Journal, ProfileFailure, ProfileFile, plain_files, shown_path
from pellucid.observe.request import ProcessRequest, RoleRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.observe.tools import Capture, KeptInPartError, TensorTool, Tool, tool_class
from pellucid.observe.window import Phase, Window
from pellucid.stages import PREFILL, ROLE_OF, UNITS_OF, Stage, TokenSpans, Unit

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
WRITE = "write_profile"
"""Span of what profiling itself takes: to start tools, and to write files."""
MIN_FREE_BYTES, PLAIN_RATIO = 256 * 1024**2, 16
"""Space that a capture may need on the disk before one has shown what they take, and by how much traces shrink in
the end."""

MAX_STEPS_KEPT = 16
"""Steps of which it is known which stages ran."""


class ProfilerError(RunFailedError):
    """Profiling failed, and `global_profiler.strict` asks for the run to end then."""


@dataclass(slots=True, eq=False)
class _Open:
    """A capture that has begun."""

    capture: Capture
    role: RoleRequest
    tool: Tool
    started_at: float
    collecting: bool = True
    """False while it warms up."""
    listens: bool = True
    """False once the tool has failed to mark a range, or to look at a pass."""
    thread: int = field(default_factory=threading.get_ident)


@dataclass(slots=True, eq=False)
class _StageRun:
    """One stage under way, in the task that entered it."""

    stage: Stage
    step: int
    opened: _Open | None = None
    """Its own capture."""
    sampler: _Sampler | None = None
    in_mini_batch: bool = False


_current: ContextVar[_StageRun | None] = ContextVar("stage_run", default=None)


class ProcessProfiler:
    """Records what one process does, stage by stage; several stages may be under way at once, each in a task of its
    own.

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
        self._ran: dict[int, set[Stage]] = defaultdict(set)
        self._runs: list[_StageRun] = []
        """The stages under way."""
        self._step: int | None = None
        """The profiled step that has begun and not ended."""
        self._whole: _Open | None = None
        """The capture of whole steps."""
        self._opened: list[_Open] = []
        """All captures that are being taken."""
        self._idle_tools: dict[str, list[Tool]] = defaultdict(list)
        self._calls: Counter[tuple[int, Stage]] = Counter()
        """How often each stage of a step has been captured."""
        self._bytes, self._largest = 0, 0
        self._num_writing = 0
        self._spent = False
        """Nothing more is captured: the budget is spent."""
        self._broken: set[str] = set()
        """Tools that do not work here."""
        self._lock = threading.RLock()
        """Held while captures begin and end, in whichever thread."""
        self._journal = None if request is None else Journal(request.journal, request.process)

    @property
    def at(self) -> tuple[Stage, int] | None:
        """The stage that the calling task is in, and its step."""
        run = _current.get()
        return None if run is None else (run.stage, run.step)

    @property
    def writing(self) -> bool:
        """Whether a tool writes its files at this moment."""
        return self._num_writing > 0

    def take_ran(self, step: int) -> set[Stage]:
        """Return the stages of a step that have run, and forget them."""
        return self._ran.pop(step, set())

    def begin_step(self, step: int) -> None:
        """Begin to capture, if this is one of the steps asked for."""
        request = self.request
        if request is None or step not in request.steps:
            return
        self._step = step
        if self._whole is None and (role := request.whole_step) is not None:
            self._whole = self._start(role, self._capture(role, request.group, step, None))

    def end_step(self, step: int, *, last: bool) -> None:
        """Write what is captured, unless the next step shares the capture and this one is not the `last` that runs."""
        request = self.request
        if self._step is None or request is None:
            return
        self._step = None
        if last or not (request.continuous and step + 1 in request.steps):
            whole, self._whole = self._whole, None
            self._stop(whole)

    def flush(self) -> None:
        """End the captures that are being taken, if there are any: what follows may be the end of the process."""
        for opened in list(self._opened):
            self._stop(opened)
        self._whole = None

    @contextmanager
    def stage(self, stage: Stage, step: int) -> Iterator[None]:
        """Enclose a stage of the calling task: a span, and within profiled steps a capture or a range in one."""
        run, before = _StageRun(stage, step), _current.get()
        self._ran[step].add(stage)
        while len(self._ran) > MAX_STEPS_KEPT:
            del self._ran[min(self._ran)]
        self._runs.append(run)
        _current.set(run)
        try:
            with self._captured(run), self.spans.span(stage, step=step), self._range(run, stage):
                yield
        finally:
            self._runs.remove(run)
            _current.set(before)

    @contextmanager
    def _captured(self, run: _StageRun) -> Iterator[None]:
        request, stage = self.request, run.stage
        role = None
        if request is not None and run.step in request.steps:
            role = request.roles.get(ROLE_OF.get(stage, ""))
        if role is None or not role.captures(stage):
            yield
            return
        self._calls[run.step, stage] += 1
        if (window := role.windows.get(stage)) is not None:
            run.sampler = _Sampler(self, run, role, window)
        else:
            run.opened = self._start(role, self._capture(role, ROLE_OF[stage], run.step, stage))
        try:
            yield
        finally:
            if run.sampler is None:
                self._stop(run.opened)
            else:
                run.sampler.finish()

    def _run_of(self, unit: Unit) -> _StageRun | None:
        """Return the stage that a unit belongs to: of its task, or of a thread without one the only stage with such
        units.
        """
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
            done = self._attempt("look at a pass", opened.capture, opened.role, lambda: (event(tool), True))
            opened.listens = done is not None

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """Enclose a unit of work; passes and mini-batches are spans, decoding steps are too many for that."""
        run = self._run_of(unit)
        if run is None:
            yield
            return
        sampler = run.sampler if self._counts(run, unit) else None
        if sampler is not None:
            sampler.before()
        shown: AbstractContextManager[None] = nullcontext()
        if unit not in (Unit.DECODE_STEP, Unit.OPTIMIZER_STEP):
            shown = self.spans.detail(unit, stage=run.stage, step=run.step, **args)
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
            if sampler is not None:
                sampler.after()

    def _counts(self, run: _StageRun, unit: Unit) -> bool:
        """Tell whether a unit is one of those that the stage's schedule counts.

        Of an update's passes only those within a mini-batch do: some losses take one more, forward alone, to choose
        tokens.
        """
        if run.sampler is None or run.sampler.window.unit is not unit:
            return False
        return unit is not Unit.MICRO_BATCH or run.in_mini_batch or Unit.MINI_BATCH not in UNITS_OF[run.stage]

    @contextmanager
    def _range(self, run: _StageRun, name: str) -> Iterator[None]:
        """Show the enclosed block as a range in the stage's own capture, or in that of the whole step."""
        opened = run.opened or self._whole
        if opened is None or not opened.collecting or not opened.listens:
            yield
            return
        at = (opened.capture, opened.role)
        context = self._attempt("mark a range", *at, lambda: _entered(opened.tool.range(name)))
        opened.listens = context is not None
        try:
            yield
        finally:
            if context is not None:
                left = self._attempt("mark a range", *at, lambda: (context.__exit__(None, None, None), True))
                opened.listens = opened.listens and left is not None

    def _start(self, role: RoleRequest, capture: Capture, *, warm_up: bool = False) -> _Open | None:
        """Begin a capture, or its warm-up; None where that did not work."""
        if self._spent or role.tool in self._broken:
            return None

        def begin() -> _Open | None:
            if not self._has_room(capture, role):
                return None
            capture.folder.mkdir(parents=True, exist_ok=True)
            tool = self._tool(role)
            if (other := self._in_the_way(tool)) is not None:
                self._idle_tools[_tool_key(role)].append(tool)
                reason = f"{role.tool} records a process as a whole, and {_what(other.capture)} was being recorded"
                self._fail(capture, role, f"{reason}: this capture is left out")
                return None
            (tool.warm_up if warm_up else tool.start)(capture)
            return _Open(capture, role, tool, time.time(), collecting=not warm_up)

        with self._lock:
            if not self._has_budget(capture, role):
                return None
            with self.spans.detail(WRITE, step=capture.step):
                opened = self._attempt("start", capture, role, begin)
            if opened is not None:
                self._opened.append(opened)
        return opened

    def _in_the_way(self, tool: Tool) -> _Open | None:
        """Return a capture beside which this tool cannot record."""
        looks_at_tensors = isinstance(tool, TensorTool)
        for opened in self._opened:
            is_alike = isinstance(opened.tool, TensorTool) == looks_at_tensors
            if is_alike and not (looks_at_tensors and opened.thread != threading.get_ident()):
                return opened
        return None

    def _capture(self, role: RoleRequest, name: str, step: int, stage: Stage | None, window: int = 1) -> Capture:
        request = self.request
        assert request is not None
        folder = role.folder / f"rollout_replica{request.rank}" if stage is Stage.ROLLOUT_GENERATE else role.folder
        call = 1 if stage is None else self._calls[step, stage]
        models = () if stage is None else self.models_of(stage)
        return Capture(
            folder, name, step, stage, request.rank, request.num_ranks, call=call, window=window, models=models
        )

    def _collect(self, opened: _Open) -> bool:
        """Let a tool that has warmed up collect; return whether that worked."""
        opened.collecting, opened.started_at = True, time.time()
        with self._lock, self.spans.detail(WRITE, step=opened.capture.step):
            done = self._attempt(
                "start", opened.capture, opened.role, lambda: opened.tool.start(opened.capture) or True
            )
            if done is None:
                self._opened.remove(opened)
        return done is not None

    def _tool(self, role: RoleRequest) -> Tool:
        """Return a tool of this process for a role that takes no capture at this moment, made at first use."""
        assert self.request is not None
        if idle := self._idle_tools[_tool_key(role)]:
            return idle.pop()
        kind, settings = tool_class(role.tool), self.request.settings(role)
        kind.check(settings)
        return kind(settings)

    def _stop(self, opened: _Open | None, units: dict[str, str | int] | None = None) -> list[ProfileFile]:
        """End a capture if it is still being taken, write down its files and return them."""
        with self._lock:
            if opened is None or opened not in self._opened:
                return []
            self._opened.remove(opened)
            return self._write(opened, units)

    def _write(self, opened: _Open, units: dict[str, str | int] | None) -> list[ProfileFile]:
        capture, ended_at = opened.capture, time.time()

        def stop() -> dict[Path, int | None]:
            try:
                return _sizes(opened.tool.stop())
            except KeptInPartError as error:
                self._write_down_files(opened, _sizes(error.files), ended_at, units)
                raise

        self._on_write()
        self._num_writing += 1
        try:
            with self.spans.detail(WRITE, step=capture.step):
                sizes = self._attempt("stop", capture, opened.role, stop)
        finally:
            self._num_writing -= 1
        self._idle_tools[_tool_key(opened.role)].append(opened.tool)
        if sizes is None or not opened.collecting:
            return []
        if not sizes:
            self._fail(capture, opened.role, f"{opened.role.tool} wrote no file")
        return self._write_down_files(opened, sizes, ended_at, units)

    def _write_down_files(
        self, opened: _Open, sizes: dict[Path, int | None], ended_at: float, units: dict[str, str | int] | None
    ) -> list[ProfileFile]:
        """Write down the files of a capture that has ended, and return their entries."""
        assert self.request is not None
        capture = opened.capture
        entries = [
            ProfileFile(
                path=shown_path(path, self.request.journal.parent),
                bytes=size,
                tool=opened.role.tool,
                role=capture.role,
                stage=capture.stage,
                step=capture.step,
                rank=capture.rank,
                num_ranks=capture.num_ranks,
                pid=capture.pid,
                process=self.request.process,
                host=socket.gethostname(),
                call=capture.call,
                window=capture.window,
                units=units,
                started_at=opened.started_at,
                duration_s=round(ended_at - opened.started_at, 6),
            )
            for path, size in sizes.items()
        ]
        for entry in entries:
            self._write_down(entry)
        written = sum(size or 0 for size in sizes.values())
        self._bytes, self._largest = self._bytes + written, max(self._largest, written)
        return entries

    def _has_budget(self, capture: Capture, role: RoleRequest) -> bool:
        """Tell whether another capture like the largest so far fits the budget."""
        assert self.request is not None
        limit = self.request.max_bytes
        if self._bytes + self._largest <= limit:
            return True
        self._spent = True
        more = f", and another capture takes {megabytes(self._largest)}" if self._bytes <= limit else ""
        spent = f"global_profiler.max_bytes ({megabytes(limit)}) is spent: {megabytes(self._bytes)} written{more}"
        self._fail(capture, role, f"{spent}; nothing more is captured", final=True)
        return False

    def _has_room(self, capture: Capture, role: RoleRequest) -> bool:
        """Tell whether another capture like the largest so far fits on the disk, plain before it is compressed."""
        existing = next(
            folder for folder in (role.folder.absolute(), *role.folder.absolute().parents) if folder.exists()
        )
        free = shutil.disk_usage(existing).free
        if free >= max(PLAIN_RATIO * self._largest, MIN_FREE_BYTES):
            return True
        self._fail(
            capture, role, f"only {megabytes(free)} are left on the disk of {existing}; this capture is left out"
        )
        return False

    def _attempt(self, doing: str, capture: Capture, role: RoleRequest, action: Callable[[], Result]) -> Result | None:
        """Do what a tool does; what it raises is said and written down, and ends the run only under `strict`."""
        assert self.request is not None
        ending = sys.exception() is not None
        try:
            return action()
        except ProfilerError:
            raise
        except Exception as error:
            wrong = isinstance(error, UserError)  # it will not work the next time, either
            if wrong:
                self._broken.add(role.tool)
            reason = str(error) if wrong else f"{role.tool} failed to {doing}: {type(error).__name__}: {error}"
            self._fail(capture, role, reason, final=wrong, ending=True)
            if self.request.strict and not ending:
                raise ProfilerError(f"{reason} (global_profiler.strict ends the run)") from error
            return None

    def _fail(
        self, capture: Capture, role: RoleRequest, reason: str, *, final: bool = False, ending: bool | None = None
    ) -> None:
        """Say and write down what went wrong.

        Args:
            capture: what it was to be.
            role: whose.
            reason: for the user.
            final: nothing more is captured with this tool, or at all.
            ending: whether an exception is on its way already, which must not be replaced; None finds out.

        Raises:
            ProfilerError: under `strict`, unless something else ends the run.
        """
        assert self.request is not None
        if ending is None:
            ending = sys.exception() is not None
        failure = ProfileFailure(
            reason,
            capture.step,
            capture.stage,
            capture.role,
            capture.rank,
            role.tool,
            self.request.process,
            final=final,
        )
        self._write_down(failure)
        where = capture.stage or "the whole step"
        self._say(f"profiling step {capture.step}, {where}, rank {capture.rank}: {reason}")
        if self.request.strict and not ending:
            raise ProfilerError(f"{reason} (global_profiler.strict ends the run)")

    def _write_down(self, entry: ProfileFile | ProfileFailure) -> None:
        assert self._journal is not None
        try:
            self._journal.add(entry)
        except OSError as error:
            self._say(f"profiling: the journal cannot be written ({error}); the manifest will lack an entry")


class _Sampler:
    """Counts the units of a stage, and opens and closes captures round those that the window asks for."""

    def __init__(self, profiler: ProcessProfiler, run: _StageRun, role: RoleRequest, window: Window) -> None:
        self.window = window
        self._profiler, self._run, self._role = profiler, run, role
        self._index, self._first = -1, 0
        self._failed = False
        self._files: list[ProfileFile] = []

    def _capture(self, window: int = 1) -> Capture:
        run = self._run
        return self._profiler._capture(self._role, ROLE_OF[run.stage], run.step, run.stage, window)

    def before(self) -> None:
        """A unit begins."""
        self._index += 1
        phase, profiler, run = self.window.phase(self._index), self._profiler, self._run
        if phase is Phase.OFF or self._failed:
            return
        if run.opened is None:
            self._first = self._index
            capture = self._capture(self.window.cycle(self._index))
            run.opened = profiler._start(self._role, capture, warm_up=phase is Phase.WARM_UP)
            self._failed = run.opened is None
        elif phase is Phase.ACTIVE and not run.opened.collecting:
            self._first = self._index
            self._failed = not profiler._collect(run.opened)
            run.opened = None if self._failed else run.opened

    def after(self) -> None:
        """A unit has ended."""
        if self.window.ends_with(self._index):
            self._close()

    def finish(self) -> None:
        """The stage has ended: say so if it was over before the window was."""
        window, num_units, early = self.window, self._index + 1, sys.exception() is not None
        self._close()
        for file in self._files:
            assert file.units is not None
            file.units["of"] = num_units
            self._profiler._write_down(file)
        if num_units < window.num_units and not self._failed:
            ended = "ended early, after" if early else "has only"
            asked = f"the schedule ({window} of {window.unit}) asks for {window.num_units} units"
            self._profiler._fail(self._capture(), self._role, f"{asked}, and the stage {ended} {num_units}")

    def _close(self) -> None:
        opened, self._run.opened = self._run.opened, None
        units: dict[str, str | int] = {"unit": str(self.window.unit), "first": self._first}
        self._files += self._profiler._stop(opened, units | {"count": self._index + 1 - self._first})


def _tool_key(role: RoleRequest) -> str:
    return f"{role.tool} {role.options}"


def _what(capture: Capture) -> str:
    """Return what a capture is of, in words."""
    return "the whole step" if capture.stage is None else f"stage {capture.stage}"


def _entered(context: AbstractContextManager[object]) -> AbstractContextManager[object]:
    context.__enter__()
    return context


def _sizes(paths: list[Path]) -> dict[Path, int | None]:
    """Return the size of each file among `paths` and in their folders; None where it is not there yet."""
    return {path: path.stat().st_size if path.exists() else None for path in plain_files(map(Path, paths))}


def megabytes(num_bytes: int) -> str:
    """Return a size as people read it, e.g. `1,234.5 MB`."""
    return f"{num_bytes / 1e6:,.1f} MB"
