"""What every rollout engine promises, as cases that the engines share. Log-probs are held against `transformers` and the
trainer under weights that were changed after the engine's start.

A file for an engine takes the cases over with `from engine_cases import *` and has one fixture of its own, `served`: from
"tied" or "untied" to a trainer with such an output head and the engine that gets its weights, the same or a new one at each
call (`each_served_once` keeps one of each). The engine makes room for 256 tokens a sequence, and `folder_of` has the model
that it starts from.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny import CPU, EOS, VOCABULARY
from transformers import AutoModelForCausalLM, PreTrainedModel

from pellucid.agents.chat import Chat
from pellucid.agents.llm import AgentLoop, sample_rollouts
from pellucid.agents.loops import in_environment
from pellucid.errors import NonFiniteError
from pellucid.rollout.collective import Broadcaster
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import (
    Completion,
    Request,
    RolloutEngine,
    SampleStream,
    SamplingParams,
    WeightUpdate,
    generate_all,
    run_sync,
)
from pellucid.rollout.transports import Transport, WeightHandle, WeightsDifferError, WeightStore
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import BUILTIN_FOLDER, init_model, load_model, load_tokenizer
from pellucid.training.common.packing import sequences_of
from pellucid.training.fsdp import FsdpEngine
from pellucid.training.protocol import WeightBucket
from pellucid.types import Prompt, Rollout

Head = Literal["tied", "untied"]
SCALE = 0.2
TOKENIZER = load_tokenizer("builtin")
STREAM = ("rollout", 1)
GREEDY = SamplingParams(do_sample=False, max_tokens=20)
SAMPLED = SamplingParams(n=4, max_tokens=20, temperature=0.8)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


# --- what the cases are given -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A trainer and the engine that samples from its policy."""

    actor: FsdpEngine
    engine: RolloutEngine
    sender: "Sender | None" = None
    """What brings the weights; None where they are the trainer's own."""

    def update(self, version: int) -> None:
        """Give the trainer other weights, as an optimizer step does, and the engine these."""
        change(self.actor, version)
        run_sync(self.engine.load_weights(WeightUpdate(version)))


def change(actor: FsdpEngine, version: int) -> None:
    """Give the trainer the weights of a version."""
    actor.model.load_state_dict(weights_of(version, actor.model.config.tie_word_embeddings))
    actor.version = version


@cache
def weights_of(seed: int, tied: bool) -> dict[str, torch.Tensor]:
    """Return weights for the built-in model's shape, drawn large enough that answers differ and go on for a while."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: SCALE * noise if tensor.dim() > 1 else 1 + 0.2 * noise
        for name, tensor in load_model("builtin", device=CPU).state_dict().items()
        for noise in [torch.randn(tensor.shape, generator=generator)]
    }
    return drawn | ({"lm_head.weight": drawn["model.embed_tokens.weight"]} if tied else {})


def trainer_of(head: Head) -> FsdpEngine:
    """Return a trainer of the built-in model, or of one with a head of its own."""
    fields = load_model("builtin", device=CPU).config.to_dict() | {"tie_word_embeddings": head == "tied"}
    actor = FsdpEngine(init_model(fields, seed=0, device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)
    change(actor, 0)
    return actor


class Sender:
    """Sends a trainer's weights, each tensor in a bucket of its own, through `spoil` where a fault on the way is planted."""

    def __init__(self, actor: FsdpEngine) -> None:
        self._actor = actor
        self.transport: Transport = WeightStore()
        self.spoil: Callable[[list[WeightBucket]], Iterable[WeightBucket]] = list

    def send(self, digests: bool) -> AbstractContextManager[WeightHandle]:
        buckets = [replace(one, tensors=dict(one.tensors)) for one in self._actor.weights(1, digests=digests)]
        return self.transport.send(self.spoil(buckets))


def replicated(actor: FsdpEngine, replica: RolloutEngine) -> Pair:
    """Return a replica that gets the weights of `actor` through a transport, each update checked."""
    sender = Sender(actor)
    engine = ReplicaSet({"replica 0": replica}, sender.send, "always", max_tokens=256)
    run_sync(engine.load_weights(WeightUpdate(actor.version)))
    return Pair(actor, engine, sender)


