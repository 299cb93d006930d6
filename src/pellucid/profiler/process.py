"""The profiler of one process: decides when its tools start and stop, and writes down what they wrote.

The controller and every rank have one. The loop, or the rank's calls, tell it of steps and stages; engines tell it of units of
work. Outside of profiled steps it only records spans.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pellucid.errors import UserError
from pellucid.profiler.manifest import Journal, ProfileFailure, ProfileFile, plain_files, shown_path
from pellucid.profiler.probe import PREFILL, TokenSpans
from pellucid.profiler.request import ProcessRequest, RoleRequest
from pellucid.profiler.spans import SpanRecorder
from pellucid.profiler.tools import Capture, KeptInPartError, TensorTool, Tool, tool_class
from pellucid.profiler.window import Phase, Window
from pellucid.stages import ROLE_OF, UNITS_OF, Stage, Unit

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
WRITE = "write_profile"
"""Span of what profiling itself takes: to start tools, and to write files."""
MIN_FREE_BYTES, PLAIN_RATIO = 256 * 1024**2, 16
"""Space that a capture may need on the disk before one has shown what they take, and by how much traces shrink in the end."""


class ProfilerError(RuntimeError):
    """Profiling failed, and `global_profiler.strict` asks for the run to end then."""


@dataclass(slots=True)
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


class ProcessProfiler:
    """See the module. `say` is told, in one line, of what goes wrong.

    Args:
        spans: the process's span recorder.
        request: what is to be captured here; None: nothing.
        say: shows a line to the user, or logs it.
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
        self.at: tuple[Stage, int] | None = None
        """The stage that is running, and its step."""
        self.ran: set[Stage] = set()
        """Stages that have run since the step began."""
        self.adapt: Callable[[Tool], Tool] = lambda tool: tool
        """From a tool of this process to one that captures the rollout engine, which may have processes of its own."""
        self.models_of: Callable[[Stage], tuple[torch.nn.Module, ...]] = lambda stage: ()
        """The modules that a stage runs in this process."""
        self._step: int | None = None
        self._tools: dict[str, Tool] = {}
        self._open: _Open | None = None
        self._sampler: _Sampler | None = None
        self._calls: Counter[Stage] = Counter()
        """How often each stage has been captured in this step."""
        self._bytes, self._largest = 0, 0
        self.writing = False
        """Whether a tool writes its files at this moment."""
        self._in_mini_batch = False
        self._spent = False
        """Nothing more is captured: the budget is spent."""
        self._broken: set[str] = set()
        """Tools that do not work here."""
        self._journal = None if request is None else Journal(request.journal, request.process)

    def begin_step(self, step: int) -> None:
        """Begin to capture, if this is one of the steps asked for."""
        self.ran.clear()
        request = self.request
        if request is None or step not in request.steps:
            return
        self._step = step
        self._calls.clear()
        if self._open is None and (role := request.whole_step) is not None:
            self._start(role, request.group, None)

    def end_step(self, step: int, *, last: bool) -> None:
        """Write what is captured, unless the next step shares the capture and this one is not the `last` that runs."""
        request = self.request
        if self._step is None or request is None:
            return
        self._step = None
        if last or not (request.continuous and step + 1 in request.steps):
            self._stop()

    def flush(self) -> None:
        """End the capture in hand, if there is one: what follows may be the end of the process."""
        self._stop()

    @contextmanager
    def stage(self, stage: Stage, step: int) -> Iterator[None]:
        """Enclose a stage: a span, and within profiled steps a capture or a range in one."""
        before, self.at = self.at, (stage, step)
        self.ran.add(stage)
        try:
            with self._captured(stage), self.spans.span(stage, step=step), self._range(stage):
                yield
        finally:
            self.at = before

    @contextmanager
    def _captured(self, stage: Stage) -> Iterator[None]:
        role = None
        if self._step is not None and self.request is not None and self._open is None:
            role = self.request.roles.get(ROLE_OF.get(stage, ""))
        if role is None or not role.captures(stage):
            yield
            return
        self._calls[stage] += 1
        if (window := role.windows.get(stage)) is not None:
            self._sampler = _Sampler(self, stage, role, window)
        else:
            self._start(role, ROLE_OF[stage], stage)
        try:
            yield
        finally:
            sampler, self._sampler = self._sampler, None
            if sampler is None:
                self._stop()
            else:
                sampler.finish()

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """See `Probe`."""
        self._show(lambda tool: tool.begin_pass(spans, PREFILL))
        yield

    def results(self, **tensors: torch.Tensor | None) -> None:
        """See `Probe`."""
        self._show(lambda tool: tool.results({name: value for name, value in tensors.items() if value is not None}))

    def _show(self, event: Callable[[TensorTool], object]) -> None:
        """Let a tool that looks at tensors know of an event, if one collects at this moment."""
        opened = self._open
        if opened is None or not opened.collecting or not opened.listens:
            return
        if isinstance(tool := opened.tool, TensorTool):
            done = self._attempt("look at a pass", opened.capture, opened.role, lambda: (event(tool), True))
            opened.listens = done is not None

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """Enclose a unit of work; see `Probe`. Passes and mini-batches are spans, decoding steps are too many for that."""
        sampler = self._sampler if self._counts(unit) else None
        if sampler is not None:
            sampler.before()
        shown: AbstractContextManager[None] = nullcontext()
        if unit is not Unit.DECODE_STEP and self.at is not None:
            stage, step = self.at
            shown = self.spans.detail(unit, stage=stage, step=step, **args)
        outside, self._in_mini_batch = self._in_mini_batch, self._in_mini_batch or unit is Unit.MINI_BATCH
        try:
            with shown, self._range(unit):
                if spans is not None:
                    self._show(lambda tool: tool.begin_pass(spans, unit))
                yield
            if unit is Unit.MINI_BATCH:
                self._show(lambda tool: tool.end_mini_batch())
        finally:
            self._in_mini_batch = outside
            if sampler is not None:
                sampler.after()

    def _counts(self, unit: Unit) -> bool:
        """Tell whether a unit is one of those that the schedule in hand counts.

        Of an update's passes only those within a mini-batch do: some losses take one more, forward alone, to choose tokens.
        """
        sampler = self._sampler
        if sampler is None or sampler.window.unit is not unit:
            return False
        return unit is not Unit.MICRO_BATCH or self._in_mini_batch or Unit.MINI_BATCH not in UNITS_OF[sampler.stage]

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        """Show the enclosed block as a range in the capture that is being taken."""
        opened = self._open
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

    def _start(
        self, role: RoleRequest, name: str, stage: Stage | None, window: int = 1, *, warm_up: bool = False
    ) -> bool:
        """Begin a capture, or its warm-up; return whether that worked."""
        request = self.request
        assert request is not None and self._step is not None and self._open is None
        if self._spent or role.tool in self._broken:
            return False
        folder = role.folder / f"rollout_replica{request.rank}" if stage is Stage.ROLLOUT_GENERATE else role.folder
        capture = self._capture(folder, name, stage, window)
        if not self._has_budget(capture, role):
            return False

        def begin() -> _Open | None:
            if not self._has_room(capture, role):
                return None
            folder.mkdir(parents=True, exist_ok=True)
            tool = self._tool(role)
            if stage is Stage.ROLLOUT_GENERATE:
                tool = self.adapt(tool)
            (tool.warm_up if warm_up else tool.start)(capture)
            return _Open(capture, role, tool, time.time(), collecting=not warm_up)

        with self.spans.detail(WRITE, step=self._step):
            self._open = self._attempt("start", capture, role, begin)
        return self._open is not None

    def _capture(self, folder: Path, name: str, stage: Stage | None, window: int = 1) -> Capture:
        request, step = self.request, self._step
        assert request is not None and step is not None
        return Capture(
            folder,
            name,
            step,
            stage,
            request.rank,
            request.num_ranks,
            call=1 if stage is None else self._calls[stage],
            window=window,
            models=() if stage is None else self.models_of(stage),
        )

    def _collect(self, opened: _Open) -> bool:
        """Let a tool that has warmed up collect; return whether that worked."""
        opened.collecting, opened.started_at = True, time.time()
        with self.spans.detail(WRITE, step=opened.capture.step):
            done = self._attempt("start", opened.capture, opened.role, lambda: opened.tool.start(opened.capture) or True)
        if done is None:
            self._open = None
        return done is not None

    def _tool(self, role: RoleRequest) -> Tool:
        """Return this process's tool for a role, made at first use."""
        assert self.request is not None
        key = f"{role.tool} {role.options}"
        if key not in self._tools:
            kind, settings = tool_class(role.tool), self.request.settings(role)
            kind.check(settings)
            self._tools[key] = kind(settings)
        return self._tools[key]

    def _stop(self, units: dict[str, str | int] | None = None) -> list[ProfileFile]:
        """End the capture in hand, write down its files and return them."""
        opened, self._open = self._open, None
        if opened is None or self.request is None:
            return []
        capture, ended_at = opened.capture, time.time()

        def stop() -> dict[Path, int | None]:
            try:
                return _sizes(opened.tool.stop())
            except KeptInPartError as error:
                self._write_down_files(opened, _sizes(error.files), ended_at, units)
                raise

        self._on_write()
        self.writing = True
        try:
            with self.spans.detail(WRITE, step=capture.step):
                sizes = self._attempt("stop", capture, opened.role, stop)
        finally:
            self.writing = False
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
        existing = next(folder for folder in (role.folder.absolute(), *role.folder.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if free >= max(PLAIN_RATIO * self._largest, MIN_FREE_BYTES):
            return True
        self._fail(capture, role, f"only {megabytes(free)} are left on the disk of {existing}; this capture is left out")
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
            reason, capture.step, capture.stage, capture.role, capture.rank, role.tool, self.request.process, final=final
        )
        self._write_down(failure)
        where = "the whole step" if capture.stage is None else capture.stage
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

    def __init__(self, profiler: ProcessProfiler, stage: Stage, role: RoleRequest, window: Window) -> None:
        self.window = window
        self._profiler, self.stage, self._role = profiler, stage, role
        self._index, self._first = -1, 0
        self._failed = False
        self._files: list[ProfileFile] = []

    def before(self) -> None:
        """A unit begins."""
        self._index += 1
        phase, profiler = self.window.phase(self._index), self._profiler
        if phase is Phase.OFF or self._failed:
            return
        opened = profiler._open
        if opened is None:
            self._first = self._index
            cycle = self.window.cycle(self._index)
            warm_up = phase is Phase.WARM_UP
            self._failed = not profiler._start(self._role, ROLE_OF[self.stage], self.stage, cycle, warm_up=warm_up)
        elif phase is Phase.ACTIVE and not opened.collecting:
            self._first = self._index
            self._failed = not profiler._collect(opened)

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
            capture = self._profiler._capture(self._role.folder, ROLE_OF[self.stage], self.stage)
            ended = "ended early, after" if early else "has only"
            reason = f"the schedule ({window} of {window.unit}) asks for {window.num_units} units, and the stage {ended} {num_units}"
            self._profiler._fail(capture, self._role, reason)

    def _close(self) -> None:
        count = self._index + 1 - self._first
        units = {"unit": str(self.window.unit), "first": self._first, "count": count}
        self._files += self._profiler._stop(units)


def _entered(context: AbstractContextManager[object]) -> AbstractContextManager[object]:
    context.__enter__()
    return context


def _sizes(paths: list[Path]) -> dict[Path, int | None]:
    """Return the size of each file among `paths` and in their folders; None where it is not there yet."""
    return {path: path.stat().st_size if path.exists() else None for path in plain_files(map(Path, paths))}


def megabytes(num_bytes: int) -> str:
    """Return a size as people read it, e.g. `1,234.5 MB`."""
    return f"{num_bytes / 1e6:,.1f} MB"
