"""Every advantage estimator against loops over samples and tokens written from its definition, in float64."""

import inspect
import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from algo_cases import MASK, holed_masks, noise64, quick, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.advantages import (
    EPSILON,
    ROUNDING,
    AdvantageInputs,
    discounted_sum,
    group_sum,
    next_unmasked,
    whiten,
)
from pellucid.algo.catalog import ARGUMENTS, ESTIMATORS, estimator_entry, load

BY_GROUP = ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo"]
NAMES = sorted(ESTIMATORS)


@dataclass(frozen=True)
class Case(AdvantageInputs):
    """The inputs of every estimator, with all that any of them may take beside them."""

    values: torch.Tensor = None
    greedy_scores: torch.Tensor = None
    reward_components: torch.Tensor = None
    component_weights: torch.Tensor = None


def estimate(name, case):
    entry = ESTIMATORS[name]
    return load(entry.function)(case, **{argument: getattr(case, argument) for argument in entry.arguments})


# --- the definitions, one float at a time -----------------------------------------------------------------------------


def outcome(case, row):
    return sum(float(case.token_rewards[row, t]) for t in tokens_of(case.mask, row))


def members(case, row):
    """The rows of a row's group that count."""
    rows = range(len(case.mask))
    return [other for other in rows if case.group[other] == case.group[row] and tokens_of(case.mask, other)]


def mean_and_std(scores):
    if len(scores) == 1:
        return 0.0, 1.0
    mean = sum(scores) / len(scores)
    return mean, math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))


def return_to_go(rewards, gamma):
    return [sum(gamma**k * reward for k, reward in enumerate(rewards[start:])) for start in range(len(rewards))]


def whitened(cells):
    """Cells of the whole batch: {(row, t): value}."""
    if not cells:
        return {}
    mean = sum(cells.values()) / len(cells)
    variance = sum((x - mean) ** 2 for x in cells.values()) / (len(cells) - 1) if len(cells) > 1 else 0.0
    return {cell: (x - mean) / math.sqrt(variance + 1e-8) for cell, x in cells.items()}


def grpo_by_hand(case, row, score):
    mean, std = mean_and_std([score(other) for other in members(case, row)])
    return (score(row) - mean) / (std + EPSILON if case.norm_by_std else 1.0)


def sample_advantage(name, case, row):
    """Advantage of one sample that has a token, for the estimators that give one number a sample."""
    scores = {other: outcome(case, other) for other in members(case, row)}
    mine, others = scores[row], [score for other, score in scores.items() if other != row]
    if name == "grpo":
        return grpo_by_hand(case, row, lambda other: outcome(case, other))
    if name == "grpo_passk":
        margin = mine - max(others) if others and mine > max(others) else 0.0
        return margin / (mean_and_std(list(scores.values()))[1] + EPSILON if case.norm_by_std else 1.0)
    if name == "rloo":
        return mine - sum(others) / len(others) if others else mine
    if name == "opo":
        lengths = {other: len(tokens_of(case.mask, other)) for other in scores}
        baseline = sum(lengths[other] * scores[other] for other in scores) / sum(lengths.values())
        return mine - baseline if others else mine
    if name == "gpg":
        everyone = [outcome(case, other) for other in range(len(case.mask)) if tokens_of(case.mask, other)]
        alpha = len(everyone) / max(1, sum(abs(score) > ROUNDING for score in everyone))
        return alpha * (mine - mean_and_std(list(scores.values()))[0])
    if name == "reinforce_plus_plus_baseline":
        return mine - mean_and_std(list(scores.values()))[0]
    assert name == "gdpo"
    return sum(
        float(weight) * grpo_by_hand(case, row, lambda other, k=k: float(case.reward_components[other, k]))
        for k, weight in enumerate(case.component_weights)
    )


