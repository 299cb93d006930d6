"""The profiler of Ascend NPUs, `torch_npu.profiler`: what host and NPU do, as a folder of raw data that it also parses.

A capture gives one folder, `<name>_<pid>_<time>_ascend_pt`, for MindStudio Insight; once parsed as text, its
`ASCEND_PROFILER_OUTPUT/trace_view.json` opens in Perfetto too.
"""

import importlib
import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function
from typing_extensions import override

from pellucid.config.schema.profiler import NpuToolConfig
from pellucid.errors import UserError
from pellucid.observe.tools.base import Capture, KeptInPartError, Tool, ToolSettings

KEYS = "profiler.tool_config.npu"


class NpuTool(Tool):
    """Records with Ascend's profiler. Contents without npu and cpu, as the empty ones, mean both."""

    def __init__(self, settings: ToolSettings) -> None:
        self._options = settings.role_options.npu
        self._sources = _sources(self._options)
        self._profile: Any = None
        self._collecting = False
        self._folder = Path()

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether the profiler works here and collects what it is asked for.

        Raises:
            UserError: torch_npu cannot be imported, there is no NPU, or the contents cannot be had together.
        """
        options = settings.role_options.npu
        if options.level != "level0" and "npu" not in _sources(options):
            reason = f"'{options.level}' says how deep to look into the NPU, of which nothing is collected."
            raise UserError(f"{KEYS}.level", reason, f"Add 'npu' to {KEYS}.contents, or leave level0.")
        if not _import_torch_npu().npu.is_available():
            reason = "'npu' profiles Ascend NPUs, and torch_npu finds none on this machine."
            raise UserError("global_profiler.tool", reason, "See whether `npu-smi info` lists one, or use tool: torch.")

    @override
    def warm_up(self, capture: Capture) -> None:
        self._begin(capture, warm_up=True)

    @override
    def start(self, capture: Capture) -> None:
        """Begin to collect.

        Raises:
            RuntimeError: torch_npu's profiler did not start.
        """
        if self._profile is None:
            self._begin(capture, warm_up=False)
        else:
            self._tell("step")
        self._collecting = True

    @override
    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a range, which shows on the NPU's timeline as well, where that is collected."""
        return self._marked(name) if "npu" in self._sources else record_function(name)

    @override
    def stop(self) -> list[Path]:
        """End the capture, and parse its data if that is asked for.

        Raises:
            KeptInPartError: it cannot be parsed; the raw data is kept.
        """
        profile, self._profile = self._profile, None
        collected, self._collecting = self._collecting, False
        assert profile is not None
        try:
            if collected:
                _aloud(type(profile).step, profile)  # past the last action, which writes the data
        finally:
            profile.stop()
        if not collected:
            return []  # it was only warming up, and has deleted its folder
        if self._options.analysis != "off":
            try:
                _parse(self._folder)
            except Exception as error:
                raise KeptInPartError(error, [self._folder]) from error
        return [self._folder]

    def _begin(self, capture: Capture, *, warm_up: bool) -> None:
        npu = importlib.import_module("torch_npu.profiler")
        contents = self._options.contents
        # A whole step's name says the step once. Parsing is left to `stop`, so that a capture which failed is not
        # parsed. The handler puts folder and name into a global, hence none is made before.
        name = capture.name.replace("_step_step", "_step")
        handler = _aloud(npu.tensorboard_trace_handler, str(capture.folder), name, analyse_flag=False)
        actions = [npu.ProfilerAction.WARMUP] * warm_up + [npu.ProfilerAction.RECORD_AND_SAVE]
        self._profile = npu.profile(
            activities=[getattr(npu.ProfilerActivity, source.upper()) for source in sorted(self._sources)],
            # Without a schedule torch_npu warns at the end of each capture that its data may be incomplete.
            schedule=lambda step: actions[step] if step < len(actions) else npu.ProfilerAction.NONE,
            on_trace_ready=handler,
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
            with_modules="module" in contents,
            experimental_config=self._experimental_config(npu),
        )
        self._tell("start")
        self._folder = Path(self._profile.prof_if.prof_path)

    def _tell(self, call: str) -> None:
        """Start the profiler, or let it step; one that fails at that is given up."""
        profile = self._profile
        try:
            _aloud(getattr(type(profile), call), profile)
            if not profile.prof_if.prof_path:
                raise RuntimeError("torch_npu's profiler made no folder, as where the process runs under msprof")
        except BaseException:
            self._profile = None
            profile.stop()  # else no other could start
            raise

    def _experimental_config(self, npu: Any) -> Any:
        level = self._options.level.capitalize()
        metrics = "PipeUtilization" if level in ("Level1", "Level2") else "AiCoreNone"  # no metrics below level 1
        return npu._ExperimentalConfig(
            profiler_level=getattr(npu.ProfilerLevel, level),
            aic_metrics=getattr(npu.AiCMetrics, metrics),
            # Text has a trace that Perfetto and the report read, and any CANN can write it.
            export_type=npu.ExportType.Db if self._options.analysis == "db" else npu.ExportType.Text,
            data_simplification=True,
            mstx="npu" in self._sources,  # ranges on the NPU's timeline
        )

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        npu = importlib.import_module("torch_npu.npu")
        with record_function(name):
            mark = npu.mstx.range_start(name, npu.current_stream())
            try:
                yield
            finally:
                npu.mstx.range_end(mark)


def _sources(options: NpuToolConfig) -> set[str]:
    """Return what is collected from, of npu and cpu; without cpu the profiler captures nothing."""
    return {"cpu"} | ({"npu", "cpu"} & set(options.contents) or {"npu"})


def _parse(folder: Path) -> None:
    """Let torch_npu parse a capture, in processes of its own.

    Raises:
        RuntimeError: there is no whole trace.
    """
    profiler = importlib.import_module("torch_npu.profiler.profiler")
    start_method = multiprocessing.get_start_method(allow_none=True)
    try:
        _aloud(profiler.analyse, profiler_path=str(folder), max_process_number=1)
    finally:
        multiprocessing.set_start_method(start_method, force=True)  # it sets fork, for the whole process
    output = folder / "ASCEND_PROFILER_OUTPUT"
    if not (any(output.glob("*.db")) or _is_whole(output / "trace_view.json")):  # what its processes fail at they print
        raise RuntimeError(f"torch_npu could not parse {folder}, and has printed why; the raw data is kept")


def _is_whole(trace: Path) -> bool:
    """Tell whether a trace is closed; torch_npu leaves it open where the NPU's half is missing."""
    if not trace.exists():
        return False
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 2))
        end = file.read()
    return end.endswith(b"]") and end != b",]"


def _aloud(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch_npu's profiler without the wrapper that prints what it raises and goes on."""
    return inspect.unwrap(function)(*args, **kwargs)


def _import_torch_npu() -> Any:
    """Return torch_npu.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:  # not installed; without CANN; beside another accelerator
        release = ".".join(torch.__version__.split(".")[:2])
        raise UserError(
            "global_profiler.tool",
            f"needs the package 'torch_npu', which cannot be imported: {error}.",
            f"Install Ascend's CANN, source its set_env.sh, and install torch-npu=={release}.*, the release for this "
            "torch.",
        ) from error
