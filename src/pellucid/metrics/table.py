"""The definition of every metric: name, unit and one sentence, in one place.

Trackers refuse a name that is not defined here, and `docs/metrics.md` is written from here:
`python -m pellucid.metrics.table > docs/metrics.md`. In a name, `<task>`, `<stage>`, `<k>` and `<name>` stand for any value.
"""


from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric's definition."""

    name: str
    unit: str
    sentence: str


def _spread(prefix: str, unit: str, what: str, parts: str = "mean max min") -> list[Metric]:
    words = {"mean": "Mean", "max": "Largest", "min": "Smallest"}
    return [Metric(f"{prefix}/{part}", unit, f"{words[part]} {what}.") for part in parts.split()]


_DEFINITIONS = [
    Metric("training/global_step", "step", "Optimization step of the run, counted from 1; 0 is the state before training."),
    Metric("training/epoch", "epochs", "Whole passes over the training data finished before the step's prompts were drawn."),

    Metric("actor/pg_loss", "nats", "Policy-gradient loss, aggregated over the mini-batch as `loss_agg_mode` says."),
    Metric("actor/entropy", "nats", "Mean entropy of the policy's next-token distribution over response tokens."),
    Metric("actor/entropy_loss", "nats", "Entropy aggregated like the loss; `entropy_coeff` times it is subtracted from the loss."),
    Metric("actor/kl_loss", "nats", "Divergence from the reference policy, aggregated like the loss, before its coefficient."),
    Metric("actor/reward_kl_penalty", "nats", "Mean divergence from the reference policy that the reward is penalised by, before its coefficient."),
    Metric("actor/kl_coef", "1", "Coefficient of the divergence from the reference policy in the reward."),
    Metric("actor/grad_norm", "1", "L2 norm of the gradient before clipping."),
    Metric("actor/lr", "1", "Learning rate of the step."),
    Metric("actor/pg_clipfrac", "fraction", "Response tokens whose ratio was clipped at the upper or lower bound."),
    Metric("actor/pg_clipfrac_lower", "fraction", "Response tokens with negative advantage held by the dual-clip bound."),
    Metric("actor/pg_covfrac", "fraction", "Response tokens picked for their covariance of advantage and log-probability (`clip_cov`, `kl_cov`)."),
    Metric("actor/ppo_kl", "nats", "Mean of old minus new log-probability over response tokens: how far the step has moved."),

    *_spread("critic/score", "reward", "outcome score of a sample that is trained on, before any KL penalty"),
    *_spread("critic/rewards", "reward", "reward of a sample after any KL penalty"),
    *_spread("critic/advantages", "1", "advantage over response tokens"),
    *_spread("critic/returns", "reward", "return over response tokens"),

    Metric("critic/vf_loss", "reward²", "Value loss, aggregated over the mini-batch as `critic.loss_agg_mode` says."),
    Metric("critic/vf_clipfrac", "fraction", "Response tokens whose value loss is that of the clipped value."),
    Metric("critic/vf_explained_var", "1", "1 − Var(return − value)/Var(return) over response tokens; 0 when the returns do not vary."),
    *_spread("critic/values", "reward", "value over response tokens, before the update"),
    Metric("critic/grad_norm", "1", "L2 norm of the critic's gradient before clipping."),
    Metric("critic/lr", "1", "The critic's learning rate of the step."),

    Metric("plugin/<name>", "as defined there", "A metric of a user's own loss."),

    *_spread("response_length", "tokens", "response length of a sample"),
    Metric("response_length/clip_ratio", "fraction", "Responses cut off at the length limit."),
    *_spread("prompt_length", "tokens", "prompt length of a sample"),

    Metric("reward/num_failures", "samples", "Samples whose reward call broke twice; they are masked out of training."),
    Metric("reward/num_timeouts", "calls", "Reward calls killed for taking too long, repeats included."),
    Metric("reward/time_s", "s", "Time of the step's reward calls added up; they run side by side, so the stage may take less."),

    Metric("val/<task>/accuracy", "fraction", "Held-out problems of the task answered correctly."),
    Metric("val/<task>/reward", "reward", "Mean reward on the task's held-out problems."),
    Metric("val/<task>/num", "problems", "Held-out problems of the task that were scored."),
    Metric("val/<task>/pass@<k>", "fraction", "Held-out problems of the task of which at least one of k samples is correct, estimated without bias."),
    Metric("val/loss", "nats/token", "Held-out cross-entropy of supervised training."),
    Metric("train/loss", "nats/token", "Training cross-entropy of supervised training."),
    Metric("train/grad_norm", "1", "L2 norm of the gradient of supervised training, before clipping."),
    Metric("train/lr", "1", "Learning rate of supervised training."),

    Metric("timing_s/step", "s", "Wall time of the step from prompts to updated weights; validation and checkpoint are not in it."),
    Metric("timing_s/<stage>", "s", "Wall time of one stage; a checkpoint's is on the line after it, as a line is written before its checkpoint."),

    Metric("perf/total_num_tokens", "tokens", "Prompt and response tokens of all samples drawn in the step, dropped groups included."),
    Metric("perf/time_per_step", "s", "The same as `timing_s/step`, under verl's name."),
    Metric("perf/throughput", "tokens/s/device", "Tokens of the step per second and device."),
    Metric("perf/mfu", "fraction", "6 × parameters × tokens of the actor update (2 × of forward-only passes) over the device's peak in that time."),
    Metric("perf/max_memory_allocated_gb", "GB", "Largest device memory allocated so far."),
    Metric("perf/cpu_memory_used_gb", "GB", "Resident host memory of the process."),

    Metric("mismatch/logp_max_abs_diff", "nats", "Largest gap between a token's rollout and training log-probability."),
    Metric("mismatch/logp_mean_abs_diff", "nats", "Mean absolute gap between rollout and training log-probability over response tokens."),
    Metric("mismatch/mismatch_kl", "nats", "Mean of rollout minus training log-probability over response tokens (k1)."),
    Metric("mismatch/mismatch_k3_kl", "nats", "Mean of e^l - l - 1, with l training minus rollout log-probability: never negative."),
    Metric("mismatch/mismatch_training_ppl", "1", "Perplexity of the responses under the training policy, mean over samples."),
    Metric("mismatch/mismatch_rollout_ppl", "1", "Perplexity of the responses under the rollout policy, mean over samples."),
    Metric("mismatch/mismatch_ppl_ratio", "1", "Training over rollout perplexity, mean over samples."),
    Metric("mismatch/mismatch_training_log_ppl", "nats", "Negative mean training log-probability of a sample, mean over samples."),
    Metric("mismatch/mismatch_rollout_log_ppl", "nats", "Negative mean rollout log-probability of a sample, mean over samples."),
    Metric("mismatch/mismatch_log_ppl_diff", "nats", "Rollout minus training mean log-probability of a sample, mean over samples."),
    Metric("mismatch/mismatch_log_ppl_abs_diff", "nats", "The same difference, absolute, mean over samples."),
    Metric("mismatch/mismatch_log_ppl_diff_max", "nats", "Largest such difference over samples."),
    Metric("mismatch/mismatch_log_ppl_diff_min", "nats", "Smallest such difference over samples."),

    Metric("mismatch/rollout_is_mean", "1", "Mean ratio of training to rollout probability (of the token or its sequence) over response tokens."),
    Metric("mismatch/rollout_is_std", "1", "Standard deviation of the ratio clamped to the bounds, over response tokens."),
    Metric("mismatch/rollout_is_min", "1", "Smallest ratio, the log clamped to ±20."),
    Metric("mismatch/rollout_is_max", "1", "Largest ratio, the log clamped to ±20."),
    *[Metric(f"mismatch/rollout_is_p{part}", "1", f"{part}th percentile of the ratio over response tokens.") for part in (25, 50, 75, 95, 99)],
    Metric("mismatch/rollout_is_eff_sample_size", "fraction", "Effective share of the batch, 1 / mean((w / mean w)²); healthy above 0.8."),
    Metric("mismatch/rollout_is_veto_fraction", "fraction", "Samples with a token whose ratio is below the veto threshold; healthy below 0.05."),
    Metric("mismatch/rollout_is_catastrophic_token_fraction", "fraction", "Tokens whose ratio is below the veto threshold; healthy below 0.01."),
    Metric("mismatch/rollout_is_ratio_fraction_high", "fraction", "Response tokens (level sequence: samples) whose ratio is above the upper bound."),
    Metric("mismatch/rollout_is_ratio_fraction_low", "fraction", "Response tokens (level sequence: samples) whose ratio is below the lower bound."),
    Metric("mismatch/rollout_is_clipped_fraction", "fraction", "Response tokens that mode clip gives weight 0: those outside the bounds."),
    Metric("mismatch/rollout_is_seq_mean", "1", "Mean ratio of a sample (level sequence or geometric), over samples."),
    Metric("mismatch/rollout_is_seq_std", "1", "Sample standard deviation of that ratio over samples."),
    Metric("mismatch/rollout_is_seq_min", "1", "Smallest ratio of a sample."),
    Metric("mismatch/rollout_is_seq_max", "1", "Largest ratio of a sample."),
    Metric("mismatch/rollout_is_seq_max_deviation", "1", "Largest distance of a sample's ratio from 1."),
    Metric("mismatch/rollout_is_seq_fraction_high", "fraction", "Samples whose ratio is above the upper bound."),
    Metric("mismatch/rollout_is_seq_fraction_low", "fraction", "Samples whose ratio is below the lower bound."),
    Metric("mismatch/rollout_rs_masked_fraction", "fraction", "Response tokens that the rejection rules take out of the mask."),
    Metric("mismatch/rollout_rs_seq_masked_fraction", "fraction", "Samples that lose a token to the rejection rules."),

    *_spread("staleness", "versions", "age of a token's policy version when it is trained on", "mean max"),

    Metric("batch/num_groups_dropped", "groups", "Groups left out of the update because their samples carry no signal."),
    Metric("batch/num_gen_batches", "batches", "Generation batches drawn to fill the step."),
    Metric("batch/packing_efficiency", "fraction", "Real tokens over token slots in the packed micro-batches."),
    Metric("batch/rank_imbalance_before", "1", "Longest rank's tokens over the mean, had each rank as many samples in batch order."),
    Metric("batch/rank_imbalance_after", "1", "The same with the split that was used (`trainer.balance_batch`); both with several ranks only."),
]
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DEFINITIONS}
assert len(METRICS) == len(_DEFINITIONS), "a metric is defined twice"

