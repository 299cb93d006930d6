"""The command line of `nsys profile`: from the config's option mappings to arguments that the nsys of this machine can
do.
"""

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pellucid.errors import MissingExtraError, UserError
from pellucid.observe.nsys_process import PROBLEM, own_recording

DOMAIN, CAPTURE_RANGE = "pellucid", "capture"
"""NVTX domain of all ranges, and the range in it that opens a capture where CUDA's own calls cannot."""
_KEY = "global_profiler.global_tool_config.nsys"
_OURS = ("output", "force-overwrite", "session-new")
_GPU_TRACES = ("cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "nvvideo")
_GPU_OPTIONS = ("cuda", "gpu")
Options = Mapping[str, str | int | bool | None]


def nsys_command(options: Options, field_name: str, *, cuda: bool) -> tuple[list[str], list[str]]:
    """Return `nsys profile` with options as the config states them, and what of them was changed for this machine.

    Args:
        options: long options of `nsys profile` without dashes, and their values.
        field_name: the key below `global_tool_config.nsys` that they are from.
        cuda: whether the process works with CUDA; without, what needs it is left out or replaced.

    Raises:
        UserError: an option is not the user's to set.
    """
    for name in _OURS:
        if name in options:
            raise UserError(
                f"{_KEY}.{field_name}.{name}",
                "cannot be set: the files get their names when they are complete.",
                "Set global_profiler.save_path.",
            )
    # Python's own work shows in the ranges; sampling needs rights that containers seldom give, and stops nsys without
    # them.
    chosen = {"sample": "none", "cpuctxsw": "none", "wait": "primary"} | dict(options)
    notices = [] if cuda else _without_gpu(chosen)
    if chosen.get("capture-range") not in (None, "none"):
        if chosen["capture-range"] == "nvtx":
            chosen.setdefault("nvtx-capture", f"{CAPTURE_RANGE}@{DOMAIN}")
        chosen.setdefault("kill", "none")
        if chosen.get("capture-range-end") is None:
            chosen["capture-range-end"] = "repeat"
    arguments = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in chosen.items()
        if value is not None
    ]
    return ["nsys", "profile", "--force-overwrite=true", *arguments], notices


def _without_gpu(chosen: dict[str, str | int | bool | None]) -> list[str]:
    """Take out what needs CUDA, and return one line that says so."""
    out = [name for name in chosen if name.startswith(_GPU_OPTIONS)]
    for name in out:
        del chosen[name]
    traces = str(chosen.get("trace") or "nvtx").split(",")
    kept = [trace for trace in traces if not trace.startswith(_GPU_TRACES)]
    out = [trace for trace in traces if trace not in kept] + out
    chosen["trace"] = ",".join(kept if "nvtx" in kept else [*kept, "nvtx"])
    changes = [f"nsys records without {', '.join(out)}"] if out else []
    if chosen.get("capture-range") == "cudaProfilerApi":
        chosen["capture-range"] = "nvtx"
        changes.append("captures begin and end with an NVTX range")
    return [f"no CUDA here: {'; '.join(changes)}"] if changes else []


def has_cuda(device: str) -> bool:
    """Return whether a process for `trainer.device` works with CUDA here, without importing torch."""
    if device != "auto":
        return device.startswith("cuda")
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    return driver and not importlib.metadata.version("torch").endswith("+cpu")


def check_nsys() -> None:
    """Find out whether nsys and the package `nvtx` are here.

    Raises:
        UserError: nsys is not on PATH, or did not start this process as it was asked to.
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
    if own_recording() is None and (problem := os.environ.get(PROBLEM)) is not None:
        raise UserError(_KEY, problem, "See `nsys profile --help` for the options that this version takes.")