def token_cells(name, case):
    """Advantages and returns before any whitening, {(row, t): value}, for the estimators that work along tokens."""
    advantages, returns = {}, {}
    for row in range(len(case.mask)):
        tokens = tokens_of(case.mask, row)
        rewards = [float(case.token_rewards[row, t]) for t in tokens]
        if name == "gae":
            values = [float(case.values[row, t]) for t in tokens] + [0.0]
            advantage = 0.0
            for k in reversed(range(len(tokens))):
                delta = rewards[k] + case.gamma * values[k + 1] - values[k]
                advantage = delta + case.gamma * case.lam * advantage
                advantages[row, tokens[k]], returns[row, tokens[k]] = advantage, advantage + values[k]
        else:
            sums = return_to_go(rewards, 1.0 if name == "remax" else case.gamma)
            baseline = float(case.greedy_scores[row]) if name == "remax" else 0.0
            for t, value in zip(tokens, sums):
                advantages[row, t], returns[row, t] = value - baseline, value
    return advantages, returns


def by_hand(name, case):
    """Return [B, T] advantages and returns."""
    if name in ("gae", "reinforce_plus_plus", "remax"):
        advantages, returns = token_cells(name, case)
        advantages = advantages if name == "remax" else whitened(advantages)
    else:
        rows = [row for row in range(len(case.mask)) if tokens_of(case.mask, row)]
        per_sample = {row: sample_advantage(name, case, row) for row in rows}
        advantages = {(row, t): per_sample[row] for row in rows for t in tokens_of(case.mask, row)}
        if name in ("gdpo", "reinforce_plus_plus_baseline"):
            advantages = whitened(advantages)
        returns = advantages
    outputs = []
    for cells in (advantages, returns):
        output = torch.zeros(case.mask.shape, dtype=torch.float64)
        for (row, t), value in cells.items():
            output[row, t] = value
        outputs.append(output)
    return tuple(outputs)


# --- cases ------------------------------------------------------------------------------------------------------------


def case_of(mask, group, seed=0, **changes):
    """Random inputs of float64 for every estimator; changes replace fields."""
    shape, rows = mask.shape, len(mask)
    case = Case(
        token_rewards=noise64(shape, seed).round(decimals=1),
        mask=mask,
        group=torch.as_tensor(group, dtype=torch.int64),
        values=noise64(shape, seed + 1),
        greedy_scores=noise64((rows,), seed + 2),
        reward_components=noise64((rows, 3), seed + 3).round(decimals=1),
        component_weights=torch.tensor([1.0, 0.5, -2.0]),
        gamma=0.9,
        lam=0.8,
    )
    return replace(case, **changes)


def last_token_rewards(mask, scores):
    """An outcome reward on each row's last unmasked token."""
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for row, score in enumerate(scores):
        if tokens_of(mask, row):
            rewards[row, tokens_of(mask, row)[-1]] = score
    return rewards


def equal_rewards(mask, score, dtype=torch.float64):
    rows = len(mask)
    return {
        "token_rewards": last_token_rewards(mask, [score] * rows).to(dtype),
        "reward_components": torch.full((rows, 2), score, dtype=dtype),
        "component_weights": torch.ones(2),
    }


RAGGED = torch.arange(4) < torch.tensor([4, 2, 1, 3, 4, 4, 2, 1])[:, None]
FULL = torch.ones(7, 3, dtype=torch.bool)
CASES = {
    "unequal-groups": case_of(RAGGED, [0, 1, 0, 0, 2, 1, 0, 2]),  # of four, two and two, interleaved
    "holes": case_of(MASK, [0, 0, 0, 0, 0], 1),
    "holes-failed-row-leaves-one": case_of(MASK, [0, 0, 1, 1, 0], 2),
    "groups-of-one": case_of(RAGGED, range(8), 3),
    "one-group-of-one": case_of(RAGGED, [0, 0, 0, 1, 2, 2, 2, 2], 4),
    "whole-group-failed": case_of(MASK & (torch.arange(5) > 1)[:, None], [0, 0, 1, 1, 1], 5),
    "equal-rewards": case_of(FULL, [0, 0, 0, 1, 1, 1, 1], **equal_rewards(FULL, 0.1)),
    "no-reward": case_of(RAGGED, [0, 0, 0, 0, 1, 1, 1, 1], **equal_rewards(RAGGED, 0.0)),
    "outcome-rewards": case_of(
        RAGGED, [0, 0, 0, 0, 1, 1, 1, 1], token_rewards=last_token_rewards(RAGGED, [1, 0, 0, 1, 1, 1, 0, 1])
    ),
    "ties-at-the-top": case_of(
        FULL, [0, 0, 0, 1, 1, 1, 1], token_rewards=last_token_rewards(FULL, [1, 1, 0, 2, 2, 1, 3])
    ),
    "one-token": case_of(torch.ones(1, 1, dtype=torch.bool), [0]),
    "two-tokens": case_of(torch.ones(2, 1, dtype=torch.bool), [0, 0]),
    "nothing-unmasked": case_of(torch.zeros(3, 2, dtype=torch.bool), [0, 0, 1]),
    "undiscounted": case_of(MASK, [0, 0, 1, 1, 1], 6, gamma=1.0, lam=1.0),
    "no-lookahead": case_of(MASK, [0, 0, 1, 1, 1], 6, gamma=0.0, lam=0.0),
}


