"""The first half of a step: prompts in, scored samples out.

Sampling, reward, dynamic sampling with refill, and the greedy baseline of ReMax. `learn.py` takes the samples.
"""

from dataclasses import replace
from itertools import count
from statistics import fmean

import torch

from pellucid.agents.llm import sample_rollouts
from pellucid.algo.catalog import estimator_entry
from pellucid.config.schema.rollout import RolloutConfig, ValSamplingConfig
from pellucid.errors import UserError
from pellucid.failures import GenerateCall
from pellucid.rollout.requests import SamplingParams
from pellucid.run import Run
from pellucid.stages import Stage
from pellucid.types import Prompt, RewardFailure, Rollout, Samples, Score

Scored = tuple[Rollout, Score]
GREEDY = ValSamplingConfig()
"""The one most likely response to a prompt."""


def sampling_params(config: RolloutConfig, chosen: RolloutConfig | ValSamplingConfig) -> SamplingParams:
    """Return how to sample: training as `config` itself says, validation as its `val_kwargs` do."""
    return SamplingParams(
        n=chosen.n,
        max_tokens=config.response_length,
        temperature=chosen.temperature if chosen.do_sample else 1.0,  # greedy decoding divides by nothing
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        do_sample=chosen.do_sample,
        ignore_eos=config.ignore_eos,
        stop=config.stop,
    )


def produce(run: Run, step: int) -> tuple[Samples, dict[str, float]]:
    """Sample and score `rollout.n` responses to each of `train_batch_size` prompts; return them with the stages'
    metrics.

    Raises:
        UserError: no score at all, or too few useful groups.
        NonFiniteError: NaN or Inf while sampling or scoring.
    """
    scored, metrics = _collect(run, step)
    rollouts, scores = [rollout for rollout, _ in scored], [score for _, score in scored]
    greedy_scores = None
    if "greedy_scores" in estimator_entry(run.config.algorithm.adv_estimator).needs:
        greedy_scores, scores = _greedy_scores(run, rollouts, scores, step)
    samples = batch(run, rollouts, scores, greedy_scores)
    return samples, metrics | sample_metrics(rollouts, scores, has_turns=run.loop.has_turns)


def batch(
    run: Run, rollouts: list[Rollout], scores: list[Score], greedy_scores: torch.Tensor | None = None
) -> Samples:
    """Return what a step learns from: a row for each sequence of the trajectories, with the trajectory's score.

    Raises:
        UserError: the reward lacks a component.
    """
    owner = [index for index, rollout in enumerate(rollouts) for _ in rollout.parts]
    scores = [scores[index] for index in owner]
    rollouts = [replace(part, branches=()) for rollout in rollouts for part in rollout.parts]
    greedy_scores = None if greedy_scores is None else greedy_scores[owner]
    needs = estimator_entry(run.config.algorithm.adv_estimator).needs
    components = _components(run, scores) if "reward_components" in needs else None
    by_turn = run.config.actor_rollout_ref.rollout.agent.reward_at == "turn"
    return Samples.pad(rollouts, scores, by_turn=by_turn, greedy_scores=greedy_scores, reward_components=components)


def _collect(run: Run, step: int) -> tuple[list[Scored], dict[str, float]]:
    """Return the scored rollouts, group by group, and the metrics of sampling and reward.

    With `algorithm.filter_groups`, groups without spread in its metric are dropped and further prompts are drawn (DAPO,
    arXiv 2503.14476).

    Raises:
        UserError: `max_num_gen_batches` batches did not give enough groups.
    """
    filtering, wanted = run.config.algorithm.filter_groups, run.config.data.train_batch_size
    kept: list[list[Scored]] = []
    metrics: dict[str, float] = {}
    num_dropped = 0
    for draw in count(1):
        # A prompt that comes round again within a step would join the group it already has.
        taken = {group[0][0].prompt.uid for group in kept}
        prompts = [prompt for prompt in run.loader.next_batch() if prompt.uid not in taken]
        stream = ("rollout", step) if draw == 1 else ("rollout", step, draw)
        rollouts = _generate(run, prompts, run.config.actor_rollout_ref.rollout, stream, step)
        scores, drawn = run.rewards.score(rollouts, run.stage, step=step)
        drawn |= {"perf/total_num_tokens": num_tokens(rollouts)}
        metrics = {name: metrics.get(name, 0.0) + value for name, value in drawn.items()}
        scored = list(zip(rollouts, scores))
        if not filtering.enable:
            return scored, metrics
        groups = _groups(scored)
        useful = [group for group in groups if has_spread(group, filtering.metric)]
        num_dropped += len(groups) - len(useful)
        kept += useful
        if len(kept) >= wanted:
            metrics |= {"batch/num_gen_batches": draw, "batch/num_groups_dropped": num_dropped}
            return [one for group in kept[:wanted] for one in group], metrics
        if draw == filtering.max_num_gen_batches:
            raise UserError(
                "algorithm.filter_groups.max_num_gen_batches",
                f"{draw} generation batches of {wanted} prompts gave {len(kept)} groups whose '{filtering.metric}' "
                f"differs within the group; the step needs {wanted}. In the other {num_dropped} all samples got the "
                "same: the problems are too easy or too hard for the policy.",
                "Raise it (0 = no limit), raise rollout.n, change the data's difficulty, or set "
                "filter_groups.enable: false.",
            )
    raise AssertionError("unreachable")


