"""Rollouts, scores and what they are padded into, with trajectories that hold tokens which tools or users gave."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import RunConfig
from pellucid.failures import Failure, read_failure, save_failure
from pellucid.learn import staleness_metrics
from pellucid.produce import batch, num_tokens, sample_metrics
from pellucid.ranks.wire import PackedSequences
from pellucid.stages import Stage
from pellucid.training.common.packing import sequences_of
from pellucid.types import (
    Experience,
    MiniBatch,
    Prompt,
    RewardFailure,
    Rollout,
    Samples,
    Score,
    ToolUse,
    TrainBatch,
    Turn,
)

ONE, TWO = (
    Prompt("p:1", [3, 4], "one", "task", answer="5"),
    Prompt("p:2", [5], "two", "task", messages=[{"role": "user", "content": "two"}]),
)
ROLLOUTS = [
    Rollout.single_turn(ONE, 0, [8, 1], [-0.5, -0.25], [3, 3], "stop", "a"),
    Rollout(
        ONE, 1, [9, 7, 7, 1], [True, False, False, True], [-2.0, 0.0, 0.0, -0.5], [2, -1, -1, 3],
        (Turn(0, 1, "stop", 0.5, (ToolUse("search", "{}", "7 7", 0.2),)), Turn(3, 4, "stop")), "stop", "b",
    ),
    Rollout(TWO, 0, [6, 7, 7], [True, False, False], [-1.0, 0.0, 0.0], [3, -1, -1], (Turn(0, 1, "length"),), "length", "c"),
    Rollout(TWO, 1, [7, 6], [False, True], [0.0, -0.25], [-1, 3], (Turn(1, 2, "stop"),), "stop", "d"),
]  # fmt: skip
SCORES = [Score(1.0), Score(0.5, {"acc": 1.0}), Score(2.0), Score(None, failure=RewardFailure("timeout", "late"))]


def samples() -> Samples:
    return Samples.pad(ROLLOUTS, SCORES)


def train_batch() -> TrainBatch:
    padded, zeros = samples(), torch.zeros(4, 4)
    return TrainBatch(**vars(padded), values=zeros + 2, advantages=zeros + 1, returns=zeros, loss_mask=padded.mask)


def test_padding_keeps_sampled_tokens_and_puts_the_reward_on_the_last_of_them():
    padded = samples()
    assert padded.mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert padded.rollout_logp.tolist() == [[-0.5, -0.25, 0, 0], [-2, 0, 0, -0.5], [-1, 0, 0, 0], [0, -0.25, 0, 0]]
    assert padded.token_rewards.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0.5], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert padded.group.tolist() == [0, 0, 1, 1]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
def test_padding_of_any_trajectories(masks):
    rollouts = []
    for sample, mask in enumerate(masks):
        turns = tuple(Turn(index, index + 1, "stop") for index, drawn in enumerate(mask) if drawn)
        rollouts.append(
            Rollout(
                ONE, sample, [7] * len(mask), mask, [-1.0 * drawn for drawn in mask], [0] * len(mask), turns, "stop"
            )
        )
    padded = Samples.pad(rollouts, [Score(1.0)] * len(masks))
    assert padded.mask.sum(dim=1).tolist() == [sum(mask) for mask in masks]
    assert not padded.rollout_logp[~padded.mask].any() and not padded.token_rewards[~padded.mask].any()
    assert padded.token_rewards.sum(dim=1).tolist() == [float(any(mask)) for mask in masks]


@pytest.mark.parametrize("batch", [samples(), Experience(**vars(samples()), old_logp=torch.ones(4, 4)), train_batch()])
def test_selected_rows_are_of_the_same_kind(batch):
    chosen = batch.select([2, 0])
    assert type(chosen) is type(batch) and len(chosen) == 2
    assert (chosen.rollouts, chosen.scores) == ([ROLLOUTS[2], ROLLOUTS[0]], [SCORES[2], SCORES[0]])
    assert chosen.tensors().keys() == batch.tensors().keys()
    assert all(torch.equal(tensor, batch.tensors()[name][[2, 0]]) for name, tensor in chosen.tensors().items())
    with pytest.raises(AttributeError):
        batch.mask = batch.group


def test_lengths_and_staleness_count_sampled_tokens():
    metrics = sample_metrics(ROLLOUTS, SCORES)
    assert [metrics[f"response_length/{name}"] for name in ("mean", "max", "min")] == [1.5, 2.0, 1.0]
    assert metrics["response_length/clip_ratio"] == 0.25 and metrics["critic/score/mean"] == pytest.approx(3.5 / 3)
    assert num_tokens(ROLLOUTS) == 2 + 2 + 2 + 4 + 1 + 3 + 1 + 2, "models work through given tokens, too"
    run = SimpleNamespace(actor=SimpleNamespace(version=3))
    assert staleness_metrics(run, samples()) == {"staleness/mean": pytest.approx(1 / 6), "staleness/max": 1.0}


def test_several_turns_without_tools_have_their_metrics():
    quiet = dataclasses.replace(ROLLOUTS[1], turns=tuple(dataclasses.replace(turn, tool_calls=()) for turn in ROLLOUTS[1].turns))
    metrics = sample_metrics([quiet], SCORES[:1], has_turns=True)
    assert (metrics["agent/turns/mean"], metrics["agent/tool_calls/mean"], metrics["agent/tool_s/max"]) == (2, 0, 0)


def test_each_sequence_of_a_trajectory_is_a_row_with_its_score():
    begun = dataclasses.replace(TWO, token_ids=[8, 8], text="other words", context="c1")
    branch = Rollout(begun, 1, [6], [True], [-1.5], [4], (Turn(0, 1, "stop"),), "stop", "e", sequence=1, num_sequences=2)
    whole = dataclasses.replace(ROLLOUTS[1], num_sequences=2, branches=(branch,))
    run = SimpleNamespace(config=RunConfig())
    rows = batch(run, [ROLLOUTS[0], whole], SCORES[:2], torch.tensor([0.25, 0.75]))
    assert [one.name for one in rows.rollouts] == ["p:1 sample 0", "p:1 sample 1", "p:2 sample 1 sequence 1"]
    assert not any(one.branches for one in rows.rollouts) and rows.scores == [SCORES[0], SCORES[1], SCORES[1]]
    assert rows.token_rewards.sum(dim=1).tolist() == [1.0, 0.5, 0.5] and rows.greedy_scores.tolist() == [0.25, 0.75, 0.75]
    assert num_tokens([whole]) == 6 + 3
    metrics = sample_metrics([ROLLOUTS[0], whole], SCORES[:2], has_turns=True)
    assert (metrics["agent/sequences/max"], metrics["agent/turns/max"], metrics["response_length/max"]) == (2, 3, 3)
    assert metrics["critic/score/mean"] == 0.75, "of trajectories, however many sequences one has"


def test_sequences_of_a_prompt_that_begin_differently_share_nothing():
    begun = [dataclasses.replace(ONE, token_ids=[8, 8, name], context=str(name)) for name in (1, 2, 1)]
    rollouts = [ROLLOUTS[0], *(dataclasses.replace(ROLLOUTS[0], prompt=one) for one in begun)]
    assert [(one.prompt_ids, one.group) for one in sequences_of(rollouts)] == [
        ([3, 4], 0), ([8, 8, 1], 1), ([8, 8, 2], 2), ([8, 8, 1], 1),
    ]  # fmt: skip
    packed = PackedSequences.pack(rollouts).unpack()
    assert [one.prompt.token_ids for one in packed] == [one.prompt.token_ids for one in rollouts]
    assert Samples.pad(rollouts, [Score(1.0)] * 4).group.tolist() == [0] * 4


@pytest.mark.parametrize("given", [train_batch(), Experience(**vars(samples()), old_logp=torch.ones(4, 4)), ROLLOUTS])
def test_a_failure_is_read_as_it_was_saved(tmp_path, given):
    """Sampled masks, turns and failed rewards included."""

    def save(folder: Path, contents: list[str]) -> None:
        (folder / "asked").write_text(json.dumps(contents))

    role = SimpleNamespace(engine=SimpleNamespace(save=save), version=3)
    run = SimpleNamespace(
        run_dir=SimpleNamespace(path=tmp_path, config_yaml=tmp_path / "none"),
        placement=SimpleNamespace(roles=SimpleNamespace(named=lambda name: role, mismatch=None)),
    )  # fmt: skip
    folder = save_failure(run, Failure(Stage.ACTOR_UPDATE, 4, "actor/loss", MiniBatch([0, 1], 0), given))
    failure = read_failure(folder)
    assert (failure.stage, failure.step, failure.mini_batch, failure.version) == (
        Stage.ACTOR_UPDATE,
        4,
        MiniBatch([0, 1], 0),
        3,
    )
    if given is ROLLOUTS:
        assert [_plain(rollout) for rollout in failure.given] == [_plain(rollout) for rollout in ROLLOUTS]
        return
    assert type(failure.given) is type(given) and failure.given.scores == SCORES
    assert [_plain(rollout) for rollout in failure.given.rollouts] == [_plain(rollout) for rollout in ROLLOUTS]
    assert failure.given.tensors().keys() == given.tensors().keys()
    assert all(torch.equal(tensor, given.tensors()[name]) for name, tensor in failure.given.tensors().items())


def _plain(rollout: Rollout) -> tuple:
    """What models read of a rollout, sequences as lists."""
    lists = [list(values) for values in rollout.sequences().values()]
    prompt = dataclasses.replace(rollout.prompt, answer=None)
    return prompt, rollout.sample, lists, rollout.turns, rollout.finish_reason, rollout.text
