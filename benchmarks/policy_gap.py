"""How far the rollout engine's log-probabilities are from the trainer's, over 2,048 sampled tokens of the same weights.

With --simulate also how far the mismatch laboratory's are, setting by setting. The built-in model answers sums and ends
its responses itself, which makes some 7,000 tokens.

    python benchmarks/policy_gap.py --simulate
    python benchmarks/policy_gap.py --model builtin --simulate --noise 0.01 0.03 0.1
"""

from typing import Any

import torch

from common import Setup, parser, report
from pellucid.algo.mismatch import mismatch_metrics
from pellucid.rollout.native import MismatchedEngine, MismatchSettings
from pellucid.rollout.protocol import SamplingParams
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import BUILTIN
from pellucid.training.common.packing import sequences_of
from pellucid.types import Batch

METRICS = ("logp_mean_abs_diff", "logp_max_abs_diff", "mismatch_kl", "mismatch_k3_kl")


def gap(setup: Setup, settings: MismatchSettings) -> dict[str, Any]:
    """Sample under the settings, score the tokens with the trainer and return how far the log-probs are apart."""
    engine = MismatchedEngine(setup.rollout_engine(64), settings, seed=0)
    params = SamplingParams(n=8, max_tokens=32, ignore_eos=setup.model_path != BUILTIN)
    rollouts = engine.generate(setup.prompts, params, stream=("gap",))
    for rollout in rollouts:
        rollout.reward = 0.0
    batch = Batch.from_rollouts(rollouts)
    training = setup.engine.forward(sequences_of(rollouts), LogProbHead(temperature=1.0)).logp
    assert training is not None
    metrics = mismatch_metrics(training, batch.rollout_logp, batch.mask)
    name = settings.dtype or (f"noise {settings.noise:g}" if settings.noise else "native")
    return {"rollout policy": name, "tokens": int(batch.mask.sum())} | {name: metrics[f"mismatch/{name}"] for name in METRICS}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--simulate", action="store_true", help="add the rows of the mismatch laboratory")
    arguments.add_argument("--noise", type=float, nargs="*", default=[0.003, 0.01, 0.03], help="noise levels to simulate, in rms of the weights")
    options = arguments.parse_args()
    setup = Setup(options.model, options.micro_tokens)
    settings = [MismatchSettings()]
    if options.simulate:
        settings += [MismatchSettings(dtype="bfloat16"), MismatchSettings(dtype="int8"), *(MismatchSettings(noise=noise) for noise in options.noise)]
    rows = [gap(setup, one) for one in settings]
    report(f"rollout against training log-probs, trainer in float32, {options.model}", rows, options.json)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
