"""A user's own loss or estimator that returns the wrong thing is refused at its first call, by name."""

import pytest
import torch

from pellucid.algo.advantages import AdvantageInputs
from pellucid.algo.policy_loss import LossInputs
from pellucid.config.schema.actor import ActorConfig
from pellucid.errors import UserError
from pellucid.plugins import load_object
from pellucid.roles.plugin_checks import ESTIMATOR_FIELD, LOSS_FIELD, checked_estimator, checked_loss

MASK = torch.tensor([[True, True, False], [True, True, True]])
INPUTS = LossInputs(
    logp=torch.zeros(2, 3, requires_grad=True), old_logp=torch.zeros(2, 3), advantages=torch.ones(2, 3), mask=MASK,
    config=ActorConfig(),
)  # fmt: skip
ADVANTAGE_INPUTS = AdvantageInputs(token_rewards=torch.ones(2, 3), mask=MASK, group=torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda inputs: inputs.logp, "a tensor of shape (2, 3)"),
        (lambda inputs: (inputs.logp.mean(), {}), "the loss as a tensor of shape ()"),
        (lambda inputs: (inputs.logp.sum(dim=1), {}), "(2,)"),
        (lambda inputs: (inputs.logp, {"plugin/each": inputs.logp}), "'plugin/each' as a tensor of shape (2, 3)"),
        (lambda inputs: (-inputs.logp.detach(), {}), "without gradient"),
    ],
)
def test_a_wrong_loss_is_refused(function, words):
    with pytest.raises(UserError) as caught:
        checked_loss(function, "mine.py:loss")(INPUTS)
    assert caught.value.field == LOSS_FIELD and "mine.py:loss" in str(caught.value) and words in str(caught.value)


def test_a_right_loss_passes_and_its_metrics_carry_no_gradient_and_no_other_s_name():
    returned = {"plugin/mean": INPUTS.logp.mean(), "actor/pg_loss": 0.5, "actor/ppo_kl": torch.ones(1)}
    loss, metrics = checked_loss(lambda inputs: (-inputs.logp, returned), "mine.py:loss")(INPUTS)
    assert loss.shape == (2, 3) and loss.requires_grad
    assert metrics.keys() == {"plugin/mean", "plugin/actor/pg_loss", "actor/ppo_kl"}
    assert not any(value.requires_grad or value.shape for value in metrics.values())


NAN_AT_A_TOKEN = torch.tensor([[1.0, float("nan"), 1.0], [1.0, 1.0, 1.0]])
NAN_OUTSIDE = torch.tensor([[1.0, 1.0, float("nan")], [1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    "result",
    [
        torch.ones(2, 3),
        (torch.ones(2), torch.ones(2, 3)),
        (torch.ones(2, 3), None),
        (NAN_AT_A_TOKEN, torch.ones(2, 3)),
        (torch.ones(2, 3), NAN_AT_A_TOKEN),
    ],
)
def test_a_wrong_estimator_is_refused(result):
    with pytest.raises(UserError) as caught:
        checked_estimator(lambda inputs: result, "mine.py:estimate")(ADVANTAGE_INPUTS)
    assert caught.value.field == ESTIMATOR_FIELD


@pytest.mark.parametrize("result", [torch.ones(2, 3), NAN_OUTSIDE])
def test_a_right_estimator_is_masked(result):
    advantages, returns = checked_estimator(lambda inputs: (result, result), "mine.py:estimate")(ADVANTAGE_INPUTS)
    assert torch.equal(advantages, MASK.float()) and torch.equal(returns, MASK.float())


def test_what_a_function_raises_is_one_message_with_its_place(tmp_path):
    source = "def helper(x):\n    return {}[x]\n\ndef mine(inputs):\n    return helper('no such key')\n"
    (tmp_path / "mine.py").write_text(source)
    spec = f"{tmp_path}/mine.py:mine"
    function = load_object(spec, LOSS_FIELD)
    for checked, inputs, field in ((checked_loss, INPUTS, LOSS_FIELD), (checked_estimator, ADVANTAGE_INPUTS, ESTIMATOR_FIELD)):
        with pytest.raises(UserError, match=r"KeyError: .no such key.") as caught:
            checked(function, spec)(inputs)
        assert caught.value.field == field and f"line 2 of {tmp_path}/mine.py" in str(caught.value)


def test_an_error_that_is_not_in_the_user_s_file_has_no_place():
    def raises(inputs):
        raise ValueError

    with pytest.raises(UserError, match=r"fails .ValueError.\."):
        checked_loss(raises, "json:loads")(INPUTS)


def test_a_parameter_that_nothing_fills_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(inputs, value): ...\n")
    spec = f"{tmp_path}/mine.py:mine"
    with pytest.raises(UserError, match=r"'value'.*values, greedy_scores"):
        checked_estimator(load_object(spec, ESTIMATOR_FIELD), spec)