def has_group_of_one(case):
    return any(case.group.tolist().count(group) == 1 for group in case.group.tolist())


def check(name, case, tolerance=1e-6):
    if name == "grpo_passk" and has_group_of_one(case):
        with pytest.raises(ValueError, match="at least two"):
            estimate(name, case)
        return
    outputs = estimate(name, case)
    for output, expected in zip(outputs, by_hand(name, case)):
        assert output.dtype == case.token_rewards.dtype
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        assert not output[~case.mask].any()


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_estimators_are_their_definitions(name, case, norm_by_std):
    check(name, replace(case, norm_by_std=norm_by_std))


@pytest.mark.parametrize("name", NAMES)
def test_float32_inputs_lose_nothing_inside(name):
    case = case_of(RAGGED, [0, 1, 0, 0, 2, 1, 0, 2])
    singles = ("token_rewards", "values", "greedy_scores", "reward_components")
    check(name, replace(case, **{field: vars_of(case)[field].float() for field in singles}))


def vars_of(case):
    return {field.name: getattr(case, field.name) for field in fields(case)}


@quick
@pytest.mark.parametrize("name", NAMES)
@given(
    mask=holed_masks,
    seed=st.integers(0, 99),
    norm_by_std=st.booleans(),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    data=st.data(),
)
def test_estimators_are_their_definitions_on_any_mask(name, mask, seed, norm_by_std, gamma, lam, data):
    check(name, drawn_case(data, mask, seed, norm_by_std=norm_by_std, gamma=gamma, lam=lam))


def drawn_case(data, mask, seed, **changes):
    group = [data.draw(st.integers(0, 2)) for _ in range(len(mask))]
    return case_of(mask, group, seed, **changes)


@quick
@given(mask=holed_masks, seed=st.integers(0, 99), norm_by_std=st.booleans(), data=st.data())
def test_grpo_by_steps_is_its_definition_on_any_mask(mask, seed, norm_by_std, data):
    case = drawn_case(data, mask, seed, norm_by_std=norm_by_std)
    last = last_token_rewards(mask, [1] * len(mask)).bool()
    ends = last | (torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.4)
    case, steps = replace(case, step_ends=ends), {}
    for row in range(len(mask)):
        earned = 0.0
        for t in tokens_of(mask, row):
            earned += float(case.token_rewards[row, t])
            if ends[row, t]:
                steps[row, t], earned = earned, 0.0
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for row, token in mask.nonzero().tolist():
        of_group = [score for (other, _), score in steps.items() if case.group[other] == case.group[row]]
        mean, std = mean_and_std(of_group)
        later = [score for (other, t), score in steps.items() if other == row and t >= token]
        expected[row, token] = sum((score - mean) / (std + EPSILON if norm_by_std else 1.0) for score in later)
    torch.testing.assert_close(estimate("grpo", case)[0], expected, rtol=1e-6, atol=1e-6)
    one_step = estimate("grpo", replace(case, step_ends=last))[0]
    torch.testing.assert_close(one_step, estimate("grpo", replace(case, step_ends=None))[0], rtol=1e-6, atol=1e-6)


