"""Section `trainer.alerts`: conditions on metrics that people are told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pellucid.config.fields import Range


@dataclass(frozen=True)
class AlertConfig:
    """One condition on a metric."""

    metric: str
    """Its name, as in `docs/metrics.md`."""
    above: Annotated[float, Range()] | None = None
    """The condition holds where the metric is larger."""
    below: Annotated[float, Range()] | None = None
    """Or smaller."""
    of_median: bool = False
    """The bounds are multiples of the metric's median over the steps before."""
    steps: Annotated[int, Range(ge=1)] = 1
    """Steps in a row for which it must hold."""
    action: Literal["notice", "checkpoint", "stop", "webhook"] = "notice"
    """What happens beside the line on the console and in run.json: a checkpoint is written, the run stops after one, or
    `url` is called."""
    url: str | None = None
    """Address that `action: webhook` sends the alert to, as JSON."""
    message: str = ""
    """What is said with it."""
