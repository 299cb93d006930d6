"""A `torch_npu` for machines without CANN: its real Python profiler from the wheel, over a stub of what is compiled.

`make_stub_package(folder)` lays it out; with the folder on the path, `import torch_npu` works, claims one NPU, and profiles: ranges
and operators of the CPU are recorded by PyTorch and written in torch_npu's own binary format, which its real parser then reads;
`msprof`, CANN's exporter, is a script that exports the ranges put on the NPU's timeline. The rest of the folder is these stubs.
"""

import json
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

RELEASE = ".".join(torch.__version__.split(".")[:2])
REAL = (
    "torch_npu/profiler/",
    "torch_npu/npu/mstx.py",
    "torch_npu/utils/_error_code.py",
    "torch_npu/utils/_path_manager.py",
    "torch_npu/utils/collect_env.py",
    "torch_npu/utils/utils.py",
    "torch_npu/_init/common/warning_utils.py",
    "torch_npu/version.py",
)
"""What is taken from the wheel, by how its path begins."""
CACHE = Path.home() / ".cache" / "pellucid-tests"


def make_stub_package(folder: Path) -> Path:
    """Write the package `torch_npu` into a folder, for `sys.path` or PYTHONPATH, and return the folder.

    The wheel (44 MB) is downloaded once; its few files are kept in the user's cache. Skips the test where that fails.
    """
    shutil.copytree(_real_files(), folder, dirs_exist_ok=True)
    here = Path(__file__).parent
    shutil.copytree(
        here / "torch_npu", folder / "torch_npu", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    # As CANN is laid out: torch_npu looks for msprof.py by its place relative to the command.
    profiler = folder / "cann" / "tools" / "profiler"
    script = profiler / "profiler_tool" / "analysis" / "msprof" / "msprof.py"
    command = profiler / "bin" / "msprof"
    for parent in (script.parent, command.parent):
        parent.mkdir(parents=True)
    shutil.copy(here / "msprof.py", script)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (folder / "cann" / "ascend_toolkit_install.info").write_text("version=stub\n")
    return folder


def _real_files() -> Path:
    """Return a folder with what `REAL` names of the torch_npu for this torch."""
    files = CACHE / f"torch_npu-{RELEASE}"
    if files.is_dir():
        return files
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", scratch, f"torch-npu=={RELEASE}.*"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if not wheels:
            pytest.skip(f"the wheel of torch-npu {RELEASE} cannot be downloaded: {done.stderr.strip()[-300:]}")
        unpacked = Path(scratch) / "files"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(
                unpacked, [name for name in wheel.namelist() if name.startswith(REAL) and name.endswith(".py")]
            )
        try:
            unpacked.rename(files)
        except OSError:  # another test process was faster
            assert files.is_dir()
    return files


def trace_of(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a parsed capture."""
    return json.loads((folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())


def spans(events: list[dict[str, Any]], name: str, *, of_npu: bool = False) -> list[tuple[float, float]]:
    """Beginning and end, in microseconds since 1970, of the spans of a name on one of the sides; the NPU's process is 1."""
    found = [
        event for event in events if event["ph"] == "X" and event["name"] == name and (event["pid"] == 1) is of_npu
    ]
    return [(float(event["ts"]), float(event["ts"]) + event["dur"]) for event in found]