def each_served_once(start: Callable[[FsdpEngine], Pair]) -> Iterator[Callable[[Head], Pair]]:
    """Yield what `served` returns, for engines that take long to start: one for each head, and end them."""
    pairs: dict[Head, Pair] = {}

    def get(head: Head) -> Pair:
        if head not in pairs:
            pairs[head] = start(trainer_of(head))
        return pairs[head]

    yield get
    for pair in pairs.values():
        pair.engine.close()


def folder_of(actor: FsdpEngine, folder: Path) -> Path:
    """Return a model folder with the architecture that `actor` trains, written below `folder` where none is shipped."""
    if actor.model.config.tie_word_embeddings:
        return BUILTIN_FOLDER
    actor.model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def pair(served: Callable[[Head], Pair]) -> Pair:
    """The engine serves other weights than those that it began with, under a tied head."""
    return with_version_1(served("tied"))


@pytest.fixture(params=["tied", "untied"])
def each_pair(served: Callable[[Head], Pair], request: pytest.FixtureRequest) -> Pair:
    """The same with either head, for what hangs on weights that are loaded."""
    return with_version_1(served(request.param))


@pytest.fixture
def untied_pair(served: Callable[[Head], Pair]) -> Pair:
    return with_version_1(served("untied"))


def with_version_1(pair: Pair) -> Pair:
    pair.update(1)
    return pair


def keep_old_cache(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM or SGLang say that it has dropped what the old weights computed, and keep it."""

    async def keep() -> bool:
        return True

    monkeypatch.setattr(pair.engine.replicas["replica 0"]._inference, "forget_cache", keep)


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights under transformers' own eager attention."""
    plain = AutoModelForCausalLM.from_config(deepcopy(model.config), dtype=torch.float32, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain.eval()


def some_prompts(count: int = 5) -> list[Prompt]:
    """Return prompts of 3 to 19 tokens."""
    return [prompt_of(3 + 4 * index, f"p{index}") for index in range(count)]


def prompt_of(length: int, uid: str) -> Prompt:
    tokens = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return Prompt(uid, tokens, TOKENIZER.decode(tokens), "t")


def request_of(prompt: Prompt, params: SamplingParams = LONG, sample: int = 0) -> Request:
    return Request(prompt.token_ids, params, SampleStream(STREAM, prompt.uid, sample))


def rollout_of(prompt: Prompt, answer: Completion) -> Rollout:
    return Rollout.single_turn(prompt, 0, answer.token_ids, answer.logprobs, answer.versions, "length")


def assert_scored_alike(actor: FsdpEngine, rollouts: list[Rollout], temperature: float = 1.0) -> None:
    scores = actor.forward(sequences_of(rollouts), LogProbHead(temperature))
    for row, rollout in enumerate(rollouts):
        assert rollout.logprobs == pytest.approx(scores.logp[row, : len(rollout.token_ids)].tolist(), abs=1e-4)


def assert_greedy(plain: PreTrainedModel, prompt: Prompt, token_ids: list[int], max_tokens: int = 20) -> None:
    start = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        answer = plain.generate(start, do_sample=False, max_new_tokens=max_tokens, eos_token_id=EOS, pad_token_id=0)
    assert list(token_ids) == answer[0, start.shape[1] :].tolist()


async def drawn(engine: RolloutEngine, more: int) -> None:
    """Wait until the engine has sampled so many tokens more."""
    until = engine.stats().sampled_tokens + more
    while engine.stats().sampled_tokens < until:
        await asyncio.sleep(0.001)


async def settled(engine: RolloutEngine) -> None:
    """Wait until nothing more is told of: tokens that were drawn before a pause may still be on their way."""
    before = -1
    while (now := engine.stats().sampled_tokens) != before:
        before = now
        await asyncio.sleep(0.5)


# --- the policy that is sampled ---------------------------------------------------------------------------------------


def test_greedy_equals_transformers_under_changed_weights(each_pair):
    for version in (2, 3):
        each_pair.update(version)
        plain = plain_copy(each_pair.actor.model)
        for rollout in sample_rollouts(each_pair.engine, some_prompts(), GREEDY, stream=STREAM):
            assert_greedy(plain, rollout.prompt, rollout.token_ids)


def test_log_probs_are_the_trainers_and_versions_those_of_the_weights(each_pair):
    for version in (2, 3):
        each_pair.update(version)
        rollouts = sample_rollouts(each_pair.engine, some_prompts(), SAMPLED, stream=("rollout", version))
        assert_scored_alike(each_pair.actor, rollouts, 0.8)
        assert {seen for rollout in rollouts for seen in rollout.versions} == {version}
        assert all(len(rollout.versions) == len(rollout.token_ids) for rollout in rollouts)


def test_requests_of_one_batch_are_drawn_each_in_its_own_way(pair):
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    ways = [GREEDY, replace(free, top_k=1), replace(free, top_k=3, temperature=2.0), replace(free, top_p=1e-6)]
    prompts, plain = some_prompts(4), plain_copy(pair.actor.model)
    answers = run_sync(generate_all(pair.engine, map(request_of, prompts, ways)))
    assert_greedy(plain, prompts[0], answers[0].token_ids)
    ranks = []
    for prompt, answer in zip(prompts, answers):
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt.token_ids, *answer.token_ids]])).logits[0]
        drawn_from = logits[len(prompt.token_ids) - 1 : -1]
        ranks.append({int((row > row[token]).sum()) for row, token in zip(drawn_from, answer.token_ids, strict=True)})
    assert ranks == [{0}, {0}, {0, 1, 2}, {0}]


