"""One whole GRPO step, 64 samples of 48 tokens in groups of 8, one pass, one optimizer step: Pellucid against TRL.

    python benchmarks/grpo_step.py [--trl-python VENV/bin/python]

Both use the same weights, prompts, reward function, lengths and number of optimizer steps; model loading is left out.
"""

import tempfile
import time
from pathlib import Path

import torch

from common import Setup, gemm_gflops, parser, report, reward_score, run_peer
from pellucid.agents.llm import sample_rollouts
from pellucid.algo.advantages import AdvantageInputs, grpo
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.config.schema.actor import ActorConfig
from pellucid.roles.actor import Actor, ActorSettings
from pellucid.rollout.requests import SamplingParams
from pellucid.types import Samples, Score, TrainBatch

GROUP, NEW_TOKENS = 8, 48


def pellucid_step(setup: Setup, step: int) -> dict[str, float]:
    """Run one step as the loop does and return its times in seconds."""
    engine = setup.rollout_engine(len(setup.prompts) * GROUP)
    config = ActorConfig(strategy="fsdp2", ppo_mini_batch_size=len(setup.prompts), use_dynamic_bsz=True)
    settings = ActorSettings(PolicyLoss.named("vanilla"), temperature=1.0, max_response_length=NEW_TOKENS, seed=0)
    actor = Actor(setup.engine, config, settings)
    start = time.perf_counter()
    rollouts = sample_rollouts(engine, setup.prompts, SamplingParams(n=GROUP, max_tokens=NEW_TOKENS, ignore_eos=True), stream=("bench", step))
    sampled = time.perf_counter()
    samples = Samples.pad(rollouts, [Score(reward_score(rollout.text)) for rollout in rollouts])
    advantages, returns = grpo(AdvantageInputs(samples.token_rewards, samples.mask, samples.group))
    actor.update(TrainBatch(**vars(samples), advantages=advantages, returns=returns, loss_mask=samples.mask), step=step)
    end = time.perf_counter()
    tokens = sum(len(r.token_ids) for r in rollouts)
    return {"seconds": end - start, "rollout_s": sampled - start, "update_s": end - sampled, "new_tokens": float(tokens)}


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--trl-python", default=None, help="Python of an environment with trl (benchmarks/peers/trl_grpo_step.py)")
    options_parser.add_argument("--trl-micro-batch", type=int, default=16)
    options = options_parser.parse_args()
    setup = Setup(options.model, options.micro_tokens)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in setup.prompts)
    samples = len(setup.prompts) * GROUP
    peak = gemm_gflops()
    # Sampling 2 and the update 6 FLOP a parameter and token, each sequence with its own prompt in the update.
    flops = setup.num_parameters * (2 * (prompt_tokens + samples * NEW_TOKENS) + 6 * GROUP * (prompt_tokens + len(setup.prompts) * NEW_TOKENS))
    rows: list[dict] = [{"system": "arithmetic limit", "seconds": flops / peak / 1e9, "gemm_gflops": peak}]
    pellucid_step(setup, 0)
    rows.append({"system": "pellucid"} | min((pellucid_step(setup, 1 + repeat) for repeat in range(options.repeats)), key=lambda row: row["seconds"]))
    with tempfile.TemporaryDirectory() as folder:
        trl = run_peer(options.trl_python, "trl_grpo_step.py", "--model", setup.model_path, "--prompts", str(setup.prompts_json(Path(folder))),
                       "--group", str(GROUP), "--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--micro-batch", str(options.trl_micro_batch))
    rows.append({"system": "trl", **{key: trl[key] for key in ("seconds", "rollout_s", "update_s", "new_tokens")}} if trl else {"system": "trl"})
    for row in rows:
        if row.get("seconds"):
            row["over_pellucid"] = row["seconds"] / rows[1]["seconds"]
    report("one GRPO step", rows, options.json)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
