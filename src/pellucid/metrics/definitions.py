"""The definition of every metric: name, unit and one sentence, in one place.

Trackers refuse a name that is not defined here, and `docs/metrics.md` is written from here. In a name, `<task>`,
`<stage>`, `<k>` and `<name>` stand for any value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric's definition."""

    name: str
    unit: str
    sentence: str


_TABLE = """\
training/global_step | step | Optimization step of the run, counted from 1; 0 is the state before training.
training/epoch | epochs | Whole passes over the training data finished before the step's prompts were drawn.

actor/pg_loss | nats | Policy-gradient loss, aggregated over the mini-batch as `loss_agg_mode` says.
actor/entropy | nats | Mean entropy of the policy's next-token distribution over response tokens.
actor/entropy_loss | nats | Entropy aggregated like the loss; `entropy_coeff` times it is subtracted from the loss.
actor/kl_loss | nats | Divergence from the reference policy, aggregated like the loss, before its coefficient.
actor/reward_kl_penalty | nats | Mean divergence from the reference that the reward is penalised by, unscaled.
actor/kl_coef | 1 | Coefficient of the divergence from the reference policy in the reward.
actor/grad_norm | 1 | L2 norm of the gradient before clipping.
actor/lr | 1 | Learning rate of the step.
actor/pg_clipfrac | fraction | Response tokens whose ratio was clipped at the upper or lower bound.
actor/pg_clipfrac_lower | fraction | Response tokens with negative advantage held by the dual-clip bound.
actor/pg_covfrac | fraction | Response tokens picked for covariance of advantage and log-prob (`clip_cov`, `kl_cov`).
actor/ppo_kl | nats | Mean of old minus new log-probability over response tokens: how far the step has moved.

critic/score/* | reward | outcome score of a sample that is trained on, before any KL penalty.
critic/rewards/* | reward | reward of a sample after any KL penalty.
critic/advantages/* | 1 | advantage over response tokens.
critic/returns/* | reward | return over response tokens.
critic/vf_loss | reward² | Value loss, aggregated over the mini-batch as `critic.loss_agg_mode` says.
critic/vf_clipfrac | fraction | Response tokens whose value loss is that of the clipped value.
critic/vf_explained_var | 1 | 1 − Var(return − value)/Var(return) over response tokens; 0 for equal returns.
critic/values/* | reward | value over response tokens, before the update.
critic/grad_norm | 1 | L2 norm of the critic's gradient before clipping.
critic/lr | 1 | The critic's learning rate of the step.

plugin/<name> | as defined there | A metric of a user's own loss.

agent/turns/* | turns | turns of the policy in a trajectory.
agent/sequences/* | sequences | chats of a trajectory, each with its own past, that are trained on.
agent/tool_calls/* | calls | calls of tools, or steps of an environment, in a trajectory.
agent/tool_s/* | s | time of a trajectory in tools or an environment, calls beside each other added up.
agent/tool_failures | fraction | Calls that did not do what was asked: malformed, unknown, failed or timed out.
agent/given_tokens_share | fraction | Tokens after the prompt that the policy did not draw.
agent/failed_share | fraction | Trajectories that were masked out for a tool, agent or time limit.
agent/max_turns_share | fraction | Trajectories ended by the limit of turns or calls.
agent/<name>/calls | calls | Mean number of calls of that tool in a trajectory.
agent/<name>/failures | fraction | Its calls that did not do what was asked.
agent/<name>/s | s | Its mean time of a call.

response_length/* | tokens | response length of a sample.
response_length/clip_ratio | fraction | Responses cut off at the length limit.

prompt_length/* | tokens | prompt length of a sample.

reward/num_failures | samples | Samples whose reward call broke twice; they are masked out of training.
reward/failed_share | fraction | Samples without a score, of all that were scored in the step.
reward/num_timeouts | calls | Reward calls killed for taking too long, repeats included.
reward/part/<name> | as defined there | Mean of that part of the reward, over the samples that have it.
reward/time_s | s | Time of the step's reward calls added up; they run side by side, so the stage may take less.

val/<task>/accuracy | fraction | Held-out problems of the task answered correctly.
val/<task>/reward | reward | Mean reward on the task's held-out problems.
val/<task>/num | problems | Held-out problems of the task that were scored.
val/<task>/pass@<k> | fraction | Held-out problems with a correct one among k samples, estimated without bias.
val/loss | nats/token | Held-out cross-entropy of supervised training.

train/loss | nats/token | Training cross-entropy of supervised training.
train/grad_norm | 1 | L2 norm of the gradient of supervised training, before clipping.
train/lr | 1 | Learning rate of supervised training.

timing_s/step | s | Wall time of the step from prompts to updated weights; validation and checkpoint are not in it.
timing_s/<stage> | s | Wall time of one stage; a checkpoint's is on the line after it, since a line precedes it.

perf/total_num_tokens | tokens | Prompt and response tokens of all samples drawn in the step, dropped groups included.
perf/time_per_step | s | The same as `timing_s/step`, under verl's name.
perf/throughput | tokens/s/device | Tokens of the step per second and device.
perf/mfu | fraction | 6 × parameters × tokens of updates (2 × of passes forward only) over the device's peak.
perf/rollout_requests | requests | Requests that the rollout engines have answered since the last step's line.
perf/rollout_queue_s | s | Mean time for which such a request waited before its engine began with it.
perf/rollout_prefill_s | s | Mean time from there to a request's first token.
perf/rollout_decode_s | s | Mean time from there to a request's last token.
perf/rollout_tokens_per_s | tokens/s | Sampled tokens over the time in which an engine worked, added up over replicas.
perf/rollout_prefix_hit_share | fraction | Tokens before answers that were found in a replica's cache.
perf/rollout_preemptions | times | How often a request had to give its cache back, for want of room, and wait again.
perf/rollout_cache_share_max | fraction | Largest share of a replica's cache that was seen in use (ten looks a second).
perf/rollout_imbalance | 1 | Sampled tokens of the replica that sampled most, over their mean.
perf/produce_busy | fraction | Share of the step in which sampling and scoring worked; schedules that overlap only.
perf/learn_busy | fraction | Share of the step in which training worked; schedules that overlap only.
perf/overlap | fraction | Share of the step in which both worked, at least; schedules that overlap only.
perf/weight_sync_s | s | Time in which new weights were given to the rollout engines beside the trainer.
perf/weight_sync_gb_s | GB/s | Bytes of these weights over that time.
perf/max_memory_allocated_gb | GB | Largest device memory allocated so far.
perf/cpu_memory_used_gb | GB | Resident host memory of the process.

mismatch/logp_max_abs_diff | nats | Largest gap between a token's rollout and training log-probability.
mismatch/logp_mean_abs_diff | nats | Mean absolute gap of rollout and training log-probability, response tokens.
mismatch/mismatch_kl | nats | Mean of rollout minus training log-probability over response tokens (k1).
mismatch/mismatch_k3_kl | nats | Mean of e^l - l - 1, with l training minus rollout log-probability: never negative.
mismatch/mismatch_training_ppl | 1 | Perplexity of the responses under the training policy, mean over samples.
mismatch/mismatch_rollout_ppl | 1 | Perplexity of the responses under the rollout policy, mean over samples.
mismatch/mismatch_ppl_ratio | 1 | Training over rollout perplexity, mean over samples.
mismatch/mismatch_training_log_ppl | nats | Negative mean training log-probability of a sample, mean over samples.
mismatch/mismatch_rollout_log_ppl | nats | Negative mean rollout log-probability of a sample, mean over samples.
mismatch/mismatch_log_ppl_diff | nats | Rollout minus training mean log-probability of a sample, mean over samples.
mismatch/mismatch_log_ppl_abs_diff | nats | The same difference, absolute, mean over samples.
mismatch/mismatch_log_ppl_diff_max | nats | Largest such difference over samples.
mismatch/mismatch_log_ppl_diff_min | nats | Smallest such difference over samples.
mismatch/num_impossible_tokens | tokens | Response tokens of log-prob −inf or NaN, left out of all else; healthy at 0.
mismatch/rollout_is_mean | 1 | Mean ratio of training to rollout probability over response tokens.
mismatch/rollout_is_std | 1 | Standard deviation of the applied weights, over the response tokens that rejection leaves.
mismatch/rollout_is_min | 1 | Smallest ratio, the log clamped to ±20.
mismatch/rollout_is_max | 1 | Largest ratio, the log clamped to ±20.
mismatch/rollout_is_p25 | 1 | 25th percentile of the ratio over response tokens.
mismatch/rollout_is_p50 | 1 | 50th percentile of the ratio over response tokens.
mismatch/rollout_is_p75 | 1 | 75th percentile of the ratio over response tokens.
mismatch/rollout_is_p95 | 1 | 95th percentile of the ratio over response tokens.
mismatch/rollout_is_p99 | 1 | 99th percentile of the ratio over response tokens.
mismatch/rollout_is_eff_sample_size | fraction | 1 / mean((w / mean w)²) of the applied weights w; healthy above 0.8.
mismatch/rollout_is_veto_fraction | fraction | Samples with a token below the veto threshold; healthy below 0.05.
mismatch/rollout_is_catastrophic_token_fraction | fraction | Tokens below the veto threshold; healthy below 0.01.
mismatch/rollout_is_ratio_fraction_high | fraction | Tokens (level sequence: samples) above the upper bound.
mismatch/rollout_is_ratio_fraction_low | fraction | Tokens (level sequence: samples) below the lower bound.
mismatch/rollout_is_clipped_fraction | fraction | Tokens outside the bounds (weight 0 in mode clip); healthy below 0.2.
mismatch/rollout_is_seq_mean | 1 | Mean ratio of a sample (level sequence or geometric), over samples.
mismatch/rollout_is_seq_std | 1 | Sample standard deviation of that ratio over samples.
mismatch/rollout_is_seq_min | 1 | Smallest ratio of a sample.
mismatch/rollout_is_seq_max | 1 | Largest ratio of a sample.
mismatch/rollout_is_seq_max_deviation | 1 | Largest distance of a sample's ratio from 1.
mismatch/rollout_is_seq_fraction_high | fraction | Samples whose ratio is above the upper bound.
mismatch/rollout_is_seq_fraction_low | fraction | Samples whose ratio is below the lower bound.
mismatch/rollout_rs_masked_fraction | fraction | Response tokens that the rejection rules take out of the mask.
mismatch/rollout_rs_seq_masked_fraction | fraction | Samples that lose a token to the rejection rules.

async/dropped_groups | groups | Groups whose oldest token was more than `trainer.max_staleness` updates old.
async/length_bias | 1 | Mean length of the samples trained on over that of all finished ones, since the start.
async/waiting_groups | groups | Finished groups that the step did not need and a later one will take.
staleness/mean | versions | Mean age of a token's policy version when it is trained on.
staleness/max | versions | Largest age of a token's policy version when it is trained on.

batch/no_spread_share | fraction | Groups in which all samples got the same reward: nothing is learned from them.
batch/num_groups_dropped | groups | Groups left out of the update because their samples carry no signal.
batch/num_gen_batches | batches | Generation batches drawn to fill the step.
batch/packing_efficiency | fraction | Real tokens over token slots in the packed micro-batches.
batch/rank_imbalance_before | 1 | Longest rank's tokens over the mean, had each rank as many samples in batch order.
batch/rank_imbalance_after | 1 | The same with the split that was used (`trainer.balance_batch`).
"""
"""Name, unit and sentence of each metric; `*` is mean, max and min."""


