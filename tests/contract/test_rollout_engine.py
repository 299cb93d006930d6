"""The native engine: the cases that all engines share, with the trainer's own weights and with copies of them, and what it
promises beyond: the same numbers whatever else is in the batch, and caches that last over turns.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_cases import *  # noqa: F403
from engine_cases import Head, Pair, replicated, trainer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, CPU, EOS, VOCABULARY, plain_copy, tiny_model

from pellucid.agents.llm import sample_rollouts
from pellucid.errors import UserError
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.copied import CopiedPolicy
from pellucid.rollout.native.sampling import draw_tokens
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
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import load_tokenizer
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import sequences_of
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Prompt, Rollout

TOKENIZER = load_tokenizer("builtin")


def trainer(name="llama", *, dtype=torch.float32) -> FsdpEngine:
    return FsdpEngine(tiny_model(name), None, MicroBatching(None, None), device=CPU, dtype=dtype)


def make_engine(policy, *, max_num_seqs=256, max_num_batched_tokens=8192, seed=0, **options) -> NativeRolloutEngine:
    return NativeRolloutEngine(
        policy,
        TOKENIZER,
        [EOS],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        seed=seed,
        **options,
    )


@pytest.fixture(scope="module", params=["alias", "copied"])
def served(request: pytest.FixtureRequest) -> Callable[[Head], Pair]:
    def get(head: Head) -> Pair:
        actor = trainer_of(head)
        if request.param == "alias":
            return Pair(actor, make_engine(actor))
        policy = CopiedPolicy(trainer_of(head).model, CPU, torch.float32)
        return replicated(actor, make_engine(policy, take_weights=policy.take_weights))

    return get


@pytest.fixture(scope="module")
def sampled() -> list[Rollout]:
    """What a new engine samples for eight prompts, all at once: whatever else is in the batch, each prompt gets the same."""
    return sample_rollouts(make_engine(trainer()), some_prompts(8), SAMPLED, stream=STREAM)


@pytest.fixture(scope="module")
def whole() -> list[Completion]:
    """What a new engine answers plain requests for five prompts when nothing happens on the way."""
    return answers(make_engine(trainer()), [request(prompt) for prompt in some_prompts()])


def some_prompts(count=5) -> list[Prompt]:
    """Prompts of 3 to 16 tokens, longer than the sliding window among them."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3, 11, 7, 16, 4, 9, 5, 13][:count]
    ids = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(f"p{i}", tokens, TOKENIZER.decode(tokens), "t") for i, tokens in enumerate(ids)]


def ids(rollouts: list[Rollout]) -> dict[tuple[str, int], list[int]]:
    return {(r.prompt.uid, r.sample): r.token_ids for r in rollouts}


def assert_same(rollouts: list[Rollout], expected: list[Rollout]) -> None:
    """The same tokens for each prompt and sample, their log-probs to rounding."""
    assert ids(rollouts) == ids(expected)
    logprobs = {(r.prompt.uid, r.sample): r.logprobs for r in expected}
    for r in rollouts:
        assert r.logprobs == pytest.approx(logprobs[r.prompt.uid, r.sample], abs=2e-5)


STREAM = ("rollout", 1)
GREEDY = SamplingParams(do_sample=False, max_tokens=20)
SAMPLED = SamplingParams(n=4, max_tokens=20, temperature=0.9)


# --- the policy that is sampled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate(architecture):
    actor, prompts = trainer(architecture), some_prompts()
    plain = plain_copy(architecture, actor.model)
    rollouts = sample_rollouts(make_engine(actor, max_num_seqs=3), prompts, GREEDY, stream=STREAM)
    lengths = set()
    for rollout in rollouts:
        start = torch.tensor([rollout.prompt.token_ids])
        with torch.no_grad():
            output = plain.generate(
                start,
                attention_mask=torch.ones_like(start),
                do_sample=False,
                max_new_tokens=20,
                eos_token_id=EOS,
                pad_token_id=0,
            )
        assert rollout.token_ids == output[0, start.shape[1] :].tolist()
        lengths.add(len(rollout.token_ids))
    assert max(lengths) > 10


