"""The precision debugger's keys: what goes together, what collects nothing, msprobe's JSON file, and the blocks that verl has."""

import json

import pytest
import yaml
from config_cases import error_of, load, notices

from pellucid.config import load_config
from pellucid.config.schema import msprobe_json
from pellucid.config.schema.profiler import PrecisionDebuggerConfig

SECTION = "global_profiler.global_tool_config.precision_debugger"
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout"))
KL = "actor_rollout_ref.actor.use_kl_loss=true"
ON = [
    KL,
    "global_profiler.tool=precision_debugger",
    "global_profiler.steps=[2]",
    f"{ACTOR}.enable=true",
    f"{ACTOR}.ranks=[0]",
]
CRITIC = ["algorithm.adv_estimator=gae", "critic.profiler.enable=true", "critic.profiler.ranks=[0]"]
STATISTICS = {"task": "statistics", "level": "L0"}
FULL = {
    **STATISTICS,
    **{"dump_path": "", "rank": [], "step": [], "extra_info": True, "async_dump": False, "precision": "low"},
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": ["linear"], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}
"""msprobe's own template, less its placeholder of a `dump_path`; sections of tasks that are not asked for do not matter."""


def settings(loaded):
    return loaded.config.global_profiler.global_tool_config.precision_debugger


@pytest.fixture
def written(tmp_path):
    """Write msprobe's JSON file and return the override that names it."""

    def write(content, name="msprobe.json"):
        text = json.dumps(content) if isinstance(content, dict) else content
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"{SECTION}.config_path={tmp_path / name}"

    return write


def test_each_stage_has_a_capture_of_its_own():
    loaded = load(*ON)
    assert {role: block.discrete for role, block in loaded.config.profilers.items()} == dict.fromkeys(
        ("actor", "ref", "rollout", "critic", "reward_model"), True
    )
    assert loaded.config.profilers["actor"].captures_stages
    assert not any("PROFILING" in line for line in loaded.notices)


@pytest.mark.parametrize(
    ("overrides", "covered"),
    [
        ([], {"rollout_generate", "actor_update", "compute_values"}),
        ([f"{SECTION}.stages=null"], {"rollout_generate", "actor_update", "compute_values"}),
        ([f"{SECTION}.stages=[actor_update]"], {"actor_update"}),
        ([f"{SECTION}.stages=[rollout_generate,actor_update]"], {"rollout_generate", "actor_update"}),
    ],
)
def test_the_stages_that_are_covered(overrides, covered):
    asked = settings(load(*ON, *overrides))
    assert {stage for stage in ("rollout_generate", "actor_update", "compute_values") if asked.covers(stage)} == covered


def test_msprobe_covers_no_rollout(written):
    asked = settings(load(*ON, f"{SECTION}.backend=msprobe", written(STATISTICS)))
    assert asked.covers("actor_update") and not asked.covers("rollout_generate")


MISTAKES = [
    ([f"{SECTION}.stages=[actor_updat]"], f"{SECTION}.stages[0]", "Did you mean 'actor_update'?"),
    ([f"{SECTION}.stages=[advantage]"], f"{SECTION}.stages[0]", "is not one of rollout_generate | actor_compute_log"),
    ([f"{SECTION}.strict=false", f"{SECTION}.stages=[update]"], f"{SECTION}.stages[0]", "is not one of"),
    ([f"{SECTION}.backend=msprob"], f"{SECTION}.backend", "Did you mean 'msprobe'?"),
    ([f"{SECTION}.level=L2"], f"{SECTION}.level", "L0 | L1 | mix"),
    ([f"{SECTION}.backend=msprobe"], f"{SECTION}.config_path", "must be set with backend: msprobe"),
    ([f"{SECTION}.backend=msprobe", f"{SECTION}.stages=[rollout_generate]"], "", "backend native alone"),
    ([f"{SECTION}.config_path=no/such.json"], f"{SECTION}.config_path", "No such file"),
    ([f"{SECTION}.config_path=recipe.yaml"], f"{SECTION}.config_path", "does not end in .json"),
    (["global_profiler.controller=true"], "global_profiler.controller", "no effect with tool: precision_debugger"),
    (["global_profiler.profile_continuous_steps=true"], "global_profiler.profile_continuous_steps", "no effect"),
    ([f"{SECTION}.stage=[actor_update]"], f"{SECTION}.stage", "stages"),
    ([f"{SECTION}.enable=true"], f"{SECTION}.enable", "Set global_profiler.tool"),
    ([f"{SECTION}.enable=false"], f"{SECTION}.enable", "or null for none"),
    ([f"{SECTION}.data_dir=out"], f"{SECTION}.data_dir", "set global_profiler.save_path"),
    ([f"{SECTION}.dump_path=out"], f"{SECTION}.dump_path", "set global_profiler.save_path"),
    ([f"{SECTION}.steps=[1]"], f"{SECTION}.steps", "Set global_profiler.steps"),
    ([f"{SECTION}.ranks=[0]"], f"{SECTION}.ranks", "profiler.ranks"),
    ([f"{ACTOR}.tool_config.precision_debugger.level=L1"], f"{ACTOR}.tool_config.precision_debugger", f"Set {SECTION}"),
    ([*CRITIC, "critic.profiler.tool=torch"], "critic.profiler.tool_config.torch.discrete", "all roles must agree"),
    ([f"{ACTOR}.schedule={{stages: [actor_update], unit: decode_step}}"], f"{ACTOR}.schedule.unit", "no unit of"),
]


@pytest.mark.parametrize(("overrides", "field", "words"), MISTAKES, ids=[f"{i}-{m[1]}" for i, m in enumerate(MISTAKES)])
def test_a_mistake_is_named_by_its_key_with_reason_and_remedy(overrides, field, words):
    error = error_of(*ON, *overrides)
    assert words in str(error) and (field == error.field or not field), str(error)


IN_THE_FILE = [
    ({"task": "free_benchmark"}, "task", "statistics | tensor"),
    ({"level": "L2"}, "level", "L0 | L1 | mix"),
    ({"level": 0}, "level", "0 is not one of"),
    ({"step": [1]}, "step", "global_profiler.steps"),
    ({"rank": [0]}, "rank", "profiler.ranks"),
    ({"dump_path": "./dump"}, "dump_path", "global_profiler.save_path"),
    ({"load": {"path": "."}}, "load", "leaves what the run computes"),
    ({"dump_enable": False}, "dump_enable", "say when captures begin"),
]


@pytest.mark.parametrize(("content", "key", "words"), IN_THE_FILE)
def test_what_is_wrong_with_the_json_file(content, key, words, written):
    path = written(content).partition("=")[2]
    [error] = msprobe_json.mistakes(path, PrecisionDebuggerConfig())
    assert error.field == f"{path}, {key}" and words in str(error)


@pytest.mark.parametrize("content", [FULL, {"level": None}, {"task": "tensor", "level": "mix", "tensor": {"list": []}}])
def test_a_good_json_file(content, written):
    assert not [*msprobe_json.mistakes(written(content).partition("=")[2], PrecisionDebuggerConfig())]


@pytest.mark.parametrize(("content", "words"), [("{", "not valid JSON"), ("[]", "no JSON object"), (b"\xff", "not valid")])
def test_what_is_no_json_file(written, content, words):
    error = error_of(*ON, written(content))
    assert error.field == f"{SECTION}.config_path" and words in str(error)


def test_several_mistakes_in_the_file_are_said_together(written, tmp_path):
    error = error_of(*ON, written({"step": [1], "rank": [0]}))
    assert "2 mistakes" in str(error) and f"{tmp_path / 'msprobe.json'}, rank: [0] is not for" in str(error)


def test_a_config_path_alone_runs_msprobe_and_native_takes_none(written):
    path = written(STATISTICS)
    loaded = load(*ON, path)
    assert settings(loaded).backend == "msprobe"
    assert f"{SECTION}.backend: msprobe, whose file config_path names." in loaded.notices
    assert settings(load(*ON)).backend == "native"
    error = error_of(*ON, path, f"{SECTION}.backend=native")
    assert error.field == f"{SECTION}.config_path" and "backend: msprobe" in error.remedy


def test_a_loaded_config_loads_again(written, tmp_path):
    loaded = load(*ON, written(FULL))
    (tmp_path / "again.yaml").write_text(loaded.yaml)
    assert load_config(tmp_path / "again.yaml", []).config == loaded.config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("global_profiler.steps=null", f"these wait: {SECTION}.backend"),
        (f"{ACTOR}.ranks=[]", "COLLECTS NOTHING"),
        ("global_profiler.tool=torch", f"without effect: {SECTION}.backend"),
    ],
)
def test_the_rules_rest_where_nothing_is_captured_with_the_tool(override, words):
    said = notices(*ON, f"{SECTION}.backend=msprobe", f"{SECTION}.config_path=no/such.json", override)
    assert all(word in said for word in words.split(": "))


