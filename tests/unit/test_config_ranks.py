"""Config of runs over several ranks: what can be placed, verl's spellings, and the plan's numbers per rank."""

import dataclasses
import re
from functools import cache

import pytest
import yaml
from config_cases import migrated
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import Loaded, ModelFacts, Plan, RunConfig, build_plan, load_config
from pellucid.config.plan import plan_rows
from pellucid.config.schema.sharding import FsdpConfig
from pellucid.errors import UserError

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
FSDP, MODEL = f"{ACTOR}.fsdp_config", "actor_rollout_ref.model"
BASE = [
    "data.train_files=x.jsonl",
    "data.train_batch_size=24",
    f"{MODEL}.path=builtin",
    f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ROLLOUT}.n=4",
]
RAY = ["trainer.placement=ray"]
CRITIC = ["algorithm.adv_estimator=gae"]
KL = [f"{ACTOR}.use_kl_loss=true"]
FIXED = [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
FACTS = ModelFacts(1000, 8, 16, 2, 4, 2, 4, 50)


@cache
def load(*overrides: str) -> Loaded[RunConfig]:
    return load_config(None, [*BASE, *overrides])


def ranks(per_machine: int, machines: int = 1) -> list[str]:
    joined = ["trainer.ray_address=auto"] if machines > 1 else []
    return [*RAY, *joined, f"trainer.n_gpus_per_node={per_machine}", f"trainer.nnodes={machines}"]


def servers(*addresses: str) -> str:
    return f"{ROLLOUT}.server_addresses=[{','.join(repr(address) for address in addresses)}]"


def pools(**sizes: int) -> str:
    return "trainer.resource_pools={" + ",".join(f"{role}: {size}" for role, size in sizes.items()) + "}"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=3"], "trainer.n_gpus_per_node", ["= 6 ranks", "placement: ray"]),
        (["trainer.nnodes=3"], "trainer.nnodes", ["1 (n_gpus_per_node) × 3 (nnodes) = 3 ranks", "placement: local"]),
        (["trainer.ray_address=auto"], "trainer.ray_address", ["no effect with placement: local", "placement: ray"]),
        (["trainer.schedule=async", *RAY], f"{ROLLOUT}.mode", ["is colocated", "devices of their own", "separate"]),
        (["trainer.schedule=async", "trainer.nan_sentinel=true"], "trainer.nan_sentinel", ["samples while it trains"]),
        (["trainer.schedule=one_step_off", f"{ROLLOUT}.simulate_mismatch.noise=0.1"],
            f"{ROLLOUT}.simulate_mismatch.noise", ["stale weights is real there"]),
        (["trainer.schedule=one_step_off", "reward_model.enable=true", "reward_model.model.path=x"], "reward_model.enable",
            ["between the actor's passes"]),
        (["trainer.schedule=async", "algorithm.adv_estimator=remax"], "algorithm.adv_estimator", ["greedy answer", "one_step_off"]),
        (["trainer.max_staleness=2"], "trainer.max_staleness", ["2 has no effect with schedule: sync"]),
        ([f"{ROLLOUT}.update=abort"], f"{ROLLOUT}.update", ["abort has no effect with schedule: sync"]),
        (["trainer.max_restarts=2"], "trainer.max_restarts", ["2 has no effect with placement: local"]),
        ([pools(ref=1)], "trainer.resource_pools", ["no effect with placement: local"]),
        (["trainer.balance_batch=false"], "trainer.balance_batch", ["false has no effect with placement: local"]),
        ([*RAY, "trainer.ray_address=ray://head:10001"], "trainer.ray_address", ["'ray://head:10001'", "host:port"]),
        ([*RAY, "trainer.ray_address=head"], "trainer.ray_address", ["'head' is no address"]),
        ([*RAY, "trainer.nnodes=2"], "trainer.nnodes", ["2 machines", "this machine alone", "trainer.ray_address"]),
        (["trainer.stall_timeout_s=0"], "trainer.stall_timeout_s", ["> 0"]),
        (["trainer.max_restarts=-1"], "trainer.max_restarts", ["≥ 0"]),
        ([f"{FSDP}.reduce_dtype=fp16"], f"{FSDP}.reduce_dtype", ["'fp16'", "float32 | bfloat16"]),
        (
            [*RAY, f"{ROLLOUT}.simulate_mismatch.noise=0.1"],
            f"{ROLLOUT}.simulate_mismatch.noise",
            ["only where one process samples", "placement: local"],
        ),
    ],
)
def test_what_cannot_be_placed_is_named_with_the_remedy(overrides, field, words):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([*ranks(3, 2), f"{FSDP}.fsdp_size=4"], f"{FSDP}.fsdp_size", ["over 4 ranks each", "6 ranks in all", "-1"]),
        ([*ranks(2), f"{FSDP}.fsdp_size=4"], f"{FSDP}.fsdp_size", ["4 ranks each", "2 ranks in all"]),
        ([f"{FSDP}.fsdp_size=8"], f"{FSDP}.fsdp_size", ["8 ranks each"]),
        ([f"{FSDP}.fsdp_size=0"], f"{FSDP}.fsdp_size", ["0 ranks each"]),
        ([f"{FSDP}.fsdp_size=-2"], f"{FSDP}.fsdp_size", ["≥ -1"]),
        (
            [*ranks(4), *KL, f"{REF}.fsdp_config.fsdp_size=3"],
            f"{REF}.fsdp_config.fsdp_size",
            ["3 ranks each", "divisor of 4"],
        ),
        (
            [*ranks(4), *CRITIC, pools(critic=3), "critic.fsdp_config.fsdp_size=2"],
            "critic.fsdp_config.fsdp_size",
            ["2 ranks each", "3 ranks in all"],
        ),
    ],
)
def test_copies_that_do_not_fill_the_ranks(overrides, field, words):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