def test_a_stream_gives_the_same_tokens_again_and_another_one_others(pair):
    first, again, other = (
        [list(rollout.token_ids) for rollout in sample_rollouts(pair.engine, some_prompts(), SAMPLED, stream=("rollout", step))]
        for step in (1, 1, 2)
    )
    assert first == again != other
    assert len({tuple(tokens) for tokens in first[:4]}) > 1, "samples of a group differ"


# --- trajectories of several turns ------------------------------------------------------------------------------------


class Echo:
    """An environment that gives back what was said, and then ends."""

    def __init__(self, prompt: Prompt) -> None:
        self.left = 3

    def reset(self) -> str:
        return "(2)"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left -= 1
        return f"{text[:3]}+", float(len(text)), not self.left


CHAT = Chat(TOKENIZER, [EOS], templated=False)
ECHO = AgentLoop(in_environment(Echo), "echo", CHAT, max_turns=4)


def test_every_turn_of_a_trajectory_is_scored_as_the_trainer_scores_all_of_it(each_pair):
    params = SamplingParams(n=2, max_tokens=60)
    rollouts = sample_rollouts(each_pair.engine, some_prompts(), params, stream=STREAM, loop=ECHO)
    scores = each_pair.actor.forward(sequences_of(rollouts), LogProbHead(1.0))
    assert {len(rollout.turns) for rollout in rollouts} >= {3}
    for row, rollout in enumerate(rollouts):
        said = TOKENIZER.encode("(2)")
        for turn in rollout.turns:
            start = turn.start - len(said)
            assert list(rollout.token_ids[start : turn.start]) == said
            assert not any(rollout.sampled[start : turn.start]) and all(rollout.sampled[turn.start : turn.end])
            assert list(rollout.versions[start : turn.end]) == [-1] * len(said) + [1] * (turn.end - turn.start)
            expected = scores.logp[row, turn.start : turn.end].tolist()
            assert list(rollout.logprobs[turn.start : turn.end]) == pytest.approx(expected, abs=1e-4)
            if turn.tool_calls:  # of a turn that the limit of tokens has ended, too
                said = TOKENIZER.encode(turn.tool_calls[0].result)
        ended = {"stop"} if len(rollout.turns) == 3 else {"length"}
        assert rollout.finish_reason in ended | {rollout.turns[-1].finish_reason}
        assert rollout.outcome.rewards == {"environment": sum(turn.reward for turn in rollout.turns)}


def test_a_trajectory_may_have_sequences_that_begin_with_other_tokens(pair):
    async def branches(prompt, llm, tools):
        await llm.complete(max_tokens=5)
        begins = [llm.tokens(1)] * 2 + [[*prompt.token_ids, 5, 6]]
        forks = [llm.fork(begin, longest=len(prompt.token_ids) + 40) for begin in begins]
        await asyncio.gather(*(fork.complete("+", max_tokens=9) for fork in forks))
        await forks[0].complete("1=")

    loop, params = AgentLoop(branches, "branches", CHAT, max_turns=9), SamplingParams(n=2, max_tokens=30, ignore_eos=True)
    rollouts, again = (sample_rollouts(pair.engine, some_prompts(3), params, stream=STREAM, loop=loop) for _ in range(2))
    for rollout in rollouts:
        first, *others = rollout.parts
        assert [one.sequence for one in rollout.parts] == [0, 1, 2, 3] and first.num_sequences == 4
        assert first.prompt.token_ids == some_prompts(3)[int(first.prompt.uid[1])].token_ids
        begun = [one for one in others if one.prompt.token_ids == [*first.prompt.token_ids, *first.token_ids]]
        assert len(begun) == 2 and list(begun[0].token_ids[:10]) != list(begun[1].token_ids[:10])
        assert {len(one.token_ids) for one in others} <= {10, 30}, "no turn is longer than it may be"
    assert_scored_alike(pair.actor, [part for rollout in rollouts for part in rollout.parts])
    tokens = [[list(part.token_ids) for rollout in each for part in rollout.parts] for each in (rollouts, again)]
    assert tokens[0] == tokens[1]