# --- properties -------------------------------------------------------------------------------------------------------


def outputs_or_none(name, case):
    return None if name == "grpo_passk" and has_group_of_one(case) else estimate(name, case)


def rows_of(case, rows):
    """The case with the rows given, in their order."""
    whole = ("gamma", "lam", "norm_by_std", "component_weights")
    return replace(case, **{key: value[rows] for key, value in vars_of(case).items() if key not in whole and value is not None})


def test_gpg_takes_rewards_that_cancel_out_for_none():
    mask = torch.ones(2, 3, dtype=torch.bool)
    cancelling, none = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert float(cancelling.sum()) != 0
    one = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    outputs = [estimate("gpg", case_of(mask, [0, 0], token_rewards=torch.stack([first, one])))[0] for first in (cancelling, none)]
    torch.testing.assert_close(outputs[0], outputs[1])


@quick
@pytest.mark.parametrize("name", NAMES)
@given(mask=holed_masks, seed=st.integers(0, 99), data=st.data())
def test_permuting_samples_permutes_advantages(name, mask, seed, data):
    case = drawn_case(data, mask, seed)
    order = data.draw(st.permutations(range(len(mask))))
    if (outputs := outputs_or_none(name, case)) is None:
        return
    for output, permuted in zip(outputs, estimate(name, rows_of(case, order))):
        torch.testing.assert_close(permuted, output[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_fully_masked_rows_count_nowhere(name):
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[[1, 4]] = False
    case = case_of(mask, [0, 0, 0, 1, 1, 1])
    for value in (case.token_rewards, case.greedy_scores, case.reward_components, case.values):
        value[[1, 4]] = float("nan")
    rows = [0, 2, 3, 5]
    for output, without in zip(estimate(name, case), estimate(name, rows_of(case, rows))):
        torch.testing.assert_close(output[rows], without, rtol=1e-12, atol=1e-12)
        assert not output[[1, 4]].any()


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_apart_and_carry_no_gradient(name):
    case = case_of(RAGGED, [0, 1, 0, 0, 2, 1, 0, 2])
    case = replace(case, token_rewards=case.token_rewards.requires_grad_(), values=case.values.requires_grad_())
    advantages, returns = estimate(name, case)
    assert not advantages.requires_grad and not returns.requires_grad
    assert advantages.data_ptr() != returns.data_ptr()
    assert advantages.is_contiguous() and returns.is_contiguous()


@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -3.3])
@pytest.mark.parametrize("name", [*BY_GROUP, "grpo_passk"])
def test_equal_rewards_teach_exactly_nothing(name, score):
    advantages, _ = estimate(name, case_of(FULL, [0] * 7, **equal_rewards(FULL, score, torch.float32)))
    assert torch.equal(advantages, torch.zeros_like(advantages))


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_group_of_one_keeps_its_score(name):
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, _ = estimate(name, case_of(mask, [0], token_rewards=last_token_rewards(mask, [0.7])))
    assert advantages.tolist() == [pytest.approx([0.7] * 3, rel=2e-6)]


def test_pass_at_k_of_a_group_that_failures_left_with_one_sample_is_zero():
    mask = torch.tensor([[True, True], [False, False]])
    advantages, _ = estimate("grpo_passk", case_of(mask, [0, 0]))
    assert not advantages.any()


def test_gae_without_decay_is_the_return_less_the_value():
    case = case_of(MASK, [0, 0, 0, 0, 0], gamma=1.0, lam=1.0)
    _, returns = estimate("gae", case)
    torch.testing.assert_close(returns, estimate("remax", case)[1])


