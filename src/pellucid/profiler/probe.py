"""How an engine tells its process's profiler where units of work begin and end.

Engines get a `Probe` when they are made; with nothing to tell, `NO_PROBE`. `process.py` has the real one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from pellucid.stages import Unit


class Probe(Protocol):
    """Hears of units of work."""

    def unit(self, unit: Unit, **args: str | int | float) -> AbstractContextManager[object]:
        """Return a context round one unit of work; `args` say what is in it, e.g. `rows=4, tokens=512`."""
        ...


class _NoProbe:
    def unit(self, unit: Unit, **args: str | int | float) -> AbstractContextManager[object]:
        return nullcontext()


NO_PROBE: Probe = _NoProbe()
