"""Profiling of real runs: what is captured is what was asked for, and nothing that goes wrong with it harms training."""

import json
import signal
from pathlib import Path

import pytest
from commands import wait_for
from profiles import captured, manifest, ranges, trace

from conftest import Workspace, metrics, untimed
from contract.npu_stub import spans, trace_of
from pellucid.stages import Stage

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QUIET = ("data.val_files=null", "trainer.save_freq=-1", "trainer.val_before_train=false", "data.max_response_length=4")
ON = ("global_profiler.tool=torch", f"{ACTOR}.profiler.enable=true", f"{ACTOR}.profiler.all_ranks=true")
SHORT = (*QUIET, *ON, "trainer.total_training_steps=2", "global_profiler.steps=[2]")
SAVED = "global_profiler.save_path=outputs/profile"
DISCRETE = (f"{ACTOR}.profiler.tool_config.torch.discrete=true",)
PPO = (
    "algorithm.adv_estimator=gae",
    f"{ACTOR}.use_kl_loss=true",
    "critic.profiler.enable=true",
    "critic.profiler.all_ranks=true",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_max_token_len_per_gpu=64",
)


def test_end_to_end_captures_hold_every_stage_of_the_steps_asked_for(work: Workspace) -> None:
    done = work.train(*QUIET, *ON, "trainer.total_training_steps=4", "global_profiler.steps=[1,2,4]")
    content = manifest(work.run_dir)
    assert content["complete"] and content["requested"] == content["profiled"] == [1, 2, 4]
    assert captured(content) == {(1, None, 0), (2, None, 0), (4, None, 0)}
    for file in content["files"]:
        found = ranges(work.run_dir / "profile" / file["path"])
        assert found["rollout_generate"] == found["reward"] == found["actor_update"] == found["mini_batch"] == 1
        assert found["decode_step"] >= 1 and found["micro_batch"] >= 1
        assert trace(work.run_dir / "profile" / file["path"])["distributedInfo"]["world_size"] == 1
    assert "profiled step 1: 1 files" in done.text and "the 2 to come take about" in done.text


def test_neighbouring_steps_may_share_a_capture(work: Workspace) -> None:
    more = ("trainer.total_training_steps=4", "global_profiler.steps=[1,2,4]", "global_profiler.profile_continuous_steps=true")
    work.train(*QUIET, *ON, *more)
    content = manifest(work.run_dir)
    assert captured(content) == {(1, None, 0), (4, None, 0)} and content["complete"]
    assert [ranges(work.run_dir / "profile" / file["path"])["actor_update"] for file in content["files"]] == [2, 1]


def test_discrete_captures_are_one_a_stage_of_every_role(work: Workspace, judge: Path) -> None:
    reward = ("reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.profiler.enable=true")
    mode = [f"{section}.profiler.tool_config.torch.discrete=true" for section in ("critic", "reward_model")]
    controller = "global_profiler.controller=true"
    work.train(*SHORT, *PPO, *DISCRETE, *reward, "reward_model.profiler.ranks=[0]", *mode, controller, f"{ACTOR}.ppo_epochs=2")
    content = manifest(work.run_dir)
    stages = {"rollout_generate", "reward", "actor_compute_log_prob", "ref_compute_log_prob", "compute_values", "compute_rm_score"}
    stages |= {"advantage", "correction", "critic_update", "actor_update"}
    assert {stage for _, stage, _ in captured(content)} == stages and len(content["files"]) == len(stages)
    for file in content["files"]:
        path = work.run_dir / "profile" / file["path"]
        assert ranges(path)[file["stage"]] == 1 and not stages - {file["stage"]} & set(ranges(path))
        assert path.parent.name == ("rollout_replica0" if file["role"] == "rollout" else "profile")


