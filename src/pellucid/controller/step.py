"""The stages of one training step, each a function from payload to payload; `loop.py` shows their order.

Scored rollouts come from `sampling.py`; what leaves is the step's metrics and, on disk, its rollout dump.
"""

from pellucid.algo.advantages import AdvantageInputs
from pellucid.algo.aggregation import masked_mean
from pellucid.algo.correction import correct
from pellucid.algo.kl import kl_penalty
from pellucid.controller.build import Run
from pellucid.controller.checkpointing import progress_kept
from pellucid.controller.sampling import collect, component_weights, make_batch
from pellucid.controller.step_metrics import (
    annotate_rollouts,
    batch_metrics,
    policy_gap_metrics,
    spread,
    staleness_metrics,
    warn_of_mismatch,
)
from pellucid.rollout_dump import write_rollouts
from pellucid.stages import Stage
from pellucid.types import Batch


def train_step(run: Run, step: int) -> dict[str, float]:
    """Run one step and return its metrics (validation, checkpoint and timings are the loop's).

    Raises:
        NonFiniteError: NaN or Inf; what it came of is in `failures/` of the run.
    """
    epoch = run.loader.epoch
    with progress_kept(run, step):
        rollouts, metrics = collect(run, step)
        batch = make_batch(run, rollouts, step)
    metrics |= batch_metrics(batch)
    compute_experience(run, batch, step)
    with run.stage(Stage.ADVANTAGE, step):
        metrics |= compute_advantages(run, batch, step)
    gap = correct_mismatch(run, batch, step)
    metrics |= staleness_metrics(run, batch)
    metrics |= update(run, batch, step)
    # In one process the native engine reads the actor's own weights and this costs nothing; over ranks it gathers them.
    with run.stage(Stage.WEIGHT_SYNC, step):
        run.rollout_engine.sync_weights()
    metrics |= gap or policy_gap_metrics(run, batch, step)
    warn_of_mismatch(run, metrics)
    if run.config.trainer.dump_rollouts:
        annotate_rollouts(run, batch)
        write_rollouts(run.run_dir.rollouts(step), rollouts, step, pieces=run.token_pieces)
    return metrics | {"training/global_step": step, "training/epoch": epoch}


def compute_experience(run: Run, batch: Batch, step: int) -> None:
    """Fill in the log-probs and values that advantages and losses need: old policy, reference, critic."""
    algorithm = run.config.algorithm
    if algorithm.bypass_mode:
        batch.old_logp = batch.rollout_logp
    elif run.needs_old_log_probs:
        exact_kl = algorithm.use_kl_in_reward and algorithm.kl_penalty == "full"
        with run.stage(Stage.ACTOR_COMPUTE_LOG_PROB, step, len(batch), batch) as advance:
            run.actor.compute_log_probs(batch, advance, exact_kl=exact_kl)
    if run.reference is not None and run.config.samples_kl:
        with run.stage(Stage.REF_COMPUTE_LOG_PROB, step, len(batch), batch) as advance:
            run.reference.compute_log_probs(batch, advance)
    if run.critic is not None:
        with run.stage(Stage.COMPUTE_VALUES, step, len(batch), batch) as advance:
            run.critic.compute_values(batch, advance)


def compute_advantages(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Subtract the KL penalty from the rewards where asked for, and set advantages and returns."""
    algorithm, metrics = run.config.algorithm, {}
    if algorithm.use_kl_in_reward:
        assert batch.old_logp is not None
        kl = kl_penalty(batch.old_logp, batch.ref_logp, algorithm.kl_penalty, full_kl=batch.exact_kl) * batch.mask
        batch.token_rewards = batch.token_rewards - run.kl_control.coef * kl
        mean_kl = float(masked_mean(kl, batch.mask))
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/kl_coef": run.kl_control.coef}
        if step > run.config.trainer.critic_warmup:  # until then the policy rests, and its KL of 0 says nothing
            run.kl_control.update(mean_kl, len(batch))
    batch.advantages, batch.returns = run.estimator(
        AdvantageInputs(
            token_rewards=batch.token_rewards,
            mask=batch.mask,
            group=batch.group,
            values=batch.values,
            greedy_scores=batch.greedy_scores,
            reward_components=batch.reward_components,
            component_weights=component_weights(run),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        )
    )
    rewards = (batch.token_rewards * batch.mask).sum(dim=1)[batch.mask.any(dim=1)]
    return (
        metrics
        | spread("critic/rewards", rewards)
        | spread("critic/advantages", batch.advantages[batch.mask])
        | spread("critic/returns", batch.returns[batch.mask])
        | ({} if batch.values is None else spread("critic/values", batch.values[batch.mask]))
    )


def correct_mismatch(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Set the weights, and reject from the mask, what corrects for the rollout policy; return the `mismatch/*` metrics.

    Only where something is applied: what is merely measured waits for the update, whose forward pass then supplies the
    training policy's log-probs. In bypass mode the ratio is known only inside the update, and the actor applies it there.
    """
    if not run.corrects:
        return {}
    assert run.correction is not None and batch.old_logp is not None
    with run.stage(Stage.CORRECTION, step):
        correction = correct(batch.old_logp, batch.rollout_logp, batch.mask, run.correction)
    if run.config.algorithm.rollout_is:
        batch.correction_weights = correction.weights
    # After the advantages: a rejected sample trains nothing, yet its reward is part of what the others are compared with.
    batch.mask = correction.mask
    return correction.metrics


def update(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Update the critic and, once it is warm, the actor.

    Raises:
        NonFiniteError: NaN or Inf; the batch is saved.
    """
    metrics: dict[str, float] = {}
    if run.critic is not None:
        num_samples = len(batch) * run.config.critic.ppo_epochs
        with run.stage(Stage.CRITIC_UPDATE, step, num_samples, batch) as advance:
            metrics |= run.critic.update(batch, step=step, on_done=advance)
    if step > run.config.trainer.critic_warmup:
        num_samples = len(batch) * run.config.actor_rollout_ref.actor.ppo_epochs
        with run.stage(Stage.ACTOR_UPDATE, step, num_samples, batch) as advance:
            metrics |= run.actor.update(batch, step=step, on_done=advance)
    return metrics
