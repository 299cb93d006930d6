"""Files of precision captures: what goes in comes out, msprobe reads them, and what is torn or foreign is said to be."""

import csv
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pellucid.errors import UserError
from pellucid.precision.dump import (
    About,
    Entry,
    Pass,
    StageDump,
    TensorStats,
    find_dumps,
    leaves,
    read_dump,
    write_about,
    write_dump,
)
from pellucid.stages import TokenSpan

NORM, LAYER = "Module.model.norm.LlamaRMSNorm", "Module.model.layers.0.LlamaDecoderLayer"


def stats(seed: int = 0, **changes) -> TensorStats:
    values = {
        "dtype": "torch.float32", "shape": (2, 5, 16), "min": -1.5 - seed, "max": 2.25 + seed, "mean": 0.1, "norm": 7.3,
        "num_nan": 0, "num_inf": 0, "num_zero": 3, "num_subnormal": 0, "checksum": f"{0xABC + seed:016x}",
    }  # fmt: skip
    return TensorStats(**(values | changes))


def capture(**about) -> StageDump:
    """Return a capture with one of everything: modules, operators, gradients, nested and plain values."""
    bad = stats(9, min=math.nan, max=math.nan, mean=math.nan, norm=math.nan, num_nan=2, num_inf=1)
    infinite = stats(8, max=math.inf, min=-math.inf, mean=math.inf, norm=math.inf, num_inf=2)
    ids = stats(1, dtype="torch.int64", shape=(2, 5), min=0.0, max=31.0, mean=4.5, norm=20.0)
    mask = stats(2, dtype="torch.bool", shape=(2, 5), min=0.0, max=1.0, mean=0.5, norm=1.0)
    empty = stats(3, shape=(0, 4), min=math.nan, max=math.nan, mean=math.nan, norm=0.0, num_zero=0)
    empty = dataclasses.replace(empty, norm=math.nan)
    weight = stats(4, shape=(16,), requires_grad=True, shard=(1, 2))
    entries = [
        Entry(
            "Functional.linear.0.forward",
            f"{LAYER}.forward.0",
            {"input_args": [stats(), weight], "output": [bad]},
        ),
        Entry(
            f"{LAYER}.forward.0",
            None,
            {
                "input_args": [stats()],
                "input_kwargs": {"mask": mask, "cache": None, "pair": [ids, [empty]], "scale": 0.5, "gone": math.nan},
                "output": [{"hidden": bad, "causal": True, "n": 3, "kind": "sdpa"}],
                "parameters": {},
            },
        ),
        Entry(f"{NORM}.forward.0", None, {"output": [infinite], "parameters": {"weight": weight}}),
        Entry(f"{NORM}.parameters_grad.0", None, {"weight": [stats(5, shape=(16,))]}),
        Entry(f"{NORM}.backward.0", f"{LAYER}.backward.0", {"input": [stats(6)], "output": [None]}),
    ]
    spans = [TokenSpan("a sample 0", "prompt", 0, 4, 0), TokenSpan("b sample 1", "response", 4, 6, 3)]
    values = {
        "backend": "native", "level": "mix", "stage": "actor_update", "step": 3, "role": "actor", "rank": 1, "num_ranks": 2,
        "device": "cpu", "dtype": "torch.float32", "model": "m", "started_at": 12.5, "duration_s": 0.25,
        "passes": [Pass("micro_batch", spans), Pass("micro_batch", spans[:1], 2), Pass("micro_batch", [], 3)], "mini_batches": [0, 2],
    }  # fmt: skip
    names = pa.array([f"{LAYER}.forward.0|output.0.hidden"] * 2 + [f"{NORM}.forward.0|output.0"]).dictionary_encode()
    columns = {"span": [0, 1, 2], "sum": [1.0, math.nan, 3.0], "square_sum": [1.0, math.nan, 9.0], "num_bad": [0, 2, 0]}
    sums = pa.table({"tensor": names, **columns})
    return StageDump(About(**(values | about)), entries, sums)


def folder_of(root: Path, step: int = 3, stage: str = "actor_update", call: int = 0, rank: int = 1) -> Path:
    return root / f"step_{step}" / stage / f"step{call}" / f"rank{rank}"


def texts(dump: StageDump) -> str:
    """Return a capture as text, in which NaN is like NaN."""
    return repr((dump.about, dump.entries))


def test_a_capture_is_read_as_it_was_written(tmp_path):
    folder, written = folder_of(tmp_path), capture()
    files = write_dump(folder, written)
    assert [file.name for file in files] == ["dump.json", "construct.json", "stack.json", "samples.parquet", "capture.json"]
    assert sorted(files) == sorted(folder.iterdir())  # and nothing temporary
    read = read_dump(folder)
    assert texts(read) == texts(written)
    assert read.samples is not None and written.samples is not None
    assert read.samples.schema == written.samples.schema and repr(read.samples.to_pydict()) == repr(written.samples.to_pydict())


