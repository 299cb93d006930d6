"""How a response becomes a number: the rule reward, the reward model's score and the overlong penalty, added up.

Rollouts come from `produce` and from validation; one `Score` for each goes back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from pellucid.config.schema.reward_model import RewardConfig
from pellucid.reward.scorer import Scorer, no_calls, require_scores
from pellucid.stages import Stage
from pellucid.types import Rollout, Score

EnterStage = Callable[[Stage, int, int, list[Rollout]], AbstractContextManager[Callable[[int], None]]]
"""Encloses a stage of a step, given its number of units and what it works on; gives what counts finished units."""


@dataclass
class Rewards:
    """The sum `rule_weight · rule + weight · model`, and in training the overlong penalty."""

    config: RewardConfig
    scorer: Scorer
    judge: Callable[..., list[float]] | None
    """`score` of the reward model, in this process or on ranks."""
    max_response_length: int
    show_call: Callable[..., object]
    """Shows a reward call on the timeline: its name, start in microseconds since 1970, seconds, and what is shown with
    it."""

    def score(
        self, rollouts: list[Rollout], enter: EnterStage, *, step: int, in_part: bool = False
    ) -> tuple[list[Score], dict[str, float]]:
        """Return one score a rollout, for training, and the `reward/*` metrics.

        The scores' `parts` gain `rule`, `model` and `overlong` where there is more than the rule reward.

        Raises:
            UserError: a task has no verifier, or every call failed; of a batch that is scored `in_part` all may fail.
        """

        def show(rollout: Rollout, wall_us: int, duration_s: float, failure: str, last: bool) -> None:
            about = {"failure": failure, "last": last} if failure else {}
            about |= {"uid": rollout.prompt.uid, "ok": not failure}
            self.show_call("reward_call", wall_us, duration_s, step=step, **about)

        scores, metrics = [Score(None)] * len(rollouts), no_calls()
        if self.config.rule_weight:
            with enter(Stage.REWARD, step, len(rollouts), rollouts) as advance:
                scores, metrics = self.scorer.score(rollouts, lambda: advance(1), show)
                if not in_part:
                    require_scores(scores)
        if self.judge is not None:
            with enter(Stage.COMPUTE_RM_SCORE, step, len(rollouts), rollouts) as advance:
                by_model = self.judge(rollouts, on_done=advance)
            scores = [self._combine(score, judged) for score, judged in zip(scores, by_model)]
        return self._shape(rollouts, scores), metrics

    def score_validation(self, rollouts: list[Rollout], on_done: Callable[[int], None] | None = None) -> list[Score]:
        """Score held-out answers: by the rule alone where there is one, so that accuracy means what it says."""
        if self.config.rule_weight or self.judge is None:
            return require_scores(self.scorer.score(rollouts, on_done and (lambda: on_done(1)))[0])
        return [self._combine(Score(None), judged) for judged in self.judge(rollouts, on_done=on_done)]

    def _combine(self, score: Score, by_model: float) -> Score:
        rule_weight, weight = self.config.rule_weight, self.config.weight
        if not rule_weight:
            return Score(weight * by_model, {"model": by_model})
        if score.reward is None:
            return score
        parts = {"rule": score.reward, **score.parts, "model": by_model}
        return Score(rule_weight * score.reward + weight * by_model, parts)

    def _shape(self, rollouts: list[Rollout], scores: list[Score]) -> list[Score]:
        """Add the penalty of responses that come close to the limit (DAPO, arXiv 2503.14476)."""
        buffer = self.config.overlong_buffer
        if not buffer.enable or buffer.len is None:
            return scores
        lengths = torch.tensor([rollout.num_sampled for rollout in rollouts])
        penalties = overlong_penalty(lengths, self.max_response_length, buffer.len, buffer.penalty_factor).tolist()
        shaped: list[Score] = []
        for score, penalty in zip(scores, penalties):
            if score.reward is not None:
                rule = {"rule": score.reward} if self.config.rule_weight else {}
                parts = rule | score.parts | {"overlong": penalty}
                score = replace(score, reward=score.reward + penalty, parts=parts)
            shaped.append(score)
        return shaped


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer_length: int, factor: float) -> torch.Tensor:
    """Return 0 to −factor ([B] float32) over the last `buffer_length` tokens before `max_length`, from [B] lengths."""
    excess = lengths.float() - (max_length - buffer_length)
    return -factor * (excess / buffer_length).clamp(0.0, 1.0)
