"""The command line of nsys, and what becomes of its files, as far as that needs no nsys."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from config_cases import load

from pellucid.config.schema.profiler import GlobalNsysConfig
from pellucid.errors import UserError
from pellucid.observe import recording
from pellucid.observe.manifest import ProfileFile, read_journals
from pellucid.observe.nsys_process import PROBLEM, Recording
from pellucid.observe.recording import nsys_command
from pellucid.observe.tools import nsys
from pellucid.observe.tools.base import Capture
from pellucid.stages import Stage

WORKER, CONTROLLER = GlobalNsysConfig().worker_nsight_options, GlobalNsysConfig().controller_nsight_options
KEY = "worker_nsight_options"


def options(mapping: dict, cuda: bool = True) -> dict[str, str]:
    """Return the command's options by name."""
    arguments, _ = nsys_command(mapping, KEY, cuda=cuda)
    assert arguments[:2] == ["nsys", "profile"]
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments[2:])


def test_the_guides_options_go_to_nsys_as_they_are() -> None:
    found = options(WORKER)
    given = {name: str(value) for name, value in WORKER.items() if value is not None}
    assert found.items() >= given.items() and found["capture-range-end"] == "repeat"
    assert found["sample"] == found["cpuctxsw"] == "none" and found["wait"] == "primary"
    assert not nsys_command(WORKER, KEY, cuda=True)[1]
    assert "capture-range" not in options(CONTROLLER) and "capture-range-end" not in options(CONTROLLER)


def test_without_cuda_what_needs_it_is_left_out_in_one_notice() -> None:
    found = options(WORKER, cuda=False)
    assert found["trace"] == "nvtx,ucx" and not [name for name in found if name.startswith("cuda")]
    assert found["capture-range"] == "nvtx" and found["nvtx-capture"] == "capture@pellucid" and found["kill"] == "none"
    [line] = nsys_command(WORKER, KEY, cuda=False)[1]
    assert "without cuda, cublas, cuda-memory-usage, cuda-graph-trace; captures begin and end with an NVTX range" in line


def test_options_of_the_users_own() -> None:
    found = options({"trace": "nvtx,osrt", "sample": "process-tree", "stats": True, "capture-range": "nvtx"})
    assert found["trace"] == "nvtx,osrt" and found["sample"] == "process-tree" and found["stats"] == "true"
    # nsys would end the program after its first capture otherwise
    assert found["kill"] == "none" and found["capture-range-end"] == "repeat"
    assert options(WORKER | {"capture-range-end": "repeat-shutdown:2"})["capture-range-end"] == "repeat-shutdown:2"
    with pytest.raises(UserError, match=rf"{KEY}.output: cannot be set"):
        options({"output": "mine"})


@pytest.mark.parametrize("placement", ["local", "ray"])
def test_that_the_controller_is_not_recorded_says_nothing_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], placement: str
) -> None:
    monkeypatch.setenv(PROBLEM, "")
    monkeypatch.delenv(PROBLEM)  # so that what is set here is gone afterwards
    monkeypatch.setattr(recording, "check_nsys", lambda: None)
    monkeypatch.setattr(recording, "record", lambda *arguments: (None, "no such option"))
    section = "actor_rollout_ref.actor.profiler"
    asked = ["global_profiler.tool=nsys", "global_profiler.steps=[1]", f"{section}.enable=true", f"{section}.ranks=[0]"]
    where = [f"trainer.placement={placement}", f"trainer.default_local_dir={tmp_path}"]
    assert recording.run_recorded(load(*asked, *where).config, []) is None
    assert (PROBLEM in os.environ) is (placement == "local")
    assert ("no such option" in capsys.readouterr().err) is (placement == "ray")


def test_only_a_process_that_is_not_recorded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBLEM, "no such option")
    monkeypatch.setattr(nsys.shutil, "which", lambda name: name)
    monkeypatch.setattr(nsys.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match="no such option"):
        nsys.check_nsys()
    monkeypatch.setattr(nsys, "own_recording", lambda: Recording("raw", None, 1))
    nsys.check_nsys()


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recording, "importer", lambda: None)
    monkeypatch.setattr(nsys, "importer", lambda: None)
    monkeypatch.setattr(nsys, "_numbers", count(1))
    folder = tmp_path / "profile" / "nsys-in-progress-x"
    folder.mkdir(parents=True)
    return folder


