"""What one process is asked to capture, in plain values.

`observe/captures.py` makes it from the config, for the controller and for each rank; `process.py` acts on it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.config.schema.profiler import GlobalProfilerConfig, RoleToolConfig
from pellucid.observe.tools.base import ToolSettings
from pellucid.stages import Stage, Unit

PRECISION_DEBUGGER = "precision_debugger"


@dataclass(frozen=True, slots=True)
class Window:
    """Which units of a stage are captured: cycles of `wait`, `warmup` and `active` ones after `skip_first`."""

    unit: Unit
    skip_first: int = 0
    wait: int = 0
    warmup: int = 0
    active: int | None = 1
    """None: to the end of the stage."""
    repeat: int = 1
    """Cycles; 0 goes on to the end of the stage."""

    def action(self, number: int) -> str:
        """Return what happens during a unit, counted from 0, in torch's words: NONE, WARMUP, RECORD, or in the last one
        of a cycle RECORD_AND_SAVE.
        """
        number, idle = number - self.skip_first, self.wait + self.warmup
        cycle, position = (0, number) if self.active is None else divmod(number, idle + self.active)
        if number < 0 or position < self.wait or (self.repeat and cycle >= self.repeat):
            return "NONE"
        if position < idle:
            return "WARMUP"
        is_last = self.active is not None and position == idle + self.active - 1
        return "RECORD_AND_SAVE" if is_last else "RECORD"

    @property
    def num_units(self) -> int:
        """Units that a stage must have for all that is asked for; of cycles without end, for the first."""
        if self.active is None:
            return self.skip_first + 1
        return self.skip_first + max(self.repeat, 1) * (self.wait + self.warmup + self.active)


@dataclass(frozen=True, slots=True)
class RoleRequest:
    """A role that is captured in this process."""

    tool: str
    """Name in `TOOLS`, or an import path."""
    folder: Path
    """Where the files go."""
    discrete: bool = False
    """A capture for each stage instead of one for the whole step."""
    windows: dict[Stage, Window] = field(default_factory=dict)
    """Stages of which a few units are captured."""
    options: RoleToolConfig = field(default_factory=RoleToolConfig)
    stages: frozenset[Stage] | None = None
    """The ones that are captured; None: all that follow the role's settings."""

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
        return next((role for role in self.roles.values() if not role.discrete and not role.windows), None)


def is_strict(config: GlobalProfilerConfig, tools: Collection[str | None]) -> bool:
    """Return whether a failure of these tools ends the run."""
    return config.strict or (PRECISION_DEBUGGER in tools and config.global_tool_config.precision_debugger.strict)
