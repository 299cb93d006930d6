"""The profiler's keys: who follows whom, the rules between them, the guides' examples and their old keys."""

import pytest
import yaml
from config_cases import error_of, load, migrated, notices

from pellucid.config import load_config
from pellucid.config.validate.profiling import collecting_roles
from pellucid.observe.captures import controller_request, rank_request

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout"))
RANKS = ["trainer.placement=ray", "trainer.n_gpus_per_node=2"]
KL = "actor_rollout_ref.actor.use_kl_loss=true"
GAE = "algorithm.adv_estimator=gae"
ON = ["global_profiler.tool=torch", "global_profiler.steps=[1]", f"{ACTOR}.enable=true", f"{ACTOR}.ranks=[0]"]
CRITIC = [GAE, "critic.profiler.enable=true", "critic.profiler.ranks=[0]"]

NSIGHT_OFF = """
trainer:
    profile_steps: null # disable profile
"""
NSIGHT_END_TO_END = """
trainer:
    profile_steps: [1, 2, 5]  # Profile steps 1, 2, and 5

actor_rollout_ref:
    actor:
        profile_discrete: False
        profile_ranks: [0, 1]  # Only profile ranks 0 and 1 for actor
    rollout:
        profile_discrete: False
        profile_ranks: null    # Profile all ranks for rollout
    ref:
        profile_discrete: False  # Disable profiling for ref policy
critic:
    profile_discrete: False
    profile_ranks: [0]      # Only profile rank 0 for critic
"""
NSIGHT_DISCRETE = """
trainer:
    profile_steps: [1, 2, 5]  # Profile steps 1, 2, and 5

actor_rollout_ref:
    actor:
        profile_discrete: True
        profile_ranks: [0, 1]  # Only profile ranks 0 and 1 for actor
    rollout:
        profile_discrete: True
        profile_ranks: null    # Profile all ranks for rollout
    ref:
        profile_discrete: False  # Disable profiling for ref policy
critic:
    profile_discrete: True
    profile_ranks: [0]      # Only profile rank 0 for critic
"""
ASCEND_OFF = """
global_profiler:
   steps: null # disable profile
"""
ASCEND_END_TO_END = """
global_profiler:
   steps: [1, 2, 5]
   save_path: ./outputs/profile
actor_rollout_ref:
   actor:  # Set actor role profiler collection configuration parameters
      profiler:
         enable: True
         all_ranks: True
         tool_config:
            npu:
               discrete: False
               contents: [npu, cpu]  # Control collection list, default cpu, npu, can configure memory, shapes, module, etc.
  # rollout & ref follow actor settings
"""
ASCEND_DISCRETE = """
global_profiler:
   steps: [1, 2, 5]
   save_path: ./outputs/profile
actor_rollout_ref:
   actor:
      profiler:
         enable: True  # Set to True to profile training
         all_ranks: False
         ranks: [0]  # Global Rank 0
         tool_config:
            npu:
               discrete: True
               contents: [npu, cpu]
   rollout:
      profiler:
         enable: True  # Set to True to profile inference
         all_ranks: False
         ranks: [0]  # In Agent Loop mode, this is the Replica Rank (e.g., 0-th instance)
         tool_config:
            npu:
               discrete: True  # Must be enabled in Agent Loop mode
   # ref follow actor settings
"""
EXAMPLES = {
    name: text for name, text in list(globals().items()) if name.startswith(("NSIGHT_", "ASCEND_")) and name.isupper()
}