# --- where a response ends --------------------------------------------------------------------------------------------


def test_end_of_text_is_kept_and_ends_the_response(pair):
    rollouts = sample_rollouts(pair.engine, some_prompts(), SAMPLED, stream=STREAM)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ids = list(rollout.token_ids)
        assert EOS not in ids[:-1] and (ids[-1] == EOS) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(ids) == 20
        assert rollout.text == TOKENIZER.decode(ids, skip_special_tokens=True) and "<eos>" not in rollout.text
    shortest = min((rollout for rollout in rollouts if rollout.finish_reason == "stop"), key=lambda one: len(one.token_ids))
    fits = replace(SAMPLED, max_tokens=len(shortest.token_ids))
    again = sample_rollouts(pair.engine, some_prompts(), fits, stream=STREAM)[rollouts.index(shortest)]
    assert (list(again.token_ids), again.finish_reason) == (list(shortest.token_ids), "stop"), "not a length"


def test_stop_strings_cut_the_text_and_keep_the_ids(pair):
    goes_on = sample_rollouts(pair.engine, some_prompts(), replace(SAMPLED, ignore_eos=True), stream=STREAM)
    assert all(len(rollout.token_ids) == 20 and rollout.finish_reason == "length" for rollout in goes_on)
    stops = [max(goes_on, key=lambda rollout: len(rollout.text)).text[3:5], "9"]  # one of two tokens, one of one
    until = replace(SAMPLED, ignore_eos=True, stop=stops)
    num_stopped = 0
    for rollout, whole in zip(sample_rollouts(pair.engine, some_prompts(), until, stream=STREAM), goes_on):
        texts = [TOKENIZER.decode(whole.token_ids[: end + 1], skip_special_tokens=True) for end in range(20)]
        ends = [end + 1 for end, text in enumerate(texts) if any(stop in text for stop in stops)]
        assert list(rollout.token_ids) == list(whole.token_ids[: min(ends, default=20)])
        assert rollout.finish_reason == ("stop" if ends else "length")
        assert whole.text.startswith(rollout.text) and not any(stop in rollout.text for stop in stops)
        num_stopped += bool(ends)
    assert 3 < num_stopped < 20


def test_the_longest_request_fits(pair):
    prompt = prompt_of(255, "longest")
    answer = run_sync(pair.engine.generate(request_of(prompt, replace(GREEDY, max_tokens=1))))
    assert_greedy(plain_copy(pair.actor.model), prompt, answer.token_ids, max_tokens=1)


def test_progress_and_stats(pair):
    seen: list[int] = []
    before = pair.engine.stats()
    params = replace(SAMPLED, ignore_eos=True)
    rollouts = sample_rollouts(pair.engine, some_prompts(), params, stream=STREAM, on_done=seen.append)
    assert [(r.prompt.uid, r.sample) for r in rollouts] == [(p.uid, s) for p in some_prompts() for s in range(4)]
    assert sum(seen) == 20 and seen.count(0) > 10
    stats = pair.engine.stats()
    assert (stats.running, stats.waiting, stats.version) == (0, 0, 1)
    assert stats.sampled_tokens - before.sampled_tokens == 400
    assert stats.computed_tokens > before.computed_tokens


