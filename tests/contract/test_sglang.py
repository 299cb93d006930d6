"""The real SGLang behind the rollout protocol: the cases that all engines share, and what only SGLang can get wrong.

It needs an environment with SGLang: `make test-sglang` makes one. Each output head has one server for all tests. Where
SGLang's kernels are not installed, as on CPUs without AMX, `sglang_stand_ins` has what its `torch_native` path calls.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
if importlib.util.find_spec("sgl_kernel") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_stand_ins"))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path, str(Path(__file__).parent)])  # for the server's processes

from engine_cases import *  # noqa: F403
from engine_cases import (
    GREEDY,
    STREAM,
    TOKENIZER,
    Head,
    Pair,
    each_served_once,
    folder_of,
    keep_old_cache,
    prompt_of,
    replicated,
    request_of,
    some_prompts,
)
from tiny import EOS

from pellucid.agents.llm import sample_rollouts
from pellucid.errors import RunFailedError, UserError
from pellucid.rollout.inference import InferenceRolloutEngine
from pellucid.rollout.requests import run_sync
from pellucid.rollout.sglang_processes import SPARE_TOKENS, check_sglang, scheduler_hooks
from pellucid.rollout.sglang_processes.sglang_over_http import OwnSglang
from pellucid.rollout.transports import WeightsDifferError
from pellucid.training.fsdp import FsdpEngine

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FAULT = "PELLUCID_TEST_FAULT"
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 256 + SPARE_TOKENS,
    "max_total_tokens": 8192,
    "max_running_requests": 32,
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "grammar_backend": "none",
}


def load_with_fault(model: torch.nn.Module, named_tensors: list[tuple[str, Any]]) -> None:
    """Load weights in SGLang's process with the fault that the file named by the environment asks for.

    Each step takes 20 ms more from then on, so that there is time to speak of a request that runs.
    """
    fault, load = Path(os.environ[FAULT]).read_text(), model.load_weights
    if not model.model._forward_pre_hooks:
        model.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))

    def spoiled(tensors: Iterator[tuple[str, torch.Tensor]]) -> Any:
        arrived = dict(tensors)
        query, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
        if fault == "swapped":
            arrived[query], arrived[other] = arrived[other], arrived[query]
        elif fault == "bfloat16":
            arrived[other] = arrived[other].bfloat16()
        return load(iter(arrived.items()))

    model.load_weights = spoiled
    scheduler_hooks.load(model, named_tensors)
    model.load_weights = load


def start(actor: FsdpEngine, folder: Path) -> Pair:
    launch = partial(OwnSglang.start, OPTIONS | {"model_path": str(folder_of(actor, folder))})
    return replicated(actor, InferenceRolloutEngine(launch, TOKENIZER, [EOS], seed=0))


def servers() -> set[psutil.Process]:
    """Return SGLang's processes that this one has started."""
    return {child for child in psutil.Process().children(recursive=True) if "sglang" in child.name() + str(child.cmdline())}


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("fault") / "fault"
    file.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT, str(file))
        patch.setattr("pellucid.rollout.sglang_processes.sglang_over_http.LOADER", "test_sglang.load_with_fault")
        patch.setitem(OPTIONS, "custom_weight_loader", ["test_sglang.load_with_fault"])
        yield file


@pytest.fixture(scope="module")
def served(fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Head], Pair]]:
    yield from each_served_once(lambda actor: start(actor, tmp_path_factory.mktemp("model")))
    assert not psutil.wait_procs(servers(), timeout=10)[1], "SGLang's processes are left"


@pytest.mark.parametrize(("planted", "layers"), [("swapped", "[01]"), ("bfloat16", "1")])
def test_weights_that_are_loaded_wrongly_are_named(pair, fault, planted, layers):
    fault.write_text(planted)
    with pytest.raises(WeightsDifferError, match=rf"replica 0's 'model.layers.{layers}.self_attn.q_proj.*differ by"):
        pair.update(2)
    fault.write_text("")


def test_a_prefix_cache_of_old_weights_is_found(pair, monkeypatch):
    keep_old_cache(pair, monkeypatch)
    with pytest.raises(WeightsDifferError, match="replica 0's 'prefix cache' has 159 tokens that the old weights computed"):
        pair.update(2)


def test_a_request_that_is_refused_is_no_aborted_one(pair):
    with pytest.raises(RunFailedError, match=r"SGLang refuses a request: Input length \(257 tokens\)"):
        run_sync(pair.engine.generate(request_of(prompt_of(257, "too long"), replace(GREEDY, max_tokens=1))))


def test_arguments_are_checked_against_sglangs_own():
    check_sglang({"max_total_tokens": 1})
    with pytest.raises(UserError, match="Did you mean 'max_total_tokens'"):
        check_sglang({"max_total_token": 1})


def test_a_dead_engine_is_said(untied_pair):
    """The last test, for it ends the processes."""
    for process in servers():
        process.kill()
    with pytest.raises(RunFailedError, match=r"SGLang('s)? server.* is gone"):
        sample_rollouts(untied_pair.engine, some_prompts(1), GREEDY, stream=STREAM)
