"""Files written in the background hold what the tensors were when the writing began."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pellucid.training.common.staging import StagedFiles


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {"matrix": torch.full((4096, 2048), fill), "step": torch.tensor(fill), "names": torch.tensor([3, 4])}


def test_the_tensors_may_change_while_the_files_are_written(tmp_path):
    first, second, files = tensors(1.0), tensors(2.0), StagedFiles()
    save_file(first, tmp_path / "expected")
    wait = files.start(tmp_path, {"a": first, "b": second})
    for tensor in (*first.values(), *second.values()):
        tensor.zero_()
    wait()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "expected").read_bytes()
    assert load_file(tmp_path / "b")["matrix"].unique().tolist() == [2.0]


def test_the_next_files_wait_for_those_before(tmp_path):
    files = StagedFiles()
    for step in (1.0, 2.0, 3.0):
        (tmp_path / str(step)).mkdir()
        wait = files.start(tmp_path / str(step), {"a": tensors(step)})
    wait()
    for step in (1.0, 2.0, 3.0):
        assert load_file(tmp_path / str(step) / "a")["matrix"].unique().tolist() == [step]


def test_tensors_of_another_shape_get_memory_of_their_own(tmp_path):
    files = StagedFiles()
    files.start(tmp_path, {"a": {"x": torch.ones(3)}})
    files.start(tmp_path, {"a": {"x": torch.ones(2, 2, dtype=torch.int64), "y": torch.ones(1)}})()
    assert load_file(tmp_path / "a")["x"].tolist() == [[1, 1], [1, 1]]


def test_what_fails_is_raised_by_the_wait_and_the_next_files_are_written(tmp_path):
    files = StagedFiles()
    wait = files.start(tmp_path / "missing", {"a": tensors(1.0)})
    with pytest.raises(Exception, match="No such file"):
        wait()
    files.start(tmp_path, {"a": tensors(1.0)})()
    assert Path(tmp_path / "a").is_file()