_WILDCARDS = {"<task>": r"[^\s]+", "<name>": r"[^\s]+", "<stage>": r"[a-z_]+", "<k>": r"[1-9]\d*"}
_PATTERNS: list[tuple[re.Pattern[str], Metric]] = [
    (re.compile(re.sub(r"<\w+>", lambda found: _WILDCARDS[found[0]], name)), metric)
    for name, metric in METRICS.items() if "<" in name
]


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """Return the definition that covers a metric name, or None."""
    return METRICS.get(name) or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def check_names(names: Iterable[str]) -> None:
    """Assert that every name has a definition, so that a metric without unit and meaning cannot ship."""
    undefined = [name for name in names if find(name) is None]
    assert not undefined, f"metrics without a definition in metrics/table.py: {', '.join(sorted(undefined))}"


def metrics_markdown() -> str:
    """Return the page `docs/metrics.md`: one table a group."""
    lines = ["# Metrics", "",
             "Every number in `metrics.jsonl`, on the console and in the trackers. Written from `pellucid/metrics/table.py`",
             "by `python -m pellucid.metrics.table > docs/metrics.md`; do not edit by hand.", "",
             "One line a step, key `step` first; a value that is not finite is written as `null`. In names, `<task>` is a task,",
             "`<stage>` a stage of the step, `<k>` a number of samples and `<name>` whatever the loss calls it."]
    group = ""
    for metric in _DEFINITIONS:
        if (head := metric.name.split("/")[0]) != group:
            group = head
            lines += ["", f"## {group}", "", "| name | unit | meaning |", "| --- | --- | --- |"]
        lines.append(f"| `{metric.name}` | {metric.unit} | {metric.sentence} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
