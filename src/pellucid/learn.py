"""The second half of a step: scored samples in, a new version of the policy out.

    samples ─► experience: old and reference log-probs, values ─► advantages ─► correction ─► critic, actor

Each stage is a function from payload to payload. Samples come from `produce.py`; what leaves is the step's metrics and,
on disk, its rollout dump. The schedule decides when `publish` hands the new version to the rollout engine.
"""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pellucid.algo.advantages import AdvantageInputs
from pellucid.algo.aggregation import masked_mean
from pellucid.algo.catalog import estimator_entry
from pellucid.algo.correction import correct
from pellucid.algo.kl import kl_penalty
from pellucid.errors import NonFiniteError
from pellucid.files.rollout_dump import write_rollouts
from pellucid.metrics.trackers import Shown
from pellucid.produce import component_weights, spread
from pellucid.rollout.requests import PauseMode, WeightUpdate, run_sync
from pellucid.run import Run
from pellucid.stages import Stage
from pellucid.types import ActorUpdate, Experience, LogProbs, Samples, TrainBatch


def learn(run: Run, samples: Samples, step: int) -> dict[str, float]:
    """Make one new version of the policy from samples, and return the metrics.

    Raises:
        NonFiniteError: NaN or Inf; what it came of is in `failures/` of the run, the samples among its rollouts.
    """
    dump = partial(
        write_rollouts, run.run_dir.rollouts(step), samples.rollouts, samples.scores, step, pieces=run.token_pieces
    )
    dumps = run.config.trainer.dump_rollouts
    try:
        batch, updated = _learn(run, samples, step)
    except NonFiniteError:
        if dumps:
            dump(mask=samples.mask)
        raise
    run.trackers.show(step, lambda: Shown(_values(samples, batch, updated.training_logp)))
    if dumps:
        weights = batch.correction_weights
        if weights is None and run.config.corrects:
            weights = batch.loss_mask.float()  # rejection alone: a token counts or it does not
        dump(
            mask=batch.loss_mask,
            training_logp=updated.training_logp,
            entropy=updated.entropy,
            correction_weights=weights,
            advantages=batch.advantages,
        )
    return updated.metrics


def _values(samples: Samples, batch: TrainBatch, training_logp: torch.Tensor | None) -> dict[str, np.ndarray]:
    """Return what trackers show the spread of: rewards and lengths by sample, advantages and policy gap by token."""
    by_token = {"critic/advantages": batch.advantages}
    if training_logp is not None:
        by_token["mismatch/logp_diff"] = training_logp - samples.rollout_logp
    found = {
        "critic/score": np.array([score.reward for score in samples.scores if score.reward is not None]),
        "response_length": samples.mask.sum(1).numpy(),
        **{name: values[batch.loss_mask].float().numpy() for name, values in by_token.items()},
    }
    # Values that differ in the last digit alone have no histogram.
    finite = {name: values[np.isfinite(values)].astype(np.float64).round(6) for name, values in found.items()}
    return {name: values for name, values in finite.items() if values.size}


def _learn(run: Run, samples: Samples, step: int) -> tuple[TrainBatch, ActorUpdate]:
    """Return the batch that was trained on and what its update gave back, with the metrics of the whole half step."""
    if run.config.engines_sleep:
        run_sync(run.rollout_engine.sleep())
    experience = compute_experience(run, samples, step)
    with run.stage(Stage.ADVANTAGE, step):
        batch, metrics = compute_advantages(run, experience, step)
    batch, gap = correct_mismatch(run, batch, step)
    metrics |= staleness_metrics(run, batch)
    updated = update(run, batch, step)
    gap = gap or policy_gap_metrics(run, batch, updated.training_logp, step)
    return batch, replace(updated, metrics=metrics | updated.metrics | gap)


def publish(run: Run, step: int, running: PauseMode = "keep") -> dict[str, float]:
    """Let the rollout engine sample from the actor's weights, and return how fast they came there.

    `running` says what happens to requests under way.
    """
    engine, began = run.rollout_engine, time.perf_counter()
    before = engine.stats().weight_bytes
    # In one process the native engine reads the actor's own weights and this costs nothing; over ranks it gathers them.
    with run.stage(Stage.WEIGHT_SYNC, step):
        if run.config.engines_sleep:
            run_sync(engine.wake())
        if running != "keep":
            run_sync(engine.pause(running))
        run_sync(engine.load_weights(WeightUpdate(run.actor.version)))
        if running != "keep":
            run_sync(engine.resume())
    taken_s, num_bytes = time.perf_counter() - began, engine.stats().weight_bytes - before
    return {"perf/weight_sync_s": taken_s, "perf/weight_sync_gb_s": num_bytes / taken_s / 1e9} if num_bytes else {}