@pytest.mark.parametrize(("architecture", "temperature"), [("llama", 1.0), *((name, 0.7) for name in ARCHITECTURES)])
def test_log_probs_are_the_training_engines(architecture, temperature):
    actor = trainer(architecture)
    params = SamplingParams(n=4, max_tokens=20, temperature=temperature)
    rollouts = sample_rollouts(make_engine(actor, max_num_seqs=7), some_prompts(), params, stream=STREAM)
    scores = actor.forward(sequences_of(rollouts), LogProbHead(temperature))
    for row, rollout in enumerate(rollouts):
        assert rollout.logprobs == pytest.approx(scores.logp[row, : len(rollout.token_ids)].tolist(), abs=1e-4)


def test_narrowed_sampling_records_the_full_distribution():
    actor = trainer()
    params = SamplingParams(n=4, max_tokens=20, top_k=3, top_p=0.8)
    rollouts = sample_rollouts(make_engine(actor), some_prompts(), params, stream=STREAM)
    scores = actor.forward(sequences_of(rollouts), LogProbHead(1.0))
    for row, rollout in enumerate(rollouts):
        assert rollout.logprobs == pytest.approx(scores.logp[row, : len(rollout.token_ids)].tolist(), abs=1e-4)


def test_the_model_trains_on_after_sampling():
    """Sampling leaves the model as it was: the same scores, no stand-in modules, and an update like any other."""
    updates = []
    for sample_first in (False, True):
        actor = trainer()
        actor.optimizer = ScheduledAdamW(
            dict(actor.model.named_parameters()), Schedule(1e-3, 0, 10), 0.0, (0.9, 0.999), 1.0
        )
        if sample_first:
            sample_rollouts(make_engine(actor), some_prompts(2), replace(SAMPLED, max_tokens=3), stream=STREAM)
            assert not any("forward" in vars(module) for module in actor.model.modules())
        updates.append(
            actor.train_mini_batch(
                sequences_of(plain_rollouts()),
                LogProbHead(1.0, with_entropy=True),
                lambda rows, scores: -scores.logp.sum(),
            )
        )
    assert torch.equal(updates[0].scores.logp, updates[1].scores.logp)
    assert updates[0].grad_norm == updates[1].grad_norm


def plain_rollouts() -> list[Rollout]:
    return [Rollout.single_turn(prompt, 0, [4, 5, 6], [0.0] * 3, [0] * 3, "length") for prompt in some_prompts()]


def test_bf16_records_what_it_sampled():
    actor = trainer(dtype=torch.bfloat16)
    rollouts = sample_rollouts(make_engine(actor), some_prompts(), SAMPLED, stream=STREAM)
    scores = actor.forward(sequences_of(rollouts), LogProbHead(0.9))
    gaps = [abs(a - float(scores.logp[row, t])) for row, r in enumerate(rollouts) for t, a in enumerate(r.logprobs)]
    assert sum(gaps) / len(gaps) < 0.03


# --- the same results whatever else is in the batch -------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_results_do_not_depend_on_batching(architecture):
    actor, prompts = trainer(architecture), some_prompts()
    expected = sample_rollouts(make_engine(actor, max_num_seqs=1), prompts, SAMPLED, stream=STREAM)
    assert len({len(r.token_ids) for r in expected}) > 3  # rows finish at different times
    for max_num_seqs, prefill in ((3, 1), (6, 20), (256, 1), (256, 8192)):  # a group has four
        engine = make_engine(actor, max_num_seqs=max_num_seqs, max_num_batched_tokens=prefill)
        assert_same(sample_rollouts(engine, prompts, SAMPLED, stream=STREAM), expected)


def test_results_do_not_depend_on_company_or_order(sampled):
    engine, prompts = make_engine(trainer(), max_num_seqs=6), some_prompts()
    assert_same(sample_rollouts(engine, prompts[::-1], SAMPLED, stream=STREAM), sampled[:20])
    alone = [rollout for prompt in prompts for rollout in sample_rollouts(engine, [prompt], SAMPLED, stream=STREAM)]
    assert_same(alone, sampled[:20])


