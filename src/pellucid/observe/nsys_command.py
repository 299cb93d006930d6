"""The command line of `nsys profile`: from the config's option mappings to arguments that the nsys of this machine can
do.

`observe/recording.py` starts the controller and the ranks with it; `tools/nsys.py` finds its own process's nsys with
`own_nsys`.
"""

import importlib.metadata
import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from pellucid.config.schema.profiler import GlobalNsysConfig
from pellucid.errors import MissingExtraError, UserError
from pellucid.observe.nsys_supervisor import NUM_TRIES, run_watched
from pellucid.observe.request import ProcessRequest
from pellucid.stages import stages_of

DOMAIN, CAPTURE_RANGE = "pellucid", "capture"
"""NVTX domain of all ranges, and the range in it that opens a capture where CUDA's own calls cannot."""
RAW_PREFIX = "nsys-in-progress-"
"""How folders begin in which nsys writes, below `save_path`; one a start of the run, gone when its files have their
names."""
TRY_S = 30.0
"""How long nsys may take to record a program that does nothing."""
OPTIONS_KEY = "global_profiler.global_tool_config.nsys"
_OURS = ("output", "force-overwrite")
_GPU_TRACES = ("cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "nvvideo")
_GPU_OPTIONS = ("cuda", "gpu")
Options = Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True)
class NsysCommand:
    """What is put before a program so that nsys records it."""

    arguments: list[str]
    """`nsys profile …` without `--output`."""
    notices: list[str] = field(default_factory=list)
    """What of the options was changed for this machine, in words for the user."""


def nsys_command(options: Options, field_name: str, *, cuda: bool, num_captures: int | None) -> NsysCommand:
    """Return the command for options as the config states them.

    Args:
        options: long options of `nsys profile` without dashes, and their values.
        field_name: the config key they are from.
        cuda: whether the process works with CUDA; without, what needs it is left out or replaced.
        num_captures: captures that the process makes at most; None: not known before.

    Raises:
        UserError: an option is not the user's to set.
    """
    chosen = dict(options)
    for name in _OURS:
        if name in chosen:
            raise UserError(
                f"{field_name}.{name}",
                "cannot be set: the files get their names when they are complete.",
                "Set global_profiler.save_path.",
            )
    notices = [] if cuda else _without_gpu(chosen)
    # Python's own work shows in the ranges; sampling needs rights that containers seldom give, and stops nsys without
    # them.
    chosen = {"sample": "none", "cpuctxsw": "none", "wait": "primary"} | chosen
    if chosen.get("capture-range") not in (None, "none"):
        if chosen["capture-range"] == "nvtx":
            chosen.setdefault("nvtx-capture", f"{CAPTURE_RANGE}@{DOMAIN}")
        chosen.setdefault("kill", "none")
        end = chosen.get("capture-range-end")
        if end is None:
            chosen["capture-range-end"] = "repeat" if num_captures is None else f"repeat-shutdown:{num_captures}"
        elif (limit := _limit(str(end))) is not None and num_captures is not None and limit < num_captures:
            notices.append(
                f"{field_name}.capture-range-end: {end} records {limit} of up to {num_captures} captures; null "
                "records all."
            )
    arguments = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in chosen.items()
        if value is not None
    ]
    return NsysCommand(["nsys", "profile", "--force-overwrite=true", *arguments], notices)


def _without_gpu(chosen: dict[str, str | int | bool | None]) -> list[str]:
    """Take out what needs CUDA, and return one line that says so."""
    out = [name for name in chosen if name.startswith(_GPU_OPTIONS)]
    for name in out:
        del chosen[name]
    traces = str(chosen.get("trace") or "nvtx").split(",")
    kept = [trace for trace in traces if not trace.startswith(_GPU_TRACES)]
    if "nvtx" not in kept:
        kept.append("nvtx")
    out = [trace for trace in traces if trace not in kept] + out
    chosen["trace"] = ",".join(kept)
    replaced = ""
    if chosen.get("capture-range") == "cudaProfilerApi":
        chosen["capture-range"] = "nvtx"
        replaced = f"{', ' if out else ''}and its captures begin and end with an NVTX range"
    left_out = f"nsys records without {', '.join(out)}" if out else ""
    return [f"no CUDA here: {left_out or 'nsys works as usual'}{replaced}"] if out or replaced else []


def _limit(end: str) -> int | None:
    """Return how many captures a value of `capture-range-end` allows; None: any number."""
    if end in ("none", "repeat"):
        return None
    _, _, number = end.partition(":")
    return int(number) if number.isdigit() else 1