def test_a_size_the_reference_follows_is_reported_once():
    with pytest.raises(UserError) as caught:
        load(*ranks(6), *KL, f"{FSDP}.fsdp_size=4")
    assert caught.value.field == f"{FSDP}.fsdp_size"


@pytest.mark.parametrize(
    ("overrides", "role", "words"),
    [
        ([pools(crtic=1)], "crtic", ["Did you mean 'critic'?"]),
        ([pools(zzz=1)], "zzz", ["ref | critic | reward_model"]),
        ([pools(rollout=2)], "rollout", ["is not one of"]),
        ([pools(critic=0), *CRITIC], "critic", ["0 is out of range", "≥ 1"]),
        ([pools(critic=1)], "critic", ["grpo has no critic"]),
        ([pools(ref=1)], "ref", ["only with a KL term"]),
        ([pools(reward_model=1)], "reward_model", ["reward_model.enable is false"]),
        ([pools(ref=1), *KL, f"{MODEL}.lora_rank=4"], "ref", ["without LoRA"]),
        ([pools(ref=1), *KL, f"{ACTOR}.kl_loss_type=full"], "ref", ["instead of full"]),
        (
            [pools(ref=1), *KL, "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"],
            "ref",
            ["instead of full"],
        ),
    ],
)
def test_roles_that_cannot_have_ranks_of_their_own(overrides, role, words):
    with pytest.raises(UserError) as caught:
        load(*ranks(2), *overrides)
    assert caught.value.field == f"trainer.resource_pools.{role}"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            [*FIXED, *ranks(3)],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            ["8 prompts × 4 samples = 32 samples", "over 3 ranks", "a multiple of 3 prompts", "use_dynamic_bsz: true"],
        ),
        (
            [*FIXED, f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", *ranks(4)],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            ["over 4 ranks into micro-batches of 5: 32 = 1 × 20 + 12"],
        ),
        (
            ranks(40),
            f"{ACTOR}.ppo_mini_batch_size",
            ["32 samples, and 40 ranks need at least one each", "Set it to at least 10"],
        ),
        (
            [*FIXED, *ranks(2), *CRITIC, pools(critic=3)],
            "critic.ppo_micro_batch_size_per_gpu",
            ["over 3 ranks", "a multiple of 3 prompts"],
        ),
        (
            [*ranks(2), *CRITIC, pools(critic=64)],
            "critic.ppo_mini_batch_size",
            ["64 ranks need at least one each", "Set it to at least 16"],
        ),
    ],
)
def test_mini_batches_that_do_not_come_out_on_the_ranks(overrides, field, words):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("count", "micro"), [(3, 1), (5, 2), (6, 2), (6, 1), (5, 8)])
def test_what_the_remedy_names_loads(count, micro):
    fixed = [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}"]
    with pytest.raises(UserError, match="does not split") as caught:
        load(*fixed, *ranks(count))
    multiple = re.search(r"multiple of (\d+) prompts", caught.value.remedy)
    assert multiple is not None
    step = int(multiple[1])
    load(*fixed, *ranks(count), f"data.train_batch_size={step}", f"{ACTOR}.ppo_mini_batch_size={step}")


