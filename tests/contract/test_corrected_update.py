"""Updates with rollout correction, bypass mode and the exact KL: real training steps of the real actor on tiny models.

What a loss with weights must be is worked out with autograd through plain transformers, sample by sample.
"""

import math
from dataclasses import replace

import pytest
import torch
from corrected import (
    CUTS,
    FAILED,
    TEMPERATURE,
    WHOLE,
    actor_of,
    correction_keys,
    engine_of,
    gradient,
    own_batch,
    relative,
    some_batch,
    tiny_engine,
    weights_of,
)
from tiny import CPU, plain_copy, tiny_model

from pellucid.algo.catalog import POLICY_LOSSES
from pellucid.algo.correction import correct
from pellucid.config.schema.algorithm import AlgorithmConfig, RejectionRuleConfig
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.lora import add_lora, merged_tensors
from pellucid.training.common.packing import sequences_of
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Rollout, Samples

LEVELS = ("token", "sequence", "geometric")


def corrected_batch(settings: AlgorithmConfig, **gap):
    """The batch as the loop hands it to the actor after `correct`."""
    batch = own_batch(**gap)
    correction = correct(batch.old_logp, batch.rollout_logp, batch.mask, settings)
    return replace(batch, correction_weights=correction.weights, loss_mask=correction.mask)