@pytest.fixture
def written(tmp_path):
    """Write YAML text to a file."""

    def write(text, name="example.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def asked(config):
    """Return role → (tool, ranks or "all", discrete) of the roles that are captured."""
    blocks = {role.name: role.block for role in collecting_roles(config)}
    return {role: (b.tool, "all" if b.all_ranks else b.ranks, b.discrete) for role, b in blocks.items()}


@pytest.mark.parametrize(
    ("name", "overrides", "steps", "expected"),
    [
        ("NSIGHT_OFF", [], None, {}),
        ("NSIGHT_END_TO_END", [], [1, 2, 5], {"actor": ("nsys", [0, 1], False)}),
        (
            "NSIGHT_END_TO_END",
            [GAE, KL],
            [1, 2, 5],
            {"actor": ("nsys", [0, 1], False), "critic": ("nsys", [0], False)},
        ),
        ("NSIGHT_DISCRETE", [GAE], [1, 2, 5], {"actor": ("nsys", [0, 1], True), "critic": ("nsys", [0], True)}),
        ("ASCEND_OFF", [], None, {}),
        (
            "ASCEND_END_TO_END",
            [KL],
            [1, 2, 5],
            dict.fromkeys(("actor", "ref", "rollout"), ("npu", "all", False)),
        ),
        (
            "ASCEND_DISCRETE",
            [KL],
            [1, 2, 5],
            dict.fromkeys(("actor", "ref", "rollout"), ("npu", [0], True)),
        ),
    ],
)
def test_the_examples_of_the_guides_load_as_written(written, name, overrides, steps, expected):
    loaded = load(*RANKS, *overrides, source=written(EXAMPLES[name]))
    assert loaded.config.global_profiler.steps == steps
    assert asked(loaded.config) == expected
    again = load_config(written(loaded.yaml, "resolved.yaml"), [])
    assert again.config == loaded.config
    assert again.yaml == loaded.yaml


@pytest.mark.parametrize("name", ["NSIGHT_OFF", "NSIGHT_END_TO_END", "NSIGHT_DISCRETE"])
@pytest.mark.parametrize("overrides", [[], [GAE, KL]])
def test_an_old_file_and_its_migration_mean_the_same(written, name, overrides):
    settings = yaml.safe_load(load(*RANKS, *overrides).yaml)["algorithm"]["adv_estimator"]
    text = EXAMPLES[name] + f"algorithm: {{adv_estimator: {settings}}}\n"
    if KL in overrides:
        text = text.replace("    actor:\n", "    actor:\n        use_kl_loss: true\n")
    old = written(text)
    new, changes = migrated(old)
    assert "profile_" not in new
    assert changes
    assert load(*RANKS, source=written(new, "new.yaml")).config == load(*RANKS, source=old).config
    assert migrated(written(new, "new.yaml")) == (new, [])


def test_old_keys_are_said_with_the_new_yaml_and_what_is_not_as_it_looks(written):
    said = load(*RANKS, source=written(NSIGHT_DISCRETE)).notices
    head, _, text = said[0].partition(" are read as\n")
    assert head.startswith("trainer.profile_steps, actor_rollout_ref.actor.profile_discrete")
    shown = yaml.safe_load(text.partition("profile_ranks of")[0])
    assert shown["global_profiler"] == {"tool": "nsys", "steps": [1, 2, 5]}
    assert shown["actor_rollout_ref"]["actor"]["profiler"] == {
        "enable": True,
        "ranks": [0, 1],
        "tool_config": {"nsys": {"discrete": True}},
    }
    assert shown["actor_rollout_ref"]["ref"]["profiler"] == {"enable": False}
    text = "\n".join(said)
    assert "profile_ranks of null or [] is no ranks" in text
    assert "PROFILING COLLECTS NOTHING of critic.profiler: adv_estimator: grpo has no critic" in text


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("trainer: {profile_steps: [1]}", {"global_profiler": {"tool": "nsys", "steps": [1]}}),
        (
            "global_profiler: {tool: torch}\ntrainer: {profile_steps: [1]}\n"
            "actor_rollout_ref: {actor: {profile_ranks_all: true, profile_discrete: true}}",
            {
                "global_profiler": {"tool": "torch", "steps": [1]},
                "actor_rollout_ref": {
                    "actor": {
                        "profiler": {
                            "enable": True,
                            "all_ranks": True,
                            "tool_config": {"torch": {"discrete": True}},
                        }
                    },
                    "ref": {"profiler": {"enable": False}},
                    "rollout": {"profiler": {"enable": False}},
                },
            },
        ),
        (
            "reward_model: {enable: true}\nactor_rollout_ref: {rm: {profile_ranks: [0]}}",
            {"reward_model": {"enable": True, "profiler": {"enable": True, "ranks": [0]}}},
        ),
        (
            "algorithm: {adv_estimator: gae}\nactor_rollout_ref: {critic: {profile_ranks_all: true}}",
            {"algorithm": {"adv_estimator": "gae"}, "critic": {"profiler": {"enable": True, "all_ranks": True}}},
        ),
        ("critic: {profile_ranks: [], profile_discrete: false}", {}),
    ],
)
def test_old_keys_by_role(written, text, new):
    new_text, changes = migrated(written(text))
    assert yaml.safe_load(new_text) == new
    assert len([line for line in changes if "→" in line]) == 1


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("critic: {profile_ranks: [0]}", "critic"),
        ("actor_rollout_ref: {ref: {profile_ranks: [0]}}", "actor_rollout_ref.ref"),
        ("reward_model: {profile_ranks: [0]}", "reward_model"),
    ],
)
def test_migrating_keeps_the_keys_of_a_role_that_the_fragment_does_not_show(written, text, section):
    """Whether a run has the role, another file may say; a run of the fragment alone says that nothing is captured."""
    new, changes = migrated(written(text))
    block = yaml.safe_load(new)
    for name in [*section.split("."), "profiler"]:
        block = block[name]
    assert block == {"enable": True, "ranks": [0]}
    assert len(changes) == 1
    steps = ["global_profiler.steps=[1]", "global_profiler.tool=torch"]
    assert any(f"COLLECTS NOTHING of {section}" in line for line in load(*steps, source=written(text)).notices)


