"""When the watchdog takes silence for a stall, what the step display tells it, and what a report says."""

import faulthandler
import math
import subprocess
import sys
import tempfile
import threading

import psutil
import pytest

from pellucid.controller.stall import end_processes, main_frames, read_all, record_end, write_report
from pellucid.controller.watchdog import BEAT_BYTES, Stall, Watchdog, read_beat
from pellucid.metrics.console import StepDisplay
from pellucid.rundir import RunDir


class Clock:
    """Time that passes when a test says so; `busy` of it is spent computing."""

    def __init__(self) -> None:
        self.now, self.cpu = 1000.0, 50.0

    def wait(self, seconds: float, *, busy: float = 0.0) -> None:
        self.now += seconds
        self.cpu += busy


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watchdog(clock):
    return Watchdog(30.0, lambda stall: None, clock=lambda: clock.now, cpu_clock=lambda: clock.cpu)


def looked_at(watchdog: Watchdog, clock: Clock, seconds: int) -> list[Stall]:
    """Return the stalls that somebody who looks every second sees."""
    stalls = []
    for _ in range(seconds):
        clock.wait(1.0)
        stalls += [stall for stall in [watchdog.check()] if stall is not None]
    return stalls


def test_silence_for_the_time_out_is_a_stall_that_says_where_the_run_stands(watchdog, clock):
    watchdog.beat("actor_update", 16, 64, last_step=3)
    assert not looked_at(watchdog, clock, 29)
    stalls = looked_at(watchdog, clock, 1)
    assert stalls == [Stall("actor_update", 30.0, 16, 64, 3)]
    assert str(stalls[0]) == "no progress for 30 s in stage actor_update after 16 of 64 samples; the last finished step is 3"


def test_a_stall_without_counts_or_steps_says_so():
    assert str(Stall("advantage", 7.4, 0, None, 0)) == "no progress for 7 s in stage advantage; no step is finished yet"


def test_every_beat_starts_the_time_anew(watchdog, clock):
    for done in range(10):
        watchdog.beat("reward", done, 10)
        assert not looked_at(watchdog, clock, 29)


def test_nothing_is_watched_before_the_first_beat(watchdog, clock):
    assert not looked_at(watchdog, clock, 100)


def test_a_renewed_beat_keeps_its_place_and_starts_the_time_anew(watchdog, clock):
    watchdog.renew()
    assert not looked_at(watchdog, clock, 100), "nothing had begun"
    watchdog.beat("reward", 3, 8)
    for _ in range(5):
        assert not looked_at(watchdog, clock, 29)
        watchdog.renew()
    stall = looked_at(watchdog, clock, 30)[0]
    assert stall == Stall("reward", 30.0, 3, 8, 0)


def test_without_a_time_out_nothing_is_a_stall(clock):
    watchdog = Watchdog(None, lambda stall: None, clock=lambda: clock.now, cpu_clock=lambda: clock.cpu)
    with watchdog:
        watchdog.beat("reward")
        assert not looked_at(watchdog, clock, 10**4)
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_the_time_of_a_suspension_does_not_count(watchdog, clock):
    watchdog.beat("reward")
    clock.wait(3600.0)
    assert watchdog.check() is None
    assert not looked_at(watchdog, clock, 29)
    assert looked_at(watchdog, clock, 1)


def test_a_computation_that_kept_the_watchdog_from_looking_counts(watchdog, clock):
    watchdog.beat("reward")
    clock.wait(31.0, busy=30.0)
    assert watchdog.check() is not None


def test_a_reader_in_another_process_sees_the_beats(clock):
    memory = bytearray(BEAT_BYTES)
    watchdog = Watchdog(30.0, lambda stall: None, memory=memory, clock=lambda: clock.now)
    assert read_beat(memory, clock.now)[1] == math.inf
    watchdog.beat("rollout_generate", 3, None, 2)
    clock.wait(5.0)
    assert read_beat(bytes(memory), clock.now) == (Stall("rollout_generate", 5.0, 3, None, 2), 1030.0)
    watchdog.put_off(60.0)
    assert read_beat(memory, clock.now)[1] == 1065.0


def test_the_thread_calls_on_stall_once():
    found, called = [], threading.Event()

    def on_stall(stall: Stall) -> None:
        found.append(stall)
        called.set()

    with Watchdog(0.05, on_stall) as watchdog:
        watchdog.beat("reward", 1, 2)
        assert called.wait(30)
    assert watchdog.stalled and [stall.stage for stall in found] == ["reward"]


def test_the_thread_ends_with_the_block():
    with Watchdog(60.0, lambda stall: None):
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_the_display_tells_of_stages_samples_and_steps():
    told = []
    display = StepDisplay(10, 3, on_progress=lambda *progress: told.append(progress))
    advance = display.stage("reward", 8)
    advance(2)
    advance(0)
    advance(1)
    display.finish_step(4, {})
    display.stage("save_checkpoint")
    assert told == [("reward", 0, 8, 3), ("reward", 2, 8, 3), ("reward", 2, 8, 3), ("reward", 3, 8, 3), ("save_checkpoint", 0, None, 4)]


def test_a_display_feeds_a_watchdog(watchdog, clock):
    advance = StepDisplay(10, 3, on_progress=watchdog.beat).stage("rollout_generate", 8)
    advance(5)
    assert str(looked_at(watchdog, clock, 30)[0]).startswith("no progress for 30 s in stage rollout_generate after 5 of 8")


def dumped() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        return read_all(file.fileno())


def test_a_report_names_where_the_main_thread_is(tmp_path):
    go_on = threading.Event()
    other = threading.Thread(target=go_on.wait)
    other.start()
    stacks = dumped()
    go_on.set()
    other.join()
    frames = main_frames(stacks, threading.get_ident())
    assert "in dumped: faulthandler.dump_traceback" in frames[0] and "in test_a_report_names" in frames[1]
    assert main_frames(stacks, 12345) == ["  not known"]
    report = write_report(RunDir(tmp_path), Stall("reward", 9.0, 1, 4, 2), stacks, 2**22 + 1, threading.get_ident())
    file = next((tmp_path / "logs").iterdir())
    assert "wait" in file.read_text() and "test_a_report_names" in file.read_text()
    assert str(file) in report.reason and str(file) in report.message and "in stage reward after 1 of 4 samples" in report.message
    assert "the last checkpoint is none" in report.message and "trainer.stall_timeout_s" in report.message


def test_a_report_that_cannot_be_written_is_told_whole(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    report = write_report(RunDir(tmp_path), Stall("reward", 9.0, 1, 4, 2), dumped(), 2**22 + 1, threading.get_ident())
    assert "cannot be written" in report.message and "in dumped" in report.message


def test_the_reason_is_recorded_only_for_the_process_that_has_an_entry(tmp_path):
    run_dir = RunDir(tmp_path)
    record_end(run_dir, 1, "stalled")
    assert not run_dir.run_json.exists()
    run_dir.start_record(device="cpu", seeds={})
    record_end(run_dir, 1, "stalled")
    assert run_dir.read_record()[-1]["exit_reason"] is None
    record_end(run_dir, run_dir.read_record()[-1]["pid"], "stalled")
    assert run_dir.read_record()[-1]["exit_reason"] == "stalled"


def test_a_process_that_ignores_being_terminated_is_killed():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    end_processes([psutil.Process(child.pid)])
    assert child.wait(timeout=30) != 0
