"""How far the rollout engine's log-probabilities are from the trainer's, over 2,000 sampled tokens of the same weights.

python benchmarks/policy_gap.py
"""

import torch

from common import Setup, parser, report
from pellucid.algo.mismatch import mismatch_metrics
from pellucid.rollout.protocol import SamplingParams
from pellucid.training.common.packing import sequences_of
from pellucid.types import Batch


def main() -> None:
    options = parser(__doc__).parse_args()
    setup = Setup(options.model, options.micro_tokens)
    rollouts = setup.rollout_engine(64).generate(setup.prompts, SamplingParams(n=8, max_tokens=32, ignore_eos=True), stream=("gap",))
    for rollout in rollouts:
        rollout.reward = 0.0
    batch = Batch.from_rollouts(rollouts)
    training = setup.engine.compute_log_probs(sequences_of(rollouts), temperature=1.0).logp
    metrics = mismatch_metrics(training, batch.rollout_logp, batch.mask)
    report("rollout against training log-probs, float32",
           [{"tokens": int(batch.mask.sum())} | {name.removeprefix("mismatch/"): metrics[name] for name in
            ("mismatch/logp_max_abs_diff", "mismatch/logp_mean_abs_diff", "mismatch/mismatch_kl", "mismatch/mismatch_k3_kl")}], options.json)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