def _parse(table: str) -> Iterator[Metric]:
    for row in filter(None, table.splitlines()):
        name, unit, sentence = row.split(" | ")
        if name.endswith("/*"):
            for part, word in (("mean", "Mean"), ("max", "Largest"), ("min", "Smallest")):
                yield Metric(f"{name[:-1]}{part}", unit, f"{word} {sentence}")
        else:
            yield Metric(name, unit, sentence)


_DEFINITIONS = list(_parse(_TABLE))
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DEFINITIONS}
assert len(METRICS) == len(_DEFINITIONS), "a metric is defined twice"

_WILDCARDS = {"<task>": r"[^\s]+", "<name>": r"[^\s]+", "<stage>": r"[a-z_]+", "<k>": r"[1-9]\d*"}
_PATTERNS: list[tuple[re.Pattern[str], Metric]] = [
    (re.compile(re.sub(r"<\w+>", lambda found: _WILDCARDS[found[0]], name)), metric)
    for name, metric in METRICS.items()
    if "<" in name
]


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """Return the definition that covers a metric name, or None."""
    return METRICS.get(name) or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def check_names(names: Iterable[str]) -> None:
    """Assert that every name has a definition, so that a metric without unit and meaning cannot ship."""
    undefined = [name for name in names if find(name) is None]
    assert not undefined, f"metrics without a definition in metrics/definitions.py: {', '.join(sorted(undefined))}"
