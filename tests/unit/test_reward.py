"""Scoring: real worker processes, real hangs and crashes; a failure is typed, repeated once and never scored."""

import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config.schema.reward_model import CustomRewardConfig, RewardConfig
from pellucid.errors import UserError
from pellucid.reward import make_scorer
from pellucid.reward.scorer import require_scores
from pellucid.tasks import get_task
from pellucid.types import Prompt, RewardFailure, Rollout, Score
from pellucid.validation import is_correct


def scorer_of(path, name, num_workers, timeout_s, functions=None):
    custom = CustomRewardConfig(path, name)
    return make_scorer(
        RewardConfig(custom_reward_function=custom, reward_num_workers=num_workers, reward_timeout_s=timeout_s, functions=functions)
    )


REWARD = """
import os, sys, time
from pathlib import Path

class Awkward(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first}-{second}")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "raise": raise Awkward("a", "b")
        case "hang":
            with Path(extra_info["pids"]).open("a") as file:
                print(os.getpid(), file=file)
            time.sleep(600)
        case "die": os._exit(3)
        case "exit": sys.exit("bye")
        case "text": return "1.0"
        case "none": return None
        case "nan": return float("nan")
        case "complex": return 1j
        case "no score": return {"acc": 1.0}
        case "bad score": return {"score": "high"}
        case "parts": return {"score": 2, "acc": True, "length": 0.5, "pred": "x", "bad": float("inf")}
        case "flaky":
            marker = Path(extra_info["marker"])
            if not marker.exists():
                marker.touch()
                raise ValueError("only the first time")
            return 0.25
        case "echo": return {"score": 1.0, "seen": [data_source, ground_truth, extra_info] == ["mine", 5, {
            "level": 2, "uid": "mine:train:0", "sample": 3}]}
    return float(len(solution_str))

def too_few(data_source, solution_str):
    return 0.0

def keywords(*, solution_str, **others):
    return 1.0

def always_broken(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("nothing works")

constant = 3
"""


def make_rollout(text, sample=0, task="mine", answer=5, **extra):
    prompt = Prompt(uid=f"{task}:train:0", token_ids=[1], text="p", task=task, answer=answer, extra=extra)
    return Rollout.single_turn(prompt, sample, [1], [0.0], [0], "stop", text)


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return str(path)


@pytest.fixture(scope="module")
def scorer(reward_file):
    with scorer_of(reward_file, "compute_score", 2, 1.0) as scorer:
        scorer.score([make_rollout("warm")])
        yield scorer


@pytest.mark.processes
def test_rewards_land_on_their_rollouts(scorer):
    rollouts = [make_rollout("x" * (i % 7)) for i in range(60)]
    done = []
    calls = []
    scores, stats = scorer.score(rollouts, lambda: done.append(1), lambda *call: calls.append(call))
    assert scores == [Score(float(i % 7)) for i in range(60)]
    assert len(done) == 60
    assert sorted(id(call[0]) for call in calls) == sorted(map(id, rollouts)) and all(call[-1] for call in calls)
    assert (stats["reward/num_failures"], stats["reward/num_timeouts"]) == (0, 0)
    assert stats["reward/time_s"] > 0


@pytest.mark.processes
def test_the_function_sees_verls_arguments_and_may_return_parts(scorer):
    echo, parts = make_rollout("echo", sample=3, level=2), make_rollout("parts")
    scores, _ = scorer.score([echo, parts])
    assert scores == [Score(1.0, {"seen": 1.0}), Score(2.0, {"acc": 1.0, "length": 0.5})]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("raise", "exception", "'compute_score' raised Awkward: a-b"),
        ("exit", "exception", "SystemExit: bye"),
        ("die", "exception", "the worker process died"),
        ("text", "wrong_type", "returned '1.0' of type str; it must return a finite number"),
        ("none", "wrong_type", "returned None of type NoneType"),
        ("nan", "wrong_type", "returned nan of type float"),
        ("complex", "wrong_type", "of type complex"),
        ("no score", "wrong_type", "of type dict"),
        ("bad score", "wrong_type", "\"score\": 'high' of type str"),
    ],
)
@pytest.mark.processes
def test_a_failing_call_is_repeated_once_then_typed_and_its_neighbours_score(scorer, text, kind, message):
    (bad, good), stats = scorer.score([make_rollout(text), make_rollout("abc")])
    assert bad.failure is not None
    assert bad.failure.kind == kind
    assert message in bad.failure.message
    assert bad.reward is None
    assert (good.reward, good.failure) == (3.0, None)
    assert (stats["reward/num_failures"], stats["reward/num_timeouts"]) == (1, 0)


