"""The stages of one training step, each a function from payload to payload; `loop.py` shows their order.

Prompts come from the loader; what leaves is the step's metrics and, on disk, its rollout dump.
"""

import torch
from safetensors.torch import save_file

from pellucid import devices
from pellucid.algo.advantages import ESTIMATORS
from pellucid.algo.aggregation import masked_mean
from pellucid.algo.kl import kl_penalty
from pellucid.algo.mismatch import mismatch_metrics
from pellucid.controller.build import Run
from pellucid.profiler.spans import Stage
from pellucid.rollout.protocol import SamplingParams
from pellucid.rollout_dump import write_rollouts
from pellucid.training.protocol import NonFiniteError
from pellucid.types import Batch, Rollout


def train_step(run: Run, step: int) -> dict[str, float]:
    """Run one step and return its metrics (validation, checkpoint and timings are the loop's).

    Raises:
        NonFiniteError: NaN or Inf in the update; the batch is in `failures/` of the run.
    """
    config = run.config
    with run.spans.span("step", step=step):
        epoch = run.loader.epoch
        rollouts = generate(run, step)
        metrics = score(run, rollouts, step)
        batch = Batch.from_rollouts(rollouts)
        metrics |= batch_metrics(batch)
        if run.needs_old_log_probs:
            advance = run.display.stage(Stage.ACTOR_COMPUTE_LOG_PROB, len(batch))
            with run.spans.span(Stage.ACTOR_COMPUTE_LOG_PROB, step=step):
                run.actor.compute_log_probs(batch, advance)
        if run.reference is not None:
            advance = run.display.stage(Stage.REF_COMPUTE_LOG_PROB, len(batch))
            with run.spans.span(Stage.REF_COMPUTE_LOG_PROB, step=step):
                run.actor.num_tokens_scored += run.reference.compute_log_probs(batch, advance)
        with run.spans.span(Stage.ADVANTAGE, step=step):
            metrics |= compute_advantages(run, batch)
        metrics |= staleness_metrics(run, batch)
        metrics |= update(run, batch, step)
        # The native engine reads the actor's own weights, so this costs nothing; other engines copy here.
        with run.spans.span(Stage.WEIGHT_SYNC, step=step):
            run.rollout_engine.sync_weights()
        metrics |= policy_gap_metrics(run, batch)
        if config.trainer.dump_rollouts:
            write_rollouts(run.run_dir.rollouts(step), rollouts, step, pieces=run.token_pieces)
    return metrics | {"training/global_step": step, "training/epoch": epoch}


def generate(run: Run, step: int) -> list[Rollout]:
    """Sample `rollout.n` responses to each prompt of the next batch."""
    prompts, config = run.loader.next_batch(), run.config.actor_rollout_ref.rollout
    params = SamplingParams(
        n=config.n,
        max_tokens=config.response_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        do_sample=config.do_sample,
        ignore_eos=config.ignore_eos,
        stop=config.stop,
    )
    advance = run.display.stage(Stage.ROLLOUT_GENERATE, len(prompts) * config.n)
    with run.spans.span(Stage.ROLLOUT_GENERATE, step=step):
        return run.rollout_engine.generate(prompts, params, stream=("rollout", step), on_done=advance)


def score(run: Run, rollouts: list[Rollout], step: int) -> dict[str, float]:
    """Fill in rewards; return the `reward/*` metrics."""
    advance = run.display.stage(Stage.REWARD, len(rollouts))
    with run.spans.span(Stage.REWARD, step=step):
        stats = run.scorer.score(rollouts, on_done=lambda _: advance(1))
    return {
        "reward/num_failures": stats.num_failures,
        "reward/num_timeouts": stats.num_timeouts,
        "reward/time_s": stats.time_s,
    }


