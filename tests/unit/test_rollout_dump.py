"""The rollout dump reads back exactly as written, notices damage, and can be browsed in the terminal."""

import io
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from pellucid.cli import rollouts as command
from pellucid.errors import UserError
from pellucid.rollout_dump import logp_gaps, read_rollouts, write_rollouts
from pellucid.rundir import RunDir
from pellucid.types import Prompt, RewardFailure, Rollout

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def a_rollout(draw) -> Rollout:
    ids = draw(st.lists(st.integers(0, 2**31), max_size=6))

    def per_token(values):
        return st.lists(values, min_size=len(ids), max_size=len(ids))

    failure = draw(st.none() | st.builds(RewardFailure, st.sampled_from(["exception", "timeout"]), st.text(max_size=5)))
    prompt = Prompt(draw(st.text(max_size=8)), draw(st.lists(st.integers(0, 99), max_size=4)), draw(st.text()), "task",
                    draw(st.none() | st.text() | st.integers() | st.lists(st.text(max_size=3), max_size=2)))
    return Rollout(prompt, draw(st.integers(0, 8)), ids, draw(per_token(FLOATS)), draw(per_token(st.integers(0, 3))),
                   draw(st.sampled_from(["stop", "length"])), draw(st.text()), None if failure else draw(FLOATS),
                   draw(st.dictionaries(st.text(max_size=4), FLOATS, max_size=2)), failure,
                   training_logprobs=draw(st.none() | per_token(FLOATS)), mask=draw(st.none() | per_token(st.booleans())),
                   correction_weights=draw(st.none() | per_token(FLOATS)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollouts=st.lists(a_rollout(), max_size=4), step=st.integers(0, 10**7))
def test_round_trip(tmp_path, rollouts, step):
    path = RunDir(tmp_path).rollouts(step)
    write_rollouts(path, rollouts, step, pieces=lambda ids: [f"<{token}>" for token in ids])
    records = read_rollouts(path)
    assert len(records) == len(rollouts)
    for record, rollout in zip(records, rollouts):
        versions = record.get("policy_versions") or [record["policy_version"]] * len(rollout.token_ids) \
            if rollout.token_ids else []
        failure = rollout.failure and {"kind": rollout.failure.kind, "message": rollout.failure.message}
        assert versions == rollout.versions
        assert record["step"] == step
        assert [record["uid"], record["prompt"], record["prompt_ids"], record["task"], record["answer"]] == \
            [rollout.prompt.uid, rollout.prompt.text, rollout.prompt.token_ids, "task", rollout.prompt.answer]
        assert [record["sample"], record["response"], record["response_ids"], record["finish_reason"]] == \
            [rollout.sample, rollout.text, rollout.token_ids, rollout.finish_reason]
        assert record["rollout_logprobs"] == rollout.logprobs
        assert record["training_logprobs"] == rollout.training_logprobs
        assert record["correction_weights"] == rollout.correction_weights
        assert [record["reward"], record["reward_parts"], record["failure"]] == \
            [rollout.reward, rollout.reward_parts, failure]
        untouched = [0 if failure else 1] * len(rollout.token_ids)
        assert record["mask"] == (untouched if rollout.mask is None else [1 if kept else 0 for kept in rollout.mask])
        assert record["pieces"] == [f"<{token}>" for token in rollout.token_ids]


def sample(uid: str, number: int, reward: float | None, length: int, gap: float = 0.0) -> Rollout:
    failure = RewardFailure("timeout", "took 5 s") if reward is None else None
    logps = [-0.5 - index for index in range(length)]
    prompt = Prompt(uid, [5, 6], f"prompt of {uid}", "arithmetic", "5")
    return Rollout(prompt, number, list(range(10, 10 + length)), logps, [2] * length, "stop",
                   f"[bold]\x1bresponse {uid} {number}", reward, {"format": 1.0}, failure,
                   [logp + gap for logp in logps])


SAMPLES = [sample("a:1", 0, 1.0, 3, 0.25), sample("a:1", 1, 0.0, 5, 0.5),
           sample("b:2", 0, None, 2), sample("b:2", 1, 0.5, 1)]


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    run = RunDir.create(tmp_path)
    run.start_record(device="cpu", seeds={})
    for step in (1, 2, 3, 7):
        write_rollouts(run.rollouts(step), SAMPLES, step)
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
    assert "step 7: 4 samples, mean reward 0.5000, 1 failures, mean |gap| 2.95e-01" in out


def test_a_sample_is_shown_verbatim(monkeypatch, run_dir):
    out = view(monkeypatch, run_dir, "--step", "2")
    for text in ("prompt of a:1", "[bold]␛response a:1 0", "reward 1", "format 1", "expected: 5", "policy 2",
                 "3 tokens", "failed (timeout: took 5 s)", "max |gap| 5.0e-01", "step 2:"):
        assert text in out


def test_tokens(monkeypatch, run_dir):
    write_rollouts(run_dir.rollouts(8), SAMPLES[:1], 8, pieces=lambda ids: ["Hel", "lo", "\n"][:len(ids)])
    rows = [line.strip("│ ").split() for line in view(monkeypatch, run_dir, "--tokens").splitlines()]
    assert ["0", "Hel", "10", "-0.5000", "-0.2500", "2.5e-01"] in rows
    assert ["2", "\\n", "12", "-2.5000", "-2.2500", "2.5e-01"] in rows
    assert "⟨11⟩" in view(monkeypatch, run_dir, "--tokens", "--step", "7")


def test_tokens_show_their_correction_weights(monkeypatch, run_dir):
    weighted, plain = sample("a:1", 0, 1.0, 3, 0.25), sample("a:1", 1, 1.0, 1, 0.25)
    weighted.correction_weights = [1.0, 0.77884, 0.0]
    write_rollouts(run_dir.rollouts(8), [weighted, plain], 8)
    rows = [line.strip("│ ").split() for line in view(monkeypatch, run_dir, "--tokens").splitlines()]
    assert ["1", "⟨11⟩", "11", "-1.5000", "-1.2500", "2.5e-01", "0.7788"] in rows
    assert ["0", "⟨10⟩", "10", "-0.5000", "-0.2500", "2.5e-01"] in rows
    assert [row[-1] for row in rows if row[:2] == ["#", "token"]] == ["weight", "|gap|"]


def test_missing_step_lists_those_that_exist(monkeypatch, run_dir, tmp_path):
    with pytest.raises(UserError, match="Steps with a dump: 1-3, 7"):
        view(monkeypatch, run_dir, "--step", "5")
    for path in run_dir.path.glob("rollouts/*"):
        path.unlink()
    with pytest.raises(UserError, match="no rollout dumps"):
        view(monkeypatch, run_dir)
    with pytest.raises(UserError, match="does not exist"):
        view(monkeypatch, RunDir(Path(tmp_path / "nowhere")))