def test_fewer_samples_are_the_first_ones(sampled):
    few = sample_rollouts(make_engine(trainer()), some_prompts(), replace(SAMPLED, n=2), stream=STREAM)
    assert ids(few).items() <= ids(sampled).items()


FINISH_ACTOR = trainer()


@settings(max_examples=8, deadline=None)
@given(
    count=st.integers(1, 6),
    n=st.integers(1, 4),
    max_num_seqs=st.integers(1, 12),
    prefill=st.integers(1, 40),
    stop=st.booleans(),
    step=st.integers(0, 1000),
)
def test_any_finish_order_keeps_each_rows_cache(count, n, max_num_seqs, prefill, stop, step):
    """Rows and groups move inside the cache as others finish; each must go on with its own keys and values."""
    actor, prompts = FINISH_ACTOR, some_prompts(count)
    params = SamplingParams(n=n, max_tokens=8, temperature=1.5, stop=["1"] if stop else [])
    engine = make_engine(actor, max_num_seqs=max_num_seqs, max_num_batched_tokens=prefill)
    expected = sample_rollouts(make_engine(actor, max_num_seqs=1), prompts, params, stream=("rollout", step))
    assert_same(sample_rollouts(engine, prompts, params, stream=("rollout", step)), expected)


def test_long_responses_outgrow_the_first_cache():
    actor = trainer()
    params = SamplingParams(n=3, max_tokens=150, ignore_eos=True)
    rollouts = sample_rollouts(make_engine(actor), some_prompts(2), params, stream=STREAM)
    scores = actor.forward(sequences_of(rollouts), LogProbHead(1.0))
    for row, rollout in enumerate(rollouts):
        assert rollout.logprobs == pytest.approx(scores.logp[row].tolist(), abs=1e-4)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_streams():
    engine, prompts = make_engine(trainer()), some_prompts()
    first = sample_rollouts(engine, prompts, SAMPLED, stream=("rollout", 1))
    assert [r.logprobs for r in sample_rollouts(engine, prompts, SAMPLED, stream=("rollout", 1))] == [r.logprobs for r in first]
    others = [
        sample_rollouts(engine, prompts, SAMPLED, stream=("rollout", 2)),
        sample_rollouts(engine, prompts, SAMPLED, stream=("validation", 1)),
        sample_rollouts(make_engine(trainer(), seed=1), prompts, SAMPLED, stream=("rollout", 1)),
    ]
    for other in others:
        assert sum(ids(other)[key] == tokens for key, tokens in ids(first).items()) <= 2
    for prompt in prompts:  # samples of a group differ
        assert len({tuple(r.token_ids) for r in first if r.prompt is prompt}) > 1


def test_rows_with_the_same_prompt_have_streams_of_their_own():
    prompt = some_prompts(1)[0]
    rollouts = sample_rollouts(make_engine(trainer()), [prompt, replace(prompt, uid="twin")], SAMPLED, stream=STREAM)
    assert len({tuple(r.token_ids) for r in rollouts}) > 6


def test_a_long_response_is_told_to_be_under_way():
    seen = []
    params = replace(SAMPLED, n=1, max_tokens=20, ignore_eos=True)
    sample_rollouts(make_engine(trainer()), some_prompts(1), params, stream=STREAM, on_done=seen.append)
    assert sum(seen) == 1 and len(seen) > 10


# --- where a response ends --------------------------------------------------------------------------------------------


def test_ignore_eos_goes_on(sampled):
    params, plain = replace(SAMPLED, ignore_eos=True), ids(sampled)
    rollouts = sample_rollouts(make_engine(trainer()), some_prompts(8), params, stream=STREAM)
    assert all(len(r.token_ids) == 20 and r.finish_reason == "length" for r in rollouts)
    assert any(EOS in r.token_ids for r in rollouts)
    assert all(r.token_ids[: len(plain[r.prompt.uid, r.sample])] == plain[r.prompt.uid, r.sample] for r in rollouts)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens(max_tokens, sampled):
    engine, free = make_engine(trainer(), max_num_seqs=3), ids(sampled)
    for rollout in sample_rollouts(engine, some_prompts(), replace(SAMPLED, max_tokens=max_tokens), stream=STREAM):
        assert rollout.token_ids[:1] == free[rollout.prompt.uid, rollout.sample][:1]
        assert len(rollout.token_ids) <= max_tokens
        assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] == EOS else "length")


