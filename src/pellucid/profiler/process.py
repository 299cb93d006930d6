"""The profiler of one process: decides when its tools start and stop, and writes down what they wrote.

The controller and every rank have one. The loop, or the rank's calls, tell it of steps and stages; engines tell it of units of
work. Outside of profiled steps it only records spans.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pellucid.errors import UserError
from pellucid.profiler.manifest import Journal, ProfileFailure, ProfileFile, plain_files, shown_path
from pellucid.profiler.request import ProcessRequest, RoleRequest
from pellucid.profiler.spans import SpanRecorder
from pellucid.profiler.tools import Capture, Tool, tool_class
from pellucid.profiler.window import Phase, Window
from pellucid.stages import ROLE_OF, Stage, Unit

Result = TypeVar("Result")
MIN_FREE_BYTES = 64 * 1024**2
"""Space that a capture may need on the disk, before one has shown what they take."""


class ProfilerError(RuntimeError):
    """Profiling failed, and `global_profiler.strict` asks for the run to end then."""


@dataclass(slots=True)
class _Open:
    """A capture that has begun."""

    capture: Capture
    role: RoleRequest
    tool: Tool
    started_at: float
    first_unit: int = 0
    collecting: bool = True
    """False while it warms up."""


class ProcessProfiler:
    """See the module. `say` is told, in one line, of what goes wrong.

    Args:
        spans: the process's span recorder.
        request: what is to be captured here; None: nothing.
        say: shows a line to the user, or logs it.
    """

    def __init__(self, spans: SpanRecorder, request: ProcessRequest | None, say: Callable[[str], None]) -> None:
        self.spans, self.request, self._say = spans, request, say
        self.at: tuple[Stage, int] | None = None
        """The stage that is running, and its step."""
        self.ran: set[Stage] = set()
        """Stages that have run since the step began."""
        self.adapt: Callable[[Tool], Tool] = lambda tool: tool
        """From a tool of this process to one that captures the rollout engine, which may have processes of its own."""
        self._step: int | None = None
        self._tools: dict[str, Tool] = {}
        self._open: _Open | None = None
        self._sampler: _Sampler | None = None
        self._calls: Counter[Stage] = Counter()
        """How often each stage has been captured in this step."""
        self._num_captures, self._bytes, self._largest = 0, 0, 0
        self._stopped = False
        """Nothing more is captured: the budget is spent, or a tool does not work here."""
        self._journal = None if request is None else Journal(request.journal, request.process)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Enclose a step; a capture in it is written however the block ends."""
        self.begin_step(step)
        try:
            yield
        finally:
            self.end_step(step)

    def begin_step(self, step: int) -> None:
        """Begin to capture, if this is one of the steps asked for."""
        self.ran.clear()
        request = self.request
        if request is None or step not in request.steps or self._stopped:
            return
        self._step = step
        self._calls.clear()
        if self._open is None and (role := request.whole_step) is not None:
            self._start(role, request.group, None)

    def end_step(self, step: int, *, last: bool = False) -> None:
        """Write what is captured, unless the next step shares the capture and this is not the `last` of the run."""
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
            with self.spans.span(stage, step=step), self._captured(stage):
                yield
        finally:
            self.at = before

    @contextmanager
    def _captured(self, stage: Stage) -> Iterator[None]:
        role = None
        if self._step is not None and self.request is not None and not self._stopped:
            role = self.request.roles.get(ROLE_OF.get(stage, ""))
        if role is not None:
            self._calls[stage] += 1
        if role is not None and (window := role.windows.get(stage)) is not None:
            self._sampler = _Sampler(self, stage, role, window)
            try:
                yield
            finally:
                sampler, self._sampler = self._sampler, None
                sampler.finish()
        elif role is not None and role.discrete:
            self._start(role, ROLE_OF[stage], stage)
            try:
                with self._range(stage):
                    yield
            finally:
                self._stop()
        else:
            with self._range(stage):
                yield

    @contextmanager
    def unit(self, unit: Unit, **args: str | int | float) -> Iterator[None]:
        """Enclose a unit of work; see `Probe`. Passes and mini-batches are spans, decoding steps are too many for that."""
        sampler = self._sampler if self._sampler is not None and self._sampler.window.unit is unit else None
        if sampler is not None:
            sampler.before()
        shown: AbstractContextManager[None] = nullcontext()
        if unit is not Unit.DECODE_STEP and self.at is not None:
            stage, step = self.at
            shown = self.spans.detail(unit, stage=stage, step=step, **args)
        try:
            with shown, self._range(unit):
                yield
        finally:
            if sampler is not None:
                sampler.after()

    def _range(self, name: str) -> AbstractContextManager[object]:
        """Return a range in the capture that is being taken."""
        opened = self._open
        return nullcontext() if opened is None or not opened.collecting else opened.tool.range(name)

    def _start(
        self, role: RoleRequest, name: str, stage: Stage | None, window: int = 1, *, warm_up: bool = False
    ) -> bool:
        """Begin a capture, or its warm-up; return whether that worked."""
        request = self.request
        assert request is not None and self._step is not None and self._open is None
        folder = role.folder / f"rollout_replica{request.rank}" if stage is Stage.ROLLOUT_GENERATE else role.folder
        capture = self._capture(folder, name, stage, window)
        if self._stopped or not self._has_room(capture, role):
            return False

        def begin() -> _Open:
            folder.mkdir(parents=True, exist_ok=True)
            tool = self._tool(role)
            if stage is Stage.ROLLOUT_GENERATE:
                tool = self.adapt(tool)
            (tool.warm_up if warm_up else tool.start)(capture)
            return _Open(capture, role, tool, time.time(), collecting=not warm_up)

        self._open = self._attempt("start", capture, role, begin)
        self._num_captures += self._open is not None
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
            number=self._num_captures + 1,
            call=1 if stage is None else self._calls[stage],
            window=window,
        )

    def _collect(self, opened: _Open) -> bool:
        """Let a tool that has warmed up collect; return whether that worked."""
        opened.collecting, opened.started_at = True, time.time()
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
        capture = opened.capture
        paths = self._attempt("stop", capture, opened.role, opened.tool.stop)
        if paths is None or not opened.collecting:
            return []
        entries: list[ProfileFile] = []
        written = 0
        for path in plain_files(paths):
            size = path.stat().st_size if path.exists() else None
            written += size or 0
            entry = ProfileFile(
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
                window=capture.window,
                units=units,
                started_at=opened.started_at,
                duration_s=round(time.time() - opened.started_at, 6),
            )
            self._write_down(entry)
            entries.append(entry)
        if not paths:
            self._fail(capture, opened.role, f"{opened.role.tool} wrote no file")
        self._bytes, self._largest = self._bytes + written, max(self._largest, written)
        return entries

    def _has_room(self, capture: Capture, role: RoleRequest) -> bool:
        """Tell whether another capture like the largest so far fits the budget and the disk."""
        request = self.request
        assert request is not None
        if self._bytes + self._largest > request.max_bytes:
            self._stopped = True
            limit, wrote = _megabytes(request.max_bytes), _megabytes(self._bytes)
            more = f", and another capture takes {_megabytes(self._largest)}" if self._bytes <= request.max_bytes else ""
            reason = f"global_profiler.max_bytes ({limit}) is spent: {wrote} written{more}; nothing more is captured"
            self._fail(capture, role, reason)
            return False
        existing = next(folder for folder in (role.folder.absolute(), *role.folder.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if free < max(2 * self._largest, MIN_FREE_BYTES):
            self._fail(capture, role, f"only {_megabytes(free)} are left on the disk of {existing}; this capture is left out")
            return False
        return True

    def _attempt(self, doing: str, capture: Capture, role: RoleRequest, action: Callable[[], Result]) -> Result | None:
        """Do what a tool does; what it raises is said and written down, and ends the run only under `strict`."""
        assert self.request is not None
        try:
            return action()
        except Exception as error:
            if isinstance(error, UserError):
                self._stopped = True  # it will not work the next time, either
                reason = str(error)
            else:
                reason = f"{role.tool} failed to {doing}: {type(error).__name__}: {error}"
            self._fail(capture, role, reason)
            if self.request.strict:
                raise ProfilerError(f"{reason} (global_profiler.strict ends the run)") from error
            return None

    def _fail(self, capture: Capture, role: RoleRequest, reason: str) -> None:
        assert self.request is not None
        failure = ProfileFailure(
            reason, capture.step, capture.stage, capture.role, capture.rank, role.tool, self.request.process
        )
        self._write_down(failure)
        where = "the whole step" if capture.stage is None else capture.stage
        self._say(f"profiling step {capture.step}, {where}, rank {capture.rank}: {reason}")

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
        self._profiler, self._stage, self._role = profiler, stage, role
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
            self._failed = not profiler._start(self._role, ROLE_OF[self._stage], self._stage, cycle, warm_up=warm_up)
        elif phase is Phase.ACTIVE and not opened.collecting:
            self._first = self._index
            self._failed = not profiler._collect(opened)

    def after(self) -> None:
        """A unit has ended."""
        if self.window.ends_with(self._index):
            self._close()

    def finish(self) -> None:
        """The stage has ended: say so if it was over before the first cycle was."""
        self._close()
        window, num_units = self.window, self._index + 1
        for file in self._files:
            assert file.units is not None
            file.units["of"] = num_units
            self._profiler._write_down(file)
        missing = window.first_active + (window.active or 1) - num_units
        if missing > 0 and not self._failed:
            capture = self._profiler._capture(self._role.folder, ROLE_OF[self._stage], self._stage)
            wanted = f"{window} of {window.unit}"
            reason = f"the schedule ({wanted}) asks for {missing} more units than the stage has ({num_units})"
            self._profiler._fail(capture, self._role, reason)

    def _close(self) -> None:
        count = self._index + 1 - self._first
        units = {"unit": str(self.window.unit), "first": self._first, "count": count}
        self._files += self._profiler._stop(units)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