VLLM, SEPARATE = [f"{ROLLOUT}.name=vllm"], [f"{ROLLOUT}.mode=separate"]
SIZE = f"{ROLLOUT}.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([*RAY, *SEPARATE], f"{ROLLOUT}.n_gpus_per_node", ["mode: separate needs devices"]),
        (SEPARATE, f"{ROLLOUT}.mode", ["placement: local", "Set trainer.placement: ray"]),
        ([*ranks(2), f"{ROLLOUT}.n_gpus_per_node=2"], f"{ROLLOUT}.n_gpus_per_node", ["no effect with mode: colocated"]),
        ([*ranks(2, 2), f"{ROLLOUT}.nnodes=2"], f"{ROLLOUT}.nnodes", ["Set actor_rollout_ref.rollout.mode: separate"]),
        ([*ranks(2), f"{SIZE}=2"], SIZE, ["no effect with name: native"]),
        ([*ranks(2), "actor_rollout_ref.rollout.weight_transport=files"], f"{ROLLOUT}.weight_transport", ["no effect"]),
        ([*ranks(2), *VLLM, f"{ROLLOUT}.weight_transport=cuda_ipc"], f"{ROLLOUT}.weight_transport", ["here are 2 ranks"]),
        ([*ranks(3), *VLLM, f"{SIZE}=2"], SIZE, ["(trainer.n_gpus_per_node): 3 = 1 × 2 + 1", "a divisor of 3"]),
        (
            [*RAY, *VLLM, *SEPARATE, f"{ROLLOUT}.n_gpus_per_node=6", f"{SIZE}=4"],
            SIZE,
            [f"({ROLLOUT}.n_gpus_per_node): 6 = 1 × 4 + 2"],
        ),
        (
            [*RAY, *VLLM, *SEPARATE, f"{ROLLOUT}.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=2"],
            f"{ROLLOUT}.nnodes",
            ["2 machines", "this machine alone"],
        ),
        ([servers("http://a:1")], f"{ROLLOUT}.server_addresses", ["no effect with name: native"]),
        ([*VLLM, servers("a:8000")], f"{ROLLOUT}.server_addresses", ["'a:8000' is no address", "http://host:port"]),
        ([*VLLM, servers("http://a:1", "http://a:1")], f"{ROLLOUT}.server_addresses", ["http://a:1 is there 2 times"]),
        ([*VLLM, servers("http://a:1"), f"{ROLLOUT}.mode=separate"], f"{ROLLOUT}.mode", ["have devices of their own"]),
    ],
)
def test_engines_that_do_not_come_out_on_their_devices(overrides, field, words):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (VLLM, "1 of vllm on this machine; weights by shared_memory"),
        ([*VLLM, servers("http://[::1]:1")], "1 server of vllm, http://[::1]:1; weights by shared_memory"),
        ([f"{ROLLOUT}.name=sglang", servers("http://[::1]:1")], "1 server of sglang, http://[::1]:1; weights by shared_memory"),
        ([*VLLM, servers("http://a:1", "http://b:1")], "2 servers of vllm, http://a:1, http://b:1; weights by files"),
        (
            [*ranks(2), *VLLM, "trainer.schedule=async", servers("http://127.0.0.1:1")],
            "1 server of vllm, http://127.0.0.1:1; weights by shared_memory",
        ),
        (
            [*ranks(2), *VLLM, "trainer.ray_address=auto", servers("http://127.0.0.1:1")],
            "1 server of vllm, http://127.0.0.1:1; weights by files",
        ),
        (
            [*ranks(4), *VLLM, f"{SIZE}=2"],
            "4 devices of the trainers on 1 machine ÷ 2 each = 2 of vllm; weights by shared_memory",
        ),
        (
            [*ranks(4, 2), "actor_rollout_ref.hybrid_engine=false", "rollout.nnodes=3", "rollout.n_gpus_per_node=8", *VLLM],
            "8 devices of their own on 3 machines ÷ 1 each = 24 of vllm; weights by shared_memory on one machine, else files",
        ),
        (
            [*RAY, f"{ROLLOUT}.mode=standalone", f"{ROLLOUT}.n_gpus_per_node=2", f"{ROLLOUT}.weight_transport=files"],
            "2 devices of their own on 1 machine ÷ 1 each = 2 of native; weights by files",
        ),
    ],
)
def test_the_plan_names_replicas_and_how_weights_reach_them(overrides, line):
    assert dict(plan_rows(build_plan(load(*overrides).config, 48, FACTS)))["replicas"] == line
    assert "replicas" not in dict(plan_rows(build_plan(load(f"{ROLLOUT}.mode=hybrid").config, 48, FACTS)))


