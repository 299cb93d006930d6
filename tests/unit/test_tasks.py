"""The built-in tasks: splits that never mix, answers that are right, verifiers that read what models write."""

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.agents.environments import Attempts
from pellucid.errors import MissingExtraError, UserError
from pellucid.tasks import TASKS, get_task
from pellucid.tasks import gym as gym_module
from pellucid.tasks.arithmetic import DEFAULT_SIZE, LEVELS, split_of
from pellucid.tasks.numbers import numbers_in, to_number
from pellucid.tasks.task import SPLITS
from pellucid.types import Prompt

ARITHMETIC, GSM8K = TASKS["arithmetic"], TASKS["gsm8k"]
PLAIN, CHAT = {"style": "plain"}, {"style": "chat"}


def test_unknown_task_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'arithmetic'"):
        get_task("arithmetics")


@pytest.mark.parametrize("level", LEVELS)
def test_arithmetic_answers_are_right_and_verified(level):
    for style in ("plain", "chat"):
        for row in ARITHMETIC.rows("train", level=level, size=50, style=style):
            expression = (
                row["prompt"].removesuffix("=") if style == "plain" else row["prompt"][8 : row["prompt"].index("?")]
            )
            assert int(row["answer"]) == eval(expression)
            assert ARITHMETIC.verify(row["answer"], row["answer"], row) == 1.0
            assert ARITHMETIC.verify(str(int(row["answer"]) + 1), row["answer"], row) == 0.0


def test_arithmetic_splits_share_no_problem_across_levels_seeds_and_styles():
    def problems(split):
        rows = [row for level in LEVELS for seed in (0, 1) for row in ARITHMETIC.rows(split, level=level, seed=seed)]
        expressions = [row["prompt"].removesuffix("=") for row in rows]
        return {tuple(sorted(e.split("+"))) if "+" in e else e for e in expressions}

    train, val, test = (problems(split) for split in SPLITS)
    assert train
    assert val
    assert test
    assert not train & val
    assert not train & test
    assert not val & test


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+*"))
def test_swapping_the_operands_keeps_the_split(a, b, op):
    assert split_of(a, op, b) == split_of(b, op, a)


def test_arithmetic_is_deterministic_distinct_and_chosen_by_seed():
    rows = ARITHMETIC.rows("train", level=2, size=500)
    assert rows == ARITHMETIC.rows("train", level=2, size=500)
    assert rows != ARITHMETIC.rows("train", level=2, size=500, seed=1)
    assert len({row["prompt"] for row in rows}) == 500
    assert rows[:10] == ARITHMETIC.rows("train", level=2, size=10)


def test_arithmetic_digits_and_ops_replace_the_levels():
    rows = ARITHMETIC.rows("train", level=1, digits=5, ops="*", size=20)
    assert all("*" in row["prompt"] for row in rows)
    assert any(len(row["prompt"]) >= 10 for row in rows)


def test_arithmetic_default_size_is_all_there_is_but_an_explicit_size_is_kept_or_refused():
    assert 70 < len(ARITHMETIC.rows("train", level=1)) < 100
    assert len(ARITHMETIC.rows("train", level=2)) == DEFAULT_SIZE
    with pytest.raises(UserError, match="size=2000 problems asked for"):
        ARITHMETIC.rows("train", level=1, size=2000)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"levle": "1"}, "Did you mean 'level'"),
        ({"level": "9"}, "level=9 does not exist"),
        ({"level": "two"}, "must be a int, not 'two'"),
        ({"ops": "/"}, "ops='/' is not understood"),
        ({"digits": "0"}, "digits=0 is out of range"),
        ({"size": "-1"}, "size=-1"),
        ({"style": "prose"}, "style='prose' does not exist"),
    ],
)
def test_arithmetic_refuses_bad_arguments(args, message):
    with pytest.raises(UserError, match=message):
        ARITHMETIC.rows("train", **args)


def test_unknown_split_is_refused():
    with pytest.raises(UserError, match="Did you mean 'train'"):
        ARITHMETIC.rows("trian")


