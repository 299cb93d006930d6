"""`pellucid sweep`: each combination in a folder of its own, going on where it was stopped, compared at the end."""

import json

import pytest

from pellucid.cli.sweep import _Combination, _compare
from pellucid.errors import UserError
from pellucid.files.rundir import RunDir
from pellucid.metrics.plots import REWARD as REWARD_MEAN

LR = "actor_rollout_ref.actor.optim.lr"
SHORT = ("trainer.total_training_steps=1", "trainer.save_freq=-1", "data.val_files=null")


def ends(work) -> dict[str, int]:
    """Return how often each run of the sweep has started."""
    folder = work.folder / "run_sweep"
    return {path.parent.name: len(json.loads(path.read_text())["starts"]) for path in folder.glob("*/run.json")}


REWARD = """
def good(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def bad(data_source, solution_str, ground_truth, extra_info=None):
    if {broken}:
        raise SystemExit(3)
    return 1.0
"""


def test_finished_runs_are_kept_and_the_others_go_on(work):
    work.write("reward.py", REWARD.format(broken=True))
    own = "reward_model.custom_reward_function"
    arguments = ("sweep", work.recipe, *SHORT, f"{own}.path=reward.py", f"{own}.name=good,bad", "--jobs", "2")
    done = work.run(*arguments, status=1)
    assert "1 of 2 runs failed" in done.text and "run_sweep/name=bad/logs/controller.log" in done.text
    work.write("reward.py", REWARD.format(broken=False))
    done = work.run(*arguments)
    assert "2 runs in run_sweep, 1 of them finished" in done.text
    assert ends(work) == {"name=good": 1, "name=bad": 2}
    assert (work.folder / "run_sweep" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"name={name}" in done.output for name in ("good", "bad")) and done.output.count("│ 1 ") >= 2, "both have the greatest reward there is"


def test_seeds_are_one_line_and_the_best_comes_first(tmp_path, capsys):
    done = []
    for lr, rewards in (("1e-4", (0.1, 0.3)), ("1e-3", (0.5, 0.9)), ("1", ())):
        for seed, reward in enumerate(rewards or (None, None)):
            run = RunDir.create(tmp_path / f"lr={lr},seed={seed}")
            rows = [{"step": step} | ({} if reward is None else {REWARD_MEAN: reward * step / 2}) for step in (1, 2)]
            run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
            done.append(_Combination((), f"lr={lr}", run))
    _compare(done, tmp_path, REWARD_MEAN)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if "lr=" in line]
    assert rows[:2] == [["lr=1e-3", "0.7", "0.2828", "0.5", "0.9", "2"], ["lr=1e-4", "0.2", "0.1414", "0.1", "0.3", "2"]]
    assert len(rows) == 2 and (tmp_path / "curves.png").stat().st_size > 5000
    with pytest.raises(UserError, match="no run has 'critic/score/maen'"):
        _compare(done, tmp_path, "critic/score/maen")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{LR}=1e-4",), "no key has several values"),
        ((f"{LR}=1e-4,-1",), "actor_rollout_ref.actor.optim.lr"),
        ((f"{LR}=1e-4,1e-4",), "two runs would have one folder"),
        ((f"{LR}=interval(0,1)",), "an interval has no end"),
        (("trainer.seed=1,2", "--seeds", "2"), "trainer.seed is given, too"),
        (("trainer.seed=range(2000)",), "these are 2000 runs"),
        (("--seeds", "2", "--metric", "actor/entropi"), "there is no metric 'actor/entropi'"),
    ],
)
def test_a_sweep_that_cannot_run_starts_nothing(work, arguments, said):
    done = work.run("sweep", work.recipe, *arguments, status=2)
    assert said in done.text and not (work.folder / "run_sweep").exists()


def test_runs_of_another_config_are_not_taken_for_those_of_the_sweep(work):
    folder = work.folder / "run_sweep" / "lr=0.0001"
    arguments = ("sweep", work.recipe, *SHORT, f"{LR}=1e-4,1e-3")
    folder.mkdir(parents=True)
    shown = work.run("config", "show", work.recipe, *SHORT, "trainer.seed=5").output
    (folder / "config.yaml").write_text(shown)
    done = work.run(*arguments, status=2)
    assert "'run_sweep/lr=0.0001' was trained with another config" in done.text and "trainer.seed: 5 → 0" in done.text
