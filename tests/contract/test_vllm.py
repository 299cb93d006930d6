"""The real vLLM behind the rollout protocol, with the trainer's weights changed after its start.

It needs an environment with vLLM: `make test-vllm` makes one. One engine core serves all tests of the file.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch
from tiny import CPU, EOS
from transformers import AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("vllm")

from pellucid.agents.single_turn import sample_rollouts
from pellucid.errors import NonFiniteError, UserError
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import Request, SampleStream, SamplingParams, WeightUpdate, generate_all, run_sync
from pellucid.rollout.transports import WeightsDifferError, stored
from pellucid.rollout.vllm_processes import check_vllm
from pellucid.rollout.vllm_processes.vllm_engine import VllmRolloutEngine
from pellucid.rollout.vllm_processes.weight_receiver import WeightReceiver
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import BUILTIN_FOLDER, load_model, load_tokenizer
from pellucid.training.common.packing import sequences_of
from pellucid.training.fsdp import FsdpEngine, MicroBatching
from pellucid.types import Prompt, Rollout

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOKENIZER = load_tokenizer("builtin")
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}
SAMPLED = SamplingParams(n=4, max_tokens=20, temperature=0.8)
GREEDY = SamplingParams(do_sample=False, max_tokens=20)
LONG = SamplingParams(max_tokens=150, ignore_eos=True)


class StaleHead(WeightReceiver):
    """Leaves a tied output head as vLLM's own reload leaves it on a CPU."""

    def pack_head(self, model: torch.nn.Module) -> None:
        """Do nothing."""


def start(actor: FsdpEngine, **options: object) -> ReplicaSet:
    engine = VllmRolloutEngine(str(BUILTIN_FOLDER), TOKENIZER, [EOS], seed=0, options=OPTIONS | options)
    return ReplicaSet({"replica 0": engine}, lambda digests: stored(actor.weights(1 << 12, digests=digests)), "always")


def is_vllms(process: psutil.Process) -> bool:
    return "VLLM" in process.name()


def other_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return weights of the built-in model, whose head is tied to its embeddings, with noise that is a third as large."""
    generator = torch.Generator().manual_seed(seed)
    state = load_model("builtin", device=CPU).state_dict()
    return {name: tensor + tensor.std() / 3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def trainer() -> FsdpEngine:
    return FsdpEngine(load_model("builtin", device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights under transformers' own eager attention."""
    plain = AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER, dtype=torch.float32, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain.eval()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FsdpEngine, ReplicaSet]]:
    actor = trainer()
    engine = start(actor)
    yield actor, engine
    started = [child for child in psutil.Process().children(recursive=True) if is_vllms(child)]
    engine.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert started and not alive


@pytest.fixture
def pair(shared: tuple[FsdpEngine, ReplicaSet]) -> tuple[FsdpEngine, ReplicaSet]:
    """The trainer and the engine, which serves other weights than those of the folder that it began with."""
    actor, engine = shared
    update(actor, engine, version=1)
    return actor, engine


def update(actor: FsdpEngine, engine: ReplicaSet, version: int) -> None:
    """Give the trainer other weights, as an optimizer step does, and the engine these."""
    actor.model.load_state_dict(other_weights(version))
    actor.version = version
    run_sync(engine.load_weights(WeightUpdate(version)))


def some_prompts(count: int = 5) -> list[Prompt]:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(2, 25, (3 + 4 * index,), generator=generator).tolist() for index in range(count)]
    return [Prompt(f"p{index}", tokens, TOKENIZER.decode(tokens), "t") for index, tokens in enumerate(ids)]


def request(prompt: Prompt, params: SamplingParams = LONG) -> Request:
    return Request(prompt.token_ids, params, SampleStream(("rollout", 1), prompt.uid, 0))


def assert_scored_alike(actor: FsdpEngine, rollouts: list[Rollout], temperature: float = 1.0) -> None:
    scores = actor.forward(sequences_of(rollouts), LogProbHead(temperature))
    for row, rollout in enumerate(rollouts):
        assert rollout.logprobs == pytest.approx(scores.logp[row, : len(rollout.token_ids)].tolist(), abs=1e-4)