# --- drawing ----------------------------------------------------------------------------------------------------------


def draws(logits: torch.Tensor, count: int, **fields) -> torch.Tensor:
    uniforms = torch.rand(count, 3, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    tokens, logp = draw_tokens(logits.expand(count, -1).clone(), uniforms, SamplingParams(**fields))
    temperature = fields.get("temperature", 1.0)
    torch.testing.assert_close(logp, (logits / temperature).log_softmax(-1)[tokens])
    return tokens


def chi_square_bound(degrees: int) -> float:
    """The 99.9 % point of the chi-square distribution (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("vocabulary", [2, 25, 27, 28, 400])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_softmax(vocabulary, temperature):
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    count = 40_000
    observed = torch.bincount(draws(logits, count, temperature=temperature), minlength=vocabulary).double()
    expected = (logits / temperature).double().softmax(-1) * count
    often = expected >= 5
    statistic = float(((observed - expected) ** 2 / expected)[often].sum())
    assert statistic < chi_square_bound(int(often.sum()) - 1)
    assert len(observed) == vocabulary


@pytest.mark.parametrize("fields", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.6, "temperature": 0.8}])
def test_narrowed_draws_are_the_softmax_over_what_is_kept(fields):
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1))
    probs = (logits / fields.get("temperature", 1.0)).double().softmax(-1)
    ranked = probs.argsort(descending=True).tolist()[: fields.get("top_k", 30)]
    kept, mass, total = [], 0.0, float(probs[ranked].sum())
    for token in ranked:  # the smallest set whose share reaches top_p
        if mass / total >= fields.get("top_p", 1.0):
            break
        kept.append(token)
        mass += float(probs[token])
    observed = torch.bincount(draws(logits, 40_000, **fields), minlength=30).double()
    assert set(observed.nonzero().flatten().tolist()) == set(kept)
    expected = probs[kept] / mass * 40_000
    assert float(((observed[kept] - expected) ** 2 / expected).sum()) < chi_square_bound(len(kept) - 1)


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((64,), float("-inf"))
    logits[[0, 17, 63]] = 0.0
    edges = torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
    uniforms = torch.cartesian_prod(edges, edges, edges)
    tokens, logp = draw_tokens(logits.expand(len(uniforms), -1).clone(), uniforms, SamplingParams())
    assert set(tokens.tolist()) == {0, 17, 63}
    torch.testing.assert_close(logp, torch.full((len(uniforms),), -math.log(3)))


def test_draws_hardly_move_with_rounding_noise():
    """A relative noise of 1e-6 in the logits, as between two batch sizes, changes about one draw in 10⁵ or fewer."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2000, 500, generator=generator) * 3
    uniforms = torch.rand(2000, 3, generator=generator, dtype=torch.float64)
    noisy = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    drawn = [draw_tokens(x, uniforms, SamplingParams())[0] for x in (logits.clone(), noisy)]
    assert int((drawn[0] != drawn[1]).sum()) <= 1


def test_greedy_takes_the_most_likely():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(do_sample=False, temperature=0.5)
    tokens, logp = draw_tokens(logits.clone(), torch.rand(50, 3, dtype=torch.float64), params)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logp, (logits / 0.5).log_softmax(-1).amax(-1))


# --- requests that come, go and come back -----------------------------------------------------------------------------

PLAIN = SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)
TURN = replace(PLAIN, max_tokens=8)
GREEDY_ON = SamplingParams(max_tokens=20, do_sample=False, ignore_eos=True)


def request(prompt: Prompt, sample: int = 0, params: SamplingParams = PLAIN, **fields) -> Request:
    return Request(prompt.token_ids, params, SampleStream(STREAM, prompt.uid, sample), **fields)


def answers(engine: RolloutEngine, requests: list[Request]) -> list[Completion]:
    return run_sync(generate_all(engine, requests))


