"""Checkpoints are complete or absent: kills, full disks, damage, pruning, and going back to an earlier step."""

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from pellucid.errors import RunFailedError, UserError
from pellucid.files.checkpoint_store import MANIFEST, CheckpointStore


def writer(*names: str, content: bytes = b"weights"):
    def write(folder: Path) -> None:
        for name in names or ("model/weights.bin", "extra.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content + name.encode())
    return write


def test_save_then_verify_and_latest(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    folder = store.save(3, writer())
    assert folder == tmp_path / "checkpoints" / "global_step_3"
    assert store.verify(3) == folder
    assert store.latest() == 3
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["step"] == 3
    assert manifest["files"]["model/weights.bin"]["bytes"] == len(b"weightsmodel/weights.bin")


def test_keeps_the_last_k_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        store.save(step, writer())
    assert store.steps() == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "global_step_4"]


def test_going_back_makes_the_new_branch_the_latest_and_prunes_the_abandoned_one(tmp_path):
    for step in (10, 20, 30):
        CheckpointStore(tmp_path).save(step, writer(content=b"old"))
    store = CheckpointStore(tmp_path, keep=3)
    store.save(15, writer(content=b"new"))
    assert store.latest() == 15
    assert store.steps() == [20, 30, 15]
    store.save(20, writer("w", content=b"new"))
    assert store.steps() == [30, 15, 20]
    assert (store.verify(20) / "w").read_bytes() == b"neww"


def test_a_failed_writer_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, writer())

    def broken(folder: Path) -> None:
        writer()(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.save(2, broken)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


# --- in the background ------------------------------------------------------------------------------------------------


class BackgroundWriter:
    """A writer in the background, whose files are there when `let_go` was called; `error` is what its wait raises then."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.folder, self._go = error, None, threading.Event()

    def __call__(self, folder: Path):
        self.folder = folder
        writer("begun")(folder)
        return self.wait

    def wait(self) -> None:
        assert self._go.wait(60)
        assert self.folder
        writer()(self.folder)
        if self.error:
            raise self.error

    def let_go(self) -> "BackgroundWriter":
        self._go.set()
        return self


def test_a_save_in_the_background_shows_once_it_is_complete(tmp_path):
    store, writing = CheckpointStore(tmp_path, keep=1), BackgroundWriter()
    store.finish()
    store.save(1, writer())
    store.save(2, writing)
    assert store.steps() == [1]
    assert writing.folder and (writing.folder / "begun").exists() and not (writing.folder / MANIFEST).exists()
    writing.let_go()
    store.finish()
    assert store.steps() == [2]
    assert (store.verify(2) / "extra.json").exists()
    store.finish()


@pytest.mark.parametrize("write", [BackgroundWriter().let_go(), writer()], ids=["background", "foreground"])
def test_the_next_save_waits_for_the_one_under_way(tmp_path, write):
    store, first = CheckpointStore(tmp_path), BackgroundWriter()
    store.save(1, first)
    threading.Timer(0.05, first.let_go).start()
    store.save(2, lambda folder: (store.verify(1), write(folder))[1])
    store.finish()
    assert store.steps() == [1, 2]


NEXT = {
    "finish": lambda store: store.finish(),
    "save": lambda store: store.save(3, writer()),
    "background": lambda store: store.save(3, BackgroundWriter().let_go()),
}


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt("no")], ids=repr)
def test_what_fails_in_the_background_is_raised_by_the_next_call(tmp_path, then, error):
    store = CheckpointStore(tmp_path)
    store.save(1, writer())
    store.save(2, BackgroundWriter(error).let_go())
    with pytest.raises(type(error), match="no"):
        NEXT[then](store)
    store.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    NEXT[then](store)
    store.finish()
    store.verify(store.latest())


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux")
def test_the_background_yields_to_training(tmp_path):
    priorities = []
    store = CheckpointStore(tmp_path)
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def start(folder: Path):
        writer()(folder)
        return lambda: priorities.append(os.getpriority(os.PRIO_PROCESS, 0))

    store.save(1, start)
    store.finish()
    assert priorities == [min(before + 5, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


# --- damage -----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(("damage", "reason"),
                         [(truncate, "bytes instead of"), (alter, "altered"), (Path.unlink, "missing")])
@pytest.mark.parametrize("name", ["model/weights.bin", MANIFEST])
def test_damage_is_named_with_the_way_out(tmp_path, damage, reason, name):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, writer())
    damage(tmp_path / "global_step_2" / name)
    with pytest.raises(UserError) as caught:
        store.verify(2)
    assert caught.value.field.endswith(name)
    assert name == MANIFEST or reason in caught.value.reason
    assert f"resume_from_path={tmp_path / 'global_step_1'}" in caught.value.remedy
    assert store.latest() == 2, "a damaged checkpoint is not skipped in silence"
    store.verify(1)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"step": 2, "saved_at": 1}'])
def test_a_manifest_without_its_entries(tmp_path, content):
    store = CheckpointStore(tmp_path)
    store.save(2, writer())
    (tmp_path / "global_step_2" / MANIFEST).write_text(content)
    with pytest.raises(UserError, match=r"resume_mode=disable"):
        store.verify(2)


def test_resolve(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.save(7, writer())
    assert store.resolve(str(folder)) == folder
    assert store.resolve("global_step_7") == folder
    for wrong in (tmp_path, tmp_path / "checkpoints", "global_step_8"):
        with pytest.raises(UserError, match="global_step_7") as caught:
            store.resolve(wrong)
        assert caught.value.field == "trainer.resume_from_path"


def test_leftovers_are_cleared_and_a_replaced_one_comes_back(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, writer())
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_1.replaced-99")
    for name in ("global_step_2.tmp-99", "global_step_0.trash-99"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    (tmp_path / "notes").mkdir()
    assert store.steps() == []
    store.recover()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "notes"]
    store.verify(1)


LOOP = """
    import sys
    from pathlib import Path
    from pellucid.files.checkpoint_store import CheckpointStore
    store = CheckpointStore(Path(sys.argv[1]), keep=2)
    store.recover()
    step = store.latest() or 0
    first = step + 1
    def write(folder):
        (folder / "a").write_bytes(bytes(200_000) + str(step).encode())
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text(str(step))
    def start(folder):
        write(folder)
        return lambda: (folder / "late").write_bytes(bytes(200_000))
    while True:
        step += 1
        if sys.argv[2] == "save":
            store.save(step, write)
        else:
            store.save(step, start)  # the one before is complete now
            if step == first:
                continue
        print(step if sys.argv[2] == "save" else step - 1, flush=True)
"""


@pytest.mark.parametrize("how", ["save", "start"])
@pytest.mark.processes
def test_survives_kills_at_random_moments(tmp_path, how):
    rng, store, announced = random.Random(0), CheckpointStore(tmp_path), 0
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(LOOP), str(tmp_path), how], stdout=subprocess.PIPE)
        assert child.stdout
        announced = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        announced = int(rest[-1]) if rest else announced
        latest = store.latest()
        assert latest is not None
        assert latest >= announced, "a checkpoint that was reported saved is gone"
        for step in store.steps():
            assert (store.verify(step) / "sub" / "b").read_text() == str(step)
    assert announced >= 8


@pytest.fixture
def small_disk(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount]
    if os.getuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def plain(folder: Path, num_bytes: int) -> None:
    (folder / "weights").write_bytes(bytes(num_bytes))


def by_torch(folder: Path, num_bytes: int) -> None:
    import torch

    torch.save({"weights": torch.zeros(num_bytes // 4)}, folder / "weights")


def by_safetensors(folder: Path, num_bytes: int) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weights": torch.zeros(num_bytes // 4)}, folder / "weights")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("write", [plain, by_torch, by_safetensors])
def test_full_disk_keeps_the_previous_checkpoint(small_disk, write, background):
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, lambda folder: write(folder, 1_500_000))
    if background:
        store.save(2, lambda folder: lambda: write(folder, 8_000_000))
    with pytest.raises(RunFailedError) as caught:
        store.finish() if background else store.save(2, lambda folder: write(folder, 8_000_000))
    assert "disk is full: " in str(caught.value) and "the one of step 1 is whole" in str(caught.value)
    del caught
    gc.collect()  # the error holds the file open
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["global_step_1"]
    store.verify(1)
    store.save(2, lambda folder: write(folder, 1_500_000))
    assert store.latest() == 2


def test_full_device_without_an_earlier_checkpoint(tmp_path):
    def write(folder: Path) -> None:
        (folder / "weights").symlink_to("/dev/full")
        (folder / "weights").write_bytes(b"x")

    with pytest.raises(RunFailedError, match="no earlier checkpoint") as caught:
        CheckpointStore(tmp_path).save(1, write)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
