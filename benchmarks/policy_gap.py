"""How far the rollout engine's log-probabilities are from the trainer's, over 2,048 sampled tokens of the same weights.

With --simulate also how far the mismatch laboratory's are, setting by setting. The built-in model answers sums and ends
its responses itself, which makes some 7,000 tokens.

    python benchmarks/policy_gap.py --simulate
    python benchmarks/policy_gap.py --model builtin --simulate --noise 0.01 0.03 0.1
"""

from typing import Any

import torch

from common import Setup, parser, report
from pellucid.agents.llm import sample_rollouts
from pellucid.algo.correction import correct
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.config.schema.rollout import SimulateMismatchConfig
from pellucid.rollout.native import MismatchedPolicy
from pellucid.rollout.requests import SamplingParams
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import BUILTIN
from pellucid.training.common.packing import sequences_of
from pellucid.types import Samples, Score

METRICS = ("logp_mean_abs_diff", "logp_max_abs_diff", "mismatch_kl", "mismatch_k3_kl")


def gap(setup: Setup, settings: SimulateMismatchConfig) -> dict[str, Any]:
    """Sample under the settings, score the tokens with the trainer and return how far the log-probs are apart."""
    engine = setup.rollout_engine(64, MismatchedPolicy(setup.engine, settings, seed=0))
    params = SamplingParams(n=8, max_tokens=32, ignore_eos=setup.model_path != BUILTIN)
    rollouts = sample_rollouts(engine, setup.prompts, params, stream=("gap",))
    samples = Samples.pad(rollouts, [Score(0.0)] * len(rollouts))
    training = setup.engine.forward(sequences_of(rollouts), LogProbHead(temperature=1.0)).logp
    metrics = correct(training, samples.rollout_logp, samples.mask, AlgorithmConfig()).metrics
    name = settings.dtype or (f"noise {settings.noise:g}" if settings.noise else "native")
    return {"rollout policy": name, "tokens": int(samples.mask.sum())} | {name: metrics[f"mismatch/{name}"] for name in METRICS}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--simulate", action="store_true", help="add the rows of the mismatch laboratory")
    arguments.add_argument("--noise", type=float, nargs="*", default=[0.003, 0.01, 0.03], help="noise levels to simulate, in rms of the weights")
    options = arguments.parse_args()
    setup = Setup(options.model, options.micro_tokens)
    settings = [SimulateMismatchConfig()]
    if options.simulate:
        settings += [SimulateMismatchConfig(dtype="bfloat16"), *(SimulateMismatchConfig(noise=noise) for noise in options.noise)]
    rows = [gap(setup, one) for one in settings]
    report(f"rollout against training log-probs, trainer in float32, {options.model}", rows, options.json)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