@pytest.mark.parametrize(("size", "divisor"), [(3, 1), (8, 2), (4, None)])
def test_a_model_that_does_not_split_over_the_devices_of_a_replica(size, divisor):
    """Of 4 heads and 2 with keys; 4 devices have half a head with keys each, which the engine keeps twice."""
    config = load(*ranks(24), *VLLM, f"{SIZE}={size}").config
    if divisor is None:
        build_plan(config, 48, FACTS)
        return
    with pytest.raises(UserError, match=f"4 attention heads.*not split over {size} devices.*e.g. {divisor}") as caught:
        build_plan(config, 48, FACTS)
    assert caught.value.field == SIZE


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.strategy=fsdp"],
        [*CRITIC, *ranks(2), "critic.strategy=fsdp"],
        [*ranks(4), *FIXED],
        [*ranks(32)],
        [*ranks(3, 2), f"{FSDP}.fsdp_size=3"],
        [*ranks(2), "trainer.ray_address=10.0.0.1:6379", "trainer.balance_batch=false"],
        [*ranks(2), "trainer.max_restarts=2", "trainer.save_freq=5"],
        [*RAY, *CRITIC, pools(critic=2), "trainer.balance_batch=false"],
        [*ranks(2), *KL, *CRITIC, pools(critic=3, ref=1)],
        [*ranks(2), "data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1"],
        ["trainer.stall_timeout_s=null", f"{ACTOR}.checkpoint.async_save=true"],
        [f"{FSDP}.fsdp_size=1", f"{FSDP}.reshard_after_forward=false", f"{FSDP}.reduce_dtype=bf16"],
        [f"{FSDP}.param_offload=true"],
        [*KL, f"{ACTOR}.kl_loss_type=full", f"{REF}.fsdp_config.param_offload=true"],
        ["actor_rollout_ref.hybrid_engine=true"],
    ],
)
def test_what_can_be_placed_loads(overrides):
    notices = [line for line in load(*overrides).notices if "hybrid_engine" not in line]
    assert notices == []


def test_how_many_ranks_a_role_has_and_how_many_hold_one_copy():
    config = load(*ranks(3, 2), *KL, *CRITIC, pools(critic=4), f"{FSDP}.fsdp_size=2").config
    assert config.num_ranks == 6
    assert [config.pool_ranks(role) for role in ("actor", "ref", "critic", "reward_model")] == [6, 6, 4, 6]
    assert [config.copy_ranks(role) for role in ("actor", "ref", "critic", "reward_model")] == [2, 2, 4, 6]


def test_the_reference_follows_the_actor_until_it_is_set():
    overrides = [*ranks(4), *KL, f"{FSDP}.fsdp_size=2", f"{FSDP}.param_offload=true"]
    assert dataclasses.astuple(load(*overrides).config.actor_rollout_ref.ref.fsdp_config) == (2, True, True)
    own = load(*overrides, f"{REF}.fsdp_config.fsdp_size=-1", f"{REF}.fsdp_config.param_offload=false")
    assert dataclasses.astuple(own.config.actor_rollout_ref.ref.fsdp_config) == (-1, False, True)