def num_captures(request: ProcessRequest, *, stages_repeat: bool) -> int | None:
    """Return how many captures nsys makes of a process at most; None where that shows only as it runs.

    Args:
        request: what is captured there.
        stages_repeat: whether a stage may run more than once a step.
    """
    steps, a_step = request.steps, 0
    for name, role in request.roles.items():
        windows = role.windows.values()
        if role.tool != "nsys" or not (windows or role.discrete):
            continue
        if stages_repeat or any(window.repeat == 0 for window in windows):
            return None
        a_step += sum(window.repeat for window in windows) if windows else len(stages_of(name))
    whole = request.whole_step
    if whole is None or whole.tool != "nsys":
        return a_step * len(steps)
    return a_step * len(steps) + (sum(step - 1 not in steps for step in steps) if request.continuous else len(steps))


def has_cuda(device: str) -> bool:
    """Return whether a process for `trainer.device` works with CUDA here, without importing torch."""
    if device != "auto":
        return device.startswith("cuda")
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    return driver and not importlib.metadata.version("torch").endswith("+cpu")


@cache
def check_nsys() -> None:
    """Find out whether nsys and the package `nvtx` are here.

    Raises:
        UserError: nsys is not on PATH.
        MissingExtraError: nvtx is not installed.
    """
    if shutil.which("nsys") is None:
        raise UserError(
            "global_profiler.tool",
            "nsys: the program `nsys` is not on PATH.",
            "Install NVIDIA Nsight Systems (Debian: nsight-systems in non-free), or take the tool torch.",
        )
    if importlib.util.find_spec("nvtx") is None:
        raise MissingExtraError("global_profiler.tool", "nvtx", "profile")


def check_options(options: GlobalNsysConfig, *, cuda: bool) -> None:
    """Find out, by recording a program that does nothing, whether the nsys of this machine takes the options.

    Raises:
        UserError: it does not; with what it says.
    """
    check_nsys()
    for name in ("worker_nsight_options", "controller_nsight_options"):
        field_name = f"{OPTIONS_KEY}.{name}"
        command = nsys_command(vars(options)[name], field_name, cuda=cuda, num_captures=2)
        if (reason := _try(tuple(command.arguments))) is not None:
            raise UserError(field_name, reason, "See `nsys profile --help` for what this version takes.")


@cache
def _try(arguments: tuple[str, ...]) -> str | None:
    """Record a program that does nothing, and return what went wrong."""
    said = ""
    for _ in range(NUM_TRIES):
        with tempfile.TemporaryDirectory(prefix="pellucid-") as folder:
            try:
                status, said = run_watched([*arguments, f"--output={folder}/try", "sleep", "0.5"], Path(folder), TRY_S)
            except TimeoutError:
                return (
                    f"nsys did not end within {TRY_S:.0f} s with these options and a program that does nothing; leave "
                    "out what "
                    "needs rights that this machine may not give (sample, cpuctxsw, …)."
                )
        if status == 0:
            return None
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(("usage:", "Try "))]
    return f"nsys says: {' '.join(lines)[:400]}"


@dataclass(frozen=True, slots=True)
class OwnNsys:
    """The nsys that records this process."""

    pid: int
    output: Path | None
    """Absolute, without extension or number, `%p` filled in; None where nsys chose the name."""
    capture_range: str | None
    """`cudaProfilerApi`, `nvtx`, …; None: it records from start to end."""

    @property
    def is_ours(self) -> bool:
        """Whether this package started it; one that was started by hand keeps its files."""
        return self.output is not None and self.output.parent.name.startswith(RAW_PREFIX)


def own_nsys() -> OwnNsys | None:
    """Return the nsys that started this process; None where there is none, or it has ended.

    Read from the processes above this one rather than handed down, so that it also finds an nsys that was started by
    hand.
    """
    own = psutil.Process()
    # Between nsys and its program there is a launcher alone; further up it is the nsys of another program.
    for parent in own.parents()[:2]:
        if parent.name() != "nsys":
            continue
        values = _options_in(parent.cmdline())
        output, capture_range = values.get("output"), values.get("capture-range")
        path = None if output is None else Path(parent.cwd(), output.replace("%p", str(own.pid)))
        return OwnNsys(parent.pid, path, None if capture_range == "none" else capture_range)
    return None


def _options_in(command: list[str]) -> dict[str, str]:
    """Return the options of an `nsys profile` command by their long names, without those of the program that
    follows.
    """
    values: dict[str, str] = {}
    arguments = iter(command[command.index("profile") + 1 :] if "profile" in command else ())
    for argument in arguments:
        if not argument.startswith("-"):
            break
        name, has_value, value = argument.lstrip("-").partition("=")
        if not has_value and not argument.startswith("--"):  # `-o name` of one that was started by hand
            name, value = {"o": "output", "c": "capture-range"}.get(name[:1], name), name[1:] or next(arguments, "")
        values[name] = value
    return values
