"""Each example of the two guides, and of sampling inside a stage, runs as written: a table from the recipe to its captures."""

import pstats
import shutil
from pathlib import Path
from typing import Any

import pytest
from checks import but_first_long
from commands import Done
from profiles import manifest, nsys_ranges, ranges

from conftest import Workspace
from pellucid.observe.tools.nsys import importer

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "profiling"
GUIDE_STEPS = (1, 2, 5)
STAGES = ("rollout_generate", "actor_compute_log_prob", "ref_compute_log_prob", "actor_update")
CONTROLLER_STAGES = ("rollout_generate", "reward", "advantage", "correction", "actor_update")
RANKS = ("policy_rank_0", "policy_rank_1")
Captures = set[tuple[int, str | None, str]]
"""Step, stage and process; no stage: the whole step."""


def whole_steps(*processes: str) -> Captures:
    return {(step, None, process) for step in GUIDE_STEPS for process in processes}


def stages(names: tuple[str, ...], process: str = "controller", steps: tuple[int, ...] = GUIDE_STEPS) -> Captures:
    return {(step, name, process) for step in steps for name in names}


TORCH: dict[str, Captures] = {
    "torch_end_to_end": whole_steps("controller"),
    "torch_discrete": stages(STAGES, steps=(2,)),
    "torch_memory": {(2, None, "controller")},
}
SAMPLED: dict[str, tuple[str, str, int, int, set[str]]] = {
    "sample_decode_steps": ("rollout_generate", "decode_step", 2, 3, {"decode_step"}),
    "sample_ref_log_prob": ("ref_compute_log_prob", "micro_batch", 0, 1, {"micro_batch"}),
    "sample_update_mini_batch": ("actor_update", "mini_batch", 0, 1, {"mini_batch", "micro_batch", "optimizer_step"}),
    "sample_update_micro_batch": ("actor_update", "micro_batch", 1, 1, {"micro_batch"}),
}
"""Stage, unit, the first that is captured, how many, and the ranges in the trace."""
NPU: dict[str, Captures] = {
    "npu_end_to_end": whole_steps("controller"),
    "npu_discrete": stages(STAGES, steps=(1,)),
}
NSYS: dict[str, Captures] = {
    "nsight_end_to_end": whole_steps(*RANKS) | {(1, None, "controller")},
    "nsight_discrete": {(1, None, "controller")}
    | stages(("actor_compute_log_prob", "actor_update"), RANKS[1], (1,))
    | stages(("actor_compute_log_prob", "compute_values", "critic_update", "actor_update"), RANKS[0], (1,)),
}
OFF = ("nsight_off", "npu_off")
ON_CPU = "trainer.device=cpu"
"""The stub of torch_npu profiles, and computes nothing."""
SMALL = (
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"),
    "data.max_response_length=4",
)
"""Fewer prompts, samples and tokens than the recipes', in as many mini-batches."""
SEVERAL = ("data.max_response_length=8", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=48")
"""Fewer samples and tokens, with more of each unit than a window takes."""


def train(work: Workspace, name: str, *overrides: str) -> tuple[Done, Path]:
    """Run a small form of a recipe, up to its last capture; return what it printed and its run directory."""
    last = max([step for step, _, _ in expected(name)], default=1)
    size = SEVERAL if name in SAMPLED else SMALL
    done = work.run("train", str(RECIPES / f"{name}.yaml"), *size, f"trainer.total_training_steps={last}", *overrides)
    return done, work.folder / "outputs" / "profiling" / name


def files_of(work: Workspace, run_dir: Path) -> list[dict[str, Any]]:
    """Return the manifest's files, after checking that it is complete and names all files, of `save_path` too."""
    content = manifest(run_dir)
    assert content["complete"], content["failures"]
    saved = work.folder / "outputs" / "profile"
    named = {Path(file["path"]) for file in content["files"] if Path(file["path"]).is_absolute()}
    assert named == {path for path in saved.rglob("*") if path.is_file()}
    return content["files"]


def captures(files: list[dict[str, Any]]) -> Captures:
    return {(file["step"], file["stage"], file["process"]) for file in files}


def expected(name: str) -> Captures:
    """Return the captures of a recipe."""
    if name in SAMPLED:
        return {(2, SAMPLED[name][0], "controller")}
    return (TORCH | NPU | NSYS).get(name, set())


def test_every_recipe_is_in_a_table() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*TORCH, *SAMPLED, *NPU, *NSYS, *OFF, "base"}


@pytest.mark.parametrize("name", OFF)
def test_off_writes_no_profile(work: Workspace, name: str) -> None:
    _, run_dir = train(work, name)
    assert (run_dir / "timeline" / "controller.json").exists() and not (run_dir / "profile").exists()


