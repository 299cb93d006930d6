"""The real vLLM behind the rollout protocol: the cases that all engines share, and what only vLLM can get wrong.

It needs an environment with vLLM: `make test-vllm` makes one. Each output head has one engine core for all tests.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("vllm")

from engine_cases import *  # noqa: F403
from engine_cases import (
    GREEDY,
    SAMPLED,
    STREAM,
    TOKENIZER,
    Head,
    Pair,
    assert_scored_alike,
    each_served_once,
    folder_of,
    keep_old_cache,
    replicated,
    some_prompts,
    trainer_of,
)
from tiny import EOS

from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.model import ModelConfig
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import UserError
from pellucid.rollout.inference import InferenceRolloutEngine
from pellucid.rollout.requests import WeightUpdate, run_sync
from pellucid.rollout.transports import WeightsDifferError
from pellucid.rollout.vllm_processes import check_vllm
from pellucid.rollout.vllm_processes.adapters import adapter_options
from pellucid.rollout.vllm_processes.own_vllm import OwnVllm
from pellucid.rollout.vllm_processes.weight_receiver import WeightReceiver
from pellucid.training.common.lora import adapter_tensors, add_lora
from pellucid.training.common.models import BUILTIN_FOLDER
from pellucid.training.fsdp import FsdpEngine

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "worker_extension_cls": "test_vllm.SpoiledReceiver",
}


class SpoiledReceiver(WeightReceiver):
    """Leaves a tied output head, when asked to, as vLLM's own reload leaves it on a CPU."""

    head_is_left = False

    def leave_head_stale(self, head_is_left: bool) -> None:
        self.head_is_left = head_is_left

    def halve_adapters(self, _: bool) -> None:
        """Serve half of each adapter from now on."""
        add = self.add_lora

        def add_half(request: Any) -> bool:
            done = add(request)
            for module in self.model_runner.lora_manager._adapter_manager.modules.values():
                for stacked in module.lora_b_stacked:
                    stacked /= 2
            return done

        self.add_lora = add_half

    def pack_head(self, model: torch.nn.Module) -> None:
        if not self.head_is_left:
            super().pack_head(model)


class SpoiledEngine(InferenceRolloutEngine):
    """An engine whose workers do what a test asks."""

    def ask_workers(self, method: str, *args: Any) -> None:
        self._wait(self._inference.call_workers(method, *args))


def start(actor: FsdpEngine, folder: Path) -> Pair:
    options = OPTIONS | {"model": str(folder_of(actor, folder))}
    return replicated(actor, SpoiledEngine(partial(OwnVllm.start, options), TOKENIZER, [EOS], seed=0))


def model_bytes(actor: FsdpEngine) -> int:
    return sum(tensor.nbytes for tensor in actor.model.parameters())


def vllms() -> set[psutil.Process]:
    """Return vLLM's processes that this one has started."""
    return {child for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Head], Pair]]:
    yield from each_served_once(lambda actor: start(actor, tmp_path_factory.mktemp("model")))
    assert not psutil.wait_procs(vllms(), timeout=10)[1], "vLLM's processes are left"


def test_a_stale_output_head_is_found(pair):
    replica = pair.engine.replicas["replica 0"]
    replica.ask_workers("leave_head_stale", True)
    with pytest.raises(WeightsDifferError, match=r"replica 0's 'lm_head.*differ by"):
        pair.update(2)
    replica.ask_workers("leave_head_stale", False)


def test_a_prefix_cache_of_old_weights_is_found(pair, monkeypatch):
    keep_old_cache(pair, monkeypatch)
    with pytest.raises(WeightsDifferError, match="replica 0's 'prefix cache' has 128 tokens that the old weights computed"):
        pair.update(2)


def test_adapters_alone_are_sent_and_served(tmp_path):
    """The base is what vLLM has loaded; after each update the trainer's log-probs are those of base and adapters."""
    actor = trainer_of("untied")
    adapters = adapter_options(ModelConfig(lora_rank=4, lora_alpha=8), RolloutConfig(name="vllm"))
    options = OPTIONS | {"model": str(folder_of(actor, tmp_path))} | adapters
    add_lora(actor.model, rank=4, alpha=8, target_modules="all-linear", seed=0)
    pair = replicated(actor, SpoiledEngine(partial(OwnVllm.start, options), TOKENIZER, [EOS], seed=0))
    replica = pair.engine.replicas["replica 0"]
    assert sum(tensor.nbytes for bucket in actor.weights(1) for tensor in bucket.tensors.values()) < 0.2 * model_bytes(actor)

    def update(version: int) -> None:
        for tensor in adapter_tensors(actor.model).values():
            tensor.data.normal_(std=0.1, generator=torch.Generator().manual_seed(version))
        actor.version = version
        run_sync(pair.engine.load_weights(WeightUpdate(version)))

    answers = []
    for version in (1, 2):
        update(version)
        answers.append(sample_rollouts(pair.engine, some_prompts(), SAMPLED, stream=STREAM))
        assert_scored_alike(actor, answers[-1], SAMPLED.temperature)
        assert {tag for one in answers[-1] for tag in one.versions} == {version}
    assert [one.token_ids for one in answers[0]] != [one.token_ids for one in answers[1]]
    replica.ask_workers("halve_adapters", True)
    with pytest.raises(WeightsDifferError, match=r"replica 0's 'model.layers.0.*lora_B.weight' has values that differ by 50"):
        update(3)
    pair.engine.close()


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"kv_cache_memory_bytes": 1 << 16}, "engine_kwargs.vllm.kv_cache_memory_bytes", ["too little memory", "cache blocks"]),
        ({"max_model_len": 100_000}, "name", ["refuses", "max_model_len (100000) is greater than"]),
        ({"max_num_batched_tokens": 4, "enable_chunked_prefill": False}, "name", ["refuses", "smaller than max_model_len"]),
        ({"tensor_parallel_size": 3}, "name", ["refuses", "attention heads (4) must be divisible"]),
    ],
)
def test_what_vllm_cannot_start_with_is_one_error(capfd, options, field, words):
    options = OPTIONS | {"model": str(BUILTIN_FOLDER)} | options
    with pytest.raises(UserError) as raised:
        InferenceRolloutEngine(partial(OwnVllm.start, options), TOKENIZER, [EOS], seed=0)
    assert raised.value.field == f"actor_rollout_ref.rollout.{field}"
    assert not [word for word in words if word not in str(raised.value)], raised.value
    assert "Traceback" not in "".join(capfd.readouterr())


def test_arguments_are_checked_against_vllms_own():
    check_vllm({"kv_cache_memory_bytes": 1})
    with pytest.raises(UserError, match="Did you mean 'max_num_seqs'"):
        check_vllm({"max_num_seq": 1})


def test_a_dead_engine_is_said(untied_pair):
    """The last test, for it ends the processes."""
    for process in vllms():
        process.kill()
    with pytest.raises(RuntimeError, match="vLLM's engine has died"):
        sample_rollouts(untied_pair.engine, some_prompts(1), GREEDY, stream=STREAM)