def num_tokens(rollouts: list[Rollout]) -> float:
    """Return the prompt and response tokens of the samples, given ones included: what the models work through."""
    parts = [part for rollout in rollouts for part in rollout.parts]
    return float(sum(len(part.prompt.token_ids) + len(part.token_ids) for part in parts))


def sample_metrics(rollouts: list[Rollout], scores: list[Score], *, has_turns: bool = False) -> dict[str, float]:
    """Return scores and lengths of the samples, and with an agent of several turns what these were made of; lengths
    count sampled tokens.
    """
    parts = [part for rollout in rollouts for part in rollout.parts]
    lengths = torch.tensor([float(sum(part.num_sampled for part in rollout.parts)) for rollout in rollouts])
    prompts = torch.tensor([float(len(part.prompt.token_ids)) for part in parts])
    rewards = torch.tensor([score.reward for score in scores if score.reward is not None])
    components: dict[str, list[float]] = {}
    for name, value in (part for score in scores for part in score.parts.items()):
        components.setdefault("_".join(name.split()) or "_", []).append(value)
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    return (
        {"response_length/clip_ratio": cut}
        | _spread_metrics(rollouts, scores)
        | {f"reward/part/{name}": fmean(values) for name, values in components.items()}
        | spread("critic/score", rewards)
        | spread("response_length", lengths)
        | spread("prompt_length", prompts)
        | (_agent_metrics(rollouts) if has_turns else {})
    )


def _spread_metrics(rollouts: list[Rollout], scores: list[Score]) -> dict[str, float]:
    """Return which share of the samples has no score, and of the groups none that differ."""
    failed = {"reward/failed_share": sum(score.failure is not None for score in scores) / len(scores)}
    groups: dict[str, list[float]] = {}
    for rollout, score in zip(rollouts, scores):
        if score.reward is not None:
            groups.setdefault(rollout.prompt.uid, []).append(score.reward)
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    if not compared:
        return failed
    return failed | {"batch/no_spread_share": sum(len(set(rewards)) == 1 for rewards in compared) / len(compared)}


def _agent_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    turns = [[turn for part in rollout.parts for turn in part.turns] for rollout in rollouts]
    parts = [part for rollout in rollouts for part in rollout.parts]
    calls = [[use for turn in of_one for use in turn.tool_calls] for of_one in turns]
    every, given = [use for uses in calls for use in uses], [len(one.token_ids) - one.num_sampled for one in parts]
    each = {
        "agent/turns": [float(len(of_one)) for of_one in turns],
        "agent/sequences": [float(len(rollout.parts)) for rollout in rollouts],
        "agent/tool_calls": [float(len(uses)) for uses in calls],
        "agent/tool_s": [sum((use.seconds for use in uses), 0.0) for uses in calls],
    }
    shares = {
        "agent/tool_failures": sum(bool(use.failure) for use in every) / max(len(every), 1),
        "agent/given_tokens_share": sum(given) / max(sum(len(one.token_ids) for one in parts), 1),
        "agent/failed_share": sum(bool(one.outcome.failure) for one in rollouts) / len(rollouts),
        "agent/max_turns_share": sum(one.finish_reason == "max_turns" for one in rollouts) / len(rollouts),
    }
    for name in sorted({use.name for use in every if use.failure != "unknown_tool"}):
        of_tool = [use for use in every if use.name == name]
        shares |= {
            f"agent/{name}/calls": len(of_tool) / len(rollouts),
            f"agent/{name}/failures": sum(bool(use.failure) for use in of_tool) / len(of_tool),
            f"agent/{name}/s": sum(use.seconds for use in of_tool) / len(of_tool),
        }
    return shares | {name: v for key, values in each.items() for name, v in spread(key, torch.tensor(values)).items()}


