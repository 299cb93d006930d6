"""The journal keeps what a resumed run may go on from, and nothing that lost weights drew."""

from dataclasses import replace
from pathlib import Path

from pellucid.files.journal import Journal
from pellucid.files.trajectories import rollout_record
from pellucid.types import Prompt, Rollout


def prompt(uid: str) -> Prompt:
    return Prompt(uid, [1], "1", "task")


def rollout(uid: str, *versions: int) -> Rollout:
    count = len(versions)
    return Rollout.single_turn(prompt(uid), 0, [7] * count, [-0.5] * count, list(versions), "stop", "7", 0.25)


def found(tmp_path: Path, version: int, numbers: dict[int, str], *, resumed: bool = True) -> list[int]:
    journal = Journal(tmp_path, version, resumed=resumed)
    return [number for number, uid in numbers.items() if journal.take(number, prompt(uid))]


def test_what_was_finished_since_a_checkpoint_is_found_by_number_and_prompt(tmp_path):
    journal = Journal(tmp_path, 2, resumed=False)
    journal.note(4, rollout("a", 1, 2))
    journal.note(5, rollout("b", 2, 3))  # lost weights will have drawn it
    with next(tmp_path.iterdir()).open("a") as file:
        file.write('{"number": 6, "uid": "c", "roll')
    again = Journal(tmp_path, 2, resumed=True)
    [same], nothing = again.take(4, prompt("a")), again.take(4, prompt("a"))
    assert not nothing and rollout_record(same) == rollout_record(rollout("a", 1, 2))
    again.note(7, rollout("d", 2))
    assert found(tmp_path, 2, {4: "b", 5: "b", 6: "c", 7: "d"}) == [7], "one has another prompt, one newer weights, one is torn"
    assert found(tmp_path, 2, {4: "a"}) == [4]
    assert found(tmp_path, 2, {4: "a"}, resumed=False) == [] and found(tmp_path, 2, {4: "a"}) == []


def test_a_trajectory_of_several_sequences_is_found_whole_or_not_at_all(tmp_path):
    def whole(version):
        begun = replace(prompt("a"), token_ids=[5, 5], text="5 5", context="c1")
        branch = replace(rollout("a", version), prompt=begun, sequence=1, num_sequences=2)
        return replace(rollout("a", 1), num_sequences=2, branches=(branch,))

    journal = Journal(tmp_path, 2, resumed=False)
    journal.note(4, whole(2))
    journal.note(5, whole(3))
    again = Journal(tmp_path, 2, resumed=True)
    [same] = again.take(4, prompt("a"))
    assert rollout_record(same) == rollout_record(whole(2)) and same.branches[0].prompt.token_ids == [5, 5]
    assert not again.take(5, prompt("a")), "newer weights have drawn a part of it"


def test_a_kill_while_a_checkpoint_is_written_loses_nothing(tmp_path):
    journal = Journal(tmp_path, 2, resumed=False)
    journal.note(4, rollout("a", 2))
    journal.begin(3)
    journal.note(5, rollout("b", 2))
    journal.note(6, rollout("c", 3))
    journal.begin(4)
    journal.note(7, rollout("d", 4))
    wanted = {4: "a", 5: "b", 6: "c", 7: "d"}
    assert len(list(tmp_path.iterdir())) == 2, "the checkpoint of version 3 is whole, and no other is gone back to"
    assert found(tmp_path, 3, wanted) == [5, 6], "the checkpoint of version 4 is not"
    again = Journal(tmp_path, 3, resumed=True)
    again.take(5, prompt("b"))
    again.begin(4)
    assert found(tmp_path, 4, wanted) == [6], "no group has taken it yet; version 4 will be other weights"