async def drawn(engine: ReplicaSet, more: int) -> None:
    """Wait until the engine has sampled so many tokens more."""
    until = engine.stats().sampled_tokens + more
    while engine.stats().sampled_tokens < until:
        await asyncio.sleep(0.001)


def test_greedy_equals_transformers_under_changed_weights(pair):
    actor, engine = pair
    plain = plain_copy(actor.model)
    for rollout in sample_rollouts(engine, some_prompts(), GREEDY, stream=("rollout", 1)):
        prompt = torch.tensor([rollout.prompt.token_ids])
        with torch.no_grad():
            expected = plain.generate(prompt, do_sample=False, max_new_tokens=20, eos_token_id=EOS, pad_token_id=0)
        assert rollout.token_ids == expected[0, prompt.shape[1] :].tolist()


def test_log_probs_are_the_trainers_and_versions_those_of_the_weights(pair):
    actor, engine = pair
    for version in (2, 3):
        update(actor, engine, version)
        rollouts = sample_rollouts(engine, some_prompts(), SAMPLED, stream=("rollout", version))
        assert_scored_alike(actor, rollouts, 0.8)
        assert {seen for rollout in rollouts for seen in rollout.versions} == {version}


def test_a_stream_gives_the_same_tokens_again_and_another_one_others(pair):
    _, engine = pair
    first, again, other = (
        [rollout.token_ids for rollout in sample_rollouts(engine, some_prompts(), SAMPLED, stream=("rollout", step))]
        for step in (1, 1, 2)
    )
    assert first == again != other
    assert len({tuple(tokens) for tokens in first[:4]}) > 1, "samples of a group differ"


def test_where_an_answer_ends(pair):
    _, engine = pair
    free = sample_rollouts(engine, some_prompts(), SAMPLED, stream=("rollout", 1))
    for rollout in free:
        assert (rollout.token_ids[-1] == EOS) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(rollout.token_ids) == 20
        assert rollout.text == TOKENIZER.decode(rollout.token_ids, skip_special_tokens=True)
    goes_on = sample_rollouts(engine, some_prompts(), replace(SAMPLED, ignore_eos=True), stream=("rollout", 1))
    assert all(len(rollout.token_ids) == 20 and rollout.finish_reason == "length" for rollout in goes_on)
    stop = max(goes_on, key=lambda rollout: len(rollout.text)).text[3:5]
    until = replace(SAMPLED, ignore_eos=True, stop=[stop])
    stopped = sample_rollouts(engine, some_prompts(), until, stream=("rollout", 1))
    for rollout, whole in zip(stopped, goes_on):
        assert rollout.token_ids == whole.token_ids[: len(rollout.token_ids)]
        assert stop not in rollout.text and whole.text.startswith(rollout.text)
    assert any(len(rollout.token_ids) < 20 and rollout.finish_reason == "stop" for rollout in stopped)


def test_progress_and_stats(pair):
    _, engine = pair
    seen: list[int] = []
    before = engine.stats()
    sample_rollouts(engine, some_prompts(), replace(SAMPLED, ignore_eos=True), stream=("rollout", 1), on_done=seen.append)
    assert sum(seen) == 20 and seen.count(0) > 10
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.version) == (0, 0, 1)
    assert stats.sampled_tokens > before.sampled_tokens and stats.computed_tokens > before.computed_tokens