def test_the_cpu_is_added_to_what_an_npu_collects_and_said():
    asked = ["global_profiler.steps=[1]", "global_profiler.tool=npu", f"{ACTOR}.enable=true", f"{ACTOR}.all_ranks=true"]
    notices = load(*asked, f"{ACTOR}.tool_config.npu.contents=[npu]").notices
    assert any("npu.contents: cpu is added" in line for line in notices), notices


@pytest.mark.parametrize(("given", "meant"), [("true", "text"), ("false", "off"), ("db", "db"), ("text", "text")])
def test_the_analysis_of_npu_data_may_go_to_a_database(given, meant):
    assert load(f"{ACTOR}.tool_config.npu.analysis={given}").config.profilers["actor"].tool_config.npu.analysis == meant


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (
            NSIGHT_DISCRETE.replace(
                "        profile_discrete: True\n        profile_ranks: [0, 1]", "        profile_ranks: [0]"
            ),
            "critic.profiler.tool_config.nsys.discrete",
        ),
        ("actor_rollout_ref: {model: {profile_ranks: [0]}}", "actor_rollout_ref.model.profile_ranks"),
        ("trainer: {profile_steps: [1]}\nglobal_profiler: {steps: [2]}", "global_profiler.steps"),
        ("trainer: {profile_steps: [0]}", "global_profiler.steps[0]"),
        ("trainer: {profile_steps: '${no.such}'}", "trainer.profile_steps"),
    ],
)
def test_mistakes_in_old_keys(written, text, field):
    assert error_of(GAE, source=written(text)).field == field


def test_ref_and_rollout_follow_the_actor_but_for_what_they_set():
    profilers = load(
        *(*ON, KL, *RANKS),
        f"{ACTOR}.save_path=here",
        f"{ACTOR}.tool_config.torch={{discrete: true, contents: [cpu, shapes]}}",
        f"{ROLLOUT}.all_ranks=true",
        f"{REF}.enable=false",
        f"{REF}.tool_config.torch.contents=[stack]",
    ).config.profilers
    assert profilers["rollout"].tool_config == profilers["actor"].tool_config
    assert (profilers["rollout"].ranks, profilers["rollout"].all_ranks) == ([], True)
    assert (profilers["rollout"].enable, profilers["rollout"].save_path) == (True, "here")
    assert (profilers["ref"].enable, profilers["ref"].ranks) == (False, [0])
    assert (profilers["ref"].tool_config.torch.contents, profilers["ref"].discrete) == (["stack"], True)
    assert (profilers["critic"].enable, profilers["critic"].save_path) == (False, None)


def test_a_null_follows_as_well():
    profilers = load(*ON, f"{ROLLOUT}=null", f"{REF}.tool=null").config.profilers
    assert profilers["rollout"] == profilers["ref"] == profilers["actor"]


def test_sections_may_be_null_and_null_follows_the_global_keys():
    config = load("global_profiler=null", f"{ACTOR}=null", "critic.profiler=null").config
    assert config == load().config
    config = load(*ON, "global_profiler.save_path=p", f"{ACTOR}.save_path=null", f"{ACTOR}.tool=null").config
    assert (config.profilers["actor"].save_path, config.profilers["actor"].tool) == ("p", "torch")


def test_a_schedule_is_followed_as_a_whole():
    profilers = load(
        *ON,
        KL,
        f"{ACTOR}.schedule={{skip_first: 1, warmup: 2, stages: [actor_compute_log_prob, ref_compute_log_prob]}}",
        f"{ROLLOUT}.schedule={{unit: decode_step, stages: [rollout_generate]}}",
    ).config.profilers
    assert profilers["ref"] == profilers["actor"]
    assert profilers["rollout"].schedule.skip_first == 0
    assert profilers["actor"].captures_stages


