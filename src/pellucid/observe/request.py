"""What one process is asked to capture, in plain values.

`observe/captures.py` makes it from the config, for the controller and for each rank; `process.py` acts on it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pellucid.config.schema.profiler import GlobalToolConfig, RoleToolConfig
from pellucid.observe.tools.base import ToolSettings
from pellucid.observe.window import Window
from pellucid.stages import Stage


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
    steps: frozenset[int]
    roles: dict[str, RoleRequest]
    """Of those that live here, the ones that are captured here."""
    journal: Path
    """Folder in which each process writes down what it has written; the manifest is made from it."""
    device: str = "cpu"
    continuous: bool = False
    """Neighbouring steps share one capture."""
    max_bytes: int = 2 * 1024**3
    strict: bool = False
    global_options: GlobalToolConfig = field(default_factory=GlobalToolConfig)

    def settings(self, role: RoleRequest) -> ToolSettings:
        """Return what a role's tool is made with."""
        return ToolSettings(role.options, self.global_options, self.device)

    @property
    def whole_step(self) -> RoleRequest | None:
        """The settings of the capture of whole steps; None where there is none."""
        return next((role for role in self.roles.values() if not role.discrete and not role.windows), None)