async def tokens_drawn(engine: RolloutEngine, number: int) -> None:
    """Wait until the engine has sampled so many tokens."""
    while engine.stats().sampled_tokens < number:
        await asyncio.sleep(0)


def assert_same_answer(one: Completion, other: Completion) -> None:
    assert (one.token_ids, one.finish_reason, one.text) == (other.token_ids, other.finish_reason, other.text)
    assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def changed_weights(actor: FsdpEngine, version: int) -> None:
    """Give the trainer other weights in place, as an optimizer step does."""
    actor.model.load_state_dict(tiny_model("llama", seed=version).state_dict())
    actor.version = version


def new_trainer(version: int) -> FsdpEngine:
    actor = trainer()
    changed_weights(actor, version)
    return actor


def test_requests_join_while_others_are_decoded(whole):
    prompts = some_prompts()

    async def one_after_the_other(engine):
        tasks = []
        for number, prompt in enumerate(prompts):
            await tokens_drawn(engine, 3 * number)
            tasks.append(asyncio.create_task(engine.generate(request(prompt))))
        return await asyncio.gather(*tasks)

    engine = make_engine(trainer(), max_num_seqs=3)
    for one, other in zip(run_sync(one_after_the_other(engine)), whole, strict=True):
        assert_same_answer(one, other)
    assert engine.stats().running == engine.stats().waiting == 0


def test_requests_of_one_batch_are_drawn_each_in_its_own_way():
    prompts = some_prompts(4)
    ways = [GREEDY, PLAIN, SamplingParams(max_tokens=9, top_k=2, temperature=1.3), SamplingParams(max_tokens=5, stop=["1"])]
    requests = [request(prompt, params=params) for prompt, params in zip(prompts, ways)]
    alone = [answers(make_engine(trainer()), [one])[0] for one in requests]
    for one, other in zip(answers(make_engine(trainer()), requests), alone):
        assert_same_answer(one, other)


def test_higher_priority_is_served_first():
    finished = []
    prompts = some_prompts(4)
    short = replace(PLAIN, max_tokens=2)

    async def each(engine, prompt, priority):
        await engine.generate(request(prompt, params=short, priority=priority))
        finished.append(priority)

    async def all_at_once(engine):
        await asyncio.gather(*(each(engine, prompt, priority) for prompt, priority in zip(prompts, (0, 5, 1, 5))))

    run_sync(all_at_once(make_engine(trainer(), max_num_seqs=1)))
    assert finished == [5, 5, 1, 0]


def test_a_group_reads_its_prompt_once():
    engine, prompts = make_engine(trainer(), max_num_seqs=3), some_prompts(3)
    sample_rollouts(engine, prompts, SAMPLED, stream=STREAM)
    length = sum(len(prompt.token_ids) for prompt in prompts)
    stats = engine.stats()
    assert (stats.computed_tokens, stats.reused_tokens) == (length, 3 * length)


def test_a_late_sample_of_a_group_reads_the_prompt_from_the_cache(whole):
    [prompt] = some_prompts(1)

    async def late(engine):
        first = asyncio.create_task(engine.generate(request(prompt)))
        await tokens_drawn(engine, 4)
        second = await engine.generate(request(prompt, sample=1))
        return [await first, second]

    engine = make_engine(trainer())
    for one, other in zip(run_sync(late(engine)), [whole[0], *answers(make_engine(trainer()), [request(prompt, 1)])], strict=True):
        assert_same_answer(one, other)
    assert engine.stats().computed_tokens == len(prompt.token_ids)


# --- turns ------------------------------------------------------------------------------------------------------------


