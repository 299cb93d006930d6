"""What rollout engines say of themselves: tracks on the timeline of the process that asks, and metrics of each step.

A track is a counter, and not a span for each request, of which a step may have thousands: how many requests are in the
queue, in prefill and in decoding, whatever their number, costs the same and can be read.
"""

import threading
import time
from collections.abc import Callable, Mapping

from pellucid.observe.spans import SpanRecorder
from pellucid.rollout.requests import EngineStats

SAMPLES_A_SECOND = 10.0
"""Of all replicas together: many of them are looked at seldomer, so that the timeline does not grow with them."""
Stats = Mapping[str, EngineStats]
"""By the replica's name."""


class ReplicaTracks:
    """Asks each replica what it does, until it is closed.

    Args:
        spans: of this process; its timeline gets the tracks.
        stats: asks all replicas.
        show: look at them from a thread; without, there are metrics alone.
    """

    def __init__(self, spans: SpanRecorder, stats: Callable[[], Stats], *, show: bool = True) -> None:
        self._spans, self._stats = spans, stats
        self._shown: dict[str, Mapping[str, float]] = {}
        """By track what was written last."""
        self._sampled: Stats = {}
        self._sampled_at = time.perf_counter()
        self._counted = dict(stats())
        """As of the last `step_metrics`."""
        self._largest_cache_share: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica tracks", daemon=True) if show else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(max(len(self._counted), 1) / SAMPLES_A_SECOND):
            self._sample()

    def _sample(self) -> None:
        now, stats = time.perf_counter(), self._stats()
        passed_s = now - self._sampled_at
        for name, one in stats.items():
            before = self._sampled.get(name, one)
            if one.running:
                self._largest_cache_share = max(self._largest_cache_share or 0.0, one.cache_share)
            requests = {"decode": one.running - one.prefilling, "prefill": one.prefilling, "queue": one.waiting}
            self._show(f"{name}: requests", requests)
            self._show(f"{name}: tokens/s", {"sampled": round((one.sampled_tokens - before.sampled_tokens) / passed_s)})
            self._show(f"{name}: cache", {"used %": round(100 * one.cache_share, 1)})
            reused = one.reused_tokens - before.reused_tokens
            read = reused + one.computed_tokens - before.computed_tokens  # tokens before answers, since the last look
            self._show(f"{name}: prefix hits", {"%": round(100 * reused / read, 1) if read else 0.0})
            self._show(f"{name}: preemptions", {"since the start": one.preemptions})
        self._sampled, self._sampled_at = stats, now

    def _show(self, track: str, values: Mapping[str, float]) -> None:
        """Write a track's values where they have changed; at first they are 0."""
        if values != self._shown.get(track, dict.fromkeys(values, 0)):
            self._spans.counter(track, values)
            self._shown[track] = values

    def step_metrics(self) -> dict[str, float]:
        """Return what the replicas have done since the last call; what no request has told is left out."""
        before, self._counted = self._counted, dict(self._stats())
        largest, self._largest_cache_share = self._largest_cache_share, None
        pairs = [(before.get(name, EngineStats()), now) for name, now in self._counted.items()]

        def total(field: str) -> float:
            return sum(getattr(now, field) - getattr(then, field) for then, now in pairs)

        if not (answered := total("answered")):
            return {}
        busy_s = [(now.sampled_tokens - then.sampled_tokens, _busy_s(now) - _busy_s(then)) for then, now in pairs]
        read = total("reused_tokens") + total("computed_tokens")
        metrics = {
            "perf/rollout_requests": answered,
            "perf/rollout_queue_s": total("queue_s") / answered,
            "perf/rollout_prefill_s": total("prefill_s") / answered,
            "perf/rollout_decode_s": total("decode_s") / answered,
            "perf/rollout_tokens_per_s": sum(tokens / seconds for tokens, seconds in busy_s if seconds > 0),
            "perf/rollout_prefix_hit_share": total("reused_tokens") / read if read else 0.0,
            "perf/rollout_preemptions": total("preemptions"),
        }
        if len(pairs) > 1:
            tokens = [sampled for sampled, _ in busy_s]
            metrics["perf/rollout_imbalance"] = max(tokens) * len(tokens) / max(sum(tokens), 1)
        if largest is not None:
            metrics["perf/rollout_cache_share_max"] = largest
        return metrics

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()


def _busy_s(stats: EngineStats) -> float:
    """Return the seconds in which an engine has decoded since its start."""
    return stats.sampled_tokens / stats.tokens_per_s if stats.tokens_per_s else 0.0
