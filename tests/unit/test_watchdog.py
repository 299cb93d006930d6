"""When the watchdog takes silence for a stall, what the step display tells it, and what a report says."""

import asyncio
import faulthandler
import math
import mmap
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager

import psutil
import pytest

from pellucid.files.rundir import RunDir
from pellucid.metrics.display import StepDisplay
from pellucid.observe.stall import StallError, end_processes, main_frames, record_end, write_report
from pellucid.observe.watchdog import BEAT_BYTES, Watchdog, find_stall, read_beats


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.memory = mmap.mmap(-1, BEAT_BYTES)
        """What a watchdog writes on this clock."""

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> tuple[str, float]:
        """Return what the guard would find now: where the run stands, and when that is a stall."""
        beats = read_beats(self.memory)[1] if any(self.memory[:]) else []
        return find_stall(beats, self.now)

    def stall(self) -> str | None:
        """Return the stall that somebody who looks now sees."""
        stall, deadline = self.look()
        return stall if self.now >= deadline else None


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watchdog(clock):
    return Watchdog(30.0, clock.memory, lambda: clock.now)


def looked_at(watchdog: Watchdog, clock: Clock, seconds: int) -> list[str]:
    """Return the stalls that somebody who looks every second sees."""
    stalls = []
    for _ in range(seconds):
        clock.wait(1.0)
        stalls += [stall for stall in [clock.stall()] if stall is not None]
    return stalls


def test_silence_for_the_time_out_is_a_stall_that_says_where_the_run_stands(watchdog, clock):
    with watchdog.stage("actor_update", 64, 3) as watched:
        watched.beat(16)
        assert not looked_at(watchdog, clock, 29)
        stalls = looked_at(watchdog, clock, 1)
    assert stalls == ["no progress for 30 s in stage actor_update after 16 of 64 samples; the last finished step is 3"]


def test_a_stall_without_counts_or_steps_says_so(watchdog, clock):
    with watchdog.stage("advantage"):
        clock.wait(31.4)
        assert clock.stall() == "no progress for 31 s in stage advantage; no step is finished yet"


def test_every_beat_starts_the_time_anew(watchdog, clock):
    with watchdog.stage("reward", 10) as watched:
        for done in range(10):
            watched.beat(done)
            assert not looked_at(watchdog, clock, 29)


def test_nothing_is_watched_before_the_first_beat(watchdog, clock):
    assert not looked_at(watchdog, clock, 100)


def test_a_renewed_beat_keeps_its_place_and_starts_the_time_anew(watchdog, clock):
    watchdog.renew()
    assert not looked_at(watchdog, clock, 100), "nothing had begun"
    with watchdog.stage("reward", 8) as watched:
        watched.beat(3)
        for _ in range(5):
            assert not looked_at(watchdog, clock, 29)
            watchdog.renew()
        stall = looked_at(watchdog, clock, 30)[0]
    assert stall == "no progress for 30 s in stage reward after 3 of 8 samples; no step is finished yet"


def test_without_a_time_out_nothing_is_a_stall(clock):
    watchdog = Watchdog(None, clock.memory, lambda: clock.now)
    with watchdog.stage("reward"):
        for _ in range(10):
            clock.wait(10.0**3)
            assert clock.stall() is None


def test_a_beat_that_is_put_off_comes_later(watchdog, clock):
    assert clock.look()[1] == math.inf
    with watchdog.stage("rollout_generate", None, 2) as watched:
        watched.beat(3)
        clock.wait(5.0)
        where = "no progress for 5 s in stage rollout_generate; the last finished step is 2"
        assert clock.look() == (where, 1030.0)
        watchdog.put_off(60.0)
        assert clock.look() == (where, 1065.0)


def test_beats_that_say_nothing_new_are_written_now_and_then(watchdog, clock):
    with watchdog.stage("rollout_generate", 8) as watched:
        clock.wait(0.05)
        watched.beat(0)
        assert clock.look()[1] == 1030.0
        watched.beat(1)
        assert clock.look()[1] == 1030.05
        clock.wait(0.2)
        watched.beat(1)
        assert clock.look()[1] == 1030.25


def test_the_display_tells_of_stages_samples_and_steps(watchdog, clock):
    told = []

    @contextmanager
    def watch(*about):
        told.append(about)
        with watchdog.stage(*about) as watched:
            yield watched

    display = StepDisplay(10, 3, watch=watch)
    with display.stage("reward", 8) as advance:
        advance(2)
        advance(0)
        advance(1)
        assert "reward after 3 of 8 samples; the last finished step is 3" in looked_at(watchdog, clock, 30)[0]
    display.finish_step(4, {})
    with display.stage("save_checkpoint"):
        assert "in stage save_checkpoint; the last finished step is 4" in looked_at(watchdog, clock, 30)[0]
    assert told == [("reward", 8, 3), ("save_checkpoint", None, 4)]