def _generate(
    run: Run,
    prompts: list[Prompt],
    chosen: RolloutConfig | ValSamplingConfig,
    stream: tuple[str | int, ...],
    step: int,
) -> list[Rollout]:
    params = sampling_params(run.config.actor_rollout_ref.rollout, chosen)
    call = GenerateCall(prompts, params, stream)
    with run.stage(Stage.ROLLOUT_GENERATE, step, len(prompts) * params.n, call) as advance:
        return sample_rollouts(run.rollout_engine, prompts, params, stream=stream, on_done=advance, loop=run.loop)


def _groups(scored: list[Scored]) -> list[list[Scored]]:
    by_uid: dict[str, list[Scored]] = {}
    for rollout, score in scored:
        by_uid.setdefault(rollout.prompt.uid, []).append((rollout, score))
    return list(by_uid.values())


def has_spread(group: list[Scored], metric: str) -> bool:
    """Tell whether the group's samples differ in the metric of `algorithm.filter_groups`."""
    return len({_filter_value(score, metric) for _, score in group if score.failure is None}) > 1


def _filter_value(score: Score, metric: str) -> float | None:
    if metric == "seq_final_reward":
        return score.reward
    rule = score.parts.get("rule", score.reward)
    return score.parts.get("acc", rule) if metric == "acc" else rule


def _greedy_scores(
    run: Run, rollouts: list[Rollout], scores: list[Score], step: int
) -> tuple[torch.Tensor, list[Score]]:
    """Answer each prompt greedily; return the answer's reward for each sample of the prompt, [B], and the samples'
    scores.

    A prompt whose answer could not be scored has no baseline: its samples fail with it and are masked out.
    """
    prompts = {rollout.prompt.uid: rollout.prompt for rollout in rollouts}
    greedy = _generate(run, list(prompts.values()), GREEDY, ("greedy", step), step)
    baselines, _ = run.rewards.score(greedy, run.stage, step=step)
    baseline_of = {rollout.prompt.uid: score for rollout, score in zip(greedy, baselines)}
    of_each = [baseline_of[rollout.prompt.uid] for rollout in rollouts]
    kept = [
        score if baseline.failure is None or score.failure is not None else _without_baseline(score, baseline.failure)
        for score, baseline in zip(scores, of_each)
    ]
    return torch.tensor([baseline.reward or 0.0 for baseline in of_each]), kept


def _without_baseline(score: Score, failure: RewardFailure) -> Score:
    message = f"the greedy answer to its prompt, the baseline, has no score: {failure.message}"
    return Score(None, score.parts, RewardFailure(failure.kind, message))


def component_weights(run: Run, samples: Samples) -> torch.Tensor | None:
    """Return the [K] weights of `algorithm.gdpo_reward_weights`, each 1 unless set; None without reward components."""
    weights, components = run.config.algorithm.gdpo_reward_weights, samples.reward_components
    if components is None:
        return None
    return torch.tensor(list(weights.values())) if weights else components.new_ones(components.shape[1])


def _components(run: Run, scores: list[Score]) -> torch.Tensor:
    """Return the [B, K] reward components, those named in the config or else all that every reward has.

    `rule` is the sum of the components that the reward function returned, and counts only where it returned none.
    """
    valid = [score for score in scores if score.failure is None]
    shared = [name for name in valid[0].parts if all(name in one.parts for one in valid)] if valid else []
    parts = [name for name in shared if name not in ("rule", "model", "overlong")]
    names = list(run.config.algorithm.gdpo_reward_weights or [n for n in shared if n != "rule" or not parts])
    absent = [name for name in names if name not in shared]
    if absent or not names:
        raise UserError(
            "algorithm.gdpo_reward_weights" if absent else "algorithm.adv_estimator",
            f"{run.config.algorithm.adv_estimator} needs named reward components, and the reward returns "
            + ("none" if not shared else ", ".join(shared))
            + (f" but not '{absent[0]}'." if absent else "."),
            "Return a dict with `score` and one number a component from the reward function.",
        )
    return torch.tensor([[score.parts.get(name, 0.0) for name in names] for score in scores])


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return mean, max and min of the values under `name`, nothing when there are none."""
    if not values.numel():
        return {}
    return {f"{name}/{part}": float(getattr(values, part)()) for part in ("mean", "max", "min")}
