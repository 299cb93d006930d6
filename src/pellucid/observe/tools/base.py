"""What every profiling tool is: an object that starts and stops captures of its own process, and writes their files.

`process.py` drives it: `start`, ranges inside, `stop`; a tool never decides when. A new tool is a file beside this one
and a line in `TOOLS`, or a class of the user's own by import path.
"""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.config.schema.profiler import GlobalToolConfig, RoleToolConfig
from pellucid.observe.manifest import ProfileFile
from pellucid.stages import Stage, TokenSpans

if TYPE_CHECKING:  # what only reads requests does without torch
    import torch

    from pellucid.rollout.requests import RolloutEngine


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """What a tool is made with; each reads its own section."""

    role_options: RoleToolConfig
    """`<role>.profiler.tool_config`."""
    global_options: GlobalToolConfig
    """`global_profiler.global_tool_config`."""
    device: str
    """cpu, cuda or npu."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One capture of one process: what it is of, and where its files go."""

    folder: Path
    """Where the files go; it exists."""
    role: str
    """Role of the stage; of a whole step the process's: `controller`, or the pool's name, e.g. `policy`."""
    step: int
    """The step, the first one where several share a capture."""
    stage: Stage | None
    """None: the whole step."""
    rank: int
    num_ranks: int
    call: int = 1
    """Which run of the stage within the step, counted from 1: dynamic sampling repeats some."""
    window: int = 1
    """Which cycle of the schedule, counted from 1."""
    pid: int = field(default_factory=os.getpid)
    models: tuple[torch.nn.Module, ...] = ()
    """What the stage runs, each chunk of a model that is cut into several; empty for a whole step."""
    engine: RolloutEngine | None = None
    """The engine that is captured, which has processes of its own; None: this process is."""
    skip_steps: int = 0
    """Steps of the engine that are left out first."""
    num_steps: int | None = None
    """Steps of the engine that are captured then; None: all to the end of the stage."""

    @property
    def again(self) -> str:
        """What tells it from others of its stage and step: `_call2_window3`; empty for the first."""
        numbers = (("call", self.call), ("window", self.window))
        return "".join(f"_{name}{number}" for name, number in numbers if number > 1)

    @property
    def name(self) -> str:
        """Stem of the files."""
        what = "step" if self.stage is None else self.stage
        return f"{self.role}_{what}_step{self.step}{self.again}_rank{self.rank}-of-{self.num_ranks}_pid{self.pid}"

    def file(self, path: str, num_bytes: int | None, tool: str, process: str, started_at: float) -> ProfileFile:
        """Return the manifest's entry of a file of this capture."""
        what = ("role", "stage", "step", "rank", "num_ranks", "pid", "call", "window")
        mine = {name: getattr(self, name) for name in what}
        return ProfileFile(
            path, num_bytes, tool, process=process, host=socket.gethostname(), started_at=started_at, **mine
        )


class KeptInPartError(RuntimeError):
    """A capture failed, and what it had until then is in `files`; the cause is its own."""

    def __init__(self, cause: Exception, files: list[Path]) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.files = files


class Tool:
    """A profiling tool in one process, an object for each capture; whatever it raises is caught, said and recorded."""

    def __init__(self, settings: ToolSettings) -> None:
        """Get ready for a capture."""

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """Find out, before any model is loaded and before each capture, whether the tool can work here.

        Raises:
            UserError: it cannot; a missing package is a `MissingExtraError`.
        """

    def warm_up(self, capture: Capture) -> None:
        """Begin to run for a capture whose `start` follows: what is collected until then is thrown away."""

    def start(self, capture: Capture) -> None:
        """Begin to collect."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a context that shows in the capture as a range of that name: a stage, a micro-batch."""
        return nullcontext()

    def stop(self) -> list[Path]:
        """End the capture, write its files and return them (a folder stands for all in it); none of a warm-up alone.

        Files that another process writes only later, as nsys does, are returned by their future names.

        Raises:
            KeptInPartError: there are files of a part alone.
        """
        return []


class TensorTool(Tool):
    """A tool that looks at what models compute, and so hears of each pass through them. Its captures are of stages."""

    def begin_pass(self, spans: TokenSpans, unit: str) -> None:
        """A pass through the stage's model begins: a micro-batch, a prefill, a decode step."""

    def results(self, tensors: dict[str, torch.Tensor]) -> None:
        """The pass's output head, which is no module, has computed these."""

    def end_mini_batch(self) -> None:
        """The optimizer has made its step, and gradients are still there."""


def free_path(path: Path) -> Path:
    """Return `path`, or one like it that no file has yet: folders may be shared, and process ids come again."""
    stem, ends = path.name.partition(".")[0], "".join(path.suffixes)
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}{ends}")
    return path
