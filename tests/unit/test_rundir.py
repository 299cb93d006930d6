"""The run directory: paths, whole-or-nothing writes, the lock between processes, and the record of starts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.errors import UserError
from pellucid.files.rundir import RunDir, atomic_open, atomic_write, git_state


def test_layout(tmp_path):
    run = RunDir.create(tmp_path / "project" / "experiment")
    assert run.path.is_dir()
    assert run.rollouts(12) == run.path / "rollouts" / "step_000012.jsonl.zst"
    atomic_write(run.rollouts(12), b"")
    atomic_write(run.rollouts(3), b"")
    assert run.rollout_steps() == [3, 12]


def test_open_refuses_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        RunDir.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no run"):
        RunDir.open(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert RunDir.open(tmp_path).metrics.exists()
    with pytest.raises(UserError, match="a file is there"):
        RunDir.create(tmp_path / "metrics.jsonl")


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, "old")

    def fail() -> None:
        with atomic_open(path) as handle:
            handle.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


HOLD = "import sys, time; from pellucid.files.rundir import RunDir\n" \
       "with RunDir.create(sys.argv[1]).lock(): print('held', flush=True); time.sleep(60)"


def hold(path: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert child.stdout
    assert child.stdout.readline() == b"held\n"
    return child


@pytest.mark.processes
def test_lock_names_the_holder_and_dies_with_it(tmp_path):
    child = hold(tmp_path)
    try:
        with pytest.raises(UserError, match=f"process {child.pid} on "), RunDir(tmp_path).lock():
            pass
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with RunDir(tmp_path).lock():
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")
    hold(tmp_path).kill()


WRITE = "import sys, time; from pathlib import Path; from pellucid.files.rundir import atomic_open\n" \
        "with atomic_open(Path(sys.argv[1])) as file: file.write(b'half'); print('open', flush=True); time.sleep(60)"


@pytest.mark.processes
def test_what_a_killed_process_was_writing_is_cleared_at_the_next_start(tmp_path):
    command = [sys.executable, "-c", WRITE, str(tmp_path / "profile" / "manifest.json")]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == b"open\n"
    killed, live = writers
    killed.kill()
    killed.wait()
    assert len(list(tmp_path.rglob("*.tmp-*"))) == 2
    try:
        with RunDir(tmp_path).lock():
            assert [path.name for path in tmp_path.rglob("*.tmp-*")] == [f"manifest.json.tmp-{live.pid}"]
    finally:
        live.kill()
        live.wait()


def test_record_of_starts(tmp_path):
    run = RunDir.create(tmp_path)
    assert run.read_record() == []
    run.start_record(device="cpu", seeds={"run": 1})
    run.start_record(device="cpu", seeds={"run": 1})
    run.finish_record("finished")
    first, second = json.loads(run.run_json.read_text())["starts"]
    assert first["exit_reason"].startswith("lost")
    assert first["ended_at"] is None
    assert second["exit_reason"] == "finished"
    assert second["ended_at"] >= second["started_at"]
    assert second["versions"]["torch"]
    assert second["versions"]["python"] == sys.version.split()[0]
    assert second["seeds"] == {"run": 1}


def test_altered_record(tmp_path):
    run = RunDir.create(tmp_path)
    run.run_json.write_text("{]")
    with pytest.raises(UserError, match="not a run record"):
        run.start_record(device="cpu", seeds={})


def test_git_state(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "file").write_text("a")
    subprocess.run(["git", "add", "file"], cwd=tmp_path, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"], cwd=tmp_path, check=True)
    state = git_state(tmp_path)
    assert state
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == state | {"dirty": True}
    (tmp_path / "file").write_text("a")
    (tmp_path / "recipe.yaml").write_text("")
    assert git_state(tmp_path) == state
    monkeypatch.setattr("sys.argv", ["pellucid", "train", "recipe.yaml"])
    assert git_state(tmp_path) == state | {"dirty": True}


@pytest.mark.processes
def test_imports_without_torch():
    modules = ("files.rundir", "files.rollout_dump", "files.checkpoint_store", "cli.rollouts",
               "metrics.definitions", "metrics.trackers", "metrics.display", "metrics.plots")
    code = "".join(f"import pellucid.{name}\n" for name in modules) + "import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