def test_every_estimator_of_the_family_is_there():
    assert set(ESTIMATORS) == {
        "gae", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gdpo",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("def mine(inputs): ...", set()),
        ("def mine(inputs, values): ...", {"values"}),
        ("import no_such_module\ndef mine(inputs, *, greedy_scores, k=3): ...", {"greedy_scores"}),
        ("def mine(inputs, reward_components, component_weights): ...", {"reward_components", "component_weights"}),
        ("def other(inputs, values): ...", set()),
        ("def mine(inputs, values: ...", set()),
    ],
)
def test_a_function_of_one_s_own_says_what_it_needs_by_its_parameters(source, needs, tmp_path):
    (tmp_path / "own.py").write_text(source)
    entry = estimator_entry(f"{tmp_path}/own.py:mine")
    assert entry.needs == set(entry.arguments) == needs


def test_a_missing_file_or_module_needs_nothing():
    assert not estimator_entry("no_such_file.py:mine").needs
    assert not estimator_entry("no_such_module.inner:mine").needs
    assert "values" in estimator_entry("pellucid.algo.advantages:gae").needs


def test_arguments_are_the_functions_own_parameters():
    for entry in ESTIMATORS.values():
        parameters = list(inspect.signature(load(entry.function)).parameters)
        assert parameters[1:] == list(entry.arguments) and set(entry.arguments) <= set(ARGUMENTS)


# --- helpers ----------------------------------------------------------------------------------------------------------


def test_whitened_values_have_mean_zero_and_unbiased_variance_one():
    values = whiten(noise64(MASK.shape, 1, scale=5.0) + 7, MASK)
    assert float(values[MASK].mean()) == pytest.approx(0, abs=1e-9)
    assert float(values[MASK].var()) == pytest.approx(1, rel=1e-8)
    assert not values[~MASK].any()


@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 2), torch.tensor([[0, 1], [0, 0]]), torch.zeros(0, 3), torch.zeros(2, 0)]
)
def test_whitening_of_nothing_or_one_entry_is_zero(mask):
    values = whiten(torch.full(mask.shape, 3.0), mask.bool())
    assert values.shape == mask.shape and not values.any()


def test_sums_and_successors_skip_holes():
    values, mask = torch.tensor([[1.0, 9.0, 2.0, 4.0]]), torch.tensor([[True, False, True, True]])
    assert discounted_sum(values, mask, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 0, 2 + 0.5 * 4, 4]]
    assert next_unmasked(values, mask)[mask].tolist() == [2, 4, 0]


def test_empty_batches():
    for shape in ((0, 3), (2, 0)):
        empty = case_of(torch.zeros(shape, dtype=torch.bool), [0] * shape[0])
        assert all(output.shape == shape for name in NAMES for output in estimate(name, empty))
    assert not group_sum(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).numel()


# --- trajectories of several sequences --------------------------------------------------------------------------------


def halves(case):
    """Each row in two, its tokens in turn on the one and the other, both with its reward."""
    rows = torch.arange(len(case.mask)).repeat_interleave(2)
    odd = torch.arange(case.mask.shape[1]) % 2 == 1
    mask = case.mask[rows] & (odd == (torch.arange(len(rows)) % 2 == 1)[:, None])
    has_tokens = mask.any(dim=1)
    first = torch.stack([has_tokens[::2], ~has_tokens[::2]], dim=1).flatten()
    rewards = last_token_rewards(mask, [outcome(case, int(row)) for row in rows])
    of_rows = {"greedy_scores": case.greedy_scores[rows], "reward_components": case.reward_components[rows]}
    return rows, replace(case, token_rewards=rewards, mask=mask, group=case.group[rows], first=first, **of_rows)


@quick
@pytest.mark.parametrize("name", [*BY_GROUP, "grpo_passk"])
@given(mask=holed_masks, seed=st.integers(0, 99))
def test_a_trajectory_counts_once_in_its_group_however_many_sequences_it_has(name, mask, seed):
    mask = torch.cat([mask, mask.flip(0)])
    case = case_of(mask, list(range(len(mask) // 2)) * 2, seed)
    case = replace(case, token_rewards=last_token_rewards(mask, [outcome(case, row) for row in range(len(mask))]))
    rows, split = halves(case)
    whole, parts = estimate(name, case)[0], estimate(name, split)[0]
    torch.testing.assert_close(parts, whole[rows] * split.mask, rtol=1e-9, atol=1e-9)