@pytest.mark.parametrize(("level", "mode"), [("token", "truncate"), ("sequence", "clip"), ("geometric", "truncate")])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_takes_every_correction(loss, level, mode):
    settings = correction_keys(threshold=1.3, level=level, mode=mode)
    batch, engine = corrected_batch(settings), tiny_engine()
    inside = batch.correction_weights[batch.loss_mask]
    assert 0 < (inside == (1.3 if mode == "truncate" else 0.0)).float().mean() < 1, "the bound must act on some and not on all"
    before = weights_of(engine)
    metrics = actor_of(engine, loss).update(batch, step=1).metrics
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["actor/grad_norm"] > 0
    after = weights_of(engine)
    assert engine.version == 1 and all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in before)

    plain = own_batch()
    uncorrected = actor_of(tiny_engine(), loss).update(plain, step=1).metrics
    assert metrics["actor/pg_loss"] != uncorrected["actor/pg_loss"], "the weights must enter the loss"
    same = {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/pg_covfrac", "actor/entropy", "actor/lr"} & set(metrics)
    assert {name: metrics[name] for name in same} == {name: uncorrected[name] for name in same}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_weights_of_one_change_not_a_bit(loss):
    results = []
    for weighted in (False, True):
        engine, batch = tiny_engine(CUTS["tokens"]), own_batch()
        if weighted:
            batch = replace(batch, correction_weights=batch.mask.float())
        actor = actor_of(engine, loss, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01, ppo_epochs=2)
        results.append((actor.update(batch, step=1).metrics, weights_of(engine)))
    (metrics, weights), (weighted_metrics, weighted_weights) = results
    assert metrics == weighted_metrics
    assert all(torch.equal(weights[name], weighted_weights[name]) for name in weights)


def test_equal_policies_are_corrected_by_exactly_one():
    """With π_rollout = π_old the weights that `correct` returns are 1, so a corrected run is the plain one, bit for bit."""
    batch = corrected_batch(correction_keys(threshold=2.0), gap=0.0)
    assert torch.equal(batch.correction_weights, batch.loss_mask.float())


# --- the gradient -----------------------------------------------------------------------------------------------------


def aggregation_by_hand(batch, loss: str, row: int) -> float:
    """The weight of each token of a sample: 1/tokens, or 1/(its length × samples) for means over sequences."""
    lengths = [
        rollout.num_sampled * (score.failure is None) for rollout, score in zip(batch.rollouts, batch.scores)
    ]
    if POLICY_LOSSES[loss].sequence_mean:
        return 1 / lengths[row] / sum(length > 0 for length in lengths)
    return 1 / sum(lengths)


def loss_by_hand(loss: str, d, logp, advantages):
    """Per-token losses of one sample from d = logp − old_logp, for the losses whose formula is short."""
    ratio = d.exp()
    if loss == "gpg":
        return -advantages * logp
    if loss == "vanilla":
        ppo = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        return torch.where(advantages < 0, torch.minimum(ppo, -3 * advantages), ppo)
    if loss == "cispo":
        return -ratio.detach().clamp(0.8, 1.2) * advantages * logp
    if loss == "dro":
        return -(advantages * logp - 0.05 * d.square())
    if loss == "gspo":
        sequence = d.mean().detach().exp() * (logp - logp.detach()).exp()
        return torch.maximum(-advantages * sequence, -advantages * sequence.clamp(0.8, 1.2))
    if loss == "sapo":
        tau = torch.where(advantages > 0, 1.0, 1.05)
        return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    assert loss == "geo_mean"
    sign = advantages.sign()
    m = sign * torch.minimum(sign * d, sign * d.clamp(-0.2, 0.2))
    return (-advantages.mean() * m.mean().exp()).expand(len(d))


def gradient_by_hand(batch, loss: str, weights):
    """Autograd through plain transformers of Σ aggregation · weight · loss, sample by sample; and the sum itself."""
    model = tiny_model("llama", scale=0.1)
    plain, total = plain_copy("llama", model), 0.0
    for row, rollout in enumerate(batch.rollouts):
        length, prompt = len(rollout.token_ids), rollout.prompt.token_ids
        if not batch.loss_mask[row].any():
            continue
        logits = plain(torch.tensor([prompt + rollout.token_ids])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logp = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        weight, sampled = weights(row, logp.detach()), torch.tensor(rollout.sampled)
        gap, advantages = logp - batch.old_logp[row, :length], batch.advantages[row, :length]
        value, weight = loss_by_hand(loss, gap[sampled], logp[sampled], advantages[sampled]), weight[sampled]
        if loss == "geo_mean":
            weight = torch.full_like(weight, math.exp(weight.log().mean()) if weight.min() > 0 else 0.0)
        term = aggregation_by_hand(batch, loss, row) * (weight * value).sum()
        term.backward()
        total += term.item()
    named = dict(plain.named_parameters())
    return torch.cat([named[name].grad.flatten() for name in sorted(named)]), total


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "sapo", "gpg", "geo_mean", "cispo", "dro"])
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_the_gradient_carries_the_weights_exactly(loss, level, tmp_path):
    batch = corrected_batch(correction_keys(threshold=1.5, level=level))
    expected, total = gradient_by_hand(
        batch, loss, lambda row, logp: batch.correction_weights[row, : len(logp)]
    )
    engine = tiny_engine(CUTS["tokens"], lr=0.0)
    metrics = actor_of(engine, loss).update(batch, step=1).metrics
    assert relative(gradient(engine, tmp_path), expected) < 3e-6
    assert metrics["actor/pg_loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("cut", ["one-by-one", "tokens"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "sapo", "gpg", "geo_mean", "cispo", "dro"])
def test_given_tokens_are_read_and_not_trained_on(loss, cut, tmp_path):
    """Advantages and old log-probs at given tokens are NaN here: nothing may look at them."""
    batch = corrected_batch(correction_keys(threshold=1.5), given=True)
    batch = replace(batch, advantages=batch.advantages.masked_fill(~batch.mask, math.nan))
    expected, total = gradient_by_hand(
        batch, loss, lambda row, logp: batch.correction_weights[row, : len(logp)]
    )
    engine = tiny_engine(CUTS[cut], lr=0.0)
    updated = actor_of(engine, loss).update(batch, step=1)
    assert relative(gradient(engine, tmp_path), expected) < 3e-6
    assert updated.metrics["actor/pg_loss"] == pytest.approx(total, rel=1e-5)


def test_log_probs_of_given_tokens_are_zero():
    engine, reference = tiny_engine(), tiny_model("llama", seed=1)
    batch = some_batch(engine, given=True)
    actor = actor_of(engine, "vanilla", exact_kl_to=frozen(reference))
    computed = actor.compute_log_probs(batch, exact_kl=True)
    everything = [Rollout.single_turn(r.prompt, r.sample, r.token_ids, r.logprobs, r.versions, "stop") for r in batch.rollouts]
    whole = actor.compute_log_probs(Samples.pad(everything, batch.scores), exact_kl=True)
    assert 0 < batch.mask.sum() < sum(len(rollout.token_ids) for rollout in batch.rollouts)
    torch.testing.assert_close(computed.logp, whole.logp * batch.mask, rtol=0, atol=1e-6)
    torch.testing.assert_close(computed.exact_kl, whole.exact_kl * batch.mask, rtol=0, atol=1e-6)
    assert (whole.logp[~batch.mask] != 0).any(), "the model does score such tokens when asked to"


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_weights_multiply_the_losses_that_select_tokens(loss, tmp_path):
    """Where the selection cannot be repeated by hand: a gradient linear in the weights, halved by weights of one half."""
    gradients = []
    for weight in (1.0, 0.5):
        batch, engine = own_batch(), tiny_engine(lr=0.0)
        batch = replace(batch, correction_weights=weight * batch.mask)
        actor_of(engine, loss).update(batch, step=1)
        gradients.append(gradient(engine, tmp_path / str(weight)))
    assert relative(2 * gradients[1], gradients[0]) < 1e-6


@pytest.mark.parametrize("loss", ["vanilla", "clip_cov", "kl_cov", "geo_mean"])
def test_the_gradient_does_not_depend_on_the_cut(loss, tmp_path):
    gradients, metrics = {}, {}
    for name, cut in CUTS.items():
        batch, engine = corrected_batch(correction_keys(threshold=1.5)), tiny_engine(cut, lr=0.0)
        metrics[name] = actor_of(engine, loss).update(batch, step=1).metrics
        gradients[name] = gradient(engine, tmp_path / name)
    if loss.endswith("cov"):
        assert 0 < metrics["whole"]["actor/pg_covfrac"] < 0.5
    for name in CUTS:
        assert relative(gradients[name], gradients["whole"]) < 1e-6, name
        assert metrics[name] == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in metrics["whole"].items()}