@pytest.mark.processes
def test_a_failing_call_names_the_place_in_the_users_file(scorer, reward_file):
    [score, _], _ = scorer.score([make_rollout("raise"), make_rollout("abc")])
    line = next(number for number, text in enumerate(REWARD.splitlines(), 1) if "raise Awkward" in text)
    assert score.failure.message.endswith(f"Awkward: a-b, line {line} of {reward_file}")


@pytest.mark.processes
def test_a_hung_call_is_killed_twice_and_the_pool_lives_on(scorer, tmp_path):
    pids = tmp_path / "pids"
    (bad, good), stats = scorer.score([make_rollout("hang", pids=str(pids)), make_rollout("abc")])  # it sleeps 600 s
    assert bad.failure == RewardFailure("timeout", "the call took longer than 1 s and was killed.")
    assert good.reward == 3.0
    assert (stats["reward/num_failures"], stats["reward/num_timeouts"]) == (1, 2)
    first, second = pids.read_text().split()
    assert first != second
    assert not psutil.pid_exists(int(first))
    assert not psutil.pid_exists(int(second))
    assert scorer.score([make_rollout("abcd")])[0] == [Score(4.0)]


@pytest.mark.processes
def test_a_call_that_works_the_second_time_scores(scorer, tmp_path):
    scores, stats = scorer.score([make_rollout("flaky", marker=str(tmp_path / "marker"))])
    assert scores == [Score(0.25)]
    assert stats["reward/num_failures"] == 0


@pytest.mark.processes
def test_a_batch_in_which_everything_fails_is_a_broken_function(scorer, reward_file):
    with pytest.raises(
        UserError, match=r"all 2 calls of the batch failed; the first: .*returned None of type NoneType"
    ):
        require_scores(scorer.score([make_rollout("none"), make_rollout("none")])[0])
    with (
        scorer_of(reward_file, "always_broken", 1, 5.0) as broken,
        pytest.raises(UserError, match="raised KeyError: 'nothing works'"),
    ):
        require_scores(broken.score([make_rollout("a")])[0])
    assert scorer.score([])[1]["reward/num_failures"] == 0


@pytest.mark.processes
def test_closing_stops_busy_workers(reward_file, tmp_path):
    pids = tmp_path / "pids"

    def interrupt():
        while not (pids.exists() and pids.read_text()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    def run():
        with scorer_of(reward_file, "compute_score", 2, 600.0) as scorer:
            scorer.score([make_rollout("hang", pids=str(pids)), make_rollout("abc")], on_done=interrupt)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not psutil.pid_exists(int(pids.read_text()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compute_scores", "Did you mean 'compute_score'"),
        ("constant", "is of type int, not a function"),
        ("too_few", "must take the arguments data_source, solution_str, ground_truth, extra_info"),
    ],
)
def test_a_wrong_function_is_refused_at_construction(reward_file, name, message):
    with pytest.raises(UserError, match=message):
        scorer_of(reward_file, name, 2, 1.0)


def test_a_missing_file_or_module_is_refused_at_construction(reward_file, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        scorer_of(str(tmp_path / "none.py"), "compute_score", 2, 1.0)
    with pytest.raises(UserError, match="fails when it is imported"):
        scorer_of("no_such_package.rewards", "compute_score", 2, 1.0)


@pytest.mark.processes
def test_a_relative_path_and_keyword_only_arguments_work(reward_file, monkeypatch):
    folder, _, name = reward_file.rpartition("/")
    monkeypatch.chdir(folder)
    with scorer_of(name, "keywords", 1, 5.0) as scorer:
        monkeypatch.chdir("/")
        scores, _ = scorer.score([make_rollout("a")])
    assert scores == [Score(1.0)]


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20).filter(any))
def test_inline_verifiers_need_no_process(kinds):
    rollouts = [make_rollout("5" if right else "6", task="arithmetic", answer="5") for right in kinds]
    with scorer_of(None, "compute_score", 2, 1.0) as scorer:
        scores, _ = scorer.score(rollouts)
        assert scorer._pool is None
    assert [score.reward for score in scores] == [float(right) for right in kinds]