@pytest.mark.parametrize(
    ("response", "extra", "reward"),
    [
        ("19", PLAIN, 1.0),
        (" 19\n", PLAIN, 1.0),
        ("019", PLAIN, 0.0),
        ("19=", PLAIN, 0.0),
        ("19", {}, 1.0),
        ("", PLAIN, 0.0),
        ("19.", CHAT, 1.0),
        ("12 + 7 = 19.", CHAT, 1.0),
        ("The answer is **19**!", CHAT, 1.0),
        ("\n\n19\nBut 20 is near.", CHAT, 1.0),
        ("It is 20.\n19", CHAT, 0.0),
        ("19.5", CHAT, 0.0),
        ("190", CHAT, 0.0),
        ("-19", CHAT, 0.0),
        ("nineteen", CHAT, 0.0),
        ("", CHAT, 0.0),
    ],
)
def test_arithmetic_verify(response, extra, reward):
    assert ARITHMETIC.verify(response, "19", extra) == reward


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,234", ["1234"]),
        ("$18.", ["18"]),
        ("-3.50", ["-3.5"]),
        ("-$3 and $-4", ["-3", "-4"]),
        ("12-7=5", ["12", "7", "5"]),
        ("x=-5", ["-5"]),
        ("−7", ["-7"]),
        ("1, 2", ["1", "2"]),
        (".5", ["0.5"]),
        ("none", []),
    ],
)
def test_numbers_in(text, numbers):
    assert numbers_in(text) == [Decimal(number) for number in numbers]


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_any_spelling_of_an_integer_reads_the_same(value):
    for spelling in (f"{value}", f"{value:,}", f"{value}.", f"{value}.00", f"The answer is {value}."):
        assert to_number(spelling) == value


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("0123456789-+.,$#\n")))
def test_verifiers_take_any_text(text):
    assert ARITHMETIC.verify(text, "19", CHAT) in (0.0, 1.0)
    assert ARITHMETIC.verify(text, "19", PLAIN) in (0.0, 1.0)
    assert GSM8K.verify(text, "19", {}) in (0.0, 1.0)


def test_verifiers_take_very_long_numbers():
    assert ARITHMETIC.verify("1" * 20_000, "19", CHAT) == 0.0
    assert GSM8K.verify("1" * 20_000, "19", {}) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so 2 + 2\n#### 1,234", 1.0),
        ("#### $1234.00.", 1.0),
        ("#### 5\n#### 1234 dollars in 3 days", 1.0),
        ("#### -1234", 0.0),
        ("#### ", 0.0),
        ("1234 ####", 0.0),
        ("She pays 7 and gets 1234.", 1.0),
        ("1234 then 7", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_verify(response, reward):
    assert GSM8K.verify(response, "1234", {}) == reward


def test_gsm8k_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match="holds no number"):
        GSM8K.verify("5", "unknown", {})


