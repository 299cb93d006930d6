"""An nsys that hangs keeps nobody waiting: real processes play it, as the real one does so once in many runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pellucid.observe import nsys_files, nsys_supervisor
from pellucid.observe.manifest import read_journals
from pellucid.observe.nsys_command import OwnNsys
from pellucid.observe.tools.base import Capture

pytestmark = pytest.mark.processes

WAITS_FOR_ALL = """
import os, subprocess, sys
ours, theirs = os.pipe()
words = sys.argv[3:]
at = words.index("--child")
program = subprocess.Popen(words, pass_fds=(*map(int, words[at + 2:at + 6]), theirs))
os.close(theirs)
os.read(ours, 1)  # ends as the last process does that the program has started, and nobody reaps the program before
sys.exit(program.wait())
"""
HANGS_AT_THE_END = """
import subprocess, sys, time
subprocess.run(sys.argv[3:], close_fds=False)
time.sleep(1000)
"""
HANGS_AT_THE_START = "import time\ntime.sleep(1000)\n"
SUPERVISE = """
import sys
from pathlib import Path
from pellucid.observe import nsys_supervisor
from pellucid.observe.nsys_supervisor import supervise
nsys_supervisor.HUNG_S, nsys_supervisor.LOOK_S = 1.0, 0.1
nsys, raw, program = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
ended = supervise([str(nsys), "profile"], raw / "controller.%p", [sys.executable, "-c", program], raw / "log")
print(ended.status, ended.started, *ended.problems)
"""
EXITS = "import sys; sys.exit(3)"
NOTES_AND_EXITS = """
import sys
from pellucid.observe.recording import noting_the_end
noting_the_end(lambda: sys.exit(3))
"""
HANGS_AT_ITS_EXIT = """
import sys, threading, time
from pellucid.observe.recording import noting_the_end
def main():
    threading.Thread(target=time.sleep, args=(1000,)).start()
    sys.exit(3)
noting_the_end(main)
"""


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "profile" / "nsys-in-progress-x"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_supervisor, "HUNG_S", 1.0)
    monkeypatch.setattr(nsys_supervisor, "LOOK_S", 0.1)


def script(folder: Path, code: str, name: str = "nsys") -> Path:
    """Return a program, which the operating system knows by its name."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("nsys", "program", "expected"),
    [
        (WAITS_FOR_ALL, EXITS, r"3 True\n"),
        (HANGS_AT_THE_END, NOTES_AND_EXITS, r"3 True nsys \(\d+\) hung, doing nothing for .*\n"),
        (HANGS_AT_THE_START, EXITS, r"\d+ False\n"),
        (WAITS_FOR_ALL, HANGS_AT_ITS_EXIT, r"3 True the run was over, but its process \d+ did not end: .*\n"),
    ],
    ids=["nsys waits for all", "nsys hangs at the end", "nsys hangs at the start", "the program hangs at its exit"],
)
def test_the_programs_status_comes_whatever_hangs(tmp_path: Path, raw: Path, nsys: str, program: str, expected: str) -> None:
    fake = script(tmp_path, nsys)
    command = [sys.executable, "-c", SUPERVISE, str(fake), str(raw), program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(expected, done.stdout), (done.stdout, done.stderr)
    left = [process for process in psutil.process_iter(["cmdline"]) if any(str(raw) in part for part in process.info["cmdline"] or ())]
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_what_a_hung_nsys_has_written_is_kept(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys_files, "importer", lambda: None)
    nsys_files.report_suffix.cache_clear()
    for step in (1, 2):
        nsys_files.note_capture(OwnNsys(1, raw / "policy_rank_1.77", "nvtx"), Capture(raw.parent, "policy", step, None, 1, 2, pid=77))
    (raw / "policy_rank_1.77.1.qdstrm").write_bytes(b"x")
    fake = script(tmp_path, "import time\ntime.sleep(1000)\n")
    nsys = subprocess.Popen([str(fake), "profile", f"--output={raw}/policy_rank_1.%p"])
    finished = nsys_files.finish(raw, raw.parent / ".journals")
    assert not psutil.pid_exists(nsys.pid)
    assert f"nsys ({nsys.pid}) hung, doing nothing" in finished.problems[0] and len(finished.files) == 1
    [failure] = read_journals(raw.parent / ".journals")[1]
    assert failure.step == 2 and not raw.exists()


def test_a_conversion_that_hangs_leaves_what_nsys_collected(tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = script(tmp_path, "import time\ntime.sleep(1000)\n", name="QdstrmImporter")
    monkeypatch.setattr(nsys_files, "importer", lambda: fake)
    collected = raw / "policy_rank_1.77.qdstrm"
    collected.write_bytes(b"x")
    finished = nsys_files.Finished()
    assert nsys_files._convert(collected, finished) is None
    [problem] = finished.problems
    assert "stays as nsys collected it: it did nothing for 1 s" in problem and collected.exists()


def test_what_works_or_writes_does_not_hang(tmp_path: Path) -> None:
    works = script(tmp_path, "import time\nend = time.monotonic() + 1.6\nwhile time.monotonic() < end: pass\n", name="works")
    assert nsys_supervisor.run_watched([str(works)], tmp_path, limit_s=60.0) == (0, "")
    code = f"import time\nfor n in range(6):\n    open({str(tmp_path / 'grows')!r}, 'a').write('x')\n    time.sleep(0.3)\nprint('end')\n"
    writes = script(tmp_path, code, name="writes")
    assert nsys_supervisor.run_watched([str(writes)], tmp_path, limit_s=60.0) == (0, "end\n")


@pytest.mark.parametrize("nsys", [WAITS_FOR_ALL, "import sys; sys.exit(1)", None], ids=["records", "fails to start", "is missing"])
def test_a_rank_runs_whatever_becomes_of_its_nsys(tmp_path: Path, raw: Path, nsys: str | None) -> None:
    if nsys is not None:
        script(tmp_path, nsys)
    settings = {"nsys": ["nsys", "profile"], "output": str(raw / "policy_rank_0.%p"), "log": str(raw / "policy_rank_0.log")}
    rank = "import os, sys; print(sys.argv[1:], oct(os.umask(0o22))); sys.exit(7)"
    command = [sys.executable, "-P", nsys_supervisor.__file__, json.dumps(settings), "-c", rank, "a b", "--node-ip=x"]
    environment = os.environ | {"PATH": str(tmp_path)}  # the machine's own nsys does not count
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, umask=0o27)
    assert (done.returncode, done.stdout) == (7, "['a b', '--node-ip=x'] 0o27\n"), done.stderr