# --- requests that come, go and come back -----------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_others_alone(pair):
    prompts = some_prompts(3)

    async def with_one_cancelled():
        tasks = [asyncio.create_task(pair.engine.generate(request_of(prompt))) for prompt in prompts]
        await drawn(pair.engine, 12)
        tasks[0].cancel()
        return await asyncio.gather(*tasks[1:])

    rollouts = [rollout_of(prompt, answer) for prompt, answer in zip(prompts[1:], run_sync(with_one_cancelled()))]
    assert [len(rollout.token_ids) for rollout in rollouts] == [100, 100]
    assert_scored_alike(pair.actor, rollouts)
    assert_scored_alike(pair.actor, sample_rollouts(pair.engine, prompts, SAMPLED, stream=STREAM), 0.8)
    assert pair.engine.in_hand == [] and pair.engine.stats().running == 0


def test_aborted_requests_go_on(pair):
    prompts = some_prompts(3)

    async def abort():
        tasks = [asyncio.create_task(pair.engine.generate(request_of(prompt))) for prompt in prompts]
        await drawn(pair.engine, 12)
        await pair.engine.pause("abort")
        parts = await asyncio.gather(*tasks)
        await pair.engine.resume()
        rest = [
            replace(
                request_of(prompt, replace(LONG, max_tokens=100 - len(part.token_ids))),
                token_ids=[*prompt.token_ids, *part.token_ids],
                stream=SampleStream(STREAM, prompt.uid, 0, position=len(part.token_ids)),
            )
            for prompt, part in zip(prompts, parts)
        ]
        return parts, await generate_all(pair.engine, rest)

    joined = []
    for prompt, part, rest in zip(prompts, *run_sync(abort())):
        assert part.finish_reason == "aborted" and 0 < len(part.token_ids) < 100
        ids, logprobs = [*part.token_ids, *rest.token_ids], [*part.logprobs, *rest.logprobs]
        assert len(ids) == 100 and rest.text == TOKENIZER.decode(ids, skip_special_tokens=True)
        joined.append(Rollout.single_turn(prompt, 0, ids, logprobs, [1] * 100, "length"))
    assert_scored_alike(pair.actor, joined)


@pytest.mark.parametrize("mode", ["keep", "finish"])
def test_nothing_is_sampled_while_paused(pair, mode):
    first, second = some_prompts(2)

    async def pause():
        running = asyncio.create_task(pair.engine.generate(request_of(first, replace(LONG, max_tokens=240))))
        await drawn(pair.engine, 10)
        await pair.engine.pause(mode)
        late = asyncio.create_task(pair.engine.generate(request_of(second, GREEDY)))
        await settled(pair.engine)  # an engine that goes on has answered both by then
        assert running.done() == (mode == "finish") and not late.done()
        await pair.engine.resume()
        return await asyncio.gather(running, late)

    answer, late = run_sync(pause())
    assert len(answer.token_ids) == 240
    assert_scored_alike(pair.actor, [rollout_of(first, answer)])
    assert_greedy(plain_copy(pair.actor.model), second, late.token_ids)


def test_sleep_and_wake_leave_answers_unchanged(pair):
    run_sync(pair.engine.sleep())
    run_sync(pair.engine.wake())
    assert_scored_alike(pair.actor, sample_rollouts(pair.engine, some_prompts(), SAMPLED, stream=STREAM), 0.8)


# --- other weights ----------------------------------------------------------------------------------------------------


def test_a_running_request_goes_on_with_new_weights(untied_pair):
    """Each token's log-prob is that of its own version; the head alone changes, so that the cache is right under both."""
    actor, engine, [prompt] = untied_pair.actor, untied_pair.engine, some_prompts(1)
    old = plain_copy(actor.model)

    async def update_on_the_way():
        task = asyncio.create_task(engine.generate(request_of(prompt, replace(LONG, max_tokens=240))))
        await drawn(engine, 20)
        actor.model.load_state_dict(weights_of(1, False) | {"lm_head.weight": weights_of(5, False)["lm_head.weight"]})
        actor.version = 5
        await engine.load_weights(WeightUpdate(5))
        return await task

    answer = run_sync(update_on_the_way())
    before = list(answer.versions).count(1)
    assert list(answer.versions) == [1] * before + [5] * (240 - before) and 20 <= before < 240
    ids, first = torch.tensor([[*prompt.token_ids, *answer.token_ids]]), len(prompt.token_ids) - 1
    for model, part in ((old, slice(before)), (plain_copy(actor.model), slice(before, None))):
        with torch.no_grad():
            logp = model(ids).logits[0].log_softmax(-1)
        expected = [float(logp[first + place, token]) for place, token in enumerate(answer.token_ids)]
        assert list(answer.logprobs)[part] == pytest.approx(expected[part], abs=1e-4)