def compute_advantages(run: Run, batch: Batch) -> dict[str, float]:
    """Subtract the KL penalty from the rewards where asked for, and set advantages and returns."""
    algorithm, metrics = run.config.algorithm, {}
    if algorithm.use_kl_in_reward:
        assert batch.old_logp is not None and batch.ref_logp is not None
        kl = kl_penalty(batch.old_logp, batch.ref_logp, algorithm.kl_penalty) * batch.mask
        batch.token_rewards = batch.token_rewards - algorithm.kl_ctrl.kl_coef * kl
        metrics = {"actor/kl_loss": float(masked_mean(kl, batch.mask)), "actor/kl_coef": algorithm.kl_ctrl.kl_coef}
    batch.advantages, batch.returns = ESTIMATORS[algorithm.adv_estimator](
        batch.token_rewards, batch.mask, batch.group, norm_by_std=algorithm.norm_adv_by_std_in_grpo
    )
    rewards = (batch.token_rewards * batch.mask).sum(dim=1)[batch.mask.any(dim=1)]
    return (
        metrics
        | _spread("critic/rewards", rewards)
        | _spread("critic/advantages", batch.advantages[batch.mask])
        | _spread("critic/returns", batch.returns[batch.mask])
    )


def update(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Update the actor; on NaN or Inf save the batch and pass the error on."""
    epochs = run.config.actor_rollout_ref.actor.ppo_epochs
    advance = run.display.stage(Stage.ACTOR_UPDATE, len(batch) * epochs)
    try:
        with run.spans.span(Stage.ACTOR_UPDATE, step=step):
            return run.actor.update(batch, step=step, on_done=advance)
    except NonFiniteError:
        folder = run.run_dir.path / "failures" / f"step_{step:06d}"
        write_rollouts(folder / "rollouts.jsonl.zst", batch.rollouts, step, pieces=run.token_pieces)
        save_file({name: tensor.contiguous() for name, tensor in batch.tensors().items()}, folder / "batch.safetensors")
        raise


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return scores and lengths of the sampled batch."""
    lengths = torch.tensor([float(len(rollout.token_ids)) for rollout in batch.rollouts])
    prompts = torch.tensor([float(len(rollout.prompt.token_ids)) for rollout in batch.rollouts])
    scores = torch.tensor([rollout.reward for rollout in batch.rollouts if rollout.reward is not None])
    cut = sum(rollout.finish_reason == "length" for rollout in batch.rollouts) / len(batch)
    return (
        {"response_length/clip_ratio": cut, "perf/total_num_tokens": float(lengths.sum() + prompts.sum())}
        | _spread("critic/score", scores)
        | _spread("response_length", lengths)
        | _spread("prompt_length", prompts)
    )


def policy_gap_metrics(run: Run, batch: Batch) -> dict[str, float]:
    """Put the training policy's log-probs into the rollouts and return how far the rollout policy's are from them."""
    if batch.old_logp is None:
        return {}
    for row, rollout in enumerate(batch.rollouts):
        if rollout.failure is None:
            rollout.training_logprobs = batch.old_logp[row, : len(rollout.token_ids)].tolist()
    if not run.config.actor_rollout_ref.rollout.calculate_log_probs:
        return {}
    return mismatch_metrics(batch.old_logp, batch.rollout_logp, batch.mask)


def staleness_metrics(run: Run, batch: Batch) -> dict[str, float]:
    """Return how many updates ago the tokens about to be trained on were sampled: 0 in this synchronous loop."""
    ages = torch.tensor(
        [float(run.actor.engine.version - version) for rollout in batch.rollouts for version in rollout.versions]
    )
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def speed_metrics(run: Run, num_tokens: float) -> dict[str, float]:
    """Return timings since the last call, throughput and utilisation.

    Args:
        run: whose spans and token counts are read and reset.
        num_tokens: prompt and response tokens of the step's samples.
    """
    timings = run.spans.step_timings()
    training_s = sum(
        timings.get(f"timing_s/{stage}", 0.0)
        for stage in (Stage.ACTOR_COMPUTE_LOG_PROB, Stage.REF_COMPUTE_LOG_PROB, Stage.ACTOR_UPDATE)
    )
    flops = run.num_parameters * (6 * run.actor.num_tokens_trained + 2 * run.actor.num_tokens_scored)
    run.actor.num_tokens_trained = run.actor.num_tokens_scored = 0
    step_s = timings["timing_s/step"]
    return (
        timings
        | {
            "perf/time_per_step": step_s,
            "perf/throughput": num_tokens / step_s,
            "perf/mfu": flops / training_s / devices.peak_flops(run.device, run.dtype) if training_s else 0.0,
        }
        | devices.memory_gb(run.device)
    )


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
