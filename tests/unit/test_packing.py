"""Cutting into micro-batches and laying sequences out: every token attends to its own past and its prompt, nothing else."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.training.common.packing import (
    ModelInput,
    TokenSequence,
    pack,
    packed_spans,
    sequences_of,
    split_micro_batches,
)
from pellucid.types import Prompt, Rollout

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None)


@st.composite
def batches(draw, min_response=0):
    """Sequences of up to four groups in any order; token ids are all different, so that each can be told from the others."""
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    prompts = {group: list(range(100 * group, 100 * group + draw(st.integers(1, 9)))) for group in sorted(set(groups))}
    return [
        TokenSequence(prompts[group], [1000 + 50 * row + t for t in range(draw(st.integers(min_response, 12)))], group)
        for row, group in enumerate(groups)
    ]


def side_by_side(sequences: list[TokenSequence]) -> list[TokenSequence]:
    return sorted(sequences, key=lambda sequence: sequence.group)


# --- micro-batches ----------------------------------------------------------------------------------------------------


@quick
@given(batches(), st.integers(20, 60), st.integers(1, 4))
def test_split_properties(sequences, max_tokens, max_sequences):
    for tokens, rows in ((max_tokens, None), (None, max_sequences), (max_tokens, max_sequences), (None, None)):
        split = split_micro_batches(sequences, max_tokens=tokens, max_sequences=rows)
        assert sorted(row for micro in split for row in micro) == list(range(len(sequences)))
        assert all(split)
        for micro in split:
            assert rows is None or len(micro) <= rows
            packed = pack([sequences[row] for row in micro], CPU)
            assert tokens is None or packed.num_tokens <= tokens


@quick
@given(batches(), st.integers(20, 60))
def test_split_keeps_groups_together_and_packs_tightly(sequences, max_tokens):
    split = split_micro_batches(sequences, max_tokens=max_tokens, max_sequences=None)
    groups = [sequences[row].group for micro in split for row in micro]
    assert groups == sorted(groups)
    for micro, following in itertools.pairwise(split):  # the next sequence did not fit
        grown = pack([sequences[row] for row in [*micro, following[0]]], CPU)
        assert grown.num_tokens > max_tokens


def test_no_limit_is_one_micro_batch():
    sequences = [TokenSequence([1], [2] * 50, group) for group in (1, 0, 1)]
    assert split_micro_batches(sequences, max_tokens=None, max_sequences=None) == [[1, 0, 2]]
    assert split_micro_batches([], max_tokens=10, max_sequences=None) == []


def test_shared_prompts_count_once():
    sequences = [TokenSequence([1] * 10, [2] * 6, 0) for _ in range(4)]  # 10 + 4·5 = 30 tokens
    assert split_micro_batches(sequences, max_tokens=30, max_sequences=None) == [[0, 1, 2, 3]]


def test_one_sequence_over_the_budget():
    sequences = [TokenSequence([1] * 10, [2] * 6, 0)]
    split_micro_batches(sequences, max_tokens=15, max_sequences=None)
    with pytest.raises(ValueError, match="15 tokens is over the micro-batch budget of 14"):
        split_micro_batches(sequences, max_tokens=14, max_sequences=None)


# --- layout -----------------------------------------------------------------------------------------------------------


def expected_targets(sequences):
    return [(row, t, token) for row, s in enumerate(sequences) for t, token in enumerate(s.response_ids)]


def input_of(layout: ModelInput, flat_row: int) -> tuple[int, int]:
    return int(layout.input_ids.flatten()[flat_row]), int(layout.position_ids.flatten()[flat_row])


@quick
@given(batches())
def test_targets_and_the_inputs_that_predict_them(sequences):
    sequences = side_by_side(sequences)
    layout = pack(sequences, CPU)
    found = list(zip(layout.row.tolist(), layout.column.tolist(), layout.target_ids.tolist()))
    assert found == expected_targets(sequences)
    for (row, column, _), flat in zip(found, layout.predict_index.tolist()):
        whole = sequences[row].prompt_ids + sequences[row].response_ids
        before = len(sequences[row].prompt_ids) + column - 1
        assert input_of(layout, flat) == (whole[before], before)
    assert layout.input_ids.numel() == layout.num_tokens
    assert int((layout.position_ids == 0).sum()) == len({s.group for s in sequences})


@quick
@given(batches(min_response=1))
def test_scatter_puts_each_value_where_its_token_is(sequences):
    layout = pack(side_by_side(sequences), CPU)
    width = max(len(s.response_ids) for s in sequences) + 2
    values = layout.target_ids.double().requires_grad_()
    table = layout.scatter(values, len(sequences), width)
    expected = [s.response_ids + [0] * (width - len(s.response_ids)) for s in side_by_side(sequences)]
    assert table.tolist() == expected
    table.sum().backward()
    assert values.grad is not None and bool((values.grad == 1).all())


@quick
@given(batches(min_response=1), st.data())
def test_given_tokens_are_fed_and_not_predicted(sequences, data):
    """The input is the same; of what is predicted the given tokens are left out."""
    sequences = side_by_side(sequences)
    for sequence in sequences:
        drawn = st.lists(st.booleans(), min_size=len(sequence.response_ids), max_size=len(sequence.response_ids))
        sequence.sampled = data.draw(st.none() | drawn)
    layout, whole = pack(sequences, CPU), pack([replace(one, sampled=None) for one in sequences], CPU)
    assert torch.equal(layout.input_ids, whole.input_ids) and torch.equal(layout.position_ids, whole.position_ids)
    assert layout.num_tokens == whole.num_tokens
    sampled = torch.tensor([one for s in sequences for one in s.sampled or [True] * len(s.response_ids)], dtype=torch.bool)
    for name in ("predict_index", "target_ids", "row", "column"):
        assert torch.equal(getattr(layout, name), getattr(whole, name)[sampled]), name


def test_rows_of_a_group_apart_repeat_their_prompt():
    first, other, again = TokenSequence([1, 2], [3], 0), TokenSequence([5], [6], 1), TokenSequence([1, 2], [4], 0)
    assert pack([first, other, again], CPU).input_ids.tolist() == [[1, 2, 5, 1, 2]]


def test_sequences_of_names_groups_by_prompt():
    a, b = Prompt("a", [1], "a", "t"), Prompt("b", [2, 3], "b", "t")
    rollouts = [Rollout.single_turn(p, 0, [7, 8], [0.0, 0.0], [0, 0], "stop") for p in (a, b, a)]
    assert sequences_of(rollouts) == [
        TokenSequence([1], [7, 8], 0, "a sample 0", "a"),
        TokenSequence([2, 3], [7, 8], 1, "b sample 0", "b"),
        TokenSequence([1], [7, 8], 0, "a sample 0", "a"),
    ]


def test_spans_name_every_token_of_a_pack():
    """A group's prompt is there once."""
    sequences = [
        TokenSequence([1, 2], [3, 4, 5], 0, "a sample 0", "a"),
        TokenSequence([1, 2], [6], 0, "a sample 1", "a"),
        TokenSequence([7], [8, 9], 1, "b sample 0", "b"),
    ]
    ids = {"a": [1, 2], "b": [7], "a sample 0": [3, 4], "a sample 1": [], "b sample 0": [8]}
    inputs = pack(sequences, CPU)
    for span in packed_spans(sequences):
        at = slice(span.start, span.start + span.length)
        assert inputs.input_ids[0, at].tolist() == ids[span.sample], span
        assert inputs.position_ids[0, at].tolist() == list(range(span.position, span.position + span.length))
        assert span.part == ("response" if " " in span.sample else "prompt")
    covered = [token for span in packed_spans(sequences) for token in range(span.start, span.start + span.length)]
    assert covered == list(range(pack(sequences, CPU).num_tokens))


