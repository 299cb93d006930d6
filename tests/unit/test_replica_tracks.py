"""Tracks and metrics of rollout engines: of made-up numbers, and of a native engine whose queue starves."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
import torch

from pellucid.metrics.definitions import check_names
from pellucid.observe.replica_tracks import ReplicaTracks
from pellucid.observe.report.merge import merge
from pellucid.observe.report.timeline import read_events
from pellucid.observe.spans import SpanRecorder
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.requests import EngineStats, Request, SampleStream, SamplingParams, generate_all
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import load_model, load_tokenizer
from pellucid.training.fsdp import FsdpEngine

BEFORE = EngineStats(computed_tokens=10, sampled_tokens=100, answered=4, queue_s=8, decode_s=4, tokens_per_s=50)


def test_metrics_are_what_was_done_since_the_last_call():
    stats = {"replica 0": BEFORE, "replica 1": BEFORE}
    tracks = ReplicaTracks(SpanRecorder(), lambda: stats, show=False)
    assert tracks.step_metrics() == {}
    # 60 tokens in 1 s, and 20 tokens in 2 s.
    more = {"computed_tokens": 40, "reused_tokens": 90, "preemptions": 3, "queue_s": 11, "prefill_s": 1.5, "decode_s": 16}
    stats["replica 0"] = replace(BEFORE, answered=7, sampled_tokens=160, tokens_per_s=160 / 3, **more)
    stats["replica 1"] = replace(BEFORE, sampled_tokens=120, tokens_per_s=30)
    metrics = tracks.step_metrics()
    check_names(metrics)
    assert metrics == {
        "perf/rollout_requests": 3,
        "perf/rollout_queue_s": 1.0,
        "perf/rollout_prefill_s": 0.5,
        "perf/rollout_decode_s": 4.0,
        "perf/rollout_tokens_per_s": pytest.approx(70.0),
        "perf/rollout_prefix_hit_share": 0.75,
        "perf/rollout_preemptions": 3,
        "perf/rollout_imbalance": 1.5,
    }
    assert tracks.step_metrics() == {}


def test_a_starved_queue_shows_in_metrics_and_merged_tracks(tmp_path):
    tokenizer, cpu = load_tokenizer("builtin"), torch.device("cpu")
    policy = FsdpEngine(load_model("builtin", device=cpu), None, MicroBatching(None, None), device=cpu, dtype=torch.float32)
    engine = NativeRolloutEngine(policy, tokenizer, [], max_num_seqs=1, max_num_batched_tokens=64, seed=0)
    spans = SpanRecorder(tmp_path / "controller.json")
    tracks = ReplicaTracks(spans, engine.replica_stats)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request([5, 14, 6, 16], params, SampleStream(("rollout", 1), "uid", sample)) for sample in range(4)]

    async def answer_all():
        answers = asyncio.create_task(generate_all(engine, requests))
        while engine.stats().waiting < 3:
            await asyncio.sleep(0)
        # The loop stands still until the track shows it.
        deadline = time.monotonic() + 20
        while not any(event["ph"] == "C" for event in written()) and time.monotonic() < deadline:
            time.sleep(0.05)
        await answers

    def written() -> list[dict]:
        spans.flush()
        return list(read_events(tmp_path / "controller.json")) if (tmp_path / "controller.json").exists() else []

    with spans.span("step", step=1):
        asyncio.run(answer_all())
    metrics = tracks.step_metrics()
    tracks.close()
    spans.close()
    assert metrics["perf/rollout_requests"] == 4 and metrics["perf/rollout_prefix_hit_share"] > 0.5
    # Each waits for all before it, the last for three answers.
    assert metrics["perf/rollout_queue_s"] > metrics["perf/rollout_decode_s"] + metrics["perf/rollout_prefill_s"] > 0
    merge(tmp_path, tmp_path / "merged.json", [], tmp_path)
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    queues = [event["args"]["queue"] for event in events if event["name"] == "replica 0: requests"]
    assert max(queues) >= 3