def conversation(engine: RolloutEngine, prompt: Prompt, given: list[list[int]], *, keep: bool) -> list[Completion]:
    """Return the answers of a trajectory that is given tokens between its turns."""
    context, turns = list(prompt.token_ids), []
    for turn, tokens in enumerate([*given, None]):
        stream = SampleStream(STREAM, prompt.uid, 0, turn)
        answer = run_sync(engine.generate(Request(list(context), TURN, stream, keep_cache=keep and tokens is not None)))
        turns.append(answer)
        context += [*answer.token_ids, *(tokens or [])]
    return turns


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_no_token_of_an_earlier_turn_is_computed_again(architecture):
    """The window of mistral is shorter than a turn."""
    prompt, given_tokens = some_prompts(2)[1], [[5, 6, 7], [9], [4, 4, 4, 4]]
    anew, kept = make_engine(trainer(architecture)), make_engine(trainer(architecture))
    expected = conversation(anew, prompt, given_tokens, keep=False)
    for one, other in zip(conversation(kept, prompt, given_tokens, keep=True), expected, strict=True):
        assert_same_answer(one, other)
    # Of each answer the newest token has not been through the model when the next turn begins.
    new = len(prompt.token_ids) + sum(len(tokens) + 1 for tokens in given_tokens)
    contexts = [len(prompt.token_ids) + sum(8 + len(tokens) for tokens in given_tokens[:turn]) for turn in range(4)]
    assert kept.stats().computed_tokens == new
    assert kept.stats().reused_tokens == sum(contexts) - new
    assert anew.stats().computed_tokens == sum(contexts)
    assert kept.stats().kept == 0


def test_trajectories_in_different_turns_share_a_batch():
    prompts = some_prompts(4)
    expected = [conversation(make_engine(trainer()), prompt, [[5, 6]] * 2, keep=False) for prompt in prompts]

    async def talk(engine, prompt, number):
        context, turns = list(prompt.token_ids), []
        await tokens_drawn(engine, 7 * number)
        for turn in range(3):
            stream = SampleStream(STREAM, prompt.uid, 0, turn)
            turns.append(await engine.generate(Request(list(context), TURN, stream, keep_cache=turn < 2)))
            context += [*turns[-1].token_ids, 5, 6]
        return turns

    async def all_of_them(engine):
        return await asyncio.gather(*(talk(engine, prompt, number) for number, prompt in enumerate(prompts)))

    engine = make_engine(trainer(), max_num_seqs=3)
    for turns, others in zip(run_sync(all_of_them(engine)), expected):
        for one, other in zip(turns, others, strict=True):
            assert_same_answer(one, other)


def test_a_context_that_was_changed_is_refused():
    engine, [prompt] = make_engine(trainer()), some_prompts(1)
    answer = run_sync(engine.generate(request(prompt, keep_cache=True)))
    context = [*prompt.token_ids, *answer.token_ids, 5]
    context[len(prompt.token_ids) + 2] += 1
    again = Request(context, PLAIN, SampleStream(STREAM, prompt.uid, 0, turn=1))
    with pytest.raises(UserError, match="does not begin with the tokens of the turns before"):
        run_sync(engine.generate(again))
    run_sync(engine.release(again.stream.trajectory))
    assert engine.stats().kept == 0
    assert len(run_sync(engine.generate(again)).token_ids) == 20


# --- aborting, pausing, other weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_an_aborted_request_goes_on_with_the_same_numbers(keep):
    prompts = some_prompts(3)
    params = replace(PLAIN, stop=["@@"])
    whole = answers(make_engine(trainer()), [request(prompt, params=params) for prompt in prompts])

    async def abort_and_go_on(engine):
        requests = [request(prompt, params=params, keep_cache=keep) for prompt in prompts]
        tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
        await tokens_drawn(engine, 12)
        await engine.pause("abort")
        parts = await asyncio.gather(*tasks)
        await engine.resume()
        rest = [
            replace(
                one,
                token_ids=[*one.token_ids, *part.token_ids],
                params=replace(params, max_tokens=20 - len(part.token_ids)),
                stream=replace(one.stream, position=len(part.token_ids)),
                keep_cache=False,
            )
            for one, part in zip(requests, parts)
        ]
        return parts, await generate_all(engine, rest)

    engine = make_engine(trainer())
    for part, rest, expected in zip(*run_sync(abort_and_go_on(engine)), whole):
        assert part.finish_reason == "aborted" and 0 < len(part.token_ids) < 20
        joined = replace(rest, token_ids=[*part.token_ids, *rest.token_ids], logprobs=[*part.logprobs, *rest.logprobs])
        assert_same_answer(joined, expected)
    if keep:
        assert engine.stats().computed_tokens == sum(len(prompt.token_ids) + 1 for prompt in prompts)


