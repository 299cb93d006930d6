"""Prompts in, a scored batch out: sampling, dynamic sampling with refill, and the greedy baseline of ReMax.

The first stages of a step; `step.py` calls `collect` and `make_batch`.
"""

from itertools import count

import torch

from pellucid.config.schema.rollout import RolloutConfig
from pellucid.controller.build import Run
from pellucid.controller.failures import GenerateCall
from pellucid.errors import UserError
from pellucid.rollout.protocol import SamplingParams
from pellucid.stages import Stage
from pellucid.types import Batch, Prompt, RewardFailure, Rollout


def training_sampling(config: RolloutConfig) -> SamplingParams:
    """Return how a training step samples."""
    return _sampling(config, config.n, config.temperature, config.top_p, config.top_k, config.do_sample)


def validation_sampling(config: RolloutConfig) -> SamplingParams:
    """Return how validation samples: greedily unless `rollout.val_kwargs` says otherwise."""
    val = config.val_kwargs
    return _sampling(config, val.n, val.temperature, val.top_p, val.top_k, val.do_sample)


def greedy_sampling(config: RolloutConfig) -> SamplingParams:
    """Return how the one most likely response to a prompt is made."""
    return _sampling(config, n=1, temperature=1.0, top_p=1.0, top_k=-1, do_sample=False)


def _sampling(
    config: RolloutConfig, n: int, temperature: float, top_p: float, top_k: int, do_sample: bool
) -> SamplingParams:
    return SamplingParams(
        n=n,
        max_tokens=config.response_length,
        temperature=temperature if do_sample else 1.0,  # greedy: whatever it is set to, nothing is divided by it
        top_p=top_p,
        top_k=top_k,
        do_sample=do_sample,
        ignore_eos=config.ignore_eos,
        stop=config.stop,
    )


def collect(run: Run, step: int) -> tuple[list[Rollout], dict[str, float]]:
    """Sample and score `rollout.n` responses to each of `train_batch_size` prompts.

    With `algorithm.filter_groups`, groups without spread in its metric are dropped and further prompts are drawn (DAPO,
    arXiv 2503.14476).

    Returns:
        The rollouts, group by group, and the metrics of sampling and reward.

    Raises:
        UserError: `max_num_gen_batches` batches did not give enough groups.
    """
    filtering, wanted = run.config.algorithm.filter_groups, run.config.data.train_batch_size
    kept: list[list[Rollout]] = []
    metrics: dict[str, float] = {}
    num_dropped = 0
    for draw in count(1):
        # A prompt that comes round again within a step would join the group it already has.
        taken = {group[0].prompt.uid for group in kept}
        prompts = [prompt for prompt in run.loader.next_batch() if prompt.uid not in taken]
        stream = ("rollout", step) if draw == 1 else ("rollout", step, draw)
        rollouts = _generate(run, prompts, training_sampling(run.config.actor_rollout_ref.rollout), stream, step)
        drawn = run.rewards.score(rollouts, run.stage, step=step) | {"perf/total_num_tokens": num_tokens(rollouts)}
        metrics = {name: metrics.get(name, 0.0) + value for name, value in drawn.items()}
        if not filtering.enable:
            return rollouts, metrics
        groups = _groups(rollouts)
        useful = [group for group in groups if _has_spread(group, filtering.metric)]
        num_dropped += len(groups) - len(useful)
        kept += useful
        if len(kept) >= wanted:
            metrics |= {"batch/num_gen_batches": draw, "batch/num_groups_dropped": num_dropped}
            return [rollout for group in kept[:wanted] for rollout in group], metrics
        if draw == filtering.max_num_gen_batches:
            raise UserError(
                "algorithm.filter_groups.max_num_gen_batches",
                f"{draw} generation batches of {wanted} prompts gave {len(kept)} groups whose '{filtering.metric}' differs "
                f"within the group; the step needs {wanted}. In the other {num_dropped} all samples got the same: the "
                "problems are too easy or too hard for the policy.",
                "Raise it (0 = no limit), raise rollout.n, change the data's difficulty, or set filter_groups.enable: false.",
            )
    raise AssertionError("unreachable")


