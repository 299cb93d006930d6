"""When the watchdog takes silence for a stall, what the step display tells it, and what a report says."""

import asyncio
import faulthandler
import math
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager

import psutil
import pytest

from pellucid.files.rundir import RunDir
from pellucid.metrics.display import StepDisplay
from pellucid.observe import stall_guard
from pellucid.observe.stall import StallError, end_processes, main_frames, record_end, write_report
from pellucid.observe.watchdog import BEAT_BYTES, Memory, Stall, Watchdog, read_stall


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.memory: Memory = bytearray(BEAT_BYTES)
        """What a watchdog writes on this clock."""

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def stall(self) -> Stall | None:
        """Return the stall that somebody who looks now sees."""
        stall, deadline = read_stall(self.memory, self.now)
        return stall if self.now >= deadline else None


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watchdog(clock):
    return Watchdog(30.0, clock.memory, lambda: clock.now)


def looked_at(watchdog: Watchdog, clock: Clock, seconds: int) -> list[Stall]:
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
    assert stalls == [Stall("actor_update", 30.0, 16, 64, 3)]
    assert str(stalls[0]) == "no progress for 30 s in stage actor_update after 16 of 64 samples; the last finished step is 3"


def test_a_stall_without_counts_or_steps_says_so():
    assert str(Stall("advantage", 7.4, 0, None, 0)) == "no progress for 7 s in stage advantage; no step is finished yet"


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
    assert stall == Stall("reward", 30.0, 3, 8, 0)


def test_without_a_time_out_nothing_is_a_stall(clock):
    watchdog = Watchdog(None, clock.memory, lambda: clock.now)
    with watchdog.stage("reward"):
        assert not looked_at(watchdog, clock, 10**4)


def test_a_beat_that_is_put_off_comes_later(watchdog, clock):
    assert read_stall(clock.memory, clock.now)[1] == math.inf
    with watchdog.stage("rollout_generate", None, 2) as watched:
        watched.beat(3)
        clock.wait(5.0)
        assert read_stall(clock.memory, clock.now) == (Stall("rollout_generate", 5.0, 3, None, 2), 1030.0)
        watchdog.put_off(60.0)
        assert read_stall(clock.memory, clock.now) == (Stall("rollout_generate", 5.0, 3, None, 2), 1065.0)


def test_the_guard_waits_while_a_stalled_run_writes_captures(monkeypatch):
    memory, polls = bytearray(BEAT_BYTES), []
    watchdog = Watchdog(30.0, memory)
    monkeypatch.setattr(stall_guard, "_input_closes", lambda seconds: len(polls) == 3 or bool(polls.append(seconds)))
    watchdog.put_off(-1.0)
    assert not stall_guard.unwinds(memory) and not polls
    watchdog.put_off(60.0)
    assert stall_guard.unwinds(memory) and len(polls) == 3


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
        assert looked_at(watchdog, clock, 30) == [Stall("reward", 30.0, 3, 8, 3)]
    display.finish_step(4, {})
    with display.stage("save_checkpoint"):
        assert looked_at(watchdog, clock, 30) == [Stall("save_checkpoint", 30.0, 0, None, 4)]
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
    assert stall == Stall("rollout_generate", 30.0, 5, 8, 2, ["actor_update"])
    assert "in stage rollout_generate after 5 of 8 samples, beside actor_update; the last finished step is 2" in str(stall)
    leave.set()
    other.join()
    assert not looked_at(watchdog, clock, 29), "it ended a moment ago, and nothing else is under way"
    assert looked_at(watchdog, clock, 1)[0].stage == "rollout_generate", "between stages counts from the last one's end"


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
    assert [stall and stall.stage for stall in stalls] == [None, None, "reward", "reward"]


def test_a_nested_stage_keeps_the_one_round_it_alive(watchdog, clock):
    with watchdog.stage("validate"):
        with watchdog.stage("reward", 9) as inner:
            for done in range(9):
                assert not looked_at(watchdog, clock, 20)
                inner.beat(done)
        assert not looked_at(watchdog, clock, 29)
        assert looked_at(watchdog, clock, 1)[0].stage == "validate"


def dumped_report(run_dir: RunDir) -> tuple[str, StallError]:
    """Return the stacks of all threads, and the report of a stall here."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        stall, main = Stall("reward", 9.0, 1, 4, 2), threading.get_ident()
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