def compute_experience(run: Run, samples: Samples, step: int) -> Experience:
    """Run the models that advantages and losses need forward: old policy, reference, critic."""
    algorithm, num_samples = run.config.algorithm, len(samples)
    penalised = algorithm.use_kl_in_reward
    old = ref_logp = values = None
    if algorithm.bypass_mode:
        old = LogProbs(samples.rollout_logp)
    elif run.config.needs_old_log_probs:
        exact_kl = penalised and algorithm.kl_penalty == "full"
        with run.stage(Stage.ACTOR_COMPUTE_LOG_PROB, step, num_samples, samples) as advance:
            old = run.actor.compute_log_probs(samples, on_done=advance, exact_kl=exact_kl)
    if run.roles.ref is not None and run.config.samples_kl:
        with run.stage(Stage.REF_COMPUTE_LOG_PROB, step, num_samples, samples) as advance:
            ref_logp = run.roles.ref.compute_log_probs(samples, on_done=advance)
    if run.roles.critic is not None:
        with run.stage(Stage.COMPUTE_VALUES, step, num_samples, samples) as advance:
            values = run.roles.critic.compute_values(samples, on_done=advance)
    reward_kl = None
    if penalised and old is not None:
        reward_kl = kl_penalty(old.logp, ref_logp, algorithm.kl_penalty, full_kl=old.exact_kl)
        reward_kl = reward_kl.masked_fill(~samples.mask, 0.0)
    return Experience(
        **vars(samples),
        old_logp=None if old is None else old.logp,
        ref_logp=ref_logp,
        reward_kl=reward_kl,
        values=values,
    )


def compute_advantages(run: Run, experience: Experience, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """Subtract the KL penalty from the rewards where asked for, and return advantages and returns with their
    metrics.
    """
    algorithm, metrics, rewards = run.config.algorithm, {}, experience.token_rewards
    mask, values = experience.mask, experience.values
    first = torch.tensor([rollout.sequence == 0 for rollout in experience.rollouts])
    if experience.reward_kl is not None:
        rewards = rewards - run.kl_control.coef * experience.reward_kl
        mean_kl = float(masked_mean(experience.reward_kl, mask))
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/kl_coef": run.kl_control.coef}
        if step > run.config.trainer.critic_warmup:  # until then the policy rests, and its KL of 0 says nothing
            run.kl_control.update(mean_kl, len(experience))
    inputs = AdvantageInputs(
        token_rewards=rewards,
        mask=mask,
        group=experience.group,
        first=first,
        step_ends=experience.turn_ends() if run.config.actor_rollout_ref.rollout.agent.reward_at == "turn" else None,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
    )
    tensors = {
        "values": values,
        "greedy_scores": experience.greedy_scores,
        "reward_components": experience.reward_components,
        "component_weights": component_weights(run, experience),
    }
    arguments = estimator_entry(algorithm.adv_estimator).arguments
    advantages, returns = run.estimator(inputs, **{name: tensors[name] for name in arguments})
    totals = (rewards * mask).sum(dim=1)[mask.any(dim=1) & first]
    metrics |= spread("critic/rewards", totals)
    metrics |= spread("critic/advantages", advantages[mask]) | spread("critic/returns", returns[mask])
    if values is not None:
        metrics |= spread("critic/values", values[mask])
    return TrainBatch(**vars(experience), advantages=advantages, returns=returns, loss_mask=mask), metrics


def correct_mismatch(run: Run, batch: TrainBatch, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with what corrects for the rollout policy, weights and rejected tokens, and `mismatch/*`
    metrics.

    Only where something is applied: what is merely measured waits for the update, whose forward pass then supplies the
    training policy's log-probs. In bypass mode the ratio is known only inside the update, and the actor applies it
    there.
    """
    if not run.config.corrects or batch.old_logp is None:
        return batch, {}
    with run.stage(Stage.CORRECTION, step):
        correction = correct(batch.old_logp, batch.rollout_logp, batch.mask, run.config.algorithm)
    weights = correction.weights if run.config.algorithm.rollout_is else None
    # After the advantages: a rejected sample trains nothing, yet its reward is part of what the others are compared
    # with.
    return replace(batch, correction_weights=weights, loss_mask=correction.mask), correction.metrics


def update(run: Run, batch: TrainBatch, step: int) -> ActorUpdate:
    """Update the critic and, once it is warm, the actor; return what the latter gives, with the metrics of both.

    Raises:
        NonFiniteError: NaN or Inf; the batch is saved.
    """
    metrics: dict[str, float] = {}
    if run.roles.critic is not None and batch.values is not None:
        num_samples = len(batch) * run.config.critic.ppo_epochs
        with run.stage(Stage.CRITIC_UPDATE, step, num_samples, batch) as advance:
            metrics |= run.roles.critic.update(batch, step=step, on_done=advance)
    if step <= run.config.trainer.critic_warmup:
        return ActorUpdate(metrics, None if run.config.algorithm.bypass_mode else batch.old_logp)
    num_samples = len(batch) * run.config.actor_rollout_ref.actor.ppo_epochs
    with run.stage(Stage.ACTOR_UPDATE, step, num_samples, batch) as advance:
        updated = run.actor.update(batch, step=step, on_done=advance)
    return replace(updated, metrics=metrics | updated.metrics)


def policy_gap_metrics(
    run: Run, batch: TrainBatch, training_logp: torch.Tensor | None, step: int
) -> dict[str, float]:
    """Return how far the rollout policy is from the training policy, where the correction did not measure it already.

    Rows that `training_logp` [B, T] holds NaN for were not trained on, and are left out.
    """
    if training_logp is None or not run.config.actor_rollout_ref.rollout.calculate_log_probs:
        return {}
    mask = batch.loss_mask & ~training_logp.isnan()
    with run.stage(Stage.CORRECTION, step):
        return correct(training_logp, batch.rollout_logp, mask, run.config.algorithm).metrics


def staleness_metrics(run: Run, samples: Samples) -> dict[str, float]:
    """Return how many updates ago the tokens about to be trained on were sampled: 0 in a synchronous loop."""
    versions = np.concatenate([np.asarray(rollout.versions) for rollout in samples.rollouts])
    ages = run.actor.version - versions[versions >= 0]  # −1: given, not sampled
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
