"""Time one whole GRPO step of TRL's `GRPOTrainer` on the CPU: generate, score, one optimizer step over all samples.

Reads the prompts of `prompts.py` and the reward of `reward.py`; the last line on stdout is the result as JSON.

    python3 -m venv venv-trl
    venv-trl/bin/pip install torch==2.13.0 && venv-trl/bin/pip install trl==1.16.0 'transformers>=5,<6'
    venv-trl/bin/python benchmarks/peers/trl_grpo_step.py --model MODEL_DIR --prompts prompts.json --ignore-eos

What favours TRL: gradient checkpointing off (its default is on), no reference model (beta 0), old log-probabilities
not recomputed (one pass, generation batch = optimizer batch), all samples generated in one batch. `--micro-batch`
only bounds memory: samples in a forward and backward, gradients accumulated over all of them.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from reward import score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Wall seconds from the first micro-batch's request for data (generation included) to after the optimizer step."""

    def __init__(self) -> None:
        self.begin_s = self.step_s = 0.0

    def on_step_begin(self, *arguments, **named) -> None:
        self.begin_s = time.perf_counter()

    def on_step_end(self, *arguments, **named) -> None:
        self.step_s = time.perf_counter() - self.begin_s


class TimedTrainer(GRPOTrainer):
    """`GRPOTrainer` that notes how long rollout plus scoring took and how many tokens it made; changes nothing else."""

    rollout_s = 0.0
    prompt_tokens = new_tokens = samples = 0

    def _generate_and_score_completions(self, inputs):
        begin = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.rollout_s += time.perf_counter() - begin
        self.prompt_tokens += int(batch["prompt_mask"].sum())
        self.new_tokens += int(batch["completion_mask"].sum())
        self.samples += len(batch["completion_ids"])
        return batch


def reward_texts(completions, **columns) -> list[float]:
    return [score(text) for text in completions]


def build_trainer(options: argparse.Namespace, clock: StepClock, folder: str) -> TimedTrainer:
    rows = json.loads(options.prompts.read_text())
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    for row in rows:
        if tokenizer(row["text"])["input_ids"] != row["token_ids"]:
            sys.exit(f"--prompts: the text does not tokenize to the given ids: {row['text']!r}")
    total = len(rows) * options.group
    if total % options.micro_batch:
        sys.exit(f"--micro-batch: {options.micro_batch} does not divide {len(rows)} prompts x {options.group} samples")
    config = GRPOConfig(
        output_dir=folder, seed=options.seed, max_steps=1, learning_rate=options.lr, lr_scheduler_type="constant",
        per_device_train_batch_size=options.micro_batch, gradient_accumulation_steps=total // options.micro_batch,
        num_generations=options.group, num_iterations=1, beta=0.0, max_completion_length=options.max_new_tokens,
        generation_kwargs={"min_new_tokens": options.max_new_tokens} if options.ignore_eos else None,
        temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0,
        use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, shuffle_dataset=False,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return TimedTrainer(model, reward_texts, config, Dataset.from_list([{"prompt": row["text"]} for row in rows]),
                        processing_class=tokenizer, callbacks=[clock])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON of prompts.py; each prompt is one group")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--ignore-eos", action="store_true", help="every sample gets exactly --max-new-tokens")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in one forward and backward")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(options, clock, folder)
        before = next(trainer.model.parameters()).detach().clone()
        trainer.train()
    if trainer.state.global_step != 1:
        sys.exit(f"expected one optimizer step, TRL took {trainer.state.global_step}")
    moved = (next(trainer.model.parameters()).detach() - before).abs().max().item()
    result = {
        "system": f"trl {trl.__version__}", "torch": torch.__version__, "transformers": transformers.__version__,
        "threads": torch.get_num_threads(), "micro_batch": options.micro_batch, "samples": trainer.samples,
        "prompt_tokens": trainer.prompt_tokens, "new_tokens": trainer.new_tokens, "seconds": clock.step_s,
        "rollout_s": trainer.rollout_s, "update_s": clock.step_s - trainer.rollout_s, "largest_weight_change": moved,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
