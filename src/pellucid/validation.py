"""Validation: responses to the held-out prompts, scored, as `val/<task>/*` metrics.

Used by the loop before, during and after training, and by `pellucid eval`.
"""

from collections import defaultdict
from collections.abc import Callable

from pellucid.agents.llm import SINGLE_TURN, AgentLoop, sample_rollouts
from pellucid.console import notice
from pellucid.failures import GenerateCall
from pellucid.metrics.trackers import Shown
from pellucid.produce import sampling_params
from pellucid.reward.call import VERIFIER
from pellucid.rollout.requests import RolloutEngine, SamplingParams
from pellucid.run import Run
from pellucid.stages import Stage
from pellucid.types import Prompt, Rollout, Score

STREAM = ("validate",)
"""The same random stream at every validation: two validations differ by the weights alone."""


def validate(run: Run, step: int) -> dict[str, float]:
    """Answer and score the run's validation prompts; return the metrics."""
    config = run.config.actor_rollout_ref.rollout
    params = sampling_params(config, config.val_kwargs)
    call = GenerateCall(run.val_prompts, params, STREAM)
    with run.stage(Stage.VALIDATE, step, len(run.val_prompts) * config.val_kwargs.n, call) as advance:
        rollouts, scores = answer(
            run.roles.engine_of(Stage.VALIDATE),
            # Answers are what is counted; their scores only say that validation goes on.
            lambda rollouts: run.rewards.score_validation(rollouts, lambda _: advance(0)),
            run.val_prompts,
            params,
            batch_size=run.config.data.val_batch_size,
            on_done=advance,
            loop=run.loop,
        )
    shown = zip(rollouts[: run.config.trainer.log_val_generations], scores)
    run.trackers.show(step, lambda: Shown(samples=[sample_row(*pair) for pair in shown]))
    return validation_metrics(rollouts, scores, with_accuracy=bool(run.config.reward_model.rule_weight))


def sample_row(rollout: Rollout, score: Score) -> dict[str, str | float]:
    """Return what a table of samples has of one."""
    prompt, reward = rollout.prompt, float("nan") if score.reward is None else score.reward
    row = {"uid": prompt.uid, "prompt": prompt.text, "response": rollout.text, "answer": str(prompt.answer)}
    return row | {"reward": reward}


def answer(
    engine: RolloutEngine,
    score: Callable[[list[Rollout]], list[Score]],
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    batch_size: int | None,
    on_done: Callable[[int], None] | None = None,
    loop: AgentLoop = SINGLE_TURN,
) -> tuple[list[Rollout], list[Score]]:
    """Return rollouts for `prompts` and their scores, generated `batch_size` prompts at a time (None: all at once)."""
    rollouts: list[Rollout] = []
    scores: list[Score] = []
    size = batch_size or max(len(prompts), 1)
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        batch = sample_rollouts(engine, part, params, stream=STREAM, on_done=on_done, loop=loop)
        scores += score(batch)
        rollouts += batch
    return rollouts, scores


def is_correct(score: Score) -> bool:
    """Tell whether an answer counts as right: its `acc` component where the reward gives one, else a score of at least
    1 of the verifier among several functions, or of the reward itself.
    """
    return score.parts.get("acc", score.parts.get(VERIFIER, score.reward or 0.0)) >= 1


def validation_metrics(rollouts: list[Rollout], scores: list[Score], *, with_accuracy: bool = True) -> dict[str, float]:
    """Return `val/<task>/{accuracy,reward,num}`, and `pass@k` where a prompt has several samples.

    `with_accuracy` is False where a reward model alone scores: nothing then says what is right, and only the reward is
    left. Samples whose reward call failed are left out and counted in a notice. pass@k is the unbiased estimator of
    arXiv 2107.03374.
    """
    by_task: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for rollout, score in zip(rollouts, scores):
        if score.failure is None:
            by_task[rollout.prompt.task][rollout.prompt.uid].append(score)
    num_failed = sum(score.failure is not None for score in scores)
    if num_failed:
        notice(
            f"validation: {num_failed} of {len(scores)} reward calls failed; those samples are left out of the "
            "accuracy."
        )
    metrics: dict[str, float] = {}
    for task, problems in by_task.items():
        valid = [score for samples in problems.values() for score in samples]
        metrics[f"val/{task}/reward"] = sum(score.reward or 0.0 for score in valid) / len(valid)
        metrics[f"val/{task}/num"] = len(problems)
        if not with_accuracy:
            continue
        metrics[f"val/{task}/accuracy"] = sum(map(is_correct, valid)) / len(valid)
        k = min(len(samples) for samples in problems.values())
        if k > 1:
            counts = [(len(samples), sum(map(is_correct, samples))) for samples in problems.values()]
            metrics[f"val/{task}/pass@{k}"] = sum(_pass_at_k(n, correct, k) for n, correct in counts) / len(counts)
    return metrics


def _pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 − C(n−c, k)/C(n, k), the chance that k of n samples drawn without replacement hold a correct one."""
    miss = 1.0
    for index in range(k):
        miss *= max(0, num_samples - num_correct - index) / (num_samples - index)
    return 1.0 - miss
