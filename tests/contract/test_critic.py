"""The critic: values of the state before each token, an update that does not depend on the cut, and a safe state."""

from dataclasses import replace

import pytest
import torch
from corrected import CUTS, FAILED, WHOLE, engine_of, gradient, relative, some_batch, tiny_engine, weights_of
from tiny import tiny_model

from pellucid.config.schema.critic import CriticConfig
from pellucid.roles.critic import Critic
from pellucid.training.common.models import output_head
from pellucid.training.common.packing import TokenSequence, pack
from pellucid.types import Samples, TrainBatch


def value_model(seed: int = 0, scale: float = 0.1):
    """A tiny model whose head gives one number, large enough to tell states apart."""
    model = tiny_model("llama", seed=seed, scale=scale)
    head = torch.nn.Linear(output_head(model).in_features, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(0.2 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    model.set_output_embeddings(head)
    return model


def critic_of(engine, **options) -> Critic:
    config = CriticConfig(strategy="fsdp2", ppo_mini_batch_size=8, **options)
    return Critic(engine, config, max_response_length=12, seed=0)


def critic_batch(critic: Critic, *, given: bool = False) -> TrainBatch:
    """Returns some way from the values, so that some values are held by the clip."""
    batch = some_batch(tiny_engine(), given=given)
    values = critic.compute_values(batch)
    generator = torch.Generator().manual_seed(8)
    returns = (values + torch.randn(values.shape, generator=generator)) * batch.mask
    values = (values + 0.5 * torch.randn(values.shape, generator=generator)) * batch.mask
    return replace(batch, values=values, returns=returns)


@torch.no_grad()
def values_by_hand(model, batch: Samples) -> torch.Tensor:
    """The head at the last token of prompt + response[:t], one forward pass a token."""
    values = torch.zeros(batch.mask.shape)
    for row, rollout in enumerate(batch.rollouts):
        for t in range(len(rollout.token_ids)):
            alone = pack([TokenSequence(rollout.prompt.token_ids + rollout.token_ids[:t], [], 0)], torch.device("cpu"))
            hidden = model.get_decoder()(
                input_ids=alone.input_ids, position_ids=alone.position_ids, use_cache=False, layout=alone.layout
            ).last_hidden_state
            values[row, t] = output_head(model)(hidden)[0, -1, 0]
    return values


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_values_are_of_the_state_before_the_token_and_zero_at_padding(cut, given):
    model, batch = value_model(), some_batch(tiny_engine(), given=given)
    expected = values_by_hand(model, batch)
    values = critic_of(engine_of(model, CUTS[cut])).compute_values(batch)
    assert values.std() > 0.01
    torch.testing.assert_close(values, expected * batch.mask, rtol=0, atol=1e-5)
    assert not values[~batch.mask].any() and not values[FAILED].any()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_gradient_does_not_depend_on_the_cut(mode, tmp_path):
    batch = critic_batch(critic_of(engine_of(value_model())))
    gradients, metrics = {}, {}
    for name, cut in CUTS.items():
        engine = engine_of(value_model(), cut, lr=0.0)
        metrics[name] = critic_of(engine, loss_agg_mode=mode, cliprange_value=0.3).update(batch, step=1)
        gradients[name] = gradient(engine, tmp_path / name)
    assert 0 < metrics["whole"]["critic/vf_clipfrac"] < 1
    for name in CUTS:
        assert relative(gradients[name], gradients["whole"]) < 1e-6, name
        assert metrics[name] == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in metrics["whole"].items()}


@pytest.mark.parametrize("given", [False, True])
def test_the_loss_is_half_the_larger_of_two_squares_averaged_over_tokens(given):
    model = value_model()
    batch = critic_batch(critic_of(engine_of(model)), given=given)
    values = values_by_hand(model, batch)
    terms, errors, returns = [], [], []
    for row, t in batch.mask.nonzero().tolist():
        value, old, target = (float(tensor[row, t]) for tensor in (values, batch.values, batch.returns))
        held = min(max(value, old - 0.3), old + 0.3)
        terms.append(0.5 * max((value - target) ** 2, (held - target) ** 2))
        errors.append(target - old)
        returns.append(target)
    metrics = critic_of(engine_of(model, lr=0.0), cliprange_value=0.3).update(batch, step=1)
    assert metrics["critic/vf_loss"] == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    variances = [torch.tensor(numbers, dtype=torch.float64).var().item() for numbers in (errors, returns)]
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - variances[0] / variances[1], rel=1e-4)


def test_updates_lower_the_value_loss():
    engine = engine_of(value_model(), lr=1e-4)
    critic = critic_of(engine, cliprange_value=100.0)
    batch = critic_batch(critic)
    losses = [critic.update(batch, step=step)["critic/vf_loss"] for step in range(1, 9)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    assert engine.version == 8


def test_epochs_and_mini_batches_are_the_critic_s_own():
    engine = engine_of(value_model())
    critic = critic_of(engine)
    batch = critic_batch(critic)
    config = CriticConfig(strategy="fsdp2", ppo_mini_batch_size=2, ppo_epochs=3, shuffle=True)
    Critic(engine, config, max_response_length=12, seed=0).update(batch, step=1)
    assert engine.version == 3 * 2, "three epochs over three groups, two groups an optimizer step"


def test_save_and_load_continue_bitwise(tmp_path):
    straight = engine_of(value_model())
    batch = critic_batch(critic_of(straight))
    critic_of(straight).update(batch, step=1)
    straight.save(tmp_path, ["model", "optimizer"])
    resumed = engine_of(value_model(seed=1), WHOLE)
    resumed.load(tmp_path, ["model", "optimizer"])
    assert resumed.version == 1
    again = [critic_of(engine).update(batch, step=2) for engine in (straight, resumed)]
    assert again[0] == again[1]
    ours, theirs = weights_of(resumed), weights_of(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
