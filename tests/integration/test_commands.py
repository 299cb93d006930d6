"""`pellucid export`, `eval`, `rollouts` and `sft` on a real run; and what the command line itself promises."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from commands import ENVIRONMENT, MAIN
from safetensors.torch import load_file

from conftest import NUM_STEPS, contents, metrics, state
from pellucid.files.rollout_dump import read_rollouts
from pellucid.training.common.models import BUILTIN_FOLDER

TASK = "task:arithmetic?level=2&size=8"
SFT = f"""
data: {{train_files: "task:arithmetic?level=1&size=40", val_files: "task:arithmetic?level=1&size=4", train_batch_size: 8}}
model:
  tokenizer_path: {BUILTIN_FOLDER}
  init_config: {{model_type: llama, vocab_size: 25, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
                 num_attention_heads: 2, num_key_value_heads: 2, tie_word_embeddings: true, eos_token_id: 1, pad_token_id: 0}}
optim: {{lr: 0.01}}
trainer: {{default_local_dir: run, total_training_steps: 4, save_freq: 1, logger: [console]}}
"""


def plain_logits(folder, weights=None) -> torch.Tensor:
    """Return the logits of a model folder, loaded by transformers alone, on a few prompts; `weights` replace its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if weights is not None:
        missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(["12+34=", "99+99=", "10+20="], return_tensors="pt")).logits


def test_export_is_a_model_folder_with_identical_logits(finished, work):
    done = work.run("export", str(finished), "--out", "model")
    assert "wrote model" in done.text
    expected = plain_logits(BUILTIN_FOLDER, finished / "checkpoints" / f"global_step_{NUM_STEPS}" / "model.safetensors")
    assert torch.equal(plain_logits(work.folder / "model"), expected)
    assert not torch.equal(plain_logits(BUILTIN_FOLDER), expected), "training changed nothing"
    assert "is not empty" in work.run("export", str(finished), "--out", "model", status=2).text


def test_export_of_an_earlier_step_and_in_bfloat16(finished, work):
    work.run("export", str(finished), "--step", "1", "--out", "one")
    work.run("export", str(finished / "checkpoints" / "global_step_1"), "--out", "half", "--dtype", "bfloat16")
    expected = plain_logits(BUILTIN_FOLDER, finished / "checkpoints" / "global_step_1" / "model.safetensors")
    assert torch.equal(plain_logits(work.folder / "one"), expected)
    half = load_file(work.folder / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    whole = load_file(work.folder / "one" / "model.safetensors")
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in half)


def test_hf_model_in_save_contents(finished, work):
    parts = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    work.train("trainer.total_training_steps=1", "data.val_files=null", parts)
    folder = work.run_dir / "checkpoints" / "global_step_1"
    assert torch.equal(plain_logits(folder / "hf_model"), plain_logits(BUILTIN_FOLDER, folder / "model.safetensors"))
    assert state(work.run_dir, 1) == state(finished, 1)


