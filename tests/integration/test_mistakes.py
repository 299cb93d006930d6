"""Mistakes of every kind, on the command line, in configs, data and rewards: each is one clear error with status 2.

Each case is what is typed, and words that its answer has; none starts a run. All run in this process.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import Done

from pellucid.cli.main import main
from pellucid.console import error_console
from pellucid.training.common.models import BUILTIN_FOLDER

ACTOR, ROLLOUT, REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward_model.custom_reward_function"
RECIPE = """
data: {train_files: "task:arithmetic?level=2&size=50", train_batch_size: 4, max_prompt_length: 16, max_response_length: 8}
actor_rollout_ref:
  model: {path: builtin}
  actor: {strategy: fsdp2, ppo_mini_batch_size: 4, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 256}
  rollout: {n: 4}
trainer: {default_local_dir: run, total_training_steps: 1, logger: [console]}
"""
SFT = """
data: {train_files: rows.jsonl, train_batch_size: 4, max_length: 24}
model: {path: builtin}
"""
ROW = {"prompt": "12+3=", "answer": "15", "data_source": "arithmetic"}
FILES = {
    "recipe.yaml": RECIPE,
    "sft.yaml": SFT,
    "list.yaml": "- a\n",
    "text.yaml": "just some words\n",
    "empty.yaml": "",
    "broken.yaml": "data: [1,\n",
    "tabs.yaml": "data:\n\ttrain_files: a\n",
    "twice.yaml": "trainer: {seed: 1}\ntrainer: {seed: 2}\n",
    "default.yaml": "defaults: [recip, _self_]\n" + RECIPE,
    "far.yaml": "defaults: [../work/recip, _self_]\n" + RECIPE,
    "binary.yaml": "\x00\x01",
    "rows.jsonl": (json.dumps(ROW) + "\n") * 8,
    "nothing.jsonl": "",
    "half.jsonl": '{"prompt": "1+1=", "ans',
    "number.jsonl": json.dumps(ROW | {"prompt": 5}) + "\n",
    "null.jsonl": json.dumps(ROW | {"prompt": None}) + "\n",
    "late.jsonl": (json.dumps(ROW) + "\n") * 5 + json.dumps({"answer": "2"}) + "\n",
    "blank.jsonl": json.dumps(ROW | {"prompt": ""}) + "\n",
    "chat.jsonl": json.dumps(ROW | {"prompt": [{"role": "user"}]}) + "\n",
    "role.jsonl": json.dumps(ROW | {"prompt": [{"role": "usr", "content": "12+3="}]}) + "\n",
    "source.jsonl": json.dumps(ROW | {"data_source": "homework"}) + "\n",
    "rows.parquet": "no parquet",
    "rows.csv": "prompt,answer\n",
    "rows.json": json.dumps([ROW]),
    "typo.py": "def compute_scores(solution_str): return 1.0\n",
    "raises.py": "raise RuntimeError('no licence')\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "syntax.py": "def compute_score(:\n",
    "imports.py": "import nosuchpackage\n",
    "argument.py": "def compute_score(prompt): return 1.0\n",
    "number.py": "compute_score = 1.0\n",
    "reward.txt": "def compute_score(solution_str): return 1.0\n",
    "good.py": "def compute_score(data_source, solution_str): return 1.0\n",
}

MISTAKES: dict[str, list[tuple[str, str]]] = {
    "command line": [
        ("trian recipe.yaml", "No such command 'trian'"),
        ("train", "Missing argument"),
        ("train recipe.yml", "Did you mean 'recipe.yaml'?"),
        ("train .", "this is a folder. Name one of its recipes"),
        ("train recipe.yaml --seed 1", "No such option: --seed"),
        ("train recipe.yaml trainer.seed", "trainer.seed"),
        ("train recipe.yaml =3", "no key is named. Write key=value."),
        ("train recipe.yaml trainer.seed==3", "trainer.seed"),
        ("train recipe.yaml trainer.seed=1,2", "several values for one key"),
        ("train recipe.yaml trainer.seed=[1", "trainer.seed"),
        ("train recipe.yaml trainer=3", "trainer"),
        ("train recipe.yaml ~trainer.sed", "trainer.sed"),
        ("sft recipe.yaml", "actor_rollout_ref"),
        ("config check sft.yaml", "model"),
        ("config keys zzzz", "All of them: pellucid config keys"),
        ("config keys clip_rato", "Did you mean 'clip_ratio'?"),
        ("config show nothing.yaml", "does not exist"),
        ("config migrate nothing.sh", "nothing.sh"),
        ("eval", "Missing argument"),
        ("eval builtin", "nothing else names problems"),
        ("eval builtn --files task:arithmetic", "builtin"),
        ("eval outputs/nope --files task:arithmetic", "does not exist"),
        ("eval builtin --files task:arithmetic --device tpu", "'tpu' is no kind of device"),
        ("eval builtin --files task:arithmetic --device gpu", "Did you mean 'cuda'?"),
        ("eval builtin --files task:arithmetic --num 0", "--num"),
        ("eval builtin --files task:arithmetic --samples 0", "--samples"),
        ("eval builtin --files task:arithmetic --samples 4 --temperature 0", "--temperature"),
        ("eval builtin --files task:arithmetic --reward good.py", "good.py:compute_score"),
        ("eval builtin --files task:arithmetic --reward good.py:score", "has no 'score'"),
        ("eval builtin --files task:arithmetic --out /proc/x.jsonl", "'/proc/x.jsonl' cannot be written"),
        ("eval builtin --files task:arithmetics", "Did you mean 'arithmetic'?"),
        ("eval builtin --files task:arithmetic?levle=2", "level"),
        ("eval builtin --files nothing", "does not exist"),
        ("chat ./nothing", "the folder 'nothing' does not exist"),
        ("chat builtin --recipe nothing.yaml", "nothing.yaml"),
        ("export nothing --out x", "does not exist"),
        ("export . --out x", "config.json"),
        ("export . --out x --push model", "OWNER/NAME"),
        ("eval builtin --harness arc_easy", "pellucid[harness]"),
        ("rollouts nothing", "does not exist"),
        ("rollouts .", "holds no run"),
        ("rollouts recipe.yaml", "recipe.yaml"),
        ("plot nothing", "does not exist"),
        ("plot .", "holds no run"),
        ("view nothing", "does not exist"),
        ("view --port 99999", "--port"),
        ("profile report nothing", "nothing"),
        ("profile reprot nothing", "No such command 'reprot'"),
        ("precision compare nothing nowhere", "nothing"),
        ("sweep recipe.yaml", "no key has several values"),
        ("sweep recipe.yaml trainer.seed=1,2 --seeds 2", "Leave one of them out"),
        ("sweep recipe.yaml trainer.seed=1,1", "the same value twice"),
        ("sweep recipe.yaml trainer.sed=1,2", "Did you mean 'trainer.seed'?"),
        ("sweep recipe.yaml --seeds 2 --metric val/acuracy", "there is no metric 'val/acuracy'"),
        ("sweep recipe.yaml --seeds 100000", "At most 1000"),
        ("serve recipe.yaml", "rollout.name"),
        ("doctor nothing.yaml", "does not exist"),
    ],
    "recipe": [
        ("train list.yaml", "this is a list; a config is a mapping"),
        ("train text.yaml", "this is text; a config is a mapping"),
        ("train empty.yaml", "must be set"),
        ("train broken.yaml", "broken.yaml:2 YAML syntax error"),
        ("train tabs.yaml", "tabs.yaml:2 YAML syntax error"),
        ("train twice.yaml", "duplicate"),
        ("train default.yaml", "Did you mean 'recipe'?"),
        ("train far.yaml", "recipe.yaml'?"),
        ("train binary.yaml", "binary.yaml"),
        ("train rows.jsonl", "rows.jsonl"),
    ],
    "config": [
        ("+ data.train_batchsize=4", "Did you mean 'data.train_batch_size'?"),
        ("+ actor.optim.lr=1", "Did you mean 'actor_rollout_ref.actor.optim.lr'?"),
        ("+ data.train_batch_size=many", "data.train_batch_size"),
        ("+ data.train_batch_size=0", "data.train_batch_size"),
        ("+ data.train_batch_size=-4", "data.train_batch_size"),
        ("+ data.train_batch_size=4.5", "data.train_batch_size"),
        ("+ data.shuffle=perhaps", "data.shuffle"),
        ("+ algorithm.adv_estimator=grop", "Did you mean 'grpo'?"),
        ("+ algorithm.adv_estimator=gae critic.optim.lr=-1", "critic.optim.lr"),
        (f"+ {ROLLOUT}.n=1", "nothing to compare"),
        (f"+ {ROLLOUT}.n=0", "rollout.n"),
        (f"+ {ROLLOUT}.n=100000000", "rollout.n"),
        (f"+ {ROLLOUT}.temperature=0", "temperature"),
        (f"+ {ROLLOUT}.temperature=-1", "temperature"),
        (f"+ {ROLLOUT}.top_p=1.5", "top_p"),
        (f"+ {ROLLOUT}.top_k=-5", "top_k"),
        (f"+ {ROLLOUT}.name=vlm", "Did you mean 'vllm'?"),
        (f"+ {ACTOR}.optim.lr=1e10", "optim.lr"),
        (f"+ {ACTOR}.optim.lr=-1", "optim.lr"),
        (f"+ {ACTOR}.optim.lr=nan", "optim.lr"),
        (f"+ {ACTOR}.clip_ratio=-0.2", "clip_ratio"),
        (f"+ {ACTOR}.kl_loss_coef=0.1", "use_kl_loss: true"),
        (f"+ {ACTOR}.strategy=fsdp3", "Did you mean 'fsdp"),
        (f"+ {ACTOR}.ppo_mini_batch_size=3", "divisor of 4"),
        (f"+ {ACTOR}.ppo_max_token_len_per_gpu=20", "at least 24"),
        (f"+ {ACTOR}.policy_loss.loss_mode=vanila", "Did you mean 'vanilla'?"),
        (f"+ {ACTOR}.loss_agg_mode=token-maen", "Did you mean 'token-mean'?"),
        (f"+ {ACTOR}.ppo_epochs=0", "ppo_epochs"),
        ("+ trainer.device=gpu", "Did you mean 'cuda'?"),
        ("+ trainer.device=cuda", "'cuda' is not available on this machine"),
        ("+ trainer.logger=[wandb]", "pellucid[wandb]"),
        ("+ trainer.logger=[wanbd]", "Did you mean 'wandb'?"),
        ("+ trainer.logger=wandb", "[wandb]"),
        ("+ trainer.keep_best=val/acuracy", "there is no metric 'val/acuracy'"),
        ("+ trainer.early_stopping_patience=3", "keep_best"),
        ("+ trainer.experiment_name=../../escape", "is no name for a folder"),
        ("+ trainer.experiment_name=''", "is no name for a folder"),
        ("+ trainer.project_name=/tmp/x", "is no name for a folder"),
        ("+ trainer.default_local_dir=''", "is empty"),
        ("+ trainer.default_local_dir=/proc/x", "'/proc/x' cannot be made"),
        ("+ trainer.default_local_dir=recipe.yaml", "a file is there"),
        ("+ trainer.total_training_steps=0", "total_training_steps"),
        ("+ trainer.save_freq=x", "save_freq"),
        ("+ trainer.nnodes=2", "placement"),
        ("+ trainer.n_gpus_per_node=2", "placement: local"),
        ("+ trainer.resume_mode=resume_path", "trainer.resume_from_path"),
        ("+ trainer.resume_mode=resume_path trainer.resume_from_path=nowhere", "nowhere"),
        ("+ trainer.alerts=[{metric:actor/l,above:0}]", "trainer.alerts[0].metric"),
        ("+ trainer.alerts=[{metric:actor/lr}]", "trainer.alerts[0]"),
        ("+ trainer.alerts=[{metric:actor/lr,above:0,action:email}]", "trainer.alerts[0].action"),
        ("+ data.train_files=null", "data.train_files"),
        ("+ global_profiler.tool=nsis global_profiler.steps=[1]", "Did you mean 'nsys'?"),
        ("+ global_profiler.steps=[0]", "global_profiler"),
        ("+ actor_rollout_ref.model.path=./nothing", "does not exist"),
        ("+ actor_rollout_ref.model.path=.", "config.json"),
        ("+ actor_rollout_ref.model.path=./noweights", "has a config but no weights"),
        ("+ actor_rollout_ref.model.path=./notokens", "tokenizer"),
        ("+ actor_rollout_ref.model.path=./badconfig", "config.json"),
        ("+ actor_rollout_ref.model.lora_rank=-1", "lora_rank"),
        (f"+ {ROLLOUT}.agent.name=tool", "Did you mean 'tools'?"),
    ],
    "data": [
        ("+ data.train_files=rwos.jsonl", "Did you mean 'rows.jsonl'?"),
        ("+ data.train_files=nothing.jsonl", "holds no rows"),
        ("+ data.train_files=half.jsonl", "half.jsonl, line 1"),
        ("+ data.train_files=number.jsonl", "row 0 of data.train_files: a prompt is neither text nor a chat"),
        ("+ data.train_files=null.jsonl", "row 0 of data.train_files"),
        ("+ data.train_files=late.jsonl", "row 5 of data.train_files"),
        ("+ data.train_files=blank.jsonl", "the prompt of row 0 is empty"),
        ("+ data.train_files=chat.jsonl", "row 0 of data.train_files"),
        ("+ data.train_files=role.jsonl", "row 0 of data.train_files"),
        ("+ data.train_files=source.jsonl", "'homework' has no verifier"),
        ("+ data.train_files=rows.parquet", "rows.parquet"),
        ("+ data.train_files=rows.csv", "'.csv'"),
        ("+ data.train_files=rows.json", "rows.json"),
        ("+ data.train_files=[]", "the list is empty"),
        ("+ data.train_files=.", "data.train_files"),
        ("+ data.train_files=none*.jsonl", "none*.jsonl"),
        ("+ data.train_files='$NOWHERE/rows.jsonl'", "$NOWHERE"),
        ("+ data.train_files=task:", "task"),
        ("+ data.train_files=task:arithmetic?level=99", "level"),
        ("+ data.train_files=task:arithmetic?size=0", "size"),
        ("+ data.train_files=task:arithmetic?level", "not key=value"),
        ("+ data.train_files=rows.jsonl data.prompt_key=promt", "Did you mean 'prompt'?"),
        ("+ data.train_files=rows.jsonl data.reward_fn_key=source", "data.reward_fn_key"),
        ("+ data.train_files=rows.jsonl data.train_batch_size=16", "data.train_batch_size"),
        ("+ data.train_files=rows.jsonl data.max_prompt_length=3", "the shortest has 5"),
        ("+ data.val_files=nothing", "data.val_files"),
        ("+ data.val_files=rwos.jsonl", "Did you mean 'rows.jsonl'?"),
        ("sft sft.yaml data.answer_key=answr", "Did you mean 'answer'?"),
        ("sft sft.yaml data.max_length=3", "data.max_length"),
    ],
    "reward": [
        (f"+ {REWARD}.path=nowhere.py", "nowhere.py' does not exist"),
        (f"+ {REWARD}.path=typo.py", "Did you mean 'compute_scores'?"),
        (f"+ {REWARD}.path=raises.py", "no licence"),
        (f"+ {REWARD}.path=exits.py", "fails when it is imported"),
        (f"+ {REWARD}.path=syntax.py", "SyntaxError"),
        (f"+ {REWARD}.path=imports.py", "No module named 'nosuchpackage'"),
        (f"+ {REWARD}.path=argument.py", "cannot be called"),
        (f"+ {REWARD}.path=number.py", "not a function"),
        (f"+ {REWARD}.path=reward.txt", "is no Python file"),
        (f"+ {REWARD}.path=.", "is no Python file"),
        (f"+ {REWARD}.path=good.py {REWARD}.name=score", "has no 'score'"),
        (f"+ {REWARD}.name=score", "custom_reward_function"),
        ("+ reward_model.rule_weight=0", "reward_model.rule_weight"),
        ("+ reward_model.timeout_s=0", "timeout_s"),
        ("+ reward_model.reward_num_workers=0", "reward_num_workers"),
        ("+ reward_model.enable=true", "reward_model.model.path"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mistakes in its files."""
    folder = tmp_path_factory.mktemp("mistakes") / "work"
    folder.mkdir()
    (folder / "outputs").mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, spoilt in (("noweights", "model.safetensors"), ("notokens", "tokenizer.json"), ("badconfig", "config.json")):
        shutil.copytree(BUILTIN_FOLDER, folder / name)
        (folder / name / spoilt).unlink()
    (folder / "badconfig" / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize(
    ("typed", "answer"), [pytest.param(*case, id=f"{kind}-{case[0][:60]}") for kind, cases in MISTAKES.items() for case in cases]
)
def test_a_mistake_is_one_clear_error(folder, monkeypatch, capsys, typed, answer):
    before = {path.name for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    monkeypatch.setattr(error_console, "width", 1000)  # paths are long here
    words = [word.strip("'") if word.startswith("'") else word for word in typed.replace("=''", '=""').split()]
    monkeypatch.setattr(sys, "argv", ["pellucid", *(["train", "recipe.yaml", *words[1:]] if words[0] == "+" else words)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    text = Done(0, captured.out + captured.err).text
    assert ended.value.code == 2, text
    assert answer in text and "Traceback" not in text, text
    assert {path.name for path in folder.iterdir()} <= before, "a refused start left something behind"


def test_no_key_is_cut_off_in_a_narrow_box(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(error_console, "width", 60)
    monkeypatch.setattr(sys, "argv", ["pellucid", "train", "empty.yaml"])
    with pytest.raises(SystemExit):
        main()
    text = Done(2, capsys.readouterr().err).text
    assert all(key in text for key in ("data.train_files", "actor_rollout_ref.model.path", "actor_rollout_ref.actor.strategy"))


def test_there_are_mistakes_enough():
    assert sum(map(len, MISTAKES.values())) >= 150