def test_the_specs_schedule_loads_and_reloads(written):
    stages = "[actor_compute_log_prob, ref_compute_log_prob, actor_update]"
    loaded = load(*ON, KL, f"{ACTOR}.schedule.stages={stages}")
    again = load_config(written(loaded.yaml), [])
    assert again.config == loaded.config


def test_options_of_nsys_keep_their_types():
    key = "global_profiler.global_tool_config.nsys.worker_nsight_options"
    options = load(f"++{key}.gpu-metrics-devices=all", f"++{key}.sample=false", f"++{key}.delay=3").config
    options = options.global_profiler.global_tool_config.nsys.worker_nsight_options
    assert options["capture-range"] == "cudaProfilerApi"
    assert (options["gpu-metrics-devices"], options["sample"], options["delay"]) == ("all", False, 3)
    assert options["capture-range-end"] is None


def test_a_tool_that_nobody_chose_is_the_one_with_settings():
    steps = ["global_profiler.steps=[1]", f"{ACTOR}.enable=true", f"{ACTOR}.ranks=[0]"]
    loaded = load(*steps, f"{ACTOR}.tool_config.torch.contents=[cpu]")
    assert loaded.config.global_profiler.tool == "torch"
    assert loaded.config.profilers["rollout"].tool == "torch"
    assert any("global_profiler.tool: torch" in line for line in loaded.notices)
    own = load(*steps, f"{ACTOR}.tool=nsys", f"{ACTOR}.tool_config.torch.contents=[cpu]").config
    assert own.global_profiler.tool is None
    several = error_of(*steps, f"{ACTOR}.tool_config={{torch: {{}}, npu: {{}}}}")
    assert several.field == "global_profiler.tool"
    assert "torch, torch_memory, nsys, npu" in several.remedy
    alone = error_of("global_profiler.steps=[1]", "global_profiler.controller=true")
    assert alone.field == "global_profiler.controller" and "Set global_profiler.tool: torch" in alone.remedy


