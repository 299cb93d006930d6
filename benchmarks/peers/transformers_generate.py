"""Time plain `transformers` generation of a padded batch on the CPU in fp32: the baseline of the rollout benchmark.

Reads the prompts of `prompts.py`, in turn up to `--num-sequences`; the last line on stdout is the result as JSON.
Runs in Pellucid's own environment or any with torch and transformers; attention is transformers' default (sdpa).

    python benchmarks/peers/transformers_generate.py --model MODEL_DIR --prompts prompts.json --num-sequences 32
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON of prompts.py")
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rows = json.loads(options.prompts.read_text())
    ids = [rows[index % len(rows)]["token_ids"] for index in range(options.num_sequences)]
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    model.generate(**batch, **sampling, min_new_tokens=2, max_new_tokens=2)
    begin = time.perf_counter()
    output = model.generate(**batch, **sampling, min_new_tokens=options.max_new_tokens,
                            max_new_tokens=options.max_new_tokens)
    seconds = time.perf_counter() - begin
    tokens = len(ids) * (output.shape[1] - batch["input_ids"].shape[1])
    result = {
        "system": f"transformers {transformers.__version__}", "torch": torch.__version__,
        "threads": torch.get_num_threads(), "attention": model.config._attn_implementation, "sequences": len(ids),
        "prompt_tokens": sum(map(len, ids)), "tokens": tokens, "seconds": seconds, "tok_per_s": tokens / seconds}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