def test_a_row_without_an_answer_fails_and_is_not_scored_zero():
    rollouts = [make_rollout("#### 5", task="gsm8k", answer="5"), make_rollout("5", task="openai/gsm8k", answer=None)]
    with scorer_of(None, "compute_score", 1, 1.0) as scorer:
        (good, bad), _ = scorer.score(rollouts)
    assert good.reward == 1.0
    assert bad.reward is None
    assert bad.failure is not None
    assert "has no answer to verify against" in bad.failure.message


def test_a_data_source_without_verifier_asks_for_a_function():
    with (
        scorer_of(None, "compute_score", 1, 1.0) as scorer,
        pytest.raises(UserError, match=r"'gsm8' has no verifier.*Did you mean 'gsm8k'") as caught,
    ):
        scorer.score([make_rollout("a", task="gsm8")])
    assert caught.value.field == "reward_model.custom_reward_function.path"


@pytest.mark.processes
def test_reasoning_gym_scores_in_a_worker():
    pytest.importorskip("reasoning_gym")
    row = get_task("reasoning_gym:leg_counting").rows("train", size=1)[0]
    extra = {"question": row["question"], "metadata": row["metadata"]}
    rollouts = [
        make_rollout(text, task=row["data_source"], answer=row["answer"], **extra) for text in (row["answer"], "?")
    ]
    with scorer_of(None, "compute_score", 1, 60.0) as scorer:
        (right, wrong), _ = scorer.score(rollouts)
        assert scorer._pool is not None
    assert right.reward == 1.0
    assert wrong.reward is not None
    assert wrong.reward < 1.0


SEVERAL = """
def right(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}

def brief(data_source, solution_str, ground_truth, extra_info):
    if not solution_str:
        raise ValueError("nothing to judge")
    return 1 / len(solution_str)
"""


def test_several_functions_add_up_by_their_weights_and_each_is_told(tmp_path):
    (tmp_path / "rewards.py").write_text(SEVERAL)
    functions = {"verifier": 1.0, f"{tmp_path / 'rewards.py'}:right": 2.0, f"{tmp_path / 'rewards.py'}:brief": -0.5}
    prompt = Prompt("p", [1], "1+1=", "arithmetic", "2")
    rollouts = [Rollout.single_turn(prompt, 0, [5], [0.0], [0], "stop", text) for text in ("2", "17", "")]
    with scorer_of(None, "compute_score", 1, 20.0, functions) as scorer:
        scores, metrics = scorer.score(rollouts)
    assert scores[0] == Score(2.5, {"verifier": 1.0, "right": 1.0, "acc": 1.0, "brief": 1.0})
    assert scores[1].reward == -0.25 and scores[1].parts["brief"] == 0.5
    assert scores[2].failure is not None and "'brief' raised ValueError: nothing" in scores[2].failure.message
    assert is_correct(scores[0]) and not is_correct(scores[1])
    assert metrics["reward/num_failures"] == 1


def test_functions_that_cannot_be_told_apart_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(SEVERAL)
    with pytest.raises(UserError, match="two functions are called 'right'"):
        scorer_of(None, "compute_score", 1, 1.0, {f"{tmp_path / name}.py:right": 1.0 for name in ("a", "b")})
    for name, reason in (("verifer", "neither 'verifier' nor an import path"), ("nowhere.py:right", "does not exist")):
        with pytest.raises(UserError, match=reason) as caught:
            scorer_of(None, "compute_score", 1, 1.0, {name: 1.0})
        assert caught.value.field == "reward_model.functions"
    with pytest.raises(UserError, match="beside reward_model"):
        scorer_of("r.py", "compute_score", 1, 1.0, {"verifier": 1.0})