# --- attention --------------------------------------------------------------------------------------------------------

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def query_key_value(num_tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, num_tokens, SIZE), (1, KEY_HEADS, num_tokens, SIZE), (1, KEY_HEADS, num_tokens, SIZE))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend_by_hand(layout: ModelInput, sequences, q, k, v, window):
    """For each packed token, softmax over the tokens before it: of its own sequence and of its prompt."""
    owner: list[tuple[int, int]] = []  # (group or −1−row, position) of each packed token
    previous = None
    for row, s in enumerate(sequences):
        if s.group != previous:
            owner += [(s.group, p) for p in range(len(s.prompt_ids))]
        owner += [(-1 - row, len(s.prompt_ids) + t) for t in range(len(s.response_ids) - 1)]
        previous = s.group
    assert [position for _, position in owner] == layout.position_ids[0].tolist()
    result = torch.zeros(1, len(owner), HEADS, SIZE, dtype=torch.float64)
    for i, (mine, at) in enumerate(owner):
        prompt = sequences[-1 - mine].group if mine < 0 else mine
        seen = [
            j
            for j, (other, p) in enumerate(owner)
            if other in (mine, prompt) and p <= at and (window is None or at - p < window)
        ]
        for head in range(HEADS):
            scores = q[0, head, i] @ k[0, head // (HEADS // KEY_HEADS), seen].T / math.sqrt(SIZE)
            result[0, i, head] = scores.softmax(0) @ v[0, head // (HEADS // KEY_HEADS), seen]
    return result


@settings(max_examples=25, deadline=None)
@given(batches(), st.sampled_from([None, 1, 3]))
def test_packed_attention_is_the_definition(sequences, window):
    sequences = side_by_side(sequences)
    layout = pack(sequences, CPU)
    q, k, v = query_key_value(layout.num_tokens)
    output = layout.layout.attend(0, q, k, v, scale=SIZE**-0.5, window=window)
    torch.testing.assert_close(output, attend_by_hand(layout, sequences, q, k, v, window), rtol=1e-9, atol=1e-9)


def test_very_different_lengths_share_a_pack():
    sequences = [
        TokenSequence(list(range(length)), [1] * response, group)
        for group, (length, response) in enumerate([(1, 1), (70, 3), (2, 40), (33, 1), (1, 2)])
    ]
    sequences += [TokenSequence(sequences[-1].prompt_ids, [2] * 30, 4), TokenSequence(sequences[-1].prompt_ids, [3], 4)]
    layout = pack(sequences, CPU)
    assert len(layout.layout.buckets) > 2  # pyright: ignore[reportAttributeAccessIssue]
    q, k, v = query_key_value(layout.num_tokens)
    output = layout.layout.attend(0, q, k, v, scale=SIZE**-0.5, window=None)
    torch.testing.assert_close(output, attend_by_hand(layout, sequences, q, k, v, None), rtol=1e-9, atol=1e-9)


def test_attention_backward_reaches_the_shared_prompt_from_each_response():
    sequences = [TokenSequence([1, 2, 3], [4, 5, 6], 0), TokenSequence([1, 2, 3], [7, 8], 0)]
    layout = pack(sequences, CPU)
    q, k, v = (tensor.requires_grad_() for tensor in query_key_value(layout.num_tokens))

    def attend(q, k, v):
        return layout.layout.attend(0, q, k, v, scale=SIZE**-0.5, window=None)

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)
