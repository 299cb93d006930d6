"""Rollout correction against brute-force float64 loops written from its definitions, and its properties."""

import dataclasses
import itertools
import math

import pytest
import torch
from algo_cases import correction, noise, quick, ragged_masks
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.correction import correct, geometric_mean_weights, weigh
from pellucid.config.schema.algorithm import AlgorithmConfig, RejectionRuleConfig
from pellucid.metrics.alerts import Alerts
from pellucid.metrics.definitions import check_names

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
    every_row = enumerate(zip(old.tolist(), rollout.tolist(), mask.tolist()))
    rows = {i: {t: a - b for t, (a, b, inside) in enumerate(zip(*of_row)) if inside} for i, of_row in every_row if any(of_row[2])}
    upper = settings.rollout_is_threshold
    lower = 1 / upper if settings.rollout_is_threshold_lower is None else settings.rollout_is_threshold_lower
    veto = settings.rollout_is_veto_threshold or 0.0
    of_sequence = {i: math.fsum(row.values()) / (len(row) if settings.rollout_is_level == "geometric" else 1) for i, row in rows.items()}
    weights, kept = [[0.0] * mask.shape[1] for _ in mask], [[False] * mask.shape[1] for _ in mask]
    tokens = []  # the log-ratio at the level, of every token
    for i, row in rows.items():
        vetoed = any(math.exp(gap) < veto for gap in row.values())
        for t, gap in row.items():
            x = gap if settings.rollout_is_level == "token" else of_sequence[i]
            tokens.append(x)
            weight = min(exp20(x), upper) if settings.rollout_is_mode == "truncate" else exp20(x) * (lower <= math.exp(x) <= upper)
            kept[i][t] = all(rule_keeps(rule, list(row.values()), gap) for rule in settings.rollout_rs)
            weights[i][t] = 0.0 if vetoed or not kept[i][t] else weight
    if settings.rollout_is_batch_normalize:
        per_row = [[weights[i][t] for t in row if kept[i][t]] for i, row in rows.items()]
        trained = [row for row in per_row if row]
        total = mean(w for row in trained for w in row) if settings.rollout_is_level == "token" else mean(map(mean, trained))
        weights = [[weight / (total or 1.0) for weight in row] for row in weights]
    applied = [weights[i][t] for i, row in rows.items() for t in row if kept[i][t]]
    center, square = mean(applied), mean(w * w for w in applied)
    sequences = [exp20(x) for x in of_sequence.values()]
    gaps = [gap for row in rows.values() for gap in row.values()]
    counted = list(of_sequence.values()) if settings.rollout_is_level == "sequence" else tokens
    values = {
        "mean": mean(map(exp20, tokens)),
        "std": math.sqrt(mean((w - center) ** 2 for w in applied)),
        "min": exp20(min(tokens)),
        "max": exp20(max(tokens)),
        **{f"p{percent}": percentile(map(exp20, tokens), percent) for percent in (25, 50, 75, 95, 99)},
        "eff_sample_size": center**2 / square if square else 0.0,
        "veto_fraction": mean(any(math.exp(gap) < veto for gap in row.values()) for row in rows.values()),
        "catastrophic_token_fraction": mean(math.exp(gap) < veto for gap in gaps),
        "ratio_fraction_high": mean(math.exp(x) > upper for x in counted),
        "ratio_fraction_low": mean(math.exp(x) < lower for x in counted),
    }
    if settings.rollout_is_mode == "clip":
        values["clipped_fraction"] = mean(not lower <= math.exp(x) <= upper for x in tokens)
    if settings.rollout_is_level != "token":
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
    if settings.rollout_rs:
        metrics["mismatch/rollout_rs_masked_fraction"] = 1 - sum(map(sum, kept)) / len(gaps)
        metrics["mismatch/rollout_rs_seq_masked_fraction"] = mean(sum(kept[i]) < len(row) for i, row in rows.items())
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(kept), metrics


