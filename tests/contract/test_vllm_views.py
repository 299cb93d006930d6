"""What a run sees of the real vLLM: its numbers, its traces, and the first of its modules that computes something else.

It needs an environment with vLLM: `make test-vllm` makes one. One engine core, with a small cache, serves all tests.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_cases import LONG, STREAM, TOKENIZER, Pair, replicated, some_prompts, trainer_of
from tiny import EOS

from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.profiler import GlobalProfilerConfig, ScheduleConfig
from pellucid.observe.manifest import read_journals
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.replica_tracks import ReplicaTracks
from pellucid.observe.request import ProcessRequest, RoleRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.precision.compare import StageComparison, compare_stage
from pellucid.precision.divergence import Kind
from pellucid.precision.dump import find_dumps
from pellucid.precision.matching import pairs_of, read_captures, trainer_and_rollout
from pellucid.rollout.inference import InferenceRolloutEngine
from pellucid.rollout.requests import run_sync
from pellucid.rollout.vllm_processes.own_vllm import OwnVllm
from pellucid.stages import Stage
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import BUILTIN_FOLDER
from pellucid.training.common.packing import sequences_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STAGE = Stage.ROLLOUT_GENERATE
WRONG = "model.layers.2.mlp.down_proj"
_spoilt = []


def spoil(worker: Any, is_wrong: bool) -> None:
    """Let one layer of vLLM's model compute a thousandth too much, or heal it; called in the worker."""
    if is_wrong:
        layer = worker.model_runner.get_model().get_submodule(WRONG)
        _spoilt.append(layer.register_forward_hook(lambda module, args, output: (output[0] * 1.001, output[1])))
    else:
        _spoilt.pop().remove()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    traces = tmp_path_factory.mktemp("traces")
    options = {
        "model": str(BUILTIN_FOLDER),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 3 << 20,
        "async_scheduling": False,
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(traces), "ignore_frontend": True},
    }
    pair = replicated(trainer_of("tied"), InferenceRolloutEngine(partial(OwnVllm.start, options), TOKENIZER, [EOS], seed=0))
    yield pair
    pair.engine.close()


def profiler_of(pair: Pair, folder: Path, role: RoleRequest, step: int = 1) -> ProcessProfiler:
    """Return the controller's profiler, which is to capture the engine, or else the actor, in a step."""
    config, name = GlobalProfilerConfig(tool=role.tool, steps=[step], strict=True), "rollout" if role.replicas else "actor"
    request = ProcessRequest("controller", "policy", 0, 1, {name: role}, folder / ".journals", config)
    profiler = ProcessProfiler(SpanRecorder(), request, print)
    profiler.replicas = pair.engine.replicas
    return profiler


def test_a_cache_that_is_too_small_shows_in_the_numbers(pair):
    tracks = ReplicaTracks(SpanRecorder(), pair.engine.replica_stats, show=False)
    few, many = some_prompts(1), some_prompts(12)
    sample_rollouts(pair.engine, few, replace(LONG, max_tokens=20), stream=STREAM)
    alone = tracks.step_metrics()
    assert alone["perf/rollout_requests"] == 1 and alone["perf/rollout_preemptions"] == 0
    assert alone["perf/rollout_decode_s"] > 0 < alone["perf/rollout_prefill_s"]
    sample_rollouts(pair.engine, many, replace(LONG, max_tokens=200), stream=STREAM)
    starved = tracks.step_metrics()
    assert starved["perf/rollout_requests"] == 12 and starved["perf/rollout_preemptions"] > 0
    assert starved["perf/rollout_queue_s"] > 10 * alone["perf/rollout_queue_s"]
    assert starved["perf/rollout_tokens_per_s"] > 0


def test_a_window_of_its_steps_is_captured(pair, tmp_path):
    window = ScheduleConfig("decode_step", skip_first=2, active=3, stages=["rollout_generate"])
    profiler = profiler_of(pair, tmp_path, RoleRequest("torch", tmp_path, windows={STAGE: window}, replicas=(0,)))
    with profiler.stage(STAGE, 1):
        sample_rollouts(pair.engine, some_prompts(3), replace(LONG, max_tokens=10), stream=STREAM)
    [entry], failures = read_journals(tmp_path / ".journals")
    assert not failures and (entry.role, entry.rank, entry.tool) == ("rollout", 0, "torch")
    assert Path(entry.path).parent.name == "rollout_replica0"
    events = json.loads(gzip.decompress((tmp_path / entry.path).read_bytes()))["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("execute_") and event.get("cat") == "user_annotation"]
    assert len(steps) == 3 and all("generation_3" in name for name in steps), "one step reads the prompts, two wait"


def compared(pair: Pair, folder: Path, step: int) -> StageComparison:
    """Capture vLLM and the trainer for the same tokens of a step, and compare them."""
    tool = RoleRequest("precision_debugger", folder, discrete=True)
    rollouts = []
    for role, stage in (("rollout", STAGE), ("actor", Stage.ACTOR_COMPUTE_LOG_PROB)):
        profiler = profiler_of(pair, folder, replace(tool, replicas=(0,) if role == "rollout" else ()), step)
        profiler.models_of = lambda stage: (pair.actor.model,)
        pair.actor._probe = profiler
        with profiler.stage(stage, step):
            if role == "rollout":
                rollouts = sample_rollouts(pair.engine, some_prompts(3), replace(LONG, n=2, max_tokens=10), stream=STREAM)
            else:
                pair.actor.forward(sequences_of(rollouts), LogProbHead(1.0))
    assert not read_journals(folder / ".journals")[1]
    sides = trainer_and_rollout([ref for ref in find_dumps(folder) if ref.step == step], None)
    [(place, mine, theirs)], _ = pairs_of(*sides, by_sample=True)
    return compare_stage(place, read_captures(mine), read_captures(theirs), by_sample=True, rtol=1e-4)


def test_the_first_module_that_differs_is_named_in_the_trainers_words(pair, tmp_path):
    engine = pair.engine.replicas["replica 0"]
    equal = compared(pair, tmp_path, 1)
    assert equal.divergence is None and equal.max_error < 5e-5
    assert equal.notes[0].endswith("over the tokens of 3 prompts and 6 responses.")
    layer = {f"model.layers.3.{name}" for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")}
    parts = {f"model.layers.3.self_attn.{name}_proj" for name in "qkvo"} | {f"model.layers.3.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert {"model.embed_tokens", "model.norm", "model.layers.3", *layer, *parts} <= equal.modules.keys()
    run_sync(engine.look_inside("test_vllm_views:spoil", True))
    differs = compared(pair, tmp_path, 2)
    run_sync(engine.look_inside("test_vllm_views:spoil", False))
    assert differs.divergence is not None
    assert (differs.divergence.module, differs.divergence.kind) == (WRONG, Kind.OUTPUT)
