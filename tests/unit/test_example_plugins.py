"""The worked examples of own estimators, losses and rewards: what they compute, loaded by the path that a config names."""

import asyncio
from pathlib import Path

import pytest
import torch

from pellucid.agents.llm import Answer
from pellucid.algo.advantages import AdvantageInputs
from pellucid.algo.policy_loss import LossInputs
from pellucid.config.schema.actor import ActorConfig
from pellucid.plugins import load_object
from pellucid.types import Outcome, Prompt

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def load(spec: str):
    return load_object(f"{PLUGINS}/{spec}", "field")


def test_batch_baseline_leaves_failed_samples_out():
    rewards = torch.tensor([[0.0, 3.0, 0.0], [1.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    advantages, returns = load("batch_baseline.py:batch_baseline")(AdvantageInputs(rewards, MASK, torch.tensor([0, 0, 1])))
    assert advantages.tolist() == [[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert torch.equal(returns, advantages)


def test_simple_policy_optimization_is_lowest_where_its_ratio_is_at_the_bound():
    """The derivative of −Aρ + |A|/(2ε)(ρ − 1)² is 0 at ρ = 1 + ε for A > 0, at 1 − ε for A < 0; at ρ = 1 it is −A."""
    advantages, ratios = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[1.3, 0.7, 1.0]])
    logp = ratios.log().requires_grad_()
    inputs = LossInputs(logp, torch.zeros(1, 3), advantages, torch.ones(1, 3, dtype=torch.bool), ActorConfig(clip_ratio_high=0.3))
    loss, metrics = load("simple_policy_optimization.py:spo")(inputs)
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([0.0, 0.0, -2.0], abs=1e-5)
    assert loss[0].tolist() == pytest.approx([-2.6 + 0.3, 1.4 + 0.3, -2.0])
    assert metrics["plugin/ratio_distance"].item() == pytest.approx(0.2)


@pytest.mark.parametrize(("answer", "score", "right"), [(" 94", 1.1, 1.0), ("93", 0.1, 0.0), ("it is 94", 0.0, 0.0)])
def test_brief_answer_scores_right_and_brief_apart(answer, score, right):
    result = load("brief_answer.py:compute_score")("arithmetic", answer, 94, {})
    assert (result["score"], result["acc"]) == pytest.approx((score, right))
    assert result["score"] == pytest.approx(result["right"] + 0.1 * result["brief"])


@pytest.mark.parametrize(
    ("guesses", "said", "found"),
    [(["7"], [""], 1.0), (["3", "", "7"], ["", "+", "-"], 0.5), (["15", "8", "7"], ["", "-", "-"], 0.5), (["1"] * 4, ["", *"+++"], 0.0)],
)
def test_quick_guess_rewards_early_guesses(guesses, said, found):
    class Policy:
        async def complete(self, text):
            heard.append(text)
            return Answer(guesses[len(heard) - 1], "stop")

    heard = []
    outcome = asyncio.run(load("quick_guess.py:quick_guess")(Prompt("a", [], "0-15:", "guess", "7"), Policy(), None))
    assert heard == said and outcome == Outcome({"found": found}, {"guesses": len(guesses)})


def test_the_guide_shows_the_agent_that_is_run():
    guide = (PLUGINS.parents[1] / "docs" / "agents.md").read_text()
    assert f"```python\n{(PLUGINS / 'quick_guess.py').read_text()}```" in guide
