"""Which units of a stage are captured: the arithmetic of `<role>.profiler.schedule`, and nothing else.

`process.py` asks it at every unit of a stage that is sampled.
"""

from dataclasses import dataclass
from enum import Enum

from pellucid.stages import Unit


class Phase(Enum):
    """What a tool does during a unit."""

    OFF = "off"
    WARM_UP = "warm_up"
    """It runs, and what it collects is thrown away."""
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Window:
    """Cycles of `wait`, `warmup` and `active` units after the `skip_first` first ones."""

    unit: Unit
    skip_first: int = 0
    wait: int = 0
    warmup: int = 0
    active: int | None = 1
    """None: to the end of the stage."""
    repeat: int = 1
    """Cycles; 0 goes on to the end of the stage."""

    def phase(self, index: int) -> Phase:
        """Return what happens during unit `index`, counted from 0."""
        position, idle = self._position(index), self.wait + self.warmup
        if position is None or position < self.wait:
            return Phase.OFF
        return Phase.WARM_UP if position < idle else Phase.ACTIVE

    def ends_with(self, index: int) -> bool:
        """Tell whether unit `index` is the last active one of its cycle."""
        position = self._position(index)
        return self.active is not None and position == self.wait + self.warmup + self.active - 1

    def cycle(self, index: int) -> int:
        """Return which cycle unit `index` belongs to, counted from 1."""
        if self.active is None:
            return 1
        return (index - self.skip_first) // (self.wait + self.warmup + self.active) + 1

    @property
    def num_units(self) -> int:
        """Units that a stage must have for all that is asked for; of cycles without end, for the first."""
        if self.active is None:
            return self.skip_first + 1
        return self.skip_first + max(self.repeat, 1) * (self.wait + self.warmup + self.active)

    def _position(self, index: int) -> int | None:
        """Return where in its cycle a unit is, or None outside of all cycles."""
        index -= self.skip_first
        if index < 0:
            return None
        if self.active is None:
            return index
        cycle, position = divmod(index, self.wait + self.warmup + self.active)
        return None if self.repeat and cycle >= self.repeat else position

    def __str__(self) -> str:
        parts = [
            f"{name} {value}"
            for name, value in (("skip_first", self.skip_first), ("wait", self.wait), ("warmup", self.warmup))
            if value
        ]
        again = [f"repeat {self.repeat}"] if self.repeat != 1 and self.active is not None else []
        return ", ".join([*parts, f"active {'to the end' if self.active is None else self.active}", *again])