MISTAKES = [
    ([f"{ACTOR}.ranks=[0,1]"], f"{ACTOR}.ranks", "no rank 1 among 0 to 0"),
    ([*RANKS, f"{ACTOR}.ranks=[0,2]"], f"{ACTOR}.ranks", "no rank 2 among 0 to 1"),
    (
        [*RANKS, f"{ACTOR}.tool_config.torch.discrete=true", f"{ROLLOUT}.ranks=[5]"],
        f"{ROLLOUT}.ranks",
        "no rank 5 among 0 to 1",
    ),
    (
        [*CRITIC, "trainer.placement=ray", "trainer.resource_pools={critic: 2}", "critic.profiler.ranks=[2]"],
        "critic.profiler.ranks",
        "no rank 2 among 0 to 1",
    ),
    ([f"{ACTOR}.all_ranks=true"], f"{ACTOR}.ranks", "all_ranks"),
    (
        [*CRITIC, "critic.profiler.tool_config.torch.discrete=true", f"{ROLLOUT}.enable=false"],
        "critic.profiler.tool_config.torch.discrete",
        "stages are captured of critic, whole steps of actor",
    ),
    (
        [*CRITIC, KL, "critic.profiler.tool_config.torch.discrete=true"],
        "critic.profiler.tool_config.torch.discrete",
        "whole steps of actor and ref and rollout",
    ),
    (
        [*CRITIC, "critic.profiler.schedule.stages=[critic_update]"],
        "critic.profiler.schedule.stages",
        "all roles must agree",
    ),
    (
        [*CRITIC, f"{ACTOR}.tool_config.torch.discrete=true", "critic.profiler.tool=torch_memory"],
        "critic.profiler.tool",
        "whole steps",
    ),
    ([f"{ACTOR}.enable=false", f"{ROLLOUT}.enable=true"], f"{ROLLOUT}.tool_config.torch.discrete", "discrete"),
    ([*RANKS, f"{ROLLOUT}.ranks=[1]"], f"{ROLLOUT}.tool_config.torch.discrete", "whole steps only by the actor's"),
    ([*CRITIC, "critic.profiler.tool=nsys"], "critic.profiler.tool", "process they share"),
    ([*CRITIC, "critic.profiler.save_path=b"], "critic.profiler.save_path", "process they share"),
    ([*CRITIC, "critic.profiler.tool_config.torch.contents=[stack]"], "critic.profiler.tool_config.torch", "share"),
    ([f"{ACTOR}.schedule.stages=[critic_update]"], f"{ACTOR}.schedule.stages", "a stage of critic"),
    ([*CRITIC, "critic.profiler.schedule.stages=[actor_update]"], "critic.profiler.schedule.stages", "of actor"),
    ([KL, f"{REF}.schedule.stages=[actor_update]"], f"{REF}.schedule.stages", "not of ref"),
    (
        [f"{ACTOR}.schedule={{unit: mini_batch, stages: [actor_compute_log_prob]}}"],
        f"{ACTOR}.schedule.unit",
        "made of micro_batch units",
    ),
    ([f"{ACTOR}.schedule.stages=[rollout_generate]"], f"{ACTOR}.schedule.unit", "decode_step"),
    ([f"{ACTOR}.schedule.unit=mini_batch"], f"{ACTOR}.schedule.unit", "stages is []"),
    ([f"{ACTOR}.schedule.skip_first=2"], f"{ACTOR}.schedule.skip_first", "stages is []"),
    ([f"{ACTOR}.schedule.stages=[actor_updat]"], f"{ACTOR}.schedule.stages[0]", "actor_update"),
    ([f"{ACTOR}.tool_config.torch={{step_start: 2, step_end: 2}}"], f"{ACTOR}.tool_config.torch.step_end", "no mini"),
    (
        [f"{ACTOR}.tool_config.torch.step_end=2", f"{ACTOR}.schedule.stages=[actor_update]"],
        f"{ACTOR}.tool_config.torch.step_end",
        "schedule.stages say what",
    ),
    (
        [
            *("reward_model={enable: true, model: {path: r}}", "reward_model.profiler={enable: true, ranks: [0]}"),
            *("reward_model.profiler.tool_config.torch={step_start: 1}", f"{ACTOR}.tool_config.torch.discrete=true"),
        ],
        "reward_model.profiler.tool_config.torch.step_start",
        "of an update",
    ),
    (
        ["global_profiler.profile_continuous_steps=true", f"{ACTOR}.tool_config.torch.discrete=true"],
        "global_profiler.profile_continuous_steps",
        "no effect",
    ),
    ([f"{ACTOR}.rank=[0]"], f"{ACTOR}.rank", "Did you mean 'actor_rollout_ref.actor.profiler.ranks'?"),
    ([f"{ROLLOUT}.tool_config.npu.level=level3"], f"{ROLLOUT}.tool_config.npu.level", "level2"),
    (["global_profiler.steps=[0]"], "global_profiler.steps[0]", "≥ 1"),
    (["global_profiler.tool=nsight"], "global_profiler.tool", "nsys"),
    ([f"{ACTOR}.tool_config.npu.level=level3"], f"{ACTOR}.tool_config.npu.level", "level2"),
]