def num_tokens(rollouts: list[Rollout]) -> float:
    """Return the prompt and response tokens of the samples."""
    return float(sum(len(rollout.prompt.token_ids) + len(rollout.token_ids) for rollout in rollouts))


def _generate(
    run: Run, prompts: list[Prompt], params: SamplingParams, stream: tuple[str | int, ...], step: int
) -> list[Rollout]:
    call = GenerateCall(prompts, params, stream)
    with run.stage(Stage.ROLLOUT_GENERATE, step, len(prompts) * params.n, call) as advance:
        return run.rollout_engine.generate(prompts, params, stream=stream, on_done=advance)


def _groups(rollouts: list[Rollout]) -> list[list[Rollout]]:
    by_uid: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_uid.setdefault(rollout.prompt.uid, []).append(rollout)
    return list(by_uid.values())


def _has_spread(group: list[Rollout], metric: str) -> bool:
    return len({_filter_value(rollout, metric) for rollout in group if rollout.failure is None}) > 1


def _filter_value(rollout: Rollout, metric: str) -> float | None:
    if metric == "seq_final_reward":
        return rollout.reward
    rule = rollout.reward_parts.get("rule", rollout.reward)
    return rollout.reward_parts.get("acc", rule) if metric == "acc" else rule


def make_batch(run: Run, rollouts: list[Rollout], step: int) -> Batch:
    """Return the [B, T] batch of scored rollouts, with what the advantage estimator needs beside the rewards."""
    greedy_scores = None
    if run.config.algorithm.adv_estimator == "remax":
        greedy_scores = _greedy_scores(run, rollouts, step)
    batch = Batch.from_rollouts(rollouts)
    batch.greedy_scores = greedy_scores
    if run.config.algorithm.adv_estimator == "gdpo":
        batch.reward_components = _components(run, rollouts)
    return batch


def _greedy_scores(run: Run, rollouts: list[Rollout], step: int) -> torch.Tensor:
    """Answer each prompt greedily and return the answer's reward for each sample of the prompt, [B].

    A prompt whose answer could not be scored has no baseline: its samples fail with it and are masked out.
    """
    prompts = {rollout.prompt.uid: rollout.prompt for rollout in rollouts}
    params = greedy_sampling(run.config.actor_rollout_ref.rollout)
    greedy = _generate(run, list(prompts.values()), params, ("greedy", step), step)
    run.rewards.score(greedy, run.stage, step=step)
    answer_to = {rollout.prompt.uid: rollout for rollout in greedy}
    for rollout in rollouts:
        failure = answer_to[rollout.prompt.uid].failure
        if failure is not None and rollout.failure is None:
            message = f"the greedy answer to its prompt, the baseline, has no score: {failure.message}"
            rollout.reward, rollout.failure = None, RewardFailure(failure.kind, message)
    return torch.tensor([answer_to[rollout.prompt.uid].reward or 0.0 for rollout in rollouts])


def component_weights(run: Run) -> torch.Tensor | None:
    """Return the [K] weights of `algorithm.gdpo_reward_weights`; None where each counts once."""
    weights = run.config.algorithm.gdpo_reward_weights
    return torch.tensor(list(weights.values())) if weights else None


def _components(run: Run, rollouts: list[Rollout]) -> torch.Tensor:
    """Return the [B, K] reward components, those named in the config or else all that every reward has.

    `rule` is the sum of the components that the reward function returned, and counts only where it returned none.
    """
    scored = [rollout for rollout in rollouts if rollout.failure is None]
    shared = [name for name in scored[0].reward_parts if all(name in r.reward_parts for r in scored)] if scored else []
    parts = [name for name in shared if name not in ("rule", "model", "overlong")]
    names = list(run.config.algorithm.gdpo_reward_weights or [n for n in shared if n != "rule" or not parts])
    absent = [name for name in names if name not in shared]
    if absent or not names:
        raise UserError(
            "algorithm.gdpo_reward_weights" if absent else "algorithm.adv_estimator",
            f"gdpo needs named reward components, and the reward returns {'none' if not shared else ', '.join(shared)}"
            + (f" but not '{absent[0]}'." if absent else "."),
            "Return a dict with `score` and one number a component from the reward function.",
        )
    return torch.tensor([[rollout.reward_parts.get(name, 0.0) for name in names] for rollout in rollouts])