@pytest.mark.parametrize("overrides", [[], [*KL, f"{MODEL}.lora_rank=4"]])
def test_the_spread_of_a_reference_that_is_no_model_of_its_own_has_no_effect(overrides):
    with pytest.raises(UserError, match=r"true has no effect without a reference model of its own"):
        load(*overrides, f"{REF}.fsdp_config.param_offload=true")


def test_offloading_on_a_cpu_is_said_once_for_the_roles_there_are():
    on = [f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"]
    [line] = load("trainer.device=cpu", *on).notices
    assert line == (
        "On a CPU there is nothing to offload to, so these change nothing: "
        f"{FSDP}.param_offload, {FSDP}.optimizer_offload"
    )
    assert load("trainer.device=cuda", *on).notices == []
    assert load(*on).notices == []


def test_a_restart_without_checkpoints_is_said():
    [line] = load(*ranks(2), "trainer.max_restarts=2").notices
    assert "max_restarts: 2" in line and "save_freq: -1" in line


@pytest.mark.parametrize(
    ("block", "dtype", "reduce_dtype"),
    [
        ("{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}", "bfloat16", "float32"),
        ("{param_dtype: bfloat16, reduce_dtype: bf16}", "bfloat16", "bfloat16"),
        ("{param_dtype: fp32}", "float32", "float32"),
        ("{reduce_dtype: bfloat16, param_dtype: null}", "float32", "bfloat16"),
        ("{buffer_dtype: float32}", "float32", "float32"),
    ],
)
def test_verls_mixed_precision_is_read(block, dtype, reduce_dtype):
    config = load(f"{FSDP}.mixed_precision={block}").config
    assert config.actor_rollout_ref.model.dtype == config.actor_rollout_ref.rollout.dtype == dtype
    assert config.actor_rollout_ref.actor.fsdp_config.reduce_dtype == reduce_dtype


def test_verls_mixed_precision_may_repeat_the_models_format_in_another_spelling():
    loaded = load(f"{FSDP}.mixed_precision={{param_dtype: bf16}}", f"{MODEL}.dtype=bfloat16")
    assert loaded.config.actor_rollout_ref.model.dtype == "bfloat16"
    assert load(f"{FSDP}.mixed_precision={{param_dtype: bfloat16}}", f"{MODEL}.dtype=bf16").config == loaded.config
    assert f"{FSDP}.mixed_precision is read as" in loaded.notices[0]


def test_verls_mixed_precision_of_a_frozen_model_has_no_gradients_to_add_up():
    config = load(f"{REF}.fsdp_config.mixed_precision={{param_dtype: bf16, reduce_dtype: bf16}}", *KL).config
    assert config.actor_rollout_ref.model.dtype == "bfloat16"
    assert config.actor_rollout_ref.actor.fsdp_config.reduce_dtype == "float32"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            [f"{FSDP}.mixed_precision={{param_dtype: bf16}}", f"{MODEL}.dtype=fp32"],
            f"{MODEL}.dtype",
            ["another value", f"{FSDP}.mixed_precision"],
        ),
        (
            [f"{FSDP}.mixed_precision={{param_dtype: bf16}}", "critic.fsdp_config.mixed_precision={param_dtype: fp32}"],
            f"{MODEL}.dtype",
            ["another value", "critic.fsdp_config.mixed_precision"],
        ),
        (
            [f"{FSDP}.mixed_precision={{reduce_dtype: fp32}}", f"{FSDP}.reduce_dtype=bf16"],
            f"{FSDP}.reduce_dtype",
            ["another value"],
        ),
        ([f"{FSDP}.mixed_precision={{param_dtype: fp16}}"], f"{MODEL}.dtype", ["'fp16' is not one of"]),
        ([f"{FSDP}.mixed_precision={{buffer_dtype: bf16}}"], f"{FSDP}.mixed_precision.buffer_dtype", ["float32"]),
        ([f"{FSDP}.mixed_precision={{parm_dtype: bf16}}"], f"{FSDP}.mixed_precision.parm_dtype", ["'param_dtype'"]),
        ([f"{FSDP}.mixed_precision=bf16"], f"{FSDP}.mixed_precision", ["section of keys"]),
        (
            [f"{FSDP}.offload_policy=true", f"{FSDP}.param_offload=false"],
            f"{FSDP}.param_offload",
            ["another value", f"{FSDP}.offload_policy"],
        ),
        ([f"{ACTOR}.strategy=veomni"], f"{ACTOR}.strategy", ["is not one of fsdp | fsdp2 | megatron"]),
    ],
)
def test_what_verl_has_and_this_has_not_stops_the_run(overrides, field, words):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


