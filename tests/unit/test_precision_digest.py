"""The digest changes with every bit that was captured, and with nothing else."""

import dataclasses
import math
from pathlib import Path

import pytest

from pellucid.errors import UserError
from pellucid.precision.digest import digest
from pellucid.precision.dump import About, Entry, StageDump, TensorStats, write_dump

ONE = TensorStats("torch.float32", (2, 3), -1.0, 1.0, 0.0, 2.0, 0, 0, 0, 0, "00000000000000aa")
TWO = dataclasses.replace(ONE, checksum="00000000000000bb")


def entries(first: object = ONE, name: str = "Module.a.Linear.forward.0") -> list[Entry]:
    return [
        Entry(name, None, {"input_args": [first, [TWO]], "input_kwargs": {"scale": 0.5}, "output": [TWO]}),
        Entry("Module.a.Linear.backward.0", None, {"input": [ONE], "output": []}),
    ]


def write(
    root: Path, content: list[Entry], stage="actor_update", step=1, call=0, rank=0, replica=None, **about
) -> None:
    root = root if replica is None else root / f"rollout_replica{replica}"
    values = {"backend": "native", "level": "L0", "stage": stage, "step": step, "role": "actor", "rank": rank}
    write_dump(
        root / f"step_{step}" / stage / f"step{call}" / f"rank{rank}", StageDump(About(**(values | about)), content)
    )


def only(root: Path) -> str:
    [step] = digest(root)
    return step.digest


def test_equal_captures_have_equal_digests_whatever_their_place_and_time(tmp_path):
    write(tmp_path / "a", entries())
    write(tmp_path / "elsewhere" / "b", entries(), started_at=99.0, duration_s=3.0, device="cuda:1")
    assert only(tmp_path / "a") == only(tmp_path / "elsewhere" / "b")
    assert len(only(tmp_path / "a")) == 16 and int(only(tmp_path / "a"), 16)


@pytest.mark.parametrize(
    "changed",
    [
        entries(TWO),
        entries(dataclasses.replace(ONE, shape=(3, 2))),
        entries(dataclasses.replace(ONE, dtype="torch.bfloat16")),
        entries(dataclasses.replace(ONE, shard=(0, 2))),
        entries([ONE]),
        entries(None),
        entries(name="Module.b.Linear.forward.0"),
        entries()[::-1],
        entries()[:1],
        [dataclasses.replace(entries()[0], groups=entries()[0].groups | {"input_kwargs": {"scale": 0.25}}), entries()[1]],
        [dataclasses.replace(entries()[0], groups={"input_args": [ONE, [TWO], TWO], "input_kwargs": {}}), entries()[1]],
    ],
)  # fmt: skip
def test_any_difference_shows(tmp_path, changed):
    write(tmp_path / "a", entries())
    write(tmp_path / "b", changed)
    assert only(tmp_path / "a") != only(tmp_path / "b")


def test_nesting_is_no_matter_of_taste(tmp_path):
    for name, kwargs in (("a", {"x": {"y": ONE}, "z": TWO}), ("b", {"x": {"y": ONE, "z": TWO}})):
        write(tmp_path / name, [Entry("Module.a.Linear.forward.0", None, {"input_kwargs": kwargs})])
    assert only(tmp_path / "a") != only(tmp_path / "b")


def test_a_step_combines_its_stages_calls_and_ranks(tmp_path):
    write(tmp_path, entries(), "actor_update", step=2, rank=0)
    write(tmp_path, entries(TWO), "actor_update", step=2, rank=1)
    write(tmp_path, entries(), "rollout_generate", step=2, replica=0)
    write(tmp_path, entries(), step=10)
    two, ten = digest(tmp_path)
    assert (two.step, ten.step) == (2, 10) and list(two.stages) == ["rollout_generate", "actor_update"]
    assert len({two.digest, ten.digest, *two.stages.values(), *ten.stages.values()}) == 5
    assert [str(two), str(ten)] == [
        f"step 2  {two.digest}  rollout_generate {two.stages['rollout_generate']}  actor_update {two.stages['actor_update']}",
        f"step 10  {ten.digest}  actor_update {ten.stages['actor_update']}",
    ]
    # The same two captures the other way round are another step.
    write(tmp_path / "swapped", entries(TWO), "actor_update", step=2, rank=0)
    write(tmp_path / "swapped", entries(), "actor_update", step=2, rank=1)
    [swapped] = digest(tmp_path / "swapped")
    assert swapped.stages["actor_update"] != two.stages["actor_update"]


def test_a_capture_that_was_cut_short_is_marked(tmp_path):
    write(tmp_path, entries(), complete=False, error="out of memory")
    [step] = digest(tmp_path)
    assert not step.complete and str(step).endswith("(cut short)")


def test_without_checksums_there_is_no_digest(tmp_path):
    nothing = dataclasses.replace(ONE, shape=(0, 3), checksum=None, min=math.nan)
    write(tmp_path / "a", entries(nothing))
    assert only(tmp_path / "a")  # of no elements there is nothing to sum up
    write(tmp_path / "b", entries(dataclasses.replace(ONE, checksum=None)), backend="msprobe")
    with pytest.raises(UserError, match="without a checksum") as error:
        digest(tmp_path / "b")
    assert error.value.field.endswith("rank0") and '"summary_mode": "md5"' in error.value.remedy
