"""One span primitive: `with spans.span(Stage.REWARD):` feeds the step's timing metrics and the run's timeline.

The loop owns a `SpanRecorder`; `step_timings()` empties into metrics once a step, `write_trace()` into a Perfetto trace.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path


class Stage(StrEnum):
    """The named parts of a step; spans, timing metrics, captures and the watchdog all use these names."""

    ROLLOUT_GENERATE = "rollout_generate"
    REWARD = "reward"
    ACTOR_COMPUTE_LOG_PROB = "actor_compute_log_prob"
    REF_COMPUTE_LOG_PROB = "ref_compute_log_prob"
    COMPUTE_VALUES = "compute_values"
    COMPUTE_RM_SCORE = "compute_rm_score"
    ADVANTAGE = "advantage"
    CORRECTION = "correction"
    CRITIC_UPDATE = "critic_update"
    ACTOR_UPDATE = "actor_update"
    WEIGHT_SYNC = "weight_sync"
    VALIDATE = "validate"
    SAVE_CHECKPOINT = "save_checkpoint"


class SpanRecorder:
    """Records spans of one process: durations by stage for the current step, and events for the timeline."""

    def __init__(self, trace_path: Path | None = None) -> None:
        self._durations_s: dict[str, float] = {}
        self._trace_path = trace_path
        self._trace = None
        if trace_path is not None:
            trace_path.parent.mkdir(parents=True, exist_ok=True)
            resumed = trace_path.exists()
            self._trace = trace_path.open("a", encoding="utf-8")
            if not resumed:
                # The JSON array format of the trace viewers allows a missing "]", so a killed run stays readable.
                self._trace.write("[\n")

    @contextmanager
    def span(self, name: str, **args: str | int | float) -> Iterator[None]:
        """Time the enclosed block; recorded even when the block raises."""
        start_wall_us, start = time.time_ns() // 1000, time.perf_counter()
        try:
            yield
        finally:
            duration_s = time.perf_counter() - start
            self._durations_s[name] = self._durations_s.get(name, 0.0) + duration_s
            if self._trace is not None:
                event = {
                    "name": name,
                    "ph": "X",
                    "ts": start_wall_us,
                    "dur": round(duration_s * 1e6),
                    "pid": os.getpid(),
                    "tid": 0,
                    "args": args,
                }
                self._trace.write(json.dumps(event) + ",\n")

    def step_timings(self) -> dict[str, float]:
        """Return `timing_s/<stage>` since the last call, and start afresh."""
        timings = {f"timing_s/{name}": duration for name, duration in self._durations_s.items()}
        self._durations_s = {}
        if self._trace is not None:
            self._trace.flush()
        return timings

    def close(self) -> None:
        """Flush and close the timeline file."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None