def test_waiting_requests_are_aborted_too():
    async def abort(engine):
        tasks = [asyncio.create_task(engine.generate(request(prompt))) for prompt in some_prompts(3)]
        await tokens_drawn(engine, 5)
        await engine.pause("abort")
        return await asyncio.gather(*tasks)

    lengths = [len(answer.token_ids) for answer in run_sync(abort(make_engine(trainer(), max_num_seqs=1)))]
    assert lengths[0] >= 5 and lengths[1:] == [0, 0]


@pytest.mark.parametrize("mode", ["keep", "finish"])
def test_nothing_is_decoded_while_paused(mode, whole):
    prompts = some_prompts(3)

    async def pause(engine):
        tasks = [asyncio.create_task(engine.generate(request(prompt))) for prompt in prompts]
        await tokens_drawn(engine, 6)
        await engine.pause(mode)
        drawn = engine.stats()
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats() == drawn
        assert (drawn.running, drawn.waiting) == ((2, 1) if mode == "keep" else (0, 1))
        assert sum(task.done() for task in tasks) == (0 if mode == "keep" else 2)
        await engine.resume()
        return await asyncio.gather(*tasks)

    for one, other in zip(run_sync(pause(make_engine(trainer(), max_num_seqs=2))), whole[:3], strict=True):
        assert_same_answer(one, other)


def test_after_an_update_nothing_of_the_old_weights_is_used():
    """Neither a group's prompt that is still in the cache, nor a trajectory that was kept."""
    actor, [prompt, other] = trainer(), some_prompts(2)

    async def update_on_the_way(engine):
        kept = await engine.generate(request(other, params=GREEDY_ON, keep_cache=True))
        running = asyncio.create_task(engine.generate(request(prompt, params=GREEDY_ON)))
        await tokens_drawn(engine, 25)
        changed_weights(actor, 3)
        await engine.load_weights(WeightUpdate(3))
        context = [*other.token_ids, *kept.token_ids]
        second_turn = Request(context, GREEDY_ON, SampleStream(STREAM, other.uid, 0, turn=1))
        new = await generate_all(engine, [request(prompt, 1, GREEDY_ON), second_turn])
        await running
        return second_turn, new

    second_turn, new = run_sync(update_on_the_way(make_engine(actor)))
    fresh = answers(make_engine(new_trainer(3)), [request(prompt, 1, GREEDY_ON), second_turn])
    for one, expected in zip(new, fresh):
        assert_same_answer(one, expected)
        assert set(one.versions) == {3}


def test_sleep_and_wake_leave_answers_unchanged(whole):
    engine, prompts = make_engine(trainer()), some_prompts(3)
    run_sync(engine.generate(request(prompts[0], 1, keep_cache=True)))
    run_sync(engine.sleep())
    assert (engine.stats().kept, engine.stats().cache_share) == (0, 0.0)
    run_sync(engine.wake())
    for one, other in zip(answers(engine, [request(prompt) for prompt in prompts]), whole[:3], strict=True):
        assert_same_answer(one, other)


def test_a_profile_is_a_file(tmp_path):
    engine = make_engine(trainer())
    run_sync(engine.start_profile(tmp_path))
    answers(engine, [request(some_prompts(1)[0], params=replace(PLAIN, max_tokens=2))])
    files = run_sync(engine.stop_profile())
    assert files and all(file.parent == tmp_path and file.stat().st_size for file in files)


def test_stats_while_decoding():
    async def look(engine):
        tasks = [asyncio.create_task(engine.generate(request(prompt))) for prompt in some_prompts(4)]
        await tokens_drawn(engine, 9)
        stats = engine.stats()
        await asyncio.gather(*tasks)
        return stats

    engine = make_engine(trainer(), max_num_seqs=3)
    stats = run_sync(look(engine))
    assert (stats.running, stats.waiting, stats.kept, stats.version) == (3, 1, 0, 0)
    assert 0 < stats.cache_share <= 1 and stats.tokens_per_s > 0
    done = engine.stats()
    assert (done.running, done.waiting, done.sampled_tokens, done.cache_share) == (0, 0, 80, 0.0)