def test_verls_offload_policy_is_read_for_each_role():
    config = load(f"{FSDP}.offload_policy=true", f"{REF}.fsdp_config.offload_policy=true", *KL).config
    actor, ref = config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config
    assert (actor.param_offload, actor.optimizer_offload, ref.param_offload) == (True, True, True)


def test_verls_blocks_migrate(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text(
        "actor_rollout_ref: {actor: {fsdp_config: {offload_policy: true, mixed_precision: {reduce_dtype: fp32}}}}\n"
    )
    text, changes = migrated(old)
    assert yaml.safe_load(text) == {
        "actor_rollout_ref": {
            "actor": {"fsdp_config": {"param_offload": True, "optimizer_offload": True, "reduce_dtype": "fp32"}}
        },
    }
    assert len(changes) == 2


def plan_of(*overrides: str) -> Plan:
    return build_plan(load(*overrides).config, 240, FACTS)


def test_a_plan_of_one_process_says_nothing_of_ranks():
    rows = dict(plan_rows(plan_of()))
    assert rows["ranks"] == "1 process, placement local, strategy fsdp2"
    assert rows["micro-batches"] == "32 samples per mini-batch in at most 2 micro-batches"
    assert "rank" not in rows["memory (estimate)"] and "copy" not in rows["memory (estimate)"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (RAY, "1 rank on 1 machine, placement ray, strategy fsdp2: one copy of the model"),
        (
            [*ranks(2, 2)],
            "4 ranks on 2 machines, placement ray, strategy fsdp2: one copy of the model",
        ),
        (
            [*ranks(2, 2), f"{FSDP}.fsdp_size=2", f"{ACTOR}.strategy=fsdp"],
            "4 ranks on 2 machines, placement ray, strategy fsdp: 2 copies of the model",
        ),
        (
            [*ranks(2), f"{FSDP}.fsdp_size=1"],
            "2 ranks on 1 machine, placement ray, strategy fsdp2: 2 copies of the model",
        ),
        (
            [*RAY, *KL, *CRITIC, pools(critic=2, ref=1)],
            "1 rank on 1 machine, placement ray, strategy fsdp2: one copy of the model; critic on 2 of its own; ref on 1 of its own",
        ),
    ],
)
def test_the_plan_says_who_holds_what(overrides, text):
    assert dict(plan_rows(plan_of(*overrides)))["ranks"] == text


@pytest.mark.parametrize(
    ("overrides", "count", "text"),
    [
        ([*ranks(4), *FIXED], 4, "32 samples per mini-batch ÷ 4 ranks in 4 micro-batches a rank"),
        (
            [*ranks(3), f"{ACTOR}.ppo_max_token_len_per_gpu=2100"],
            6,
            "32 samples per mini-batch ÷ 3 ranks in at most 6 micro-batches a rank",
        ),
        (
            ranks(32),
            1,
            "32 samples per mini-batch ÷ 32 ranks in at most 1 micro-batch a rank",
        ),
    ],
)
def test_the_plan_counts_a_ranks_micro_batches(overrides, count, text):
    plan = plan_of(*overrides)
    assert plan.micro_batches_per_mini_batch == count
    assert dict(plan_rows(plan))["micro-batches"] == text


