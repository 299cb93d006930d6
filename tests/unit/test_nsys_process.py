"""Whatever nsys does, the program's status comes, and nothing hangs: small programs play nsys."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pellucid.observe import nsys_process
from pellucid.observe.nsys_process import own_recording, record

pytestmark = pytest.mark.processes

RECORDS = """
import os, subprocess, sys
words = sys.argv[1:]
at = next(index for index, word in enumerate(words) if not word.startswith("-") and word != "profile")
os.umask(0)
status = subprocess.run(words[at:], close_fds=False).returncode
"""
HANGS_AT_THE_START = "import time\ntime.sleep(1000)\n"
HANGS_AT_THE_END = RECORDS + HANGS_AT_THE_START
LEAVES_EARLY = "import os, sys\nif os.fork(): os._exit(0)\n" + RECORDS
EXITS = "import sys; sys.exit(3)"
IS_KILLED = "import os; os.kill(os.getpid(), 9)"
HANGS_AT_ITS_EXIT = """
import sys, threading, time
from pellucid.observe.nsys_process import run_and_tell
def main():
    threading.Thread(target=time.sleep, args=(1000,)).start()
    sys.exit(3)
run_and_tell(main)
"""


def script(folder: Path, code: str) -> Path:
    """Return a program that plays nsys."""
    path = folder / "nsys"
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("nsys", "program", "status", "problem"),
    [
        (RECORDS, EXITS, 3, ""),
        (RECORDS, IS_KILLED, 137, ""),
        (LEAVES_EARLY, EXITS, 3, ""),
        (HANGS_AT_THE_END, EXITS, 3, "2 s after the run nsys was still at work, and was killed"),
        (RECORDS, HANGS_AT_ITS_EXIT, 3, "2 s after the run nsys was still at work, and was killed"),
        (HANGS_AT_THE_START, EXITS, None, "nsys did not start the program: it hung"),
        ("import sys; sys.exit('usage: nsys\\nno such option')", EXITS, None, "nsys did not start the program: no such option"),
    ],
    ids=["records", "is killed", "leaves early", "hangs at the end", "the program hangs", "hangs at the start", "refuses"],
)
def test_the_programs_status_comes_whatever_nsys_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nsys: str, program: str, status: int | None, problem: str
) -> None:
    monkeypatch.setattr(nsys_process, "START_S", 3.0)
    fake, raw = script(tmp_path, nsys), tmp_path / "controller"
    found = record([str(fake), "profile"], raw, [sys.executable, "-c", program], 2.0)
    assert found[0] == status and found[1].startswith(problem) and bool(found[1]) == bool(problem)
    assert (tmp_path / "controller.done").exists()
    deadline = time.monotonic() + 10
    while left := [process.pid for process in psutil.process_iter(["cmdline"]) if any(str(raw) in part for part in process.info["cmdline"] or ())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("nsys", [RECORDS, "import sys; sys.exit(1)", None], ids=["records", "fails to start", "is missing"])
def test_a_rank_runs_whatever_becomes_of_its_nsys(tmp_path: Path, nsys: str | None) -> None:
    if nsys is not None:
        script(tmp_path, nsys)
    settings = {"nsys": ["nsys", "profile", "--capture-range=nvtx"], "raw": str(tmp_path / "policy_rank_0")}
    rank = "import os, sys; print(sys.argv[1:], oct(os.umask(0o22)), os.environ.get('PELLUCID_NSYS')); sys.exit(7)"
    command = [sys.executable, "-P", nsys_process.__file__, json.dumps(settings), "-c", rank, "a b", "--node-ip=x"]
    environment = os.environ | {"PATH": str(tmp_path)}  # the machine's own nsys does not count
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, umask=0o27)
    assert done.returncode == 7 and done.stdout.startswith("['a b', '--node-ip=x'] 0o27 "), (done.stdout, done.stderr)
    if nsys == RECORDS:
        own = json.loads(done.stdout.partition("0o27 ")[2])
        assert own["capture_range"] == "nvtx" and own["raw"] == settings["raw"]


def test_a_process_that_nobody_records_knows_it() -> None:
    assert own_recording() is None
