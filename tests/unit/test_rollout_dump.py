"""The rollout dump reads back exactly as written, notices damage, and can be browsed in the terminal."""

import io
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from pellucid.cli import rollouts as command
from pellucid.errors import UserError
from pellucid.files.rollout_dump import logp_gaps, read_rollouts, write_rollouts
from pellucid.files.rundir import RunDir
from pellucid.files.trajectories import read_turn
from pellucid.types import Outcome, Prompt, RewardFailure, Rollout, Score, ToolUse, Turn

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def turns_of(sampled: list[bool]) -> tuple[Turn, ...]:
    """One turn for each run of sampled tokens."""
    turns, start = [], 0
    for drawn, run in groupby(sampled):
        end = start + len(list(run))
        if drawn:
            called = (ToolUse("search", "{}", "7 7", 0.2),) if start % 2 else ()
            turns.append(Turn(start, end, "stop", 0.5, called))
        start = end
    return tuple(turns)


@st.composite
def a_rollout(draw) -> Rollout:
    ids = draw(st.lists(st.integers(0, 2**31), max_size=6))

    def per_token(values):
        return draw(st.lists(values, min_size=len(ids), max_size=len(ids)))

    prompt = Prompt(draw(st.text(max_size=8)), draw(st.lists(st.integers(0, 99), max_size=4)), draw(st.text()), "task",
                    draw(st.none() | st.text() | st.integers() | st.lists(st.text(max_size=3), max_size=2)))
    sampled = per_token(st.booleans()) if draw(st.booleans()) else [True] * len(ids)
    return Rollout(prompt, draw(st.integers(0, 8)), ids, sampled, per_token(FLOATS), per_token(st.integers(-1, 3)),
                   turns_of(sampled), draw(st.sampled_from(["stop", "length", "max_turns"])), draw(st.text()))


FAILURES = st.builds(RewardFailure, st.sampled_from(["exception", "timeout"]), st.text(max_size=5))
SCORES = st.builds(Score, FLOATS, st.dictionaries(st.text(max_size=4), FLOATS, max_size=2)) | \
    st.builds(Score, st.none(), failure=FAILURES)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), scored=st.lists(st.tuples(a_rollout(), SCORES), max_size=4), step=st.integers(0, 10**7))
def test_round_trip(tmp_path, data, scored, step):
    rollouts, scores = [rollout for rollout, _ in scored], [score for _, score in scored]
    width = max([len(rollout.token_ids) for rollout in rollouts], default=0)

    def table(values, dtype):
        rows = st.lists(st.lists(values, min_size=width, max_size=width), min_size=len(rollouts), max_size=len(rollouts))
        drawn = data.draw(st.none() | rows)
        return None if drawn is None else torch.tensor(drawn, dtype=dtype).reshape(len(rollouts), width)

    mask, training, weights = table(st.booleans(), torch.bool), table(FLOATS, torch.float64), table(FLOATS, torch.float64)
    path = RunDir(tmp_path).rollouts(step)
    write_rollouts(path, rollouts, scores, step, mask=mask, training_logp=training, correction_weights=weights,
                   pieces=lambda ids: [f"<{token}>" for token in ids])
    records = read_rollouts(path)
    assert len(records) == len(rollouts)
    for row, (record, rollout, score) in enumerate(zip(records, rollouts, scores)):
        length = len(rollout.token_ids)
        versions = record.get("policy_versions") or [record["policy_version"]] * length if rollout.token_ids else []
        failure = score.failure and {"kind": score.failure.kind, "message": score.failure.message}
        assert versions == rollout.versions
        assert record["step"] == step
        assert [record["uid"], record["prompt"], record["prompt_ids"], record["task"], record["answer"]] == \
            [rollout.prompt.uid, rollout.prompt.text, rollout.prompt.token_ids, "task", rollout.prompt.answer]
        assert [record["sample"], record["response"], record["response_ids"], record["finish_reason"]] == \
            [rollout.sample, rollout.text, rollout.token_ids, rollout.finish_reason]
        assert record["rollout_logprobs"] == rollout.logprobs
        assert record["training_logprobs"] == (None if failure or training is None else training[row, :length].tolist())
        assert record["correction_weights"] == (None if weights is None else weights[row, :length].tolist())
        assert [record["reward"], record["reward_parts"], record["failure"]] == [score.reward, score.parts, failure]
        untouched = [int(drawn and not failure) for drawn in rollout.sampled]
        assert record["mask"] == (untouched if mask is None else [int(kept) for kept in mask[row, :length].tolist()])
        assert record["pieces"] == [f"<{token}>" for token in rollout.token_ids]
        if all(rollout.sampled):  # one turn that called nothing, or none
            assert "sampled" not in record and "turns" not in record
        else:
            assert record["sampled"] == [int(drawn) for drawn in rollout.sampled]
            turns = [read_turn(turn) for turn in record["turns"]]
            assert tuple(turns) == rollout.turns