def test_memory_is_that_of_one_rank():
    plan = plan_of(*ranks(4), *KL)
    memory = plan.memory
    assert memory is not None
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == (1000, 1000, 2000, 1000)
    assert memory.rollout_copy == 4000
    # A quarter of the 24 prompts × 4 samples, with 2 × (2 layers × 2 heads × 4) float32 numbers a token.
    assert memory.kv_cache == 6 * 4 * 1024 * 2 * 2 * 2 * 4 * 4
    assert memory.total == 9000 + max(memory.kv_cache, memory.activations + memory.logits_chunk)
    text = dict(plan_rows(plan))["memory (estimate)"]
    assert " = weights 1.0 KiB" in text and text.endswith(" a rank") and "rollout copy 3.9 KiB" in text


def test_memory_of_several_copies_and_of_a_rank_that_is_alone():
    several = plan_of(*ranks(4), f"{FSDP}.fsdp_size=2").memory
    alone = plan_of(*RAY).memory
    assert several is not None and alone is not None
    assert (several.weights, several.rollout_copy) == (2000, 4000)
    assert (alone.weights, alone.rollout_copy) == (4000, 0)
    assert alone == plan_of().memory


def test_activations_shrink_with_a_ranks_share_only_below_its_budget():
    def activations(count: int, budget: int) -> int:
        memory = plan_of(*ranks(count), f"{ACTOR}.ppo_max_token_len_per_gpu={budget}").memory
        assert memory is not None
        return memory.activations

    assert activations(1, 2048) == activations(2, 2048)
    assert activations(1, 32768) == 2 * activations(2, 32768)


def test_roles_with_ranks_of_their_own_are_not_in_the_policys_memory():
    together = plan_of(*ranks(2), *KL, *CRITIC)
    apart = plan_of(*ranks(2), *KL, *CRITIC, pools(critic=4, ref=1))
    assert together.memory is not None and apart.memory is not None
    critic, reference = together.memory.critic, together.memory.reference
    assert reference == 2000 and critic == 8 * 1000
    assert (apart.memory.critic, apart.memory.reference) == (0, 0)
    assert apart.pool_bytes == {"critic": critic // 2, "ref": reference * 2}
    assert "critic 3.9 KiB, ref 3.9 KiB on each" in dict(plan_rows(apart))["on own ranks"]
    assert together.pool_bytes == {} and "on own ranks" not in dict(plan_rows(together))


@pytest.mark.parametrize(
    ("overrides", "num_bytes"),
    [
        ([f"{FSDP}.param_offload=true"], 8000),
        ([f"{FSDP}.optimizer_offload=true"], 4000),
        ([f"{FSDP}.param_offload=true", *KL], 8000 + 2000),
        ([f"{FSDP}.optimizer_offload=true", *KL], 4000),
        ([*CRITIC, "critic.fsdp_config.param_offload=true"], 8000),
        ([*CRITIC, "critic.fsdp_config.optimizer_offload=true"], 4000),
        ([*CRITIC, pools(critic=2), "critic.fsdp_config.param_offload=true"], 0),
        ([f"{FSDP}.param_offload=true", "trainer.device=cpu"], 0),
    ],
)
def test_what_is_offloaded_is_not_on_the_device(overrides, num_bytes):
    plan = plan_of(*ranks(2), *overrides)
    memory = plan.memory
    assert memory is not None
    assert memory.offloaded == num_bytes
    assert dataclasses.replace(memory, offloaded=0).total - memory.total == num_bytes
    assert ("kept in CPU memory" in dict(plan_rows(plan))["memory (estimate)"]) == (num_bytes > 0)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 4))
def test_shards_hold_the_whole_model_between_them(per_copy, copies):
    config = load(*RAY).config
    actor = config.actor_rollout_ref.actor
    spread = dataclasses.replace(actor, fsdp_config=FsdpConfig(fsdp_size=per_copy))
    config = dataclasses.replace(
        config,
        actor_rollout_ref=dataclasses.replace(config.actor_rollout_ref, actor=spread),
        trainer=dataclasses.replace(config.trainer, n_gpus_per_node=per_copy, nnodes=copies),
    )
    plan = build_plan(config, 240, FACTS)
    assert plan.memory is not None
    whole = 4 * FACTS.num_parameters
    assert whole <= plan.memory.weights * per_copy < whole + per_copy
