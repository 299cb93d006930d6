"""A training loop of one's own, from the functions that `pellucid train` is made of: REINFORCE on two-digit sums.

    python examples/own_loop.py

Every line can be changed: what is sampled, how it is scored, what an advantage is, when weights are handed over.
"""

import torch

import pellucid
from pellucid.agents.llm import sample_rollouts
from pellucid.produce import batch, sampling_params
from pellucid.rollout.requests import WeightUpdate, run_sync
from pellucid.types import Experience, TrainBatch

config = pellucid.load_config("recipes/demo.yaml", "trainer.total_training_steps=20", "trainer.experiment_name=own_loop")
params = sampling_params(config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout)

with pellucid.prepare(config) as run:
    for step in range(1, run.total_steps + 1):
        rollouts = sample_rollouts(run.rollout_engine, run.loader.next_batch(), params, stream=("rollout", step))
        scores, _ = run.rewards.score(rollouts, run.stage, step=step)
        samples = batch(run, rollouts, scores)  # tensors [B, T], right-padded over what follows the prompt
        rewards = torch.tensor([score.reward or 0.0 for score in scores])
        advantages = (rewards - rewards.mean())[:, None] * samples.mask  # the batch's mean as baseline
        old_logp = run.actor.compute_log_probs(samples).logp
        experience = Experience(**vars(samples), old_logp=old_logp, ref_logp=None, reward_kl=None, values=None)
        trained = TrainBatch(
            **vars(experience), advantages=advantages, returns=advantages, loss_mask=samples.mask
        )
        metrics = run.actor.update(trained, step=step).metrics
        run_sync(run.rollout_engine.load_weights(WeightUpdate(run.actor.version)))
        print(f"step {step:3d}  reward {rewards.mean():.3f}  loss {metrics['actor/pg_loss']:+.4f}")