@pytest.mark.parametrize(
    ("unit", "windows", "others"),
    [
        (
            "micro_batch",
            {
                ACTOR: ("actor_compute_log_prob", "ref_compute_log_prob", "actor_update"),
                "critic": ("compute_values", "critic_update"),
            },
            {"mini_batch", "optimizer_step"},
        ),
        ("mini_batch", {ACTOR: ("actor_update",), "critic": ("critic_update",)}, {"micro_batch", "optimizer_step"}),
        ("decode_step", {ROLLOUT: ("rollout_generate",)}, set[str]()),
        pytest.param("turn", {ROLLOUT: ("rollout_generate",)}, {"decode_step"}, marks=pytest.mark.long),
    ],
    ids=["micro_batch", "mini_batch", "decode_step", "turn"],
)
def test_a_schedule_captures_exactly_its_window(
    work: Workspace, unit: str, windows: dict[str, tuple[str, ...]], others: set[str]
) -> None:
    overrides = [f"{section}.profiler.enable=false" for section in (ACTOR, "critic") if section not in windows]
    for section, stages in windows.items():
        schedule = f"{section}.profiler.schedule"
        overrides += [f"{section}.profiler.enable=true", f"{schedule}.skip_first=1", f"{schedule}.active=2"]
        overrides += [f"{schedule}.stages=[{','.join(stages)}]", f"{schedule}.unit={unit}"]
    mini_batches = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4")
    attempts = (f"{ROLLOUT}.agent.name=env", f"{ROLLOUT}.agent.environment=attempts")
    game = (*attempts, "data.max_response_length=140", f"{ACTOR}.ppo_max_token_len_per_gpu=256") if unit == "turn" else ()
    work.train(*SHORT, *PPO, *mini_batches, *overrides, *game)
    content = manifest(work.run_dir)
    assert content["complete"], content["failures"]
    expected = sorted(stage for stages in windows.values() for stage in stages)
    assert sorted(file["stage"] for file in content["files"]) == expected
    for file in content["files"]:
        assert file["step"] == 2
        assert (file["units"]["first"], file["units"]["count"]) == (1, 2) and file["units"]["of"] >= 3
        found = ranges(work.run_dir / "profile" / file["path"])
        assert found[unit] == 2 and set(found) <= {unit, *(others if file["stage"].endswith(("update", "generate")) else ())}


def test_torchs_own_window_of_mini_batches(work: Workspace) -> None:
    keys = (f"{ACTOR}.profiler.tool_config.torch.step_start=1", f"{ACTOR}.profiler.tool_config.torch.step_end=3")
    work.train(*SHORT, *keys, "data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=4")
    [file] = manifest(work.run_dir)["files"]
    assert file["units"] == {"unit": "mini_batch", "first": 1, "count": 2, "of": 4}


def test_profiling_changes_no_number(work: Workspace, finished: Path) -> None:
    contents = "[cpu,memory,shapes,module,stack]"
    work.train(*ON, "global_profiler.steps=[2]", *DISCRETE, f"{ACTOR}.profiler.tool_config.torch.contents={contents}")
    assert untimed(metrics(work.run_dir)) == untimed(metrics(finished))
    assert len(manifest(work.run_dir)["files"]) == 2


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
"""
TOOLS = """
import torch
from pellucid.errors import UserError
from pellucid.observe.tools.torch_trace import TorchTool


class Breaks(TorchTool):
    def stop(self):
        super().stop()
        raise OSError(28, "No space left on device")


class Absent(TorchTool):
    @classmethod
    def check(cls, settings):
        raise UserError("global_profiler.tool", "needs a driver that is not here.", "Install it.")


class Counts(TorchTool):
    def stop(self):
        path = self._capture.folder / f"{self._capture.name}.txt"
        super().stop()[0].unlink()
        path.write_text("mine")
        return [path]