def test_after_an_update_nothing_that_the_old_weights_computed_is_used(each_pair):
    """A prompt that a running request holds in the cache is found there before the update, and read again after it."""
    actor, engine = each_pair.actor, each_pair.engine
    prompt = prompt_of(140, "long")

    async def update_on_the_way():
        running = asyncio.create_task(engine.generate(request_of(prompt)))
        await drawn(engine, 5)
        reused = engine.stats().reused_tokens
        found = await engine.generate(request_of(prompt, replace(GREEDY, max_tokens=1), sample=1))
        assert found.reused_tokens or engine.stats().reused_tokens > reused, "nothing in the cache could be used wrongly"
        change(actor, 5)
        await engine.load_weights(WeightUpdate(5))
        assert not running.done()
        late = await engine.generate(request_of(prompt, replace(GREEDY, ignore_eos=True), sample=2))
        await running
        return late

    late = run_sync(update_on_the_way())
    assert set(late.versions) == {5}
    assert_scored_alike(actor, [rollout_of(prompt, late)])


@pytest.mark.parametrize("name", ["files", "collective"])
def test_weights_arrive_by_the_other_transports_too(untied_pair, name, tmp_path, monkeypatch):
    actor, sender = untied_pair.actor, untied_pair.sender
    if sender is None:
        pytest.skip("the weights are the trainer's own")
    transport = WeightStore(tmp_path) if name == "files" else Broadcaster("127.0.0.1", 1, "gloo")
    monkeypatch.setattr(sender, "transport", transport)
    for version in (2, 3):
        untied_pair.update(version)
        [rollout] = sample_rollouts(untied_pair.engine, some_prompts(1), GREEDY, stream=STREAM)
        assert_greedy(plain_copy(actor.model), rollout.prompt, rollout.token_ids)
        assert_scored_alike(actor, [rollout])


def test_nan_weights_are_found_and_healthy_ones_heal(pair):
    with torch.no_grad():
        pair.actor.model.model.norm.weight.fill_(math.nan)
    run_sync(pair.engine.load_weights(WeightUpdate(1)))
    with pytest.raises(NonFiniteError):
        sample_rollouts(pair.engine, some_prompts(2), SAMPLED, stream=STREAM)
    pair.update(1)
    assert_scored_alike(pair.actor, sample_rollouts(pair.engine, some_prompts(), SAMPLED, stream=STREAM), 0.8)


# --- faults on the way ------------------------------------------------------------------------------------------------

UP, GATE, NORM = (f"model.layers.1.{name}.weight" for name in ("mlp.up_proj", "mlp.gate_proj", "input_layernorm"))


def lose(name: str) -> Callable[[list[WeightBucket]], list[WeightBucket]]:
    return lambda buckets: [bucket for bucket in buckets if name not in bucket.tensors]


def swap(buckets: list[WeightBucket]) -> list[WeightBucket]:
    [up], [gate] = ([bucket.tensors for bucket in buckets if name in bucket.tensors] for name in (UP, GATE))
    up[UP], gate[GATE] = gate[GATE], up[UP]
    return buckets


def round_to_bf16(buckets: list[WeightBucket]) -> list[WeightBucket]:
    for bucket in buckets:
        if UP in bucket.tensors:
            bucket.tensors[UP] = bucket.tensors[UP].bfloat16().float()
    return buckets


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(lose(UP), UP), (lose(NORM), NORM), (lose("lm_head.weight"), "lm_head.weight"), (swap, f"{GATE}|{UP}"), (round_to_bf16, UP)],
    ids=["lost", "lost norm", "lost head", "swapped", "rounded"],
)
def test_weights_that_do_not_arrive_as_they_were_sent_are_named(untied_pair, spoil, named):
    sender = untied_pair.sender
    if sender is None:
        pytest.skip("the weights are the trainer's own")
    sender.spoil = spoil
    with pytest.raises(WeightsDifferError, match=f"replica 0's '({named})' has"):
        untied_pair.update(2)
    sender.spoil = list
    untied_pair.update(2)
    assert_scored_alike(untied_pair.actor, sample_rollouts(untied_pair.engine, some_prompts(), SAMPLED, stream=STREAM), 0.8)


__all__ = [name for name in list(globals()) if name.startswith("test_") or name in ("pair", "each_pair", "untied_pair")]
