"""How a response becomes a number: the rule reward, the reward model's score and the overlong penalty, added up.

Rollouts come from the engine; `reward`, `reward_parts` and `failure` are filled in place. Training and validation use it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from pellucid.algo.shaping import overlong_penalty
from pellucid.config.schema.reward_model import RewardConfig
from pellucid.profiler.spans import Lanes, SpanRecorder
from pellucid.reward import Scorer
from pellucid.reward.scorer import ScoreStats
from pellucid.roles.protocol import RewardRole
from pellucid.stages import Stage
from pellucid.types import Rollout

EnterStage = Callable[[Stage, int, int, list[Rollout]], AbstractContextManager[Callable[[int], None]]]
"""From a stage, its step, its number of units and what it scores to a context round it that gives what counts finished ones."""


def _unseen(stage: Stage, step: int, num_units: int, given: list[Rollout]) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda num_finished: None)


@dataclass
class Rewards:
    """The sum `rule_weight · rule + weight · model`, and in training the overlong penalty."""

    config: RewardConfig
    scorer: Scorer
    model: RewardRole | None
    max_response_length: int
    spans: SpanRecorder = field(default_factory=SpanRecorder)

    def score(self, rollouts: list[Rollout], enter: EnterStage = _unseen, *, step: int = 0) -> dict[str, float]:
        """Score a batch for training and return the `reward/*` metrics.

        A rollout's `reward_parts` gain `rule`, `model` and `overlong` where there is more than the rule reward.

        Raises:
            UserError: a task has no verifier, or every call failed.
        """
        stats = self._score_by_rule_and_model(rollouts, enter, step)
        buffer = self.config.overlong_buffer
        if buffer.enable:
            assert buffer.len is not None
            lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
            penalties = overlong_penalty(lengths, self.max_response_length, buffer.len, buffer.penalty_factor)
            for rollout, penalty in zip(rollouts, penalties.tolist()):
                if rollout.reward is not None:
                    rule = {"rule": rollout.reward} if self.config.rule_weight else {}
                    rollout.reward_parts = rule | rollout.reward_parts | {"overlong": penalty}
                    rollout.reward += penalty
        return {
            "reward/num_failures": stats.num_failures,
            "reward/num_timeouts": stats.num_timeouts,
            "reward/time_s": stats.time_s,
        }

    def score_validation(self, rollouts: list[Rollout], on_done: Callable[[int], None] | None = None) -> None:
        """Score held-out answers: by the rule alone where there is one, so that accuracy means what it says."""
        if self.config.rule_weight:
            self.scorer.score(rollouts, on_done and (lambda _: on_done(1)))
        else:
            self._add_model_scores(rollouts, on_done)

    def _score_by_rule_and_model(self, rollouts: list[Rollout], enter: EnterStage, step: int) -> ScoreStats:
        stats = ScoreStats()
        if self.config.rule_weight:
            lanes = Lanes()

            def show(rollout: Rollout, wall_us: int, duration_s: float, ok: bool) -> None:
                lane, uid = lanes.take(wall_us, duration_s), rollout.prompt.uid
                self.spans.record("reward_call", wall_us, duration_s, lane=lane, step=step, uid=uid, ok=ok)

            with enter(Stage.REWARD, step, len(rollouts), rollouts) as advance:
                stats = self.scorer.score(rollouts, on_done=lambda _: advance(1), on_call=show)
        if self.model is not None:
            with enter(Stage.COMPUTE_RM_SCORE, step, len(rollouts), rollouts) as advance:
                self._add_model_scores(rollouts, advance)
        return stats

    def _add_model_scores(self, rollouts: list[Rollout], on_done: Callable[[int], None] | None) -> None:
        assert self.model is not None
        for rollout, score in zip(rollouts, self.model.score(rollouts, on_done=on_done)):
            self._combine(rollout, score)

    def _combine(self, rollout: Rollout, score: float) -> None:
        rule_weight, weight = self.config.rule_weight, self.config.weight
        if not rule_weight:
            rollout.reward, rollout.reward_parts = weight * score, {"model": score}
        elif rollout.reward is not None:
            rollout.reward_parts = {"rule": rollout.reward, **rollout.reward_parts, "model": score}
            rollout.reward = rule_weight * rollout.reward + weight * score