def test_a_checkpoint_without_the_optimizer_says_so_on_resume(work):
    work.train("trainer.total_training_steps=1", "data.val_files=null", "actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    done = work.train("trainer.total_training_steps=2", "data.val_files=null", status=2)
    assert "load_contents" in done.text and "'optimizer'" in done.text
    assert metrics(work.run_dir)[-1]["step"] == 1


def test_eval_of_a_run_gives_its_last_validation(finished, work):
    before = contents(finished)
    done = work.run("eval", str(finished), "--files", TASK, "--out", "answers.jsonl.zst")
    accuracy = metrics(finished)[-1]["val/arithmetic/accuracy"]
    assert f"arithmetic {accuracy:.1%}" in re.sub(r"[│┃]", " ", done.text).replace("  ", " ")
    records = read_rollouts(work.folder / "answers.jsonl.zst")
    assert sum(record["reward"] for record in records) / 8 == accuracy
    assert contents(finished) == before


def test_eval_of_the_built_in_model_a_folder_and_several_samples(finished, work):
    work.run("eval", "builtin", "--files", TASK, "--num", "4", "--out", "named.jsonl.zst")
    work.run("eval", str(BUILTIN_FOLDER), "--files", TASK, "--num", "4", "--out", "folder.jsonl.zst")
    assert read_rollouts(work.folder / "named.jsonl.zst") == read_rollouts(work.folder / "folder.jsonl.zst")
    done = work.run("eval", "builtin", "--files", TASK, "--files", "task:arithmetic?level=1", "--num", "3")
    names = [line.split()[1] for line in done.output.splitlines() if line.startswith("│")]
    assert names == ["arithmetic", "task:arithmetic?level=1"], "a task that is there twice is called as it was given"
    done = work.run("eval", str(finished / "checkpoints" / "global_step_1"), "--files", TASK, "--num", "2", "--samples", "4")
    assert "pass@4" in done.text
    shown = work.run("rollouts", "named.jsonl.zst", "--limit", "1").text
    assert "named.jsonl.zst: 4 samples" in shown and "… 3 more" in shown


GAME = """
data: {train_files: "task:guess?highest=15", val_files: "task:guess?highest=15&size=6", train_batch_size: 4, max_response_length: 24}
actor_rollout_ref:
  model: {path: builtin}
  actor: {strategy: fsdp2, ppo_mini_batch_size: 4, use_dynamic_bsz: true}
  rollout: {n: 2, agent: {name: env, environment: guess, max_turns: 3}}
"""


def test_eval_asks_as_a_recipe_does_with_its_agent(finished, work):
    work.write("game.yaml", GAME)
    done = work.run("eval", str(finished), "--recipe", "game.yaml", "--out", "answers.jsonl.zst")
    records = read_rollouts(work.folder / "answers.jsonl.zst")
    assert "guess" in done.text and len(records) == 6 and all(len(record["turns"]) in (1, 2, 3) for record in records)
    assert any(use["name"] == "environment" for record in records for turn in record["turns"] for use in turn["tool_calls"])
    assert "--files" in work.run("eval", "builtin", status=2).text


def test_chat_with_a_run(finished):
    answered = [sys.executable, "-c", MAIN, "chat", str(finished), "--max-tokens", "6"]
    done = subprocess.run(answered, input="12+7=\n/new\n12+7=\n", env=ENVIRONMENT, capture_output=True, text=True, check=True)
    first, again = (re.findall(r"^> (\d+)$", part, re.MULTILINE) for part in done.stdout.split("A new chat."))
    assert len(first) == 1 and first == again, done.stdout


def test_rollouts_shows_a_step(finished, work):
    last = work.run("rollouts", str(finished)).text
    assert f"step {NUM_STEPS}: 16 samples" in last and "… 6 more" in last
    records = read_rollouts(finished / "rollouts" / "step_000002.jsonl.zst")
    done = work.run("rollouts", str(finished), "--step", "2", "--limit", "16", "--tokens")
    assert all(record["prompt"] in done.text and record["uid"] in done.text for record in records)
    assert f"{records[0]['rollout_logprobs'][0]:.4f}" in done.text and f"{records[0]['training_logprobs'][0]:.4f}" in done.text
    right = work.run("rollouts", str(finished), "--step", "2", "--min-reward", "1", "--limit", "16").text
    assert right.count("expected:") == sum(record["reward"] == 1 for record in records)
    assert f", {NUM_STEPS}." in work.run("rollouts", str(finished), "--step", "99", status=2).text


def test_sft_trains_resumes_and_leaves_a_model(work):
    work.write("sft.yaml", SFT)
    work.run("sft", "sft.yaml", "trainer.default_local_dir=whole")
    whole = work.folder / "whole"
    losses = [row["train/loss"] for row in metrics(whole)]
    assert len(losses) == 4 and losses[-1] < losses[0] and metrics(whole)[-1]["val/loss"] > 0
    assert torch.equal(plain_logits(whole / "model"), plain_logits(whole / "model", whole / "checkpoints" / "global_step_4" / "model.safetensors"))
    work.run("sft", "sft.yaml", "trainer.total_training_steps=2")
    resumed = work.run("sft", "sft.yaml")
    assert "2 of 4 steps remain" in resumed.text
    assert state(work.run_dir) == state(whole)
    before = contents(work.run_dir)
    assert "this run is finished" in work.run("sft", "sft.yaml").text
    assert contents(work.run_dir) == before
    work.run("export", "run", "--out", "exported")
    assert torch.equal(plain_logits(work.folder / "exported"), plain_logits(whole / "model"))


def test_sft_that_is_not_finite_stops_with_one_message(work):
    work.write("sft.yaml", SFT)
    done = work.run("sft", "sft.yaml", "optim.lr=10", "optim.weight_decay=1e38", status=1)
    assert "Traceback" not in done.output and "weights" in done.text
    assert not (work.run_dir / "checkpoints").exists()
    work.run("sft", "sft.yaml", "trainer.total_training_steps=1", "model.init_config.num_hidden_layers=1")
    assert json.loads((work.run_dir / "model" / "config.json").read_text())["num_hidden_layers"] == 1, "that of the start before"


def test_help_names_every_command():
    """That it stays quick, because it imports no torch, is a rule of the structure test."""
    done = subprocess.run([sys.executable, "-c", MAIN, "--help"], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for name in ("train", "sft", "eval", "chat", "export", "rollouts", "config"):
        assert name in done.stdout


@pytest.mark.parametrize("command", ["train", "sft", "eval", "chat", "export", "rollouts", "config"])
def test_each_command_has_help(work, command):
    assert "Usage" in work.run(command, "--help").output