@pytest.mark.parametrize(("overrides", "field", "words"), MISTAKES, ids=[f"{i}-{m[1]}" for i, m in enumerate(MISTAKES)])
def test_a_mistake_is_named_by_its_key_with_reason_and_remedy(overrides, field, words):
    error = error_of(*ON, *overrides)
    assert error.field == field, str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.ranks=[0,7]"],
        ["critic.profiler={enable: true, ranks: [0]}"],
        [f"{ROLLOUT}.all_ranks=true"],
    ],
)
def test_rules_rest_while_no_step_is_profiled(overrides):
    assert "these wait: " in notices(*ON, "global_profiler.steps=null", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [KL, "actor_rollout_ref.model.lora_rank=4"],
        [f"{ACTOR}.tool_config.torch={{step_start: 1, step_end: 2}}"],
        [f"{ACTOR}.tool_config.torch.discrete=true", f"{ROLLOUT}.tool_config.torch.contents=[stack]"],
        [*CRITIC, "global_profiler.profile_continuous_steps=true"],
        [*CRITIC, f"{ACTOR}.schedule.stages=[actor_update]", "critic.profiler.tool_config.torch.discrete=true"],
        [*CRITIC, "trainer.placement=ray", "trainer.resource_pools={critic: 1}", "critic.profiler.tool=nsys"],
        ["global_profiler.tool=my_tools.py:MyTool"],
    ],
)
def test_what_goes_together_is_accepted(overrides):
    assert "PROFILING" not in notices(*ON, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{ACTOR}.ranks=[]"], [f"COLLECTS NOTHING of {ACTOR}, {ROLLOUT}", "ranks is []", "all_ranks: true"]),
        (["critic.profiler={enable: true, ranks: [0]}"], ["COLLECTS NOTHING of critic.profiler: adv_estimator: grpo has"]),
        (["reward_model.profiler={enable: true, ranks: [0]}"], ["NOTHING of reward_model.profiler: reward_model.enable"]),
        ([f"{REF}={{enable: true, all_ranks: true}}"], [f"NOTHING of {REF}: no KL term"]),
        ([f"{ACTOR}.enable=false"], ["COLLECTS NOTHING: global_profiler.steps is [1], but no role is profiled"]),
        (["global_profiler.steps=null"], ["steps is null", f"{ACTOR}.enable", "global_profiler.tool"]),
        (["global_profiler.steps=[1,9]", "trainer.total_training_steps=4"], ["9 will not be profiled", "step 4"]),
        ([f"{ACTOR}.tool_config.npu.level=level1"], ["not used here, without effect", f"{ACTOR}.tool_config.npu.level"]),
        (
            ["global_profiler.global_tool_config.nsys.discrete=true"],
            ["without effect: global_profiler.global_tool_config.nsys.discrete"],
        ),
        (
            [f"{ACTOR}.schedule.stages=[actor_update, ref_compute_log_prob]"],
            ["ref_compute_log_prob is not captured: the run has no ref"],
        ),
        (
            [f"{ACTOR}.schedule.stages=[actor_update, ref_compute_log_prob]", KL, f"{REF}.enable=false"],
            ["ref_compute_log_prob is not captured", "does not ask"],
        ),
    ],
)
def test_what_collects_nothing_is_said_before_the_run(overrides, words):
    text = notices(*ON, *overrides)
    for word in words:
        assert word in text


def test_a_switched_off_profiler_says_nothing():
    assert load().notices == []
    assert load("global_profiler.save_path=outputs/profile", "global_profiler.steps=null").notices == []


VLLM = "actor_rollout_ref.rollout.name=vllm"
WINDOW = ("schedule.stages=[rollout_generate]", "schedule.unit=decode_step")


@pytest.mark.parametrize(
    ("tool", "profiler", "field"),
    [
        ("torch", ["all_ranks=true"], "tool_config.torch.discrete"),
        ("nsys", ["all_ranks=true"], "tool"),
        ("torch", ["ranks=[1]", "tool_config.torch.discrete=true"], "ranks"),
        ("torch", ["ranks=[0]", *WINDOW, "schedule.repeat=2"], "schedule.repeat"),
        ("torch", ["ranks=[0]", *WINDOW, "schedule.warmup=1"], "schedule.warmup"),
    ],
)
def test_what_cannot_be_captured_of_engines_beside_the_trainer_is_refused(tool, profiler, field):
    keys = (f"{ROLLOUT}.{key}" for key in ("enable=true", *profiler))
    error = error_of(VLLM, f"global_profiler.tool={tool}", "global_profiler.steps=[1]", *keys)
    assert f"{ROLLOUT}.{field}" in str(error)


def test_a_capture_of_sglang_is_refused():
    engine, keys = "actor_rollout_ref.rollout.name=sglang", (f"{ROLLOUT}.enable=true", f"{ROLLOUT}.all_ranks=true")
    error = error_of(engine, "global_profiler.tool=torch", "global_profiler.steps=[1]", *keys)
    assert f"{ROLLOUT}.enable" in str(error) and "Set it to false" in str(error)


def test_captures_of_engines_beside_the_trainer_are_asked_of_the_controller(tmp_path):
    keys = ("enable=true", "all_ranks=true", *WINDOW, "schedule.skip_first=2", "schedule.active=3")
    changes = [f"{ROLLOUT}.{key}" for key in keys] + ["global_profiler.tool=torch", "global_profiler.steps=[1]"]
    config = load(VLLM, *changes).config
    request = controller_request(config, tmp_path, ["actor", "rollout"], "cpu")
    assert request is not None and request.whole_step is None
    assert request.roles["rollout"].replicas == (0,)
    assert rank_request(config, tmp_path, pool="policy", roles=["rollout"], rank=0, num_ranks=1, device="cpu") is None
