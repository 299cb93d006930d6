"""Rollout correction against brute-force float64 loops written from its definitions, and its properties."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from algo_cases import noise, quick, ragged_masks
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo import mismatch
from pellucid.algo.correction import (
    HEALTH,
    CorrectionSettings,
    RejectionRule,
    correct,
    correction_weights,
    geometric_mean_weights,
    out_of_range,
    rejection_mask,
)
from pellucid.algo.correction_metrics import order_statistic_of_parts
from pellucid.algo.mismatch import in_threads, mismatch_metrics
from pellucid.metrics.table import check_names

LEVELS, MODES = ["token", "sequence", "geometric"], ["truncate", "clip"]
STATISTICS, RULE_LEVELS = ["k1", "k2", "k3"], ["token", "seq_sum", "seq_mean", "seq_max"]
# Ragged rows, a fully masked row, a mask with holes at both ends, a row of one token, a full row.
MASK = torch.tensor(
    [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
    dtype=torch.bool,
)  # fmt: skip


def case(scale=0.4, seed=0, extremes=False):
    """(old_logp, rollout_logp), float32 with garbage outside the mask; gaps of ±100 on request."""
    rollout = -noise(MASK.shape, seed).abs() - 0.1
    old = rollout + noise(MASK.shape, seed + 1, scale)
    if extremes:
        rollout[0, 0], old[0, 0] = -0.5, -100.5  # ratio e^-100: catastrophic
        rollout[4, 2], old[4, 2] = -100.25, -0.25  # ratio e^100
    return old.masked_fill(~MASK, torch.nan), rollout.masked_fill(~MASK, 7.0)


def exp20(x):
    return math.exp(min(max(x, -20.0), 20.0))


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def percentile(values, percent):
    values = sorted(values)
    position = percent / 100 * (len(values) - 1)
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)


def rule_keeps(rule, row, gap):
    """Whether `rule` keeps a token with log-ratio `gap` of a sequence with the log-ratios `row`."""
    statistic = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - x - 1}[rule.statistic]
    if rule.statistic == "k1":
        upper = rule.upper
        lower = 1 / upper if rule.lower is None else rule.lower
        fits = lambda x: lower <= math.exp(x) <= upper  # noqa: E731
    else:
        fits = lambda x: x <= rule.upper  # noqa: E731
    if rule.level == "token":
        return fits(statistic(gap))
    values = [statistic(x) for x in row]
    if rule.level == "seq_sum":
        return fits(math.fsum(values))
    if rule.level == "seq_mean":
        return fits(mean(values))
    return all(fits(value) for value in values)


def by_hand(old, rollout, mask, settings):
    """(weights, kept, metrics) one float at a time; the mismatch metrics of `test_mismatch` are left out."""
    rows = {
        i: {t: float(old[i, t]) - float(rollout[i, t]) for t in range(mask.shape[1]) if mask[i, t]}
        for i in range(mask.shape[0])
        if mask[i].any()
    }
    upper = settings.threshold
    lower = 1 / upper if settings.threshold_lower is None else settings.threshold_lower
    veto = settings.veto_threshold or 0.0
    of_sequence = {i: math.fsum(row.values()) / (len(row) if settings.level == "geometric" else 1) for i, row in rows.items()}
    weights, kept = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros_like(mask)
    tokens = []  # the log-ratio at the level, of every token
    for i, row in rows.items():
        vetoed = any(math.exp(gap) < veto for gap in row.values())
        for t, gap in row.items():
            x = gap if settings.level == "token" else of_sequence[i]
            tokens.append(x)
            weight = min(exp20(x), upper) if settings.mode == "truncate" else exp20(x) * (lower <= math.exp(x) <= upper)
            kept[i, t] = all(rule_keeps(rule, list(row.values()), gap) for rule in settings.rejection)
            weights[i, t] = 0.0 if vetoed or not kept[i, t] else weight
    if settings.batch_normalize:
        per_row = [[float(weights[i, t]) for t in row if kept[i, t]] for i, row in rows.items()]
        trained = [row for row in per_row if row]
        total = mean(w for row in trained for w in row) if settings.level == "token" else mean(map(mean, trained))
        weights /= total or 1.0
    bounded = [min(max(exp20(x), lower), upper) for x in tokens]
    center = mean(bounded)
    sequences = [exp20(x) for x in of_sequence.values()]
    gaps = [gap for row in rows.values() for gap in row.values()]
    counted = list(of_sequence.values()) if settings.level == "sequence" else tokens
    values = {
        "mean": mean(map(exp20, tokens)),
        "std": math.sqrt(mean((w - center) ** 2 for w in bounded)),
        "min": exp20(min(tokens)),
        "max": exp20(max(tokens)),
        **{f"p{percent}": percentile(map(exp20, tokens), percent) for percent in (25, 50, 75, 95, 99)},
        "eff_sample_size": 1 / mean((w / center) ** 2 for w in bounded),
        "veto_fraction": mean(any(math.exp(gap) < veto for gap in row.values()) for row in rows.values()),
        "catastrophic_token_fraction": mean(math.exp(gap) < veto for gap in gaps),
        "ratio_fraction_high": mean(math.exp(x) > upper for x in counted),
        "ratio_fraction_low": mean(math.exp(x) < lower for x in counted),
    }
    if settings.mode == "clip":
        values["clipped_fraction"] = mean(not lower <= math.exp(x) <= upper for x in tokens)
    if settings.level != "token":
        center = mean(sequences)
        squares = [(w - center) ** 2 for w in sequences]
        values |= {
            "seq_mean": center,
            "seq_std": math.sqrt(math.fsum(squares) / (len(squares) - 1)) if len(squares) > 1 else 0.0,
            "seq_max": max(sequences),
            "seq_min": min(sequences),
            "seq_max_deviation": max(abs(w - 1) for w in sequences),
            "seq_fraction_high": mean(math.exp(x) > upper for x in of_sequence.values()),
            "seq_fraction_low": mean(math.exp(x) < lower for x in of_sequence.values()),
        }
    metrics = {f"mismatch/rollout_is_{name}": value for name, value in values.items()}
    if settings.rejection:
        metrics["mismatch/rollout_rs_masked_fraction"] = 1 - int(kept.sum()) / len(gaps)
        metrics["mismatch/rollout_rs_seq_masked_fraction"] = mean(int(kept[i].sum()) < len(row) for i, row in rows.items())
    return weights, kept, metrics


def assert_matches(old, rollout, mask, settings):
    result = correct(old, rollout, mask, settings)
    weights, kept, metrics = by_hand(old, rollout, mask, settings)
    assert result.weights is not None and result.weights.dtype == torch.float32
    torch.testing.assert_close(result.weights.double(), weights, rtol=1e-6, atol=1e-12)
    assert torch.equal(result.mask, kept)
    metrics |= mismatch_metrics(old, rollout, mask)
    assert result.metrics == {name: pytest.approx(value, rel=1e-6, abs=1e-9) for name, value in metrics.items()}
    check_names(result.metrics)


@pytest.mark.parametrize("extremes", [False, True], ids=["mild", "±100"])
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
@pytest.mark.parametrize("veto", [None, 1e-4, 0.5])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_correction_is_the_definition(level, mode, veto, normalize, extremes):
    for bounds, scale in itertools.product([(2.0, None), (1.3, 0.2), (1e3, 0.9), (0.9, 0.3)], [1e-3, 0.4]):
        settings = CorrectionSettings(*bounds, level, mode, veto, normalize)
        assert_matches(*case(scale, extremes=extremes), MASK, settings)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule_level", RULE_LEVELS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_rejection_is_the_definition(statistic, rule_level, level):
    num_rejected = []
    for upper, lower in [(1.5, None), (1.2, 0.5), (3.0, 0.9)] if statistic == "k1" else [(0.02, None), (0.2, None)]:
        rule = RejectionRule(statistic, rule_level, lower, upper)
        for normalize, extremes in itertools.product([False, True], [False, True]):
            settings = CorrectionSettings(2.0, level=level, batch_normalize=normalize, rejection=(rule,))
            old, rollout = case(extremes=extremes)
            assert_matches(old, rollout, MASK, settings)
            kept = rejection_mask(old - rollout, MASK, (rule,))
            num_rejected.append(int((MASK & ~kept).sum()))
    assert any(0 < number < int(MASK.sum()) for number in num_rejected), "the bounds test nothing"


def test_rules_join():
    rules = (RejectionRule("k1", "token", None, 1.2), RejectionRule("k2", "seq_mean", None, 0.1))
    old, rollout = case()
    assert_matches(old, rollout, MASK, CorrectionSettings(2.0, rejection=rules))
    parts = [rejection_mask(old - rollout, MASK, (rule,)) for rule in rules]
    assert torch.equal(rejection_mask(old - rollout, MASK, rules), parts[0] & parts[1])
    assert all(not torch.equal(part, parts[0] & parts[1]) for part in parts)


def test_long_sequences_need_log_space():
    """Σ ℓ beyond ±20 and float32 overflow of the product; the sum of 8192 float32 gaps needs float64."""
    rollout = -noise((6, 8192), 3).abs() - 1.0
    old = rollout + noise(rollout.shape, 4, 0.03) + torch.tensor([[0.005], [-0.005], [0.02], [0.0], [1e-4], [-1e-4]])
    mask = torch.arange(8192) < torch.tensor([[8192], [8192], [8192], [8192], [5000], [7]])
    totals = ((old.double() - rollout.double()) * mask).sum(1)
    assert float(totals.max()) > 100 and float(totals.min()) < -20
    for level in LEVELS:
        assert_matches(old, rollout, mask, CorrectionSettings(2.0, level=level, mode="clip"))
    exact = torch.tensor([exp20(float(total)) for total in totals], dtype=torch.float64)
    weights = correction_weights(old.double() - rollout.double(), mask, CorrectionSettings(1e9, level="sequence", veto_threshold=None))
    torch.testing.assert_close(weights.amax(dim=1).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_leave_weights_of_one(level, mode, normalize):
    old, _ = case()
    result = correct(old, old.clone(), MASK, CorrectionSettings(2.0, level=level, mode=mode, batch_normalize=normalize))
    assert torch.equal(result.weights, MASK.float())
    values = {name.removeprefix("mismatch/rollout_is_"): value for name, value in result.metrics.items()}
    assert values["eff_sample_size"] == values["mean"] == values["max"] == values["min"] == values["p50"] == 1.0
    assert values["std"] == values["veto_fraction"] == 0.0


def test_nothing_unmasked():
    for level in LEVELS:
        rules = (RejectionRule("k1", "seq_mean", None, 1.1),)
        settings = CorrectionSettings(2.0, level=level, batch_normalize=True, rejection=rules)
        for shape in [(3, 4), (0, 4), (3, 0)]:
            nothing = torch.zeros(shape).bool()
            result = correct(torch.full(shape, torch.nan), torch.zeros(shape), nothing, settings)
            assert result.metrics == {} and torch.equal(result.weights, torch.zeros(shape)) and not result.mask.any()


def test_everything_vetoed_or_rejected_stays_finite():
    rollout = -torch.ones(2, 3)
    mask = torch.ones(2, 3).bool()
    settings = CorrectionSettings(2.0, batch_normalize=True)
    vetoed = correct(rollout - 50, rollout, mask, settings)
    rejected = correct(rollout - 1, rollout, mask, dataclasses.replace(settings, rejection=(RejectionRule("k1", "seq_max", None, 1.1),)))
    for result in (vetoed, rejected):
        assert not result.weights.any() and all(map(math.isfinite, result.metrics.values()))
    assert vetoed.metrics["mismatch/rollout_is_veto_fraction"] == 1.0 and vetoed.mask.all()
    assert rejected.metrics["mismatch/rollout_rs_masked_fraction"] == 1.0 and not rejected.mask.any()


def test_finite_for_any_finite_log_probs():
    old, rollout = torch.tensor([[-1e4, -1.0, -3e38]]), torch.tensor([[-1.0, -1e4, -1.0]])
    for level, mode in itertools.product(LEVELS, MODES):
        result = correct(old, rollout, torch.ones(1, 3).bool(), CorrectionSettings(2.0, level=level, mode=mode))
        assert result.weights.isfinite().all() and all(map(math.isfinite, result.metrics.values()))


def test_weights_carry_no_gradient():
    old, rollout = (value.nan_to_num().requires_grad_() for value in case())
    settings = CorrectionSettings(2.0)
    assert not correct(old, rollout, MASK, settings).weights.requires_grad
    assert not correction_weights(old - rollout, MASK, settings).requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_threshold_metrics_and_rejection_remain(level):
    old, rollout = case()
    settings = CorrectionSettings(2.0, level=level, rejection=(RejectionRule("k1", "token", None, 1.2),))
    applied, measured = (correct(old, rollout, MASK, dataclasses.replace(settings, threshold=value)) for value in (2.0, None))
    assert measured.weights is None and torch.equal(measured.mask, applied.mask)
    bounded = {f"mismatch/rollout_is_{name}" for name in ("std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low",
                                                          "seq_fraction_high", "seq_fraction_low")}  # fmt: skip
    assert set(measured.metrics) == set(applied.metrics)
    assert all(measured.metrics[name] == applied.metrics[name] for name in set(measured.metrics) - bounded)


def test_the_input_mask_comes_back_without_rules():
    assert correct(*case(), MASK, CorrectionSettings(2.0)).mask is MASK


def test_float32_micro_batches_get_the_batch_weights():
    old, rollout = case(extremes=True)
    for level, mode in itertools.product(LEVELS, MODES):
        settings = CorrectionSettings(2.0, level=level, mode=mode)
        parts = [correction_weights((old - rollout)[rows], MASK[rows], settings) for rows in (slice(0, 2), slice(2, None))]
        torch.testing.assert_close(torch.cat(parts), correct(old, rollout, MASK, settings).weights, rtol=2e-6, atol=0)


def test_geometric_mean_weights_are_the_definition():
    weights = noise(MASK.shape, 5).abs() + 0.01
    weights[4, 3] = 0.0
    expected = torch.zeros(MASK.shape, dtype=torch.float64)
    for i in range(len(MASK)):
        row = [float(weights[i, t]) for t in range(MASK.shape[1]) if MASK[i, t]]
        if row and min(row) > 0:
            expected[i] = MASK[i] * math.exp(mean(map(math.log, row)))
    result = geometric_mean_weights(weights.masked_fill(~MASK, 0.0), MASK)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=0)
    assert not result[4].any() and result[5].any()
    assert torch.equal(geometric_mean_weights(MASK.float(), MASK), MASK.float())


settings_of_any_kind = st.builds(
    CorrectionSettings,
    threshold=st.sampled_from([1.05, 2.0, 10.0]),
    threshold_lower=st.sampled_from([None, 0.5, 0.99]),
    level=st.sampled_from(LEVELS),
    mode=st.sampled_from(MODES),
    veto_threshold=st.sampled_from([None, 1e-4, 0.3]),
    batch_normalize=st.booleans(),
    rejection=st.sampled_from([(), *((RejectionRule(s, level, None, 1.05),) for s in STATISTICS for level in RULE_LEVELS)]),
)


def close(metrics):
    return {name: pytest.approx(value, rel=1e-6, abs=1e-9) for name, value in metrics.items()}


@quick
@given(mask=ragged_masks, seed=st.integers(0, 99), settings=settings_of_any_kind, scale=st.sampled_from([1e-3, 0.3, 5.0]), data=st.data())
def test_properties(mask, seed, settings, scale, data):
    rollout = noise(mask.shape, seed) - 2
    old = rollout + noise(mask.shape, seed + 1, scale)
    result = correct(old, rollout, mask, settings)

    order = data.draw(st.permutations(range(len(mask))))
    permuted = correct(old[order], rollout[order], mask[order], settings)
    torch.testing.assert_close(permuted.weights, result.weights[order], rtol=1e-6, atol=0)
    assert torch.equal(permuted.mask, result.mask[order]) and permuted.metrics == close(result.metrics)

    wide = [torch.nn.functional.pad(x, (0, 3, 0, 2), value=value) for x, value in ((old, 5.0), (rollout, -9.0), (mask, False))]
    padded = correct(*wide, settings)
    torch.testing.assert_close(padded.weights[: len(mask), : mask.shape[1]], result.weights, rtol=1e-6, atol=0)
    assert padded.weights.sum() == pytest.approx(float(result.weights.sum()), rel=1e-6)
    assert padded.metrics == close(result.metrics)

    with pytest.MonkeyPatch.context() as patch:
        for size in (1, 5, 11):
            patch.setattr(mismatch, "BLOCK_TOKENS", size)
            blocks = correct(old, rollout, mask, settings)
            torch.testing.assert_close(blocks.weights, result.weights, rtol=1e-6, atol=0)
            assert torch.equal(blocks.mask, result.mask) and blocks.metrics == close(result.metrics)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rules", [(), (RejectionRule("k1", "seq_mean", None, 1.05), RejectionRule("k3", "token", None, 0.1))])
@pytest.mark.parametrize("level", LEVELS)
def test_the_number_of_threads_changes_no_bit(level, rules, set_threads, monkeypatch):
    monkeypatch.setattr(mismatch, "BLOCK_TOKENS", 300)  # three rows
    mask = torch.arange(100) < torch.arange(200)[:, None] * 37 % 101
    rollout = -noise(mask.shape, 1).abs()
    old = rollout + noise(mask.shape, 2, torch.linspace(0.01, 2, len(mask))[:, None])
    settings = CorrectionSettings(2.0, level=level, veto_threshold=0.02, batch_normalize=True, rejection=rules)
    results = []
    for num_threads in (1, 2, 5):
        set_threads(num_threads)
        results.append(correct(old, rollout, mask, settings))
        assert mismatch_metrics(old, rollout, mask).items() <= results[-1].metrics.items()
    for other in results[1:]:
        assert torch.equal(other.weights, results[0].weights) and torch.equal(other.mask, results[0].mask)
        assert other.metrics == results[0].metrics
    assert 0 < results[0].metrics["mismatch/rollout_is_veto_fraction"] < 1
    monkeypatch.undo()
    assert correct(old, rollout, mask, settings).metrics == close(results[0].metrics)


def test_threads_keep_the_order_and_pass_errors_on(set_threads):
    set_threads(3)
    assert in_threads(lambda x: x * x, range(50)) == [x * x for x in range(50)]
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda x: 1 / x, range(5))


@quick
@given(
    values=st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.5, -1.5]), min_size=4, max_size=40),
    num_parts=st.integers(1, 4),
)
def test_order_statistics_of_sorted_parts_are_those_of_the_whole(values, num_parts):
    parts = [np.sort(part) for part in np.array_split(np.array(values, dtype=np.float32), num_parts)]
    assert order_statistic_of_parts(parts)(np.arange(len(values))).tolist() == sorted(values)


@quick
@given(mask=ragged_masks, seed=st.integers(0, 99), settings=settings_of_any_kind, scale=st.sampled_from([0.3, 5.0]))
def test_weights_stay_within_their_bounds_and_the_veto_takes_whole_sequences(mask, seed, settings, scale):
    gap = noise(mask.shape, seed, scale)
    weights = correction_weights(gap, mask, settings)
    veto = settings.veto_threshold or 0.0
    vetoed = [any(mask[i, t] and math.exp(float(gap[i, t])) < veto for t in range(mask.shape[1])) for i in range(len(mask))]
    assert not weights[~mask].any() and not weights[torch.tensor(vetoed)].any()
    rest = weights[mask & ~torch.tensor(vetoed)[:, None]].double()
    lower = settings.threshold_lower or 1 / settings.threshold
    assert (rest <= settings.threshold * (1 + 1e-6)).all()
    if settings.mode == "truncate":
        assert (rest > 0).all()
    else:
        assert ((rest == 0) | (rest >= lower * (1 - 1e-6))).all()


def test_health_names_the_metric_and_a_remedy():
    healthy = {"mismatch/rollout_is_eff_sample_size": 0.95, "mismatch/rollout_is_veto_fraction": 0.0,
               "mismatch/rollout_is_mean": 1.01, "mismatch/rollout_is_catastrophic_token_fraction": 0.0,
               "mismatch/rollout_rs_masked_fraction": 0.4}  # fmt: skip
    assert {health.metric for health in HEALTH} == set(healthy)
    assert out_of_range(healthy) == out_of_range({}) == []
    bad = {"eff_sample_size": [0.79, math.nan], "veto_fraction": [0.06], "mean": [0.89, 1.11], "catastrophic_token_fraction": [0.02]}
    for name, values in bad.items():
        for value in values:
            [(metric, message)] = out_of_range(healthy | {f"mismatch/rollout_is_{name}": value})
            assert metric == f"mismatch/rollout_is_{name}" and metric in message and "actor_rollout_ref.rollout.dtype" in message
    [(metric, message)] = out_of_range(healthy | {"mismatch/rollout_rs_masked_fraction": 0.96})
    assert metric == "mismatch/rollout_rs_masked_fraction" and "algorithm.rollout_rs" in message and "disabled" in message


def test_unknown_names():
    gap, mask = torch.zeros(1, 1), torch.ones(1, 1).bool()
    with pytest.raises(ValueError, match="k9"):
        rejection_mask(gap, mask, (RejectionRule("k9", "token", None, 1.0),))
    with pytest.raises(ValueError, match="row"):
        rejection_mask(gap, mask, (RejectionRule("k1", "row", None, 1.0),))
    with pytest.raises(ValueError, match="batch"):
        correct(gap, gap, mask, CorrectionSettings(2.0, level="batch"))
