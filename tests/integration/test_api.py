"""The Python API as scripts and notebooks use it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pellucid
from pellucid.errors import UserError

ROOT = Path(__file__).parents[2]
KEYS = {
    "data": {"train_files": "task:arithmetic?level=2&size=50", "val_files": "task:arithmetic?level=2&size=8", "train_batch_size": 4},
    "actor_rollout_ref": {"model": {"path": "builtin"}, "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": 4}, "rollout": {"n": 4}},
    "trainer": {"default_local_dir": "run", "total_training_steps": 3, "test_freq": 1, "logger": ["console"]},
}
SCRIPT = """
import json, pellucid

def watch(run, step, metrics):
    seen.append(step)
    return "end" if step == 2 else None

seen = []
record = pellucid.train(json.loads(KEYS) | {"reward_model": {"functions": {"rewards.py:ones": 1.0}}}, [watch])
answers = pellucid.generate(record.path, ["12+30=", "7+8="], samples=2, temperature=1.0, max_tokens=8)
print("FOUND", json.dumps({
    "seen": seen, "steps": list(record.metrics.index), "saved": list(record.checkpoints), "ended": record.starts[-1]["exit_reason"],
    "samples": len(record.rollouts(2)), "answers": [len(group) for group in answers], "tokens": len(answers[0][0].token_ids),
    "metrics": pellucid.evaluate(record.path, num=5), "vocabulary": record.load_model()[0].config.vocab_size,
}))
"""


@pytest.mark.processes
def test_a_script_without_main_guard_trains_looks_and_asks(tmp_path):
    """Reward functions run in processes of their own, which must not run the script again."""
    (tmp_path / "rewards.py").write_text("def ones(data_source, solution_str, ground_truth, extra_info):\n    return solution_str.count('1')\n")
    (tmp_path / "script.py").write_text(SCRIPT.replace("KEYS", repr(json.dumps(KEYS))))
    command, environment = [sys.executable, "script.py"], os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.partition("FOUND ")[2])
    assert found["seen"] == found["steps"] == [0, 1, 2]
    assert (found["saved"], found["ended"], found["samples"]) == ([2], "finished", 16)
    assert found["answers"] == [2, 2] and 0 < found["tokens"] <= 8
    assert found["metrics"]["val/arithmetic/num"] == 5
    assert found["vocabulary"] == 25


def test_a_config_comes_of_keys_sections_and_overrides():
    config = pellucid.load_config(KEYS, "trainer.total_training_steps=7", trainer={"seed": 3})
    assert (config.trainer.total_training_steps, config.trainer.seed) == (7, 3)
    assert config.data.train_batch_size == 4
    with pytest.raises(UserError, match=r"Did you mean 'trainer\.total_training_steps'"):
        pellucid.load_config(KEYS, trainer={"total_trainig_steps": 3})


def test_the_best_checkpoint_stays_and_a_run_that_gets_no_better_ends(tmp_path, monkeypatch, capsys):
    """The planted metric is best at step 2; of the others only the newest checkpoint is kept."""
    monkeypatch.chdir(tmp_path)
    own = {"max_actor_ckpt_to_keep": 1, "total_training_steps": 9, "keep_best": "critic/score/mean", "early_stopping_patience": 3}
    config = pellucid.load_config(KEYS, "data.val_files=null", "trainer.test_freq=-1", trainer={**own, "save_freq": 1})

    original = pellucid.Run.log

    def log(run: pellucid.Run, step: int, metrics: dict[str, float]) -> set[str]:
        return original(run, step, metrics | {"critic/score/mean": 9.0 if step == 2 else float(step)})

    monkeypatch.setattr(pellucid.Run, "log", log)
    record = pellucid.train(config)
    assert list(record.metrics.index) == [1, 2, 3, 4, 5]
    assert list(record.checkpoints) == [2, 5]
    capsys.readouterr()
    assert list(pellucid.train(config).metrics.index) == [1, 2, 3, 4, 5], "it would only end again"
    assert "trainer.early_stopping_patience" in " ".join(capsys.readouterr().out.split())


def test_a_validation_metric_that_the_run_does_not_have_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="Did you mean 'val/arithmetic/accuracy'"):
        pellucid.train(pellucid.load_config(KEYS, trainer={"keep_best": "val/arithmetik/accuracy"}))


def test_a_callback_that_answers_nonsense_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="returned True"):
        pellucid.train(KEYS, [lambda run, step, metrics: True])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["own_loop.py", "tour.ipynb"])
def test_the_examples_run(name, tmp_path, monkeypatch):
    """The notebook's cells run one after the other, as they stand."""
    text = (ROOT / "examples" / name).read_text()
    if name.endswith(".ipynb"):
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    monkeypatch.chdir(ROOT)
    text = text.replace("total_training_steps=20", "total_training_steps=2")
    exec(compile(text.replace('"recipes/demo.yaml",', f'"recipes/demo.yaml", "trainer.default_local_dir={tmp_path}/run",'), name, "exec"), {})
