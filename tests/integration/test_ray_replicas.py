"""Rollout engines in processes of their own beside the ranks, on the session's Ray cluster."""

import itertools
import json
import re
import signal
from pathlib import Path

import pytest
from checks import assert_same_samples, assert_trained_alike, checked_metrics
from commands import wait_for
from processes import all_gone, processes_of, steps_done, with_children

from conftest import NUM_STEPS, Workspace

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = (f"{ROLLOUT}.mode=separate", f"{ROLLOUT}.n_gpus_per_node=2")
ENDLESS = ("data.val_files=null", "trainer.save_freq=-1", "trainer.total_training_steps=1000")


def test_two_replicas_beside_two_ranks_match_one_process(work: Workspace, ranks: tuple[str, ...], finished: Path) -> None:
    checked = (f"{ROLLOUT}.weight_transport=collective", f"{ROLLOUT}.verify_weights=always")
    done = work.train(*ranks, *SEPARATE, *checked)
    assert "2 devices of their own on 1 machine ÷ 1 each = 2 of native; weights by collective" in done.text
    assert_trained_alike(work.run_dir, finished)
    assert_same_samples(work.run_dir, finished, (1, NUM_STEPS))
    rows = checked_metrics(work.run_dir)[1:]
    assert all(row["staleness/max"] == 0 and 1 <= row["perf/rollout_imbalance"] < 2 for row in rows), "both sample"
    labels = {f"{kind}_{index}" for kind, index in itertools.product(("policy_rank", "rollout_replica"), (0, 1))}
    assert {log.stem for log in (work.run_dir / "logs").iterdir()} >= labels
    for label in labels:
        assert (work.run_dir / "logs" / f"{label}.log").read_text().rstrip().endswith("done")
        assert "Traceback" not in (work.run_dir / "logs" / f"{label}.log").read_text()
    lines = (work.run_dir / "timeline" / "rollout_replica_1.json").read_text().splitlines()
    spans = [json.loads(line.rstrip(",")).get("name") for line in lines if line[:1] == "{"]
    assert spans.count("load_weights") == NUM_STEPS + 1


LEFT_OUT = """
from pellucid.cli.main import main
from pellucid.ranks.replica import RemoteReplica

load = RemoteReplica.load_weights
async def leave_out(self, update):
    if update.version != 2 or self._member.name != "rollout replica 1":
        await load(self, update)
RemoteReplica.load_weights = leave_out
main()
"""


def test_a_replica_left_out_of_an_update_is_named(work: Workspace, ranks: tuple[str, ...]) -> None:
    work.write("left_out.py", LEFT_OUT)
    done = work.start("train", work.recipe, *ranks, *SEPARATE, *ENDLESS, script="left_out.py").wait()
    assert done.status == 1, done.output
    assert "rollout replica 1's 'policy version' has 1, and the trainer has sent 2" in done.text
    assert "Traceback" not in done.output and steps_done(work.run_dir) == 1


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, r"rollout replica 1: the process died"),
        pytest.param(
            signal.SIGSTOP, r"rollout replica 1: no progress in \w+ for \d+ s: it does not answer", marks=pytest.mark.long),
    ],
)
def test_a_replica_that_ends_or_stalls_is_named_with_its_log(
    work: Workspace, ranks: tuple[str, ...], number: int, said: str
) -> None:
    command = work.start("train", work.recipe, *ranks, *SEPARATE, *ENDLESS, "trainer.stall_timeout_s=6")
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    processes = processes_of(work.run_dir)
    started = [*with_children(command), *processes.values()]
    processes["rollout_replica_1"].send_signal(number)
    done = command.wait()
    assert done.status == 1, done.output
    assert re.search(said, done.text) and "rollout_replica_1.log" in done.text
    assert "Traceback" not in done.output
    assert all_gone(started)


@pytest.mark.long
def test_a_killed_controller_leaves_no_replica(work: Workspace) -> None:
    own = ("trainer.placement=ray", f"{ROLLOUT}.mode=separate", f"{ROLLOUT}.n_gpus_per_node=1")
    command = work.start("train", work.recipe, *own, *ENDLESS)
    wait_for(lambda: steps_done(work.run_dir) >= 1, command)
    started, processes = with_children(command), processes_of(work.run_dir)
    assert "rollout_replica_0" in processes
    command.signal(signal.SIGKILL)
    command.wait()
    assert all_gone([*started, *processes.values()])


def test_devices_that_are_not_there_are_one_clear_error(work: Workspace) -> None:
    own = ("trainer.placement=ray", f"{ROLLOUT}.mode=separate", f"{ROLLOUT}.n_gpus_per_node=400")
    done = work.train(*own, status=2)
    assert f"{ROLLOUT}.n_gpus_per_node" in done.text and "1 (policy) + 400 (rollout) = 401 ranks" in done.text