def test_a_running_request_goes_on_with_new_weights(pair):
    actor, engine = pair
    [prompt] = some_prompts(1)
    old = plain_copy(actor.model)

    async def update_on_the_way():
        task = asyncio.create_task(engine.generate(request(prompt)))
        await drawn(engine, 20)
        actor.model.load_state_dict(other_weights(5))
        await engine.load_weights(WeightUpdate(5))
        late = await engine.generate(request(prompt, replace(LONG, max_tokens=5)))
        return await task, late

    answer, late = run_sync(update_on_the_way())
    new = Rollout.single_turn(prompt, 0, late.token_ids, late.logprobs, late.versions, "length")
    assert set(late.versions) == {5}, "the prompt is the one that the running request holds in the cache"
    assert_scored_alike(actor, [new])
    before = answer.versions.count(1)
    assert answer.versions == [1] * before + [5] * (150 - before) and 20 <= before < 150
    ids = torch.tensor([[*prompt.token_ids, *answer.token_ids]])
    first = len(prompt.token_ids) - 1
    for model, part in ((old, slice(before)), (plain_copy(actor.model), slice(before, None))):
        with torch.no_grad():
            logp = model(ids).logits[0].log_softmax(-1)
        expected = [float(logp[first + t, token]) for t, token in enumerate(answer.token_ids)]
        assert answer.logprobs[part] == pytest.approx(expected[part], abs=1e-4)


def test_paused_requests_wait_and_aborted_ones_go_on(pair):
    actor, engine = pair
    prompts = some_prompts(3)

    async def keep():
        task = asyncio.create_task(engine.generate(request(prompts[0])))
        await drawn(engine, 10)
        await engine.pause("keep")
        at_pause = engine.stats().sampled_tokens
        await asyncio.sleep(0.2)
        assert engine.stats().sampled_tokens <= at_pause + 1 and not task.done()
        await engine.resume()
        return await task

    assert len(run_sync(keep()).token_ids) == 150

    async def abort():
        tasks = [asyncio.create_task(engine.generate(request(prompt))) for prompt in prompts]
        await drawn(engine, 12)
        await engine.pause("abort")
        parts = await asyncio.gather(*tasks)
        await engine.resume()
        rest = [
            replace(
                request(prompt, replace(LONG, max_tokens=150 - len(part.token_ids))),
                token_ids=[*prompt.token_ids, *part.token_ids],
                stream=SampleStream(("rollout", 1), prompt.uid, 0, position=len(part.token_ids)),
            )
            for prompt, part in zip(prompts, parts)
        ]
        return parts, await generate_all(engine, rest)

    joined = []
    for prompt, part, rest in zip(prompts, *run_sync(abort())):
        assert part.finish_reason == "aborted" and 0 < len(part.token_ids) < 150
        ids, logprobs = [*part.token_ids, *rest.token_ids], [*part.logprobs, *rest.logprobs]
        assert len(ids) == 150 and rest.text == TOKENIZER.decode(ids, skip_special_tokens=True)
        joined.append(Rollout.single_turn(prompt, 0, ids, logprobs, [1] * 150, "length"))
    assert_scored_alike(actor, joined)


def test_nan_weights_are_found_and_healthy_ones_heal(pair):
    actor, engine = pair
    with torch.no_grad():
        actor.model.model.norm.weight.fill_(math.nan)
    run_sync(engine.load_weights(WeightUpdate(1)))
    with pytest.raises(NonFiniteError):
        sample_rollouts(engine, some_prompts(2), SAMPLED, stream=("rollout", 1))
    update(actor, engine, version=1)
    assert_scored_alike(actor, sample_rollouts(engine, some_prompts(), SAMPLED, stream=("rollout", 1)), 0.8)


def test_a_stale_output_head_is_found_and_a_dead_engine_said():
    actor, others = trainer(), set(psutil.Process().children(recursive=True))
    engine = start(actor, worker_extension_cls="test_vllm.StaleHead")
    actor.model.load_state_dict(other_weights(1))
    with pytest.raises(WeightsDifferError, match=r"replica 0's .*lm_head.*differ by"):
        run_sync(engine.load_weights(WeightUpdate(1)))
    for child in set(psutil.Process().children(recursive=True)) - others:
        if is_vllms(child):
            child.kill()
    with pytest.raises(RuntimeError, match="vLLM's engine has died"):
        sample_rollouts(engine, some_prompts(1), SAMPLED, stream=("rollout", 1))
    engine.close()


def test_arguments_are_checked_against_vllms_own():
    check_vllm({"kv_cache_memory_bytes": 1})
    with pytest.raises(UserError, match="Did you mean 'max_num_seqs'"):
        check_vllm({"max_num_seq": 1})
