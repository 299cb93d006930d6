"""Splitting a mini-batch over ranks: all rows once, groups whole where they can be, and no rank much longer than the mean."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.training.common.balance import RankBalance, measure_balance, split_over_ranks
from pellucid.training.common.packing import TokenSequence, split_micro_batches

quick = settings(max_examples=80, deadline=None)


def group_of(group: int, prompt: int, responses: list[int]) -> list[TokenSequence]:
    """Sequences of one prompt that feed `prompt` tokens once and `responses` tokens each to the model."""
    return [TokenSequence(range(prompt), range(response + 1), group) for response in responses]


def tokens_of(sequences: list[TokenSequence], rows: list[int]) -> int:
    """What the model is fed: micro-batches without limits are one."""
    chosen = [sequences[row] for row in rows]
    prompts = {s.group: len(s.prompt_ids) for s in chosen}
    return sum(max(len(s.response_ids) - 1, 0) for s in chosen) + sum(prompts.values())


def loads(sequences: list[TokenSequence], shares: list[list[int]]) -> list[int]:
    return [tokens_of(sequences, rows) for rows in shares]


def num_parts(sequences: list[TokenSequence], shares: list[list[int]]) -> int:
    """Groups counted once on each rank that has some of them."""
    return sum(len({sequences[row].group for row in rows}) for rows in shares)


def unit_tokens(sequences: list[TokenSequence]) -> list[int]:
    """Tokens of each group."""
    rows_of: dict[int, list[int]] = {}
    for row, s in enumerate(sequences):
        rows_of.setdefault(s.group, []).append(row)
    return [tokens_of(sequences, rows) for rows in rows_of.values()]


@st.composite
def batches(draw):
    """Up to ten groups of one to six samples, mostly like one another, in the order of the batch or mixed up."""
    length = st.one_of(st.integers(0, 60), st.sampled_from([0, 1, 900, 40000]))
    groups = draw(st.lists(st.lists(length, min_size=1, max_size=6), min_size=1, max_size=10))
    sequences = [s for index, each in enumerate(groups) for s in group_of(index, draw(st.integers(1, 40)), each)]
    return draw(st.permutations(sequences)) if draw(st.booleans()) else sequences


@quick
@given(batches(), st.integers(1, 9), st.booleans())
def test_every_row_is_on_one_rank_beside_its_group(sequences, num_ranks, balance):
    shares = split_over_ranks(sequences, num_ranks, balance=balance)
    assert len(shares) == num_ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(sequences)))
    if not balance:
        assert sum(map(bool, shares)) == min(num_ranks, len(sequences))
    for rows in shares:
        of_group = [sequences[row].group for row in rows]
        assert len(list(itertools.groupby(of_group))) == len(set(of_group))


@quick
@given(batches(), st.integers(1, 9))
def test_no_rank_is_longer_than_the_mean_and_one_unit_or_than_in_batch_order(sequences, num_ranks):
    shares = split_over_ranks(sequences, num_ranks)
    longest = max(loads(sequences, shares))
    units = unit_tokens(sequences)
    even_share = sum(units) / num_ranks
    naive = split_over_ranks(sequences, num_ranks, balance=False)
    assert longest <= max(*loads(sequences, naive), 1.02 * even_share)
    if len(units) >= num_ranks:
        assert longest <= even_share + max(units)


@quick
@given(batches(), st.integers(1, 9))
def test_groups_are_divided_only_where_whole_ones_are_uneven_and_only_for_a_gain(sequences, num_ranks):
    shares = split_over_ranks(sequences, num_ranks)
    units = unit_tokens(sequences)
    if num_parts(sequences, shares) > len(units) >= num_ranks:
        dealt = [0] * num_ranks
        for tokens in sorted(units, reverse=True):
            dealt[dealt.index(min(dealt))] += tokens
        assert max(dealt) > 1.02 * sum(units) / num_ranks
        assert max(dealt) > max(loads(sequences, shares))


@quick
@given(batches(), st.integers(1, 9))
def test_the_split_depends_on_lengths_and_groups_alone(sequences, num_ranks):
    others = [TokenSequence([7] * len(s.prompt_ids), [9] * len(s.response_ids), s.group) for s in sequences]
    first, second = (split_over_ranks(each, num_ranks) for each in (sequences, others))
    assert first == second


def test_batch_order_gives_equal_counts():
    sequences = group_of(0, 5, [1, 2, 3]) + group_of(1, 5, [4, 5, 6, 7])
    assert split_over_ranks(sequences, 3, balance=False) == [[0, 1], [2, 3], [4, 5, 6]]
    assert split_over_ranks(sequences, 1, balance=False) == [list(range(7))]


def test_one_rank_takes_all_and_more_ranks_than_sequences_leave_some_idle():
    sequences = [s for group in range(3) for s in group_of(group, 2, [1])]
    assert split_over_ranks(sequences, 1) == [[0, 1, 2]]
    assert sorted(map(len, split_over_ranks(sequences, 5))) == [0, 0, 1, 1, 1]
    assert split_over_ranks([], 2) == [[], []]


def test_whole_groups_that_come_out_even_are_found():
    # 8 + 5 + 4 and 7 + 6, against 8 + 7 and 6 + 5 + 4.
    sequences = [s for group, tokens in enumerate([8, 7, 6, 5, 4]) for s in group_of(group, 1, [tokens - 1])]
    assert loads(sequences, split_over_ranks(sequences, 2)) == [15, 15]


def test_a_group_is_divided_where_that_is_worth_its_prompt():
    cheap = group_of(0, 10, [50, 50]) + group_of(1, 10, [10, 10])  # 110 and 30 whole; 60 + 10 + 20 divided
    shares = split_over_ranks(cheap, 2)
    assert sorted(loads(cheap, shares)) == [60, 90]
    assert num_parts(cheap, shares) == 3
    dear = group_of(0, 90, [20, 20]) + group_of(1, 10, [10, 10])  # 130 and 30 whole; 110 and 30 + 90 + 20 divided
    shares = split_over_ranks(dear, 2)
    assert sorted(loads(dear, shares)) == [30, 130]
    assert num_parts(dear, shares) == 2


def test_the_group_whose_prompt_costs_least_is_divided():
    sequences = group_of(0, 1, [2, 5]) + group_of(1, 41, [0]) + group_of(2, 32, [4, 2])
    shares = split_over_ranks(sequences, 2)
    assert loads(sequences, shares) == [44, 44]  # 41 + (1 + 2) and 38 + (1 + 5)


def test_batch_order_is_kept_where_nothing_better_is_found():
    sequences = group_of(0, 37, [4, 4]) + group_of(1, 3, [5]) + group_of(2, 28, [5])
    shares = split_over_ranks(sequences, 3)
    assert loads(sequences, shares) == [41, 41, 41]


def test_fewer_groups_than_ranks_divides_the_costliest():
    sequences = group_of(0, 10, [100] * 4) + group_of(1, 10, [40, 40])
    shares = split_over_ranks(sequences, 3)
    assert max(loads(sequences, shares)) == 210


@pytest.mark.parametrize(("num_groups", "num_ranks"), [(32, 8), (64, 8), (128, 8), (256, 64)])
def test_groups_of_like_problems_are_balanced_whole(num_groups, num_ranks):
    draw = random.Random(num_groups)
    sequences = []
    for group in range(num_groups):  # as GSM8K: prompts of about 106 tokens, answers of about 120
        prompt, answer = round(draw.gauss(106, 20)), draw.lognormvariate(4.7, 0.43)
        responses = [round(answer * draw.lognormvariate(0, 0.4)) for _ in range(8)]
        sequences += group_of(group, max(prompt, 40), responses)
    shares = split_over_ranks(sequences, num_ranks)
    balance = measure_balance(sequences, shares)
    assert balance.after <= 1.02 < 1.1 < balance.before
    assert num_parts(sequences, shares) == num_groups


def test_balance_counts_what_the_model_is_fed():
    sequences = group_of(0, 10, [20, 20]) + group_of(1, 10, [5, 5])
    whole, mixed = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert measure_balance(sequences, whole) == RankBalance(50 / 35, 50 / 35)
    assert measure_balance(sequences, mixed) == RankBalance(50 / 35, 1.0)
    assert measure_balance([], [[], []]) == RankBalance(1.0, 1.0)
    for rows in whole:
        (micro,) = split_micro_batches([sequences[row] for row in rows], max_tokens=50, max_sequences=None)
        assert len(micro) == 2