def assert_matches(old, rollout, mask, settings):
    result = correct(old, rollout, mask, settings)
    weights, kept, metrics = by_hand(old, rollout, mask, settings)
    assert result.weights is not None and result.weights.dtype == torch.float32
    torch.testing.assert_close(result.weights.double(), weights, rtol=1e-6, atol=1e-12)
    assert torch.equal(result.mask, kept)
    metrics |= correct(old, rollout, mask, AlgorithmConfig()).metrics
    assert result.metrics == {name: pytest.approx(value, rel=1e-6, abs=1e-9) for name, value in metrics.items()}
    check_names(result.metrics)


@pytest.mark.parametrize("extremes", [False, True], ids=["mild", "±100"])
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
@pytest.mark.parametrize("veto", [None, 1e-4, 0.5])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_correction_is_the_definition(level, mode, veto, normalize, extremes):
    for *bounds, scale in [(2.0, None, 0.4), (1.3, 0.2, 0.4), (1e3, 0.9, 0.4), (0.9, 0.3, 0.4), (2.0, None, 1e-3), (0.9, 0.3, 1e-3)]:
        settings = correction(*bounds, level, mode, veto, normalize)
        assert_matches(*case(scale, extremes=extremes), MASK, settings)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule_level", RULE_LEVELS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_rejection_is_the_definition(statistic, rule_level, level):
    num_rejected = []
    for upper, lower in [(1.5, None), (1.2, 0.5), (3.0, 0.9)] if statistic == "k1" else [(0.02, None), (0.2, None)]:
        rule = RejectionRuleConfig(statistic, rule_level, lower, upper)
        for normalize, extremes in itertools.product([False, True], [False, True]):
            settings = correction(2.0, level=level, normalize=normalize, rules=(rule,))
            old, rollout = case(extremes=extremes)
            assert_matches(old, rollout, MASK, settings)
            kept = correct(old, rollout, MASK, settings).mask
            num_rejected.append(int((MASK & ~kept).sum()))
    assert any(0 < number < int(MASK.sum()) for number in num_rejected), "the bounds test nothing"


def test_rules_join():
    rules = (RejectionRuleConfig("k1", "token", None, 1.2), RejectionRuleConfig("k2", "seq_mean", None, 0.1))
    old, rollout = case()
    assert_matches(old, rollout, MASK, correction(2.0, rules=rules))
    parts = [weigh(old, rollout, MASK, correction(rules=(rule,)))[1] for rule in rules]
    assert torch.equal(weigh(old, rollout, MASK, correction(rules=rules))[1], parts[0] & parts[1])
    assert all(not torch.equal(part, parts[0] & parts[1]) for part in parts)


