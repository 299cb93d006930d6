"""What vLLM's engine core says of itself after each of its steps, as the numbers of the rollout protocol."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from pellucid.rollout.requests import EngineStats


class EngineNumbers(StatLoggerBase):
    """Hears of every step of the engine core; `listener` gets the new numbers, without a version."""

    def __init__(self, listener: Callable[[EngineStats], None]) -> None:
        self._listener = listener
        self._counted = EngineStats()
        self._last, self._is_busy, self._busy_s = time.perf_counter(), False, 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Take in the numbers of a step."""
        now, counted = time.perf_counter(), self._counted
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats
            counted.computed_tokens += prompts.computed
            counted.reused_tokens += prompts.total - prompts.computed
            counted.sampled_tokens += iteration_stats.num_generation_tokens
            counted.preemptions += iteration_stats.num_preempted_reqs
            for request in iteration_stats.finished_requests:
                if str(request.finish_reason) != "abort":  # of one that never began, the times are none
                    counted.answered += 1
                    counted.queue_s += request.queued_time
                    counted.prefill_s += request.prefill_time
                    counted.decode_s += request.decode_time
        step = None if scheduler_stats is None else scheduler_stats.iteration_details
        if self._is_busy:
            self._busy_s += now - self._last
        elif step is not None:  # the first after a time without requests
            self._busy_s += step.elapsed_ms / 1000
        self._last = now
        if scheduler_stats is None:
            return
        self._is_busy = scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs > 0
        self._listener(
            replace(
                counted,
                prefilling=0 if step is None else min(step.num_ctx_requests, scheduler_stats.num_running_reqs),
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                cache_share=scheduler_stats.kv_cache_usage,
                tokens_per_s=counted.sampled_tokens / self._busy_s if self._busy_s else 0.0,
            )
        )

    def log_engine_initialized(self) -> None:
        """Say nothing: the run has its own log."""