"""


@pytest.mark.parametrize(("tool", "said"), [("Breaks", "No space left on device"), ("Absent", "needs a driver that is not here")])
def test_a_tool_that_fails_leaves_training_alone_unless_strict(work: Workspace, tool: str, said: str) -> None:
    work.write("tools.py", TOOLS)
    done = work.train(*SHORT, f"global_profiler.tool=tools.py:{tool}")
    assert len(metrics(work.run_dir)) == 2 and said in done.text
    assert (work.run_dir / "checkpoints" / "global_step_2").is_dir()
    strict = work.train(*SHORT, f"global_profiler.tool=tools.py:{tool}", "global_profiler.strict=true", "trainer.resume_mode=disable",
                        "trainer.default_local_dir=strict", status=1 if tool == "Breaks" else 2)  # fmt: skip
    assert said in strict.text and "Traceback" not in strict.output
    assert tool != "Breaks" or "Traceback" in (work.folder / "strict" / "logs" / "controller.log").read_text()


def test_a_failing_step_keeps_its_trace(work: Workspace) -> None:
    work.write("reward.py", REWARD.replace("return", "raise ValueError(extra_info) if True else"))
    done = work.start("train", work.recipe, *SHORT, "global_profiler.steps=[1]", "reward_model.custom_reward_function.path=reward.py").wait()
    assert done.status == 2
    content = manifest(work.run_dir)
    [file] = content["files"]
    assert ranges(work.run_dir / "profile" / file["path"])["rollout_generate"] == 1


def test_what_is_not_captured_is_said_and_so_is_a_hook_that_fails(work: Workspace) -> None:
    stages = f"{ACTOR}.profiler.schedule.stages=[actor_compute_log_prob,actor_update]"
    no_rollout = (f"{ROLLOUT}.profiler.ranks=[0]", f"{ROLLOUT}.profiler.all_ranks=false")
    done = work.train(*SHORT, stages, *no_rollout, "global_profiler.finish_hook_cmd='exit 3'")
    assert "no file of actor_compute_log_prob: the stage did not run in this step. With one mini-batch" in done.text
    assert "rollout.profiler: nothing of rollout is captured" in done.text
    assert "ended with status 3" in done.text
    content = manifest(work.run_dir)
    assert captured(content) == {(2, "actor_update", 0)} and not content["complete"]


def test_steps_that_never_come_are_said(work: Workspace) -> None:
    done = work.train(*SHORT, "global_profiler.steps=[2,7]")
    assert "7 will not be profiled: the run ends with step 2" in done.text
    content = manifest(work.run_dir)
    assert not content["complete"] and content["profiled"] == [2]


def test_the_budget_ends_collection_with_a_message_and_a_hook_that_hangs_is_ended(work: Workspace) -> None:
    hook = ("global_profiler.finish_hook_cmd='sleep 60'", "global_profiler.finish_hook_timeout_s=1")
    done = work.train(*SHORT, "global_profiler.steps=[1,2]", "global_profiler.max_bytes=1000", *hook)
    assert "global_profiler.max_bytes" in done.text and len(manifest(work.run_dir)["files"]) == 1
    assert "was ended after 1 s" in done.text


def test_the_hook_runs_once_after_the_last_file_of_a_tool_of_the_users_own(work: Workspace) -> None:
    work.write("tools.py", TOOLS)
    command = 'ls "$PELLUCID_PROFILE_DIR" > seen.txt; cp "$PELLUCID_MANIFEST" copy.json; echo "$PELLUCID_RUN_DIR" >> runs.txt'
    work.write("hook.sh", command)
    work.train(*SHORT, "global_profiler.tool=tools.py:Counts", "global_profiler.finish_hook_cmd=sh hook.sh")
    assert (work.folder / "runs.txt").read_text().split() == [str(work.run_dir)]
    content = manifest(work.run_dir)
    [file] = content["files"]
    assert file["tool"] == "tools.py:Counts" and file["bytes"] == 4
    assert json.loads((work.folder / "copy.json").read_text()) == content and file["path"] in (work.folder / "seen.txt").read_text()


def test_save_path_may_be_shared_by_runs(work: Workspace) -> None:
    for run in ("one", "two"):
        work.train(*SHORT, "trainer.total_training_steps=1", "global_profiler.steps=[1]", SAVED, f"trainer.default_local_dir={run}")
        [file] = manifest(work.folder / run)["files"]
        assert Path(file["path"]).parent == work.folder / "outputs" / "profile"


def test_a_killed_run_keeps_what_was_written_and_goes_on(work: Workspace) -> None:
    slow = (*QUIET, *ON, "trainer.save_freq=1", "global_profiler.steps=[1,3]")
    command = work.start("train", work.recipe, *slow, "trainer.total_training_steps=200")
    wait_for(lambda: (work.run_dir / "checkpoints" / "global_step_2").is_dir(), command)
    command.signal(signal.SIGKILL)
    command.wait()
    assert (1, None, 0) in captured(manifest(work.run_dir))
    work.train(*slow, f"trainer.total_training_steps={max(4, len(metrics(work.run_dir)) + 1)}")
    content = manifest(work.run_dir)
    assert {step for step, _, _ in captured(content)} == set(content["profiled"]) == {1, 3}


def test_the_timeline_shows_every_micro_batch_and_reward_call(work: Workspace) -> None:
    work.train(*QUIET, "trainer.total_training_steps=2", f"{ACTOR}.ppo_max_token_len_per_gpu=64")
    text = (work.run_dir / "timeline" / "controller.json").read_text()
    events = [event for event in json.loads(text) if event["ph"] == "X"]
    names = [event["name"] for event in events]
    assert names.count("reward_call") == 2 * 16 and names.count("step") == names.count("weight_sync") == 2
    assert names.count("mini_batch") == 2 and names.count("micro_batch") >= 3
    assert all("cpu_s" in event["args"] for event in events if event["tid"] == 0)


@pytest.mark.slow
def test_an_npu_captures_stages_and_windows_as_each_role_is_set(npu_work: Workspace) -> None:
    npu, schedule = f"{ACTOR}.profiler.tool_config.npu", f"{ACTOR}.profiler.schedule"
    actor = (f"{npu}.discrete=true", f"{npu}.contents=[npu,cpu]", f"{npu}.level=level1", f"{ACTOR}.use_kl_loss=true")
    window = (f"{schedule}.unit=micro_batch", f"{schedule}.warmup=1", f"{schedule}.active=1", f"{schedule}.stages=[actor_update]")
    own = f"{ROLLOUT}.profiler"
    rollout = (f"{own}.enable=true", f"{own}.ranks=[0]", f"{own}.tool_config.npu.discrete=true", f"{own}.tool_config.npu.analysis=false")
    tool = ("global_profiler.tool=npu", "global_profiler.steps=[1]", SAVED, "trainer.device=cpu")
    small = ("trainer.total_training_steps=1", f"{ACTOR}.ppo_max_token_len_per_gpu=32")
    npu_work.train(*SHORT, *actor, *window, *rollout, *tool, *small)
    content, profile = manifest(npu_work.run_dir), npu_work.folder / "outputs" / "profile"
    assert content["complete"], content["failures"]
    assert {file["path"] for file in content["files"]} == {str(path) for path in profile.rglob("*") if path.is_file()}
    [ref] = profile.glob("ref_ref_compute_log_prob_step1_*")
    [update] = profile.glob("actor_actor_update_step1_*")
    [generate] = profile.glob("rollout_replica0/rollout_rollout_generate_step1_*")
    assert len(list(profile.iterdir())) == 3
    assert not (generate / "ASCEND_PROFILER_OUTPUT").exists()
    assert len(spans(trace_of(ref), Stage.REF_COMPUTE_LOG_PROB, of_npu=True)) == 1
    for of_npu in (False, True):
        assert len(spans(trace_of(update), "micro_batch", of_npu=of_npu)) == 1
    level = {json.loads(path.read_text())["experimental_config"]["trace_level"] for path in update.rglob("sample.json")}
    assert level == {"Level1"}