def write_gsm8k(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for part, final in (("train", "1,000"), ("test", "2")):
        line = f'{{"question": "How many?", "answer": "Some <<1+1=2>>work.\\n#### {final}"}}\n'
        (folder / f"{part}.jsonl").write_text(line)
    return folder


def test_gsm8k_reads_a_folder_a_file_and_the_usual_places(tmp_path, monkeypatch):
    folder = write_gsm8k(tmp_path / "shared/data/gsm8k")
    rows = GSM8K.rows("train", path=str(folder))
    assert rows[0]["answer"] == "1000"
    assert rows[0]["prompt"].startswith("How many?\n")
    assert "####" in rows[0]["prompt"]
    assert GSM8K.verify(rows[0]["solution"], rows[0]["answer"], {}) == 1.0
    assert GSM8K.rows("val", path=str(folder))[0]["answer"] == "2"
    assert GSM8K.rows("train", path=str(folder / "test.jsonl"))[0]["answer"] == "2"
    (tmp_path / "checkout").mkdir()
    for place in (tmp_path, tmp_path / "checkout"):
        monkeypatch.chdir(place)
        assert GSM8K.rows("train")[0]["answer"] == "1000"


def test_gsm8k_names_what_is_wrong_with_a_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        GSM8K.rows("train", path=str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"problem": "x"}\n')
    with pytest.raises(UserError, match="needs 'question' and 'answer'"):
        GSM8K.rows("train", path=str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"question": "x", "answer": "no"}\n')
    with pytest.raises(UserError, match="row 0 has no number"):
        GSM8K.rows("train", path=str(tmp_path))


REAL_GSM8K = next((path for path in (Path("../shared/data/gsm8k"), Path("shared/data/gsm8k")) if path.is_dir()), None)


@pytest.mark.skipif(REAL_GSM8K is None, reason="the GSM8K files are not beside this checkout")
def test_every_real_gsm8k_solution_passes_its_own_verifier():
    for split, count in (("train", 7473), ("test", 1319)):
        rows = GSM8K.rows(split, path=str(REAL_GSM8K))
        assert len(rows) == count
        assert all(GSM8K.verify(row["solution"], row["answer"], {}) == 1.0 for row in rows)


@pytest.mark.parametrize("dataset", ["leg_counting", "countdown", "basic_arithmetic"])
def test_reasoning_gym_makes_and_scores_problems(dataset):
    pytest.importorskip("reasoning_gym")
    task = get_task(f"reasoning_gym:{dataset}")
    train, val = (task.rows(split, size="5") for split in ("train", "val"))
    assert len(train) == 5
    assert train == task.rows("train", size=5)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}
    assert not task.inline
    if train[0]["answer"] is not None:
        row = train[0]
        assert task.verify(f"<answer>{row['answer']}</answer>", row["answer"], row) == 1.0
        assert task.verify(row["answer"], row["answer"], row) == 1.0
        assert task.verify("no idea", row["answer"], row) < 1.0


def test_attempts_at_a_problem_earn_what_the_last_one_is_worth_less_for_each_before():
    pytest.importorskip("reasoning_gym")
    row = get_task("reasoning_gym:chain_sum").rows("train", size="1")[0]
    prompt = Prompt("p", [], row["prompt"], row["data_source"], row["answer"], extra=row)
    attempts = Attempts(prompt)
    said, partly, is_done = attempts.step(f"I think that it is {row['answer']}")
    assert 0 < partly < 1 and not is_done and "again" in said
    assert attempts.step("no idea") == (said, pytest.approx(-partly), False)
    said, rest, is_done = attempts.step(row["answer"])
    assert is_done and rest == pytest.approx(Attempts.DISCOUNT**2)


def test_reasoning_gym_refuses_unknown_names_and_bad_values():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match="Did you mean 'leg_counting'"):
        get_task("reasoning_gym:leg_countin")
    with pytest.raises(UserError, match="Did you mean 'min_animals'"):
        get_task("reasoning_gym:leg_counting").rows("train", min_animal="3")
    with pytest.raises(UserError, match="refuses these arguments"):
        get_task("reasoning_gym:leg_counting").rows("train", min_animals="0", size="2")


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("It is \\boxed{\\frac12}.", "0.5", 1.0),
        ("\\boxed{2}", "\\frac{4}{2}", 1.0),
        ("\\boxed{1+x}", "x+1", 1.0),
        ("\\boxed{(2,1)}", "(1,2)", 0.0),
        ("the answer is 3", "4", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math_compares_what_formulas_mean(response, answer, reward):
    assert get_task("math").verify(response, answer, {}) == reward


def test_math_reads_files_of_any_columns(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text('{"Question": "What is half of one?", "Answer": 0.5}\n')
    [row] = get_task("math").rows("val", path=str(path), question="Question", answer="Answer")
    assert row["answer"] == "0.5" and row["prompt"].startswith("What is half of one?") and "boxed" in row["prompt"]
    with pytest.raises(UserError, match="no column 'problem', but Question, Answer"):
        get_task("math").rows("val", path=str(path))


def test_reasoning_gym_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr(gym_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pellucid\[reasoning-gym\]"):
        get_task("reasoning_gym:leg_counting")


@pytest.mark.processes
def test_tasks_data_and_reward_import_without_torch_or_datasets():
    code = "import pellucid.data, pellucid.reward, sys; sys.exit(bool({'torch', 'datasets'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