def test_leaves_have_the_paths_that_sums_name():
    entry = capture().entries[1]
    paths = [path for path, _ in leaves(entry)]
    assert paths == [
        "input_args.0",
        "input_kwargs.mask",
        "input_kwargs.pair.0",
        "input_kwargs.pair.1.0",
        "output.0.hidden",
    ]


def test_the_files_are_as_msprobe_writes_them(tmp_path):
    write_dump(tmp_path, capture())
    content = json.loads((tmp_path / "dump.json").read_text())
    assert {key: content[key] for key in ("task", "level", "framework", "dump_data_dir")} == {
        "task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None,
    }  # fmt: skip
    assert list(content["data"]) == [entry.name for entry in capture().entries]
    kwargs = content["data"][f"{LAYER}.forward.0"]["input_kwargs"]
    assert kwargs["cache"] is None and kwargs["scale"] == {"type": "float", "value": 0.5}
    assert kwargs["pair"][0]["Max"] == 31 and kwargs["pair"][1][0]["Max"] is None
    tensor = content["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert list(tensor)[:8] == ["type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"]
    assert tensor["type"] == "torch.Tensor" and tensor["num_zero"] == 3 and "md5" not in tensor
    assert (
        '"Max":NaN' in (tmp_path / "dump.json").read_text()
        and '"Min":-Infinity' in (tmp_path / "dump.json").read_text()
    )
    parents = json.loads((tmp_path / "construct.json").read_text())
    assert parents["Functional.linear.0.forward"] == f"{LAYER}.forward.0" and parents[f"{NORM}.forward.0"] is None
    assert f"{NORM}.parameters_grad.0" not in parents
    assert json.loads((tmp_path / "stack.json").read_text()) == {}


MSPROBE = {  # from captures by msprobe 26.2.0, shortened
    "task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None,
    "data": {
        f"{NORM}.forward.0": {
            "input_args": [{"type": "torch.Tensor", "dtype": "torch.int64", "shape": [2, 5], "Max": 30, "Min": 1, "Mean": None,
                            "Norm": None, "requires_grad": False, "md5": "5537ff01"}],
            "input_kwargs": {"d": {"5": {"type": "slice", "value": [1, None, None]}}, "flag": {"type": "bool", "value": False},
                             "dtype": {"type": "torch.dtype", "value": "torch.float32"}, "gone": None},
            "output": [{"a": {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [], "Max": math.nan, "Min": math.nan,
                              "Mean": math.nan, "Norm": math.nan, "requires_grad": True},
                        "x": {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "md5": "0x8e2f99de824669d9",
                              "requires_grad": True}}],
            "parameters": {},
        },
    },
}  # fmt: skip


def write_msprobe(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text(json.dumps(MSPROBE, indent=1))
    (folder / "construct.json").write_text(json.dumps({f"{NORM}.forward.0": f"{LAYER}.forward.0"}))
    (folder / "stack.json").write_text(json.dumps({"0": [[f"{NORM}.forward.0"], ["File a.py, line 1, in f, \n g()"]]}))


def test_what_msprobe_wrote_is_read(tmp_path):
    folder = folder_of(tmp_path, step=7, stage="ref_compute_log_prob", call=2, rank=0)
    write_msprobe(folder)
    with pytest.raises(UserError, match="holds no whole capture"):
        read_dump(folder)
    about = About(backend="msprobe", level="L0", stage="ref_compute_log_prob", step=7, role="ref", call=2, num_ranks=2)
    write_about(folder, about)
    dump = read_dump(folder)
    assert dump.about == about
    [entry] = dump.entries
    assert entry.parent == f"{LAYER}.forward.0"
    assert entry.groups["input_kwargs"] == {
        "d": {"5": [1, None, None]},
        "flag": False,
        "dtype": "torch.float32",
        "gone": None,
    }
    ids = entry.groups["input_args"][0]
    assert (ids.min, ids.max, ids.checksum, ids.num_nan) == (1.0, 30.0, "5537ff01", None) and math.isnan(ids.mean)
    output = entry.groups["output"][0]
    assert output["a"].shape == () and math.isnan(output["a"].max) and output["a"].requires_grad
    assert output["x"].checksum is None  # an exclusive or says nothing of the order
    assert dump.samples is None
    write_dump(tmp_path, dump)
    assert '"Mean":null' in (tmp_path / "dump.json").read_text()  # of integers it is not NaN
    assert texts(read_dump(tmp_path)) == texts(dump)


def test_a_capture_that_was_cut_short_is_none(tmp_path):
    folder = folder_of(tmp_path)
    write_dump(folder, capture())
    (folder / "capture.json").unlink()
    with pytest.raises(UserError, match="holds no precision capture"):
        find_dumps(tmp_path)


def test_writing_again_takes_the_mark_of_wholeness_away_first(tmp_path, monkeypatch):
    write_dump(tmp_path, capture())

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pellucid.precision.dump.atomic_write", full)
    with pytest.raises(OSError, match="No space left"):
        write_dump(tmp_path, capture())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["construct.json", "dump.json", "stack.json"]


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("dump.json", lambda data: data[: len(data) // 2], "torn"),
        ("dump.json", lambda _: b"[1, 2]", "TypeError"),
        ("dump.json", lambda _: b'{"data": {"Module.a.forward.0": [1]}}', "AttributeError"),
        ("dump.json", lambda _: b'{"files": []}', "KeyError: 'data'"),
        ("construct.json", lambda _: b"\xff\xfe", "torn"),
        ("samples.parquet", lambda data: data[: len(data) // 2], "torn"),
        ("samples.parquet", lambda _: b"", "torn"),
        ("capture.json", lambda data: data.replace(b'"version": 2', b'"version": 1'), "version 1"),
        ("capture.json", lambda data: data.replace(b'"step"', b'"stop"'), "stop"),
        ("capture.json", lambda data: data.replace(b'"actor_update"', b'"actor_up"'), "'actor_up' is not a valid Stage"),
    ],
)  # fmt: skip
def test_torn_and_foreign_files_are_named(tmp_path, name, damage, told):
    folder = folder_of(tmp_path)
    write_dump(folder, capture())
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(UserError) as error:
        read_dump(folder)
    assert error.value.field == str(folder) and told in error.value.reason and error.value.remedy


def test_a_folder_without_a_capture_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no whole capture"):
        read_dump(tmp_path)
    with pytest.raises(UserError, match="holds no precision capture"):
        find_dumps(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_dumps(tmp_path / "nowhere")


def test_captures_are_found_from_every_folder_above_them(tmp_path):
    saved = tmp_path / "profile"
    places = [
        folder_of(saved, 10, "actor_update", 0, 0),
        folder_of(saved, 2, "critic_update", 0, 0),
        folder_of(saved, 2, "actor_update", 1, 0),
        folder_of(saved, 2, "actor_update", 0, 10),
        folder_of(saved, 2, "actor_update", 0, 2),
        folder_of(saved / "rollout_replica10", 2, "rollout_generate", 0, 0),
        folder_of(saved / "rollout_replica2", 2, "rollout_generate", 0, 0),
    ]
    for place in places:
        write_dump(place, StageDump(About(backend="native", level="L0", stage="reward", step=0, role="actor"), []))
    refs = find_dumps(tmp_path)
    assert [ref.folder for ref in refs] == [places[index] for index in (6, 5, 1, 4, 3, 2, 0)]
    assert [ref.replica for ref in refs[:3]] == [2, 10, None] and refs[3].rank == 2 and refs[5].call == 1
    assert find_dumps(saved) == refs
    assert find_dumps(saved / "step_2") == refs[2:6]
    assert find_dumps(saved / "step_2" / "actor_update") == refs[3:6]
    assert find_dumps(saved / "step_2" / "actor_update" / "step0") == refs[3:5]
    assert find_dumps(places[1]) == [refs[2]]
    assert find_dumps(saved / "rollout_replica10") == [refs[1]]


@pytest.mark.skipif(importlib.util.find_spec("msprobe") is None, reason="msprobe is not installed")
@pytest.mark.processes
def test_msprobes_own_compare_reads_captures(tmp_path):
    ours, other = capture(), capture()
    layer = other.entries[1].groups["input_args"]
    layer[0] = dataclasses.replace(layer[0], max=4.5)
    write_dump(tmp_path / "a", ours)
    write_dump(tmp_path / "b", other)
    command = ["-tp", str(tmp_path / "a/dump.json"), "-gp", str(tmp_path / "b/dump.json"), "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "msprobe.msprobe", "compare", *command], capture_output=True, text=True, timeout=120
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "msprobe compare ends successfully" in said, said
    complaints = [
        line for line in said.splitlines() if ("[ERROR]" in line or "[WARNING]" in line) and "CANN" not in line
    ]
    assert not complaints
    [result] = (tmp_path / "out").glob("compare_result_*.csv")
    with result.open(encoding="utf-8-sig") as file:
        rows = {row["NPU Name"]: row for row in csv.DictReader(file)}
    assert len(rows) >= sum(1 for entry in ours.entries for _ in leaves(entry))
    assert all(row["Bench Name"] == name for name, row in rows.items())
    changed = {name for name, row in rows.items() if row["Max diff"] not in ("0", "0.0", "N/A", "nan", "")}
    assert changed == {f"{LAYER}.forward.0.input.0"} and float(rows[f"{LAYER}.forward.0.input.0"]["Max diff"]) == -2.25
    assert rows[f"{NORM}.parameters_grad.0.weight"]["NPU max"] == "7.25"