def test_training_log_probs_that_nothing_computed_are_null(tmp_path):
    """A row that was left out of the update has NaN for them, and NaN is no JSON."""
    rollouts, scores = [rollout for rollout, _ in SAMPLES[:2]], [score for _, score in SAMPLES[:2]]
    training = torch.zeros(2, 5)
    training[1] = torch.nan
    write_rollouts(tmp_path / "dump", rollouts, scores, 1, training_logp=training)
    assert [record["training_logprobs"] for record in read_rollouts(tmp_path / "dump")] == [[0.0] * 3, None]


def sample(uid: str, number: int, reward: float | None, length: int) -> tuple[Rollout, Score]:
    logps = [-0.5 - index for index in range(length)]
    prompt = Prompt(uid, [5, 6], f"prompt of {uid}", "arithmetic", "5")
    rollout = Rollout.single_turn(prompt, number, list(range(10, 10 + length)), logps, [2] * length, "stop",
                                  f"[bold]\x1bresponse {uid} {number}")
    failure = RewardFailure("timeout", "took 5 s") if reward is None else None
    return rollout, Score(reward, {"format": 1.0}, failure)


def write_samples(run: RunDir, step: int, scored: list[tuple[Rollout, Score]], gaps: list[float], **options) -> None:
    """Dump samples whose training log-probs are a gap above those of the rollout policy."""
    rollouts, scores = [rollout for rollout, _ in scored], [score for _, score in scored]
    logp = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.logprobs) for one in rollouts], batch_first=True)
    write_rollouts(run.rollouts(step), rollouts, scores, step, training_logp=logp + torch.tensor(gaps)[:, None], **options)


SAMPLES = [sample("a:1", 0, 1.0, 3), sample("a:1", 1, 0.0, 5), sample("b:2", 0, None, 2), sample("b:2", 1, 0.5, 1)]
GAPS = [0.25, 0.5, 0.0, 0.0]


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    run = RunDir.create(tmp_path)
    run.start_record(device="cpu", seeds={})
    for step in (1, 2, 3, 7):
        write_samples(run, step, SAMPLES, GAPS)
    return run


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[:len(data) // 2], lambda data: b"", lambda data: data + b"x",
    lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], lambda data: data[:-1] + bytes([data[-1] ^ 1]),
])
def test_damage_is_noticed(run_dir, damage):
    path = run_dir.rollouts(1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="step_000001"):
        read_rollouts(path)
    with pytest.raises(UserError, match="does not exist"):
        read_rollouts(run_dir.rollouts(9))


def test_gaps():
    assert logp_gaps({"rollout_logprobs": [-1.0, -2.0], "training_logprobs": [-1.5, -2.0]}) == [0.5, 0.0]
    assert logp_gaps({"rollout_logprobs": [-1.0], "training_logprobs": None}) is None
    assert logp_gaps({"rollout_logprobs": [-1.0, 0.0], "training_logprobs": [-1.5, 0.0], "sampled": [1, 0]}) == [0.5]