def test_each_stage_under_way_has_an_entry_and_the_stuck_one_is_named(watchdog, clock):
    leave, entered = threading.Event(), threading.Event()

    def produce() -> None:
        with watchdog.stage("rollout_generate", 8, 2) as watched:
            watched.beat(5)
            entered.set()
            leave.wait(30)

    other = threading.Thread(target=produce)
    other.start()
    entered.wait(30)
    with watchdog.stage("actor_update", 4, 2) as watched:
        for done in range(3):
            assert not looked_at(watchdog, clock, 9)
            watched.beat(done)
        [stall] = looked_at(watchdog, clock, 3)
    assert "in stage rollout_generate after 5 of 8 samples, beside actor_update; the last finished step is 2" in stall
    leave.set()
    other.join()
    assert not looked_at(watchdog, clock, 29), "it ended a moment ago, and nothing else is under way"
    assert "in stage rollout_generate;" in looked_at(watchdog, clock, 1)[0], (
        "between stages counts from the last one's end"
    )


def test_stages_of_asyncio_tasks_are_watched_each_for_itself(watchdog, clock):
    stalls = []

    async def alive() -> None:
        with watchdog.stage("actor_update") as watched:
            for _ in range(4):
                clock.wait(10.0)
                stalls.append(clock.stall())
                watched.beat()
                await asyncio.sleep(0)

    async def stuck() -> None:
        with watchdog.stage("reward", 3):
            await asyncio.gather(waiter)

    async def both() -> None:
        nonlocal waiter
        waiter = asyncio.ensure_future(alive())
        await stuck()

    waiter: asyncio.Future[None]
    asyncio.run(both())
    assert stalls[:2] == [None, None] and all("in stage reward after 0 of 3" in stall for stall in stalls[2:])


def test_a_nested_stage_keeps_the_one_round_it_alive(watchdog, clock):
    with watchdog.stage("validate"):
        with watchdog.stage("reward", 9) as inner:
            for done in range(9):
                assert not looked_at(watchdog, clock, 20)
                inner.beat(done)
        assert not looked_at(watchdog, clock, 29)
        assert "in stage validate;" in looked_at(watchdog, clock, 1)[0]


def dumped_report(run_dir: RunDir) -> tuple[str, StallError]:
    """Return the stacks of all threads, and the report of a stall here."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        stall, main = "no progress for 9 s in stage reward after 1 of 4 samples", threading.get_ident()
        report = write_report(run_dir, stall, file.fileno(), 2**22 + 1, main, ["sample 7"])
        file.seek(0)
        return file.read().decode(), report


@pytest.mark.processes
def test_a_report_names_where_the_main_thread_is(tmp_path, capsys):
    go_on = threading.Event()
    other = threading.Thread(target=go_on.wait)
    other.start()
    stacks, report = dumped_report(RunDir(tmp_path))
    go_on.set()
    other.join()
    frames = main_frames(stacks, threading.get_ident())
    assert "in dumped_report: faulthandler.dump_traceback" in frames[0] and "in test_a_report_names" in frames[1]
    assert main_frames(stacks, 12345) == ["  not known"]
    file = next((tmp_path / "logs").iterdir())
    assert "wait" in file.read_text() and "test_a_report_names" in file.read_text()
    report.show()
    said = capsys.readouterr().err
    assert str(file) in str(report) and str(file) in said and "in stage reward after 1 of 4 samples" in said
    assert "the last checkpoint is none" in said and "trainer.stall_timeout_s" in said and "working on sample 7" in said


@pytest.mark.processes
def test_a_report_that_cannot_be_written_is_told_whole(tmp_path, capsys):
    (tmp_path / "logs").write_text("a file where the folder should be")
    dumped_report(RunDir(tmp_path))[1].show()
    said = capsys.readouterr().err
    assert "cannot be written" in said and "in dumped_report" in said


@pytest.mark.processes
def test_the_reason_is_recorded_only_for_the_process_that_has_an_entry(tmp_path):
    run_dir = RunDir(tmp_path)
    record_end(run_dir, 1, "stalled")
    assert not run_dir.run_json.exists()
    run_dir.start_record(device="cpu", seeds={})
    record_end(run_dir, 1, "stalled")
    assert run_dir.read_record()[-1]["exit_reason"] is None
    record_end(run_dir, run_dir.read_record()[-1]["pid"], "stalled")
    assert run_dir.read_record()[-1]["exit_reason"] == "stalled"


@pytest.mark.processes
def test_a_process_that_ignores_being_terminated_is_killed():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    end_processes([psutil.Process(child.pid)])
    assert child.wait(timeout=30) != 0
