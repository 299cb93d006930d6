"""The best checkpoint of a run by a metric (`trainer.keep_best`), and whether it has stopped getting better.

`metrics.jsonl` and the checkpoints that are there say which it is: nothing else is written, and a resumed run goes on.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pellucid.config.schema.trainer import BaseTrainerConfig
from pellucid.errors import UserError, did_you_mean
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.metrics.definitions import METRICS, find

FIELD = "trainer.keep_best"


def best_step(rows: Iterable[Mapping[str, Any]], metric: str, mode: str, steps: Iterable[int]) -> int | None:
    """Return which of `steps` has the best value of a metric, the earliest of equals; None where none was measured."""
    there, sign = set(steps), 1.0 if mode == "max" else -1.0
    measured = [row for row in rows if row["step"] in there and row.get(metric) is not None]
    best = max(measured, key=lambda row: (sign * row[metric], -row["step"]), default=None)
    return None if best is None else best["step"]


def require_metric(metric: str) -> None:
    """Check the name of the metric whose best step is kept.

    Raises:
        UserError: there is no such metric.
    """
    if find(metric) is None:
        raise UserError(FIELD, f"there is no metric '{metric}'.", did_you_mean(metric, METRICS))


class KeepBest:
    """Asks for a checkpoint where the metric is better than ever, and for the end where it has long not been.

    Args:
        config: names the metric.
        rows: metrics of the steps before a resume.
        store: is told which checkpoint to spare.
    """

    def __init__(self, config: BaseTrainerConfig, rows: list[dict[str, Any]], store: CheckpointStore) -> None:
        assert config.keep_best is not None
        self._metric, self._patience = config.keep_best, config.early_stopping_patience
        self._sign = 1.0 if config.keep_best_mode == "max" else -1.0
        self._store = store
        store.spared = best_step(rows, self._metric, config.keep_best_mode, store.steps())
        measured = [row for row in rows if row.get(self._metric) is not None]
        values = [self._sign * row[self._metric] for row in measured if row["step"] == store.spared]
        self._best = values[0] if values else None
        self._waited = sum(store.spared is not None and row["step"] > store.spared for row in measured)
        """Measurements since the best one."""

    @property
    def is_over(self) -> bool:
        """Whether the metric has not got better for as long as the config waits."""
        return self._patience is not None and self._waited >= self._patience

    def __call__(self, run: object, step: int, metrics: dict[str, float]) -> Literal["checkpoint", "end"] | None:
        """Look at a step's metrics; the validation before the first step has no checkpoint and is left out.

        Raises:
            UserError: the run validates, and has no such value.
        """
        if (value := metrics.get(self._metric)) is None:
            if self._metric.startswith("val/") and (there := [name for name in metrics if name.startswith("val/")]):
                reason = f"this run's validation has no '{self._metric}'."
                raise UserError(FIELD, reason, did_you_mean(self._metric, there))
            return None
        if step == 0:
            return None
        if self._best is None or self._sign * value > self._best:
            self._best, self._store.spared, self._waited = self._sign * value, step, 0
            return "checkpoint"
        self._waited += 1
        return "end" if self.is_over else None