def view(monkeypatch, run: RunDir, *options: str) -> str:
    out = io.StringIO()
    monkeypatch.setattr(command, "console", Console(file=out, width=150))
    app = typer.Typer()
    app.command()(command.rollouts_command)
    result = CliRunner().invoke(app, [str(run.path), *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return out.getvalue()


def order(text: str) -> list[str]:
    return [" ".join(line.split()[1:5]) for line in text.splitlines() if line.startswith("╭")]


@pytest.mark.parametrize(("options", "expected"), [
    ([], ["a:1 · sample 0", "b:2 · sample 1", "a:1 · sample 1", "b:2 · sample 0"]),
    (["--sort", "uid", "--ascending"], ["a:1 · sample 0", "a:1 · sample 1", "b:2 · sample 0", "b:2 · sample 1"]),
    (["--sort", "length", "--limit", "2"], ["a:1 · sample 1", "a:1 · sample 0"]),
    (["--sort", "gap", "--limit", "1"], ["a:1 · sample 1"]),
    (["--min-reward", "0.5"], ["a:1 · sample 0", "b:2 · sample 1"]),
    (["--max-reward", "0.5", "--uid", "b:"], ["b:2 · sample 1"]),
    (["--uid", "nothing"], []),
])
def test_sort_and_filter(monkeypatch, run_dir, options, expected):
    out = view(monkeypatch, run_dir, *options)
    assert order(out) == expected
    assert "step 7: 4 samples, mean reward 0.5000, 1 failures, mean |gap| 3.61e-01" in out


def test_a_sample_is_shown_verbatim(monkeypatch, run_dir):
    out = view(monkeypatch, run_dir, "--step", "2")
    for text in ("prompt of a:1", "[bold]␛response a:1 0", "reward 1", "format 1", "expected: 5", "policy 2",
                 "3 tokens", "failed (timeout: took 5 s)", "max |gap| 5.0e-01", "step 2:"):
        assert text in out


def test_tokens(monkeypatch, run_dir):
    write_samples(run_dir, 8, SAMPLES[:1], GAPS[:1], pieces=lambda ids: ["Hel", "lo", "\n"][:len(ids)])
    rows = [line.strip("│ ").split() for line in view(monkeypatch, run_dir, "--tokens").splitlines()]
    assert ["0", "Hel", "10", "-0.5000", "-0.2500", "2.5e-01"] in rows
    assert ["2", "\\n", "12", "-2.5000", "-2.2500", "2.5e-01"] in rows
    assert "⟨11⟩" in view(monkeypatch, run_dir, "--tokens", "--step", "7")


def test_tokens_show_their_correction_weights(monkeypatch, run_dir):
    weights = torch.tensor([[1.0, 0.77884, 0.0]])
    write_samples(run_dir, 8, [sample("a:1", 0, 1.0, 3)], [0.25], correction_weights=weights)
    rows = [line.strip("│ ").split() for line in view(monkeypatch, run_dir, "--tokens").splitlines()]
    write_samples(run_dir, 8, [sample("a:1", 1, 1.0, 1)], [0.25])
    rows += [line.strip("│ ").split() for line in view(monkeypatch, run_dir, "--tokens").splitlines()]
    assert ["1", "⟨11⟩", "11", "-1.5000", "-1.2500", "2.5e-01", "0.7788"] in rows
    assert ["0", "⟨10⟩", "10", "-0.5000", "-0.2500", "2.5e-01"] in rows
    assert [row[-1] for row in rows if row[:2] == ["#", "token"]] == ["weight", "|gap|"]


def test_given_tokens_are_marked_and_counted_apart(monkeypatch, run_dir):
    rollout, score = sample("a:1", 0, 1.0, 4)
    given = replace(rollout, sampled=[True, False, False, True], logprobs=[-0.5, 0.0, 0.0, -3.5], versions=[2, -1, -1, 2],
                    turns=(Turn(0, 1, "stop"), Turn(3, 4, "stop")))
    rows_of = lambda text: [line.strip("│ ").split() for line in text.splitlines()]  # noqa: E731
    write_samples(run_dir, 8, [(given, score)], [0.25])
    shown = view(monkeypatch, run_dir, "--tokens")
    assert ["1", "⟨11⟩", "11", "given"] in rows_of(shown) and ["2", "⟨12⟩", "12", "given"] in rows_of(shown)
    assert ["3", "⟨13⟩", "13", "-3.5000", "-3.2500", "2.5e-01"] in rows_of(shown)
    assert "2 tokens + 2 given in 2 turns" in shown and "policy 2" in shown and "mean |gap| 2.50e-01" in shown
    write_samples(run_dir, 8, [(given, score), sample("b:2", 0, 1.0, 3)], [0.25, 0.25])
    assert order(view(monkeypatch, run_dir, "--sort", "length")) == ["b:2 · sample 0", "a:1 · sample 0"]


def test_missing_step_lists_those_that_exist(monkeypatch, run_dir, tmp_path):
    with pytest.raises(UserError, match="Steps with a dump: 1, 2, 3, 7"):
        view(monkeypatch, run_dir, "--step", "5")
    for path in run_dir.path.glob("rollouts/*"):
        path.unlink()
    with pytest.raises(UserError, match="no rollout dumps"):
        view(monkeypatch, run_dir)
    with pytest.raises(UserError, match="does not exist"):
        view(monkeypatch, RunDir(Path(tmp_path / "nowhere")))


TURNS = (
    Turn(0, 2, "stop", 1.5, (
        ToolUse("add", '{"a": 1}', "it is\x1b " + "7" * 300, 0.25),
        ToolUse("add", '{"b": 1}', "no argument b", 0.0, "malformed"),
    )),
    Turn(3, 4, "stop", 0.125, (ToolUse("environment", "right", "Try again.", 2.0),), reward=0.5),
)  # fmt: skip
SAID = ["[add] ", "1", "given ", "right"]


def write_turns(run: RunDir, step: int, turns: tuple[Turn, ...]) -> None:
    sampled = [any(turn.start <= place < turn.end for turn in turns) for place in range(turns[-1].end)]
    size = len(sampled)
    rollout = Rollout(Prompt("a:1", [5], "1+1?", "sums"), 0, list(range(size)), sampled, [-0.5] * size, [0] * size, turns,
                      "stop", SAID[turns[-1].start])
    write_rollouts(run.rollouts(step), [rollout], [Score(1.0)], step, pieces=lambda ids: SAID[: len(ids)])


def test_turns_are_shown_with_what_they_called(monkeypatch, run_dir):
    write_turns(run_dir, 8, TURNS)
    shown = [line.strip("│ ") for line in view(monkeypatch, run_dir).splitlines()]
    assert shown[1:4] == ["1+1?", "[add] 1", "turn 1  1.50 s  stop"]
    assert shown[4] == 'add({"a": 1})  0.25 s → it is␛' and re.fullmatch(r"7{193} … \(307 characters\)", shown[5] + shown[6])
    assert shown[7:12] == [
        'add({"b": 1})  0.00 s  malformed → no argument b', "given", "right", "turn 2  0.12 s  stop  reward 0.5",
        "environment  2.00 s → Try again.",
    ]  # fmt: skip
    assert "3 tokens + 1 given in 2 turns" in shown[12]


def test_what_was_given_is_dimmed_what_was_said_is_bold_and_a_failure_red(run_dir):
    write_turns(run_dir, 8, TURNS)
    [record] = read_rollouts(run_dir.rollouts(8))
    styles = [str(text.style) for text in command._turns(record)]
    assert styles == ["bold", "cyan", "cyan", "red", "dim", "bold", "cyan", "cyan"]


def test_a_single_turn_that_called_something_is_shown_as_one(monkeypatch, run_dir):
    write_turns(run_dir, 8, TURNS[:1])
    assert "2 tokens + 0 given in 1 turn " in view(monkeypatch, run_dir)
    write_turns(run_dir, 9, (Turn(0, 2, "stop", 1.5),))
    assert "turn" not in view(monkeypatch, run_dir)


def test_columns_of_an_agent_stand_apart_from_those_of_the_file(tmp_path):
    """One that is called `reward` says nothing of the reward."""
    outcome = Outcome(columns={"reward": "none of yours", "city": "Rome"})
    rollout = Rollout(Prompt("p", [1], "1", "task"), 0, [2], [True], [-0.5], [0], (Turn(0, 1, "stop"),), "stop", "2", outcome)
    write_rollouts(tmp_path / "step_000001.jsonl.zst", [rollout], [Score(0.25)], 1)
    [record] = read_rollouts(tmp_path / "step_000001.jsonl.zst")
    assert record["reward"] == 0.25 and record["columns"] == outcome.columns