def test_the_choice_of_tokens_is_the_run_s_seed_s_and_the_step_s():
    """clip_cov draws at random: the same step draws the same tokens, another step others."""
    updates = [actor_of(tiny_engine(lr=0.0), "clip_cov").update(own_batch(), step=step) for step in (1, 1, 2)]
    losses = [updated.metrics["actor/pg_loss"] for updated in updates]
    assert losses[0] == losses[1] != losses[2]


# --- bypass mode ------------------------------------------------------------------------------------------------------


def bypass_batch():
    """π_old is the rollout policy itself, as the loop sets it."""
    batch = own_batch()
    return replace(batch, old_logp=batch.rollout_logp)


def test_bypass_ppo_clip_is_ppo_with_the_ratio_to_the_rollout_policy(tmp_path):
    batch = bypass_batch()
    expected, total = gradient_by_hand(batch, "vanilla", lambda row, logp: torch.ones_like(logp))
    engine = tiny_engine(CUTS["one-by-one"], lr=0.0)
    updated = actor_of(engine, "vanilla", bypass=correction_keys(threshold=None)).update(batch, step=1)
    assert relative(gradient(engine, tmp_path), expected) < 3e-6
    assert updated.metrics["actor/pg_loss"] == pytest.approx(total, rel=1e-5)
    inside = batch.mask.any(dim=1)
    recorded = engine.forward(sequences_of(batch.rollouts), LogProbHead(TEMPERATURE)).logp * batch.mask
    torch.testing.assert_close(updated.training_logp[inside], recorded[inside], rtol=0, atol=1e-5)
    assert updated.training_logp[FAILED].isnan().all(), "a row that is not trained on has no training log-probs"
    entropy = engine.forward(sequences_of(batch.rollouts), LogProbHead(TEMPERATURE, with_entropy=True)).entropy
    torch.testing.assert_close(updated.entropy[inside], (entropy * batch.mask)[inside], rtol=0, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_bypass_reinforce_weights_the_plain_gradient_explicitly(level, tmp_path):
    """−A · logp times sg(π_θ/π_rollout), truncated: no clip of PPO's."""
    batch = bypass_batch()

    def weights(row, logp):
        gap = logp - batch.rollout_logp[row, : len(logp)]
        of_level = {"token": gap, "sequence": gap.sum().expand(len(gap)), "geometric": gap.mean().expand(len(gap))}[level]
        return of_level.exp().clamp(max=1.2)

    expected, total = gradient_by_hand(batch, "gpg", weights)
    engine = tiny_engine(CUTS["tokens"], lr=0.0)
    metrics = actor_of(engine, "gpg", bypass=correction_keys(threshold=1.2, level=level)).update(batch, step=1).metrics
    assert relative(gradient(engine, tmp_path), expected) < 3e-6
    assert metrics["actor/pg_loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("loss", ["vanilla", "gpg"])
@pytest.mark.parametrize("threshold", [None, 1.2])
def test_bypass_with_rejection_rules(loss, threshold, tmp_path):
    """A token out of bounds, and every token of a sequence whose mean k3 is too large, add nothing."""
    batch = bypass_batch()
    rules = (RejectionRuleConfig("k1", "token", 0.6, 1.6), RejectionRuleConfig("k3", "seq_mean", None, 0.1))
    rejected = []

    def weights(row, logp):
        gap = logp - batch.rollout_logp[row, : len(logp)]
        keep = (gap.exp() >= 0.6) & (gap.exp() <= 1.6)
        if float((gap.exp() - gap - 1).mean()) > 0.1:
            keep = torch.zeros_like(keep)
        rejected.extend((~keep).tolist())
        return keep.float() * (1.0 if threshold is None else gap.exp().clamp(max=threshold))

    expected, total = gradient_by_hand(batch, loss, weights)
    assert 0 < sum(rejected) < len(rejected)
    engine = tiny_engine(CUTS["one-by-one"], lr=0.0)
    metrics = actor_of(engine, loss, bypass=correction_keys(threshold=threshold, rules=rules)).update(batch, step=1).metrics
    assert relative(gradient(engine, tmp_path), expected) < 3e-6
    assert metrics["actor/pg_loss"] == pytest.approx(total, rel=1e-5)


# --- the exact KL -----------------------------------------------------------------------------------------------------


def dense_kl(policy, reference, batch):
    """Σ_v π (log π − log π_ref) by plain transformers in float64; [B, T], with gradient to the policy."""
    rows = []
    for rollout in batch.rollouts:
        ids, start = torch.tensor([rollout.prompt.token_ids + rollout.token_ids]), len(rollout.prompt.token_ids) - 1
        p, q = ((model(ids).logits[0, start:-1].double() / TEMPERATURE).log_softmax(-1) for model in (policy, reference))
        rows.append((p.exp() * (p - q.detach())).sum(-1))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def frozen(model) -> FsdpEngine:
    return FsdpEngine(model.requires_grad_(False), None, WHOLE, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("cut", ["whole", "tokens"])
def test_exact_kl_equals_the_dense_one(cut):
    policy, reference = tiny_model("llama"), tiny_model("llama", seed=1)
    engine = engine_of(policy, CUTS[cut])
    batch = some_batch(engine)
    expected = dense_kl(plain_copy("llama", policy), plain_copy("llama", reference), batch).detach() * batch.mask
    assert expected[batch.mask].min() > 0.01
    actor = actor_of(engine, "vanilla", exact_kl_to=frozen(reference))
    computed = actor.compute_log_probs(batch, exact_kl=True)
    torch.testing.assert_close(computed.exact_kl.double(), expected, rtol=1e-4, atol=1e-4)
    assert not computed.exact_kl[~batch.mask].any()
    without = actor.compute_log_probs(batch)
    assert without.exact_kl is None and torch.equal(without.logp, computed.logp)


def test_gradient_of_the_exact_kl_in_the_loss(tmp_path):
    """With advantages of 0 the KL term is all there is."""
    policy, reference = tiny_model("llama", scale=0.1), tiny_model("llama", seed=1, scale=0.1)
    plain = plain_copy("llama", policy)
    batch = own_batch()
    kl = (dense_kl(plain, plain_copy("llama", reference), batch) * batch.mask).sum() / batch.mask.sum()
    (0.5 * kl).backward()
    named = dict(plain.named_parameters())
    expected, gradients = torch.cat([named[name].grad.flatten() for name in sorted(named)]), {}
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    for name, cut in CUTS.items():
        engine = tiny_engine(cut, lr=0.0)
        actor = actor_of(engine, "vanilla", exact_kl_to=frozen(reference), use_kl_loss=True, kl_loss_type="full", kl_loss_coef=0.5)
        metrics = actor.update(batch, step=1).metrics
        assert metrics["actor/kl_loss"] == pytest.approx(kl.item(), rel=1e-4)
        gradients[name] = gradient(engine, tmp_path / name)
        assert relative(gradients[name], expected) < 1e-5, name
        assert relative(gradients[name], gradients["whole"]) < 1e-6, name


def test_under_lora_the_reference_is_the_base_with_its_adapters_off():
    base = plain_copy("llama", tiny_model("llama"))
    model = add_lora(tiny_model("llama"), rank=2, alpha=4, target_modules="all-linear", seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    engine = FsdpEngine(model, None, WHOLE, device=CPU, dtype=torch.float32)
    reference = FsdpEngine(model, None, WHOLE, device=CPU, dtype=torch.float32, without_adapters=True)
    batch = some_batch(engine)
    exact_kl = actor_of(engine, "vanilla", exact_kl_to=reference).compute_log_probs(batch, exact_kl=True).exact_kl
    merged = plain_copy("llama", tiny_model("llama"))
    merged.load_state_dict(merged_tensors(model))
    expected = dense_kl(merged, base, batch).detach() * batch.mask
    assert expected[batch.mask].mean() > 0.01
    torch.testing.assert_close(exact_kl.double(), expected, rtol=1e-3, atol=1e-4)


def test_rejected_tokens_keep_their_entropy():
    """The rollout dump shows it; only padding and given tokens have none."""
    engine, batch = tiny_engine(), own_batch()
    head = LogProbHead(TEMPERATURE, with_entropy=True)
    expected = engine.forward(sequences_of(batch.rollouts), head).entropy * batch.mask
    thinner = batch.mask.clone()
    thinner[:, 0] = False
    updated = actor_of(engine, "vanilla", entropy_coeff=0.01).update(replace(batch, loss_mask=thinner), step=1)
    trained = thinner.any(dim=1)  # the others are in no mini-batch
    assert float(expected[trained, 0].min()) > 0
    torch.testing.assert_close(updated.entropy[trained], expected[trained], rtol=0, atol=1e-6)