def begin(raw: Path, step: int, stage: Stage | None = None, process: str = "policy_rank_1", whole: bool = False) -> Path:
    recording = Recording(str(raw / process), None if whole else "nvtx", 1)
    (raw / f"{process}.done").touch()
    return nsys.note_capture(recording, Capture(raw.parent, "policy", step, stage, 1, 2, pid=77))


def finish(raw: Path) -> tuple[list[Path], list[str], list[ProfileFile], list[str]]:
    written, problems = recording.place_files(raw, raw.parent / ".journals")
    assert not raw.exists()
    files, failures = read_journals(raw.parent / ".journals")
    return written, problems, files, [failure.reason for failure in failures]


@pytest.mark.parametrize(
    ("captures", "names"),
    [(((3, None), (5, None)), (3, 5)), (((5, Stage.ROLLOUT_GENERATE), (5, Stage.ACTOR_UPDATE)), (1, 2))],
)
def test_files_are_named_after_their_step_or_count_the_stages(raw: Path, captures: tuple, names: tuple[int, int]) -> None:
    paths = [begin(raw, step, stage) for step, stage in captures]
    for number in (1, 2):
        (raw / f"policy_rank_1.{number}.qdstrm").write_bytes(b"x" * number)
    written, problems, files, failures = finish(raw)
    assert [path.name for path in paths] == [f"worker_process_77.{name}.qdstrm" for name in names]
    assert written == paths and not failures
    assert [(file.path, file.step, file.stage, file.bytes, file.rank) for file in files] == [
        (path.name, step, stage, size, 1) for path, (step, stage), size in zip(paths, captures, (1, 2))
    ]
    assert len([line for line in problems if "QdstrmImporter" in line]) == 1


def test_a_capture_without_a_file_is_a_failure(raw: Path) -> None:
    begin(raw, 1), begin(raw, 2)
    (raw / "policy_rank_1.qdstrm").write_bytes(b"x")
    _, problems, files, failures = finish(raw)
    assert [file.step for file in files] == [1]
    assert failures == ["nsys wrote no file of the step: worker_process_77.2.qdstrm"] and failures[0] in problems[-1]


def test_a_controller_has_one_file_of_all_its_steps(raw: Path) -> None:
    paths = {begin(raw, step, process="controller", whole=True) for step in (2, 4)}
    (raw / "controller.qdstrm").write_bytes(b"x")
    _, _, [file], failures = finish(raw)
    assert [path.name for path in paths] == [file.path] == ["controller_process_77.qdstrm"] and not failures
    assert (file.step, file.stage) == (2, None)


def test_a_run_that_ended_before_the_first_profiled_step_leaves_nothing(raw: Path) -> None:
    (raw / "controller.qdstrm").write_bytes(b"x")
    assert finish(raw) == ([], [], [], [])


def test_process_ids_may_come_again(raw: Path) -> None:
    (raw.parent / "worker_process_77.3.qdstrm").write_bytes(b"another run's")
    assert begin(raw, 3).name == "worker_process_77-2.3.qdstrm"


def test_half_a_note_is_left_out(raw: Path) -> None:
    begin(raw, 1)
    notes = raw / "policy_rank_1.jsonl"
    notes.write_text(notes.read_text() + json.dumps({"file": 2})[:5])
    (raw / "policy_rank_1.qdstrm").write_bytes(b"x")
    assert len(finish(raw)[0]) == 1


def test_a_conversion_that_fails_leaves_what_nsys_collected(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "importer", lambda: "sleep")
    begin(raw, 1)
    (raw / "policy_rank_1.qdstrm").write_bytes(b"x")
    [path], [problem], _, _ = finish(raw)
    assert path.suffix == ".qdstrm" and "QdstrmImporter ended with status 1" in problem


@pytest.mark.processes
def test_the_rooms_of_nsys_start_without_torch() -> None:
    code = "import sys, pellucid.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
