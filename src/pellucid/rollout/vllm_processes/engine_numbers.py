"""What vLLM's engine core says of itself after each of its steps, as the numbers of the rollout protocol."""

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from pellucid.rollout.requests import EngineStats


class EngineNumbers(StatLoggerBase):
    """Hears of every step of the engine core; `listener` gets the new numbers, without a version."""

    def __init__(self, listener: Callable[[EngineStats], None]) -> None:
        self._listener = listener
        self._computed = self._reused = self._sampled = 0
        self._busy_s, self._last = 0.0, time.perf_counter()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take in the numbers of a step."""
        now = time.perf_counter()
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats
            self._computed += prompts.computed
            self._reused += prompts.total - prompts.computed
            self._sampled += iteration_stats.num_generation_tokens
            self._busy_s += now - self._last
        self._last = now
        if scheduler_stats is None:
            return
        self._listener(
            EngineStats(
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                cache_share=scheduler_stats.kv_cache_usage,
                computed_tokens=self._computed,
                reused_tokens=self._reused,
                sampled_tokens=self._sampled,
                tokens_per_s=self._sampled / self._busy_s if self._busy_s else 0.0,
            )
        )

    def log_engine_initialized(self) -> None:
        """Say nothing: the run has its own log."""
