"""What a run shows while it trains: one compact line a finished step and, on a terminal, live progress with time left.

The loop opens a `StepDisplay`, names each stage as it begins and hands over each step's metrics; where standard output
is not a terminal (CI logs, files) only the lines of finished steps are printed. The watchdog hears of progress from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.progress import Progress, TaskID

from pellucid.console import console, progress

_LINE: list[tuple[str, str, str]] = [
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


OnProgress = Callable[[str, int, int | None, int], object]
"""Told of a stage's name, its finished and all of its units (None: not counted), and the last finished step."""


class StepDisplay:
    """Progress over the steps of a run and over the stage in hand; use as a context manager."""

    def __init__(self, total_steps: int, first_step: int = 0, on_progress: OnProgress | None = None) -> None:
        """Show `total_steps` of which `first_step` were done before this process began; tell `on_progress` of all progress."""
        self._total, self._first, self._began = total_steps, first_step, time.monotonic()
        self._last_step, self._on_progress = first_step, on_progress
        self._progress: Progress | None = None
        self._steps_bar = self._stage_bar = TaskID(0)
        if console.is_terminal:
            self._progress = progress(transient=True)
            self._progress.speed_estimate_period = 3600.0
            self._steps_bar = self._progress.add_task("steps", total=total_steps, completed=first_step, info="")
            self._stage_bar = self._progress.add_task("", total=None, info="", visible=False)

    def __enter__(self) -> StepDisplay:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def stage(self, name: str, total: int | None = None, info: str = "") -> Callable[[int], None]:
        """Begin a stage of `total` units and return `advance(n)`; the next stage takes its place.

        `advance(0)` says that the stage is at work though no unit is finished.
        """
        bar, done = self._progress, 0
        if bar is not None:
            bar.reset(self._stage_bar, total=total, description=f"  {name}", visible=True, info=info)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if self._on_progress is not None:
                self._on_progress(name, done, total, self._last_step)
            if bar is not None and count:
                bar.advance(self._stage_bar, count)

        advance(0)
        return advance

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Print the finished step's line and move the run's bar."""
        self._last_step = step
        done = step - self._first
        left_s = (time.monotonic() - self._began) / done * (self._total - step) if done > 0 else None
        console.print(step_line(step, self._total, metrics, left_s), markup=False, soft_wrap=True)
        if self._progress:
            self._progress.update(self._steps_bar, completed=step)
            self._progress.update(self._stage_bar, visible=False)


def step_line(step: int, total_steps: int, metrics: dict[str, float], left_s: float | None = None) -> str:
    """Return the line of one step: whatever the metrics hold of validation, reward, loss, gaps, length and speed."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"val {name.split('/', 1)[1].removesuffix('/accuracy')} {value:.1%}"
              for name, value in metrics.items() if name.startswith("val/") and name.endswith("/accuracy")]
    # A reward model alone knows no right or wrong.
    parts += [f"val reward {name.split('/', 1)[1].removesuffix('/reward')} {value:.3f}"
              for name, value in metrics.items()
              if name.startswith("val/") and name.endswith("/reward") and f"{name.removesuffix('reward')}accuracy" not in metrics]
    if "val/loss" in metrics:
        parts.append(f"val loss {metrics['val/loss']:.4f}")
    parts += [f"{label} {metrics[name]:{form}}" for label, name, form in _LINE if name in metrics]
    if left_s is not None and step < total_steps:
        parts.append(f"left {format_duration(left_s)}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Return h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