@pytest.mark.parametrize("name", but_first_long(TORCH))
def test_pytorchs_tools(work: Workspace, name: str) -> None:
    _, run_dir = train(work, name)
    files = files_of(work, run_dir)
    assert captures(files) == TORCH[name]
    endings = [".html", ".json"] if name == "torch_memory" else [".gz"] * len(TORCH[name])
    assert sorted(Path(file["path"]).suffix for file in files) == endings


@pytest.mark.parametrize("name", but_first_long(SAMPLED))
def test_what_the_ascend_guide_patches_sources_for(work: Workspace, name: str) -> None:
    _, unit, first, count, names = SAMPLED[name]
    _, run_dir = train(work, name)
    [file] = files_of(work, run_dir)
    assert captures([file]) == expected(name)
    assert {key: file["units"][key] for key in ("unit", "first", "count")} == {"unit": unit, "first": first, "count": count}
    assert file["units"]["of"] > first + count
    found = ranges(run_dir / "profile" / file["path"])
    assert found[unit] == count and set(found) == names


def only_step_1(name: str) -> tuple[str, ...]:
    """Return what keeps captures of stages to one step, for each takes seconds; whole steps show which are captured."""
    key = "trainer.profile_steps" if name in NSYS else "global_profiler.steps"  # as the recipe spells it
    return (f"{key}=[1]",) if name.endswith("_discrete") else ()


@pytest.mark.slow
@pytest.mark.parametrize("name", but_first_long(NPU))
def test_the_ascend_guides_examples(npu_work: Workspace, name: str) -> None:
    done, run_dir = train(npu_work, name, ON_CPU, *only_step_1(name))
    assert "global_profiler.tool: npu, the one tool that profiled roles have settings of" in done.text
    files = files_of(npu_work, run_dir)
    assert captures(files) == NPU[name]
    traces = [file for file in files if file["path"].endswith("ASCEND_PROFILER_OUTPUT/trace_view.json")]
    assert len(traces) == len(NPU[name])
    for file in files:
        assert ("rollout_replica0/" in file["path"]) == (file["stage"] == "rollout_generate")


@pytest.mark.slow
def test_a_window_on_an_npu_differs_by_the_tools_name_alone(npu_work: Workspace) -> None:
    _, run_dir = train(npu_work, "sample_decode_steps", "global_profiler.tool=npu", ON_CPU)
    files = files_of(npu_work, run_dir)
    assert captures(files) == {(2, "rollout_generate", "controller")}
    assert {file["units"]["first"] for file in files} == {2} and {file["units"]["count"] for file in files} == {3}


def check_captures(done: Done, work: Workspace, run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Check the captures of an example of the Nsight guide; return its files."""
    assert "trainer.profile_steps" in done.text and "are read as" in done.text
    files = files_of(work, run_dir)
    assert captures(files) == NSYS[name]
    return files


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys")
@pytest.mark.long
def test_the_nsight_guides_whole_steps_on_a_cluster_of_their_own(work: Workspace) -> None:
    pytest.importorskip("ray")
    name = "nsight_end_to_end"
    done, run_dir = train(work, name)
    files = check_captures(done, work, run_dir, name)
    if importer() is not None:
        whole = {file["process"]: nsys_ranges(run_dir / "profile" / file["path"], work.folder) for file in files if file["step"] == 1}
        for rank in RANKS:
            assert all(whole[rank][range_] == 1 for range_ in ("step_1", "rollout_generate", "actor_update")), whole[rank]
        controller = whole["controller"]
        assert all(controller[stage] == len(GUIDE_STEPS) for stage in CONTROLLER_STAGES) and not controller["micro_batch"], controller


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys")
@pytest.mark.long
def test_the_nsight_guides_stages(work: Workspace, ranks: tuple[str, ...]) -> None:
    name = "nsight_discrete"
    done, run_dir = train(work, name, *ranks, *only_step_1(name))
    check_captures(done, work, run_dir, name)


@pytest.mark.parametrize("which", ["example", "guide"])
def test_the_tool_of_ones_own_in_the_guide_and_beside_it(work: Workspace, which: str) -> None:
    text = (ROOT / "examples" / "plugins" / "python_calls.py").read_text()
    if which == "guide":
        text = (ROOT / "docs" / "profiling.md").read_text().partition("# examples/plugins/python_calls.py\n")[2].partition("```")[0]
    work.write("python_calls.py", text)
    _, run_dir = train(work, "sample_update_micro_batch", "global_profiler.tool=python_calls.py:PythonCalls")
    [file] = files_of(work, run_dir)
    assert captures([file]) == {(2, "actor_update", "controller")} and file["tool"] == "python_calls.py:PythonCalls"
    calls = pstats.Stats(str(run_dir / "profile" / file["path"]))
    assert any(path.endswith("training/fsdp.py") and name == "_run" for path, _, name in calls.stats)  # pyright: ignore[reportAttributeAccessIssue]
