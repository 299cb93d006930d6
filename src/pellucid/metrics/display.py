"""What a run shows while it trains: one compact line a finished step and, on a terminal, live progress with time left.

The loop opens a `StepDisplay`, encloses each stage and hands over each step's metrics; where standard output is not a
terminal (CI logs, files) only the lines of finished steps are printed. The watchdog hears of progress from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from pellucid.console import console, progress

_LINE: list[tuple[str, str, str]] = [
    ("val loss", "val/loss", ".4f"),
    ("reward", "critic/score/mean", ".3f"),
    ("loss", "actor/pg_loss", "+.4f"),
    ("loss", "train/loss", ".4f"),
    ("entropy", "actor/entropy", ".3f"),
    ("kl", "actor/kl_loss", ".2e"),
    ("kl in reward", "actor/reward_kl_penalty", ".2e"),
    ("value var", "critic/vf_explained_var", ".2f"),
    ("gap", "mismatch/logp_max_abs_diff", ".1e"),
    ("len", "response_length/mean", ".1f"),
    ("tok/s", "perf/throughput", ".0f"),
    ("s/step", "timing_s/step", ".2f"),
]

WatchStage = Callable[[str, int | None, int], AbstractContextManager[Any]]
"""Takes a stage's name, number of units (None: not counted) and the last finished step; gives a watched context, which
hears of progress by `beat(num_done)`."""


class StepDisplay:
    """Progress over the steps of a run and over the stages under way; use as a context manager."""

    def __init__(self, total_steps: int, first_step: int = 0, watch: WatchStage | None = None) -> None:
        """Show `total_steps` of which `first_step` were done before this process began; `watch` hears of each stage."""
        self._total, self._first, self._began = total_steps, first_step, time.monotonic()
        self._last_step, self._uncounted = first_step, 0
        self._watch: WatchStage = watch or (lambda name, total, last_step: nullcontext())
        self._progress = progress(transient=True)
        self._progress.disable = not console.is_terminal
        self._progress.speed_estimate_period = 3600.0
        self._steps_bar = self._progress.add_task("steps", total=total_steps, completed=first_step)

    def __enter__(self) -> StepDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Enclose a stage of `total` units, which may run beside others, and give `advance(n)`.

        `advance(0)` notes that the stage is at work though no unit is finished.
        """
        done, bar = 0, self._progress.add_task(f"  {name}", total=total)
        with self._watch(name, total, self._last_step) as watched:

            def advance(count: int) -> None:
                nonlocal done
                done += count
                if watched is not None:
                    watched.beat(done)
                if count:
                    self._progress.advance(bar, count)

            try:
                yield advance
            finally:
                self._progress.remove_task(bar)

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Print the finished step's line and move the run's bar."""
        self._last_step, now = step, time.monotonic()
        done = step - self._first - self._uncounted
        left_s = (now - self._began) / done * (self._total - step) if done > 0 else None
        if done <= 1 and not self._uncounted:  # the first validation, and a first step that warms up, would mislead
            self._began, self._uncounted = now, done
        console.print(step_line(step, self._total, metrics, left_s), markup=False, soft_wrap=True)
        self._progress.update(self._steps_bar, completed=step)


def validated(task: str, what: str = "val") -> str:
    """Return what a task's validation is called; that of `val.jsonl` is called after its file."""
    return what if task == "val" else f"{what} {task}"


def step_line(step: int, total_steps: int, metrics: dict[str, float], left_s: float | None = None) -> str:
    """Return the line of one step: whatever the metrics hold of validation, reward, loss, gaps, length and speed."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for name, value in metrics.items():
        if name.startswith("val/") and name.endswith("/accuracy"):
            parts.append(f"{validated(name[4:].removesuffix('/accuracy'))} {value:.1%}")
        # A reward model alone knows no right or wrong.
        elif name.startswith("val/") and name.endswith("/reward") and name[:-6] + "accuracy" not in metrics:
            parts.append(f"{validated(name[4:].removesuffix('/reward'), 'val reward')} {value:.3f}")
    parts += [f"{label} {metrics[name]:{form}}" for label, name, form in _LINE if name in metrics]
    if left_s is not None and step < total_steps:
        parts.append(f"left {timedelta(seconds=round(left_s))}")
    return "  ".join(parts)