NOTHING = [
    ([f"{SECTION}.stages=[compute_values]"], [f"COLLECTS NOTHING of {ACTOR}", "compute_values is not captured: the run has no critic"]),
    (
        [f"{SECTION}.stages=[actor_update,critic_update,compute_rm_score]"],
        ["stages: critic_update is not captured", "stages: compute_rm_score is not captured: the run has no reward_model"],
    ),
    (
        [f"{SECTION}.stages=[actor_update,rollout_generate]", f"{ROLLOUT}.enable=false"],
        ["rollout_generate is not captured", "does not ask for it"],
    ),
    (
        [*CRITIC, f"{SECTION}.stages=[actor_update]"],
        ["COLLECTS NOTHING of critic.profiler", "leave out compute_values, critic_update"],
    ),
    (
        [
            *(*CRITIC, "critic.profiler.tool=torch", "critic.profiler.tool_config.torch.discrete=true"),
            f"{SECTION}.stages=[actor_update,critic_update]",
        ],
        ["critic_update is not captured"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), NOTHING)
def test_what_collects_nothing_is_said_before_the_run(overrides, words):
    said = notices(*ON, *overrides)
    for word in words:
        assert word in said


def test_a_rollout_of_its_own_is_not_msprobes(written):
    rollout = [f"{ACTOR}.enable=false", f"{ROLLOUT}.enable=true", f"{ROLLOUT}.ranks=[0]"]
    assert "COLLECTS NOTHING" in notices(*ON, *rollout, written(STATISTICS))
    assert "COLLECTS NOTHING" not in notices(*ON, *rollout)


def test_a_window_inside_a_stage():
    block = load(*ON, f"{ACTOR}.schedule={{stages: [actor_update], skip_first: 3}}").config.profilers["actor"]
    assert block.discrete and block.schedule.skip_first == 3


VERL_UNUSED = """
global_profiler:
  tool: null
  global_tool_config:
    precision_debugger:
      _target_: verl.utils.profiler.config.PrecisionDebuggerToolConfig
      enable: False
      config_path: null
      data_dir: outputs/profile/precision_debug
      steps: null
      stages: null
      strict: False
actor_rollout_ref:
  ref:
    profiler:
      tool_config:
        precision_debugger: ${oc.select:global_profiler.global_tool_config.precision_debugger,null}
"""
VERL_ON = """
global_profiler:
  tool: precision_debugger
  steps: [1, 2, 5]
  save_path: "outputs/profile" # optional, not used by msprobe
  global_tool_config:
    precision_debugger:
      _target_: verl.utils.profiler.config.PrecisionDebuggerToolConfig
      enable: True
      config_path: /path/to/config.json
      data_dir: outputs/precision_debug
      steps: [1, 2, 5]
      stages: [actor_update, actor_compute_log_prob]
      strict: False
"""


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        (tmp_path / "recipe.yaml").write_text(text)
        return tmp_path / "recipe.yaml"

    return write


def test_verls_block_with_everything_off_changes_nothing(recipe):
    loaded = load(source=recipe(VERL_UNUSED))
    assert loaded.config == load().config
    assert f"dropped: {SECTION}.enable, {SECTION}.data_dir, {SECTION}.steps" in "\n".join(loaded.notices)


def test_verls_own_example_gets_an_answer_to_each_key(recipe):
    error = error_of(source=recipe(VERL_ON))
    assert "3 mistakes" in str(error)
    for key, remedy in (("enable", "global_profiler.tool"), ("data_dir", "save_path"), ("steps", "global_profiler.steps")):
        assert any(f"{SECTION}.{key}: " in line and remedy in line for line in str(error).splitlines())


def test_the_example_without_those_keys_runs(recipe, written):
    tree = yaml.safe_load(VERL_ON)
    block = tree["global_profiler"]["global_tool_config"]["precision_debugger"]
    for key in ("enable", "data_dir", "steps", "config_path"):
        del block[key]
    loaded = load(f"{ACTOR}.enable=true", f"{ACTOR}.ranks=[0]", written(FULL), source=recipe(yaml.safe_dump(tree)))
    assert settings(loaded).backend == "msprobe"


def test_the_sentinel_is_off_by_default():
    assert not load().config.trainer.nan_sentinel
    assert load("trainer.nan_sentinel=true").config.trainer.nan_sentinel


def test_the_level_is_said_in_one_place(written):
    error = error_of(*ON, f"{SECTION}.backend=msprobe", f"{SECTION}.level=L0", written({"level": "L1"}))
    assert error.field == f"{SECTION}.level" and "Remove one of the two" in str(error)
