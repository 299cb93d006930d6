"""What one process is asked to capture, in plain values.

`observe/captures.py` makes it from the config, for the controller and for each rank; `process.py` acts on it.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.config.schema.profiler import GlobalProfilerConfig, RoleToolConfig, ScheduleConfig
from pellucid.observe.tools.base import ToolSettings
from pellucid.stages import Stage

PRECISION_DEBUGGER = "precision_debugger"

TO_THE_END = sys.maxsize
"""Units that are captured, of a window that ends with its stage."""


def unit_action(window: ScheduleConfig, number: int) -> str:
    """Return what a unit, counted from 0, is: NONE, WARMUP, RECORD, or as the last of a cycle RECORD_AND_SAVE."""
    idle = window.wait + window.warmup
    cycle, position = divmod(number - window.skip_first, idle + window.active)
    if cycle < 0 or position < window.wait or (window.repeat and cycle >= window.repeat):
        return "NONE"
    if position < idle:
        return "WARMUP"
    return "RECORD_AND_SAVE" if position == idle + window.active - 1 else "RECORD"


def num_units(window: ScheduleConfig) -> int:
    """Return how many units a stage must have for all that is asked for; of cycles without end, for the first."""
    if window.active == TO_THE_END:
        return window.skip_first + 1
    return window.skip_first + max(window.repeat, 1) * (window.wait + window.warmup + window.active)


@dataclass(frozen=True, slots=True)
class RoleRequest:
    """A role that is captured in this process."""

    tool: str
    """Name in `TOOLS`, or an import path."""
    folder: Path
    """Where the files go."""
    discrete: bool = False
    """A capture for each stage instead of one for the whole step."""
    windows: dict[Stage, ScheduleConfig] = field(default_factory=dict)
    """Stages of which a few units are captured."""
    options: RoleToolConfig = field(default_factory=RoleToolConfig)
    stages: frozenset[Stage] | None = None
    """The ones that are captured; None: all that follow the role's settings."""
    replicas: tuple[int, ...] = ()
    """Of the rollout, the engines beside the trainer that are captured, in place of this process."""

    def captures(self, stage: Stage) -> bool:
        """Whether a stage has captures of its own."""
        return (self.discrete or stage in self.windows) and (self.stages is None or stage in self.stages)


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """What a process is asked to capture, and within which limits."""

    process: str
    """Name of its files: `controller`, `policy_rank_0`."""
    group: str
    """What captures of whole steps are called after: `controller`, or the pool."""
    rank: int
    num_ranks: int
    roles: dict[str, RoleRequest]
    """Of those that live here, the ones that are captured here."""
    journal: Path
    """Folder in which each process writes down what it has written; the manifest is made from it."""
    config: GlobalProfilerConfig
    device: str = "cpu"

    @property
    def steps(self) -> Collection[int]:
        """The steps that are profiled."""
        return self.config.steps or ()

    @property
    def strict(self) -> bool:
        """Whether a failure ends the run."""
        return is_strict(self.config, {role.tool for role in self.roles.values()})

    def settings(self, role: RoleRequest) -> ToolSettings:
        """Return what a role's tool is made with."""
        return ToolSettings(role.options, self.config.global_tool_config, self.device)

    @property
    def whole_step(self) -> RoleRequest | None:
        """The settings of the capture of whole steps; None where there is none."""
        roles = (role for role in self.roles.values() if not role.replicas)
        return next((role for role in roles if not role.discrete and not role.windows), None)


def is_strict(config: GlobalProfilerConfig, tools: Collection[str | None]) -> bool:
    """Return whether a failure of these tools ends the run."""
    return config.strict or (PRECISION_DEBUGGER in tools and config.global_tool_config.precision_debugger.strict)