def test_long_sequences_need_log_space():
    """Σ ℓ beyond ±20 and float32 overflow of the product; the sum of 4096 float32 gaps needs float64."""
    rollout = -noise((6, 4096), 3).abs() - 1.0
    old = rollout + noise(rollout.shape, 4, 0.03) + torch.tensor([[0.01], [-0.01], [0.04], [0.0], [2e-4], [-2e-4]])
    mask = torch.arange(4096) < torch.tensor([[4096], [4096], [4096], [4096], [2500], [7]])
    totals = ((old.double() - rollout.double()) * mask).sum(1)
    assert float(totals.max()) > 100 and float(totals.min()) < -20
    for level in LEVELS:
        assert_matches(old, rollout, mask, correction(2.0, level=level, mode="clip"))
    exact = torch.tensor([exp20(float(total)) for total in totals], dtype=torch.float64)
    weights, _ = weigh(old, rollout, mask, correction(1e9, level="sequence", veto=None))
    torch.testing.assert_close(weights.amax(dim=1).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_leave_weights_of_one(level, mode, normalize):
    old, _ = case()
    result = correct(old, old.clone(), MASK, correction(2.0, level=level, mode=mode, normalize=normalize))
    assert torch.equal(result.weights, MASK.float())
    values = {name.removeprefix("mismatch/rollout_is_"): value for name, value in result.metrics.items()}
    assert values["eff_sample_size"] == values["mean"] == values["max"] == values["min"] == values["p50"] == 1.0
    assert values["std"] == values["veto_fraction"] == 0.0


def test_nothing_unmasked():
    for level in LEVELS:
        rules = (RejectionRuleConfig("k1", "seq_mean", None, 1.1),)
        settings = correction(2.0, level=level, normalize=True, rules=rules)
        for shape in [(3, 4), (0, 4), (3, 0)]:
            nothing = torch.zeros(shape).bool()
            result = correct(torch.full(shape, torch.nan), torch.zeros(shape), nothing, settings)
            assert result.metrics == {} and torch.equal(result.weights, torch.zeros(shape)) and not result.mask.any()


def test_everything_vetoed_or_rejected_stays_finite():
    rollout = -torch.ones(2, 3)
    mask = torch.ones(2, 3).bool()
    settings = correction(2.0, normalize=True)
    vetoed = correct(rollout - 50, rollout, mask, settings)
    rejected = correct(rollout - 1, rollout, mask, dataclasses.replace(settings, rollout_rs=[RejectionRuleConfig("k1", "seq_max", None, 1.1)]))
    for result in (vetoed, rejected):
        assert not result.weights.any() and all(map(math.isfinite, result.metrics.values()))
    assert vetoed.metrics["mismatch/rollout_is_veto_fraction"] == 1.0 and vetoed.mask.all()
    assert rejected.metrics["mismatch/rollout_rs_masked_fraction"] == 1.0 and not rejected.mask.any()


def test_finite_for_any_finite_log_probs():
    old, rollout = torch.tensor([[-1e4, -1.0, -3e38]]), torch.tensor([[-1.0, -1e4, -1.0]])
    for level, mode in itertools.product(LEVELS, MODES):
        result = correct(old, rollout, torch.ones(1, 3).bool(), correction(2.0, level=level, mode=mode))
        assert result.weights.isfinite().all() and all(map(math.isfinite, result.metrics.values()))


def test_weights_carry_no_gradient():
    old, rollout = (value.nan_to_num().requires_grad_() for value in case())
    settings = correction(2.0)
    assert not correct(old, rollout, MASK, settings).weights.requires_grad
    assert not weigh(old, rollout, MASK, settings)[0].requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_threshold_metrics_and_rejection_remain(level):
    old, rollout = case()
    settings = correction(2.0, level=level, rules=(RejectionRuleConfig("k1", "token", None, 1.2),))
    applied, measured = (correct(old, rollout, MASK, dataclasses.replace(settings, rollout_is_threshold=value)) for value in (2.0, None))
    assert measured.weights is None and torch.equal(measured.mask, applied.mask)
    bounded = {f"mismatch/rollout_is_{name}" for name in ("std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low",
                                                          "seq_fraction_high", "seq_fraction_low")}  # fmt: skip
    assert set(measured.metrics) == set(applied.metrics)
    assert all(measured.metrics[name] == applied.metrics[name] for name in set(measured.metrics) - bounded)


def test_float32_micro_batches_get_the_batch_weights():
    old, rollout = case(extremes=True)
    for level, mode in itertools.product(LEVELS, MODES):
        settings = correction(2.0, level=level, mode=mode)
        parts = [weigh(old[rows], rollout[rows], MASK[rows], settings)[0] for rows in (slice(0, 2), slice(2, None))]
        torch.testing.assert_close(torch.cat(parts), correct(old, rollout, MASK, settings).weights, rtol=0, atol=0)


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


def close(metrics):
    return {name: pytest.approx(value, rel=1e-6, abs=1e-9) for name, value in metrics.items()}


# --- what the figures are of ------------------------------------------------------------------------------------------


def sharp_gap(level):
    """A gap whose bounded ratios look healthy while the weights that are applied do not."""
    rollout = -noise((64, 512), 3).abs() - 1
    drift = -0.02 if level == "sequence" else 0.2 * torch.linspace(-1, 1, 64)[:, None]
    return rollout + 0.2 * noise(rollout.shape, 4) + drift, rollout, torch.ones(rollout.shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("keys", "largest"),
    [(correction(level="sequence", veto=None), 0.1), (correction(1.01, level="geometric", mode="clip"), 0.2)],
    ids=["sequence-truncate", "geometric-clip"],
)
def test_the_effective_sample_size_is_of_the_weights_that_are_applied(keys, largest):
    result = correct(*sharp_gap(keys.rollout_is_level), keys)
    weights, prefix = result.weights.double(), "mismatch/rollout_is_"
    effective = float(weights.mean() ** 2 / weights.square().mean())
    assert result.metrics[f"{prefix}eff_sample_size"] == pytest.approx(effective, rel=1e-5) and effective < largest
    assert result.metrics[f"{prefix}std"] == pytest.approx(float(weights.std(correction=0)), rel=1e-5)
    warned = alerted(result.metrics)
    assert f"{prefix}eff_sample_size" in warned and (f"{prefix}clipped_fraction" in warned) == (keys.rollout_is_mode == "clip")


# --- probabilities of 0 and NaN ---------------------------------------------------------------------------------------


def alerted(metrics: dict[str, float]) -> set[str]:
    alerts = Alerts()
    return {alert.metric for step in (1, 2) for alert in alerts.hear(step, metrics)}


RULE = RejectionRuleConfig("k1", "token", None, 1.2)
every_kind = pytest.mark.parametrize(
    "keys",
    [
        correction(1.3, level=level, mode=mode, veto=veto, normalize=normalize, rules=rules)
        for level, mode, (veto, normalize, rules) in itertools.product(
            LEVELS, MODES, [(None, False, ()), (None, True, ()), (1e-4, False, ()), (None, True, (RULE,))]
        )
    ],
    ids=lambda keys: f"{keys.rollout_is_level}-{keys.rollout_is_mode}-{keys.rollout_is_veto_threshold}-{len(keys.rollout_rs)}",
)


@every_kind
def test_tokens_of_probability_zero_are_left_out_and_counted(keys):
    (old, rollout), impossible = case(), torch.zeros_like(MASK)
    old[0, 1] = rollout[2, 3] = old[4, 0] = rollout[4, 0] = -math.inf
    impossible[[0, 2, 4], [1, 3, 0]] = True
    result, without = correct(old, rollout, MASK, keys), correct(old, rollout, MASK & ~impossible, keys)
    assert result.weights.isfinite().all() and all(map(math.isfinite, result.metrics.values()))
    assert result.metrics["mismatch/num_impossible_tokens"] == 3
    assert "mismatch/num_impossible_tokens" in alerted(result.metrics)
    assert torch.equal(result.mask, without.mask)
    if keys.rollout_is_veto_threshold is None:
        assert torch.equal(result.weights, without.weights)
        same = result.metrics | {"mismatch/num_impossible_tokens": 0.0}
        assert same == close(without.metrics)
    else:  # the trainer's own probability of 0 is below any veto; a NaN or the sampler's 0 is not
        rows = [1, 2, 3, 4, 5]
        assert torch.equal(result.weights[rows], without.weights[rows]) and not result.weights[0].any()
        assert result.metrics["mismatch/rollout_is_veto_fraction"] == 1 / 5


def test_nothing_but_impossible_tokens():
    result = correct(torch.full((1, 2), -math.inf), torch.zeros(1, 2), torch.ones(1, 2).bool(), correction(normalize=True))
    assert not result.weights.any() and not result.mask.any() and result.metrics == {"mismatch/num_impossible_tokens": 2.0}


@every_kind
def test_a_nan_stays_where_it_is_found_and_spoils_nothing_else(keys):
    old, rollout = case(extremes=True)
    clean = correct(old, rollout, MASK & (torch.arange(36).view(6, 6) != 13), keys)  # without the token [2, 1]
    old[2, 1] = math.nan
    result = correct(old, rollout, MASK, keys)
    assert result.mask[2, 1] and result.weights[2, 1].isnan(), "the update must find it"
    rest = torch.ones_like(MASK)
    rest[2, 1] = False
    torch.testing.assert_close(result.weights[rest], clean.weights[rest], rtol=0, atol=0)
    assert torch.equal(result.mask & rest, clean.mask)
    if keys.rollout_is_veto_threshold is not None:
        assert not result.weights[0].any(), "the veto of another sequence of the block"
    unlike = {"mismatch/num_impossible_tokens", "mismatch/rollout_is_catastrophic_token_fraction"}
    assert {k: v for k, v in result.metrics.items() if k not in unlike} == close({k: v for k, v in clean.metrics.items() if k not in unlike})
    assert result.metrics["mismatch/num_impossible_tokens"] == 1


@pytest.mark.parametrize(("bound", "lower"), [(2.0, None), (1.3, 0.7)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_ratio_at_the_bound_is_inside(level, bound, lower):
    rollout, mask = torch.zeros(2, 1), torch.ones(2, 1).bool()
    old = torch.tensor([[bound], [lower or 1 / bound]], dtype=torch.float64).log().float()
    keys = correction(bound, lower, level, "clip", rules=[RejectionRuleConfig("k1", "token", lower, bound)])
    result, (weights, kept) = correct(old, rollout, mask, keys), weigh(old, rollout, mask, keys)
    torch.testing.assert_close(result.weights[:, 0], torch.tensor([bound, lower or 1 / bound]))
    assert torch.equal(result.weights, weights) and kept.all() and result.mask.all()
    assert result.metrics["mismatch/rollout_is_clipped_fraction"] == 0


settings_of_any_kind = st.builds(
    correction,
    threshold=st.sampled_from([1.05, 2.0, 10.0]),
    lower=st.sampled_from([None, 0.5, 0.99]),
    level=st.sampled_from(LEVELS),
    mode=st.sampled_from(MODES),
    veto=st.sampled_from([None, 1e-4, 0.3]),
    normalize=st.booleans(),
    rules=st.sampled_from([(), *((RejectionRuleConfig(s, level, None, 1.05),) for s in STATISTICS for level in RULE_LEVELS)]),
)


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
            patch.setattr("pellucid.algo.correction.BLOCK_TOKENS", size)
            blocks = correct(old, rollout, mask, settings)
            torch.testing.assert_close(blocks.weights, result.weights, rtol=1e-6, atol=0)
            assert torch.equal(blocks.mask, result.mask) and blocks.metrics == close(result.metrics)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rules", [(), (RejectionRuleConfig("k1", "seq_mean", None, 1.05), RejectionRuleConfig("k3", "token", None, 0.1))])
@pytest.mark.parametrize("level", LEVELS)
def test_the_number_of_threads_changes_no_bit(level, rules, set_threads, monkeypatch):
    monkeypatch.setattr("pellucid.algo.correction.BLOCK_TOKENS", 300)  # three rows
    mask = torch.arange(100) < torch.arange(200)[:, None] * 37 % 101
    rollout = -noise(mask.shape, 1).abs()
    old = rollout + noise(mask.shape, 2, torch.linspace(0.01, 2, len(mask))[:, None])
    settings = correction(2.0, level=level, veto=0.02, normalize=True, rules=rules)
    results = []
    for num_threads in (1, 2, 5):
        set_threads(num_threads)
        results.append(correct(old, rollout, mask, settings))
        assert correct(old, rollout, mask, AlgorithmConfig()).metrics.items() <= results[-1].metrics.items()
    for other in results[1:]:
        assert torch.equal(other.weights, results[0].weights) and torch.equal(other.mask, results[0].mask)
        assert other.metrics == results[0].metrics
    assert 0 < results[0].metrics["mismatch/rollout_is_veto_fraction"] < 1
    monkeypatch.undo()
    assert correct(old, rollout, mask, settings).metrics == close(results[0].metrics)


@quick
@given(mask=ragged_masks, seed=st.integers(0, 99), settings=settings_of_any_kind, scale=st.sampled_from([0.3, 5.0]))
def test_weights_stay_within_their_bounds_and_the_veto_takes_whole_sequences(mask, seed, settings, scale):
    gap = noise(mask.shape, seed, scale)
    weights, _ = weigh(gap, torch.zeros_like(gap), mask, dataclasses.replace(settings, rollout_rs=[]))
    veto = settings.rollout_is_veto_threshold or 0.0
    vetoed = [any(mask[i, t] and math.exp(float(gap[i, t])) < veto for t in range(mask.shape[1])) for i in range(len(mask))]
    assert not weights[~mask].any() and not weights[torch.tensor(vetoed)].any()
    rest = weights[mask & ~torch.tensor(vetoed)[:, None]].double()
    lower = settings.rollout_is_threshold_lower or 1 / settings.rollout_is_threshold
    assert (rest <= settings.rollout_is_threshold * (1 + 1e-6)).all()
    if settings.rollout_is_mode == "truncate":
        assert (rest > 0).all()
    else:
        assert ((rest == 0) | (rest >= lower * (1 - 1e-6))).all()
