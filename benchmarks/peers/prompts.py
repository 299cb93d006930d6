"""Write the prompts that every system in a benchmark answers: two-digit sums in the model's chat template, from a seed.

The JSON is a list of {"text": templated text, "token_ids": its ids}; needs transformers only.

    python benchmarks/peers/prompts.py --model MODEL_DIR --num 8 --out prompts.json
"""

import argparse
import json
import random
import sys
from pathlib import Path


def make_prompts(model: str, num: int, seed: int = 0) -> list[dict]:
    """Return `num` prompts for the tokenizer in the folder `model`; the same for the same seed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(seed)
    rows = []
    for _ in range(num):
        question = f"What is {draw.randint(10, 99)}+{draw.randint(10, 99)}? Answer with the number only."
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        rows.append({"text": text, "token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--num", type=int, default=8, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    rows = make_prompts(options.model, options.num, options.seed)
    options.out.write_text(json.dumps(rows))
    result = {"prompts": len(rows), "prompt_tokens": sum(len(row["token_ids"]) for row in rows)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
